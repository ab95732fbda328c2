"""``Watched``: what a signal reads of recorded episodes, at the decisions of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.detectors.signals import Signal
from embodyrl.errors import UserError
from embodyrl.policy import num_executed

READ_AT_ONCE = 32
"""Observations that the policy encodes at once."""


class TooFewSuccessesError(UserError):
    """A detector learns from successes; more episodes may help."""


@dataclass(frozen=True)
class Watched:
    """A recorded episode as a detector sees it.

    Attributes:
        readings: (T, ...) of the decisions.
        steps: T, the actions that had been taken before each: 0, H, 2 H and so on.
        success: whether it was solved.
        length: actions until it was solved, or until its end.
        task: its instruction.
    """

    readings: Tensor
    steps: list[int]
    success: bool
    length: int
    task: str


def load_watched(
    path: str | Path, policy: Any, signal: Signal, device: torch.device | str, seed: int = 0
) -> list[Watched]:
    """Reads a data set with its failures as a policy and a signal would have seen it.

    Args:
        path: a LeRobotDataset, folder or hub id.
        policy: whose episodes they are.
        signal: what is read.
        device: of the policy.
        seed: of what is sampled.

    Raises:
        UserError: no such data set, or it does not fit the policy.
    """
    every = num_executed(policy.config)
    demos = load_demonstrations(path, every, spec=policy.spec, keep="all")
    demos.check(policy.spec, str(path))
    return watch(demos, policy, signal, every, device, seed)


def watch(
    demos: Demonstrations,
    policy: Any,
    signal: Signal,
    every: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> list[Watched]:
    """The same of data in memory; episodes in which a person took over are left out.

    Args:
        demos: frames of all episodes, one after the other.
        policy: whose episodes they are.
        signal: what is read.
        every: H, actions from one decision to the next.
        device: of the policy.
        seed: of what is sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    # The frames before each action until the task is solved.
    # An episode in which a person took over says nothing of the policy alone.
    spans = []
    for end in demos.end.unique().tolist():
        begin = int(torch.searchsorted(demos.end, end))
        if demos.intervention[begin:end].any():
            continue
        solved = demos.solved[begin:end].nonzero()
        spans.append((begin, begin + int(solved[0]) + 1 if len(solved) else end))
    if not spans:
        return []
    # The decisions of all of them, many at once.
    frames = torch.cat([torch.arange(begin, end, every) for begin, end in spans])
    readings = []
    for some in frames.split(READ_AT_ONCE):
        obs, chunk, _ = demos.batch(some)
        readings.append(signal.read(policy, obs.to(device), chunk.to(device), generator))
    # Give each episode its own readings.
    found = []
    parts = torch.cat(readings).split([len(range(begin, end, every)) for begin, end in spans])
    for (begin, end), part in zip(spans, parts, strict=True):
        found.append(
            Watched(
                part,
                list(range(0, end - begin, every)),
                bool(demos.success[begin]),
                end - begin,
                demos.sentences[int(demos.instruction[begin])],
            )
        )
    return found


def successes_of(episodes: Sequence[Watched], path: str | Path) -> list[Watched]:
    """The episodes that were solved.

    Raises:
        TooFewSuccessesError: there is none.
    """
    found = [episode for episode in episodes if episode.success]
    if not found:
        raise TooFewSuccessesError(
            f"None of the {len(episodes)} episodes of {path} that no person took over is a "
            "success, and a detector learns from successes."
        )
    return found
