"""What steps the scenes of ``MujocoEnv``: MuJoCo's own threads, mujoco-warp or MJX.

All take and give the same state (n, 1 + nq + nv): time, qpos and qvel as MuJoCo flattens them. The
last two run on the env's device. They compute in single precision, and they step all N worlds whichever
are asked for, because their programs have a fixed size.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import sys
from typing import Any, Protocol

import mujoco
import numpy as np
import torch
from mujoco import rollout
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.machine import usable_memory
from embodyrl.sims.mujoco.optional_imports import import_mjx, import_warp, jax_device, warp_device

Array = NDArray[np.float64]
BACKENDS = ("native", "warp", "mjx")
CONTACTS = 64
CONSTRAINTS = 256
"""Room in each world of mujoco-warp; four blocks, a gripper and a drawer need about 40 and 170."""


class Physics(Protocol):
    """Steps worlds."""

    def advance(self, rows: NDArray[np.int64], state: Array, control: Array) -> Array:
        """Physics steps, one for each of the S controls.

        Args:
            rows: (n,) the worlds.
            state: (n, 1 + nq + nv).
            control: (n, S, nu), or (n, S, nu + 3 * nmocap) with the positions of mocap bodies after
                it.

        Returns:
            The state afterwards (n, 1 + nq + nv). A world that broke has numbers that are not
            finite, or a wrong time.
        """
        ...

    def close(self) -> None:
        """Frees threads and memory; may be called twice."""
        ...


class NativePhysics:
    """MuJoCo's C code in threads, in double precision: the reference, and the fastest on a CPU."""

    def __init__(self, model: mujoco.MjModel, num_envs: int, substeps: int, threads: int) -> None:
        self._pool = rollout.Rollout(nthread=threads if threads > 1 else 0)
        self._datas = [mujoco.MjData(model) for _ in range(threads)]
        self._models = [model] * num_envs
        self._nu = model.nu
        state_size = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_FULLPHYSICS)
        self._out = np.empty((num_envs, substeps, state_size))
        self._sensors = np.empty((num_envs, substeps, 0))

    def advance(self, rows: NDArray[np.int64], state: Array, control: Array) -> Array:
        """See ``Physics``."""
        n = len(rows)
        spec = int(mujoco.mjtState.mjSTATE_CTRL)
        if control.shape[2] > self._nu:
            spec |= int(mujoco.mjtState.mjSTATE_MOCAP_POS)
        self._pool.rollout(
            self._models[:n], self._datas, state, control, control_spec=spec, skip_checks=True,
            nstep=control.shape[1], state=self._out[:n], sensordata=self._sensors[:n],
        )  # fmt: skip
        return self._out[:n, -1]

    def close(self) -> None:
        """See ``Physics``."""
        if self._pool.rollout_ is not None:
            self._pool.close()


class WarpPhysics:
    """mujoco-warp; on a GPU all substeps are one CUDA graph.

    Raises:
        UserError: so many worlds do not fit into memory, or the scene has something that
            mujoco-warp cannot do.
    """

    def __init__(
        self, model: mujoco.MjModel, num_envs: int, substeps: int, device: torch.device
    ) -> None:
        name = warp_device(device)
        self._mjw, self._wp = import_warp()
        cuda = device.type == "cuda"
        self._device = self._wp.get_device(name)
        self._timestep = model.opt.timestep
        self._graph = None
        with self._wp.ScopedDevice(self._device):
            self._model = supported("warp", lambda: self._mjw.put_model(model))
            # The second world costs what every further one does.
            one, two = (array_bytes(self._worlds(model, n)) for n in (1, 2))
            free = self._device.free_memory if cuda else usable_memory()[1]
            check_fits(num_envs, two - one, free)
            self._data: Any = self._worlds(model, num_envs)
            self._control = self._wp.zeros((substeps, num_envs, model.nu), dtype=float)
            self._qpos = self._data.qpos.numpy()
            self._qvel = self._data.qvel.numpy()
            self._mocap = self._data.mocap_pos.numpy()
            self._steps()  # compiles, on a machine's first run
            # On a GPU all substeps become one graph, which is launched by one call.
            if cuda:
                with self._wp.ScopedCapture() as capture:
                    self._steps()
                self._graph = capture.graph

    def _worlds(self, model: mujoco.MjModel, count: int) -> Any:
        return self._mjw.make_data(model, nworld=count, nconmax=CONTACTS, njmax=CONSTRAINTS)

    def _steps(self) -> None:
        self._data.qacc_warmstart.zero_()  # as in ``NativePhysics``: the state is all there is
        for k in range(self._control.shape[0]):
            self._wp.copy(self._data.ctrl, self._control[k])
            self._mjw.step(self._model, self._data)

    def advance(self, rows: NDArray[np.int64], state: Array, control: Array) -> Array:
        """See ``Physics``."""
        d = self._data
        nq = self._qpos.shape[1]
        nu = self._control.shape[2]
        # The rows go to their places among all worlds; what the others do is not read.
        everywhere = np.zeros((control.shape[1], len(self._qpos), nu), np.float32)
        everywhere[:, rows] = control[..., :nu].transpose(1, 0, 2)
        self._qpos[rows] = state[:, 1 : 1 + nq]
        self._qvel[rows] = state[:, 1 + nq :]
        if control.shape[2] > nu:
            self._mocap[rows] = control[:, 0, nu:].reshape(len(rows), -1, 3)
        with self._wp.ScopedDevice(self._device):
            d.qpos.assign(self._qpos)
            d.qvel.assign(self._qvel)
            d.mocap_pos.assign(self._mocap)
            self._control.assign(everywhere)
            if self._graph is None:
                self._steps()
            else:
                self._wp.capture_launch(self._graph)
        return joined(state, control, self._timestep, d.qpos.numpy()[rows], d.qvel.numpy()[rows])

    def close(self) -> None:
        """See ``Physics``."""
        self._graph = self._data = None


