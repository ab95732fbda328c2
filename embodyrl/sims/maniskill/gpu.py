"""ManiSkill on the GPU: one ManiSkill env that holds all N scenes and steps them together."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.errors import UserError
from embodyrl.sims.maniskill.cpu import choose_cameras, draw, split_action, visual_proprio
from embodyrl.sims.maniskill.make_env import make_base_env

if TYPE_CHECKING:
    from embodyrl.sims.maniskill.env import ManiSkillConfig

Rows = tuple[Tensor, Tensor, dict[str, Tensor]]


class GpuEngine:
    """See ``env.Engine``. The scenes all move in every step: what an env that ended looked like then is kept for it.

    Args:
        config: the env's.
        sim_backend: PhysX device; with one env ``"physx_cpu"`` runs the same code without a GPU.

    Raises:
        UserError: the task builds other shapes for each episode, which a scene on the GPU cannot.
    """

    def __init__(self, config: ManiSkillConfig, sim_backend: str = "physx_cuda") -> None:
        self.rgb = config.obs == "rgb"
        self.reward = config.reward
        self.base = make_base_env(
            config.task,
            control_mode=config.control_mode,
            reward=config.reward,
            image_size=config.image_size if self.rgb else 0,
            robot=config.robot,
            num_envs=config.num_envs,
            sim_backend=sim_backend,
            render_backend=("gpu" if "cuda" in sim_backend else "cpu") if self.rgb else "none",
        )
        if "reconfiguration_freq" in inspect.signature(type(self.base).__init__).parameters:
            raise UserError(
                f"{config.task} builds other shapes for each episode, but a scene on the GPU keeps "
                "its shapes, so an initial state would not be the same twice. Run it with "
                "backend=cpu."
            )
        self.cameras = choose_cameras(config, self.base) if self.rgb else []
        self._active = torch.zeros(config.num_envs, dtype=torch.bool, device=self.base.device)
        self._kept_mask = torch.zeros_like(self._active)
        self._kept: Rows | None = None

    def reset(self, env_ids: list[int], seeds: list[int]) -> None:
        """Puts those envs into the initial states of those seeds; one by one, so that none depends on the others."""
        base = self.base
        ids = torch.tensor(env_ids, device=base.device)
        base.scene._reset_mask = _mask(ids, base)
        base._elapsed_steps[ids] = 0
        base._clear_sim_state()
        base.agent.reset()
        cuda = [base.device] if base.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            for k, seed in zip(env_ids, seeds, strict=True):
                one = torch.tensor([k], device=base.device)
                base.scene._reset_mask = _mask(one, base)
                base._set_episode_rng([seed] * base.num_envs, one)
                torch.manual_seed(seed)
                base._initialize_episode(one, {})
        base.scene._reset_mask = _mask(ids, base)
        if base.gpu_sim_enabled:
            base.scene._gpu_apply_all()
            base.scene.px.gpu_update_articulation_kinematics()
            base.scene._gpu_fetch_all()
        controllers = base.agent.controller
        for controller in controllers.values() if isinstance(controllers, dict) else [controllers]:
            controller.reset()
        base.scene._reset_mask = torch.ones(base.num_envs, dtype=torch.bool, device=base.device)
        self._active[ids] = True
        self._kept_mask[ids] = False

    def step(self, actions: Tensor, active: Tensor) -> Tick:
        """One control step of all scenes; the outcome of those not active means nothing."""
        base = self.base
        to = active.device
        active = active.to(base.device)
        self._keep(self._active & ~active)
        self._active = active
        native = split_action(base, actions.to(base.device) * active[:, None])
        base._step_action(native)
        base._elapsed_steps += 1
        info = base.get_info()
        success = self._flag(info, "success")
        fail = self._flag(info, "fail")
        if self.reward == "sparse":
            reward = success.float() - fail.float()
        else:
            reward = base.get_reward(
                obs=base.get_obs(info, unflattened=True), action=native, info=info
            )
        fault = ~torch.isfinite(base.get_obs(info)).all(dim=1)
        return Tick(reward.float().to(to), (success | fail).to(to), success.to(to), fault.to(to))

    def observe(self) -> Rows:
        """State, proprio and images; of envs that ended before the last step, what they were then."""
        rows = self._look()
        if self._kept is None or not self._kept_mask.any():
            return rows
        return _choose(self._kept_mask, self._kept, rows)

    def tool(self) -> np.ndarray:
        """(N, 3) position of the tool between the fingers."""
        return self.base.agent.tcp.pose.p.cpu().numpy()

    def position(self, actor: str) -> np.ndarray:
        """(N, 3) position of the actor that ManiSkill's env keeps under that attribute."""
        return getattr(self.base, actor).pose.p.cpu().numpy()

    def close(self) -> None:
        """Frees the scenes."""
        self.base.close()

    def _keep(self, ended: Tensor) -> None:
        if ended.any():
            rows = self._look()
            self._kept = rows if self._kept is None else _choose(ended, rows, self._kept)
            self._kept_mask |= ended

    def _look(self) -> Rows:
        info = self.base.get_info()
        state = self.base.get_obs(info)
        proprio = visual_proprio(self.base, info) if self.rgb else state
        return state, proprio, draw(self.base, self.cameras) if self.cameras else {}

    def _flag(self, info: dict[str, Any], key: str) -> Tensor:
        value = info.get(key, False)
        return torch.as_tensor(value, device=self.base.device).bool().expand(self.base.num_envs)


def _mask(ids: Tensor, base: Any) -> Tensor:
    mask = torch.zeros(base.num_envs, dtype=torch.bool, device=base.device)
    mask[ids] = True
    return mask


def _choose(mask: Tensor, yes: Rows, no: Rows) -> Rows:
    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask.to(a.device).view(-1, *[1] * (a.ndim - 1)), a, b)

    return (
        pick(yes[0], no[0]),
        pick(yes[1], no[1]),
        {name: pick(image, no[2][name]) for name, image in yes[2].items()},
    )
