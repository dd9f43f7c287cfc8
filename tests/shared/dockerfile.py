"""The Dockerfile, read as far as the tests need it."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

PROJECT = Path(__file__).resolve().parents[2]
DOCKER = PROJECT / "docker"


@dataclass
class Stage:
    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, keyword: str) -> list[str]:
        return [text for word, text in self.steps if word == keyword]

    def last(self, keyword: str) -> str:
        return self.all(keyword)[-1]

    def command(self, keyword: str) -> list[str]:
        """The JSON array of an ENTRYPOINT, CMD or HEALTHCHECK."""
        return json.loads(re.search(r"\[.*\]", self.last(keyword))[0])


def stages(path: Path = DOCKER / "Dockerfile") -> dict[str, Stage]:
    """By name, with `ARG` defaults filled in."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line.strip()]
    values: dict[str, str] = {}
    found: dict[str, Stage] = {}
    stage = None
    for line in lines:
        word, _, rest = line.strip().partition(" ")
        if word == "ARG" and stage is None:
            name, _, value = rest.partition("=")
            values[name] = value
        elif word == "FROM":
            image, _, name = rest.partition(" AS ")
            base = re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], image)
            stage = found[name] = Stage(name, base)
        else:
            stage.steps.append((word, re.sub(r"\s+", " ", rest)))
    return found
