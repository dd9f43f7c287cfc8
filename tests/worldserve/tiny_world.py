"""What several test files share: clips, the tiny model's own answers, a client in this process."""

from __future__ import annotations

import threading

import numpy as np

from ctrlcache.calibration import TrustModel, trust_path
from worldserve.models.protocol import RolloutInput
from worldserve.models.tiny import TinyWorldModel
from worldserve.request import OUTPUTS, RawRequest
from worldserve.service import WorldService

TINY = "worldserve.models.tiny:TinyWorldModel"
HELD = np.array([0.3, -0.2], np.float32)


class Client:
    """Asks a service as a client asks the server; raises what it answers with."""

    def __init__(self, service: WorldService) -> None:
        self.service = service

    def send(self, control, id="s", frames=None, start=False, end=False, outputs=OUTPUTS, **extra):
        """Put a request; returns a function that waits for its outcome."""
        inputs = {"CONTROL": np.atleast_2d(np.asarray(control, np.float32))}
        if frames is not None:
            inputs["FRAMES"] = frames
        cancelled = extra.pop("cancelled", lambda: False)
        timeout_s = extra.pop("timeout_s", None)
        for name in [name for name in extra if name.isupper()]:
            inputs[name] = np.asarray(extra.pop(name))
        done, box = threading.Event(), []
        raw = RawRequest(
            inputs, extra, id, start, end, frozenset(outputs), timeout_s, cancelled=cancelled
        )

        def deliver(result):
            box.append(result)
            done.set()

        self.service.put(raw, deliver)

        def outcome():
            assert done.wait(30)
            [result] = box
            if isinstance(result, Exception):
                raise result
            return result.outputs

        return outcome

    def ask(self, control, id="s", **options):
        return self.send(control, id, **options)()


def counting(model):
    """Count what the model is asked to do."""
    counts = {"embed": 0, "absorb": 0, "rollout": 0}

    def watch(name):
        method = getattr(model, name)

        def called(*args, **kwargs):
            counts[name] += 1
            return method(*args, **kwargs)

        setattr(model, name, called)

    for name in counts:
        watch(name)
    return counts


def clip(length, seed=0, size=32):
    """Frames (T, size, size, 3) of something that moves smoothly, different for each seed."""
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:size, :size] / size
    phase = draw.uniform(0, 6, 3)
    frames = [
        np.stack([128 + 100 * np.sin(5 * x + 3 * y + p + 0.2 * t) for p in phase], -1)
        for t in range(length)
    ]
    return np.stack(frames).round().astype(np.uint8)


class Truth:
    """The same session by the model alone: no cache, no store, no server."""

    def __init__(self, frames, transitions=(), prompt="", model=None):
        self.model = model or TinyWorldModel()
        self.conditioning, _ = self.model.condition(prompt, "")
        self.memory = self.model.assemble((), 0)
        self.tokens = self.model.embed(frames[:1])[0]
        self.base = frames[0]
        self.see(frames[1:], transitions)

    def see(self, frames, transitions):
        for frame, control in zip(frames, transitions, strict=True):
            self.leave(control)
            self.tokens, self.base = self.model.embed(frame[None])[0], frame

    def leave(self, control):
        control = np.asarray(control, np.float32)[None]
        out = self.model.absorb(self.memory, self.tokens[None], control, self.conditioning)
        self.memory, self.tokens = out.memory, out.predicted_tokens

    def predict(self, plan, horizon=8, seed=0):
        plan = np.asarray(plan, np.float32)
        held = np.repeat(plan[None], horizon, 0) if plan.ndim == 1 else plan
        item = RolloutInput(self.memory, self.tokens, held, self.conditioning)
        [out] = self.model.rollout([item])
        [frames] = self.model.generate([self.base], [out.tokens], [seed])
        return out.states, frames


def trust_the_tiny_model(directory, seed=0, **lending):
    """Write a calibration beside (absent) weights: cautious, and made for the tiny model; lending:
    what is drawn and what is lent, nothing where it is not said."""
    spec = TinyWorldModel(seed).spec
    trust = TrustModel(
        weights_digest=spec.weights_digest,
        migration="jacobian",
        delta=0.05,
        q=4.0,
        kappa0=0.05,
        curvature_power=1.0,
        distance_power=2.0,
        floor=1e-4,
        max_distance=0.3,
        probe_radius=0.1,
        horizon=8,
        rho_max=5.0,
        stability_threshold=0.0,
        transferability_threshold=1.0,
        frame_psnr_db=30.0,
        frame_distance=0.05,
        frame_change=0.2,
        pairs=1000,
        contexts=100,
        created="2026-01-01",
        **lending,
    )
    trust.save(trust_path(directory))
    return trust


def controls(count, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, (count, 2)).astype(np.float32)


def equal(outputs, truth):
    states, frames = truth
    return np.array_equal(outputs["STATE"], states) and (
        "PREDICTED_FRAMES" not in outputs or np.array_equal(outputs["PREDICTED_FRAMES"], frames)
    )
