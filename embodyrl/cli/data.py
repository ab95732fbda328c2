"""``embodyrl collect`` and ``embodyrl data``: make data sets, and check them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.real_robot.cli import add_dream_options, dream_options

COLLECT_HELP = """examples:
  embodyrl collect mujoco env.task=pick --episodes 100 --out data/pick
  embodyrl collect mujoco env.task=pick --episodes 100 --noise 0.3 --keep-failures --out data/noisy
  embodyrl collect mujoco_pick_sft --policy runs/sft --derail 0.4 --keep-failures --out data/tried
  embodyrl collect mujoco_pick_sft --policy runs/sft --dream runs/world/model --out data/chosen
  embodyrl collect mujoco_pick_sft --replay data/tried --keep-failures --out data/near
The same command continues an interrupted collection; no finished episode is lost.
"""
DATA_HELP = """examples:
  embodyrl data verify data/pick              reads every table and decodes every picture
  embodyrl data verify data/pick --json       the exit status is 1 if anything is wrong
  embodyrl data verify data/theirs mujoco env.task=pick env.cameras=[front,wrist]
                                              also held against an env: pictures, states, actions
  embodyrl data verify data/theirs libero data.profile=libero_lerobot
  embodyrl data from-hdf5 libero_object --out data/libero    files of LIBERO, robomimic or ManiSkill
  embodyrl data from-rlds bridge/1.0.0 --hz 5 --out data/bridge
  embodyrl data label data/videos --like data/own --out data/labelled
                                              names the actions of videos that have none
"""


def add_data_verbs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds ``collect`` and ``data`` to the command line, with its function that adds a verb."""
    _add_collect(verb)
    _add_data(verb)


def _add_collect(verb: Callable[..., argparse.ArgumentParser]) -> None:
    sub = verb(
        "collect",
        _collect,
        "Lets an expert or a policy act, and writes a LeRobotDataset.",
        COLLECT_HELP,
        torch="workers",
    )
    sub.add_argument("env", help="an environment's name, or a preset whose env section is used")
    text = "settings of the environment, for example env.task=reach"
    sub.add_argument("overrides", nargs="*", metavar="env.key=value", help=text)
    sub.add_argument(
        "--episodes", type=int, default=50, help="episodes to keep (default: %(default)s)"
    )
    sub.add_argument(
        "--noise",
        type=float,
        default=0.0,
        help="standard deviation of noise on the actions, which lie in [-1, 1] (default: %(default)s)",
    )
    sub.add_argument(
        "--keep-failures", action="store_true", help="keep failed episodes too, with success=false"
    )
    sub.add_argument(
        "--policy", default="", help="a run or checkpoint that acts instead of the expert"
    )
    sub.add_argument(
        "--derail",
        type=float,
        default=0.0,
        help="share of the policy's episodes that leave its course at random",
    )
    add_dream_options(sub)
    text = "the policy acts as in evaluation and on a robot, without its exploration noise"
    sub.add_argument("--noise-free", action="store_true", help=text)
    sub.add_argument(
        "--replay", default="", help="a data set whose successes are replayed, each with a nudge"
    )
    sub.add_argument(
        "--perturb",
        type=float,
        default=1.0,
        help="size of the nudge, in actions (default: %(default)s)",
    )
    sub.add_argument(
        "--past-success",
        type=int,
        help="record that many steps past success, which then does not end an episode at once",
    )
    text = "of the initial states and the noise (default: %(default)s)"
    sub.add_argument("--seed", type=int, default=0, help=text)
    sub.add_argument("--out", required=True, help="the data set's folder")


def _add_data(verb: Callable[..., argparse.ArgumentParser]) -> None:
    sub = verb(
        "data",
        _data,
        "Checks a LeRobot data set, yours or somebody else's, or makes one of other files.",
        DATA_HELP,
    )
    sub.add_argument("what", choices=["verify", "from-logs", "from-hdf5", "from-rlds", "label"])
    sub.add_argument(
        "path",
        help="the data set's folder, or its id on the Hugging Face hub; a robot's logs; an HDF5 "
        "file or a folder of some; or a folder with RLDS's TFRecord files",
    )
    text = "verify: an env or a preset that the data must fit; by default the one they come from"
    sub.add_argument("env", nargs="?", default="", help=text)
    text = "verify: settings of the env, and data.profile, data.convention, data.cameras, data.rate"
    sub.add_argument("overrides", nargs="*", metavar="key=value", help=text)
    text = "verify: file for recorded pictures beside the env's (default: NAME_beside_env.png)"
    sub.add_argument("--picture", default="", metavar="FILE", help=text)
    sub.add_argument("--out", default="", help="from-..., label: the data set's folder")
    text = "from-hdf5, from-rlds: what the policy is told, where the data do not say it"
    sub.add_argument("--instruction", default="", help=text)
    text = "from-hdf5, from-rlds: actions per second, where the data do not say it"
    sub.add_argument("--hz", type=float, default=0.0, help=text)
    text = "from-hdf5, from-rlds: keys of the observation that make the state"
    sub.add_argument("--state", default="", metavar="KEY,KEY", help=text)
    sub.add_argument(
        "--keep-failures", action="store_true", help="from-logs: keep failed episodes too"
    )
    text = "from-logs: an episode of each turn of the policy, which failed, and of the person"
    sub.add_argument("--turns", action="store_true", help=text)
    text = "from-logs: take what brought the scene back, and nothing else"
    sub.add_argument("--resets", action="store_true", help=text)
    text = "label: a data set with actions, of the same arm and cameras; a few episodes are enough"
    sub.add_argument("--like", default="", metavar="DATASET", help=text)
    text = "label: R^2 that each number of an action must have on held-out episodes (default: %(default)s)"
    sub.add_argument("--least", type=float, default=0.5, metavar="R2", help=text)
    text = "label: gradient steps (default: %(default)s)"
    sub.add_argument("--steps", type=int, default=2000, metavar="N", help=text)
    text = "label: replace the actions that are there, and say how well they agree"
    sub.add_argument("--replace", action="store_true", help=text)
    sub.add_argument("--json", action="store_true", help="print JSON")


