"""Copies of one LIBERO scene on a device, stepped together by mujoco-warp with the controller between its two halves.

What a world is lies in torch tensors that share their memory with mujoco-warp's arrays (DLPack), so
that goals and observations are computed where the physics is. A control step on a GPU is one CUDA
graph.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.sims.libero.blueprint import Blueprint
from embodyrl.sims.libero.goals_batch import Poses
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.mujoco.optional_imports import import_warp
from embodyrl.sims.mujoco.physics import array_bytes, check_fits, free_host_memory, supported

# What the next control step and the observation depend on: it stays as it is in worlds that are not
# stepped.
STATE = ("qpos", "qvel", "qacc_warmstart", "xpos", "xquat", "site_xpos", "site_xmat")
MEMORY = ("goal_pos", "goal_mat", "gripper", "seen_qpos", "seen_hand", "velocity")
# What a reset alone changes: cabinets and stoves. mujoco-warp computes the geometry that cannot
# move only once.
PLACE = ("body_pos", "body_quat", "geom_xpos", "geom_xmat")
MAX_CONTACTS = 2048
"""In a world on average; what needs more has most likely exploded."""


def snapshot(simulation: Simulation) -> dict[str, np.ndarray]:
    """What makes a world equal to a simulation."""
    data = simulation.data
    memory = simulation.memory
    rows = {name: getattr(data, name) for name in (*STATE, "geom_xpos", "geom_xmat")}
    rows |= {name: getattr(memory, name) for name in MEMORY}
    rows |= {name: getattr(simulation.model, name) for name in ("body_pos", "body_quat")}
    return {name: np.array(value, np.float32) for name, value in rows.items()}


def make_data(model: Any, worlds: int, contacts: int) -> Any:
    """mujoco-warp's data with room for so many contacts in a world on average, half as many pairs of convex shapes."""
    mjw, _ = import_warp()
    return mjw.make_data(
        model, worlds, nconmax=contacts, nccdmax=contacts // 2, njmax=4 * contacts + 64
    )


def bytes_per_world(model: Any, scene: Any, contacts: int) -> int:
    """Memory of one world more: its data, and what mujoco-warp's convex collisions take and give back in every step.

    Args:
        model: MuJoCo's.
        scene: mujoco-warp's.
        contacts: see ``make_data``.
    """
    one, two = (array_bytes(make_data(model, n, contacts)) for n in (1, 2))
    steps = scene.opt.ccd_iterations
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

    Raises:
        UserError: so many worlds do not fit into memory, or mujoco-warp cannot simulate the scene.
    """

    def __init__(self, plan: Blueprint, model: Any, count: int, contacts: int) -> None:
        from embodyrl.sims.libero import osc_warp

        self._mjw, self._wp = import_warp()
        cuda = self._wp.get_cuda_device_count() > 0
        self._warp_device = self._wp.get_device("cuda:0" if cuda else "cpu")
        self.device = torch.device("cuda:0" if cuda else "cpu")
        self.plan = plan
        self.contacts = contacts
        self._osc = osc_warp
        self._host_model = model
        with self._wp.ScopedDevice(self._warp_device):
            self._arm = osc_warp.arm_of(plan.robot, model)
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
            self.tensors[name][len(value) :] = value[
                :1
            ]  # no heap of things in one place, full of contacts
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
        free = self._warp_device.free_memory if self._warp_device.is_cuda else free_host_memory()
        check_fits(count, bytes_per_world(model, self._model, contacts), free)
        self._model.opt.warn_overflow = 0  # it is seen to
        self._data: Any = make_data(model, count, contacts)
        self._action = wp.zeros((count, 7), dtype=float)
        kinds = {"goal_pos": wp.vec3, "goal_mat": wp.mat33, "velocity": wp.vec3}
        widths = {"gripper": 2, "seen_qpos": model.nq, "seen_hand": 9}
        self._memory = {name: wp.zeros(count, dtype=kind) for name, kind in kinds.items()}
        self._memory |= {
            name: wp.zeros((count, width), dtype=float) for name, width in widths.items()
        }
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
        """Puts worlds into the states of simulations."""
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
            (count,) bool: which broke; they, too, stay as they were.
        """
        before = {name: self.tensors[name].clone() for name in (*STATE, *MEMORY)}
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
        good = torch.isfinite(t["qpos"]).all(1) & torch.isfinite(t["qvel"]).all(1) & ~overflow
        stays = ~(active & good)
        for name, value in before.items():
            t[name].copy_(torch.where(stays.view(-1, *[1] * (value.ndim - 1)), value, t[name]))
        t["overflow"].zero_()
        return active & ~good

    def poses(self) -> Poses:
        """What goals and observations are computed from; it changes with every step."""
        t = self.tensors
        state = (
            t[name]
            for name in ("qpos", "qvel", "xpos", "xquat", "site_xpos", "site_xmat", "seen_hand")
        )
        return Poses(*state, *self._contacts)

    def _run(self) -> None:
        wp = self._wp
        if not self._warp_device.is_cuda:
            with wp.ScopedDevice(self._warp_device):
                self._launch()
            return
        if self._graph is None:
            before = {name: value.clone() for name, value in self.tensors.items()}
            torch.cuda.synchronize(self.device)
            with wp.ScopedDevice(self._warp_device):
                self._launch()  # kernels are compiled and loaded before the capture
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
            # robosuite's sensors and cameras look before the last physics step: see
            # ``osc.control_step``.
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
