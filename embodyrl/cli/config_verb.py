"""The command ``embodyrl config``; what it prints is made in ``config_keys``."""

from __future__ import annotations

import argparse
from typing import Any


def add_config_verb(verb: Any) -> None:
    """Adds ``embodyrl config`` to the parser."""
    text = "Says what a key of a config means, what it may be, and its default."
    examples = (
        "examples:\n"
        "  embodyrl config run.patience       what it means\n"
        "  embodyrl config algorithm.lr       of every algorithm\n"
        "  embodyrl config algorithm.ppo      all keys of PPO\n"
        "  embodyrl config mujoco_pick_ppo    every key of a preset, and where it differs\n"
        "  embodyrl config                    all keys\n"
        "Keys of `embodyrl world train` and `world loop` are listed as world.KEY and loop.KEY.\n"
    )
    sub = verb("config", _run, text, examples, torch="yes")
    what = "a key, a section, or a preset (default: all keys)"
    sub.add_argument("what", nargs="?", default="", metavar="KEY", help=what)
    sub.add_argument("--json", action="store_true", help="print the result as JSON")


def _run(a: argparse.Namespace) -> int:
    from embodyrl.cli.config_keys import explain

    print(explain(a.what, a.json))
    return 0
