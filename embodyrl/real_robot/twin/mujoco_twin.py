"""The simulated robot: a MuJoCo task whose arm takes the safety filter's joint commands."""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import dataclasses
import math
from typing import Any

import mujoco
import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Array, Command, RobotState
from embodyrl.sims.mujoco import kinematics, layouts, tasks
from embodyrl.sims.mujoco.config import task_names
from embodyrl.sims.mujoco.env import WORKSPACE_HIGH, WORKSPACE_LOW, MujocoConfig, MujocoEnv

BOX = {"box_low": tuple(WORKSPACE_LOW.tolist()), "box_high": tuple(WORKSPACE_HIGH.tolist())}
"""The workspace of the embedded tasks, as settings of the safety filter."""
TIP = 0.1034
"""m from the hand's frame to the point between its fingers."""
_STATE = mujoco.mjtState.mjSTATE_FULLPHYSICS


class MujocoTwin(MujocoEnv):
    """A ``Robot`` and its ``Clock``: time passes only in ``sleep_until``, which steps the physics.

    The scene, the images and the success are those of the environment, and the arm is its Panda.
    Like ROS's joint trajectory controller, the arm follows a cubic in joint space from one command
    to the next.

    Args:
        config: of the task; one environment is made, whatever ``num_envs`` says.

    Attributes:
        reflex: set it to have the arm report a reflex, for tests.
    """

    def __init__(self, config: MujocoConfig) -> None:
        super().__init__(
            dataclasses.replace(config, num_envs=1, num_threads=config.num_threads or 1)
        )
        self.data = mujoco.MjData(self.model)
        self._own_tasks = self.tasks
        self._now = 0.0
        self.reflex = ""

    def begin(self, init: int) -> None:
        """Puts the scene into initial state ``init`` and the clock to zero.

        The same state and the same commands give the same episode.
        """
        self.tasks = self._own_tasks
        self.reset(init=[init])
        self._now = 0.0
        # Copy the state of the environment, which draws and judges, into the physics of the twin.
        mujoco.mj_resetData(self.model, self.data)
        mujoco.mj_setState(self.model, self.data, self._state[0], _STATE)
        if self.model.nmocap:
            self.data.mocap_pos[:] = self._frame.mocap_pos[0]
        mujoco.mj_forward(self.model, self.data)
        self._grip = self._grip_cmd[0]
        # The commanded path: times (k,), angles (k, 7) and velocities (k, 7) of its knots.
        self._knots = np.array([self._now]), self._q_cmd[:1].copy(), np.zeros((1, 7))

    def go_on(self, init: int, back: bool) -> None:
        """Begins an episode in the scene as it lies: nothing is arranged, and the clock goes on.

        Args:
            init: draws where the block is put back to.
            back: whether its task is the one that undoes the config's.

        Raises:
            UserError: no embedded task undoes it.
        """
        undoing = counterpart_of(self.config) if back else self._own_tasks[0].name
        task = tasks.TASKS[undoing]
        self.tasks = [task]
        self._task_id[0] = 0
        self._update_env()
        layout = self.layouts[0]
        assert layout is not None
        others = self.view().blocks[0, 1:, :2]
        layouts.ask_for(layout, task, self.config.split, init, others)
        self.instructions[0] = layout.instruction
        if task.undoes:
            self._ball_or_zone[0] = layout.zone

    @property
    def at_back(self) -> bool:
        """Whether the present task is the one that undoes the config's."""
        return self.tasks[self._task_id[0]].name != self._own_tasks[0].name

    def now(self) -> float:
        """See ``Clock``."""
        return self._now

    def sleep_until(self, stamp: float) -> None:
        """See ``Clock``."""
        step = self.model.opt.timestep
        while self._now < stamp - step / 2:
            self._now += step
            self.data.ctrl[:7] = self._reference()[0]
            self.data.ctrl[7:9] = self._grip
            mujoco.mj_step(self.model, self.data)

    def state(self) -> RobotState:
        """See ``Robot``; the external force is not estimated."""
        width = float(self.data.qpos[7:9].sum())
        q = self.data.qpos[:7].copy()
        dq = self.data.qvel[:7].copy()
        return RobotState(self._now, q, dq, width, None, self.reflex, hand=self.hand())

    def hand(self) -> Array:
        """(3,) m, the tool centre point by MuJoCo's own kinematics."""
        hand = self.data.body("hand")
        return hand.xpos + TIP * hand.xmat[2::3]  # along its z

    def send(self, command: Command, tick: float = 0.01) -> None:
        """See ``Robot``; the command is to be reached ``tick`` s from now."""
        self.follow(np.array([tick]), command.q[None], command.dq[None])
        self.grasp(command.width)

    def follow(self, times: Array, q: Array, dq: Array) -> None:
        """Follows a path from now on, and stays at its end.

        Args:
            times: (k,) s from now.
            q: (k, 7) angles at those times.
            dq: (k, 7) velocities at those times.

        Raises:
            UserError: they are not finite: MuJoCo would silently begin anew.
        """
        if not (np.isfinite(times).all() and np.isfinite(q).all() and np.isfinite(dq).all()):
            raise UserError("The simulated arm was sent a path that is not finite.")
        # The path begins at the present reference, not at the measured arm.
        here, speed = self._reference()
        self._knots = (
            np.concatenate([[self._now], self._now + times]),
            np.concatenate([here[None], q]),
            np.concatenate([speed[None], dq]),
        )

    def grasp(self, width: float) -> None:
        """Moves the fingers to ``width`` m of opening.

        Raises:
            UserError: it is not finite.
        """
        if not math.isfinite(width):
            raise UserError("The simulated gripper was sent a width that is not finite.")
        self._grip = width / 2

    def _reference(self) -> tuple[Array, Array]:
        """Angles and velocities (7,) of the commanded path now; at rest after its last knot."""
        times, q, dq = self._knots
        k = int(np.searchsorted(times, self._now, side="right")) - 1
        if k >= len(times) - 1:
            return q[-1], np.zeros(7)
        # The cubic between two knots that has their angles and velocities (Hermite).
        span = times[k + 1] - times[k]
        s = (self._now - times[k]) / span
        rise = q[k + 1] - q[k]
        a = span * dq[k] - rise
        b = rise - span * dq[k + 1]
        where = q[k] + s * rise + s * (1 - s) * ((1 - s) * a + s * b)
        speed = (rise + (1 - 2 * s) * ((1 - s) * a + s * b) + s * (1 - s) * (b - a)) / span
        return where, speed

    def observe(self, decoder: DeltaDecoder) -> dict[str, Any]:
        """See ``Robot``."""
        self._update_env()
        # The proprio holds the commanded pose, which in the environment is the target.
        self._target[0] = decoder.position
        self._target_rot[0] = decoder.rotation
        self._grip_cmd[0] = decoder.width / 2
        obs = self._observe(None)
        return {
            "images": {name: image[0].cpu().numpy() for name, image in obs.images.items()},
            "proprio": obs.proprio[0].cpu().numpy(),
            "prompt": obs.instruction[0],
        }

    def prompt(self) -> str:
        """See ``Robot``."""
        return self.instructions[0]

    def pictures(self) -> dict[str, np.ndarray]:
        """See ``Robot``."""
        self._update_env()
        return {name: image[0].cpu().numpy() for name, image in self._observe(None).images.items()}

    def solved(self) -> bool:
        """See ``Robot``."""
        self._update_env()
        return bool(self._per_task("success", np.array([0]))[0])

    def _update_env(self) -> None:
        """Copies the state of the physics into the environment, which draws and judges."""
        mujoco.mj_getState(self.model, self.data, self._state[0], _STATE)
        self._ee[:], self._ee_rot[:], _ = kinematics.forward(self.data.qpos[None, :7])
        self._stale[0] = True


def counterpart_of(config: MujocoConfig) -> str:
    """The embedded task that undoes the one of a config, or the first one of a pair.

    Raises:
        UserError: there is none, or the config has other tasks besides.
    """
    names = task_names(config)
    found = tasks.counterpart(names[0])
    if not found or names[1:] not in ((), (found,)):
        pairs = [f"{t.undoes} and {t.name}" for t in tasks.TASKS.values() if t.undoes]
        raise UserError(
            f"No embedded task undoes {' and '.join(names)}, so the simulated arm cannot go on "
            f"by itself. Tasks that undo each other: {', '.join(pairs)}."
        )
    return found
