"""The demo's side of the wire: interactions with one video on the server."""

from __future__ import annotations

from typing import Any

from worldserve.demo_script import HORIZON, Interaction
from worldserve.sequence_client import Reply, SequenceClient

__all__ = ["Session"]


class Session:
    """One video on the server. parameters: sent with every request of this session."""

    def __init__(self, client: Any, prompt: str, **parameters: Any) -> None:
        self._sequence = SequenceClient(client, HORIZON, **parameters)
        self._prompt = prompt

    @property
    def id(self) -> str:
        return self._sequence.id

    def ask(self, interaction: Interaction, end: bool = False, **parameters: Any) -> Reply:
        """InferenceServerException where the server refuses."""
        given = {**interaction.parameters, **parameters}
        if not self._sequence.started:
            given["prompt"] = self._prompt
        return self._sequence.ask(interaction.samples, interaction.frames, end, **given)
