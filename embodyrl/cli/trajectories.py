"""``embodyrl world trajectories train|write``: synthetic trajectories as a policy would play them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from embodyrl.cli.verbs import CHECKPOINT, JSON, Verb

HELP = """examples:
  embodyrl world trajectories train data/tried data/shown --out runs/pieces
  embodyrl world trajectories write runs/pieces --policy runs/sft --out data/guided
An off-policy learner reads the result: data.path=data/tried data.more=[data/guided] data.keep=all
"""
TRAIN_HELP = """examples:
  embodyrl world trajectories train data/tried data/shown --out runs/pieces
  embodyrl world trajectories train data/tried --length 21 --steps 10000 --out runs/pieces
The data sets must hold states, no cameras (`embodyrl collect ENV env.cameras=[] --keep-failures`).
"""
WRITE_HELP = """examples:
  embodyrl world trajectories write runs/pieces --policy runs/sft --out data/guided
  embodyrl world trajectories write runs/pieces --policy runs/sft --guidance 0.3 --out data/near
  embodyrl world trajectories write runs/pieces --guidance 0 --out data/like_the_recorded
  embodyrl world trajectories write runs/pieces --policy runs/sft --starts first --length 40 \\
      --out data/whole
"""


def add_trajectories(verb: Verb, adder: Callable[[Any], Verb]) -> None:
    """Adds ``trajectories`` to ``embodyrl world``, and its own verbs to it.

    Args:
        verb: adds a verb to ``embodyrl world``.
        adder: makes such a function for the verbs of a verb.
    """
    text = "Draws trajectories as a policy would play them, from recorded episodes alone."
    parts = verb("trajectories", None, text, HELP).add_subparsers(
        metavar="COMMAND", dest="trajectories_command", required=True
    )
    part = adder(parts)
    _add_train(part)
    _add_write(part)


def _add_train(verb: Verb) -> None:
    text = "Trains a diffusion model of pieces of recorded episodes."
    sub = verb("train", _train, text, TRAIN_HELP, torch="yes")
    text = "LeRobotDatasets of states, failures included"
    sub.add_argument("data", nargs="+", metavar="DATASET", help=text)
    sub.add_argument("--out", required=True, metavar="FOLDER", help="of the model")
    text = "rows of a piece (default: %(default)s)"
    sub.add_argument("--length", type=int, default=16, metavar="L", help=text)
    text = "gradient steps (default: %(default)s)"
    sub.add_argument("--steps", type=int, default=3000, metavar="N", help=text)
    text = "pieces in each (default: %(default)s)"
    sub.add_argument("--batch-size", type=int, default=64, metavar="N", help=text)
    sub.add_argument("--lr", type=float, default=1e-3, help="learning rate (default: %(default)s)")
    sub.add_argument("--width", type=int, default=128, help="of the net (default: %(default)s)")
    sub.add_argument("--layers", type=int, default=3, help="of the net (default: %(default)s)")
    sub.add_argument("--heads", type=int, default=4, help="of attention (default: %(default)s)")
    sub.add_argument("--seed", type=int, default=0, help="of weights and batches")
    sub.add_argument("--device", default="auto")
    sub.add_argument("--json", action="store_true", help=JSON)


def _add_write(verb: Verb) -> None:
    text = "Writes a data set of trajectories that a policy guides."
    sub = verb("write", _write, text, WRITE_HELP, torch="yes")
    sub.add_argument("model", help="a trajectory model's folder")
    sub.add_argument("--out", required=True, metavar="FOLDER", help="of the data set")
    sub.add_argument("--policy", default="", metavar="RUN", help=f"what guides: {CHECKPOINT}")
    text = "power of the policy's probability; 0 is the data's (default: %(default)s)"
    sub.add_argument("--guidance", type=float, default=1.0, metavar="W", help=text)
    text = "how many (default: %(default)s)"
    sub.add_argument("--episodes", type=int, default=500, metavar="N", help=text)
    text = "rows of each, in pieces that go on from one another; 0 (default) is one piece"
    sub.add_argument("--length", type=int, default=0, metavar="N", help=text)
    text = "begin in any recorded state (default), or in the first ones of episodes"
    sub.add_argument("--starts", default="any", choices=["any", "first"], help=text)
    text = "of the denoising (default: %(default)s)"
    sub.add_argument("--steps", type=int, default=32, metavar="K", help=text)
    text = "chunks of the policy per decision, whose Gaussian guides (default: %(default)s)"
    sub.add_argument("--proposals", type=int, default=8, metavar="N", help=text)
    sub.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    sub.add_argument("--device", default="auto")
    sub.add_argument("--json", action="store_true", help=JSON)


def _train(a: argparse.Namespace) -> int:
    from embodyrl.ranges import field_types
    from embodyrl.world_models.trajectories.train_trajectories import (
        TrajectoryTrainConfig,
        train_trajectories,
    )

    # The options have the names of the settings.
    config = TrajectoryTrainConfig(
        **{name: getattr(a, name) for name in field_types(TrajectoryTrainConfig)}
    )
    with _bar("training", config.steps) as progress:
        result = train_trajectories(a.data, a.out, config, progress=progress)
    # For a program, or in words.
    if a.json:
        print(json.dumps(result))
        return 0
    print(
        f"{a.out} has learned from {result['pieces']:,} pieces of {result['episodes']:,} episodes. "
        f"Of {result['held_out']:,} held-out ones it tells {result['explained']:.0%} of the actions' "
        "variance from half noise. Draw from it with: embodyrl world trajectories write "
        f"{a.out} --policy RUN --out FOLDER"
    )
    return 0


def _write(a: argparse.Namespace) -> int:
    from embodyrl.world_models.trajectories.write_trajectories import write_trajectories

    with _bar("drawing", a.episodes) as progress:
        result = write_trajectories(
            a.model,
            a.out,
            policy=a.policy,
            guidance=a.guidance,
            episodes=a.episodes,
            length=a.length,
            starts=a.starts,
            steps=a.steps,
            proposals=a.proposals,
            seed=a.seed,
            device=a.device,
            progress=progress,
        )
    if a.json:
        print(json.dumps(result))
        return 0
    # How far it is from what the policy would do.
    near = ""
    if "distance" in result:
        near = (
            f" Actions are {result['distance'] ** 0.5:.2f} standard deviations from what the policy "
            "does there."
        )
    advice = ""
    if result["cut"]:
        advice = (
            " A trajectory that is not solved is cut, and has not failed: train by TD (fql, rlpd) with "
            "data.keep=all."
        )
    print(
        f"{a.out} holds {result['rows']:,} rows of {result['episodes']:,} trajectories, "
        f"{result['solved']:,} of which are solved.{near}{advice}"
    )
    return 0


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows on the terminal how many of ``total`` are done."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        line = bar.add_task(what, total=total)
        yield lambda done: bar.update(line, completed=done)
