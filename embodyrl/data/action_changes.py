"""The changes that public data are known for: ways in which recorded actions could mean something else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from embodyrl.storage.translation import HandPose, state_part
from embodyrl.types import Conventions, EnvSpec


@dataclass(frozen=True)
class Change:
    """A way in which recorded actions could mean something else.

    Attributes:
        field: of ``Conventions``.
        text: what would be so, as the end of a sentence "... if".
        fix: fields of ``data.convention``.
        apply: (actions (T, A), states (T, P)) -> actions that undo it.
    """

    field: str
    text: str
    fix: dict[str, object]
    apply: Callable[[np.ndarray, np.ndarray], np.ndarray]


def changes(theirs: Conventions, spec: EnvSpec, actions: np.ndarray) -> list[Change]:
    """The changes that are tried.

    Args:
        theirs: what is known of the data set.
        spec: of the env.
        actions: (F, A) recorded ones, of all episodes.
    """
    ours = spec.conventions
    known = replace(
        ours, **{k: v for k, v in vars(theirs).items() if v and k in ("scale", "gripper")}
    )
    dims = spec.action_dim
    out = []
    # The sign of each dim but the gripper's.
    for i in range(dims - 1 if ours.gripper else dims):
        flip = np.ones(dims)
        flip[i] = -1
        scale = tuple(float(s * f) for s, f in zip(known.scale, flip, strict=False))
        fix: dict[str, object] = {"scale": scale} if scale else {}
        text = f"number {i} of 'action' points the other way"
        out.append(Change("scale", text, fix, lambda a, s, flip=flip: a * flip))
    # Actions that stand late or early.
    for lag, word in ((1, "late"), (-1, "early")):
        text = f"every action stands one frame {word}"
        out.append(Change("lag", text, {"lag": lag}, lambda a, s, lag=lag: _moved(a, lag)))
    # Another gripper: which values close and open it.
    if ours.gripper and known.gripper:
        values = _back(actions[:, -1], known.gripper, ours.gripper)
        for closed, opened in ((-1.0, 1.0), (1.0, -1.0), (0.0, 1.0), (1.0, 0.0)):
            inside = min(closed, opened) - 0.01 <= values.min() <= values.max() <= 1.01
            if (closed, opened) == known.gripper or not inside:
                continue

            def mapped(
                a: np.ndarray, s: np.ndarray, closed: float = closed, opened: float = opened
            ) -> np.ndarray:
                raw = _back(a[:, -1], known.gripper, ours.gripper)
                share = (raw - closed) / (opened - closed)
                gripper = ours.gripper[0] + share * (ours.gripper[1] - ours.gripper[0])
                return np.column_stack([a[:, :-1], gripper])

            text = f"{closed:g} closes and {opened:g} opens the gripper"
            out.append(Change("gripper", text, {"gripper": (closed, opened)}, mapped))
    # Absolute targets of the hand, or where it was, in place of changes.
    hand = HandPose.of(ours)
    if ours.actions == "delta" and theirs.actions != "absolute" and hand is not None:
        text = "they are absolute targets of the hand, where the env takes changes"
        out.append(Change("actions", text, {"actions": "absolute"}, hand.changes))
        unit = np.asarray(ours.scale[:3])

        def differences(a: np.ndarray, s: np.ndarray) -> np.ndarray:
            moves = np.diff(a[:, :3], axis=0, append=a[-1:, :3]) / unit
            return np.column_stack([moves, a[:, 3:]])

        text = "they are the positions of the hand, where the env takes changes"
        out.append(Change("actions", text, {}, differences))
    if dims > 2:
        order = [1, 0, *range(2, dims)]
        text = "numbers 0 and 1 of 'action' are exchanged"
        out.append(Change("actions", text, {}, lambda a, s: a[:, order]))
    return out


def _back(values: np.ndarray, theirs: tuple[float, ...], ours: tuple[float, ...]) -> np.ndarray:
    """Gripper actions of the env, in the values of the data set."""
    share = (values - ours[0]) / (ours[1] - ours[0])
    return theirs[0] + share * (theirs[1] - theirs[0])


def _moved(actions: np.ndarray, lag: int) -> np.ndarray:
    rows = np.clip(np.arange(len(actions)) + lag, 0, len(actions) - 1)
    return actions[rows]


def rescaled(
    theirs: Conventions, spec: EnvSpec, recorded: list[np.ndarray], played: list[np.ndarray]
) -> list[Change]:
    """The changes of scale that would make the hand travel as far as recorded.

    Args:
        theirs: what is known of the data set.
        spec: of the env.
        recorded: states (T, P) of each episode.
        played: the env's.
    """
    ours = spec.conventions
    place = state_part(ours, "hand_position")
    if place is None or not ours.scale:
        return []
    # How far the hand went, as recorded and as played.
    lengths = [
        sum(np.abs(np.diff(s[:, place], axis=0)).sum() for s in states)
        for states in (recorded, played)
    ]
    if min(lengths) <= 0:
        return []
    ratio = lengths[0] / lengths[1]
    out = []
    # The ratio as it was seen, and the round figures that are near to it.
    round_figures = [0.1, 0.5, 2.0, 10.0, 1 / ours.scale[0], 1000.0]
    for factor in [ratio, *(f for f in round_figures if 0.5 < f / ratio < 2)]:
        if abs(np.log(factor)) < 0.1:
            continue
        scale = tuple(float(s * factor) for s in theirs.scale or ours.scale)
        moves = len(ours.scale)

        def scaled(
            a: np.ndarray, s: np.ndarray, factor: float = factor, moves: int = moves
        ) -> np.ndarray:
            return np.column_stack([a[:, :moves] * factor, a[:, moves:]])

        text = f"an action of 1 moves {factor:.3g} times as far as in the env"
        out.append(Change("scale", text, {"scale": scale}, scaled))
    return out
