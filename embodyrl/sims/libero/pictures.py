"""``Pictures``: pictures of LIBERO scenes by mujoco-warp's ray caster.

It needs no OpenGL, and on a CPU it is several times as fast.
"""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
import torch
from PIL import Image

from embodyrl.sims.libero.cache import announce_first_compile
from embodyrl.sims.libero.render import CAMERAS
from embodyrl.sims.mujoco.optional_imports import import_warp, warp_device

# Larger textures are shrunk. The ray caster reads single texels, so detail finer than a pixel
# becomes noise. It also keeps 16 bytes for each texel, and LIBERO's largest have 4096 x 4096.
MAX_TEXTURE = 256
_GROUPS = [1, 2]  # of geoms that robosuite's cameras see
# sRGB brightness 0 to 255 -> linear brightness 0 to 255.
_SRGB = np.arange(256) / 255
_TO_LINEAR = np.where(_SRGB <= 0.04045, _SRGB / 12.92, ((_SRGB + 0.055) / 1.055) ** 2.4)
_TO_LINEAR = (255 * _TO_LINEAR).round().astype(np.uint8)
NOWHERE = np.array([0.0, 0.0, -100.0])  # far below the floor, where no camera sees it
# All kinds of geoms in LIBERO's scenes. The kernel is compiled for this list, so only once for all
# scenes.
_KINDS = (0, 2, 4, 5, 6, 7)  # plane, sphere, ellipsoid, cylinder, box, mesh


@dataclass
class View:
    """What the cameras of one env see.

    Attributes:
        qpos: (nq,) when the cameras look.
        fixtures: (F, 7) poses of cabinets and stoves.
        glowing: which burners are on.
    """

    qpos: np.ndarray
    fixtures: np.ndarray
    glowing: list[bool]


class Pictures:
    """Draws the cameras of one scene.

    Args:
        xml: the scene, with its visual geometry.
        fixtures: bodies whose poses differ from env to env.
        burners: names of sites that glow when they are on.
        cameras: which to draw.
        size: height and width of the pictures.
        lanes: threads that draw at the same time on a CPU, each with a copy of the scene.
        device: that draws.
    """

    def __init__(
        self,
        xml: str,
        fixtures: list[int],
        burners: list[str],
        cameras: tuple[str, ...],
        size: int,
        lanes: int,
        device: torch.device,
    ) -> None:
        name = warp_device(device)
        lanes = 1 if device.type == "cuda" else lanes
        self._fixtures = fixtures
        self._size = size
        self._cameras = cameras
        self._model = model = visual_model(xml, burners)
        self._data = mujoco.MjData(model)
        self._glow = glow_geoms(model, burners)
        # Warp draws cameras in the model's order.
        self._order = sorted(cameras, key=lambda name: model.camera(CAMERAS[name]).id)
        names = [CAMERAS[name] for name in self._order]
        with announce_first_compile(
            "drawing kernels", "about a minute", ("warp-lang", "mujoco-warp")
        ):
            self._lanes = [_Lane(model, names, size, name)]  # compiles
        self._lanes += [_Lane(model, names, size, name) for _ in range(lanes - 1)]
        self._pool = ThreadPoolExecutor(lanes) if lanes > 1 else None

    def draw(self, views: list[View]) -> dict[str, np.ndarray]:
        """Camera name -> (len(views), size, size, 3) uint8."""
        # Poses of bodies come from MuJoCo, on one thread; then every lane draws its share.
        packed = np.empty((len(views), len(self._order), self._size, self._size), np.uint32)
        poses = [self._pose(view) for view in views]

        def work(number: int) -> None:
            for i in range(number, len(views), len(self._lanes)):
                packed[i] = self._lanes[number].draw(poses[i]).reshape(packed.shape[1:])

        if self._pool is None or len(views) == 1:
            for number in range(len(self._lanes)):
                work(number)
        else:
            list(self._pool.map(work, range(len(self._lanes))))
        # Packed 0xAARRGGBB: bytes B, G, R, A on a little-endian machine.
        rgb = packed.view(np.uint8).reshape(*packed.shape, 4)[..., 2::-1]
        return {
            name: np.ascontiguousarray(rgb[:, self._order.index(name)]) for name in self._cameras
        }

    def _pose(self, view: View) -> list[np.ndarray]:
        """Poses of geoms, cameras and lights, in the order of ``_Lane``'s targets."""
        m = self._model
        d = self._data
        m.body_pos[self._fixtures] = view.fixtures[:, :3]
        m.body_quat[self._fixtures] = view.fixtures[:, 3:]
        d.qpos[:] = view.qpos
        mujoco.mj_kinematics(m, d)
        mujoco.mj_comPos(m, d)
        mujoco.mj_camlight(m, d)
        for geom, on in zip(self._glow, view.glowing, strict=True):
            if not on:
                d.geom_xpos[geom] = NOWHERE
        out = [d.geom_xpos, d.geom_xmat, d.cam_xpos, d.cam_xmat, d.light_xpos, d.light_xdir]
        return [value.astype(np.float32) for value in out]

    def close(self) -> None:
        """Frees threads, meshes and textures."""
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None
        self._lanes = []


