"""Converts ROS messages, as dicts of their fields, to and from numpy arrays."""

from __future__ import annotations

import io

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import Array
from embodyrl.real_robot.images import Image
from embodyrl.real_robot.ros.bus import Fields

CHANNELS = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
}
"""Encoding -> number of channels, and which of them are red, green and blue."""


def seconds(stamp: Fields) -> float:
    """A time in s, from the fields that ROS 1 or ROS 2 gives it."""
    whole = stamp["sec"] if "sec" in stamp else stamp["secs"]
    return whole + 1e-9 * (stamp["nanosec"] if "nanosec" in stamp else stamp["nsecs"])


def time_fields(value: float, ros: int) -> dict[str, int]:
    """The fields of a time in s, for ROS 1 or 2; the inverse of ``seconds``."""
    whole, rest = divmod(round(value * 1e9), 10**9)
    return {"secs": whole, "nsecs": rest} if ros == 1 else {"sec": whole, "nanosec": rest}


def joint_state(names: tuple[str, ...], q: Array, dq: Array, stamp: float, ros: int) -> Fields:
    """A ``sensor_msgs/JointState``."""
    header = {"stamp": time_fields(stamp, ros), "frame_id": ""}
    return {"header": header, "name": list(names), "position": q.tolist(), "velocity": dq.tolist()}


def trajectory(names: tuple[str, ...], times: Array, q: Array, dq: Array, ros: int) -> Fields:
    """A ``trajectory_msgs/JointTrajectory`` that starts when it arrives.

    Args:
        names: of the joints.
        times: (k,) s from the start.
        q: (k, 7) angles.
        dq: (k, 7) velocities.
        ros: 1 or 2.
    """
    points = [
        {"positions": a.tolist(), "velocities": b.tolist(), "time_from_start": time_fields(t, ros)}
        for t, a, b in zip(times.tolist(), q, dq, strict=True)
    ]
    return {"joint_names": list(names), "points": points}


def pose(q: Array, frame: str, stamp: float, ros: int) -> Fields:
    """The hand at joint angles q (7,) as a ``geometry_msgs/PoseStamped`` in the base's frame."""
    position, rotation, _ = kinematics.forward(q)
    # The quaternion of the rotation: sin(angle / 2) * axis and cos(angle / 2).
    vector = kinematics.rotation_vector(rotation)
    angle = float(np.linalg.norm(vector))
    x, y, z = (vector * (np.sin(angle / 2) / angle if angle > 1e-9 else 0.5)).tolist()
    return {
        "header": {"stamp": time_fields(stamp, ros), "frame_id": frame},
        "pose": {
            "position": dict(zip("xyz", position.tolist(), strict=True)),
            "orientation": {"x": x, "y": y, "z": z, "w": float(np.cos(angle / 2))},
        },
    }


def image_fields(image: Image, stamp: float, ros: int) -> Fields:
    """An image (h, w, 3) RGB as a ``sensor_msgs/Image``."""
    height, width = image.shape[:2]
    header = {"stamp": time_fields(stamp, ros), "frame_id": ""}
    size = {"height": height, "width": width, "step": 3 * width}
    return {
        "header": header,
        **size,
        "encoding": "rgb8",
        "is_bigendian": 0,
        "data": image.tobytes(),
    }


def picture(message: Fields) -> Image:
    """The image (h, w, 3) RGB of a ``sensor_msgs/Image`` or ``CompressedImage``.

    Raises:
        UserError: it cannot be read.
    """
    try:
        if "format" in message:
            return _decompressed(message["data"])
        encoding = message["encoding"]
        if encoding not in CHANNELS:
            raise UserError(f"a picture is encoded as {encoding!r}; {', '.join(CHANNELS)} are read")
        # Rows may be padded to ``step`` bytes, and channels may come in another order.
        channels, order = CHANNELS[encoding]
        height = message["height"]
        width = message["width"]
        step = message["step"]
        rows = np.frombuffer(message["data"], np.uint8).reshape(height, step)
        pixels = rows[:, : width * channels].reshape(height, width, channels)
        return pixels[..., :3] if order == (0, 1, 2) else pixels[..., list(order)]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(f"a picture cannot be read ({type(error).__name__}: {error})") from error


def _decompressed(data: bytes) -> Image:
    """The image of a JPEG or PNG file."""
    from PIL import Image as Pillow

    return np.asarray(Pillow.open(io.BytesIO(data), formats=("JPEG", "PNG")).convert("RGB"))


def by_name(message: Fields, names: tuple[str, ...], what: str) -> Array:
    """The values of some joints of a ``sensor_msgs/JointState``.

    Args:
        message: may have its joints in any order, and more of them.
        names: of the joints.
        what: ``"position"`` or ``"velocity"``.

    Returns:
        Values in the order of ``names``.

    Raises:
        UserError: a name or a value is missing.
    """
    there = message["name"]
    values = message[what]
    if missing := [name for name in names if name not in there]:
        raise UserError(f"the joint states lack joint {missing[0]} (they have {', '.join(there)})")
    if len(values) != len(there):
        raise UserError(f"the joint states lack a {what} of each joint")
    return np.array([values[there.index(name)] for name in names], dtype=float)
