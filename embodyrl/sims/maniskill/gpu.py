"""ManiSkill on the GPU: one ManiSkill env that holds all N scenes and steps them together."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.errors import UserError
from embodyrl.sims.maniskill.actions import split_action
from embodyrl.sims.maniskill.base_env import make_base_env
from embodyrl.sims.maniskill.config import ManiSkillConfig
from embodyrl.sims.maniskill.observations import draw, visual_proprio

Rows = tuple[Tensor, Tensor, dict[str, Tensor]]


class GpuEngine:
    """See ``engine.Engine``.

    All scenes move in every step, also those of envs that ended. So the last observation of an env
    that ended is kept, and given again until its reset.

    Args:
        config: the env's.
        task: registered id.
        device: ``"cuda:N"`` of PhysX and the renderer; with one env ``"cpu"`` runs the same code
            without a GPU.

    Raises:
        UserError: the task builds other shapes for each episode, which a scene on the GPU cannot.
    """

    def __init__(self, config: ManiSkillConfig, task: str, device: str) -> None:
        self.fault_texts: dict[int, str] = {}
        self.rgb = config.obs == "rgb"
        self.reward = config.reward
        self.base = make_base_env(
            task,
            control_mode=config.control_mode,
            reward=config.reward,
            image_size=config.image_size if self.rgb else 0,
            robot=config.robot,
            num_envs=config.num_envs,
            sim_backend=f"physx_{device}",
            render_backend=device if self.rgb else "none",
        )
        if "reconfiguration_freq" in inspect.signature(type(self.base).__init__).parameters:
            raise UserError(
                f"{task} builds other shapes for each episode, but a scene on the GPU keeps "
                "its shapes, so an initial state would not be the same twice. Run it with "
                "backend=cpu."
            )
        self.cameras: list[str] = []
        self._active = torch.zeros(config.num_envs, dtype=torch.bool, device=self.base.device)
        self._kept_mask = torch.zeros_like(self._active)
        self._kept: Rows | None = None

    @property
    def size(self) -> int:
        """See ``engine.Engine``."""
        return self.base.num_envs

    def grow(self, count: int) -> None:
        """Never called: there is a scene for every env from the start."""
        raise RuntimeError("The scenes of a GPU are all built at once.")

    def reset(self, ids: list[int], seeds: list[int]) -> None:
        """Puts those scenes into the initial states of those seeds.

        Each is set up by itself, so that its state does not depend on which others are reset. The
        steps are those of ``BaseEnv.reset``.
        """
        base = self.base
        rows = torch.tensor(ids, device=base.device)
        # Stop everything that moves in these scenes.
        base.scene._reset_mask = _mask(rows, base)
        base._elapsed_steps[rows] = 0
        base._clear_sim_state()
        base.agent.reset()
        # Draw each env's initial state from its own seed, and leave torch's random stream alone.
        cuda = [base.device] if base.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            for k, seed in zip(ids, seeds, strict=True):
                one = torch.tensor([k], device=base.device)
                base.scene._reset_mask = _mask(one, base)
                base._set_episode_rng([seed] * base.num_envs, one)
                torch.manual_seed(seed)
                base._initialize_episode(one, {})
        # Write the new states to the GPU, and read back what follows from them.
        base.scene._reset_mask = _mask(rows, base)
        if base.gpu_sim_enabled:
            base.scene._gpu_apply_all()
            base.scene.px.gpu_update_articulation_kinematics()
            base.scene._gpu_fetch_all()
        # Controllers start from the joints as they are now.
        controllers = base.agent.controller
        for controller in controllers.values() if isinstance(controllers, dict) else [controllers]:
            controller.reset()
        base.scene._reset_mask = torch.ones(base.num_envs, dtype=torch.bool, device=base.device)
        # These envs run again: what was kept of them is out of date.
        self._active[rows] = True
        self._kept_mask[rows] = False

    def step(self, actions: Tensor, active: Tensor) -> Tick:
        """One control step of all scenes; the outcome of those not active means nothing."""
        base = self.base
        to = active.device
        active = active.to(base.device)
        # Envs that ended in the last step are observed now, before they move on.
        self._keep(self._active & ~active)
        self._active = active
        # Scenes cannot be left out of a step: those not active get an action of zeros.
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
        """State, proprio and images; for envs that ended earlier, what they were at their end."""
        rows = self._look()
        if self._kept is None or not self._kept_mask.any():
            return rows
        return _choose(self._kept_mask, self._kept, rows)

    def tool(self) -> np.ndarray:
        """See ``engine.Engine``."""
        return self.base.agent.tcp.pose.raw_pose.cpu().numpy()

    def pose(self, name: str) -> np.ndarray:
        """See ``engine.Engine``."""
        found = getattr(self.base, name)
        return getattr(found, "pose", found).raw_pose.cpu().numpy()

    def close(self) -> None:
        """Frees the scenes."""
        self.base.close()

    def _keep(self, ended: Tensor) -> None:
        """Keeps the observation of the envs (N,) that ended."""
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
        """(N,) bool from ``evaluate``; False where the task does not report it."""
        value = info.get(key, False)
        return torch.as_tensor(value, device=self.base.device).bool().expand(self.base.num_envs)


def _mask(ids: Tensor, base: Any) -> Tensor:
    """(N,) bool, True at ``ids``."""
    mask = torch.zeros(base.num_envs, dtype=torch.bool, device=base.device)
    mask[ids] = True
    return mask


def _choose(mask: Tensor, yes: Rows, no: Rows) -> Rows:
    """The rows of ``yes`` where ``mask`` (N,) is True, those of ``no`` elsewhere."""

    def pick(a: Tensor, b: Tensor) -> Tensor:
        return torch.where(mask.to(a.device).view(-1, *[1] * (a.ndim - 1)), a, b)

    return (
        pick(yes[0], no[0]),
        pick(yes[1], no[1]),
        {name: pick(image, no[2][name]) for name, image in yes[2].items()},
    )