class _Lane:
    """Warp's copy of a scene, and a render context of one world; on a CPU more gain nothing."""

    def __init__(self, model: Any, cameras: list[str], size: int, device: str) -> None:
        self._mjw, self._wp = import_warp()
        self._device = device
        self._model, self._data, self._context = put_scene(model, cameras, size, 1, device)
        d = self._data
        self._targets = [
            d.geom_xpos,
            d.geom_xmat,
            d.cam_xpos,
            d.cam_xmat,
            d.light_xpos,
            d.light_xdir,
        ]
        self._shapes = [target.numpy().shape for target in self._targets]
        self._launch()  # compiles here, not in the middle of the first episode

    def draw(self, poses: list[np.ndarray]) -> np.ndarray:
        """The packed pixels of all cameras."""
        for target, shape, value in zip(self._targets, self._shapes, poses, strict=True):
            target.assign(value.reshape(shape))
        self._launch()
        return self._context.rgb_data.numpy()

    def _launch(self) -> None:
        with self._wp.ScopedDevice(self._device):
            self._mjw.refit_bvh(self._model, self._data, self._context)
            self._mjw.render(self._model, self._data, self._context)


def visual_model(xml: str, burners: list[str]) -> Any:
    """The compiled scene, changed so that the ray caster's pictures look like OpenGL's."""
    model = _with_glow(xml, burners)
    _prepare_textures(model)
    _limit_directional_light(model)
    return model


def glow_geoms(model: Any, burners: list[str]) -> list[int]:
    """The geoms of a ``visual_model`` that must be seen only while their burner is on."""
    return [model.geom(f"{name}_glow").id for name in burners]


def put_scene(
    model: Any, cameras: list[str], size: int, worlds: int, device: str
) -> tuple[Any, Any, Any]:
    """A ``visual_model`` on a device: Warp's model, data and render context.

    Every world has its own poses of fixtures.
    """
    mjw, wp = import_warp()
    with wp.ScopedDevice(device):
        scene = mjw.put_model(model, {"body_pos": worlds, "body_quat": worlds})
        data = mjw.make_data(model, nworld=worlds, nconmax=8, njmax=8)
        context = mjw.create_render_context(
            model,
            nworld=worlds,
            cam_res=(size, size),
            render_rgb=True,
            render_depth=False,
            cam_active=cameras,
            enabled_geom_groups=_GROUPS,
            use_shadows=False,  # none of LIBERO's lights casts any
            enable_specular=False,  # OpenGL's shine, computed at corners only, is hardly seen
            render_skybox=bool((model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX).any()),
            enable_backface_culling=False,
        )
    context.geom_ray_types = _KINDS
    return scene, data, context


def _with_glow(xml: str, burners: list[str]) -> Any:
    """The compiled scene with a geom for every burner's site: the ray caster draws no sites."""
    if not burners:
        return mujoco.MjModel.from_xml_string(xml)
    spec = mujoco.MjSpec.from_string(xml)
    for name in burners:
        site = spec.site(name)
        site.parent.add_geom(
            name=f"{name}_glow", type=site.type, size=site.size, pos=site.pos, quat=site.quat,
            rgba=[*site.rgba[:3], 1.0], group=_GROUPS[0], contype=0, conaffinity=0, mass=0,
        )  # fmt: skip
    return spec.compile()


def _prepare_textures(model: Any) -> None:
    """Shrinks large textures, and makes sRGB ones linear as OpenGL does, in the model's memory."""
    for i in range(model.ntex):
        width = int(model.tex_width[i])
        height = int(model.tex_height[i])
        channels = int(model.tex_nchannel[i])
        start = int(model.tex_adr[i])
        pixels = model.tex_data[start : start + width * height * channels].reshape(
            height, width, channels
        )
        if model.tex_colorspace[i] == mujoco.mjtColorSpace.mjCOLORSPACE_SRGB:
            pixels[..., :3] = _TO_LINEAR[pixels[..., :3]]
        if model.tex_type[i] != mujoco.mjtTexture.mjTEXTURE_2D or max(width, height) <= MAX_TEXTURE:
            continue
        # The smaller picture goes to the beginning of the larger one's memory.
        scale = MAX_TEXTURE / max(width, height)
        size = max(1, round(width * scale)), max(1, round(height * scale))
        small = np.asarray(Image.fromarray(pixels.squeeze()).resize(size, Image.Resampling.BOX))
        model.tex_data[start : start + small.size] = small.ravel()
        model.tex_width[i], model.tex_height[i] = size


def _limit_directional_light(model: Any) -> None:
    """Dims directional lights until the middle of the table gets no more light than 1.

    OpenGL clamps light to 1 before it multiplies it with a texture, and the ray caster afterwards.
    In the kitchens, headlight, spots and sun add up to 1.6: OpenGL shows the table's wood, and the
    ray caster would show white.
    """
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    camera = model.camera(CAMERAS["agentview"]).id
    table = np.array([0.0, 0.0, data.cam_xpos[camera][2] - 0.7])
    # Light on a face that points upwards there: from the headlight, which sits at the camera ...
    head = model.vis.headlight
    other = head.ambient.max() + head.diffuse.max() * max(
        0.0, data.cam_xmat[camera].reshape(3, 3)[2, 2]
    )
    # ... from directional lights ("suns"), and from spots that reach it.
    suns = []
    sunlight = 0.0
    for light in np.flatnonzero(model.light_active):
        brightness = model.light_diffuse[light].max()
        if model.light_type[light] == mujoco.mjtLightType.mjLIGHT_DIRECTIONAL:
            suns.append(light)
            sunlight += brightness * max(0.0, -data.light_xdir[light][2])
            continue
        towards = data.light_xpos[light] - table
        towards /= np.linalg.norm(towards)
        along = -towards @ data.light_xdir[light]
        if along > np.cos(np.deg2rad(model.light_cutoff[light])):
            other += brightness * max(0.0, towards[2]) * along ** model.light_exponent[light]
    # The suns get what the others leave.
    if sunlight > 0:
        model.light_diffuse[suns] *= np.clip((1.0 - other) / sunlight, 0.0, 1.0)
