"""The part of the pre-flight check that watches cameras and gripper for a second."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from embodyrl.errors import UserError
from embodyrl.real_robot.cameras.camera import Camera, CameraPicture
from embodyrl.real_robot.grippers.interface import Gripper

WATCHED = 1.0
"""s for which the devices are watched."""
LOOK_EVERY = 0.002
"""s between two looks."""
FIRST_WITHIN = 5.0
"""s that a camera may take for its first picture: it has just been opened."""
SLOW = 0.8
"""Share of the rate that a camera was asked for below which it is too slow."""
AHEAD = 0.02
"""s by which a stamp may be ahead of this computer's clock: two clocks never agree."""
BLACK = 16
"""Level of 256 below which 99 of 100 values of a picture lie if nothing is to be seen."""


@dataclass
class SeenCamera:
    """What was seen of a camera.

    Attributes:
        pictures: each new one.
        came: s, when each was found.
    """

    pictures: list[CameraPicture] = field(default_factory=list)
    came: list[float] = field(default_factory=list)


def watch_devices(
    cameras: Mapping[str, Camera], gripper: Gripper | None, seconds: float = WATCHED
) -> tuple[dict[str, SeenCamera], list[float]]:
    """Watches all cameras and the gripper at the same time.

    Returns:
        What was seen of each camera, and when the gripper's opening was measured (s).
    """
    # 1. The rate of a camera that is just starting says nothing.
    end = time.monotonic() + FIRST_WITHIN
    while any(c.newest is None for c in cameras.values()) and time.monotonic() < end:
        time.sleep(LOOK_EVERY)
    # 2. Every picture and every measurement that is new.
    seen = {name: SeenCamera() for name in cameras}
    last = {name: camera.newest for name, camera in cameras.items()}
    measured: list[float] = [] if gripper is None else [gripper.measured()[0]]
    end = time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        for name, camera in cameras.items():
            newest = camera.newest
            if newest is not None and newest is not last[name]:
                seen[name].pictures.append(newest)
                seen[name].came.append(now)
                last[name] = newest
        if gripper is not None and (stamp := gripper.measured()[0]) != measured[-1]:
            measured.append(stamp)
        time.sleep(LOOK_EVERY)
    return seen, measured


def camera_report(camera: Camera, seen: SeenCamera, max_age: float, least_hz: float) -> str:
    """How a camera did.

    Args:
        camera: that was watched for ``WATCHED`` s.
        seen: of it.
        max_age: s, age of the oldest picture that the policy may see.
        least_hz: pictures per second that are needed.

    Raises:
        UserError: it is silent, dark, frozen, too slow, or its stamps cannot be.
    """
    pictures = seen.pictures
    if not pictures:
        why = f" ({camera.problem})" if camera.problem else ""
        raise UserError(
            f"No new picture came within {WATCHED:.0f} s{why}. Is it plugged in, and not in use "
            "elsewhere?"
        )
    # 1. Is there anything to be seen?
    last = pictures[-1].image
    if np.percentile(last, 99) < BLACK:
        raise UserError("Its picture is black. Is its cap on, or the light off?")
    depth = pictures[-1].depth
    if depth is not None and not depth.any():
        raise UserError("Its depth is empty: is everything too near, or its projector covered?")
    images = [picture.image for picture in pictures]
    same = all(np.array_equal(images[0], image) for image in images[1:])
    if camera.noisy and len(images) > 2 and same:
        raise UserError(
            f"It repeats its picture to the last bit, {len(images)} times: it is frozen. Unplug it, "
            "and plug it in again."
        )
    # 2. Are the stamps those of fresh pictures?
    stamps = np.array([picture.stamp for picture in pictures])
    ages = np.array(seen.came) - stamps
    if ages.min() < -AHEAD:
        raise UserError(
            f"Its pictures are stamped {-ages.min() * 1e3:.0f} ms in the future: its clock is not "
            "this computer's. Set the clocks (chrony), or restart the camera's driver."
        )
    if (np.diff(stamps) <= 0).any():
        raise UserError("The stamps of its pictures go backwards, or stand still.")
    # 3. Are there enough of them? Also between the last picture and the end of the watch.
    rate = len(pictures) / WATCHED
    oldest = float(ages.max() + np.diff(seen.came, append=seen.came[0] + WATCHED).max())
    asked = SLOW * camera.fps
    if rate < asked:
        raise UserError(
            f"{rate:.0f} pictures/s came, of the {camera.fps:g} that it was asked for. In the dark "
            "many cameras expose for longer than that: more light, or a fixed exposure. Else it is "
            "the USB port: a faster one, or fewer pixels."
        )
    # A second may begin right after a picture.
    if rate + 1.0 / WATCHED < least_hz:
        raise UserError(
            f"{rate:.0f} pictures/s came, and {least_hz:.3g} are needed: the same picture would be "
            "used twice. Make the camera faster, or the arm slower (--speed)."
        )
    if oldest > max_age:
        raise UserError(
            f"A picture gets {oldest * 1e3:.0f} ms old before the next one comes, and the policy "
            f"may see none older than {max_age * 1e3:.0f} (max_image_age)."
        )
    # How much longer than usual it took from one picture to the next, at worst.
    steps = np.diff(stamps)
    jitter = float(np.abs(steps - np.median(steps)).max()) if len(steps) else 0.0
    shows = "" if depth is None else f"; depth of {np.mean(depth > 0):.0%} of the pixels"
    return (
        f"{rate:.0f} pictures/s, {np.median(ages) * 1e3:.0f} ms old when they come (at most "
        f"{ages.max() * 1e3:.0f}), jitter {jitter * 1e3:.0f} ms{shows}"
    )


def gripper_report(gripper: Gripper, measured: list[float]) -> str:
    """How a gripper did.

    Args:
        gripper: that was watched for ``WATCHED`` s.
        measured: s, when its opening was measured, beginning with the one before.

    Raises:
        UserError: it is in trouble, or measures too seldom.
    """
    if trouble := gripper.trouble():
        raise UserError(f"It cannot be trusted: {trouble}.")
    rate = (len(measured) - 1) / WATCHED
    if rate < gripper.hz:
        raise UserError(
            f"{gripper.name} measured its opening {rate:.0f} times in a second, and {gripper.hz:.0f} "
            "are needed. Is its cable sound, and nothing else using it?"
        )
    longest = float(np.diff(measured).max())
    width = gripper.measured()[1]
    return (
        f"{gripper.name}: {rate:.0f} measurements/s, the longest gap {longest * 1e3:.0f} ms; "
        f"{width * 100:.1f} cm open"
    )
