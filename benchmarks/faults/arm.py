"""Faults of the real arm's safety path: hostile targets and settings, bad numbers in messages."""

from __future__ import annotations

from embodyrl.real_robot.control.fuzz import fuzz_bounds
from embodyrl.real_robot.control.fuzz_messages import fuzz_messages


def survive(tries: int, seed: int) -> dict[str, int]:
    """Half of the tries with hostile targets, half with a bad number in a message.

    A try with hostile targets is a filter with random settings, for 300 ticks. It survives if every
    command is finite and within all limits, and the fault is noticed in words where it needs to be.
    """
    found = [*fuzz_bounds(tries // 2, seed), *fuzz_messages(tries - tries // 2, seed)]
    for line in found:
        print(line, flush=True)
    return {"tries": tries, "survived": tries - len(found), "ticks": 300 * (tries // 2)}
