"""``BatchPictures``: pictures of many worlds of one LIBERO scene, drawn by one launch.

States and pictures stay on the device.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from collections.abc import Callable

import mujoco
import numpy as np
import torch
from torch import Tensor

from embodyrl.sims.libero.blueprint import Blueprint
from embodyrl.sims.libero.cache import announce_first_compile
from embodyrl.sims.libero.pictures import NOWHERE, glow_geoms, put_scene, visual_model
from embodyrl.sims.libero.render import CAMERAS
from embodyrl.sims.mujoco.optional_imports import import_warp, warp_device


class BatchPictures:
    """Draws the cameras of one scene; ``Pictures`` does the same one world at a time.

    Args:
        plan: of a task in the scene.
        cameras: which to draw.
        size: height and width of the pictures.
        worlds: that one launch draws. Fewer cost the same, and more take several launches.
        device: of the tensors.
    """

    def __init__(
        self,
        plan: Blueprint,
        cameras: tuple[str, ...],
        size: int,
        worlds: int,
        device: torch.device,
    ) -> None:
        self._mjw, self._wp = import_warp()
        self._fixtures = plan.fixtures
        self._cameras = cameras
        self._size = size
        self._worlds = worlds
        self._device = device
        self._warp_device = warp_device(device)
        model = visual_model(plan.xml, plan.burners)
        self._order = sorted(cameras, key=lambda name: model.camera(CAMERAS[name]).id)
        with announce_first_compile(
            "drawing kernels", "about a minute", ("warp-lang", "mujoco-warp")
        ):
            self._model, self._data, self._context = put_scene(
                model, [CAMERAS[name] for name in self._order], size, worlds, self._warp_device
            )
            self._launch(lambda: None)
        m = self._model
        d = self._data
        # Warp's arrays as torch tensors of the same memory.
        self._body_pos = torch.from_dlpack(m.body_pos)
        self._body_quat = torch.from_dlpack(m.body_quat)
        self._qpos = torch.from_dlpack(d.qpos)
        self._geom_pos = torch.from_dlpack(d.geom_xpos)
        self._geom_mat = torch.from_dlpack(d.geom_xmat)
        self._xpos = torch.from_dlpack(d.xpos)
        self._xmat = torch.from_dlpack(d.xmat)
        self._packed = torch.from_dlpack(self._context.rgb_data)
        # mujoco-warp computes the poses of geoms that cannot move only once, but a reset moves
        # cabinets and stoves. ``_put_still`` computes them from these poses in their bodies.
        self._still = torch.tensor(
            np.flatnonzero(model.body_weldid[model.geom_bodyid] == 0), device=device
        )
        still = self._still.tolist()
        self._still_body = torch.tensor(model.geom_bodyid[still], dtype=torch.long, device=device)
        self._still_pos = torch.tensor(model.geom_pos[still], dtype=torch.float32, device=device)
        turn = np.zeros((len(still), 9))
        for out, quat in zip(turn, model.geom_quat[still], strict=True):
            mujoco.mju_quat2Mat(out, quat)
        self._still_mat = torch.tensor(turn.reshape(-1, 3, 3), dtype=torch.float32, device=device)
        self._glow = torch.tensor(glow_geoms(model, plan.burners), dtype=torch.long, device=device)
        self._nowhere = torch.tensor(NOWHERE, dtype=torch.float32, device=device)

    def draw(
        self, qpos: Tensor, body_pos: Tensor, body_quat: Tensor, glowing: Tensor
    ) -> dict[str, Tensor]:
        """Pictures of n worlds.

        Args:
            qpos: (n, nq).
            body_pos: (n, nbody, 3) in the parents' frames; only those of fixtures are used.
            body_quat: (n, nbody, 4).
            glowing: (n, burners) bool.

        Returns:
            Camera name -> (n, size, size, 3) uint8.
        """
        n = len(qpos)
        size = self._size
        out = torch.empty(
            n, len(self._order), size, size, 3, dtype=torch.uint8, device=self._device
        )
        for start in range(0, n, self._worlds):
            # A launch has a fixed size: the last one repeats the last world.
            rows = torch.arange(start, start + self._worlds, device=self._device).clamp(max=n - 1)
            self._qpos.copy_(qpos[rows])
            self._body_pos[:, self._fixtures] = body_pos[rows][:, self._fixtures]
            self._body_quat[:, self._fixtures] = body_quat[rows][:, self._fixtures]
            self._launch(lambda rows=rows: self._put_still(glowing[rows]))
            # Packed 0xAARRGGBB: bytes B, G, R, A on a little-endian machine.
            rgb = self._packed.view(torch.uint8).view(self._worlds, len(self._order), size, size, 4)
            out[start : start + self._worlds] = rgb[: n - start, ..., :3].flip(-1)
        return {name: out[:, self._order.index(name)] for name in self._cameras}

    def _put_still(self, glowing: Tensor) -> None:
        """Poses of geoms that cannot move by themselves; burners that are off go out of sight."""
        mat = self._xmat[:, self._still_body]
        moved = (mat @ self._still_pos[..., None]).squeeze(-1)
        self._geom_pos[:, self._still] = self._xpos[:, self._still_body] + moved
        self._geom_mat[:, self._still] = mat @ self._still_mat
        lit = self._geom_pos[:, self._glow]
        self._geom_pos[:, self._glow] = torch.where(glowing[..., None], lit, self._nowhere)

    def _launch(self, between: Callable[[], None]) -> None:
        """Kinematics, then ``between``, then the pictures, all in torch's stream."""
        m = self._model
        d = self._data
        wp = self._wp
        cuda = self._device.type == "cuda"
        with (
            wp.ScopedStream(wp.stream_from_torch(self._device)) if cuda else wp.ScopedDevice("cpu")
        ):
            self._mjw.kinematics(m, d)
            self._mjw.camlight(m, d)
            between()
            self._mjw.refit_bvh(m, d, self._context)
            self._mjw.render(m, d, self._context)

    def close(self) -> None:
        """Frees meshes, textures and frames."""
        self._model = self._data = self._context = None
        self._packed = torch.empty(0)
