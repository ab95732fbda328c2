"""The settings of an OGBench env, and what they may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import CountOrZero, Pixels, Processes, Range
from embodyrl.sims.ogbench.scenes import EXPERTS, NUM_GOALS, SPLITS, require_scene
from embodyrl.storage.paths import machine_setting

CAMERAS = ("front_pixels", "front")
REWARDS = ("sparse", "unsolved")


@dataclass(frozen=True)
class OGBenchConfig(EnvConfig):
    """Settings of an OGBench env.

    Attributes:
        task: ``cube-single``, ``scene``, ``puzzle-3x3`` ...; ``scenes.SCENES`` names them all.
        goals: numbers of OGBench's evaluation goals, 1 to 5; empty for all. ``goals=[2]`` is its
            ``TASK-singletask-task2-v0``.
        cameras: any of ``front_pixels`` (what OGBench's pixel policies see, the arm transparent)
            and ``front``. Without, proprio is OGBench's state followed by the goal; with cameras it
            is the robot's part of that.
        image_size: height and width of the pictures; OGBench's are 64.
        reward: ``sparse`` is 1 when the task is solved. ``unsolved`` is OGBench's own: in each step
            minus the number of parts (cubes, buttons, drawer, window) that are not yet as they
            should be.
        expert: who demonstrates: ``markov`` (OGBench's feedback oracle) or ``plan`` (its planned
            one, with correlated noise) solve the task; ``play`` moves random parts to random
            places, as in OGBench's data sets. The reward is the task's in each case.
        num_workers: processes that share the envs; 1 runs them in this one.
        max_episode_steps: control steps of 1/20 s until truncation; 0 means OGBench's number.
    """

    name: str = "ogbench"
    task: str = "cube-single"
    goals: tuple[Annotated[int, Range(1, NUM_GOALS)], ...] = ()
    cameras: tuple[str, ...] = ()
    image_size: Pixels = 64
    reward: str = "sparse"
    expert: str = "markov"
    num_workers: Processes = machine_setting(1)
    max_episode_steps: CountOrZero = 0

    @property
    def uses_gpu(self) -> bool:
        """See ``EnvConfig``; the cameras do."""
        return bool(self.cameras)

    def without_pictures(self) -> EnvConfig:
        """See ``EnvConfig``."""
        return replace(self, cameras=())


def check_config(config: OGBenchConfig) -> None:
    """Raises a ``UserError`` for a setting that does not exist; the message names the nearest ones."""
    require_scene(config.task)
    for key, valid in (("reward", REWARDS), ("expert", EXPERTS), ("split", SPLITS)):
        value = getattr(config, key)
        if value not in valid:
            raise UserError(f"ogbench knows no {key}={value!r}. {did_you_mean(value, valid)}")
    if unknown := [name for name in config.cameras if name not in CAMERAS]:
        raise UserError(
            f"ogbench has no camera {unknown[0]!r}. {did_you_mean(unknown[0], CAMERAS)}"
        )
