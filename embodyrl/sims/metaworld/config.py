"""The settings of a MetaWorld env, and what they may be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import Count, CountOrZero, Names, Pixels, Processes
from embodyrl.sims.metaworld.tasks import SPLITS, chosen_tasks
from embodyrl.storage.paths import machine_setting

CAMERAS = ("corner", "corner2", "corner3", "topview", "behindGripper", "gripperPOV")
REWARDS = ("sparse", "dense")


@dataclass(frozen=True)
class MetaWorldConfig(EnvConfig):
    """Settings of a MetaWorld env.

    Attributes:
        suite: ``mt10``, ``mt25`` or ``mt50``.
        task: names of the suite's tasks; empty for all.
        cameras: any of MetaWorld's: ``corner2``, ``topview``, ``gripperPOV`` ... Without, proprio
            is MetaWorld's state of 39 numbers, the goal among them; with cameras it is the hand's
            place and opening, 4 numbers.
        image_size: height and width of the pictures.
        reward: ``sparse`` is 1 when the task is solved; ``dense`` is MetaWorld's, 0 to 10.
        num_workers: processes that share the envs; 1 runs them in this one.
        max_episode_steps: control steps of 1/80 s until truncation; 0 means MetaWorld's 500.
        max_models: simulations that each process keeps besides those in use, one for each task and
            env. One takes about 50 MB and .3 s to make.
    """

    name: str = "metaworld"
    suite: str = "mt50"
    task: Names = ""
    cameras: tuple[str, ...] = ()
    image_size: Pixels = 64
    reward: str = "sparse"
    num_workers: Processes = machine_setting(1)
    max_episode_steps: CountOrZero = 0
    max_models: Count = machine_setting(20)

    @property
    def uses_gpu(self) -> bool:
        """See ``EnvConfig``; the cameras do."""
        return bool(self.cameras)

    def without_pictures(self) -> EnvConfig:
        """See ``EnvConfig``."""
        return replace(self, cameras=())


def check_config(config: MetaWorldConfig) -> None:
    """Raises a ``UserError`` for a setting that does not exist; the message names the nearest ones."""
    chosen_tasks(config.suite, config.task)
    for key, valid in (("reward", REWARDS), ("split", SPLITS)):
        value = getattr(config, key)
        if value not in valid:
            raise UserError(f"metaworld knows no {key}={value!r}. {did_you_mean(value, valid)}")
    if unknown := [name for name in config.cameras if name not in CAMERAS]:
        raise UserError(
            f"metaworld has no camera {unknown[0]!r}. {did_you_mean(unknown[0], CAMERAS)}"
        )
