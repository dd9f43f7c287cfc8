"""Meta-World episodes: a scripted expert, noise and smooth random motion, rendered off-screen.

Needs the extra `train` and Debian's `libosmesa6`. Rendering is software (OSMesa); shadows,
reflections and multi-sampling are off, which makes it ten times as fast.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

# Both are read when mujoco is imported, so they come first.
os.environ.setdefault("MUJOCO_GL", "osmesa")
os.environ.setdefault("LP_NUM_THREADS", "0")
warnings.filterwarnings("ignore", module="gymnasium|metaworld|glfw")

import metaworld  # noqa: E402
import mujoco  # noqa: E402
import numpy as np  # noqa: E402
from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # noqa: E402
from metaworld.policies import ENV_POLICY_MAP  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from worldserve.data.episode import Episode, Moment, collect  # noqa: E402
from worldserve.data.suites import Camera, Operation, Suite  # noqa: E402

__all__ = ["MetaWorldSimulator"]

_STEPS_PER_FRAME = 8  # 80 Hz simulation, 10 Hz control
_XYZ_GAIN = 0.5  # at most 4 cm of motion per frame
_OPENING_SCALE_M = 0.1  # the observation's finger distance is divided by this
_CONFIGURATIONS_PER_SEED = 50  # how many initial configurations metaworld.MT1 draws


class MetaWorldSimulator:
    """One operation in one simulator; implements `worldserve.data.episode.Simulator`.

    Frames are square and averaged over `supersampling` rendered pixels each way, or of `size_px`
    and rendered as they are. A frame wider than high is stretched, as by an anamorphic lens: it
    shows the same square of the scene, so that the server's squeeze to the model's frame undoes it.
    """

    def __init__(
        self,
        suite: Suite,
        operation: Operation,
        supersampling: int = 2,
        size_px: tuple[int, int] | None = None,
    ) -> None:
        self._suite, self._operation = suite, operation
        self._env = ALL_V3_ENVIRONMENTS[operation.environment]()
        self._seed = -1
        self._tasks: list[Any] = []
        self._configuration = self._choose_configuration(0, 0)
        self._env.reset()
        self._scale = 1 if size_px else supersampling
        self._size_px = size_px or (suite.frame_px, suite.frame_px)
        model = self._env.model
        model.vis.quality.offsamples = 0
        model.vis.quality.shadowsize = 0
        height, width = (side * self._scale for side in self._size_px)
        model.vis.global_.offheight = max(height, model.vis.global_.offheight)
        model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
        self._renderer = mujoco.Renderer(model, height, width)
        for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._renderer.scene.flags[flag] = 0
        self._options = mujoco.MjvOption()
        self._options.sitegroup[:] = 0  # the goal markers would give the outcome away
        self._cameras = [_free_camera(camera) for camera in suite.cameras]
        self._robot = _robot_geoms(model)
        self._pads = (model.body("leftpad").id, model.body("rightpad").id)

    def episode(self, seed: int, index: int, frames: int | None = None) -> Episode:
        """Record episode `index` of the split with `seed`; the same pair gives the same episode."""
        moments = list(self.moments(seed, index, frames or self._suite.frames_per_episode))
        return collect(moments, self._configuration)

    def moments(self, seed: int, index: int, frames: int) -> Iterator[Moment]:
        """The same frame by frame."""
        rng = np.random.default_rng((seed, index))
        self._configuration = self._choose_configuration(
            seed + index // _CONFIGURATIONS_PER_SEED, index % _CONFIGURATIONS_PER_SEED
        )
        observation, _ = self._env.reset()
        hand = _Hand(self._operation.environment, rng)
        succeeded = False
        for _ in range(frames - 1):
            images, physics = self._render(), self._physics(observation, succeeded)
            control = hand.control(observation)
            yield Moment(images, physics, control)
            observation, succeeded = self._step(control)
        yield Moment(self._render(), self._physics(observation, succeeded), None)

    def outcomes(
        self,
        seed: int,
        index: int,
        controls: NDArray[np.float32],
        asked: Sequence[tuple[int, NDArray[np.float32]]],
    ) -> list[NDArray[np.float32]]:
        """Physics (H, P) under each plan of `asked`, (frame, controls (H, 4)), from where
        `controls` lead in that many frames."""
        self._choose_configuration(
            seed + index // _CONFIGURATIONS_PER_SEED, index % _CONFIGURATIONS_PER_SEED
        )
        self._env.reset()
        found: list[NDArray[np.float32]] = [np.empty((0, 9), np.float32)] * len(asked)
        for t in range(max((frame for frame, _ in asked), default=-1) + 1):
            for number, (frame, plan) in enumerate(asked):
                if frame == t:
                    found[number] = self._branch(plan)
            if t < len(controls):
                self._step(controls[t])
        return found

    def _branch(self, plan: NDArray[np.float32]) -> NDArray[np.float32]:
        """What would happen under `plan`; the simulation is then where it was."""
        model, data = self._env.model, self._env.data
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        state = np.empty(mujoco.mj_stateSize(model, kind))
        mujoco.mj_getState(model, data, state, kind)
        physics = np.stack([self._physics(*self._step(control)) for control in plan])
        mujoco.mj_setState(model, data, state, kind)
        mujoco.mj_forward(model, data)
        return physics

    def _step(self, control: NDArray[np.float32]) -> tuple[NDArray[np.float64], bool]:
        """One frame under `control`: the observation after it, and whether it succeeded."""
        action = control.astype(float)
        action[:3] *= _XYZ_GAIN
        succeeded = False
        for _ in range(_STEPS_PER_FRAME):
            self._env.curr_path_length = 0  # never truncate
            observation, _, _, _, info = self._env.step(action)
            succeeded |= info["success"] > 0
        return observation, succeeded

    def close(self) -> None:
        self._renderer.close()

    def _choose_configuration(self, seed: int, index: int) -> NDArray[np.float32]:
        if seed != self._seed:
            self._tasks = metaworld.MT1(  # type: ignore[no-untyped-call]
                self._operation.environment, seed=seed
            ).train_tasks
            self._seed = seed
        task = self._tasks[index]
        self._env.set_task(task)
        return np.asarray(self._env._last_rand_vec, np.float32).copy()

    def _render(self) -> NDArray[np.uint8]:
        (height, width), scale = self._size_px, self._scale
        views = []
        for camera in self._cameras:
            self._renderer.update_scene(self._env.data, camera=camera, scene_option=self._options)
            if height != width:
                for eye in self._renderer.scene.camera:
                    eye.frustum_width = eye.frustum_top  # as wide as high
            image = self._renderer.render()
            if scale == 1:
                views.append(image.copy())
                continue
            boxes = image.reshape(height, scale, width, scale, 3)
            views.append((boxes.mean((1, 3)) + 0.5).astype(np.uint8))
        return np.stack(views)

    def _physics(self, observation: NDArray[np.float64], succeeded: bool) -> NDArray[np.float32]:
        values = np.empty(9, np.float32)
        values[:7] = observation[:7]
        values[3] *= _OPENING_SCALE_M
        values[7] = self._grasping()
        values[8] = succeeded
        return values

    def _grasping(self) -> bool:
        """Whether both finger pads touch the same body that is not the robot."""
        data, model = self._env.data, self._env.model
        touched: tuple[set[int], set[int]] = (set(), set())
        for contact in data.contact[: data.ncon]:
            for pad_geom, other in (
                (contact.geom1, contact.geom2),
                (contact.geom2, contact.geom1),
            ):
                if other in self._robot:
                    continue
                for side, pad in enumerate(self._pads):
                    if model.geom_bodyid[pad_geom] == pad:
                        touched[side].add(int(model.geom_bodyid[other]))
        return bool((touched[0] & touched[1]) - {0})


class _Hand:
    """What moves the arm: stretches of the expert (clean or noisy) and smooth random stretches."""

    def __init__(self, environment: str, rng: np.random.Generator) -> None:
        self._environment, self._rng = environment, rng
        self._expert = bool(rng.random() < 0.75)
        self._left = int(rng.integers(15, 45))
        self._sigma = float(rng.choice([0.0, 0.1, 0.3]))
        self._drift = np.zeros(4)
        self._policy = _expert_policy(environment)

    def control(self, observation: NDArray[np.float64]) -> NDArray[np.float32]:
        rng = self._rng
        if self._left <= 0:
            self._expert = not self._expert
            self._left = int(rng.integers(15, 40) if self._expert else rng.integers(6, 20))
            self._sigma = float(rng.choice([0.0, 0.1, 0.3]))
            self._policy = _expert_policy(self._environment)
        self._left -= 1
        # An Ornstein-Uhlenbeck walk covers the control space smoothly.
        self._drift = 0.7 * self._drift + 0.6 * rng.normal(size=4)
        if self._expert:
            action = np.asarray(self._policy.get_action(observation), float)
            action = action + self._sigma * rng.normal(size=4)
        else:
            action = self._drift.copy()
        return np.clip(action, -1, 1).astype(np.float32)


def _expert_policy(environment: str) -> Any:
    policy: Any = ENV_POLICY_MAP[environment]
    return policy()


def _free_camera(camera: Camera) -> Any:
    free = mujoco.MjvCamera()
    free.type = mujoco.mjtCamera.mjCAMERA_FREE
    free.lookat[:] = camera.lookat_m
    free.distance = camera.distance_m
    free.azimuth, free.elevation = camera.azimuth_deg, camera.elevation_deg
    return free


def _robot_geoms(model: Any) -> frozenset[int]:
    """Indices of the geoms that belong to the robot's kinematic tree."""
    names = {model.body(i).name for i in range(model.nbody)}
    root = model.body("base" if "base" in names else "right_arm_base_link").id
    geoms = set()
    for geom in range(model.ngeom):
        body = model.geom_bodyid[geom]
        while body not in (0, root):
            body = model.body_parentid[body]
        if body == root:
            geoms.add(geom)
    return frozenset(geoms)
