"""``embodyrl improve``: a robot policy that gets better by being helped."""

from __future__ import annotations

import argparse
import json
import shlex
from typing import Any

from embodyrl.cli.verbs import CHECKPOINT, Verb
from embodyrl.interrupt import INTERRUPTED
from embodyrl.real_robot.resets.command_line import add_reset_options, given_resets

HELP = """examples:
  embodyrl improve runs/sft --demos data/pick --out runs/better
      on the simulated arm; you help on a page
  embodyrl improve runs/sft --demos data/pick --helper scripted helper.reaction=2 --latency 0.05
      a scripted person helps
  embodyrl improve runs/sft --robot ros2 --robot-file arm.yaml --helper spacemouse --demos data/pick
  embodyrl improve runs/sft --demos data/pick --detector nearest --person-seconds 300
  embodyrl improve runs/vla --method edit policy.edit_scale=0.3
      the policy's weights stay; critics choose among its proposals, and a small actor edits them
  embodyrl improve runs/both --practice --demos data/pick --demos data/put_back
      it picks up and puts back in turn, and nobody arranges the scene
The same command goes on where it was ended. The exit status is 0 when all rounds are done, 2 after
a fault of the arm, 130 after Ctrl-C or a stop.
"""


def add_improve_verb(verb: Verb) -> None:
    """Adds ``improve`` to the command line."""
    text = (
        "Improves a policy on a robot in rounds: a person helps, it learns, the better is served."
    )
    sub = verb("improve", _improve, text, HELP, torch="yes")
    add = sub.add_argument
    add("checkpoint", help=CHECKPOINT)
    text = "env., policy., algorithm., data., run. and helper. settings"
    add("overrides", nargs="*", metavar="section.key=value", help=text)
    text = (
        "twin (simulated, here), ros2, rosbridge, ros1, libfranka, lerobot (default: %(default)s)"
    )
    add("--robot", default="twin", help=text)
    add("--address", default="", help="of the rosbridge server, or of the arm")
    add("--robot-file", default="", help="the robot's topics, workspace and leader arm")
    add("--prompt", default="", help="instruction for the policy, where no topic gives one")
    text = "page, keyboard, gamepad or its file, spacemouse, leader, lerobot:TYPE, scripted (default: page)"
    add("--helper", default="page", metavar="DEVICE", help=text)
    text = "imitate, rl (PA-RL on what was recorded), edit (the policy's weights stay)"
    add("--method", default="imitate", help=f"{text} (default: %(default)s)")
    text = "a data set to learn from beside; may be given several times"
    add("--demos", action="append", default=[], metavar="DATA", help=text)
    add("--rounds", type=int, default=3, help="(default: %(default)s)")
    text = "helped episodes in a round (default: %(default)s)"
    add("--episodes", type=int, default=20, help=text)
    text = "ends a round's help once a person has spent so many"
    add("--person-seconds", type=float, default=0.0, metavar="S", help=text)
    text = "unaided episodes of each policy that decide which is served (default: %(default)s)"
    add("--look", type=int, default=20, metavar="N", help=text)
    text = "float, nearest, stac or clock: fitted anew in each round, it asks for the person"
    add("--detector", default="", metavar="KIND", help=text)
    text = "share of successes about which it may ask (default: %(default)s)"
    add("--false-alarms", type=float, default=0.1, metavar="RATE", help=text)
    text = "share of the trained control rate (default: %(default)s)"
    add("--speed", type=float, default=0.25, help=text)
    add("--mode", default="rtc", help="sync, naive, ensemble or rtc (default: %(default)s)")
    text = "simulated seconds per inference (default: what it really takes)"
    add("--latency", type=float, default=-1.0, help=text)
    text = "that a person has at least, from a takeover on (default: %(default)s)"
    add("--seconds", type=float, default=60.0, help=text)
    add("--page", type=int, default=0, metavar="PORT", help="of the page (default: a free one)")
    add("--seed", type=int, default=0, help="of everything (default: %(default)s)")
    add("--out", default="runs/improve", help="folder of everything (default: %(default)s)")
    add_reset_options(sub, practice=True)
    add("--json", action="store_true", help="print the result as JSON at the end")


def _improve(a: argparse.Namespace) -> int:
    from embodyrl.real_robot.cli import robot_commands
    from embodyrl.storage.paths import require_writable

    robot_commands().sigterm_is_ctrl_c()  # also while nothing moves; says which package is missing
    from embodyrl.improve.config import read_improve
    from embodyrl.improve.loop import run_rounds

    require_writable(a.out, "--out FOLDER")
    given: dict[str, Any] = {
        name: getattr(a, name)
        for name in (
            "out", "robot", "address", "robot_file", "prompt", "helper", "page", "method", "rounds",
            "episodes", "person_seconds", "look", "detector", "false_alarms", "speed", "mode",
            "latency", "seconds", "seed",
        )
    }  # fmt: skip
    given |= {"policy": a.checkpoint, "demos": tuple(a.demos), "resets": given_resets(a)}
    config = read_improve(a.overrides, **given)
    result = run_rounds(config, command=a.command_line)
    if result is None:
        print("Stopped; the same command goes on from there.")
        return INTERRUPTED
    if a.json:
        print(json.dumps(result))
    else:
        print(f"The best policy is {result['best']}: embodyrl serve {shlex.quote(result['best'])}")
    return 0
