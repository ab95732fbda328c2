"""Pictures of many envs at once, by mujoco-warp's ray caster (CPU or GPU) or by OpenGL."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.errors import MissingDependencyError
from embodyrl.sims.egl import place_egl
from embodyrl.sims.mujoco.optional_imports import import_warp, warp_device
from embodyrl.sims.mujoco.scene import BACKGROUND

Pixels = dict[str, Tensor]


@dataclass
class Frame:
    """What n pictures are made from; every array has a leading n.

    Geoms and cameras are in the model's order.
    """

    qpos: NDArray[np.float64]
    mocap_pos: NDArray[np.float64]
    geom_rgba: NDArray[np.float32]
    cam_pos: NDArray[np.float32]
    cam_quat: NDArray[np.float32]
    light_dir: NDArray[np.float32]
    diffuse: NDArray[np.float32]
    ambient: NDArray[np.float32]


class Renderer(Protocol):
    """Draws rows of a ``Frame``."""

    def render(self, frame: Frame, rows: NDArray[np.int64]) -> Pixels:
        """Camera name -> (len(rows), size, size, 3) uint8, on the device that draws."""
        ...

    def close(self) -> None:
        """Frees windows and threads."""
        ...


class WarpRenderer:
    """mujoco-warp's ray caster.

    On a CPU Warp uses one core, so there are several lanes: threads with worlds of their own.
    """

    def __init__(
        self,
        model: mujoco.MjModel,
        cameras: tuple[str, ...],
        size: int,
        device: torch.device,
        lanes: int,
        worlds: int,
    ) -> None:
        """Builds the contexts and compiles the kernels.

        Compiling takes a minute the first time on a machine; later it comes from a cache on disk.

        Args:
            model: the scene.
            cameras: names of the cameras to draw.
            size: edge of the square picture in pixels.
            device: the CPU or a GPU; the pictures stay there.
            lanes: threads that draw at the same time (1 is best on a GPU).
            worlds: envs that one launch draws.
        """
        self._cameras = cameras
        self._size = size
        self._worlds = worlds
        self._device = device
        # Warp draws cameras in the model's order.
        self._order = sorted(cameras, key=lambda name: model.camera(name).id)
        name = warp_device(device)
        _, wp = import_warp()
        if not any(Path(wp.config.kernel_cache_dir).glob("*render_megakernel*")):
            print("Compiling the renderer's kernels (10 to 60 s, this once) ...", file=sys.stderr)
        self._lanes = [_Lane(model, self._order, size, name, worlds) for _ in range(lanes)]
        self._pool = ThreadPoolExecutor(lanes) if lanes > 1 else None

    def render(self, frame: Frame, rows: NDArray[np.int64]) -> Pixels:
        """See ``Renderer``."""
        shape = (len(rows), len(self._order), self._size, self._size)
        packed = torch.empty(shape, dtype=torch.int32, device=self._device)
        starts = list(range(0, len(rows), self._worlds))

        # Every lane takes each len(lanes)-th batch.
        def draw(number: int) -> None:
            for start in starts[number :: len(self._lanes)]:
                part = rows[start : start + self._worlds]
                self._lanes[number].draw(frame, part, packed[start : start + len(part)])

        if self._pool is None or len(starts) == 1:
            for number in range(len(self._lanes)):
                draw(number)
        else:
            list(self._pool.map(draw, range(len(self._lanes))))
        # Packed 0xAARRGGBB: bytes B, G, R, A on a little-endian machine.
        rgb = packed.view(torch.uint8).view(*shape, 4)[..., :3].flip(-1)
        return {name: rgb[:, self._order.index(name)] for name in self._cameras}

    def close(self) -> None:
        """See ``Renderer``."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        self._lanes = []


