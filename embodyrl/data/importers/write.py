"""Writes what an importer read as a LeRobotDataset; whatever cannot be used is left out and said."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.lerobot_write import DatasetWriter, require_free
from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.types import Conventions, EnvSpec

Say = Callable[[str], None]


class UnusableEpisodeError(Exception):
    """An episode cannot be used; the text says why, as half a sentence."""


@dataclass
class Facts:
    """What holds for all episodes of a source.

    Attributes:
        name: of the env, such as ``"libero/libero_object"``.
        control_mode: what an action means, in the words of this project's envs; empty if the source
            does not say.
        control_hz: actions per second.
        max_episode_steps: of the longest episode.
        conventions: what the source says of its pictures, states and actions.
    """

    name: str
    control_mode: str
    control_hz: float
    max_episode_steps: int
    conventions: Conventions = field(default_factory=Conventions)


def write_imported(
    out: str | Path,
    episodes: Iterable[tuple[str, Callable[[], Recording]]],
    facts: Facts,
    say: Say = print,
) -> dict[str, Any]:
    """Writes episodes into a new data set.

    Args:
        out: its folder.
        episodes: (what the episode is called, a function that reads it); the function may raise an
            ``UnusableEpisodeError``, and the episode is then left out.
        facts: of the source.
        say: is told which episodes are left out, and why.

    Returns:
        Numbers of ``episodes``, ``frames``, ``solved`` episodes and episodes ``left_out``.

    Raises:
        UserError: ``out`` exists, or no episode can be used.
    """
    require_free(out)
    writer: DatasetWriter | None = None
    written = {"episodes": 0, "frames": 0, "solved": 0, "left_out": 0}
    try:
        for label, read in episodes:
            # Read an episode, and see whether it is whole and like the others.
            try:
                recording = read()
                _require_whole(recording)
                if writer is not None:
                    _require_like(recording, writer.spec)
            except UnusableEpisodeError as error:
                written["left_out"] += 1
                say(f"{label} is left out: {error}.")
                continue
            # The first one says what shapes the data set has.
            if writer is None:
                writer = DatasetWriter(out, _spec(facts, recording))
            writer.add(recording)
            written["episodes"] += 1
            written["frames"] += len(recording)
            written["solved"] += recording.success
    except BaseException as error:
        if writer is not None:
            writer.__exit__(type(error), error, None)
        raise
    if writer is None:
        raise UserError(f"None of the {written['left_out']} episodes can be used.")
    writer.__exit__(None, None, None)
    if not facts.control_mode:
        # The data set then says as little about its actions as its source does.
        (Path(out) / "meta" / "embodyrl.json").unlink()
    return written


def _spec(facts: Facts, first: Recording) -> EnvSpec:
    return EnvSpec(
        name=facts.name,
        num_envs=1,
        action_dim=first.actions.shape[1],
        proprio_dim=first.proprio.shape[1],
        control_mode=facts.control_mode,
        control_hz=facts.control_hz,
        max_episode_steps=max(1, facts.max_episode_steps),
        cameras={name: _size(frames) for name, frames in first.images.items()},
        conventions=facts.conventions,
    )


def _size(frames: np.ndarray) -> tuple[int, int]:
    return int(frames.shape[1]), int(frames.shape[2])


def _require_whole(recording: Recording) -> None:
    """Refuses an episode whose parts do not belong together."""
    # There is something to learn.
    steps = len(recording.actions)
    if not steps:
        raise UnusableEpisodeError("it has no action")
    # Everything has one row a step.
    parts = {f"camera {name}": frames for name, frames in recording.images.items()}
    parts |= {"the state": recording.proprio, "the reward": recording.reward}
    for what, values in parts.items():
        if len(values) != steps:
            raise UnusableEpisodeError(f"{what} has {len(values)} rows for {steps} actions")
    # Numbers are numbers.
    for what, values in (("state", recording.proprio), ("actions", recording.actions)):
        if not np.isfinite(values).all():
            raise UnusableEpisodeError(f"its {what} hold NaN or infinity")
    if not recording.instruction.strip():
        raise UnusableEpisodeError("it has no instruction (--instruction gives one)")


def _require_like(recording: Recording, spec: EnvSpec) -> None:
    """Refuses an episode that differs from the first one in its shapes."""
    cameras = {name: _size(frames) for name, frames in recording.images.items()}
    for what, found, wanted in (
        ("action dims", recording.actions.shape[1], spec.action_dim),
        ("numbers of state", recording.proprio.shape[1], spec.proprio_dim),
        ("cameras", cameras, spec.cameras),
    ):
        if found != wanted:
            raise UnusableEpisodeError(f"it has {found} {what}, and the first one {wanted}")


def rate_of(said: Any, given: float, where: str) -> float:
    """Actions per second: what the source says, or ``--hz`` where it says nothing.

    Raises:
        UserError: neither says it, or they differ.
    """
    known = isinstance(said, int | float) and not isinstance(said, bool) and said > 0
    if known and given and abs(given - said) > 1e-6:
        raise UserError(f"{where} says {said:g} actions per second. Leave --hz={given:g} out.")
    if not known and not given:
        raise UserError(f"{where} does not say how many actions a second takes. Give --hz NUMBER.")
    return float(said) if known else given
