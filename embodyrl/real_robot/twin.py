"""A simulated robot: a MuJoCo task whose arm takes the filter's joint commands, in its own time."""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
from typing import Any

import mujoco
import numpy as np

from embodyrl.real_robot.actions import DeltaDecoder
from embodyrl.real_robot.messages import Command, RobotState
from embodyrl.sims.mujoco import kinematics
from embodyrl.sims.mujoco.env import WORKSPACE_HIGH, WORKSPACE_LOW, Config, MujocoEnv

BOX = {"box_low": tuple(WORKSPACE_LOW.tolist()), "box_high": tuple(WORKSPACE_HIGH.tolist())}
_STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS


class MujocoTwin(MujocoEnv):
    """A ``Robot`` and its ``Clock``: time only passes in ``sleep_until``, which moves the physics on.

    The scene, the pictures and the success are the env's; the arm is the Panda of its scene. It follows a straight line
    in joint space from one command to the next.

    Args:
        config: of the task; one env is made, whatever ``num_envs`` says.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(dataclasses.replace(config, num_envs=1, num_threads=config.num_threads or 1))
        self.data = mujoco.MjData(self.model)
        self._now = 0.0
        self.reflex = ""

    def begin(self, init: int) -> None:
        """Puts the scene into initial state ``init``; the clock goes on."""
        self.reset(init=[init])
        mujoco.mj_setState(self.model, self.data, self._state[0], _STATE)
        if self.model.nmocap:
            self.data.mocap_pos[:] = self._frame.mocap_pos[0]
        mujoco.mj_forward(self.model, self.data)
        self._from = self._to = np.append(self._q_cmd[0], self._grip_cmd[0])
        self._sent_at, self._arrives_at = self._now, self._now

    def now(self) -> float:
        """See ``Clock``."""
        return self._now

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``."""
        step = self.model.opt.timestep
        while self._now < stamp - step / 2:
            self._now += step
            span = self._arrives_at - self._sent_at
            share = min((self._now - self._sent_at) / span, 1.0) if span > 0 else 1.0
            where = self._from + share * (self._to - self._from)
            self.data.ctrl[:7], self.data.ctrl[7:9] = where[:7], self._to[7]
            mujoco.mj_step(self.model, self.data)

    def state(self) -> RobotState:
        """See ``Robot``; there is no estimate of the external force."""
        width = float(self.data.qpos[7:9].sum())
        return RobotState(self._now, self.data.qpos[:7].copy(), self.data.qvel[:7].copy(), width, None, self.reflex)

    def send(self, command: Command, tick: float = 0.01) -> None:
        """See ``Robot``; the command is reached ``tick`` s from now."""
        self._from, self._to = self._to, np.append(command.q, command.width / 2)
        self._sent_at, self._arrives_at = self._now, self._now + tick

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """See ``Robot``."""
        self._impose()
        self._target[0], self._target_rot[0] = decoder.position, decoder.rotation
        self._grip_cmd[0] = decoder.width / 2
        obs = self._observe(None)
        return {
            "images": {name: image[0].numpy() for name, image in obs.images.items()},
            "proprio": obs.proprio[0].numpy(),
            "prompt": obs.instruction[0],
        }

    def solved(self) -> bool:
        """See ``Robot``."""
        self._impose()
        return bool(self._per_task("success", np.array([0]))[0])

    def _impose(self) -> None:
        """Tells the env, which draws and judges, where the physics are."""
        mujoco.mj_getState(self.model, self.data, self._state[0], _STATE)
        self._ee[:], self._ee_rot[:], _ = kinematics.forward(self.data.qpos[None, :7])
        self._stale[0] = True
