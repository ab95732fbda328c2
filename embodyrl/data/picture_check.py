"""Recorded pictures beside the env's own: orientation, order of the colours, exchanged cameras."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as dict_field
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.functional.pictures import FLIPS, orientation_after, turn

CLEAR = 0.7
"""A change explains a difference if no more than this share of it is left."""
ALIKE = 4.0
"""Mean difference, of 255, up to which two pictures of one state are the same; codecs cost 1 to 3."""
NEAR = 1.15
"""Changes whose difference is within this factor of the smallest fit about as well."""
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
    fix: dict[str, Any] = dict_field(default_factory=dict)
    certain: bool = True


@dataclass(frozen=True)
class PictureMatch:
    """The changes under which a camera's pictures are most like an env's camera.

    Attributes:
        camera: of the env.
        flips: the (rows, columns) that fit about as well as the best; several where the scene is
            symmetric.
        channels: whether the colours are in reverse order.
        distance: mean difference with the best of them, of 255.
        plain: mean difference without any change and with the camera of the same name.
    """

    camera: str
    flips: frozenset[tuple[bool, bool]]
    channels: bool
    distance: float
    plain: float

    @property
    def explains(self) -> bool:
        """Whether these changes make pictures alike that are not so as they are."""
        return self.distance <= CLEAR * self.plain and self.plain > 1.0


def picture_distance(recorded: np.ndarray, drawn: np.ndarray, paired: bool) -> float:
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
        paired: see ``picture_distance``.
    """
    # All cameras, flips and orders of colours.
    plain = picture_distance(recorded, drawn[name], paired)
    alike = [n for n in drawn if drawn[n].shape[1:] == recorded.shape[1:]]
    found = {
        (camera, flip, swapped): picture_distance(
            turn(recorded, *flip, swapped), drawn[camera], paired
        )
        for camera, flip, swapped in itertools.product(alike, FLIPS.values(), (False, True))
    }
    # The best camera, and all changes that fit it about as well.
    camera, _, _ = min(found, key=lambda key: found[key])
    best = min(found.values())
    near = {key[1:] for key, value in found.items() if key[0] == camera and value <= NEAR * best}
    # The fewest changes: colours stay if they may.
    channels = all(swapped for _, swapped in near)
    flips = frozenset(flip for flip, swapped in near if swapped == channels)
    return PictureMatch(camera, flips, channels, best, plain)


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
    differ = {name: match for name, match in matches.items() if match.explains}
    # Cameras that show what another one shows in the env.
    others = {name: match.camera for name, match in differ.items() if match.camera != name}
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
    yield from _turned(differ, how, orientation, paired)
    # Colours.
    if swapped := [name for name, match in differ.items() if match.channels]:
        order = "rgb" if channels == "bgr" else "bgr"
        yield Finding(
            "channels",
            f"Beside the env's own pictures {how}, red and blue are exchanged in those of "
            f"{_listed(swapped)} ({_numbers(differ, swapped)}).",
            {"channels": order},
            certain=paired,
        )
    # The same state, and yet another picture.
    unlike = [n for n, m in matches.items() if paired and not m.explains and m.plain > 25]
    if unlike:
        yield Finding(
            "pictures",
            f"The pictures of {_listed(unlike)} do not look like those that the env draws of the "
            "same state, turned or not: another scene, camera, crop or light. Look at them: "
            "embodyrl data verify writes both side by side.",
        )


def _turned(
    differ: Mapping[str, PictureMatch], how: str, orientation: str, paired: bool
) -> Iterator[Finding]:
    """Pictures that are turned or mirrored; one description should hold for all cameras."""
    turned = {name: m for name, m in differ.items() if (False, False) not in m.flips}
    if not turned:
        return
    # Where one camera leaves it open, another one may decide.
    common = frozenset.intersection(*(match.flips for match in turned.values()))
    names = list(turned)
    shown = sorted(
        orientation_after(orientation, *flip)
        for flip in common or frozenset.union(*(match.flips for match in turned.values()))
    )
    text = (
        f"Beside the env's own pictures {how}, those of {_listed(names)} are "
        f"{' or '.join(map(_words, shown))} ({_numbers(differ, names)})."
    )
    if not common:
        text += " The cameras differ in this: convert their pictures to one orientation."
    elif len(common) > 1:
        text += " The scene is too symmetric to tell which: look at the pictures."
    fix = {"orientation": shown[0]} if len(common) == 1 else {}
    yield Finding("orientation", text, fix, certain=paired)


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
    # A strip for each camera and source.
    strips = []
    for name in recorded:
        size = max(128, recorded[name].shape[1])
        for what, frames in (("recorded", recorded[name]), ("env", drawn[name])):
            row = np.concatenate(list(frames[:count]), axis=1)
            strip = Image.fromarray(np.ascontiguousarray(row))
            scale = size / row.shape[0]
            strip = strip.resize((round(row.shape[1] * scale), size), Image.Resampling.NEAREST)
            strips.append((f"{name}, {what}", strip))
    # One below the other, each under its name.
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
