"""``ManiSkillEnv``: ManiSkill (Tao et al. 2025, arXiv:2410.00425) as a ``VecEnv``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick, VecEnv
from embodyrl.errors import UserError
from embodyrl.registry import EnvFactory
from embodyrl.sims.maniskill.actions import NativeActions
from embodyrl.sims.maniskill.config import ManiSkillConfig, check_config
from embodyrl.sims.maniskill.cpu import CpuEngine
from embodyrl.sims.maniskill.engine import Engine
from embodyrl.sims.maniskill.experts import ScriptedExpert
from embodyrl.sims.maniskill.gpu import GpuEngine
from embodyrl.sims.maniskill.layout import layout
from embodyrl.sims.maniskill.tasks import SPLITS, require_task
from embodyrl.sims.workers.pool import PooledVecEnv
from embodyrl.types import Conventions, EnvSpec, Obs

SCALES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "pd_ee_delta_pos": ((0.1,) * 3, (-1.0, 1.0)),
    # ManiSkill multiplies turns with the lower bound of its range.
    "pd_ee_delta_pose": ((0.1, 0.1, 0.1, -0.1, -0.1, -0.1), (-1.0, 1.0)),
}
"""Control mode of the Panda -> metres and radians of an action of 1, and what closes and opens."""


class ManiSkillEnv(SteppedVecEnv):
    """N episodes of one ManiSkill task, in this process; see ``make_env`` for several.

    Args:
        config: see ``ManiSkillConfig``.

    Raises:
        UserError: a key has a value that this task does not know; the message names the nearest
            ones.
        MissingDependencyError: ManiSkill, a Vulkan driver (for images) or the task's assets are
            missing.
    """

    Config = ManiSkillConfig

    def __init__(self, config: ManiSkillConfig) -> None:
        check_config(config)
        task = require_task(config.task)
        self.config = config
        self.instruction = task.instruction
        self.engine = _make_engine(config)
        self._native = NativeActions(self.engine.base)
        # Sizes of observations are known only from a first observation.
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
            conventions=_conventions(self.engine.base, self._native.mode, bool(images)),
        )
        super().__init__(spec, config)

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> ScriptedExpert:
        """The task's scripted expert, acting in this env; see ``experts.ScriptedExpert``."""
        return ScriptedExpert(self, noise, seed)

    def close(self) -> None:
        """Frees the scenes."""
        self.engine.close()

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        # Seeds alternate between the splits (train even, eval odd), so the splits share no state.
        offset = list(SPLITS).index(self.config.split)
        self.engine.reset(env_ids, [(len(SPLITS) * init + offset) % 2**32 for init in inits])

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        tick = self.engine.step(self._native(actions), active)
        self.fault_texts |= self.engine.fault_texts
        return tick

    def _observe(self, env_ids: list[int] | None) -> Obs:
        state, proprio, images = self.engine.observe()
        return Obs(
            images={name: image.to(self.device) for name, image in images.items()},
            proprio=proprio.to(self.device),
            instruction=[self.instruction] * self.spec.num_envs,
            privileged=state.to(self.device),
        )


def _make_engine(config: ManiSkillConfig) -> Engine:
    if config.on_gpu:
        return GpuEngine(config, f"cuda:{config.place().index}")
    if config.backend == "gpu":
        raise UserError(
            f"env.backend=gpu needs a GPU, but env.device={config.device} is the CPU here. Use "
            "env.backend=auto, or run where PyTorch sees a GPU."
        )
    return CpuEngine(config)


def make_env(config: ManiSkillConfig) -> VecEnv:
    """The env that a config describes: in this process, or in ``config.pool_size`` processes.

    Raises:
        UserError: see ``ManiSkillEnv``.
        MissingDependencyError: see there.
    """
    # Looked at here, so that a mistake is reported before any process starts.
    check_config(config)
    require_task(config.task)
    if config.pool_size > 1:
        return PooledVecEnv("maniskill", config, num_workers=config.pool_size)
    return ManiSkillEnv(config)


MANISKILL = EnvFactory(ManiSkillConfig, make_env)
"""What the registry loads."""


def _conventions(base: Any, mode: str, pictures: bool) -> Conventions:
    """What ManiSkill's control modes mean; of a mode that is not in the table only its kind is known."""
    kind = "delta" if "delta" in mode else "velocity" if mode.endswith("vel") else "absolute"
    panda = str(getattr(base.agent, "uid", "")).startswith("panda")
    scale, gripper = SCALES.get(mode, ((), ())) if panda else ((), ())
    return Conventions(
        orientation="upright" if pictures else "",
        channels="rgb" if pictures else "",
        fit="crop",
        actions=kind,
        scale=scale,
        gripper=gripper,
    )
