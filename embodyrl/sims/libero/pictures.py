"""Pictures of LIBERO scenes by mujoco-warp's batch ray caster: no OpenGL, and on a CPU several times its speed."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from PIL import Image

from embodyrl.sims.libero.cache import told_once
from embodyrl.sims.libero.render import CAMERAS
from embodyrl.sims.mujoco.optional_imports import import_warp

# Larger ones are shrunk: the ray caster takes single texels, so that more detail than pixels
# becomes noise, and it keeps 16 bytes for each of theirs (LIBERO's largest have 4096 x 4096).
MAX_TEXTURE = 256
_GROUPS = [1, 2]  # of geoms that robosuite's cameras see
_SRGB = np.arange(256) / 255
_TO_LINEAR = np.where(_SRGB <= 0.04045, _SRGB / 12.92, ((_SRGB + 0.055) / 1.055) ** 2.4)
_TO_LINEAR = (255 * _TO_LINEAR).round().astype(np.uint8)
NOWHERE = np.array([0.0, 0.0, -100.0])
# All kinds that LIBERO's scenes hold. The kernel is compiled for this list, and so only once for
# all scenes.
_KINDS = (0, 2, 4, 5, 6, 7)  # plane, sphere, ellipsoid, cylinder, box, mesh


@dataclass
class View:
    """What the cameras of one env see: qpos (nq,), fixtures' poses (F, 7), and which burners glow."""

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
        lanes: threads that draw at the same time.
        device: of Warp, ``"cpu"`` or ``"cuda:0"``.
    """

    def __init__(
        self, xml: str, fixtures: list[int], burners: list[str], cameras: tuple[str, ...], size: int, lanes: int,
        device: str = "cpu",
    ) -> None:  # fmt: skip
        self._fixtures = fixtures
        self._size = size
        self._cameras = cameras
        self._model = model = visual_model(xml, burners)
        self._data = mujoco.MjData(model)
        self._glow = glow_geoms(model, burners)
        self._order = sorted(cameras, key=lambda name: model.camera(CAMERAS[name]).id)
        names = [CAMERAS[name] for name in self._order]
        with told_once("drawing kernels", "about a minute", ("warp-lang", "mujoco-warp")):
            self._lanes = [_Lane(model, names, size, device)]
        self._lanes += [_Lane(model, names, size, device) for _ in range(lanes - 1)]
        self._pool = ThreadPoolExecutor(lanes) if lanes > 1 else None

    def draw(self, views: list[View]) -> dict[str, np.ndarray]:
        """Camera name -> (len(views), size, size, 3) uint8."""
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
    """Warp's copy of a scene and one render context of one world: a CPU gains nothing from more."""

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
    """The compiled scene as the ray caster needs it, to look like OpenGL's."""
    model = _with_glow(xml, burners)
    _prepare_textures(model)
    _limit_directional_light(model)
    return model


def glow_geoms(model: Any, burners: list[str]) -> list[int]:
    """The geoms of a ``visual_model`` that are seen while a burner is on."""
    return [model.geom(f"{name}_glow").id for name in burners]


def put_scene(
    model: Any, cameras: list[str], size: int, worlds: int, device: str
) -> tuple[Any, Any, Any]:
    """Warp's model with fixtures' poses of each world's own, data and render context of a ``visual_model``."""
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
            # OpenGL's are computed at the corners of large faces alone, and mostly lost
            enable_specular=False,
            render_skybox=bool((model.tex_type == mujoco.mjtTexture.mjTEXTURE_SKYBOX).any()),
            enable_backface_culling=False,
        )
    context.geom_ray_types = _KINDS
    return scene, data, context


def _with_glow(xml: str, burners: list[str]) -> Any:
    """The ray caster draws no sites, so that the sites that glow become geoms."""
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
    """Makes large textures smaller, and sRGB ones linear as OpenGL does, in the model's own memory."""
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
        scale = MAX_TEXTURE / max(width, height)
        size = max(1, round(width * scale)), max(1, round(height * scale))
        small = np.asarray(Image.fromarray(pixels.squeeze()).resize(size, Image.Resampling.BOX))
        model.tex_data[start : start + small.size] = small.ravel()
        model.tex_width[i], model.tex_height[i] = size


def _limit_directional_light(model: Any) -> None:
    """Lowers directional lights until what faces upwards in the middle of the table gets no more light than 1.

    OpenGL clamps light to 1 before it multiplies a texture, the ray caster afterwards: where the
    kitchens' headlight, spots and sun add up to 1.6, the one shows the table's wood and the other
    white.
    """
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    camera = model.camera(CAMERAS["agentview"]).id
    table = np.array([0.0, 0.0, data.cam_xpos[camera][2] - 0.7])
    head = model.vis.headlight
    other = head.ambient.max() + head.diffuse.max() * max(
        0.0, data.cam_xmat[camera].reshape(3, 3)[2, 2]
    )
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
    if sunlight > 0:
        model.light_diffuse[suns] *= np.clip((1.0 - other) / sunlight, 0.0, 1.0)
