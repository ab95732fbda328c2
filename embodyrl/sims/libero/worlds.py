"""``Worlds``: copies of one LIBERO scene on a device, stepped together by mujoco-warp.

The controller runs between the two halves of a physics step. The state of the worlds lies in torch
tensors that share memory with mujoco-warp's arrays (DLPack), so goals and observations are computed
where the physics is. On a GPU a control step is one CUDA graph.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.machine import usable_memory
from embodyrl.sims.libero.blueprint import Blueprint
from embodyrl.sims.libero.goals_batch import Poses
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.mujoco.optional_imports import import_warp, warp_device
from embodyrl.sims.mujoco.physics import array_bytes, check_fits, supported

# What the next control step and the observation depend on. It must not change in worlds that are
# not stepped. First the names in MuJoCo's data, then those in ``osc.Memory``.
STATE = ("qpos", "qvel", "qacc_warmstart", "xpos", "xquat", "site_xpos", "site_xmat")
MEMORY = ("goal_pos", "goal_mat", "gripper", "seen_qpos", "seen_hand", "velocity")
# What only a reset changes: poses of cabinets and stoves. mujoco-warp computes the poses of geoms
# that cannot move only once, so they are set as well.
PLACE = ("body_pos", "body_quat", "geom_xpos", "geom_xmat")
MAX_CONTACTS = 2048
"""In a world on average; a simulation that needs more has most likely diverged."""


def snapshot(simulation: Simulation) -> dict[str, np.ndarray]:
    """The state of a simulation, for ``Worlds.place``."""
    data = simulation.data
    memory = simulation.memory
    rows = {name: getattr(data, name) for name in (*STATE, "geom_xpos", "geom_xmat")}
    rows |= {name: getattr(memory, name) for name in MEMORY}
    rows |= {name: getattr(simulation.model, name) for name in ("body_pos", "body_quat")}
    return {name: np.array(value, np.float32) for name, value in rows.items()}


def make_data(model: Any, worlds: int, contacts: int) -> Any:
    """mujoco-warp's data.

    Args:
        model: MuJoCo's.
        worlds: how many.
        contacts: room for so many in a world on average, and for half as many pairs of convex
            shapes.
    """
    mjw, _ = import_warp()
    return mjw.make_data(
        model, worlds, nconmax=contacts, nccdmax=contacts // 2, njmax=4 * contacts + 64
    )


def bytes_per_world(model: Any, scene: Any, contacts: int) -> int:
    """Bytes that one more world takes.

    They are its data, and mujoco-warp's buffers for convex collisions, allocated in every step.

    Args:
        model: MuJoCo's.
        scene: mujoco-warp's model.
        contacts: see ``make_data``.
    """
    one, two = (array_bytes(make_data(model, n, contacts)) for n in (1, 2))
    steps = scene.opt.ccd_iterations
    # The size of mujoco-warp's buffers for one pair of convex shapes.
    corners = max(scene.npolygonmax, 16)
    degree = max(scene.nmeshdegmax, 3)
    pair = 16 * (10 + 2 * steps) + 20 * (6 + 5 * steps) + 96 + 88 * corners + 44 * degree
    return two - one + contacts // 2 * pair


class Worlds:
    """See the module.

    Args:
        plan: of a task in this scene.
        model: its physics model.
        count: worlds.
        contacts: room for so many in a world on average; it grows by itself.
        device: of the worlds.

    Raises:
        UserError: so many worlds do not fit into memory, or mujoco-warp cannot simulate the scene.
    """

    def __init__(
        self, plan: Blueprint, model: Any, count: int, contacts: int, device: torch.device
    ) -> None:
        name = warp_device(device)
        # Imported here, because it imports Warp itself.
        from embodyrl.sims.libero import osc_warp

        self._mjw, self._wp = import_warp()
        self._warp_device = self._wp.get_device(name)
        self.device = device
        self.plan = plan
        self.contacts = contacts
        self._osc = osc_warp
        self._host_model = model
        with self._wp.ScopedDevice(self._warp_device):
            self._arm = osc_warp.arm_of(plan.robot, model)
        # Warnings that say that a world had more contacts or constraints than there was room for.
        kinds = self._mjw.OverflowType
        self._too_small = int(
            kinds.NEFC | kinds.NJMAX_NNZ | kinds.BROADPHASE | kinds.NARROWPHASE | kinds.CCD
        )
        self.count = 0
        self.tensors = dict[str, Tensor]()
        self.resize(count, contacts)

    def resize(self, count: int, contacts: int) -> None:
        """More worlds, or more room for contacts; the worlds that are there stay as they are."""
        kept = {
            name: self.tensors[name].clone() for name in (*STATE, *MEMORY, *PLACE) if self.count
        }
        self._graph = None
        with self._wp.ScopedDevice(self._warp_device):
            self._allocate(count, contacts)
        for name, value in kept.items():
            self.tensors[name][: len(value)] = value
            # New worlds copy the first one: in an empty one all objects would lie in one place,
            # which makes a great many contacts.
            self.tensors[name][len(value) :] = value[:1]
        self.count = count
        self.contacts = contacts

    def _allocate(self, count: int, contacts: int) -> None:
        mjw = self._mjw
        wp = self._wp
        model = self._host_model
        # What was there is freed before it is asked how much memory there is.
        self._data = self._model = None
        self.tensors = {}
        self._memory = {}
        self._contacts = []
        batch = {"body_pos": count, "body_quat": count}
        self._model: Any = supported("warp", lambda: mjw.put_model(model, batch))
        free = self._warp_device.free_memory if self._warp_device.is_cuda else usable_memory()[1]
        check_fits(count, bytes_per_world(model, self._model, contacts), free)
        self._model.opt.warn_overflow = 0  # ``step`` looks at it
        self._data: Any = make_data(model, count, contacts)
        # The controller's memory; see ``osc.Memory``.
        self._action = wp.zeros((count, 7), dtype=float)
        kinds = {"goal_pos": wp.vec3, "goal_mat": wp.mat33, "velocity": wp.vec3}
        widths = {"gripper": 2, "seen_qpos": model.nq, "seen_hand": 9}
        self._memory = {name: wp.zeros(count, dtype=kind) for name, kind in kinds.items()}
        self._memory |= {
            name: wp.zeros((count, width), dtype=float) for name, width in widths.items()
        }
        # All of it as torch tensors.
        arrays = {
            name: getattr(self._data, name)
            for name in (*STATE, "geom_xpos", "geom_xmat", "overflow")
        }
        arrays |= self._memory | {name: getattr(self._model, name) for name in batch}
        self.tensors = {name: torch.from_dlpack(array) for name, array in arrays.items()}
        contact = self._data.contact
        self._contacts = [
            torch.from_dlpack(array) for array in (contact.geom, contact.worldid, self._data.nacon)
        ]
        self._actions = torch.from_dlpack(self._action)

    def place(self, rows: Sequence[int], snapshots: Sequence[dict[str, np.ndarray]]) -> None:
        """Puts the worlds ``rows`` into states from ``snapshot``."""
        for name in (*STATE, *MEMORY, *PLACE):
            target = self.tensors[name]
            value = torch.from_numpy(np.stack([s[name] for s in snapshots]))
            target[list(rows)] = value.reshape(len(rows), *target.shape[1:]).to(target.device)

    def step(self, actions: Tensor, active: Tensor) -> Tensor:
        """One control step of 50 ms.

        Args:
            actions: (count, 7) in [-1, 1].
            active: (count,) bool; the other worlds stay as they are.

        Returns:
            (count,) bool: which broke; they stay as they were before the step.
        """
        before = {name: self.tensors[name].clone() for name in (*STATE, *MEMORY)}
        # Where there was too little room for contacts, make more, go back, and step again.
        while True:
            self._actions.copy_(actions)
            self._run()
            t = self.tensors
            overflow = (t["overflow"] & self._too_small) != 0
            if self.contacts >= MAX_CONTACTS or not bool((overflow & active).any()):
                break
            self.resize(self.count, 2 * self.contacts)
            for name, value in before.items():
                self.tensors[name].copy_(value)
        # Worlds that were not asked for, or that broke, get their old state back.
        good = torch.isfinite(t["qpos"]).all(1) & torch.isfinite(t["qvel"]).all(1) & ~overflow
        stays = ~(active & good)
        for name, value in before.items():
            t[name].copy_(torch.where(stays.view(-1, *[1] * (value.ndim - 1)), value, t[name]))
        t["overflow"].zero_()
        return active & ~good

    def poses(self) -> Poses:
        """What goals and observations are computed from; the tensors change with every step."""
        t = self.tensors
        state = (
            t[name]
            for name in ("qpos", "qvel", "xpos", "xquat", "site_xpos", "site_xmat", "seen_hand")
        )
        return Poses(*state, *self._contacts)

    def _run(self) -> None:
        """A control step of all worlds; on a GPU it is captured as a graph and then replayed."""
        wp = self._wp
        if not self._warp_device.is_cuda:
            with wp.ScopedDevice(self._warp_device):
                self._launch()
            return
        # The first two runs, one to compile and one to capture, must leave no trace.
        if self._graph is None:
            before = {name: value.clone() for name, value in self.tensors.items()}
            torch.cuda.synchronize(self.device)
            with wp.ScopedDevice(self._warp_device):
                self._launch()  # kernels must be compiled and loaded before the capture
                with wp.ScopedCapture() as capture:
                    self._launch()
            self._graph: Any = capture.graph
            torch.cuda.synchronize(self.device)
            for name, value in before.items():
                self.tensors[name].copy_(value)
        wp.capture_launch(
            self._graph, stream=wp.stream_from_torch(torch.cuda.current_stream(self.device))
        )

    def _launch(self) -> None:
        """The kernels of a control step; see ``osc.control_step``."""
        m = self._model
        d = self._data
        wp = self._wp
        memory = self._memory
        inputs = [d.qpos, d.qvel, d.qfrc_bias, d.M, d.site_xpos, d.site_xmat, d.xanchor, d.xaxis]
        outputs = [memory[name] for name in ("goal_pos", "goal_mat", "gripper", "velocity")]
        count = self._action.shape[0]
        for substep in range(self.plan.substeps):
            self._mjw.step1(m, d)
            wp.launch(
                self._osc.control,
                count,
                [self._arm, substep == 0, self._action, *inputs, *outputs, d.ctrl],
            )
            # The moment at which robosuite's sensors and cameras look.
            seen = substep == self.plan.substeps - 2
            if seen:
                wp.copy(memory["seen_qpos"], d.qpos)
            self._mjw.step2(m, d)
            if seen:
                wp.launch(
                    self._osc.look,
                    count,
                    [self._arm, d.qpos, d.site_xpos, d.xquat, memory["seen_hand"]],
                )

    def close(self) -> None:
        """Frees the device's memory."""
        self._graph = self._data = self._model = None
        self.tensors = {}
        self._memory = {}
        self._contacts = []
