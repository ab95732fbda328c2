"""ManiSkill (Tao et al. 2025, arXiv:2410.00425) as a ``VecEnv``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.errors import UserError, did_you_mean
from embodyrl.sims.maniskill import make_env
from embodyrl.sims.maniskill.layout import layout
from embodyrl.sims.maniskill.tasks import ManiSkillTask, require_task
from embodyrl.sims.workers.pool import PooledVecEnv
from embodyrl.types import EnvSpec, Obs

SPLITS = ("train", "eval")


@dataclass(frozen=True)
class ManiSkillConfig(EnvConfig):
    """What ``ManiSkillEnv`` is built from.

    Attributes:
        task: registered id, e.g. ``"PickCube-v1"``; ``tasks.list_tasks()`` names them all.
        obs: ``"state"`` (proprio is the flat task state, no cameras) or ``"rgb"`` (camera images,
            and proprio what ManiSkill gives to a policy with cameras). Privileged is the flat task
            state in both.
        cameras: the task's cameras to draw; empty for all.
        image_size: side of the square images in pixels.
        control_mode: what an action means, one of the robot's; empty for its default.
        reward: ``"sparse"`` (1 at success, -1 at failure), ``"dense"`` or ``"normalized_dense"``.
        max_episode_steps: control steps until truncation; 0 for the task's own number.
        robot: robot id; empty for the task's own.
        backend: ``"auto"`` (the GPU if CUDA is there), ``"cpu"`` or ``"gpu"``.
        num_workers: processes that share the envs on the CPU; 1 runs them in this one, 0 takes one
            per core.
    """

    name: str = "maniskill"
    task: str = "PickCube-v1"
    obs: str = "state"
    cameras: tuple[str, ...] = ()
    image_size: int = 64
    control_mode: str = "pd_ee_delta_pos"
    reward: str = "sparse"
    max_episode_steps: int = 0
    robot: str = ""
    backend: str = "auto"
    num_workers: int = 0

    @property
    def pool_size(self) -> int:
        """How many processes share the envs; 1 for none besides this one."""
        if self.on_gpu:
            return 1
        if self.num_workers == 0:
            return max(
                1, min(os.cpu_count() or 1, self.num_envs // 4)
            )  # a process for fewer envs starts for longer than it helps
        return min(self.num_envs, self.num_workers)

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU back end is meant."""
        return self.backend == "gpu" or (self.backend == "auto" and torch.cuda.is_available())


