"""The MuJoCo model: the arm of ``assets/panda.xml``, table, blocks, markers, drawer, camera."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

from importlib.resources import files

import mujoco
import numpy as np
from numpy.typing import NDArray

BLOCK_HALF = 0.024
"""Half the edge of a block in m; the hand opens to 0.08 m."""
CAMERA_POS = np.array([0.98, 0.0, 0.52])
CAMERA_LOOK_AT = np.array([0.42, 0.0, 0.105])
CAMERA_FOVY = 37.0
LIGHT_DIR = np.array([-0.35, 0.25, -0.9])
TABLE_RGB = np.array([0.60, 0.55, 0.48])
BACKGROUND = (0.16, 0.18, 0.22)
DRAWER_TRAVEL = 0.16
"""How far (m) the drawer slides towards the robot."""
HANDLE = np.array([-0.135, 0.0, 0.055])
"""Handle's centre relative to the cabinet when the drawer is shut."""
REGION_LOW = np.array([0.37, -0.16])
"""x and y (m) of the region in which blocks start, and into which they are put back."""
REGION_HIGH = np.array([0.59, 0.16])
AWAY = np.array([0.0, 0.0, -5.0])
"""Where markers and the cabinet wait when a task has no use for them."""
_CABINET_RGBA = [0.45, 0.33, 0.25, 1.0]
_DRAWER_RGBA = [0.80, 0.68, 0.50, 1.0]
_BOX = mujoco.mjtGeom.mjGEOM_BOX
_PLANE = mujoco.mjtGeom.mjGEOM_PLANE
_SPHERE = mujoco.mjtGeom.mjGEOM_SPHERE


def look_at(
    position: NDArray[np.float64], target: NDArray[np.float64], roll: float = 0.0
) -> NDArray[np.float64]:
    """Quaternion (w, x, y, z) of a camera at ``position`` that faces ``target``.

    MuJoCo's cameras look along their -z axis, with y up.
    """
    back = position - target
    back = back / np.linalg.norm(back)
    right = np.cross([0.0, 0.0, 1.0], back)
    right /= np.linalg.norm(right)
    up = np.cross(back, right)
    c = np.cos(roll)
    s = np.sin(roll)
    matrix = np.stack([c * right + s * up, c * up - s * right, back], axis=1)
    quat = np.empty(4)
    mujoco.mju_mat2Quat(quat, matrix.flatten())
    return quat


def build_scene(num_blocks: int, drawer: bool) -> mujoco.MjModel:
    """Compiles the scene.

    Args:
        num_blocks: how many free blocks, named ``block0`` and so on.
        drawer: whether there is a cabinet with a drawer.

    Returns:
        The model. ``qpos`` is arm (7), fingers (2), blocks (7 each), drawer (1).
    """
    spec = mujoco.MjSpec.from_file(str(files("embodyrl.sims.mujoco") / "assets" / "panda.xml"))
    world = spec.worldbody
    # Blocks rest on an endless plane, which makes at most 4 contacts a block. What is seen is a
    # table top of finite size.
    world.add_geom(
        name="floor", type=_PLANE, size=[0, 0, 1],
        contype=1, conaffinity=0, group=3, condim=3, friction=[1.0, 0.01, 1e-4],
    )  # fmt: skip
    world.add_geom(
        name="table", type=_BOX, pos=[0.42, 0, -0.03], size=[0.5, 0.6, 0.03], rgba=[*TABLE_RGB, 1],
        contype=0, conaffinity=0, group=1,
    )  # fmt: skip
    # Light, background and camera.
    world.add_light(
        name="sun", type=mujoco.mjtLightType.mjLIGHT_DIRECTIONAL, pos=[0, 0, 2], dir=LIGHT_DIR,
        diffuse=[0.65] * 3, ambient=[0.4] * 3, specular=[0.0] * 3, castshadow=False,
    )  # fmt: skip
    spec.add_texture(
        name="sky", type=mujoco.mjtTexture.mjTEXTURE_SKYBOX,
        builtin=mujoco.mjtBuiltin.mjBUILTIN_FLAT, rgb1=BACKGROUND, rgb2=BACKGROUND,
        width=4, height=24,
    )  # fmt: skip
    world.add_camera(
        name="front", pos=CAMERA_POS, quat=look_at(CAMERA_POS, CAMERA_LOOK_AT), fovy=CAMERA_FOVY
    )
    # Markers of goals: they are seen, and touch nothing.
    for name, kind, size in (
        ("ball", _SPHERE, [0.02, 0, 0]),
        ("zone", _BOX, [0.045, 0.045, 0.001]),
    ):
        marker = world.add_body(name=name, mocap=True, pos=AWAY)
        marker.add_geom(
            name=name,
            type=kind,
            size=size,
            rgba=[0.1, 0.9, 0.2, 1],
            contype=0,
            conaffinity=0,
            group=1,
        )
    # Blocks, parked beside the table until a reset places them.
    for k in range(num_blocks):
        body = world.add_body(name=f"block{k}", pos=[-1.0 - 0.2 * k, 1.5, BLOCK_HALF])
        body.add_freejoint(name=f"block{k}")
        body.add_geom(
            name=f"block{k}", type=_BOX, size=[BLOCK_HALF] * 3, mass=0.06, rgba=[0.8, 0.1, 0.1, 1],
            contype=2, conaffinity=11, condim=3, friction=[1.0, 0.01, 1e-4], group=1,
        )  # fmt: skip
    if drawer:
        cabinet = world.add_body(name="cabinet", mocap=True, pos=AWAY)
        # The cabinet is a shell that is only seen. It touches nothing, so the drawer is held by its
        # joint alone.
        for pos, size in (
            ([0.0, 0.0, 0.11], [0.10, 0.10, 0.01]),
            ([0.09, 0.0, 0.05], [0.01, 0.10, 0.05]),
            ([0.0, 0.095, 0.05], [0.10, 0.005, 0.05]),
            ([0.0, -0.095, 0.05], [0.10, 0.005, 0.05]),
        ):
            cabinet.add_geom(
                type=_BOX, pos=pos, size=size, rgba=_CABINET_RGBA, contype=0, conaffinity=0, group=1
            )
        # The drawer: its slide, its front and bottom, and a handle.
        body = cabinet.add_body(name="drawer")
        body.add_joint(
            name="drawer", type=mujoco.mjtJoint.mjJNT_SLIDE, axis=[-1, 0, 0],
            range=[0, DRAWER_TRAVEL], damping=np.array([4.0, 0.0, 0.0]),
            frictionloss=0.3, armature=0.1,
        )  # fmt: skip
        look = dict(contype=0, conaffinity=0, group=1, rgba=_DRAWER_RGBA)
        body.add_geom(type=_BOX, pos=[-0.1, 0, 0.05], size=[0.008, 0.09, 0.045], mass=0.3, **look)
        body.add_geom(type=_BOX, pos=[0.0, 0, 0.015], size=[0.09, 0.085, 0.005], mass=0.2, **look)
        # The handle is a post, which the fingers close on from above.
        body.add_geom(
            name="handle", type=_BOX, pos=HANDLE, size=[0.012, 0.012, 0.04], mass=0.05,
            rgba=[0.9, 0.9, 0.1, 1], contype=8, conaffinity=0, condim=4,
            friction=[1.6, 0.02, 1e-4], group=1,
        )  # fmt: skip
        body.add_geom(
            type=_BOX, pos=[-0.115, 0, 0.03], size=[0.02, 0.008, 0.008], mass=0.02, **look
        )
    return spec.compile()
