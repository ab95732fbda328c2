"""``embodyrl compare``: which policy is better, and how sure that is."""

from __future__ import annotations

import argparse
from typing import Any

from embodyrl.cli.verbs import JSON, print_as

HELP = """examples:
  embodyrl compare runs/rl:before runs/rl              did RL help?
  embodyrl compare runs/ppo runs/sac                   two policies, in pairs of episodes
  embodyrl compare runs/ppo_sweep runs/sac_sweep       two algorithms, several runs of each
  embodyrl compare runs/a,runs/b runs/c,runs/d runs/e,runs/f     three, two runs of each
  embodyrl compare a.json b.json                       what `embodyrl eval RUN --json` printed
Episodes are compared in pairs that begin in the same initial state. With several policies, and with
several tasks, the tests are made stricter, so that all of them hold at once (Holm).
The exit status is 0, whatever the verdict.
"""
SIDE = (
    "a run's folder (its last evaluation), RUN:before or RUN:after, a folder that holds runs, or a "
    "file of `eval --json`; several of them, separated by commas, are runs of one side"
)


def add_compare_verb(verb: Any) -> None:
    """Adds ``embodyrl compare`` to the parser."""
    text = "Says whether one policy is better than another, on which tasks, and how sure that is."
    sub = verb("compare", _run, text, HELP)
    sub.add_argument("sides", nargs="+", metavar="SIDE", help=SIDE)
    text = "of intervals and tests (default: 0.95)"
    sub.add_argument("--confidence", type=float, default=0.95, help=text)
    text = "runs came in so many groups, with a look after each (AdaStop)"
    sub.add_argument("--groups", type=int, default=0, metavar="N", help=text)
    sub.add_argument("--json", action="store_true", help=JSON)


def _run(a: argparse.Namespace) -> None:
    from embodyrl.errors import UserError
    from embodyrl.report.compare import compare

    if not 0.5 <= a.confidence < 1:
        raise UserError(
            f"--confidence is {a.confidence:g}; it must be from 0.5 to below 1, for example 0.95."
        )
    if a.groups < 0:
        raise UserError(f"--groups is {a.groups}; it must be 0 or a number of groups.")
    print_as(a, compare(a.sides, a.confidence, a.groups), _print)


def _print(found: dict[str, Any]) -> None:
    success = found["kind"] == "success"
    # Sides are long; letters stand for them below.
    letter = {side: chr(ord("A") + i) for i, side in enumerate(found["sides"])}
    for side, of in found["sides"].items():
        mean = f"{of['mean']:.1%}" if success else f"{of['mean']:.4g}"
        runs = f"{of['runs']} runs, " if of["runs"] > 1 else ""
        print(f"{letter[side]}  {mean} ({runs}{of['episodes']:,} episodes)  {side}")
    for pair in found["pairs"]:
        print()
        _print_pair(pair, (letter[pair["a"]], letter[pair["b"]]), found["confidence"], success)
    for remark in found["remarks"]:
        print(f"\n{remark}")
    if all(pair["training"] is None for pair in found["pairs"]):
        print("\nOf training anew this says nothing: that takes several runs of each side.")


def _print_pair(
    pair: dict[str, Any], names: tuple[str, str], confidence: float, success: bool
) -> None:
    from embodyrl.functional.comparison import range_text

    a, b = names
    print(f"{b} less {a}, in {pair['episodes']:,} initial states: {_apart(pair, names, success)}")
    if pair["verdict"] == "undecided" and pair["needed"] > pair["episodes"]:
        print(
            f"  A difference as large as this one takes about {pair['needed']:,} initial states "
            "to be shown four times of five."
        )
    # By task.
    width = max(map(len, pair["tasks"]), default=0)
    for task, of in pair["tasks"].items():
        print(f"  {task:<{width}}  {_apart(of, names, success)}")
    # If both were trained anew.
    if (training := pair["training"]) is None:
        return
    how = "runs of the same seed are paired" if training["paired_by_seed"] else "runs not paired"
    print(f"  trained anew ({how}): {range_text(training, success)}{_said(training, names)}")
    if adastop := training.get("adastop"):
        print(f"  AdaStop, at most {1 - confidence:.0%} errors over all looks: {_looks(adastop)}")


def _looks(adastop: dict[str, Any]) -> str:
    groups = adastop["groups"]
    if adastop["shown"]:
        return f"a difference is shown after group {adastop['stops_after']} of {groups}."
    if not adastop["could_show"]:
        return "so few runs can never show one. Take more, or fewer groups."
    return f"no difference is shown after all {groups} groups."


def _apart(of: dict[str, Any], names: tuple[str, str], success: bool) -> str:
    from embodyrl.functional.comparison import difference_text

    return f"{difference_text(of, success)}{_said(of, names)}"


def _said(of: dict[str, Any], names: tuple[str, str]) -> str:
    a, b = names
    said = {"undecided": "no difference is shown", "a": f"{a} is better", "b": f"{b} is better"}
    return f": {said[of['verdict']]}"
