"""``embodyrl judge``: which checkpoint to put on the robot, from recorded episodes alone."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from embodyrl.cli.verbs import CHECKPOINT, JSON, print_as

HELP = """examples:
  embodyrl judge runs/sft runs/rl --data data/played
  embodyrl judge runs/a runs/b runs/c --data data/played data/shown
  embodyrl judge runs/sft runs/rl --data data/played --dream runs/world/model
The data must hold solved and failed episodes, whoever played them: `embodyrl collect --policy RUN
--keep-failures`, or `embodyrl data from-logs --keep-failures` of a robot's logs. Nothing is played.
The exit status is 0, whatever the verdict.
"""


def add_judge_verb(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds ``embodyrl judge`` to the parser."""
    text = "Estimates the success of policies from recorded episodes, and says which are better."
    sub = verb("judge", _run, text, HELP, torch="yes")
    sub.add_argument("policies", nargs="+", metavar="CHECKPOINT", help=CHECKPOINT)
    text = "LeRobotDatasets with solved and failed episodes"
    sub.add_argument("--data", nargs="+", required=True, metavar="DATASET", help=text)
    text = "a world model's folder: the policies also dream from where the episodes began"
    sub.add_argument("--dream", default="", metavar="WORLD_MODEL", help=text)
    text = "what the policies are sorted and compared by: agreement (default), fitted_q or dream"
    sub.add_argument("--by", default="", metavar="WAY", help=text)
    text = "beginnings of episodes from which each policy dreams (default: 64)"
    sub.add_argument("--episodes", type=int, metavar="N", help=text)
    text = "of critics, and of what is sampled (default: %(default)s)"
    sub.add_argument("--seed", type=int, default=0, help=text)
    sub.add_argument("--device", default="auto")
    sub.add_argument("--json", action="store_true", help=JSON)


def _run(a: argparse.Namespace) -> None:
    from embodyrl.errors import UserError
    from embodyrl.judge.judge_policies import judge_policies, print_judgement

    if a.episodes is not None and not a.dream:
        raise UserError("--episodes counts dreams, and there is no --dream. Leave it out.")
    result = judge_policies(
        a.policies,
        a.data,
        dream=a.dream,
        by=a.by,
        episodes=64 if a.episodes is None else a.episodes,
        seed=a.seed,
        device=a.device,
    )
    print_as(a, result, print_judgement)
