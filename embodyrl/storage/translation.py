"""From one convention to another: what is done to pictures and actions, and what cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.functional.pictures import flips_between
from embodyrl.functional.rotations import change_towards
from embodyrl.storage.env_spec import WORDS
from embodyrl.types import Conventions, EnvSpec


@dataclass(frozen=True)
class HandPose:
    """Where the state says what changes of the hand start from.

    Attributes:
        position: numbers of proprio with the position, in metres.
        rotation: with the rotation vector, in radians; None where actions do not turn the hand.
        scale: (D,) metres and radians of an action of 1.
    """

    position: slice
    rotation: slice | None
    scale: tuple[float, ...]

    @classmethod
    def of(cls, conventions: Conventions) -> HandPose | None:
        """That of an env that takes changes; None where the state does not say it.

        An env that shows what it commanded last takes changes of that, others of where the hand is.
        """
        dims = len(conventions.scale)
        for start in ("commanded", "hand"):
            position = state_part(conventions, f"{start}_position")
            rotation = state_part(conventions, f"{start}_axis_angle")
            if position is not None and (dims == 3 or (dims == 6 and rotation is not None)):
                return cls(position, rotation if dims == 6 else None, conventions.scale)
        return None

    def changes(self, actions: np.ndarray, states: np.ndarray) -> np.ndarray:
        """Actions (F, A) in metres and radians, from states (F, P), as changes in the env's units."""
        # Where the hand is, or is told to be, before each action.
        parts = [states[:, self.position]]
        parts += [] if self.rotation is None else [states[:, self.rotation]]
        pose = np.concatenate(parts, axis=1)
        dims = len(self.scale)
        moved = change_towards(actions[:, :dims], pose) / np.asarray(self.scale)
        return np.concatenate([moved, actions[:, dims:]], axis=1)


@dataclass(frozen=True)
class Translation:
    """What is done to the pictures and actions of a data set, so that they mean what an env means.

    Attributes:
        rows: top and bottom of the pictures are exchanged.
        columns: left and right are exchanged.
        channels: the colours are put in reverse order.
        fit: how pictures of another shape are changed; see ``functional.pictures.fit``.
        factor: (A,) actions are multiplied by this.
        offset: (A,) and this is added.
        lag: actions are moved so many frames to the front.
        hand: actions are absolute targets of the hand, which become changes from here.
    """

    rows: bool = False
    columns: bool = False
    channels: bool = False
    fit: str = "crop"
    factor: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    lag: int = 0
    hand: HandPose | None = None

    def of_actions(
        self, actions: np.ndarray, episode: np.ndarray, states: np.ndarray
    ) -> np.ndarray:
        """Actions (F, A) of a data set as the env takes them.

        Args:
            actions: (F, A).
            episode: (F,) the episode of each frame; frames of an episode stand together.
            states: (F, P) proprio before each action.
        """
        if self.lag:
            rows = np.arange(len(actions)) + self.lag
            kept = rows.clip(0, len(actions) - 1)
            # The frames at an episode's end keep their own action.
            kept = np.where(episode[kept] == episode, kept, np.arange(len(actions)))
            actions = actions[kept]
        if self.hand is not None:
            actions = self.hand.changes(actions, states)
        if self.factor:
            actions = actions * np.asarray(self.factor) + np.asarray(self.offset)
        return actions.astype(np.float32)

    def said(self) -> str:
        """What is done, in words; empty if nothing is."""
        flips = {(True, True): "turned by 180 degrees", (True, False): "turned upside down"}
        flips |= {(False, True): "mirrored"}
        words = (
            [f"pictures are {flips[self.rows, self.columns]}"] if self.rows | self.columns else []
        )
        words += ["colours are put in the order of the env"] if self.channels else []
        words += ["absolute targets become changes"] if self.hand else []
        if self.factor and any(f != 1 for f in self.factor[:-1]):
            words.append("actions are scaled")
        if self.factor and (self.factor[-1] != 1 or self.offset[-1] != 0):
            words.append("gripper actions are mapped")
        words += [f"actions are moved by {self.lag} frame"] if self.lag else []
        return ", ".join(words)


def translate(theirs: Conventions, spec: EnvSpec, name: str) -> Translation:
    """The translation of other conventions for an env. What one side does not know is left alone.

    Args:
        theirs: the conventions of a data set, or of a family.
        spec: of the env.
        name: what has them, for messages, such as "the data set data/theirs".

    Raises:
        UserError: the two differ in something that cannot be translated.
    """
    # What cannot be translated.
    ours = spec.conventions
    # Absolute targets have a translation where the state says where the hand is.
    targets = (theirs.actions, ours.actions) == ("absolute", "delta")
    hand = HandPose.of(ours) if targets else None
    for field in ("actions", "state"):
        one, other = getattr(theirs, field), getattr(ours, field)
        if one and other and one != other and not (field == "actions" and hand):
            raise UserError(
                f"{WORDS[field].capitalize()} of {name} ({_plain(one)}) differ from those of "
                f"{spec.name} ({_plain(other)}), and there is no translation. Convert the data, or "
                "take an env of that kind."
            )
    # Pictures.
    rows, columns = (
        flips_between(theirs.orientation, ours.orientation)
        if theirs.orientation and ours.orientation
        else (False, False)
    )
    factor = np.ones(spec.action_dim)
    offset = np.zeros(spec.action_dim)
    # All dims but the last, which is the gripper's.
    if theirs.scale and ours.scale and not hand:
        if len(theirs.scale) != len(ours.scale):
            raise UserError(
                f"There are {len(theirs.scale)} scales (conventions.scale) of {name}, and "
                f"{spec.name} has {len(ours.scale)} action dims besides the gripper's."
            )
        factor[: len(ours.scale)] = np.divide(theirs.scale, ours.scale)
    # The gripper: one end becomes the other's.
    if theirs.gripper and ours.gripper:
        closed, opened = theirs.gripper
        factor[-1] = (ours.gripper[1] - ours.gripper[0]) / (opened - closed)
        offset[-1] = ours.gripper[0] - factor[-1] * closed
    changed = bool((factor != 1).any() or offset.any())
    return Translation(
        rows=rows,
        columns=columns,
        channels=bool(theirs.channels and ours.channels and theirs.channels != ours.channels),
        fit=theirs.fit or ours.fit or "crop",
        factor=tuple(factor.tolist()) if changed else (),
        offset=tuple(offset.tolist()) if changed else (),
        lag=theirs.lag,
        hand=hand,
    )


def within_reach(actions: np.ndarray, change: Translation) -> tuple[np.ndarray, list[str]]:
    """Changes to absolute targets, cut to [-1, 1] where few are longer; and what was cut, in words.

    Where more than a tenth of them are, the targets are in other units, and are left for the
    checks of data.

    Args:
        actions: (F, A), translated.
        change: by which.
    """
    over = np.abs(actions).max(axis=1) > 1 + 1e-4
    if change.hand is None or not over.any() or over.mean() > 0.1:
        return actions, []
    text = (
        f"{over.sum()} of {len(over)} targets are further away than an action reaches, and are cut."
    )
    return actions.clip(-1, 1), [text]


def state_part(conventions: Conventions, kind: str) -> slice | None:
    """The numbers of proprio that hold a part of the state; None if it is not known."""
    start = 0
    for part in conventions.state:
        name, _, dims = part.partition(":")
        if name == kind:
            return slice(start, start + int(dims))
        start += int(dims)
    return None


def _plain(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
