"""Converts ROS messages, as dicts of their fields, to and from numpy arrays."""

from __future__ import annotations

import io

import numpy as np

from embodyrl.errors import UserError
from embodyrl.functional.pictures import Image
from embodyrl.real_robot.cameras.camera import Depth
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.messages import Array
from embodyrl.real_robot.parsing import MessageError, number, numbers, shown, whole
from embodyrl.real_robot.ros.bus import Fields

CHANNELS = {
    "rgb8": (3, (0, 1, 2)),
    "bgr8": (3, (2, 1, 0)),
    "rgba8": (4, (0, 1, 2)),
    "bgra8": (4, (2, 1, 0)),
}
"""Encoding -> number of channels, and which of them are red, green and blue."""
MAX_SIDE = 4096
"""Largest height and width of a picture in pixels."""
MAX_POINTS = 1000
"""Largest number of points of a trajectory."""
MAX_JOINTS = 256
"""Largest number of joints of a joint state."""
LONGEST = 600.0
"""s; longest trajectory."""


def seconds(stamp: Fields) -> float:
    """A time in s, from the fields that ROS 1 or ROS 2 gives it.

    Raises:
        MessageError: it is no time.
    """
    if not isinstance(stamp, dict):
        raise MessageError("a time must be a map")
    sec = stamp.get("sec", stamp.get("secs"))
    nanosec = stamp.get("nanosec", stamp.get("nsecs"))
    return number(sec, -1e10, 1e10, "a time") + 1e-9 * number(nanosec, -1e10, 1e10, "a time")


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


def depth_fields(depth: Depth, stamp: float) -> Fields:
    """A depth map (h, w) in mm as ROS 2's ``sensor_msgs/Image``."""
    height, width = depth.shape
    return {
        "header": {"stamp": time_fields(stamp, 2), "frame_id": ""},
        **{"height": height, "width": width, "step": 2 * width},
        "encoding": "16UC1",
        "is_bigendian": 0,
        "data": depth.astype("<u2").tobytes(),
    }


def depth_map(message: Fields) -> Depth:
    """The inverse of ``depth_fields``.

    Raises:
        MessageError: it is no depth map in mm.
    """
    if message.get("encoding") != "16UC1":
        raise MessageError(f"a depth map is encoded as {shown(message.get('encoding'))}, not 16UC1")
    height = whole(message.get("height"), 1, MAX_SIDE, "a depth map's height")
    width = whole(message.get("width"), 1, MAX_SIDE, "a depth map's width")
    data = bytes(message["data"])
    if len(data) != 2 * height * width:
        raise MessageError(f"a depth map of {height}x{width} has {len(data)} bytes")
    return np.frombuffer(data, "<u2").reshape(height, width)


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
            raise UserError(
                f"a picture is encoded as {shown(encoding)}; {', '.join(CHANNELS)} are read"
            )
        # Rows may be padded to ``step`` bytes, and channels may come in another order.
        channels, order = CHANNELS[encoding]
        height = whole(message["height"], 1, MAX_SIDE, "a picture's height")
        width = whole(message["width"], 1, MAX_SIDE, "a picture's width")
        step = whole(message["step"], width * channels, 2**31, "a picture's step")
        rows = np.frombuffer(message["data"], np.uint8).reshape(height, step)
        pixels = rows[:, : width * channels].reshape(height, width, channels)
        return pixels[..., :3] if order == (0, 1, 2) else pixels[..., list(order)]
    except UserError:
        raise
    except Exception as error:  # Pillow raises many kinds
        raise UserError(
            f"a picture cannot be read ({type(error).__name__}: {str(error)[:100]})"
        ) from error


def _decompressed(data: bytes) -> Image:
    """The image of a JPEG or PNG file, whose size is checked before it is decoded."""
    from PIL import Image as Pillow

    with Pillow.open(io.BytesIO(data), formats=("JPEG", "PNG")) as picture:
        if max(picture.size) > MAX_SIDE:
            raise UserError(f"a picture is larger than {MAX_SIDE} pixels")
        return np.asarray(picture.convert("RGB"))


def read_trajectory(message: Fields, names: tuple[str, ...]) -> tuple[Array, Array, Array]:
    """The inverse of ``trajectory``; the joints may come in another order.

    Returns:
        Times (k,) in s from the start, which do not decrease; angles (k, 7) and velocities (k, 7).

    Raises:
        MessageError: it is no such message, or its numbers are not finite.
    """
    there = message.get("joint_names")
    if not isinstance(there, list) or sorted(map(str, there)) != sorted(names):
        raise MessageError(f"a trajectory must name the joints {', '.join(names)}")
    points = message.get("points")
    if not isinstance(points, list) or not 1 <= len(points) <= MAX_POINTS:
        raise MessageError(f"a trajectory must have 1 to {MAX_POINTS} points")
    if not all(isinstance(point, dict) for point in points):
        raise MessageError("the points of a trajectory must be maps")
    times = np.array([seconds(point.get("time_from_start")) for point in points])
    if times[0] < 0.0 or times[-1] > LONGEST or (np.diff(times) < 0.0).any():
        raise MessageError(f"the times of a trajectory must rise from 0 to {LONGEST:g} s at most")
    q, dq = (
        np.array([numbers(point.get(what), len(names), what) for point in points])
        for what in ("positions", "velocities")
    )
    order = [there.index(name) for name in names]
    return times, q[:, order], dq[:, order]


def by_name(message: Fields, names: tuple[str, ...], what: str) -> Array:
    """The values of some joints of a ``sensor_msgs/JointState``.

    Args:
        message: may have its joints in any order, and more of them.
        names: of the joints.
        what: ``"position"`` or ``"velocity"``.

    Returns:
        Values in the order of ``names``.

    Raises:
        UserError: a name or a value is missing, or no number.
    """
    there = message.get("name")
    values = message.get(what)
    if not isinstance(there, list | tuple) or len(there) > MAX_JOINTS or values is None:
        raise UserError(f"the joint states lack the names or the {what} of the joints")
    if missing := [name for name in names if name not in there]:
        raise UserError(
            f"the joint states lack joint {missing[0]} (they have "
            f"{', '.join(map(str, there))[:300]})"
        )
    if len(values) != len(there):
        raise UserError(f"the joint states lack a {what} of each joint")
    # Whether they are finite is the safety filter's to check.
    return numbers([values[there.index(n)] for n in names], len(names), what, finite=False)
