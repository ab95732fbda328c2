"""Faults of the real arm's safety path: hostile targets and settings, bad numbers in messages.

Run it as ``python benchmarks/faults/arm.py --tries 1000 --seed 0``.
"""

from __future__ import annotations

import argparse
import json

from embodyrl.real_robot.control.fuzz import fuzz_bounds
from embodyrl.real_robot.control.fuzz_messages import fuzz_messages


def survive(tries: int, seed: int) -> dict[str, int]:
    """Tries faults.

    Args:
        tries: number of filters with random settings on hostile inputs (300 ticks each), and number
            of messages with a bad number in them, while an arm moves.
        seed: of the first.

    Returns:
        Number of tries and of those survived: every command was finite and within all limits, and
        the fault was noticed in words where it needs to be.
    """
    bounds = fuzz_bounds(tries, seed)
    messages = fuzz_messages(tries, seed)
    for line in (*bounds, *messages):
        print(line, flush=True)
    return {
        "hostile targets": tries,
        "hostile targets survived": tries - len(bounds),
        "bad messages": tries,
        "bad messages survived": tries - len(messages),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    print(json.dumps(survive(a.tries, a.seed), indent=1))


if __name__ == "__main__":
    main()
