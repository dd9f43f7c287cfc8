"""What the model makes of a frame or of tokens, named by content and kept in WorldCache's levels.

The cache of couplets knows an answer by all that led to it. Here things are known by what they are
made of: the tokens of a frame by its pixels, predicted frames by their tokens, the picture they are
drawn from and the seed. So another session with the same video and another prompt, or a repeated
approximate answer, finds them. Only exact features are used, and tenants never share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from ctrlcache.config import CacheConfig
from ctrlcache.errors import ConfigError, InvalidInput
from ctrlcache.events import Sink
from ctrlcache.key import digest
from worldcache.disk import DiskConfig
from worldcache.editing import content
from worldcache.levels import Levels, LevelsConfig
from worldserve.models.protocol import Float, Pixels, WorldModel
from worldserve.opening import provenance_of
from worldserve.options import ServeOptions

__all__ = ["Features", "open_levels"]

MIB = 1 << 20
#: Has work done later, when nobody waits.
Defer = Callable[[Callable[[], None]], object]


def _at_once(work: Callable[[], None]) -> None:
    work()


def open_levels(
    options: ServeOptions, config: CacheConfig, provenance: bytes, on_event: Sink
) -> Levels | None:
    """The levels that the settings ask for; None where they have no room at all."""
    if not (options.features_l1_mib or options.features_l2_mib):
        return None
    disk = None
    directory = Path(options.features_dir) if options.features_dir else None
    if directory is None and config.warm.dir is not None:
        directory = config.warm.dir.with_name(config.warm.dir.name + "-features")
    if directory is not None and options.features_disk_mib:
        index = config.warm.index_directory.with_name("features-index")
        disk = DiskConfig(directory, index, options.features_disk_mib * MIB)
    if config.warm.dir is not None and directory == config.warm.dir:
        raise ConfigError(f"features_dir must not be warm_dir, got {directory} for both")
    levels = LevelsConfig(options.features_l1_mib * MIB, options.features_l2_mib * MIB, disk)
    return Levels(levels, provenance, on_event)


class Features:
    """Asks the levels first and the model then. Safe in several threads.

    levels: None asks the model alone. defer: what was made is put away by it.
    """

    def __init__(
        self, model: WorldModel, levels: Levels | None = None, defer: Defer = _at_once
    ) -> None:
        self._model = model
        self._levels = levels
        self._defer = defer
        self._provenances: dict[str, bytes] = {}

    def embed(self, frames: Pixels, tenant: str) -> Float:
        """frames (T, h, w, 3) of the model's size -> tokens (T, N, D), as `WorldModel.embed`."""
        if self._levels is None:
            return self._model.embed(frames)
        ids = [self._name(tenant, b"tokens", content(frame)) for frame in frames]
        found = [self._levels.exact(id) for id in ids]
        missing = [at for at, tokens in enumerate(found) if tokens is None]
        if missing:
            began = time.perf_counter()
            made = self._model.embed(frames[missing])
            each_ms = (time.perf_counter() - began) * 1e3 / len(missing)
            for at, tokens in zip(missing, made, strict=True):
                found[at] = tokens
            fresh = dict(zip([ids[at] for at in missing], made, strict=True))
            self._keep(fresh, "tokens", tenant, each_ms)
        return np.stack([tokens for tokens in found if tokens is not None])

    def frames(
        self, last: Pixels, tokens: Float, how: bytes, tenant: str, draw: Callable[[], Pixels]
    ) -> Pixels:
        """Frames (H, h, w, 3) that `draw` makes of tokens (H, N, D) and the picture they are drawn
        from. how: all else that makes a difference to them (seed, steps ...)."""
        if self._levels is None:
            return draw()
        id = self._name(tenant, b"frames", content(last), content(tokens), how)
        found = self._levels.exact(id)
        if found is not None:
            return found
        began = time.perf_counter()
        frames = draw()
        self._keep({id: frames}, "frames", tenant, (time.perf_counter() - began) * 1e3)
        return frames

    def _keep(
        self, made: Mapping[bytes, Float | Pixels], kind: str, tenant: str, cost_ms: float
    ) -> None:
        def put() -> None:
            assert self._levels is not None  # else nothing is kept
            group = digest(tenant.encode())
            try:
                for id, array in made.items():
                    self._levels.put(id, array, kind=kind, group=group, cost_ms=cost_ms)
            except InvalidInput:
                return  # a model's arrays may be of a type that records cannot hold

        self._defer(put)

    def _name(self, tenant: str, *parts: bytes) -> bytes:
        provenance = self._provenances.get(tenant)
        if provenance is None:
            provenance = provenance_of(self._model.spec, tenant).digest
            if len(self._provenances) < 1_024:
                self._provenances[tenant] = provenance
        return digest(b"feature", provenance, *parts)

    def close(self) -> None:
        """Write what is worth keeping to disk."""
        if self._levels is not None:
            self._levels.close()
