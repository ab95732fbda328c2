"""``embodyrl world ...``: the verbs of the learned world model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from embodyrl.cli.reflect import add_parser
from embodyrl.interrupt import INTERRUPTED

Verb = Callable[..., argparse.ArgumentParser]
HELP = """examples:
  embodyrl world train data=[data/tried,data/shown] out=runs/world
  embodyrl world eval runs/world/model --data data/held_out
  embodyrl world play runs/world/model
  embodyrl world loop mujoco_pick policy=runs/sft out=runs/loop
`embodyrl train PRESET env.name=world_model env.model=runs/world/model` then trains a policy in it.
"""
TRAIN_HELP = """examples:
  embodyrl world train data=[data/tried,data/shown] out=runs/world
  embodyrl world train data=[data/tried] out=runs/big width=512 layers=12 steps=100000
The data sets must hold failures too (`embodyrl collect --policy RUN --derail 0.4 --keep-failures`). The same command
goes on where an interrupted run stopped.
"""
EVAL_HELP = """examples:
  embodyrl world eval runs/world/model --data data/held_out
  embodyrl world eval runs/world/model --data data/held_out --policies runs/sft runs/a runs/b runs/c --json
"""
PLAY_HELP = """examples:
  embodyrl world play runs/world/model
  embodyrl world play runs/world/model --reflector runs/reflector --hz 5
Prints the address of a page on this machine; w, s, a, d, r, f and space move the hand in the dream and in the real env.
"""
LOOP_HELP = """examples:
  embodyrl world loop mujoco_pick policy=runs/sft out=runs/loop
  embodyrl world loop mujoco_pick policy=runs/sft out=runs/loop rounds=5 episodes=100 dream_overrides=[env.length=20]
However it was interrupted, the same command goes on. OUT/loop.json holds what it took (real steps, minutes) and gave.
"""


def add_world(verb: Verb, adder: Callable[[Any], Verb]) -> None:
    """Adds the verb to the command line, and to the verb its own ones; ``adder`` makes what adds those."""
    text = (
        "Trains a video world model, and measures it; `embodyrl train` trains policies inside it."
    )
    parts = verb("world", None, text, HELP).add_subparsers(
        metavar="COMMAND", dest="world_command", required=True
    )
    verb = adder(parts)

    sub = verb("train", _train, "Trains a world model from recorded episodes.", TRAIN_HELP)
    sub.add_argument(
        "overrides", nargs="+", metavar="key=value", help="settings; data=[FOLDER, ...] is needed"
    )

    add_parser(parts)

    sub = verb(
        "eval", _eval, "Measures a world model on episodes and policies it has not seen.", EVAL_HELP
    )
    sub.add_argument("model", help="a world model's folder")
    sub.add_argument(
        "--data", nargs="+", required=True, help="data sets that it was not trained on"
    )
    sub.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        help="use only this share of the episodes, as training kept it back",
    )
    sub.add_argument(
        "--policies",
        nargs="+",
        default=[],
        help="checkpoints or runs to score in the dream and for real",
    )
    sub.add_argument("--episodes", type=int, default=256, help="per policy (default: %(default)s)")
    sub.add_argument(
        "--reflector",
        default="",
        help="folder of a reflector to score beside the model's success head",
    )
    sub.add_argument(
        "--pictures",
        default="",
        metavar="FILE.png",
        help="draws some of the episodes beside their dreams",
    )
    sub.add_argument("--json", action="store_true", help="for a machine to read")

    sub = verb(
        "play",
        _play,
        "Drive a dream by keyboard, beside the real env given the same actions.",
        PLAY_HELP,
    )
    sub.add_argument("model", help="a world model's folder")
    sub.add_argument("--reflector", default="", help="folder of a reflector that judges the dream")
    sub.add_argument(
        "--port", type=int, default=0, help="of the page; 0 (default) takes a free one"
    )
    sub.add_argument(
        "--hz", type=float, default=0.0, help="actions a second (default: the env's own)"
    )
    sub.add_argument(
        "--steps", type=int, default=400, help="actions of an episode (default: %(default)s)"
    )

    sub = verb(
        "loop", _loop, "Policy, real episodes, world model, policy: round after round.", LOOP_HELP
    )
    sub.add_argument("preset", help="one that `embodyrl list loops` names, or a YAML file")
    sub.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings; policy=RUN is needed"
    )


def _train(a: argparse.Namespace) -> int:
    from omegaconf import OmegaConf

    from embodyrl.config import build_section
    from embodyrl.world_models.train import WorldTrainConfig, train_world

    model = train_world(
        build_section("world", WorldTrainConfig, OmegaConf.from_dotlist(a.overrides)),
        command=a.command_line,
    )
    if model is None:
        return INTERRUPTED
    print(f"Done: {model}. Measure it with: embodyrl world eval {model} --data FOLDER")
    return 0


def _eval(a: argparse.Namespace) -> int:
    from embodyrl.dreams.score import evaluate_world, print_world

    result = evaluate_world(
        a.model,
        a.data,
        a.policies,
        held_out=a.held_out,
        episodes=a.episodes,
        reflector=a.reflector,
        pictures=a.pictures,
    )
    if a.json:
        print(json.dumps(result))
    else:
        print_world(result)
    return 0


def _play(a: argparse.Namespace) -> int:
    from embodyrl.dreams.play import play

    play(a.model, reflector=a.reflector, port=a.port, hz=a.hz, steps=a.steps)
    return 0


def _loop(a: argparse.Namespace) -> int:
    from embodyrl.dreams.loop import loop, read
    from embodyrl.functional.intervals import format_rate

    page = loop(read(a.preset, a.overrides), command=a.command_line)
    if page is None:
        print("Stopped; the same command goes on from there.")
        return INTERRUPTED
    before, after = (
        format_rate(page[k]["solved"], page[k]["episodes"]) for k in ("before", "after")
    )
    print(
        f"Real success {before} -> {after} with {page['real_steps']:,} real steps to learn from "
        f"and {page['eval_steps']:,} to choose by. The policy is {page['best']}."
    )
    return 0
