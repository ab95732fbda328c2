"""``MujocoEnv``: N Franka tasks, stepped by a ``physics`` and drawn once per chunk."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import os
from typing import Any, ClassVar

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick
from embodyrl.sims.mujoco import kinematics, physics, render, scene, tasks
from embodyrl.sims.mujoco.config import (
    CONTROL_DIMS,
    MAX_BLOCKS,
    Config,
    block_range,
    check_config,
    task_names,
)
from embodyrl.types import EnvSpec, Obs

SUBSTEPS = 8
POS_SCALE = 0.035
"""Metres that the commanded hand moves at action 1."""
ROT_SCALE = 0.15
"""Radians that it turns at action 1."""
WORKSPACE_LOW = np.array([0.28, -0.30, 0.012])
WORKSPACE_HIGH = np.array([0.72, 0.30, 0.40])
MAX_LEAD = 0.08
"""The command never runs further than this (m) ahead of the hand, so a blocked hand does not store up a jerk."""
_ARM = slice(1, 8)
_FINGERS = slice(8, 10)
_BLOCKS = 10
"""Columns of the state array, whose column 0 is the time."""
Array = NDArray[np.float64]


class MujocoEnv(SteppedVecEnv):
    """See the module; ``tasks`` holds what is asked, ``scene`` what is there, ``render`` how it is drawn."""

    Config: ClassVar = Config

    def __init__(self, config: Config) -> None:
        """Compiles the scene and starts the threads.

        Raises:
            UserError: an unknown task, split, camera or setting.
        """
        check_config(config)
        self.config = config
        self.tasks = [tasks.TASKS[name] for name in task_names(config)]
        self._block_range = [block_range(task, config) for task in self.tasks]
        self._num_blocks = max(most for _, most in self._block_range)
        self._has_drawer = any(task.drawer for task in self.tasks)
        self._pose_control = config.control_mode == "ee_delta_pose"
        self.model = model = scene.build(self._num_blocks, self._has_drawer)
        cameras = () if config.renderer == "none" else tuple(config.cameras)
        num = config.num_envs
        proprio_dim = 13 if self._pose_control else 7
        privileged_dim = 3 * MAX_BLOCKS + 16 + len(tasks.TASKS)
        spec = EnvSpec(
            name=f"mujoco/{config.task}",
            num_envs=num,
            action_dim=CONTROL_DIMS[config.control_mode],
            proprio_dim=proprio_dim if cameras else proprio_dim + privileged_dim,
            control_mode=config.control_mode,
            control_hz=1.0 / (SUBSTEPS * model.opt.timestep),
            max_episode_steps=config.max_episode_steps or max(task.steps for task in self.tasks),
            cameras={name: (config.image_size, config.image_size) for name in cameras},
            privileged_dim=privileged_dim,
            tasks=tuple(task.name for task in self.tasks),
            layout=self._layout(proprio_dim if cameras else proprio_dim + privileged_dim),
        )
        super().__init__(spec, config)
        threads = config.num_threads or usable_cores()
        self._physics = physics.make(config.backend, model, num, SUBSTEPS, threads)
        nstate = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_FULLPHYSICS)
        self._ramp = (np.arange(1, SUBSTEPS + 1) / SUBSTEPS)[None, :, None]
        self._state = np.tile(_initial_state(model, nstate), (num, 1))
        self._q_cmd = np.tile(kinematics.HOME, (num, 1))
        self._grip_cmd = np.full(num, 0.04)
        self._target = np.zeros((num, 3))
        self._target_rot = np.tile(kinematics.DOWN, (num, 1, 1))
        self._ee = np.zeros((num, 3))
        self._ee_rot = np.tile(kinematics.DOWN, (num, 1, 1))
        self._potential = np.zeros(num)
        self._task_id = np.zeros(num, dtype=np.int64)
        self._ball_or_zone = np.zeros((num, 3))
        self.instructions = [""] * num
        self.layouts: list[tasks.Layout | None] = [None] * num
        self._frame = render.Frame(
            qpos=np.tile(model.qpos0, (num, 1)),
            mocap_pos=np.tile(scene.AWAY, (num, model.nmocap, 1)),
            geom_rgba=np.tile(model.geom_rgba, (num, 1, 1)),
            cam_pos=np.tile(model.cam_pos, (num, 1, 1)).astype(np.float32),
            cam_quat=np.tile(model.cam_quat, (num, 1, 1)).astype(np.float32),
            light_dir=np.zeros((num, 3), np.float32),
            diffuse=np.zeros((num, 3), np.float32),
            ambient=np.zeros((num, 3), np.float32),
        )
        self._stale = np.ones(num, dtype=bool)
        size = config.image_size
        blank = torch.zeros(num, size, size, 3, dtype=torch.uint8, device=self.device)
        self._images = {name: blank.clone() for name in cameras}
        self._renderer = (
            render.make(config.renderer, model, cameras, size, threads, config.render_batch)
            if cameras
            else None
        )

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        ids = np.array(env_ids)
        model = self.model
        frame = self._frame
        task_ids = [init % len(self.tasks) for init in inits]
        layouts = [
            tasks.sample(
                self.tasks[t],
                self.config.split,
                init // len(self.tasks),
                self._num_blocks,
                *self._block_range[t],
            )
            for t, init in zip(task_ids, inits, strict=True)
        ]
        start = np.array([layout.ee for layout in layouts])
        down = np.broadcast_to(kinematics.DOWN, (len(ids), 3, 3))
        q = kinematics.solve(start, down, iterations=10)
        self._state[ids] = 0.0
        self._state[ids, _ARM] = q
        self._state[ids, _FINGERS] = 0.04
        self._q_cmd[ids] = q
        self._grip_cmd[ids] = 0.04
        self._ee[ids], self._ee_rot[ids], _ = kinematics.forward(q)
        self._target[ids] = self._ee[ids]
        self._target_rot[ids] = down
        block_geoms = [model.geom(f"block{k}").id for k in range(self._num_blocks)]
        table = model.geom("table").id
        front = model.camera("front").id
        for k, t, layout in zip(env_ids, task_ids, layouts, strict=True):
            self._task_id[k] = t
            self.layouts[k] = layout
            self.instructions[k] = layout.instruction
            for i, (x, y, z, yaw) in enumerate(layout.blocks):
                column = _BLOCKS + 7 * i
                self._state[k, column : column + 7] = (
                    x,
                    y,
                    z,
                    np.cos(yaw / 2),
                    0.0,
                    0.0,
                    np.sin(yaw / 2),
                )
            marker = {"ball": layout.ball, "zone": layout.zone, None: scene.AWAY}[
                self.tasks[t].marker
            ]
            self._ball_or_zone[k] = marker
            places = [layout.ball, layout.zone, layout.cabinet]
            frame.mocap_pos[k] = places[: model.nmocap]
            frame.geom_rgba[k, block_geoms, :3] = layout.block_rgb[: self._num_blocks]
            frame.geom_rgba[k, table, :3] = layout.table_rgb
            frame.cam_pos[k, front] = layout.camera_pos
            frame.cam_quat[k, front] = layout.camera_quat
            frame.light_dir[k] = layout.light_dir
            frame.diffuse[k] = layout.diffuse
            frame.ambient[k] = layout.ambient
        self._stale[ids] = True
        if self.config.reward == "dense":
            self._potential[ids] = self._per_task("progress", ids)

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        rows = active.cpu().numpy().nonzero()[0]
        action = actions.cpu().numpy()[rows].astype(np.float64)
        n = len(rows)
        # The commanded pose is integrated, not the measured one: tracking errors do not add up.
        target = self._target[rows] + POS_SCALE * action[:, :3]
        target = np.clip(target, self._ee[rows] - MAX_LEAD, self._ee[rows] + MAX_LEAD)
        target = np.clip(target, WORKSPACE_LOW, WORKSPACE_HIGH)
        rotation = self._target_rot[rows]
        if self._pose_control:
            rotation = kinematics.exp_rotation(ROT_SCALE * action[:, 3:6]) @ rotation
            self._target_rot[rows] = rotation
        self._target[rows] = target
        before = self._q_cmd[rows]
        joints = kinematics.ik_step(before, target, rotation)
        grip = np.where(action[:, -1] > 0, 0.04, 0.0)
        state = self._state[rows]
        time_before = self._state[rows, 0]
        control = np.empty((n, SUBSTEPS, 9 + 3 * self.model.nmocap * self._has_drawer))
        # A straight line in joint space over the substeps: a step in the command would shake the
        # arm.
        control[..., :7] = before[:, None] + self._ramp * (joints - before)[:, None]
        control[..., 7:9] = grip[:, None, None]
        if self._has_drawer:
            # The cabinet is a mocap body so that one model serves envs whose cabinets stand in
            # different places.
            control[..., 9:] = self._frame.mocap_pos[rows].reshape(n, 1, -1)
        after = self._physics.advance(rows, state, control)
        # MuJoCo resets a diverged simulation without a word, and then its clock is not where it
        # should be.
        expected = time_before + SUBSTEPS * self.model.opt.timestep
        ok = np.isfinite(after).all(axis=1) & (np.abs(after[:, 0] - expected) < 1e-6)
        good = rows[ok]
        self._state[good] = after[ok]
        self._q_cmd[good] = joints[ok]
        self._grip_cmd[good] = grip[ok]
        self._ee[good], self._ee_rot[good], _ = kinematics.forward(after[ok, _ARM])
        self._stale[good] = True
        return self._tick(rows, good)

    def _tick(self, rows: NDArray[np.int64], good: NDArray[np.int64]) -> Tick:
        num = self.spec.num_envs
        success = np.zeros(num, dtype=bool)
        fault = np.zeros(num, dtype=bool)
        fault[rows] = True
        fault[good] = False
        success[good] = self._per_task("success", good)
        reward = success.astype(np.float32)
        if self.config.reward == "dense":
            potential = self._per_task("progress", good)
            reward[good] += potential - self._potential[good]
            self._potential[good] = potential
        return Tick(
            *(torch.as_tensor(x, device=self.device) for x in (reward, success, success, fault))
        )

    def _per_task(self, what: str, rows: NDArray[np.int64]) -> NDArray:
        """``success`` or ``progress`` of the rows, each by its own task."""
        if len(self.tasks) == 1:
            return getattr(self.tasks[0], what)(self.view(rows))
        out = np.zeros(len(rows), dtype=bool if what == "success" else float)
        for number, task in enumerate(self.tasks):
            mine = self._task_id[rows] == number
            if mine.any():
                out[mine] = getattr(task, what)(self.view(rows[mine]))
        return out

    @property
    def task_ids(self) -> NDArray[np.int64]:
        """(N,) number of each env's task in ``tasks``."""
        return self._task_id

    @property
    def commanded(self) -> Array:
        """(N, 3) where the hand has been told to be, in m."""
        return self._target

    @property
    def commanded_rotation(self) -> Array:
        """(N, 3, 3) how the hand has been told to point."""
        return self._target_rot

    def view(self, rows: NDArray[np.int64] | None = None) -> tasks.View:
        """A copy of the state of the envs in ``rows`` (None: all), as tasks and experts see it."""
        rows = np.arange(self.spec.num_envs) if rows is None else rows
        state = self._state[rows]
        blocks = state[:, _BLOCKS : _BLOCKS + 7 * self._num_blocks].reshape(
            len(state), self._num_blocks, 7
        )
        drawer = (
            state[:, _BLOCKS + 7 * self._num_blocks] if self._has_drawer else np.zeros(len(state))
        )
        cabinet = self._frame.mocap_pos[rows][:, -1]
        handle = cabinet + scene.HANDLE
        handle[:, 0] -= drawer
        return tasks.View(
            ee=self._ee[rows],
            opening=state[:, _FINGERS].sum(1),
            blocks=blocks[..., :3],
            goal=self._ball_or_zone[rows],
            handle=handle,
            drawer=drawer,
        )

    def _observe(self, env_ids: list[int] | None) -> Obs:
        if self._renderer is not None and self._stale.any():
            rows = self._stale.nonzero()[0]
            self._frame.qpos[rows] = self._state[rows, 1 : 1 + self.model.nq]
            for name, pixels in self._renderer.render(self._frame, rows).items():
                self._images[name][torch.from_numpy(rows)] = pixels.to(self.device)
            self._stale[:] = False
        view = self.view()
        parts = [self._ee, self._target]
        if self._pose_control:
            down = np.broadcast_to(kinematics.DOWN, self._ee_rot.shape)
            parts += [
                kinematics.rotation_error(rotation, down)
                for rotation in (self._ee_rot, self._target_rot)
            ]
        privileged = self._privileged(view)
        proprio = np.concatenate(
            [*parts, view.opening[:, None], *([] if self._images else [privileged])], axis=1
        )
        return Obs(
            images={name: pixels.clone() for name, pixels in self._images.items()},
            proprio=torch.tensor(proprio, dtype=torch.float32, device=self.device),
            instruction=list(self.instructions),
            privileged=torch.tensor(privileged, dtype=torch.float32, device=self.device),
        )

    def _privileged(self, view: tasks.View) -> Array:
        """(N, S): blocks, marker and handle relative to the hand (target first), heights, gripper and task.

        The time left is not among it: a critic that saw it would be bootstrapped, where the time is
        up, from a state that it was never trained on.
        """
        num = self.spec.num_envs
        blocks = np.zeros((num, MAX_BLOCKS, 3))
        # Parked blocks and unused markers lie metres away: clipped, they say "not here" without
        # dwarfing the rest.
        blocks[:, : self._num_blocks] = np.clip(view.blocks - view.ee[:, None], -1, 1)
        target_z = view.blocks[:, 0, 2] if self._num_blocks else np.zeros(num)
        rest = [
            view.ee, self._target - view.ee, np.clip(view.goal - view.ee, -1, 1), np.clip(view.handle - view.ee, -1, 1),
            np.stack([target_z, view.drawer, view.opening, self._grip_cmd], axis=1),
            np.eye(len(tasks.TASKS))[[list(tasks.TASKS).index(self.tasks[t].name) for t in self._task_id]],
        ]  # fmt: skip
        return np.concatenate([blocks.reshape(num, -1), *rest], axis=1)

    def _layout(self, start: int) -> tuple[tuple[str, int, int], ...]:
        """``EnvSpec.layout`` where ``_privileged`` begins at ``start``: what every episode of every task has."""
        after = start + 3 * MAX_BLOCKS
        blocks = min(fewest for fewest, _ in self._block_range)
        found = [("hand", 0, 3), ("hand", 3, 3), ("hand", after, 3)]
        found += [("relative", start + 3 * k, 3) for k in range(blocks)]
        found += [("mark", after + 6, 3)] * all(task.marker is not None for task in self.tasks)
        found += [("relative", after + 9, 3)] * all(task.drawer for task in self.tasks)
        return tuple(found)

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> Any:
        """The tasks' scripted expert, acting in this env; see ``experts.ScriptedExpert``."""
        from embodyrl.sims.mujoco.experts import ScriptedExpert

        return ScriptedExpert(self, noise, seed)

    def close(self) -> None:
        """Stops the threads and frees the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._physics.close()


def usable_cores() -> int:
    """How many cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _initial_state(model: mujoco.MjModel, nstate: int) -> Array:
    data = mujoco.MjData(model)
    state = np.empty(nstate)
    mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_FULLPHYSICS)
    return state
