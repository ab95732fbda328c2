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

from embodyrl.data.action_changes import changes, rescaled
from embodyrl.data.picture_check import Finding
from embodyrl.env import VecEnv
from embodyrl.functional.rotations import rotation_matrices
from embodyrl.types import Conventions, EnvSpec

STEPS = 60
"""Actions of an episode that are played."""
SAME = 0.1
"""Error, in spreads of a number of the state, up to which a replay gives the recorded states."""
FROM_ELSEWHERE = 2.5 * SAME
"""The same where the replay begins in another start."""
CLEAR = 0.5
"""A change explains an error if no more than this share of it is left."""
OTHER_STARTS = 3
"""Starts from which actions are played to see which numbers of the state depend on the start."""


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
    counted: np.ndarray,
) -> np.ndarray:
    """(V, P') how far the states of each variant are from the recorded ones, averaged over steps.

    In spreads of each number of the state that is ``counted``, at most 3.
    """
    truth = [comparable(e.states, conventions) for e in episodes]
    states = _as_recorded(states, episodes, conventions)
    spread = _spread(truth)
    total = np.zeros((len(states), int(counted.sum())))
    frames = np.zeros((len(states), 1))
    for e, recorded in enumerate(truth):
        length = len(recorded)
        played = states[:, e, :length]
        # From another start only the way is compared.
        if not same_start:
            recorded = recorded - recorded[:1]
            played = played - played[:, :1]
        off = np.abs(played - recorded) / (spread + 1e-3)
        off = np.minimum(off[..., counted], 3.0)
        on = running[:, e, :length, None]
        total += (off * on).sum(axis=1)
        frames += on.sum(axis=1)
    return total / np.maximum(frames, 1)


def _as_recorded(
    states: np.ndarray, episodes: list[ReplayedEpisode], conventions: Conventions
) -> np.ndarray:
    """Played states (..., P), ready to be compared with recorded ones."""
    # An env without pictures may show more numbers than were recorded.
    dims = episodes[0].states.shape[1]
    return comparable(states[..., :dims], conventions)


def _spread(truth: list[np.ndarray]) -> np.ndarray:
    """How much each number of the recorded states (T, P) changes in an episode."""
    return np.concatenate([t - t[:1] for t in truth]).std(axis=0)


def telling_numbers(
    env: VecEnv,
    episodes: list[ReplayedEpisode],
    actions: list[np.ndarray],
    same_start: bool,
    conventions: Conventions,
) -> np.ndarray:
    """(P,) bool, the numbers of the state by which a replay can be judged.

    Numbers that hardly move tell nothing. From another start neither do those that the start
    decides, such as the place of an object that the hand there does not reach: the same actions move
    them otherwise from each of several starts of the env.
    """
    spread = _spread([comparable(e.states, conventions) for e in episodes])
    counted = spread > 1e-3
    if same_start:
        return counted
    # What the env itself says are things; a state whose parts have names holds the robot alone.
    for kind, start, dims in () if conventions.state else env.spec.layout:
        if kind in ("object", "relative", "mark"):
            counted[start : start + dims] = False
    ways = []
    for start in range(min(OTHER_STARTS, env.spec.num_init_states or OTHER_STARTS)):
        begun = [replace(e, init=start) for e in episodes]
        states, running = play_variants(env, begun, [actions])
        seen = _as_recorded(states[0], episodes, conventions)
        ways.append((seen - seen[:, :1], running[0]))
    first, ran = ways[0]
    for way, on in ways[1:]:
        off = np.minimum(np.abs(way - first) / (spread + 1e-3), 3.0)
        counted &= off[on & ran].mean(axis=0) <= FROM_ELSEWHERE
    return counted


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
    limit = SAME if same_start else FROM_ELSEWHERE
    actions = np.concatenate([e.actions for e in episodes])
    # As they are.
    probe = make_env(len(episodes))
    try:
        spec = probe.spec
        plain = [e.actions for e in episodes]
        states, running = play_variants(probe, episodes, [plain])
        ours = spec.conventions
        counted = telling_numbers(probe, episodes, plain, same_start, ours)
        if not counted.any():
            text = (
                f"Actions are not compared by playing them again in {spec.name}: where an episode "
                "starts decides every number of the state."
            )
            return [Finding("replay", text, certain=False)]
        (errors,) = replay_errors(episodes, states, running, same_start, ours, counted)
        before = float(errors.mean())
    finally:
        probe.close()
    if before <= limit:
        return list(_gripper_range(theirs, spec, actions))
    # With every change.
    tried = [
        *changes(theirs, spec, actions),
        *rescaled(theirs, spec, [e.states for e in episodes], list(states[0])),
    ]
    env = make_env(len(episodes) * len(tried))
    found: list[Finding] = []
    try:
        # The best change; then, with it undone, perhaps another one.
        now, left = plain, before
        for _ in range(2):
            variants = [
                [c.apply(a, e.states) for a, e in zip(now, episodes, strict=True)] for c in tried
            ]
            after = replay_errors(
                episodes, *play_variants(env, episodes, variants), same_start, ours, counted
            ).mean(axis=1)
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
    # From another start a hand closes beside the object: a few numbers then differ in good data.
    most = before if same_start else float(np.median(errors))
    if not found and most > (limit if same_start else 2 * limit):
        found.append(
            Finding(
                "replay",
                f"Played again in {spec.name}, the recorded actions do not give the recorded "
                f"states (an error of {most:.2f} spreads), and no single change explains it: "
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
