"""One causal stack that encodes the context and predicts under a control, on one KV cache.

Divided space-time attention (TimeSformer; Bertasius et al., 2021): temporal attention per token
position with rotary positions and a band of `window` frames, then spatial attention, then a
feed-forward layer. The control enters as a token of its own frame, so of all keys and values only
those of the present frame depend on the control under which the present is left. The band is the
definition of the model: computing frame by frame and all at once are the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldserve.models.layers import (
    FeedForward,
    SelfAttention,
    attend,
    band_mask,
    in_blocks,
    rotary,
    rotate,
)

__all__ = ["Dynamics", "Group", "LayerCache", "Memory"]

#: keys and values of one layer, each (B * N, h, T, d)
LayerCache = tuple[Tensor, Tensor]
_ROWS = 8  # branches are attended to in blocks of this many rows: one shape, one rounding


class DividedLayer(nn.Module):
    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.window = window
        self.norm_time, self.norm_space, self.norm_ff = (nn.LayerNorm(width) for _ in range(3))
        self.time, self.space = SelfAttention(width, heads), SelfAttention(width, heads)
        self.feed_forward = FeedForward(width)

    def project(self, x: Tensor, table: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """x (B, T, N, D) -> rotated q and k, and v, each (B * N, h, T, d)."""
        B, T, N, D = x.shape
        q, k, v = self.time.project(self.norm_time(x).transpose(1, 2).reshape(B * N, T, D))
        return rotate(q, table), rotate(k, table), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """x (B, T, N, D); attended (B * N, h, T, d): output projection, spatial attention, MLP."""
        B, T, N, D = x.shape
        mixed = self.time.out(attended.transpose(1, 2).reshape(B * N, T, D))
        x = x + mixed.view(B, N, T, D).transpose(1, 2)
        x = x + self.space(self.norm_space(x).reshape(B * T, N, D)).view(B, T, N, D)
        out: Tensor = x + self.feed_forward(self.norm_ff(x))
        return out

    def forward(
        self, x: Tensor, table: tuple[Tensor, Tensor], past: LayerCache | None
    ) -> tuple[Tensor, LayerCache]:
        q, k, v = self.project(x, table)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        T, keys = q.shape[2], k.shape[2]
        if T == 1:
            first = max(0, keys - self.window)
            attended = attend(q, k[:, :, first:], v[:, :, first:])
        else:
            attended = attend(q, k, v, band_mask(T, keys, self.window, q.device))
        return self.finish(x, attended), (k, v)


class Memory:
    """Keys and values of the newest frames of one context, per layer (N, h, T, d); immutable.

    Appending writes behind the end of a shared buffer where this memory is the newest one on it,
    and copies otherwise, so that a session's steps cost no copies and branches never meet.
    """

    def __init__(self, buffer: _Buffer, start: int, stop: int, position: int) -> None:
        self._buffer, self._start, self._stop = buffer, start, stop
        self.position = position  # of the frame that comes next

    @classmethod
    def empty(cls, dynamics: Dynamics, position: int = 0) -> Memory:
        """No frames yet; the next one is number `position`."""
        shape = (len(dynamics.layers), 2, dynamics.tokens, dynamics.heads)
        head_dim = dynamics.width // dynamics.heads
        return cls(
            _Buffer(dynamics.position.new_zeros(*shape, 2 * dynamics.window, head_dim)),
            0,
            0,
            position,
        )

    def __len__(self) -> int:
        return self._stop - self._start

    def layer(self, index: int, newest: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the `newest` frames, each (N, h, min(newest, T), d)."""
        first = max(self._start, self._stop - newest)
        data = self._buffer.data[index]
        return data[0, :, :, first : self._stop], data[1, :, :, first : self._stop]

    def append(self, keys_values: Tensor, window: int) -> Memory:
        """keys_values (L, 2, N, h, T, d) of the frames that follow."""
        frames = keys_values.shape[4]
        keep = min(window - 1, len(self) + frames)
        buffer, stop = self._buffer, self._stop
        if buffer.filled != stop or stop + frames > buffer.capacity:
            held = self._buffer.data[..., self._start : self._stop, :]
            buffer = self._buffer.like(2 * window + frames)
            buffer.data[..., : held.shape[4], :] = held
            stop = held.shape[4]
        buffer.data[..., stop : stop + frames, :] = keys_values
        buffer.filled = stop + frames
        return Memory(buffer, buffer.filled - keep, buffer.filled, self.position + frames)


class _Buffer:
    """data (L, 2, N, h, capacity, d), of which the first `filled` frames are in use."""

    def __init__(self, data: Tensor) -> None:
        self.data = data.detach()
        self.filled = 0

    @property
    def capacity(self) -> int:
        return self.data.shape[4]

    def like(self, capacity: int) -> _Buffer:
        shape = list(self.data.shape)
        shape[4] = capacity
        return _Buffer(self.data.new_zeros(shape))


