"""Recorded pictures beside the env's own: orientation, order of the colours, exchanged cameras."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.functional.pictures import FLIPS, orientation_after, turn

CLEAR = 0.7
"""A change explains a difference if no more than this share of it is left."""
ALIKE = 4.0
"""Mean difference, of 255, up to which two pictures of one state are the same; codecs cost 1 to 3."""
SEVERAL = 3
"""First frames from which on their mean picture says something about frames of other states."""


@dataclass(frozen=True)
class Finding:
    """Something in a data set that does not mean what the env means.

    Attributes:
        field: of ``types.Conventions``; or ``"cameras"``, ``"state"``, ``"pictures"``,
            ``"actions"``: what differs.
        text: a sentence on what was seen.
        fix: fields of ``data.convention`` that translate it; empty if nothing does.
        certain: whether it was seen in the same state as the env's; if not, it is likely.
    """

    field: str
    text: str
    fix: dict[str, Any] = field(default_factory=dict)
    certain: bool = True


@dataclass
class PictureMatch:
    """The change under which a camera's pictures are most like an env's camera.

    Attributes:
        camera: of the env.
        rows, columns, channels: the change, see ``functional.pictures.turn``.
        distance: mean difference with it, of 255.
        plain: mean difference without any change and with the camera of the same name.
    """

    camera: str
    rows: bool
    columns: bool
    channels: bool
    distance: float
    plain: float

    @property
    def changed(self) -> bool:
        """Whether turning or other colours explain the difference."""
        turned = self.rows or self.columns or self.channels
        return turned and self.distance <= CLEAR * self.plain and self.plain > ALIKE


def distance(recorded: np.ndarray, drawn: np.ndarray, paired: bool) -> float:
    """The mean difference, of 255, of pictures (M, h, w, 3) and (M', h, w, 3).

    Args:
        recorded: of a data set.
        drawn: by the env.
        paired: whether they show the same states in the same order; if not, the mean pictures are
            compared.
    """
    one, other = (x.astype(np.float32) for x in (recorded, drawn))
    if not paired:
        one, other = one.mean(axis=0, keepdims=True), other.mean(axis=0, keepdims=True)
    return float(np.abs(one - other).mean())


def best_match(
    name: str, recorded: np.ndarray, drawn: Mapping[str, np.ndarray], paired: bool
) -> PictureMatch:
    """The camera of the env, and the change, under which recorded pictures fit best.

    Args:
        name: of the camera, in the data set and in the env.
        recorded: (M, h, w, 3) its pictures.
        drawn: camera of the env -> (M', h, w, 3).
        paired: see ``distance``.
    """
    plain = distance(recorded, drawn[name], paired)
    matches = [PictureMatch(name, False, False, False, plain, plain)]
    alike = [n for n in drawn if drawn[n].shape[1:] == recorded.shape[1:]]
    for camera, (rows, columns), channels in itertools.product(alike, FLIPS.values(), (False, True)):
        found = distance(turn(recorded, rows, columns, channels), drawn[camera], paired)
        matches.append(PictureMatch(camera, rows, columns, channels, found, plain))
    return min(matches, key=lambda match: match.distance)


def picture_findings(
    recorded: Mapping[str, np.ndarray],
    drawn: Mapping[str, np.ndarray],
    *,
    paired: bool,
    orientation: str = "upright",
    channels: str = "rgb",
) -> Iterator[Finding]:
    """What recorded pictures have other than the env's.

    Args:
        recorded: camera -> (M, h, w, 3) uint8, translated as far as the conventions are known.
        drawn: camera -> (M', h, w, 3) uint8.
        paired: whether they show the same states in the same order.
        orientation: that the recorded pictures are taken to have.
        channels: the order of colours that they are taken to have.
    """
    how = "in the same state" if paired else "at the start of episodes"
    matches = {name: best_match(name, recorded[name], drawn, paired) for name in recorded}
    # Cameras that show what another one shows in the env.
    others = {
        name: match.camera
        for name, match in matches.items()
        if match.camera != name and match.distance <= CLEAR * match.plain
    }
    if others:
        pairs = ", ".join(f"{name!r} shows the env's {other!r}" for name, other in others.items())
        named = ", ".join(f"{other}: {name}" for name, other in others.items())
        yield Finding(
            "cameras",
            f"Beside the env's own pictures {how}, {pairs}: the cameras are exchanged. Name them: "
            f'"data.cameras={{{named}}}".',
            certain=paired,
        )
        return
    turned = {name: match for name, match in matches.items() if match.changed}
    # One description holds for all cameras; say so where they differ.
    flips = {(m.rows, m.columns) for m in turned.values() if m.rows or m.columns}
    if flips:
        rows, columns = min(flips)
        shown = orientation_after(orientation, rows, columns)
        names = [n for n, m in turned.items() if m.rows or m.columns]
        other = "" if len(flips) == 1 else " The cameras differ in this: convert the pictures."
        yield Finding(
            "orientation",
            f"Beside the env's own pictures {how}, those of {_listed(names)} are {_words(shown)} "
            f"({_numbers(turned, names)}).{other}",
            {"orientation": shown} if not other else {},
            certain=paired,
        )
    if swapped := [name for name, match in turned.items() if match.channels]:
        order = "rgb" if channels == "bgr" else "bgr"
        yield Finding(
            "channels",
            f"Beside the env's own pictures {how}, red and blue are exchanged in those of "
            f"{_listed(swapped)} ({_numbers(turned, swapped)}).",
            {"channels": order},
            certain=paired,
        )
    if unlike := [n for n, m in matches.items() if paired and not m.changed and m.plain > 25]:
        yield Finding(
            "pictures",
            f"The pictures of {_listed(unlike)} do not look like those that the env draws of the "
            "same state, turned or not: another scene, camera, crop or light. Look at them: "
            "embodyrl data verify writes both side by side.",
        )


def _words(orientation: str) -> str:
    return orientation.replace("_", " ").replace("turned 180", "turned by 180 degrees")


def _numbers(matches: Mapping[str, PictureMatch], names: list[str]) -> str:
    first = matches[names[0]]
    return f"a mean difference of {first.distance:.0f} of 255 once that is undone, {first.plain:.0f} as it is"


def _listed(names: list[str]) -> str:
    return " and ".join(map(repr, names))


def write_comparison(
    path: str | Path,
    recorded: Mapping[str, np.ndarray],
    drawn: Mapping[str, np.ndarray],
    *,
    paired: bool,
) -> Path:
    """Writes a picture: for each camera a row of recorded frames above a row of the env's.

    Args:
        path: a PNG.
        recorded: camera -> (M, h, w, 3) uint8.
        drawn: camera -> (M', h, w, 3) uint8.
        paired: whether column k shows one state; the caption says so.
    """
    from PIL import Image, ImageDraw

    count = min(4, *(min(len(recorded[n]), len(drawn[n])) for n in recorded))
    strips = []
    for name in recorded:
        size = max(128, recorded[name].shape[1])
        for what, frames in (("recorded", recorded[name]), ("env", drawn[name])):
            row = np.concatenate(list(frames[:count]), axis=1)
            strip = Image.fromarray(np.ascontiguousarray(row))
            scale = size / row.shape[0]
            strip = strip.resize((round(row.shape[1] * scale), size), Image.Resampling.NEAREST)
            strips.append((f"{name}, {what}", strip))
    height = sum(strip.height + 16 for _, strip in strips) + 16
    sheet = Image.new("RGB", (max(strip.width for _, strip in strips), height), "white")
    pen = ImageDraw.Draw(sheet)
    top = 0
    for text, strip in strips:
        pen.text((4, top + 2), text, fill="black")
        sheet.paste(strip, (0, top + 16))
        top += strip.height + 16
    pen.text((4, top + 2), "the same states" if paired else "the starts of episodes", fill="black")
    sheet.save(path)
    return Path(path)
