"""The settings of ``MujocoEnv``, and what they may be."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, did_you_mean, refuse_unread
from embodyrl.ranges import Count, CountOrZero, Names, Pixels, Range, Threads, names_in
from embodyrl.sims.mujoco import tasks
from embodyrl.sims.mujoco.layouts import LOOKS, MAX_BLOCKS, VARIATIONS
from embodyrl.sims.mujoco.physics import BACKENDS
from embodyrl.storage.paths import machine_setting

CONTROL_DIMS = {"ee_delta_pos": 4, "ee_delta_pose": 7}
POS_SCALE = 0.035
"""Metres that the commanded hand moves at action 1."""
ROT_SCALE = 0.15
"""Radians that it turns at action 1."""


@dataclass(frozen=True)
class MujocoConfig(EnvConfig):
    """Settings of ``MujocoEnv``.

    Attributes:
        task: a name from ``embodyrl.sims.mujoco.tasks.TASKS``, or several.
        cameras: any of ``"front"`` and ``"wrist"``; empty for states only. The privileged state is
            then appended to proprio, because the policy has nothing else to see.
        image_size: edge of the square pictures in pixels.
        backend: what steps the physics. ``"native"`` is MuJoCo's own threads. ``"warp"``
            (mujoco-warp) and ``"mjx"`` (JAX) step thousands of worlds at once, on ``device``.
        renderer: ``"warp"``, ``"opengl"`` (both on ``device``), or ``"none"`` for states only.
        control_mode: ``"ee_delta_pos"`` (dx, dy, dz, gripper) or ``"ee_delta_pose"`` (dx, dy, dz,
            drx, dry, drz, gripper); gripper > 0 opens and <= 0 closes.
        reward: ``"sparse"`` (1 on success) or ``"dense"`` (that plus the change of a potential in
            [0, 1]).
        max_episode_steps: control steps until truncation; 0 takes each task's own.
        min_blocks: fewest blocks on the table in tasks that draw their number; 0 takes the task's
            own.
        max_blocks: most blocks; 0 takes the task's own.
        randomise: what the split ``train`` draws from wider ranges: any of ``position``,
            ``clutter``, ``colour``, ``lighting`` and ``camera``; other splits are not affected.
        num_threads: for physics and drawing; 0 uses every core this process may use.
        render_batch: envs drawn by one launch.
    """

    name: str = "mujoco"
    task: Names = "pick"
    cameras: tuple[str, ...] = ("front",)
    image_size: Pixels = 64
    backend: str = "native"
    renderer: str = "warp"
    control_mode: str = "ee_delta_pos"
    reward: str = "sparse"
    max_episode_steps: CountOrZero = 0
    min_blocks: Annotated[int, Range(0, MAX_BLOCKS)] = 0
    max_blocks: Annotated[int, Range(0, MAX_BLOCKS)] = 0
    randomise: tuple[str, ...] = ()
    num_threads: Threads = machine_setting(0)
    render_batch: Count = machine_setting(16)

    @property
    def uses_gpu(self) -> bool:
        """See ``EnvConfig``; MuJoCo's own physics does not."""
        return self.backend != "native" or (self.renderer != "none" and bool(self.cameras))

    def ood_splits(self) -> dict[str, str]:
        """See ``EnvConfig``; those that change something in these tasks and for these cameras."""
        clutter = any(tasks.TASKS[name].clutter for name in task_names(self))
        left_out = set() if clutter else {"ood_clutter"}
        seen = self.cameras if self.renderer != "none" else ()
        left_out |= set() if seen else {"ood_colour", "ood_lighting"}
        left_out |= set() if "front" in seen else {"ood_camera"}  # the wrist's never moves
        return {
            name: about
            for name, about in tasks.SPLITS.items()
            if name.startswith("ood_") and name not in left_out
        }

    def without_pictures(self) -> EnvConfig:
        """See ``EnvConfig``."""
        seen = tuple(name for name in self.randomise if name not in LOOKS)
        return replace(self, cameras=(), randomise=seen, render_batch=MujocoConfig.render_batch)


def block_range(task: tasks.Task, config: MujocoConfig) -> tuple[int, int]:
    """The fewest and the most blocks that an episode of a task has."""
    low, high = task.blocks
    if config.split == "ood_clutter" and task.clutter:
        return MAX_BLOCKS, MAX_BLOCKS
    if low != high:
        high = config.max_blocks or high
        low = min(config.min_blocks or low, high)
    if task.clutter and config.split == "train" and "clutter" in config.randomise:
        high = min(high + 1, MAX_BLOCKS)
    return low, high


def task_names(config: MujocoConfig) -> tuple[str, ...]:
    """The tasks that ``config.task`` names."""
    return names_in(config.task)


def check_config(config: MujocoConfig) -> None:
    """Raises a ``UserError`` for a task, split, camera or setting that does not exist."""
    for name in task_names(config):
        if name not in tasks.TASKS:
            raise UserError(f"MuJoCo has no task {name!r}. {did_you_mean(name, tasks.TASKS)}")
    for value, valid, what in (
        (config.split, tasks.SPLITS, "split"),
        (config.backend, BACKENDS, "backend"),
        (config.renderer, ("warp", "opengl", "none"), "renderer"),
        (config.control_mode, CONTROL_DIMS, "control mode"),
        (config.reward, ("sparse", "dense"), "reward"),
        *((camera, ("front", "wrist"), "camera") for camera in config.cameras),
        *((name, VARIATIONS, "variation") for name in config.randomise),
    ):
        if value not in valid:
            raise UserError(f"MuJoCo has no {what} {value!r}. {did_you_mean(value, valid)}")
    # Settings that this env would not read.
    if unread := [n for n in config.randomise if f"ood_{n}" not in config.ood_splits()]:
        raise UserError(
            f"env.randomise names {unread[0]!r}, which changes nothing in these tasks and for "
            "these cameras. Leave it out."
        )
    if config.renderer != "warp" or not config.cameras:
        what = f"renderer={config.renderer}" if config.cameras else "an env without cameras"
        refuse_unread(config, "env", ("render_batch",), f"{what} draws no batches")
