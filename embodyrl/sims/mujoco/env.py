"""``MujocoEnv``: N Franka tasks, stepped by a ``physics`` and drawn once per chunk."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick
from embodyrl.machine import usable_cores
from embodyrl.sims.mujoco import kinematics, layouts, physics, privileged, render, scene, tasks
from embodyrl.sims.mujoco.config import (
    CONTROL_DIMS,
    POS_SCALE,
    ROT_SCALE,
    MujocoConfig,
    block_range,
    check_config,
    task_names,
)
from embodyrl.sims.mujoco.experts import ScriptedExpert
from embodyrl.types import Conventions, EnvSpec, Obs

SUBSTEPS = 8
WORKSPACE_LOW = np.array([0.28, -0.30, 0.012])
WORKSPACE_HIGH = np.array([0.72, 0.30, 0.40])
MAX_LEAD = 0.08
"""Metres that the command may run ahead of the hand; a blocked hand then stores up no jerk."""
# Columns of the state array; column 0 is the time, and the velocities come last.
_ARM = slice(1, 8)
_FINGERS = slice(8, 10)
_BLOCKS = 10
Array = NDArray[np.float64]


class MujocoEnv(SteppedVecEnv):
    """N Franka tasks.

    ``tasks`` holds what is asked, ``scene`` what is there, ``render`` how it is drawn.
    """

    Config: ClassVar = MujocoConfig

    def __init__(self, config: MujocoConfig) -> None:
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
        # One model for all tasks; what a task does not use waits out of sight.
        self.model = scene.build_scene(self._num_blocks, self._has_drawer)
        cameras = () if config.renderer == "none" else tuple(config.cameras)
        super().__init__(self._make_spec(cameras), config)
        threads = config.num_threads or usable_cores()
        self._physics = physics.make_physics(
            config.backend, self.model, config.num_envs, SUBSTEPS, threads, self.device
        )
        self._make_buffers()
        self._block_geoms = [self.model.geom(f"block{i}").id for i in range(self._num_blocks)]
        self._table_geom = self.model.geom("table").id
        self._front_camera = self.model.camera("front").id
        self._stale = np.ones(config.num_envs, dtype=bool)  # whose pictures are out of date
        size = config.image_size
        blank = torch.zeros(config.num_envs, size, size, 3, dtype=torch.uint8, device=self.device)
        self._images = {name: blank.clone() for name in cameras}
        self._renderer = (
            render.make_renderer(
                config.renderer,
                self.model,
                cameras,
                size,
                threads,
                config.render_batch,
                self.device,
            )
            if cameras
            else None
        )

    def _make_spec(self, cameras: tuple[str, ...]) -> EnvSpec:
        config = self.config
        proprio_dim = 13 if self._pose_control else 7
        parts = ("hand_position:3", "commanded_position:3")
        if self._pose_control:
            parts += ("hand_axis_angle:3", "commanded_axis_angle:3")
        parts += ("gripper_opening:1",)
        # Without cameras the policy has nothing else to see, so proprio holds all there is.
        if not cameras:
            proprio_dim += privileged.DIM
            parts += (f"privileged:{privileged.DIM}",)
        limits = tuple(task.steps for task in self.tasks)
        differ = not config.max_episode_steps and len(set(limits)) > 1
        return EnvSpec(
            name=f"mujoco/{config.task}",
            num_envs=config.num_envs,
            action_dim=CONTROL_DIMS[config.control_mode],
            proprio_dim=proprio_dim,
            control_mode=config.control_mode,
            control_hz=1.0 / (SUBSTEPS * self.model.opt.timestep),
            max_episode_steps=config.max_episode_steps or max(limits),
            cameras={name: (config.image_size, config.image_size) for name in cameras},
            privileged_dim=privileged.DIM,
            tasks=tuple(task.name for task in self.tasks),
            task_steps=limits if differ else (),
            layout=privileged.layout(
                start=proprio_dim,
                fewest_blocks=min(fewest for fewest, _ in self._block_range),
                marker=all(task.marker is not None for task in self.tasks),
                drawer=all(task.drawer for task in self.tasks),
            ),
            conventions=Conventions(
                orientation="upright" if cameras else "",
                channels="rgb" if cameras else "",
                fit="crop",
                state=parts,
                actions="delta",
                scale=(POS_SCALE,) * 3 + (ROT_SCALE,) * (3 if self._pose_control else 0),
                gripper=(-1.0, 1.0),
            ),
        )

    def _make_buffers(self) -> None:
        """Arrays of what is known of each env; every one has a leading N."""
        model = self.model
        num = self.config.num_envs
        self._ramp = (np.arange(1, SUBSTEPS + 1) / SUBSTEPS)[None, :, None]
        self._state = np.tile(physics.initial_state(model), (num, 1))
        # Commands: joint angles, fingers, and the hand's pose that they come from.
        self._q_cmd = np.tile(kinematics.HOME, (num, 1))
        self._grip_cmd = np.full(num, 0.04)
        self._target = np.zeros((num, 3))
        self._target_rot = np.tile(kinematics.DOWN, (num, 1, 1))
        # Measured pose of the hand.
        self._ee = np.zeros((num, 3))
        self._ee_rot = np.tile(kinematics.DOWN, (num, 1, 1))
        # The task, and what its success and progress are measured by.
        self._potential = np.zeros(num)
        self._task_id = np.zeros(num, dtype=np.int64)
        self._ball_or_zone = np.zeros((num, 3))
        self.instructions = [""] * num
        self.layouts: list[layouts.Layout | None] = [None] * num
        # What pictures are drawn from.
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

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        ids = np.array(env_ids)
        task_ids = [init % len(self.tasks) for init in inits]
        drawn = [
            layouts.sample(
                self.tasks[t],
                self.config.split,
                init // len(self.tasks),
                self._num_blocks,
                *self._block_range[t],
                self.config.randomise,
            )
            for t, init in zip(task_ids, inits, strict=True)
        ]
        # The arm: at rest, its hand where the layout wants it, pointing down.
        start = np.array([layout.ee for layout in drawn])
        down = np.broadcast_to(kinematics.DOWN, (len(ids), 3, 3))
        q = kinematics.solve(start, down, iterations=10)
        self._state[ids] = 0.0
        self._state[ids, _ARM] = q
        self._state[ids, _FINGERS] = np.array([[layout.finger] for layout in drawn])
        self._q_cmd[ids] = q
        self._grip_cmd[ids] = [layout.grip for layout in drawn]
        self._ee[ids], self._ee_rot[ids], _ = kinematics.forward(q)
        self._target[ids] = self._ee[ids]
        self._target_rot[ids] = down
        # Everything else, env by env.
        for k, t, layout in zip(env_ids, task_ids, drawn, strict=True):
            self._task_id[k] = t
            self._arrange(k, self.tasks[t], layout)
            self._style(k, layout)
        self._stale[ids] = True
        if self.config.reward == "dense":
            self._potential[ids] = self._per_task("progress", ids)

    def _arrange(self, k: int, task: tasks.Task, layout: layouts.Layout) -> None:
        """Puts blocks, markers and cabinet of env k where the layout has them."""
        self.layouts[k] = layout
        self.instructions[k] = layout.instruction
        for i, (x, y, z, yaw) in enumerate(layout.blocks):
            column = _BLOCKS + 7 * i
            quat = (np.cos(yaw / 2), 0.0, 0.0, np.sin(yaw / 2))
            self._state[k, column : column + 7] = (x, y, z, *quat)
        unmarked = layout.zone if task.undoes else scene.AWAY
        markers = {"ball": layout.ball, "zone": layout.zone, None: unmarked}
        self._ball_or_zone[k] = markers[task.marker]
        zone = layout.zone if task.marker == "zone" else scene.AWAY
        places = [layout.ball, zone, layout.cabinet]
        self._frame.mocap_pos[k] = places[: self.model.nmocap]

    def _style(self, k: int, layout: layouts.Layout) -> None:
        """Gives env k the layout's colours, camera and light."""
        frame = self._frame
        frame.geom_rgba[k, self._block_geoms, :3] = layout.block_rgb[: self._num_blocks]
        frame.geom_rgba[k, self._table_geom, :3] = layout.table_rgb
        frame.cam_pos[k, self._front_camera] = layout.camera_pos
        frame.cam_quat[k, self._front_camera] = layout.camera_quat
        frame.light_dir[k] = layout.light_dir
        frame.diffuse[k] = layout.diffuse
        frame.ambient[k] = layout.ambient

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        rows = active.cpu().numpy().nonzero()[0]
        action = actions.cpu().numpy()[rows].astype(np.float64)
        # The commanded pose is integrated, not the measured one: tracking errors do not add up.
        target = self._target[rows] + POS_SCALE * action[:, :3]
        target = np.clip(target, self._ee[rows] - MAX_LEAD, self._ee[rows] + MAX_LEAD)
        target = np.clip(target, WORKSPACE_LOW, WORKSPACE_HIGH)
        rotation = self._target_rot[rows]
        if self._pose_control:
            rotation = kinematics.exp_rotation(ROT_SCALE * action[:, 3:6]) @ rotation
            self._target_rot[rows] = rotation
        self._target[rows] = target
        # Joint angles for that pose, and one of two positions for the fingers.
        before = self._q_cmd[rows]
        joints = kinematics.ik_step(before, target, rotation)
        grip = np.where(action[:, -1] > 0, 0.04, 0.0)
        time_before = self._state[rows, 0]
        controls = self._controls(rows, before, joints, grip)
        after = self._physics.advance(rows, self._state[rows], controls)
        # MuJoCo resets a diverged simulation without a word, and then its clock is not where it
        # should be.
        expected = time_before + SUBSTEPS * self.model.opt.timestep
        ok = np.isfinite(after).all(axis=1) & (np.abs(after[:, 0] - expected) < 1e-6)
        # Envs that broke keep the state from before the step.
        good = rows[ok]
        self._state[good] = after[ok]
        self._q_cmd[good] = joints[ok]
        self._grip_cmd[good] = grip[ok]
        self._ee[good], self._ee_rot[good], _ = kinematics.forward(after[ok, _ARM])
        self._stale[good] = True
        return self._tick(rows, good)

    def _controls(
        self, rows: NDArray[np.int64], before: Array, joints: Array, grip: Array
    ) -> Array:
        """The command of every physics step (n, SUBSTEPS, C); see ``physics.Physics.advance``."""
        n = len(rows)
        controls = np.empty((n, SUBSTEPS, 9 + 3 * self.model.nmocap * self._has_drawer))
        # A straight line in joint space over the substeps: a step in the command would shake the
        # arm.
        controls[..., :7] = before[:, None] + self._ramp * (joints - before)[:, None]
        controls[..., 7:9] = grip[:, None, None]
        if self._has_drawer:
            # The cabinet is a mocap body, so that one model serves envs whose cabinets stand in
            # different places.
            controls[..., 9:] = self._frame.mocap_pos[rows].reshape(n, 1, -1)
        return controls

    def _tick(self, rows: NDArray[np.int64], good: NDArray[np.int64]) -> Tick:
        """Reward and flags after a step of ``rows``, of which ``good`` did not break."""
        num = self.spec.num_envs
        success = np.zeros(num, dtype=bool)
        fault = np.zeros(num, dtype=bool)
        fault[rows] = True
        fault[good] = False
        success[good] = self._per_task("success", good)
        reward = success.astype(np.float32)
        # Dense reward adds the change of a potential: what was gained can be lost again.
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
            own = self._task_id[rows] == number
            if own.any():
                out[own] = getattr(task, what)(self.view(rows[own]))
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
        after_blocks = _BLOCKS + 7 * self._num_blocks
        blocks = state[:, _BLOCKS:after_blocks].reshape(len(state), self._num_blocks, 7)
        drawer = state[:, after_blocks] if self._has_drawer else np.zeros(len(state))
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
        # Only envs that moved since the last observation are drawn.
        if self._renderer is not None and self._stale.any():
            rows = self._stale.nonzero()[0]
            self._frame.qpos[rows] = self._state[rows, 1 : 1 + self.model.nq]
            for name, pixels in self._renderer.render(self._frame, rows).items():
                self._images[name][torch.from_numpy(rows)] = pixels.to(self.device)
            self._stale[:] = False
        view = self.view()
        task_of_env = [self.tasks[t].name for t in self._task_id]
        all_there_is = privileged.privileged_state(view, self._target, self._grip_cmd, task_of_env)
        # Proprio: the hand and its command, then the fingers' opening; see ``_make_spec``.
        parts: list[Array] = [self._ee, self._target]
        if self._pose_control:
            down = np.broadcast_to(kinematics.DOWN, self._ee_rot.shape)
            parts += [
                kinematics.rotation_error(rotation, down)
                for rotation in (self._ee_rot, self._target_rot)
            ]
        parts.append(view.opening[:, None])
        if not self._images:
            parts.append(all_there_is)
        return Obs(
            images={name: pixels.clone() for name, pixels in self._images.items()},
            proprio=torch.tensor(
                np.concatenate(parts, axis=1), dtype=torch.float32, device=self.device
            ),
            instruction=list(self.instructions),
            privileged=torch.tensor(all_there_is, dtype=torch.float32, device=self.device),
        )

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> ScriptedExpert:
        """The tasks' scripted expert, acting in this env; see ``experts.ScriptedExpert``."""
        return ScriptedExpert(self, noise, seed)

    def close(self) -> None:
        """Stops the threads and frees the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None
        self._physics.close()
