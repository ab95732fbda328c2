"""From one convention to another: what is done to pictures and actions, and what cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.functional.pictures import flips_between
from embodyrl.storage.env_spec import WORDS
from embodyrl.types import Conventions, EnvSpec


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
    """

    rows: bool = False
    columns: bool = False
    channels: bool = False
    fit: str = "crop"
    factor: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    lag: int = 0

    def of_actions(self, actions: np.ndarray, episode: np.ndarray) -> np.ndarray:
        """Actions (F, A) of a data set as the env takes them.

        Args:
            actions: (F, A).
            episode: (F,) the episode of each frame; frames of an episode stand together.
        """
        if self.lag:
            rows = np.arange(len(actions)) + self.lag
            kept = rows.clip(0, len(actions) - 1)
            # The frames at an episode's end keep their own action.
            kept = np.where(episode[kept] == episode, kept, np.arange(len(actions)))
            actions = actions[kept]
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
    for field in ("actions", "state"):
        one, other = getattr(theirs, field), getattr(ours, field)
        if one and other and one != other:
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
    if theirs.scale and ours.scale:
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
    )


def _plain(value: Any) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)
