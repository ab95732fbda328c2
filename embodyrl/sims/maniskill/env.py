"""``ManiSkillEnv``: ManiSkill (Tao et al. 2025, arXiv:2410.00425) as a ``VecEnv``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick, VecEnv
from embodyrl.errors import UserError
from embodyrl.registry import EnvFactory
from embodyrl.sims.maniskill.config import ManiSkillConfig, check_config
from embodyrl.sims.maniskill.cpu import CpuEngine
from embodyrl.sims.maniskill.engine import Engine
from embodyrl.sims.maniskill.experts import ScriptedExpert
from embodyrl.sims.maniskill.gpu import GpuEngine
from embodyrl.sims.maniskill.layout import layout
from embodyrl.sims.maniskill.scenes import TaskScenes
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
    """N episodes of one or several ManiSkill tasks, in this process; see ``make_env`` for several.

    Several tasks show their states in one vector (``layout.SharedColumns``), and take turns: initial
    state i is of task i % M.

    Args:
        config: see ``ManiSkillConfig``.

    Raises:
        UserError: a key has a value that a task does not know, and the message names the nearest
            ones; or the tasks' actions differ.
        MissingDependencyError: ManiSkill, a Vulkan driver (for images) or the task's assets are
            missing.
    """

    Config = ManiSkillConfig

    def __init__(self, config: ManiSkillConfig) -> None:
        check_config(config)
        self.tasks = [require_task(name) for name in config.tasks]
        self.config = config
        self.scenes = TaskScenes(config, config.tasks, lambda task: _make_engine(config, task))
        base = self.scenes.engines[0].base
        native = self.scenes.native[0]
        limits = tuple(task.max_episode_steps for task in self.tasks)
        differ = not config.max_episode_steps and len(set(limits)) > 1
        spec = EnvSpec(
            name=f"maniskill/{config.task}",
            num_envs=config.num_envs,
            action_dim=native.dim,
            proprio_dim=self.scenes.proprio.size,
            control_mode=config.control_mode or native.mode,
            control_hz=float(base.control_freq),
            max_episode_steps=config.max_episode_steps or max(limits),
            cameras=self.scenes.cameras,
            privileged_dim=self.scenes.state.size,
            tasks=config.tasks,
            task_steps=limits if differ else (),
            layout=layout(self.scenes.proprio, self.scenes.state),
            conventions=_conventions(base, native.mode, bool(self.scenes.cameras)),
        )
        super().__init__(spec, config)

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> ScriptedExpert:
        """The tasks' scripted expert, acting in this env; see ``experts.ScriptedExpert``."""
        return ScriptedExpert(self, noise, seed)

    def close(self) -> None:
        """Frees the scenes."""
        self.scenes.close()

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        # Seeds alternate between the splits (train even, eval odd), so the splits share no state.
        offset = list(SPLITS).index(self.config.split)
        count = len(self.tasks)
        seeds = [(len(SPLITS) * (init // count) + offset) % 2**32 for init in inits]
        self.scenes.reset(env_ids, [init % count for init in inits], seeds)

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        tick = self.scenes.step(actions, active)
        self.fault_texts |= self.scenes.fault_texts
        return tick

    def _observe(self, env_ids: list[int] | None) -> Obs:
        state, proprio, images = self.scenes.observe()
        return Obs(
            images={name: image.to(self.device) for name, image in images.items()},
            proprio=proprio.to(self.device),
            instruction=[self.tasks[init % len(self.tasks)].instruction for init in self.init],
            privileged=state.to(self.device),
        )


def _make_engine(config: ManiSkillConfig, task: str) -> Engine:
    if config.on_gpu:
        return GpuEngine(config, task, f"cuda:{config.place().index}")
    if config.backend == "gpu":
        raise UserError(
            f"env.backend=gpu needs a GPU, but env.device={config.device} is the CPU here. Use "
            "env.backend=auto, or run where PyTorch sees a GPU."
        )
    # Scenes of several tasks are built as they are needed.
    return CpuEngine(config, task, config.num_envs if len(config.tasks) == 1 else 1)


def make_env(config: ManiSkillConfig) -> VecEnv:
    """The env that a config describes: in this process, or in ``config.pool_size`` processes.

    Raises:
        UserError: see ``ManiSkillEnv``.
        MissingDependencyError: see there.
    """
    # Looked at here, so that a mistake is reported before any process starts.
    check_config(config)
    for name in config.tasks:
        require_task(name)
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