class MjxPhysics:
    """MJX, which is MuJoCo in JAX.

    Compiling takes a minute or two, once for a scene and number of worlds.

    Raises:
        MissingDependencyError: JAX or MJX is not installed.
        UserError: so many worlds do not fit into memory, or the scene has something that MJX cannot
            do.
    """

    def __init__(
        self, model: mujoco.MjModel, num_envs: int, substeps: int, device: torch.device
    ) -> None:
        place = jax_device(device)
        jax, mjx = import_mjx()
        # Refuse what does not fit: one world's arrays, against the memory that is free.
        on_device = supported("mjx", lambda: mjx.put_model(model, device=place))
        blank = mjx.make_data(model, device=place)
        each = sum(
            leaf.nbytes for leaf in jax.tree_util.tree_leaves(blank) if hasattr(leaf, "nbytes")
        )
        stats = place.memory_stats() or {}
        free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
        check_fits(num_envs, each, free if stats else usable_memory()[1])
        self._timestep = model.opt.timestep
        self._nu = model.nu

        # One function for one world: S physics steps from a state, mapped over all worlds.
        def advance(qpos: Any, qvel: Any, mocap: Any, control: Any) -> Any:
            def step(data: Any, ctrl: Any) -> Any:
                return mjx.step(on_device, data.replace(ctrl=ctrl)), None

            data = blank.replace(qpos=qpos, qvel=qvel, mocap_pos=mocap)
            data, _ = jax.lax.scan(step, data, control)
            return data.qpos, data.qvel

        print("Compiling the scene for JAX (a minute or two; kept on disk) ...", file=sys.stderr)
        self._qpos = np.tile(model.qpos0, (num_envs, 1)).astype(np.float32)
        self._qvel = np.zeros((num_envs, model.nv), np.float32)
        self._mocap = np.tile(np.asarray(blank.mocap_pos), (num_envs, 1, 1))
        control = np.zeros((num_envs, substeps, model.nu), np.float32)
        jitted = jax.jit(jax.vmap(advance))
        with jax.default_device(place):
            self._advance = jitted.lower(self._qpos, self._qvel, self._mocap, control).compile()

    def advance(self, rows: NDArray[np.int64], state: Array, control: Array) -> Array:
        """See ``Physics``."""
        nq = self._qpos.shape[1]
        everywhere = np.zeros((len(self._qpos), control.shape[1], self._nu), np.float32)
        everywhere[rows] = control[..., : self._nu]
        self._qpos[rows] = state[:, 1 : 1 + nq]
        self._qvel[rows] = state[:, 1 + nq :]
        if control.shape[2] > self._nu:
            self._mocap[rows] = control[:, 0, self._nu :].reshape(len(rows), -1, 3)
        qpos, qvel = self._advance(self._qpos, self._qvel, self._mocap, everywhere)
        return joined(
            state, control, self._timestep, np.asarray(qpos)[rows], np.asarray(qvel)[rows]
        )

    def close(self) -> None:
        """See ``Physics``; JAX frees what nothing refers to."""


def make_physics(
    backend: str,
    model: mujoco.MjModel,
    num_envs: int,
    substeps: int,
    threads: int,
    device: torch.device,
) -> Physics:
    """The physics called ``backend``, one of ``BACKENDS``; the native one stays on the CPU."""
    if backend == "warp":
        return WarpPhysics(model, num_envs, substeps, device)
    if backend == "mjx":
        return MjxPhysics(model, num_envs, substeps, device)
    return NativePhysics(model, num_envs, substeps, threads)


def initial_state(model: mujoco.MjModel) -> Array:
    """The state in which the compiled scene begins (1 + nq + nv,)."""
    data = mujoco.MjData(model)
    state = np.empty(mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_FULLPHYSICS))
    mujoco.mj_getState(model, data, state, mujoco.mjtState.mjSTATE_FULLPHYSICS)
    return state


def joined(state: Array, control: Array, timestep: float, qpos: NDArray, qvel: NDArray) -> Array:
    """The state after all controls; mujoco-warp and MJX give no time, so it is counted here."""
    time = state[:, :1] + control.shape[1] * timestep
    return np.concatenate([time, qpos, qvel], axis=1, dtype=np.float64)


def supported(backend: str, put: Any) -> Any:
    """What ``put()`` returns.

    Raises:
        UserError: the backend cannot simulate the scene.
    """
    try:
        return put()
    except NotImplementedError as error:
        raise UserError(
            f"env.backend={backend} cannot simulate this scene: {error} Use env.backend=native."
        ) from error


def check_fits(num_envs: int, bytes_each: int, bytes_free: float) -> None:
    """Raises a ``UserError`` for more worlds than fit, which says how many would."""
    if num_envs * bytes_each > bytes_free:
        raise UserError(
            f"env.num_envs={num_envs} worlds need {num_envs * bytes_each / 2**30:.1f} GiB, and "
            f"{bytes_free / 2**30:.1f} are free: at most {int(bytes_free // bytes_each)} fit."
        )


def array_bytes(data: Any) -> int:
    """Bytes of a dataclass of Warp arrays, including the dataclasses inside it."""
    total = 0
    for value in vars(data).values():
        if hasattr(value, "capacity"):
            total += value.capacity
        elif hasattr(value, "__dataclass_fields__"):
            total += array_bytes(value)
    return total