class _Lane:
    """One Warp model, data and render context of a fixed number of worlds."""

    def __init__(
        self, model: mujoco.MjModel, cameras: list[str], size: int, device: str, worlds: int
    ) -> None:
        mjw, wp = import_warp()
        self._mjw = mjw
        self._wp = wp
        self._device = device
        self._worlds = worlds
        data = mujoco.MjData(model)
        mujoco.mj_forward(model, data)
        with wp.ScopedDevice(device):
            self._model = m = mjw.put_model(model)
            self._data = mjw.put_data(model, data, nworld=worlds, nconmax=64, njmax=256)
            # Batched model fields: a leading dimension of ``worlds`` in place of 1 gives every
            # world its own.
            m.geom_rgba = wp.array(np.tile(model.geom_rgba, (worlds, 1, 1)), dtype=wp.vec4)
            m.cam_pos = wp.array(np.tile(model.cam_pos, (worlds, 1, 1)), dtype=wp.vec3)
            m.cam_quat = wp.array(np.tile(model.cam_quat, (worlds, 1, 1)), dtype=wp.quat)
            m.light_dir = wp.array(np.tile(model.light_dir, (worlds, 1, 1)), dtype=wp.vec3)
            m.light_diffuse = wp.array(np.tile(model.light_diffuse, (worlds, 1, 1)), dtype=wp.vec3)
            m.light_ambient = wp.array(np.tile(model.light_ambient, (worlds, 1, 1)), dtype=wp.vec3)
            self._context = mjw.create_render_context(
                model,
                nworld=worlds,
                cam_res=(size, size),
                render_rgb=True,
                render_depth=False,
                cam_active=cameras,
                enabled_geom_groups=[1],
                use_textures=False,
                use_shadows=False,
                enable_specular=False,
                enable_emission=False,
                enable_backface_culling=False,
                background_color=(*BACKGROUND, 1.0),
            )
        self._launch()  # compiles here, on one thread, not in the middle of the first episode
        self._packed = torch.from_dlpack(self._context.rgb_data).view(torch.int32)

    def draw(self, frame: Frame, rows: NDArray[np.int64], out: Tensor) -> None:
        """Draws ``rows`` (at most ``worlds``) into ``out`` (len(rows), cameras, size, size)."""
        m = self._model
        d = self._data
        # Short batches are filled up by repeating the first row: the launch has a fixed size.
        full = np.concatenate([rows, np.full(self._worlds - len(rows), rows[0])])
        d.qpos.assign(frame.qpos[full])
        d.mocap_pos.assign(frame.mocap_pos[full])
        m.geom_rgba.assign(frame.geom_rgba[full])
        m.cam_pos.assign(frame.cam_pos[full])
        m.cam_quat.assign(frame.cam_quat[full])
        m.light_dir.assign(frame.light_dir[full][:, None])
        m.light_diffuse.assign(frame.diffuse[full][:, None])
        m.light_ambient.assign(frame.ambient[full][:, None])
        self._launch()
        out.copy_(self._packed[: len(rows)].view(out.shape))

    def _launch(self) -> None:
        m = self._model
        d = self._data
        mjw = self._mjw
        with self._wp.ScopedDevice(self._device):
            mjw.kinematics(m, d)
            mjw.camlight(m, d)
            mjw.refit_bvh(m, d, self._context)
            mjw.render(m, d, self._context)


class OpenGLRenderer:
    """MuJoCo's own renderer: one picture after the other, and nothing to compile.

    Without a GPU it is slower than ``WarpRenderer``.
    """

    def __init__(
        self, model: mujoco.MjModel, cameras: tuple[str, ...], size: int, device: torch.device
    ) -> None:
        """Opens an off-screen context on a device, as far as its driver can.

        The driver is the one that ``MUJOCO_GL`` named when MuJoCo was imported. EGL alone lets us
        choose between devices.

        Raises:
            MissingDependencyError: the driver does not work here.
            UserError: it does not draw on this device.
        """
        self._model = model
        self._cameras = cameras
        self._data = mujoco.MjData(model)
        if os.environ.get("MUJOCO_GL", "").lower() == "egl":
            place_egl(device)
        try:
            self._renderer = mujoco.Renderer(model, size, size)
        except Exception as error:
            raise MissingDependencyError(
                f"MuJoCo could not open an off-screen OpenGL context ({error}). Set MUJOCO_GL=egl "
                "before starting; if that does not help, install an EGL driver (Debian/Ubuntu: "
                "apt-get install libegl1 libgl1-mesa-dri), or use renderer=warp, which needs none."
            ) from error
        # What the ray caster leaves out is left out here, too, so that pictures look alike.
        scene = self._renderer.scene
        scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[1] = 1
        self._option.sitegroup[:] = 0

    def render(self, frame: Frame, rows: NDArray[np.int64]) -> Pixels:
        """See ``Renderer``."""
        size = (self._renderer.height, self._renderer.width)
        out = {name: np.empty((len(rows), *size, 3), np.uint8) for name in self._cameras}
        m = self._model
        d = self._data
        for i, row in enumerate(rows):
            d.qpos[:] = frame.qpos[row]
            d.mocap_pos[:] = frame.mocap_pos[row]
            m.geom_rgba[:] = frame.geom_rgba[row]
            m.cam_pos[:] = frame.cam_pos[row]
            m.cam_quat[:] = frame.cam_quat[row]
            m.light_dir[:] = frame.light_dir[row]
            m.light_diffuse[:] = frame.diffuse[row]
            m.light_ambient[:] = frame.ambient[row]
            mujoco.mj_kinematics(m, d)
            mujoco.mj_camlight(m, d)
            for name in self._cameras:
                self._renderer.update_scene(d, name, self._option)
                self._renderer.render(out=out[name][i])
        return {name: torch.from_numpy(pixels) for name, pixels in out.items()}

    def close(self) -> None:
        """See ``Renderer``."""
        self._renderer.close()


def make_renderer(
    kind: str,
    model: mujoco.MjModel,
    cameras: tuple[str, ...],
    size: int,
    lanes: int,
    worlds: int,
    device: torch.device,
) -> Renderer:
    """The renderer called ``kind``.

    Args:
        kind: ``"warp"`` or ``"opengl"``.
        model: the scene.
        cameras: names of the cameras to draw.
        size: edge of the square picture in pixels.
        lanes: threads of ``WarpRenderer`` on a CPU.
        worlds: envs that one launch of it draws on a CPU; on a GPU it draws four times as many.
        device: that draws.
    """
    if kind == "opengl":
        return OpenGLRenderer(model, cameras, size, device)
    if device.type == "cuda":
        return WarpRenderer(model, cameras, size, device, 1, 4 * worlds)
    return WarpRenderer(model, cameras, size, device, lanes, worlds)