class Engine(Protocol):
    """N ManiSkill envs: one by one on the CPU (``cpu.py``) or all at once on the GPU (``gpu.py``)."""

    base: Any

    def reset(self, env_ids: list[int], seeds: list[int]) -> None:
        """Puts those envs into the initial states of those seeds."""
        ...

    def step(self, actions: Tensor, active: Tensor) -> Tick:
        """One control step in the controller's own units."""
        ...

    def observe(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """State (N, S), proprio (N, P) and images (N, h, w, 3) uint8."""
        ...

    def tool(self) -> np.ndarray:
        """(N, 3) position of the tool between the fingers, in metres."""
        ...

    def position(self, actor: str) -> np.ndarray:
        """(N, 3) position of the actor that ManiSkill's env keeps under that attribute, in metres."""
        ...

    def close(self) -> None:
        """Frees the scenes."""
        ...


class ManiSkillEnv(SteppedVecEnv):
    """N episodes of one ManiSkill task. Where ``config.pool_size`` > 1 this is a ``PooledVecEnv`` of such envs.

    Args:
        config: see ``ManiSkillConfig``.

    Raises:
        UserError: a key has a value that this task does not know; the message names the nearest
            ones.
        MissingDependencyError: ManiSkill, a Vulkan driver (for images) or the task's assets are
            missing.
    """

    Config = ManiSkillConfig
    task: ManiSkillTask

    def __new__(cls, config: ManiSkillConfig) -> ManiSkillEnv:
        """One env for this process, or the pool."""
        task = _check(config)
        if config.pool_size > 1:
            workers = config.pool_size
            # Shared memory and messages look the same to the caller, so the pool stands in for the
            # env.
            return cast(ManiSkillEnv, PooledVecEnv("maniskill", config, num_workers=workers))
        env = super().__new__(cls)
        env.task = task
        return env

    def __init__(self, config: ManiSkillConfig) -> None:
        task = self.task
        self.config = config
        self.instruction = task.instruction
        self.engine = _make_engine(config)
        self._native = NativeActions(self.engine.base)
        self.engine.reset([0], [0])
        state, proprio, images = self.engine.observe()
        spec = EnvSpec(
            name=f"maniskill/{config.task}",
            num_envs=config.num_envs,
            action_dim=self._native.dim,
            proprio_dim=proprio.shape[1],
            control_mode=config.control_mode or self._native.mode,
            control_hz=float(self.engine.base.control_freq),
            max_episode_steps=config.max_episode_steps or task.max_episode_steps,
            cameras={name: (image.shape[1], image.shape[2]) for name, image in images.items()},
            privileged_dim=state.shape[1],
            tasks=(config.task,),
            layout=layout(self.engine.base, config.obs == "rgb"),
        )
        super().__init__(spec, config)

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> Any:
        """The task's scripted expert, acting in this env; see ``experts.ScriptedExpert``."""
        from embodyrl.sims.maniskill.experts import ScriptedExpert

        return ScriptedExpert(self, noise, seed)

    def close(self) -> None:
        """Frees the scenes."""
        self.engine.close()

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        # Even seeds train and odd ones evaluate, so no split ever sees a state of the other.
        offset = SPLITS.index(self.config.split)
        self.engine.reset(env_ids, [(len(SPLITS) * init + offset) % 2**32 for init in inits])

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        return self.engine.step(self._native(actions), active)

    def _observe(self, env_ids: list[int] | None) -> Obs:
        state, proprio, images = self.engine.observe()
        return Obs(
            images={name: image.to(self.device) for name, image in images.items()},
            proprio=proprio.to(self.device),
            instruction=[self.instruction] * self.spec.num_envs,
            privileged=state.to(self.device),
        )


class NativeActions:
    """Maps actions in [-1, 1] to a robot's own ranges, and counts their dimensions.

    Args:
        base: ManiSkill's env; with several robots, their actions follow one another in one vector.
    """

    def __init__(self, base: Any) -> None:
        space = base.single_action_space
        self.parts = dict(space.spaces) if hasattr(space, "spaces") else {"": space}
        low = np.concatenate([part.low for part in self.parts.values()])
        high = np.concatenate([part.high for part in self.parts.values()])
        agents = getattr(base.agent, "agents", [base.agent])
        self.mode = str(agents[0].control_mode)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            known = agents[0].supported_control_modes
            raise UserError(
                f"The control mode {self.mode!r} has no bounds, so actions in [-1, 1] mean nothing "
                f"there. Take one of {', '.join(known)}."
            )
        self.dim = len(low)
        self._unit = bool((low == -1).all() and (high == 1).all())
        self._low = torch.from_numpy(low)
        self._span = torch.from_numpy(high - low)

    def __call__(self, actions: Tensor) -> Tensor:
        """(N, A) in the robot's units for (N, A) in [-1, 1]."""
        if self._unit:
            return actions
        low = self._low.to(actions.device)
        span = self._span.to(actions.device)
        return low + span * (actions + 1) / 2


def _check(config: ManiSkillConfig) -> ManiSkillTask:
    """The task, if the config makes sense for it."""
    for key, valid in (
        ("obs", ("state", "rgb")),
        ("reward", make_env.REWARDS),
        ("backend", ("auto", "cpu", "gpu")),
        ("split", SPLITS),
    ):
        value = getattr(config, key)
        if value not in valid:
            raise UserError(f"maniskill knows no {key}={value!r}. {did_you_mean(value, valid)}")
    return require_task(config.task)


def _make_engine(config: ManiSkillConfig) -> Engine:
    if config.on_gpu:
        if not torch.cuda.is_available():
            raise UserError(
                "backend=gpu needs a CUDA GPU, and PyTorch sees none here. Use backend=cpu or "
                "backend=auto."
            )
        from embodyrl.sims.maniskill.gpu import GpuEngine

        return GpuEngine(config)
    from embodyrl.sims.maniskill.cpu import CpuEngine

    return CpuEngine(config)
