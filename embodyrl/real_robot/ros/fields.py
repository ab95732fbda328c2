"""Messages as dicts, to and from what the rest works with."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import Array
from embodyrl.real_robot.ros.bus import Fields

Image = NDArray[np.uint8]
CHANNELS = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
}
"""Encoding -> channels, and which of them are red, green and blue."""


def seconds(stamp: Fields) -> float:
    """A time as either ROS writes it, in s."""
    whole = stamp["sec"] if "sec" in stamp else stamp["secs"]
    return whole + 1e-9 * (stamp["nanosec"] if "nanosec" in stamp else stamp["nsecs"])


def time_fields(value: float, ros: int) -> dict[str, int]:
    """The inverse of ``seconds`` for ROS 1 or 2."""
    whole, rest = divmod(round(value * 1e9), 10**9)
    return dict(
        zip(("secs", "nsecs") if ros == 1 else ("sec", "nanosec"), (whole, rest), strict=True)
    )


def joint_state(names: tuple[str, ...], q: Array, dq: Array, stamp: float, ros: int) -> Fields:
    """A ``sensor_msgs/JointState``."""
    header = {"stamp": time_fields(stamp, ros), "frame_id": ""}
    return {"header": header, "name": list(names), "position": q.tolist(), "velocity": dq.tolist()}


def trajectory(names: tuple[str, ...], times: Array, q: Array, dq: Array, ros: int) -> Fields:
    """A ``trajectory_msgs/JointTrajectory`` that starts when it arrives: times (k,) in s, q and dq (k, 7)."""
    points = [
        {"positions": a.tolist(), "velocities": b.tolist(), "time_from_start": time_fields(t, ros)}
        for t, a, b in zip(times.tolist(), q, dq, strict=True)
    ]
    return {"joint_names": list(names), "points": points}


def pose(q: Array, frame: str, stamp: float, ros: int) -> Fields:
    """The hand at joint angles q (7,) as a ``geometry_msgs/PoseStamped`` in the base's frame."""
    position, rotation, _ = kinematics.forward(q)
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
    """A ``sensor_msgs/Image`` of (h, w, 3) RGB."""
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
    """(h, w, 3) RGB of an ``Image`` or a ``CompressedImage``.

    Raises:
        UserError: it is none.
    """
    try:
        if "format" in message:
            from PIL import Image as Pillow

            return np.asarray(
                Pillow.open(io.BytesIO(message["data"]), formats=("JPEG", "PNG")).convert("RGB")
            )
        encoding = message["encoding"]
        if encoding not in CHANNELS:
            raise UserError(f"a picture is encoded as {encoding!r}; {', '.join(CHANNELS)} are read")
        channels, order = CHANNELS[encoding]
        height = message["height"]
        width = message["width"]
        step = message["step"]
        rows = np.frombuffer(message["data"], np.uint8).reshape(height, step)
        pixels = rows[:, : width * channels].reshape(height, width, channels)
        return pixels[..., :3] if order == (0, 1, 2) else pixels[..., list(order)]
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise UserError(f"a picture cannot be read ({type(error).__name__}: {error})") from error


def fit(image: Image, size: tuple[int, int]) -> Image:
    """The middle of an image in the shape of ``size`` (height, width), scaled to it."""
    height, width = size
    if image.shape[:2] == size:
        return image
    from PIL import Image as Pillow

    scale = min(image.shape[0] / height, image.shape[1] / width)
    tall = round(height * scale)
    wide = round(width * scale)
    top = (image.shape[0] - tall) // 2
    left = (image.shape[1] - wide) // 2
    part = Pillow.fromarray(np.ascontiguousarray(image[top : top + tall, left : left + wide]))
    return np.asarray(
        part.resize(
            (width, height), Pillow.Resampling.BOX if scale > 1 else Pillow.Resampling.BILINEAR
        )
    )


def by_name(message: Fields, names: tuple[str, ...], what: str) -> Array:
    """Values of a JointState in the order of ``names``, whatever the order and the others in the message.

    Raises:
        UserError: a name or a value is missing.
    """
    there = message["name"]
    values = message[what]
    missing = [name for name in names if name not in there]
    if missing or len(values) != len(there):
        lacks = (
            f"joint {missing[0]} (it has {', '.join(there)})"
            if missing
            else f"a {what} of each joint"
        )
        raise UserError(f"the joint states lack {lacks}")
    return np.array([values[there.index(name)] for name in names], dtype=float)