@dataclass(frozen=True)
class Group:
    """Branches that leave one present: tokens (N, D), controls (R, H, C), condition (D,)."""

    memory: Memory
    tokens: Tensor
    controls: Tensor
    condition: Tensor


class Dynamics(nn.Module):
    def __init__(
        self, width: int, heads: int, layers: int, window: int, tokens: int, control_dim: int
    ) -> None:
        super().__init__()
        self.width, self.heads, self.window = width, heads, window
        self.tokens = tokens + 1  # one more for the control
        self.control_in = nn.Sequential(
            nn.Linear(control_dim, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.tokens_in = nn.Linear(width, width)
        self.position = nn.Parameter(torch.randn(self.tokens, width) * 0.02)
        self.layers = nn.ModuleList(DividedLayer(width, heads, window) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.difference = nn.Linear(width, width)
        nn.init.zeros_(self.difference.weight)
        nn.init.zeros_(self.difference.bias)

    def _table(self, first: int, frames: int, device: torch.device) -> tuple[Tensor, Tensor]:
        return rotary(torch.arange(first, first + frames, device=device), self.width // self.heads)

    def _stack(self) -> list[DividedLayer]:
        return cast(list[DividedLayer], list(self.layers))

    def enter(self, tokens: Tensor, controls: Tensor, condition: Tensor) -> Tensor:
        """tokens (B, T, N, D), controls (B, T, C), condition (B, D) -> (B, T, 1 + N, D)."""
        B, T, C = controls.shape
        control = in_blocks(self.control_in, controls.reshape(B * T, C)).view(B, T, -1)
        control = (control + condition[:, None])[:, :, None]
        entered = self.tokens_in(tokens)
        x = torch.cat((control.to(entered.dtype), entered), 2)
        return x + self.position.to(x.dtype)

    def leave(self, tokens: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The next frame's tokens (B, T, N, D) and the control token (B, T, D)."""
        x = self.norm(x)
        after = F.layer_norm((tokens + self.difference(x[:, :, 1:])).float(), (self.width,))
        return after.to(x.dtype), x[:, :, 0]

    def forward(
        self,
        tokens: Tensor,
        controls: Tensor,
        condition: Tensor,
        cache: list[LayerCache] | None = None,
        position: int = 0,
    ) -> tuple[Tensor, Tensor, list[LayerCache]]:
        """All frames at once: tokens (B, T, N, D) -> next tokens, control tokens, cache."""
        T = tokens.shape[1]
        table = self._table(position, T, tokens.device)
        x = self.enter(tokens, controls, condition)
        caches = []
        for index, layer in enumerate(self._stack()):
            x, layer_cache = layer(x, table, None if cache is None else cache[index])
            caches.append(layer_cache)
        after, control_token = self.leave(tokens, x)
        return after, control_token, caches

    def absorb(
        self, memory: Memory, tokens: Tensor, controls: Tensor, condition: Tensor
    ) -> tuple[Memory, Tensor, Tensor]:
        """Encode T frames at once: tokens (T, N, D), controls (T, C).

        Returns the memory, the keys and values made (L, 2, N, h, T, d), and the predicted tokens of
        the frame after the last (N, D). Linear layers see all frames at once; attention is computed
        for each frame by the very operations of a rollout's first step, so the bits are the same
        however a stream of frames is cut into calls.
        """
        T = tokens.shape[0]
        cos, sin = self._table(memory.position, T, tokens.device)
        tables = [(cos[t : t + 1], sin[t : t + 1]) for t in range(T)]
        x = self.enter(tokens[:, None], controls[:, None], condition.expand(T, -1))  # (T, 1, N, D)
        made = []
        for index, layer in enumerate(self._stack()):
            q, k, v = _project_rows(layer, x, tables, [1] * T)  # (T, N, h, 1, d)
            own = torch.stack((k, v))  # (2, T, N, h, 1, d)
            new = own.squeeze(4).permute(0, 2, 3, 1, 4)  # (2, N, h, T, d)
            past = memory.layer(index, self.window - 1)
            before = past[0].shape[2]
            if T > 1:  # a single frame sees only what is in memory: nothing to copy
                seen = torch.cat((torch.stack(past), new), 3)
                past = seen[0], seen[1]
            attended = []
            for t in range(T):
                first, last = max(0, before + t - (self.window - 1)), before + t
                visible = past[0][:, :, first:last], past[1][:, :, first:last]
                attended.append(_attend_branches(q[t : t + 1], visible, own[:, t : t + 1]))
            x = layer.finish(x, torch.cat(attended).flatten(0, 1))
            made.append(new)
        keys_values = torch.stack(made)
        after, _ = self.leave(tokens[-1:, None], x[-1:])
        return memory.append(keys_values, self.window), keys_values, after[0, 0]

    def rollout(
        self, groups: Sequence[Group], checkpoint: Callable[[], None] | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Predict H steps for all branches of all groups, R rows in total.

        Returns tokens (R, H, N, D), control tokens (R, H, D) and the keys and values of the present
        frame (R, L, 2, N, h, d). Linear layers see all rows at once; temporal attention sees the
        shared past of each group, in blocks of a fixed number of rows, and each row's own steps.
        """
        counts = [len(group.controls) for group in groups]
        controls = torch.cat([group.controls for group in groups])  # (R, H, C)
        repeat = torch.tensor(counts, device=controls.device)
        tokens = torch.stack([g.tokens for g in groups]).repeat_interleave(repeat, 0)[:, None]
        condition = torch.stack([g.condition for g in groups]).repeat_interleave(repeat, 0)
        R, H = controls.shape[:2]
        N, h, d = self.tokens, self.heads, self.width // self.heads
        own = controls.new_zeros(len(self.layers), 2, R, N, h, H, d)
        out_tokens, out_control = [], []
        for step in range(H):
            tables = [self._table(g.memory.position + step, 1, controls.device) for g in groups]
            x = self.enter(tokens, controls[:, step : step + 1], condition)  # (R, 1, N, D)
            for index, layer in enumerate(self._stack()):
                q, k, v = _project_rows(layer, x, tables, counts)  # (R, N, h, 1, d)
                own[index, 0, :, :, :, step], own[index, 1, :, :, :, step] = (
                    k[..., 0, :],
                    v[..., 0, :],
                )
                attended = []
                row = 0
                for group, count in zip(groups, counts, strict=True):
                    rows = slice(row, row + count)
                    past = group.memory.layer(index, self.window - 1 - step)
                    mine = own[index, :, rows, :, :, max(0, step + 1 - self.window) : step + 1]
                    attended.append(_attend_branches(q[rows], past, mine))
                    row += count
                x = layer.finish(x, torch.cat(attended).reshape(R * N, h, 1, d))
                if checkpoint is not None:
                    checkpoint()
            tokens, control_token = self.leave(tokens, x)
            out_tokens.append(tokens)
            out_control.append(control_token)
        present = own[:, :, :, :, :, 0].permute(2, 0, 1, 3, 4, 5)  # (R, L, 2, N, h, d)
        return torch.cat(out_tokens, 1), torch.cat(out_control, 1), present


def _project_rows(
    layer: DividedLayer, x: Tensor, tables: list[tuple[Tensor, Tensor]], counts: list[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of one step for rows at different positions, each (R, N, h, 1, d)."""
    R, _, N, D = x.shape
    q, k, v = layer.time.project(layer.norm_time(x).transpose(1, 2).reshape(R * N, 1, D))
    shape = (R, N, *q.shape[1:])
    repeat = torch.tensor(counts, device=x.device)
    cos = torch.stack([t[0] for t in tables]).repeat_interleave(repeat, 0)[:, None, None]
    sin = torch.stack([t[1] for t in tables]).repeat_interleave(repeat, 0)[:, None, None]
    return rotate(q.view(shape), (cos, sin)), rotate(k.view(shape), (cos, sin)), v.view(shape)


def _attend_branches(q: Tensor, past: tuple[Tensor, Tensor], own: Tensor) -> Tensor:
    """q (R, N, h, 1, d); past keys and values (N, h, T, d); own (2, R, N, h, S, d) -> like q."""
    R, N, h, _, d = q.shape
    keys, values = (t.reshape(N * h, t.shape[2], d) for t in past)
    T = keys.shape[1]
    q = q * d**-0.5
    mine = q @ own[0].transpose(-1, -2)  # (R, N, h, 1, S)
    out = torch.empty_like(q)
    for first in range(0, R, _ROWS):
        block = q[first : first + _ROWS]
        rows = block.shape[0]
        padded = q.new_zeros(N * h, _ROWS, d)
        padded[:, :rows] = block[:, :, :, 0].permute(1, 2, 0, 3).reshape(N * h, rows, d)
        shared = (padded @ keys.transpose(-1, -2))[:, :rows]  # (N * h, rows, T)
        shared = shared.view(N, h, rows, T).permute(2, 0, 1, 3)[:, :, :, None]  # (rows, N, h, 1, T)
        weight = torch.cat((shared, mine[first : first + rows]), -1).softmax(-1)
        past_weight = q.new_zeros(N * h, _ROWS, T)
        past_weight[:, :rows] = weight[..., 0, :T].permute(1, 2, 0, 3).reshape(N * h, rows, T)
        from_past = (past_weight @ values)[:, :rows].view(N, h, rows, d).permute(2, 0, 1, 3)
        from_own = weight[..., T:] @ own[1][first : first + rows]  # (rows, N, h, 1, d)
        out[first : first + rows] = from_past[:, :, :, None] + from_own
    return out
