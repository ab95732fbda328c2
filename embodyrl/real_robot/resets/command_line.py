"""The options of a reset on a command line, for ``embodyrl deploy`` and ``improve``."""

from __future__ import annotations

import argparse

from embodyrl.real_robot.resets.options import NO_RESET, ResetOptions


def add_reset_options(sub: argparse.ArgumentParser, *, practice: bool) -> None:
    """Adds who brings the scene back between episodes.

    Args:
        sub: of the command.
        practice: whether its policy may play both tasks in turn.
    """
    add = sub.add_argument
    text = (
        "brings the scene back between episodes: waypoints (.yaml), a log that is played again "
        "(.mcap), or a policy of the task that undoes this one (default: a person, or the simulator)"
    )
    add("--reset", default="", metavar="PATH", help=text)
    if practice:
        text = "the policy plays this task and the one that undoes it in turn"
        add("--practice", action="store_true", help=text)
    text = "that one try of a reset may take (default: %(default)s)"
    add("--reset-seconds", type=float, default=NO_RESET.seconds, metavar="S", help=text)
    text = "failed tries of a reset after which a person is asked (default: %(default)s)"
    add("--reset-tries", type=int, default=NO_RESET.tries, metavar="N", help=text)
    text = "failed episodes in a row after which a person is asked (default: never)"
    add("--ask-after", type=int, default=NO_RESET.ask_after, metavar="N", help=text)
    text = "instruction of the task that undoes this one, for a real arm"
    add("--reset-prompt", default="", help=text)
    text = "a reflector's folder, which tells whether the scene is back"
    add("--reset-reflector", default="", metavar="FOLDER", help=text)
    text = "m, where the hand goes once the scene is back (default: 0.45 0 0.25)"
    add("--home", type=float, nargs=3, default=NO_RESET.home, metavar=("X", "Y", "Z"), help=text)


def given_resets(a: argparse.Namespace) -> ResetOptions:
    """What ``add_reset_options`` was given."""
    x, y, z = a.home
    return ResetOptions(
        a.reset,
        getattr(a, "practice", False),
        a.reset_seconds,
        a.reset_tries,
        a.ask_after,
        a.reset_prompt,
        a.reset_reflector,
        (x, y, z),
    )