def _collect(a: argparse.Namespace) -> int:
    from embodyrl.config import env_config
    from embodyrl.data.collect import collect_dataset

    chosen = dream_options(a)
    choice = None
    if chosen.dream:
        from embodyrl.world_models.dream_chooser import choice_by_dream

        choice = choice_by_dream(**asdict(chosen))
    collect_dataset(
        env_config(a.env, a.overrides),
        a.out,
        num_episodes=a.episodes,
        noise=a.noise,
        keep_failures=a.keep_failures,
        past_success=a.past_success,
        policy=a.policy,
        derail=a.derail,
        choice=choice,
        noise_free=a.noise_free,
        replay=a.replay,
        perturb=a.perturb,
        seed=a.seed,
    )
    return 0


def _data(a: argparse.Namespace) -> int:
    if a.what == "from-logs":
        from embodyrl.data.doubts import print_doubts
        from embodyrl.real_robot.logs.export import export_logs

        written = export_logs(
            a.path, a.out, keep_failures=a.keep_failures, turns=a.turns, resets=a.resets
        )
        if a.json:
            print(json.dumps(written))
        else:
            print_doubts(written["doubts"])
            left = f" {written['left_out']} were left out" if written["left_out"] else ""
            if written["cut_short"]:
                left += f", of which {written['cut_short']} were cut short by a fault or the stop"
            print(f"Wrote {written['episodes']} episodes to {a.out}.{left + '.' if left else ''}")
        return 0
    if a.what in ("from-hdf5", "from-rlds"):
        return _import(a)
    if a.what == "label":
        return _label(a)
    from embodyrl.data.env_check import recorded_env
    from embodyrl.data.verify import print_verdict, verify_dataset

    env, options = _env_and_options(a.env, a.overrides)
    # A picture is drawn for those who name an env: they look for what differs.
    picture = a.picture or (f"{Path(a.path).name}_beside_env.png" if env is not None else "")
    verdict = verify_dataset(a.path, env or recorded_env(a.path), options, picture)
    if a.json:
        print(json.dumps({"sound": not verdict.faults, **vars(verdict)}))
    else:
        print_verdict(verdict)
    return 1 if verdict.faults or verdict.differs else 0


def _env_and_options(name: str, overrides: list[str]) -> tuple[Any, dict[str, Any]]:
    """The env that data are held against, if one is named, and what the user says of the data."""
    from embodyrl.config import DataConfig, env_config
    from embodyrl.data.env_check import data_options
    from embodyrl.storage.config_section import build_section
    from embodyrl.storage.preset_files import apply_overrides

    # Overrides may stand where the env would.
    words = [name, *overrides] if "=" in name else overrides
    about = [word for word in words if word.startswith("data.")]
    given = apply_overrides({}, about).get("data") or {}
    options = data_options(build_section("data", DataConfig, given))
    rest = [word for word in words if word not in about]
    if "=" in name or not name:
        if rest:
            raise UserError(f"{rest[0]!r} is of an env: name the env before it.")
        return None, options
    return env_config(name, rest), options


def _import(a: argparse.Namespace) -> int:
    from embodyrl.data.importers.hdf5 import import_hdf5
    from embodyrl.data.importers.rlds import import_rlds

    read = import_hdf5 if a.what == "from-hdf5" else import_rlds
    state = tuple(filter(None, a.state.split(",")))
    say = (lambda text: None) if a.json else print
    written = read(a.path, a.out, instruction=a.instruction, hz=a.hz, state=state, say=say)
    if a.json:
        print(json.dumps(written))
    else:
        print(
            f"Wrote {written['episodes']} episodes, {written['solved']} of them solved, to {a.out}; "
            f"left out: {written['left_out']}."
        )
    return 0


def _label(a: argparse.Namespace) -> int:
    from embodyrl.data.label import label_dataset

    for name in ("like", "out"):
        if not getattr(a, name):
            raise UserError(f"`embodyrl data label` needs --{name} FOLDER; see --help.")
    if a.steps < 1:
        raise UserError(f"--steps is {a.steps}; give at least 1, better 2000.")
    say = (lambda text: None) if a.json else print
    options = {"least": a.least, "steps": a.steps, "replace": a.replace}
    found = label_dataset(a.path, a.like, a.out, **options, say=say)
    if a.json:
        print(json.dumps(found))
        return 0
    shares = ", ".join(f"{value:.2f}" for value in found["explained"])
    print(f"Of held-out actions it explains {shares} (R^2 of each number).")
    if "agrees" in found:
        print(f"Of those that were replaced: {', '.join(f'{v:.2f}' for v in found['agrees'])}.")
    print(
        f"Wrote {found['episodes']} episodes, {found['frames']:,} frames, to {a.out}. Of "
        f"{found['doubtful']:.1%} of them it is less sure than of 99% of the held-out ones "
        "(column action_doubt)."
    )
    return 0
