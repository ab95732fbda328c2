"""``embodyrl world ...``: the verbs of the learned world model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from embodyrl.cli.reflect import add_reflect
from embodyrl.cli.trajectories import add_trajectories
from embodyrl.cli.verbs import Verb
from embodyrl.interrupt import INTERRUPTED

HELP = """examples:
  embodyrl world train data=[data/tried,data/shown] out=runs/world
  embodyrl world eval runs/world/model --data data/held_out
  embodyrl world play runs/world/model
  embodyrl world loop mujoco_pick policy=runs/sft demos=data/pick out=runs/loop
  embodyrl world trajectories write runs/pieces --policy runs/sft --out data/guided
`embodyrl train PRESET env.name=world_model env.model=runs/world/model` then trains a policy in it.
"""
TRAIN_HELP = """examples:
  embodyrl world train data=[data/tried,data/shown] out=runs/world
  embodyrl world train data=[data/tried] out=runs/big width=512 layers=12 steps=100000
  embodyrl world train data=[data/tried,data/shown] out=runs/chooser frames=false
      enough to choose among a policy's proposals (--dream), and much faster
The data sets must hold failures too (`embodyrl collect --policy RUN --derail 0.4
--keep-failures`). The same command continues an interrupted run.
"""
EVAL_HELP = """examples:
  embodyrl world eval runs/world/model --data data/held_out
  embodyrl world eval runs/world/model --data data/held_out --rank runs/sft
  embodyrl world eval runs/world/model --data data/held_out --policies runs/sft runs/a runs/b --json
"""
PLAY_HELP = """examples:
  embodyrl world play runs/world/model
  embodyrl world play runs/world/model --reflector runs/reflector --hz 5
Prints the address of a page on this machine. The keys w, s, a, d, r, f and space move the hand in
the dream and in the real env.
"""
LOOP_HELP = """examples:
  embodyrl world loop mujoco_pick policy=runs/sft demos=data/pick out=runs/loop
  embodyrl world loop mujoco_pick policy=runs/sft demos=data/pick rounds=5 episodes=100
  embodyrl world loop mujoco_pick policy=runs/sft out=runs/loop dream=dream_ppo
  embodyrl world loop mujoco_pick_seen policy=runs/sft demos=data/pick out=runs/seen
      from pictures alone: a dream chooses, and the policy imitates what was solved
policy= is a run or checkpoint (`embodyrl train mujoco_pick_sft`), demos= the demonstrations that it
was trained on (`embodyrl collect`); a dream without imitation, such as dream_ppo, needs no demos=.
The same command continues an interrupted loop. OUT/loop.json holds its cost (real steps, minutes)
and its result. Nothing is learned from a world model that cannot rank what the policy proposes: the
exit status is 3 if that is so in all rounds.
"""


def add_world(verb: Verb, adder: Callable[[Any], Verb]) -> None:
    """Adds ``world`` to the command line, and its own verbs to it.

    Args:
        verb: adds a verb to the command line.
        adder: makes such a function for the verbs of a verb.
    """
    text = (
        "Trains a video world model, and measures it; `embodyrl train` trains policies inside it."
    )
    parts = verb("world", None, text, HELP).add_subparsers(
        metavar="COMMAND", dest="world_command", required=True
    )
    part = adder(parts)
    _add_train(part)
    add_reflect(parts)
    _add_eval(part)
    _add_play(part)
    _add_loop(part)
    add_trajectories(part, adder)


def _add_train(verb: Verb) -> None:
    sub = verb(
        "train", _train, "Trains a world model from recorded episodes.", TRAIN_HELP, torch="yes"
    )
    sub.add_argument(
        "overrides", nargs="+", metavar="key=value", help="settings; data=[FOLDER, ...] is needed"
    )


def _add_eval(verb: Verb) -> None:
    sub = verb(
        "eval",
        _eval,
        "Measures a world model on episodes and policies it has not seen.",
        EVAL_HELP,
        torch="workers",
    )
    sub.add_argument("model", help="a world model's folder")
    sub.add_argument(
        "--data", nargs="+", required=True, help="data sets that it was not trained on"
    )
    sub.add_argument(
        "--held-out",
        type=float,
        default=0.0,
        help="use only the share of the episodes that training kept back",
    )
    sub.add_argument(
        "--policies",
        nargs="+",
        default=[],
        help="at least three checkpoints or runs to score in the dream and in the real env",
    )
    sub.add_argument("--episodes", type=int, default=256, help="per policy (default: %(default)s)")
    sub.add_argument(
        "--rank",
        default="",
        metavar="RUN",
        help="a checkpoint or run: does the dream know which of its proposals is better?",
    )
    sub.add_argument(
        "--states",
        type=int,
        default=128,
        help="real states in which proposals are ranked (default: %(default)s)",
    )
    sub.add_argument(
        "--reflector",
        default="",
        help="folder of a reflector to score beside the model's success head",
    )
    sub.add_argument(
        "--pictures",
        default="",
        metavar="FILE.png",
        help="draw some of the episodes beside their dreams",
    )
    sub.add_argument("--json", action="store_true", help="print JSON")


def _add_play(verb: Verb) -> None:
    sub = verb(
        "play",
        _play,
        "Drive a dream by keyboard; the real env beside it gets the same actions.",
        PLAY_HELP,
        torch="workers",
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


def _add_loop(verb: Verb) -> None:
    sub = verb(
        "loop",
        _loop,
        "Improves a policy in rounds of real episodes, world model and training in dreams.",
        LOOP_HELP,
        torch="workers",
    )
    sub.add_argument("preset", help="a preset that `embodyrl list loops` names, or a YAML file")
    sub.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="settings; policy=RUN is needed, and demos=DATA where the dream imitates",
    )


def _train(a: argparse.Namespace) -> int:
    from embodyrl.storage.config_section import build_section
    from embodyrl.storage.preset_files import apply_overrides
    from embodyrl.world_models.config import WorldTrainConfig
    from embodyrl.world_models.train import train_world

    config = build_section("world", WorldTrainConfig, apply_overrides({}, a.overrides))
    model = train_world(config, command=a.command_line)
    if model is None:
        return INTERRUPTED
    print(f"Done: {model}. Measure it with: embodyrl world eval {model} --data FOLDER")
    return 0


def _eval(a: argparse.Namespace) -> int:
    from embodyrl.dreams.score import evaluate_world
    from embodyrl.dreams.score_text import print_world

    result = evaluate_world(
        a.model,
        a.data,
        a.policies,
        held_out=a.held_out,
        episodes=a.episodes,
        reflector=a.reflector,
        pictures=a.pictures,
        rank=a.rank,
        states=a.states,
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
    from embodyrl.dreams.loop import run_loop
    from embodyrl.dreams.loop_config import read_loop
    from embodyrl.functional.intervals import format_rate

    result = run_loop(read_loop(a.preset, a.overrides), command=a.command_line)
    if result is None:
        print("Stopped; the same command goes on from there.")
        return INTERRUPTED
    before = format_rate(result["before"]["solved"], result["before"]["episodes"])
    after = format_rate(result["after"]["solved"], result["after"]["episodes"])
    choice = ""
    if with_choice := result.get("after_choice"):
        rate = format_rate(with_choice["solved"], with_choice["episodes"])
        choice = f", {rate} with the dream's choice"
    print(
        f"Success in the real env: {before} before, {after} after{choice}. The loop learned from "
        f"{result['real_steps']:,} real steps and took {result['eval_steps']:,} more to evaluate "
        f"and {result.get('gate_steps', 0):,} for the gate. The policy is {result['best']}."
    )
    return 0
