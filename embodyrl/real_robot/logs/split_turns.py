"""The turns of the policy and of the person in one episode, as episodes of their own.

A policy's turn that a person had to end failed, however the episode went on: what it did is not to
be imitated, and did not earn what the person earned. A person's turn is a demonstration from the
middle of the task (HG-DAgger, arXiv:1810.02890), with the way back where they had the arm go back
(RaC, arXiv:2509.07953).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from embodyrl.data.recording import Recording
from embodyrl.real_robot.control.episode import EndedBy


def split_turns(recording: Recording, ended_by: str) -> list[Recording]:
    """Cuts an episode where a person took over.

    The last turn of a person reaches to the end of the episode, with what the policy did after it.
    It has the episode's outcome. An earlier one counts as solved if the episode was.

    Args:
        recording: of the whole episode; ``human`` says who acted.
        ended_by: who ended it, ``episode.EndedBy``.

    Returns:
        The turns in order. Those that say nothing of the policy are left out: what a fault or a
        person ended without success.
    """
    assert recording.human is not None
    human = recording.human.astype(bool)
    before = np.concatenate([[False], human[:-1]])
    takeovers = np.flatnonzero(human & ~before).tolist()
    handovers = np.flatnonzero(~human & before).tolist()
    # 1. Without a person there is one turn.
    if not takeovers:
        counts = recording.success or ended_by == EndedBy.POLICY
        return [recording] if counts else []
    # 2. Every turn of the policy that a person ended failed.
    turns: list[tuple[int, int, bool]] = [(0, takeovers[0], False)] if takeovers[0] else []
    for begin, end in pairwise(takeovers):
        let_go = next(k for k in handovers if k > begin)
        turns.append((begin, let_go, recording.success))
        turns.append((let_go, end, False))
    # 3. The last turn of a person, with what came after.
    turns.append((takeovers[-1], len(recording), recording.success))
    of_person = set(takeovers)
    return [
        _part(recording, begin, end, solved)
        for begin, end, solved in turns
        if solved or begin not in of_person
    ]


def _part(recording: Recording, begin: int, end: int, solved: bool) -> Recording:
    """Frames [begin, end) as an episode, solved by its last action or not at all."""
    rows = slice(begin, end)
    last = np.arange(begin, end) == end - 1
    assert recording.human is not None
    return replace(
        recording,
        images={name: frames[rows] for name, frames in recording.images.items()},
        depth={name: maps[rows] for name, maps in recording.depth.items()},
        proprio=recording.proprio[rows],
        actions=recording.actions[rows],
        reward=(last & solved).astype(np.float32),
        solved=last & solved,
        human=recording.human[rows],
        recovery=None if recording.recovery is None else recording.recovery[rows],
    )
