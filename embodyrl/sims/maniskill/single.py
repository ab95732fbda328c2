"""One ManiSkill episode on the CPU, without the parts of ManiSkill's step that a chunk does not need.

``BaseEnv.step`` computes observation and reward on tensors of one env in every control step, which costs far more than
the physics. Here a control step drives the controller and the scene, asks ``evaluate`` once, and leaves the observation
to the end of the chunk. What remains is ManiSkill's own code on the same numbers, so states, successes and rewards are
bit-equal to ``gymnasium.make`` (tested). ``fast.py`` replaces the two slowest pieces, and checks itself against them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from embodyrl.sims.maniskill import fast


class Outcome(NamedTuple):
    """What one control step did to one env."""

    reward: float
    terminated: bool
    success: bool
    fault: bool


class SingleEnv:
    """A ManiSkill env of one episode (``num_envs=1``, ``sim_backend="physx_cpu"``).

    Args:
        base: from ``make_base_env``.
        reward: ``"sparse"``, ``"dense"`` or ``"normalized_dense"``.
    """

    def __init__(self, base: Any, reward: str) -> None:
        self.base = base
        self.reward = reward
        self._info: dict[str, Any] | None = None
        self._rebuild = False
        self._controller: fast.EEDeltaPosController | None = None
        self._controlled: object = None

    def reset(self, seed: int) -> None:
        """Puts the env into the initial state of ``seed``, whatever ran before."""
        # A scene that held NaN is not trusted to be clean again: it is built anew.
        self.base.reset(seed=seed, options={"reconfigure": True} if self._rebuild else None)
        self._rebuild = False
        self._info = None
        if self._controlled is not self.base.agent:  # tasks that build new shapes for each episode make a new robot, too
            self._controlled = self.base.agent
            self._controller = fast.controller_for(self.base)
            fast.shortcut_grasp_check(self.base)

    def step(self, action: Tensor) -> Outcome:
        """One control step with ``action`` (A,) float32, in the controller's own units."""
        base = self.base
        if self._controller is None:
            base._step_action(action[None])
        else:
            self._controller.set_action(action.numpy())
            _simulate(base)
        base._elapsed_steps += 1
        if not self.finite():
            self._rebuild = True
            return Outcome(0.0, False, False, True)
        self._info = info = base.get_info()
        success, fail = bool(info.get("success", False)), bool(info.get("fail", False))
        if self.reward == "sparse":
            reward = float(success) - float(fail)
        else:
            reward = float(base.get_reward(obs=base.get_obs(info, unflattened=True), action=action[None], info=info))
        return Outcome(reward, success or fail, success, False)

    def finite(self) -> bool:
        """Whether all joints and poses are numbers."""
        total = 0.0
        for articulation in self.base.scene.articulations.values():
            for body in articulation._objs:
                total += float(body.qpos.sum()) + float(body.qvel.sum())
        for actor in self.base.scene.actors.values():
            for body in actor._objs:
                total += float(body.pose.p.sum())
        return bool(np.isfinite(total))

    def state(self) -> Tensor:
        """(S,) the flat task state, ManiSkill's ``obs_mode="state"``."""
        return self.base.get_obs(self._current_info())[0]

    def proprio(self) -> Tensor:
        """(P,) what ManiSkill gives to a policy that sees images: joints, end-effector pose, and the goal if it is not drawn."""
        base = self.base
        base._obs_mode = "rgb"  # tasks look at the mode to decide whether object poses belong in
        try:
            return _flatten(base._get_obs_state_dict(self._current_info()))
        finally:
            base._obs_mode = "state"

    def images(self, cameras: list[str]) -> dict[str, Tensor]:
        """Camera name -> (h, w, 3) uint8, drawn now."""
        base = self.base
        for hidden in base._hidden_objects:
            hidden.hide_visual()
        base.scene.update_render(update_sensors=True, update_human_render_cameras=False)
        out = {}
        for name in cameras:
            sensor = base.scene.sensors[name]
            sensor.capture()
            out[name] = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"][0]
        return out

    def close(self) -> None:
        """Frees the scene."""
        self.base.close()

    def _current_info(self) -> dict[str, Any]:
        if self._info is None:
            self._info = self.base.get_info()
        return self._info


def _simulate(base: Any) -> None:
    """``BaseEnv._step_action`` after the controller has set its targets."""
    base._before_control_step()
    for _ in range(base._sim_steps_per_control):
        base.agent.before_simulation_step()
        base._before_simulation_step()
        base.scene.step()
        base._after_simulation_step()
    base._after_control_step()


def _flatten(tree: Any) -> Tensor:
    if isinstance(tree, dict):
        parts = [_flatten(value) for value in tree.values()]
        return torch.cat([p for p in parts if p.numel()]) if parts else torch.zeros(0)
    return torch.as_tensor(tree).float().flatten()
