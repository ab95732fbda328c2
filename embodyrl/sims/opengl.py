"""Pictures of MuJoCo models by OpenGL, upright and without a screen.

All models of a process share one OpenGL context.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import mujoco
import numpy as np
import torch

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.sims.egl import place_egl

BACKENDS = ("egl", "osmesa", "glfw")

_gl_context: Any = None


def make_current(device: torch.device) -> None:
    """Makes the process's OpenGL context where there is none, and switches to it.

    Args:
        device: where it draws, as far as the driver can: EGL alone lets us choose.

    Raises:
        MissingDependencyError: the machine has no OpenGL driver for drawing without a screen.
        UserError: EGL does not draw on this device.
    """
    global _gl_context
    if _gl_context is None:
        headless = sys.platform.startswith("linux") and not os.environ.get("DISPLAY")
        backend = os.environ.get("MUJOCO_GL", "").lower() or ("egl" if headless else "glfw")
        try:
            if backend not in BACKENDS:
                raise ValueError(f"it must be one of {', '.join(BACKENDS)}")
            if backend == "egl":
                place_egl(device)
            # Not mujoco.GLContext, whose backend was fixed when mujoco was first imported.
            _gl_context = importlib.import_module(f"mujoco.{backend}").GLContext(640, 480)
        except UserError:
            raise
        # Every driver raises errors of its own.
        except Exception as error:
            raise MissingDependencyError(
                f"These cameras need OpenGL, and MUJOCO_GL={backend} does not work here "
                f"({error}). Without a screen install a driver (Debian, Ubuntu: apt-get install "
                "libegl1 libgl1-mesa-dri, and set MUJOCO_GL=egl; or apt-get install libosmesa6, "
                "and set MUJOCO_GL=osmesa), or turn the cameras off with env.cameras=[]."
            ) from error
    _gl_context.make_current()


class Renderer:
    """Draws the cameras of one MuJoCo model.

    Args:
        model: the scene's model, whose meshes and textures are loaded here.
        size: height and width of the pictures.
        device: see ``make_current``.
        geom_groups: the groups of geometry that are shown, and no others; None leaves MuJoCo's own.
    """

    def __init__(
        self,
        model: Any,
        size: int,
        device: torch.device,
        geom_groups: tuple[int, ...] | None = None,
    ) -> None:
        self._device = device
        make_current(device)
        self.model = model
        self.size = size
        model.vis.global_.offwidth = max(model.vis.global_.offwidth, size)
        model.vis.global_.offheight = max(model.vis.global_.offheight, size)
        self.scene = mujoco.MjvScene(model, maxgeom=1000)
        self.camera = mujoco.MjvCamera()
        self.perturb = mujoco.MjvPerturb()
        self.option = mujoco.MjvOption()
        self.camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        # Collision geometry is often in a group of its own.
        if geom_groups is not None:
            self.option.geomgroup[:] = [k in geom_groups for k in range(6)]
        self.context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)

    def draw(self, data: Any, camera: str, model: Any = None) -> np.ndarray:
        """The picture (size, size, 3) uint8 of the poses in ``data``.

        Args:
            data: of the model, or of a copy.
            camera: its name in the model.
            model: a copy of the model that may have other colours, sizes and places; None for the
                model itself.
        """
        model = self.model if model is None else model
        make_current(self._device)
        # In every picture, because another scene's renderer may have bound its own buffer.
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self.context)
        self.camera.fixedcamid = model.camera(camera).id
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(
            model, data, self.option, self.perturb, self.camera, everything, self.scene
        )
        view = mujoco.MjrRect(0, 0, self.size, self.size)
        pixels = np.empty((self.size, self.size, 3), dtype=np.uint8)
        mujoco.mjr_render(view, self.scene, self.context)
        mujoco.mjr_readPixels(pixels, None, view, self.context)
        return pixels[::-1]  # OpenGL's first row is the lowest

    def close(self) -> None:
        """Frees the meshes and textures."""
        make_current(self._device)
        self.context.free()
