"""Recorded actions played again in the env: which change makes the states come out as recorded.

The env plays an episode as it was recorded, and beside it with every change that public data sets
are known for: another sign, another gripper, actions one frame late, other units. Actions that mean
what the env means bring about the recorded states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.data.picture_check import Finding
from embodyrl.env import VecEnv
from embodyrl.functional.rotations import rotation_matrices
from embodyrl.storage.translation import HandPose, state_part
from embodyrl.types import Conventions, EnvSpec

STEPS = 60
"""Actions of an episode that are played."""
SAME = 0.1
"""Error, in spreads of a number of the state, up to which a replay gives the recorded states."""
CLEAR = 0.5
"""A change explains an error if no more than this share of it is left."""


@dataclass(frozen=True)
class ReplayedEpisode:
    """One recorded episode.

    Attributes:
        init: its initial state in the env; -1 if it is not known.
        actions: (T, A) as the env takes them, as far as the conventions are known.
        states: (T, P) proprio before each action.
    """

    init: int
    actions: np.ndarray
    states: np.ndarray


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


def comparable(states: np.ndarray, conventions: Conventions) -> np.ndarray:
    """States (..., P) with rotation vectors as matrices: near half a turn the vectors jump."""
    parts = []
    start = 0
    for part in conventions.state:
        name, _, dims = part.partition(":")
        values = states[..., start : start + int(dims)]
        start += int(dims)
        if name.endswith("axis_angle") and values.shape[-1] == 3:
            parts.append(rotation_matrices(values).reshape(*values.shape[:-1], 9))
        else:
            parts.append(values)
    parts.append(states[..., start:])
    return np.concatenate(parts, axis=-1)


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


def play_variants(
    env: VecEnv, episodes: list[ReplayedEpisode], variants: list[list[np.ndarray]]
) -> tuple[np.ndarray, np.ndarray]:
    """Plays every episode with every variant of its actions, each in an env of its own.

    Args:
        env: of at least len(episodes) * len(variants) envs.
        episodes: whose initial states are known, or not at all.
        variants: each the actions (T, A) of every episode.

    Returns:
        The states (V, E, T, P) before every action, and which of them are of a running episode
        (V, E, T).
    """
    count = len(variants) * len(episodes)
    steps = max(len(e.actions) for e in episodes)
    dims = env.spec.action_dim
    # What each env plays, padded to the longest episode.
    plan = np.zeros((env.spec.num_envs, steps, dims), np.float32)
    for v, actions in enumerate(variants):
        for e, rows in enumerate(actions):
            plan[v * len(episodes) + e, : len(rows)] = rows.clip(-1, 1)
    # All variants of an episode start in its initial state.
    inits = [max(0, e.init) for e in episodes] * len(variants)
    inits += [inits[0]] * (env.spec.num_envs - count)
    obs = env.reset(init=inits)
    # An episode that ended stays as it is.
    seen = [obs.proprio.cpu().numpy()]
    running: list[NDArray[np.bool_]] = [np.ones(env.spec.num_envs, bool)]
    for t in range(steps - 1):
        step = env.step(torch.from_numpy(plan[:, t : t + 1]))
        seen.append(step.obs.proprio.cpu().numpy())
        running.append(running[-1] & ~step.done.cpu().numpy())
        if not running[-1][:count].any():
            break
    while len(seen) < steps:
        seen.append(seen[-1])
        running.append(np.zeros_like(running[0]))
    # By variant and episode.
    shape = (len(variants), len(episodes), steps)
    states = np.stack(seen, axis=1)[:count].reshape(*shape, -1)
    return states, np.stack(running, axis=1)[:count].reshape(shape)


def replay_errors(
    episodes: list[ReplayedEpisode],
    states: np.ndarray,
    running: np.ndarray,
    same_start: bool,
    conventions: Conventions,
) -> np.ndarray:
    """(V,) how far the states of each variant are from the recorded ones.

    In spreads of each number of the state, each at most 3, averaged.
    """
    # An env without pictures may show more numbers than were recorded.
    dims = episodes[0].states.shape[1]
    truth = [comparable(e.states, conventions) for e in episodes]
    states = comparable(states[..., :dims], conventions)
    # Numbers that hardly move tell nothing.
    moved = np.concatenate([t - t[:1] for t in truth])
    spread = moved.std(axis=0)
    counted = spread > 1e-3
    total = np.zeros(len(states))
    frames = np.zeros(len(states))
    for e, recorded in enumerate(truth):
        length = len(recorded)
        played = states[:, e, :length]
        # From another start only the way is compared.
        if not same_start:
            recorded = recorded - recorded[:1]
            played = played - played[:, :1]
        off = np.abs(played - recorded) / (spread + 1e-3)
        off = np.minimum(off[..., counted], 3.0).mean(axis=-1)
        on = running[:, e, :length]
        total += (off * on).sum(axis=1)
        frames += on.sum(axis=1)
    return total / np.maximum(frames, 1)


def replay_findings(
    make_env: Callable[[int], VecEnv], episodes: list[ReplayedEpisode], theirs: Conventions
) -> list[Finding]:
    """What recorded actions mean other than the env's.

    Args:
        make_env: builds the env, without pictures where it can, for a number of episodes.
        episodes: their initial states are known and the same in the env, or none is.
        theirs: what is known of the data set.
    """
    same_start = all(e.init >= 0 for e in episodes)
    limit = SAME if same_start else 2.5 * SAME
    actions = np.concatenate([e.actions for e in episodes])
    # As they are.
    probe = make_env(len(episodes))
    try:
        spec = probe.spec
        plain = [e.actions for e in episodes]
        states, running = play_variants(probe, episodes, [plain])
        ours = spec.conventions
        (before,) = replay_errors(episodes, states, running, same_start, ours)
    finally:
        probe.close()
    if before <= limit:
        return list(_gripper_range(theirs, spec, actions))
    # With every change.
    tried = [*changes(theirs, spec, actions), *_rescaled(theirs, spec, episodes, states[0])]
    env = make_env(len(episodes) * len(tried))
    found: list[Finding] = []
    try:
        # The best change; then, with it undone, perhaps another one.
        now, left = plain, float(before)
        for _ in range(2):
            variants = [
                [c.apply(a, e.states) for a, e in zip(now, episodes, strict=True)] for c in tried
            ]
            after = replay_errors(
                episodes, *play_variants(env, episodes, variants), same_start, ours
            )
            # Is the best of them good enough?
            best = int(after.argmin())
            if after[best] > CLEAR * left:
                break
            change = tried[best]
            found.append(
                Finding(
                    change.field,
                    f"Played again in {spec.name}, the recorded actions give the recorded states "
                    f"only if {change.text} (an error of {after[best]:.2f} spreads, "
                    f"{left:.2f} as they are).",
                    dict(change.fix),
                    certain=same_start,
                )
            )
            now, left = variants[best], float(after[best])
            if left <= limit:
                break
    finally:
        env.close()
    if not found and before > (limit if same_start else 2 * limit):
        found.append(
            Finding(
                "replay",
                f"Played again in {spec.name}, the recorded actions do not give the recorded "
                f"states (an error of {before:.2f} spreads), and no single change explains it: "
                "they mean something else there, or the env is another one.",
                certain=False,
            )
        )
    return found


def _gripper_range(theirs: Conventions, spec: EnvSpec, actions: np.ndarray) -> Iterator[Finding]:
    """A gripper whose values are others than the env's, though the env does the same with them."""
    ours = spec.conventions.gripper
    values = actions[:, -1]
    if not ours or theirs.gripper or min(ours) >= 0 or values.min() < 0 or np.ptp(values) < 0.5:
        return
    ends = (0.0, 1.0) if ours[0] < ours[1] else (1.0, 0.0)
    yield Finding(
        "gripper",
        f"The gripper's actions lie in 0 to 1, where those of {spec.name} lie in -1 to 1: a policy "
        f"would learn the middle for one end. Played again, {ends[0]:g} closes and {ends[1]:g} "
        "opens it.",
        {"gripper": ends},
        certain=True,
    )


def _rescaled(
    theirs: Conventions, spec: EnvSpec, episodes: list[ReplayedEpisode], played: np.ndarray
) -> list[Change]:
    """The change of scale that would make the hand travel as far as recorded."""
    ours = spec.conventions
    place = state_part(ours, "hand_position")
    if place is None or not ours.scale:
        return []
    # How far the hand went, as recorded and as played.
    lengths = [
        sum(np.abs(np.diff(s[:, place], axis=0)).sum() for s in states)
        for states in ([e.states for e in episodes], list(played))
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
