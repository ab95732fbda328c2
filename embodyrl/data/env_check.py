"""A data set held against an env: do its pictures, states and actions mean what the env means?

The env is put into the initial states that the data set names, where it names them and the
proprioception is then the same. Where it does not, starts of episodes are compared by their mean
pictures, and actions by how the robot moves from any start.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.build import make_env
from embodyrl.config import env_from_dict
from embodyrl.data.conventions import convention_override
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.lerobot_read import ORIGIN
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.picture_check import (
    ALIKE,
    SEVERAL,
    Finding,
    best_match,
    picture_findings,
    write_comparison,
)
from embodyrl.data.replay_check import STEPS, ReplayedEpisode, comparable, replay_findings
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.storage.paths import expand_home
from embodyrl.storage.plain_data import read_json
from embodyrl.types import Conventions, EnvSpec, Obs

PICTURES = 6
"""Episodes whose first pictures are compared."""
STARTS = 36
"""Starts of the env among which those nearest to the recorded ones are sought."""
REPLAYED = 2
"""Episodes whose actions are played again."""
ONLY_SAID = ("pictures", "replay")
"""Findings that nobody can act on for sure, so that training goes on."""


@dataclass
class EnvCheck:
    """The result.

    Attributes:
        env: name of the env; empty if none could be asked.
        findings: what differs.
        unchecked: sentences on what could not be checked, and why.
        recorded: camera -> (M, h, w, 3) first pictures of episodes.
        drawn: camera -> (M', h, w, 3) the env's.
        paired: whether both show the same states.
        conventions: of the env.
        rate_differs: a sentence on another rate; empty if it is the same.
    """

    env: str = ""
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)
    recorded: dict[str, np.ndarray] = field(default_factory=dict)
    drawn: dict[str, np.ndarray] = field(default_factory=dict)
    paired: bool = False
    conventions: Conventions = field(default_factory=Conventions)
    rate_differs: str = ""

    def write_picture(self, path: str | Path) -> Path | None:
        """Writes recorded pictures above the env's; None if there are none."""
        if not self.recorded:
            return None
        return write_comparison(path, self.recorded, self.drawn, paired=self.paired)


def data_options(data: Any) -> dict[str, Any]:
    """The arguments of ``load_demonstrations`` that the section ``data`` of a config gives."""
    return {
        "cameras": data.cameras or None,
        "profile": data.profile,
        "convention": data.convention,
        **({"rate": data.rate} if data.rate else {}),
    }


def recorded_env(path: str | Path) -> EnvConfig | None:
    """The env that a data set of embodyrl was recorded in; None for other data sets.

    Only of a folder: of a damaged one nothing is said here.
    """
    file = Path(expand_home(str(path))) / "meta" / "embodyrl.json"
    try:
        config = read_json(file, ORIGIN, "").get("config", {}) if file.is_file() else {}
        return env_from_dict(config) if config.get("name") else None
    except UserError:
        return None


def check_with_env(
    path: str | Path, config: EnvConfig, options: Mapping[str, Any], *, revision: str | None = None
) -> EnvCheck:
    """Compares a data set with an env.

    Args:
        path: of the data set.
        config: of the env.
        options: see ``data_options``.
        revision: of a hub id.

    Raises:
        UserError: the data do not fit the env at all: other dims, another control mode, no camera.
    """
    # Envs of its own, so that those of a run stay as they are.
    beside = config.beside_a_run(PICTURES)
    if beside is None:
        return EnvCheck(
            unchecked=[f"Data are not compared with {config.name}: it plays in real time."]
        )
    try:
        env = make_env(beside)
    except UserError as error:
        return EnvCheck(unchecked=[f"The env could not be built to compare data: {error}"])
    # Pictures and states at the starts of episodes.
    try:
        demos = _first_episodes(path, env, options, revision)
        check, starts = _compare_starts(demos, env)
    finally:
        env.close()
    # Then the actions, where states can be compared.
    if any(found.field == "state" and found.certain for found in check.findings):
        check.unchecked.append("Actions are not played again, because the states differ.")
        return check
    if check.rate_differs and options.get("rate") != "resample":
        check.unchecked.append("Actions are not played again at another rate.")
        return check
    check.findings += _replay(demos, beside, starts)
    return check


def _first_episodes(
    path: str | Path, env: VecEnv, options: Mapping[str, Any], revision: str | None
) -> Demonstrations:
    # As many as there are, up to those that are compared.
    with contextlib.suppress(UserError):
        return load_demonstrations(
            path, 1, spec=env.spec, keep="all", episodes=PICTURES, revision=revision, **options
        )
    return load_demonstrations(path, 1, spec=env.spec, keep="all", revision=revision, **options)


@dataclass(frozen=True)
class _Start:
    """The first frame of an episode, the frame after its last one, and its initial state or -1."""

    row: int
    end: int
    init: int


def _compare_starts(demos: Demonstrations, env: VecEnv) -> tuple[EnvCheck, list[_Start]]:
    """Compares first frames; also returns the episodes, with initial states where they are sure."""
    check = EnvCheck(env.spec.name, conventions=env.spec.conventions)
    check.rate_differs = other_rate(demos.rate, env.spec, demos.path)
    # The first frames of some episodes, and the initial states that they name.
    ends = demos.end.unique().tolist()[:PICTURES]
    rows = [0, *ends[:-1]]
    inits = demos.init[rows].tolist()
    limit = env.spec.num_init_states
    known = all(i >= 0 and (limit is None or i < limit) for i in inits)
    # Are they the env's? Then proprioception is the same there.
    obs = _observe(env, inits if known else None, len(rows))
    state = obs.proprio[: len(rows)].cpu().numpy()
    recorded_state = demos.proprio[rows].numpy()
    here, there = (comparable(x, env.spec.conventions) for x in (state, recorded_state))
    same = known and np.allclose(here, there, rtol=2e-3, atol=2e-3)
    # What both show.
    recorded = {name: frames[rows] for name, frames in demos.images.items()}
    drawn = {name: obs.images[name].cpu().numpy()[: len(rows)] for name in recorded}
    # The same pictures and other numbers: the state means something else.
    if known and not same and recorded and _alike(recorded, drawn):
        same = True
        check.findings.append(_state_finding(recorded_state, state))
    check.paired = bool(same)
    check.recorded = recorded
    # Other states: those of the env that are most like them.
    if not same:
        drawn, states = _nearest_starts(env, recorded_state, list(recorded))
        check.findings += _far_states(recorded_state, states)
    check.drawn = drawn
    # Orientation, colours, cameras.
    if recorded and (same or len(rows) >= SEVERAL):
        ours = env.spec.conventions
        theirs = demos.conventions
        check.findings += picture_findings(
            recorded,
            drawn,
            paired=bool(same),
            orientation=theirs.orientation or ours.orientation or "upright",
            channels=theirs.channels or ours.channels or "rgb",
        )
    elif recorded:
        check.unchecked.append(
            f"Pictures are not compared: {len(rows)} episodes are too few for a mean picture, and "
            f"the data set names no initial states of {env.spec.name}."
        )
    if not same:
        check.unchecked.append(
            f"The data set names no initial states of {env.spec.name}, so its pictures and states "
            "are compared with those of other starts."
        )
    # What can be played again.
    starts = [
        _Start(row, end, init if same else -1)
        for row, end, init in zip(rows, ends, inits, strict=True)
    ]
    return check, starts


def _nearest_starts(
    env: VecEnv, state: np.ndarray, names: list[str]
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Pictures of the env's starts, for each recorded one (M, P) that with the nearest proprio.

    Also the proprio (M', P) of all these starts.

    A hand in the same place tells left from right in a scene that is symmetric without it.
    """
    seen: list[np.ndarray] = []
    images: dict[str, list[np.ndarray]] = {name: [] for name in names}
    limit = env.spec.num_init_states or 10**6
    for start in range(0, min(STARTS, limit), env.spec.num_envs):
        obs = env.reset(init=[(start + k) % limit for k in range(env.spec.num_envs)])
        seen.append(obs.proprio.cpu().numpy())
        for name in names:
            images[name].append(obs.images[name].cpu().numpy())
    # The nearest in spreads of each number.
    states = np.concatenate(seen)
    scale = states.std(axis=0) + 1e-3
    far = np.abs((state[:, None] - states[None]) / scale).mean(axis=-1)
    nearest = far.argmin(axis=1)
    return {name: np.concatenate(frames)[nearest] for name, frames in images.items()}, states


def _far_states(recorded: np.ndarray, states: np.ndarray) -> list[Finding]:
    """Numbers of recorded starts (M, P) that no start of the env (M', P) is anywhere near."""
    # Far is several times as far as the env's starts are from one another.
    middle = states.mean(axis=0)
    span = np.ptp(states, axis=0) + 0.05 * np.abs(middle) + 0.05
    far = np.flatnonzero(np.abs(recorded.mean(axis=0) - middle) > 5 * span)
    if not len(far):
        return []
    text = (
        "The starts of episodes are far from those of the env in "
        f"numbers {', '.join(map(str, far))} of 'observation.state' (number {far[0]} is "
        f"{recorded[:, far[0]].mean():.3g}, the env's {middle[far[0]]:.3g}): other units or other "
        "parts, or the robot starts elsewhere."
    )
    return [Finding("state", text, certain=False)]


def _observe(env: VecEnv, inits: Sequence[int] | None, count: int) -> Obs:
    """The env at the start of episodes, in its own order of initial states where none are given."""
    if inits is None:
        limit = env.spec.num_init_states or 10**6
        inits = [i % limit for i in range(count)]
    ids = list(range(len(inits)))
    return env.reset(ids if len(ids) < env.spec.num_envs else None, init=list(inits))


def _alike(recorded: Mapping[str, np.ndarray], drawn: Mapping[str, np.ndarray]) -> bool:
    """Whether the pictures show the same states, however they are turned.

    They are then much more alike in their order than in another one.
    """
    others = {name: np.roll(frames, 1, axis=0) for name, frames in drawn.items()}
    for name, frames in recorded.items():
        match = best_match(name, frames, drawn, True)
        if match.distance > ALIKE:
            return False
        if match.distance > 0.5 * best_match(name, frames, others, True).distance:
            return False
    return True


def _state_finding(recorded: np.ndarray, state: np.ndarray) -> Finding:
    """What differs in proprio (M, P) of the same states."""
    # Other units: the same ratio everywhere.
    places = np.abs(state).max(axis=0) > 1e-3
    ratios = recorded[:, places] / np.where(state[:, places] == 0, np.nan, state[:, places])
    ratio = float(np.nanmedian(ratios)) if places.any() else 0.0
    # Another order: each number is one of the env's.
    order = [
        int(np.abs(state - recorded[:, [j]]).max(axis=0).argmin()) for j in range(state.shape[1])
    ]
    ordered = state[:, order]
    if ratio and np.nanmax(np.abs(ratios / ratio - 1)) < 0.02:
        what = f"every number is {ratio:.4g} times the env's: it is in other units"
    elif np.allclose(ordered, recorded, rtol=2e-3, atol=2e-3):
        what = f"its numbers are those of the env in another order ({order})"
    else:
        wrong = np.flatnonzero(np.abs(recorded - state).max(axis=0) > 2e-3)
        what = (
            f"numbers {', '.join(map(str, wrong))} differ: other parts, units or representations "
            "of rotations"
        )
    return Finding(
        "state",
        f"'observation.state' differs from the env's in states whose pictures are the same: {what}. "
        "Convert it.",
    )


def _replay(demos: Demonstrations, config: EnvConfig, starts: list[_Start]) -> list[Finding]:
    """Plays the actions of some episodes again."""
    blind = config.without_pictures()

    def build(count: int) -> VecEnv:
        return make_env(dataclasses.replace(blind, num_envs=count, terminate_on_success=False))

    # Those in which the most happens.
    episodes = [
        ReplayedEpisode(
            start.init,
            demos.actions[start.row : start.end].numpy()[:STEPS],
            demos.proprio[start.row : start.end].numpy()[:STEPS],
        )
        for start in starts
    ]
    episodes.sort(key=lambda e: -float(np.abs(np.diff(e.actions, axis=0)).sum()))
    return replay_findings(build, episodes[:REPLAYED], demos.conventions)


def other_rate(rate: float, spec: EnvSpec, name: str) -> str:
    """A sentence on data of another rate than the env's; empty if it is the same or not known."""
    if not (rate and spec.control_hz) or abs(rate - spec.control_hz) <= 0.01 * spec.control_hz:
        return ""
    return (
        f"{name} has {rate:g} actions per second, and {spec.name} takes {spec.control_hz:g}: each "
        "action would last another time there. Resample the data with data.rate=resample, give "
        "the env the rate of the data, or take the frames as they are with data.rate=keep."
    )


def findings_in_words(
    check: EnvCheck, conventions: Any, given: Mapping[str, Any], name: str
) -> Iterator[tuple[Finding, str, bool]]:
    """Each finding, a sentence that says what to do, and whether training refuses it.

    Args:
        check: the result.
        conventions: of the env.
        given: what the user said (``data.convention`` and ``data.cameras``): nothing of that is
            refused.
        name: of the data set.
    """
    for found in check.findings:
        # What the user said is taken; what was seen is said beside it.
        told = found.field in given
        text = f"{name}: {found.text}"
        if told:
            text += " It is taken as data.convention says."
        elif found.fix:
            text += f' It is translated by "{convention_override(found.fix)}".'
        ours = getattr(conventions, found.field, None)
        if not told and ours:
            text += (
                f' If it is right as it is, say so: "{convention_override({found.field: ours})}".'
            )
        # A robot may start elsewhere: that alone says nothing for sure.
        unsure = found.field == "state" and not found.certain
        yield found, text, not told and not unsure and found.field not in ONLY_SAID
