"""The command line: verbs that parse and delegate. Nothing heavy is imported before a verb runs."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from embodyrl import __version__
from embodyrl.cli.data import add_data_verbs
from embodyrl.cli.world import add_world
from embodyrl.errors import UserError, did_you_mean
from embodyrl.interrupt import INTERRUPTED
from embodyrl.real_robot.cli import add_robot_verbs, robot_commands

QUICKSTART_HELP = """examples:
  embodyrl quickstart
  embodyrl quickstart --seed 1 --out runs/quickstart1
Ctrl-C stops at any point; the same command goes on from there.
"""
DOCTOR_HELP = """examples:
  embodyrl doctor             what works here, and the command that mends what does not
  embodyrl doctor --json      the same for a script; the exit status is 1 if something needed fails
"""
REPORT_HELP = """examples:
  embodyrl report runs/ppo                                  writes runs/ppo/report.html
  embodyrl report runs/ppo0 runs/ppo1 --out report.html     several runs, or seeds, on one page
"""
BENCH_HELP = """examples:
  embodyrl bench                                  every environment as it is by default
  embodyrl bench mujoco env.num_envs=64           64 at once, with camera images
  embodyrl bench mujoco env.renderer=none --json  states only
  embodyrl bench mujoco --num-envs 1,16,256       how speed and memory grow with the number of envs
Steps are control steps of running episodes; resets of ended ones count as time.
"""
TRAIN_HELP = """examples:
  embodyrl train mujoco_pick_sft data.path=data/pick        learn from demonstrations
  embodyrl train mujoco_pick_ppo run.init_checkpoint=runs/sft   then improve by reinforcement learning
  embodyrl train mujoco_pick_ppo run.seed=1 algorithm.lr=3e-5   any key of the config can be overridden
  embodyrl train mujoco_pick_ppo run.workers=2 --launcher ray   rollouts in two processes, here or on a cluster
  torchrun --nproc-per-node 8 -m embodyrl.cli train libero_object_vla_ppo ...   rollouts and gradients on 8 GPUs
The same command goes on where an interrupted run stopped. `embodyrl list presets` names the presets.
"""
EVAL_HELP = """examples:
  embodyrl eval runs/ppo                          the newest checkpoint, on held-out initial states
  embodyrl eval runs/ppo env.split=ood_camera     with a camera that was never trained on
  embodyrl eval runs/ppo --episodes 500 --json
  embodyrl eval runs/ppo --base runs/sft --guidance 1.5   half as far again as training went from runs/sft
The score is the success rate, or the mean return where the env reports no success; --json has both.
"""
EXPORT_HELP = """examples:
  embodyrl export runs/ppo out/my_smolvla       then: lerobot-eval --policy.path=out/my_smolvla ...
"""
PUSH_HELP = """examples:
  embodyrl push runs/ppo you/my_policy        weights, config, evaluations and a card; private, if it is new
`hf auth login` first. HF_ENDPOINT names another hub.
"""
PULL_HELP = """examples:
  embodyrl pull you/my_policy my_policy       then: embodyrl eval my_policy
`hf auth login` first for what is private. HF_ENDPOINT names another hub.
"""
LIST_HELP = """examples:
  embodyrl list               everything
  embodyrl list tasks         every task of every simulator, and whether it can run here
  embodyrl list tasks libero  one simulator's tasks, each on its line
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 for a user's error, 130 where it was interrupted."""
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if not given:
            build_parser().print_help()
            return 1
        arguments = _parse(given)
        arguments.command_line = shlex.join(["embodyrl", *given])
        status = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        print(f"embodyrl: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("\nembodyrl: stopped.", file=sys.stderr)
        return INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Mistakes in the command line are told like all others: one sentence, with the nearest names."""

    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"{message[:1].upper()}{message[1:]}. `{self.prog} --help` says how it is used."
        )

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            what = "command" if action.dest.endswith("command") else f"choice for {action.dest}:"
            raise UserError(
                f"There is no {what} {value!r}. {did_you_mean(str(value), action.choices)}"
            )


def _parse(given: list[str]) -> argparse.Namespace:
    """The arguments; overrides may stand anywhere, also behind options, where argparse alone would not take them."""
    arguments, rest = build_parser().parse_known_args(given)
    for item in rest:
        if hasattr(arguments, "overrides") and not item.startswith("-"):
            arguments.overrides.append(item)
        elif item.startswith("--"):
            options = [
                name
                for action in arguments.parser._actions
                for name in action.option_strings
                if name[1] == "-"
            ]
            raise UserError(
                f"There is no option {item!r}. {did_you_mean(item.partition('=')[0], options)}"
            )
        else:
            arguments.parser.error(f"unexpected argument {item!r}")
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """All verbs and their options."""
    parser = _Parser(
        prog="embodyrl",
        description="Reinforcement learning for vision-language-action policies, in simulators and on robots.",
        epilog="Start with: embodyrl quickstart",
    )
    parser.add_argument("--version", action="version", version=f"embodyrl {__version__}")
    verb = _adder(parser.add_subparsers(metavar="COMMAND", dest="command", required=True))
    text = "From nothing to a trained pixel policy in about ten minutes on two CPU cores."
    sub = verb("quickstart", _quickstart, text, QUICKSTART_HELP)
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument(
        "--out",
        default="runs/quickstart",
        help="where everything is written (default: %(default)s)",
    )
    sub.add_argument("--json", action="store_true", help="print the result as JSON at the end")

    sub = verb(
        "list",
        _list,
        "Names of environments, tasks, policies, algorithms, presets and loops.",
        LIST_HELP,
    )
    sub.add_argument(
        "what", nargs="?", choices=["envs", "tasks", "policies", "algorithms", "presets", "loops"]
    )
    sub.add_argument(
        "env", nargs="?", default="", help="only this environment (for envs and tasks)"
    )
    sub.add_argument("--json", action="store_true", help="for a machine to read")

    text = "Tests what this machine can do, and says how to mend what it cannot."
    sub = verb("doctor", _doctor, text, DOCTOR_HELP)
    sub.add_argument("--json", action="store_true", help="for a machine to read")

    add_data_verbs(verb)

    sub = verb(
        "train",
        _train,
        "Trains a policy: supervised fine-tuning or reinforcement learning.",
        TRAIN_HELP,
    )
    sub.add_argument("preset", help="a preset's name or a YAML file")
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value")
    sub.add_argument("--dry-run", action="store_true", help="print the resolved config and stop")
    sub.add_argument(
        "--memory",
        action="store_true",
        help="with --dry-run: what it will need of the device's memory",
    )
    text = (
        "ray: each of run.workers is a process of its own; robot: `embodyrl act` plays, elsewhere"
    )
    sub.add_argument("--launcher", choices=["ray", "robot"], help=text)
    sub.add_argument(
        "--listen",
        default="127.0.0.1:8001",
        help="where `embodyrl act` finds it (default: %(default)s)",
    )
    sub.add_argument(
        "--token-file", default="", help="a file with the token that `embodyrl act` must send"
    )
    sub.add_argument(
        "--ray-address",
        default="",
        help="of a running cluster, or auto (default: one for this run)",
    )
    sub.add_argument(
        "--worker-cpus", type=float, default=1.0, help="cores of a worker (default: %(default)s)"
    )
    sub.add_argument(
        "--worker-gpus", type=float, default=0.0, help="GPUs of a worker (default: %(default)s)"
    )

    sub = verb("eval", _eval, "Scores a checkpoint on held-out initial states.", EVAL_HELP)
    sub.add_argument("checkpoint", help="a checkpoint, or a run's folder: its newest")
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value")
    sub.add_argument(
        "--episodes", type=int, default=0, help="initial states (default: as in training)"
    )
    sub.add_argument("--seed", type=int, default=0, help="of the policy's noise")
    sub.add_argument(
        "--base", default="", help="the checkpoint that training started from, for --guidance"
    )
    sub.add_argument(
        "--guidance",
        type=float,
        default=1.0,
        help="how far to go from --base: 0 not at all, 1 as trained",
    )
    sub.add_argument("--json", action="store_true")

    text = "Writes one HTML page about one or more runs; it works offline."
    sub = verb("report", _report, text, REPORT_HELP)
    sub.add_argument("runs", nargs="+", help="run folders")
    sub.add_argument(
        "--out", default="", help="the file (default: report.html in the first run's folder)"
    )

    sub = verb("bench", _bench, "Measures an environment's speed.", BENCH_HELP)
    sub.add_argument(
        "env",
        nargs="?",
        help="an environment's name, or a preset whose env section is used (default: all)",
    )
    sub.add_argument("overrides", nargs="*", metavar="env.key=value")
    sub.add_argument(
        "--num-envs", default="", metavar="N,N...", help="measure each of these numbers of envs"
    )
    sub.add_argument(
        "--chunk", type=int, default=5, help="actions per chunk (default: %(default)s)"
    )
    sub.add_argument(
        "--chunks", type=int, default=20, help="chunks per measurement (default: %(default)s)"
    )
    sub.add_argument(
        "--repeats",
        type=int,
        default=5,
        help="measurements; the median is given (default: %(default)s)",
    )
    sub.add_argument("--json", action="store_true")

    sub = verb(
        "export", _export, "Writes a SmolVLA, pi0 or pi0.5 as LeRobot loads it.", EXPORT_HELP
    )
    sub.add_argument("checkpoint", help="a checkpoint, or a run's folder: its newest")
    sub.add_argument("out", help="the folder to write")

    sub = verb(
        "push",
        _push,
        "Uploads a checkpoint to the Hugging Face hub, with what was measured.",
        PUSH_HELP,
    )
    sub.add_argument("checkpoint", help="a checkpoint, or a run's folder: its newest")
    sub.add_argument("repo", help="you/name; made where it does not exist")
    sub.add_argument(
        "--public", action="store_true", help="a new repository can be seen by everybody"
    )

    sub = verb("pull", _pull, "Downloads a checkpoint that was pushed.", PULL_HELP)
    sub.add_argument("repo", help="you/name")
    sub.add_argument("out", help="the folder to make")
    sub.add_argument("--revision", default="", help="a branch, tag or commit")

    add_robot_verbs(verb)
    add_world(verb, _adder)
    return parser


def _adder(parsers: Any) -> Callable[..., argparse.ArgumentParser]:
    """A function that adds a verb: its name, what runs it, a sentence, and examples."""

    def verb(name: str, run: Any, text: str, examples: str = "") -> argparse.ArgumentParser:
        sub = parsers.add_parser(
            name,
            help=text,
            description=text,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, parser=sub)
        return sub

    return verb


def _show(a: argparse.Namespace, result: Any, as_text: Callable[[Any], None]) -> None:
    if a.json:
        print(json.dumps(result))
    else:
        as_text(result)


def _quickstart(a: argparse.Namespace) -> int:
    from embodyrl.cli.quickstart import quickstart

    result = quickstart(a.out, a.seed, command=a.command_line)
    if a.json:
        print(json.dumps(result))
    return 0 if result else INTERRUPTED


def _list(a: argparse.Namespace) -> int:
    from embodyrl.cli.listing import listing, print_listing

    _show(a, listing(a.what, a.env), print_listing)
    return 0


def _doctor(a: argparse.Namespace) -> int:
    from embodyrl.cli.doctor import diagnose, print_findings

    findings = diagnose()
    _show(a, findings, print_findings)
    return 0 if all(f["ok"] or f["optional"] for f in findings) else 1


def _train(a: argparse.Namespace) -> int:
    from embodyrl.config import compose, to_yaml

    config = compose(a.preset, a.overrides)
    if a.dry_run:
        print(to_yaml(config), end="")
        if a.memory:
            from embodyrl.training.memory_estimate import estimate, spec_of, table

            print("# " + table(estimate(config, spec_of(config))).replace("\n", "\n# "))
        return 0
    from embodyrl.training.run_folder import finished
    from embodyrl.training.runner import train

    how: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            from embodyrl.distributed.fsdp import joined

            if a.launcher:
                raise UserError(
                    "torchrun starts the processes already. Leave it or --launcher out."
                )
            how["ranks"] = stack.enter_context(joined(config))
            config = how["ranks"].config
        elif a.launcher == "ray":
            from embodyrl.distributed.ray_pool import ray_rollouts

            where = {"address": a.ray_address, "cpus": a.worker_cpus, "gpus": a.worker_gpus}
            how["rollouts"] = partial(ray_rollouts, config, **where)
        elif a.launcher == "robot":
            how["rollouts"] = robot_commands().remote_actor(config, a.listen, a.token_file)
        folder = train(config, command=a.command_line, **how)
        if "ranks" in how and not how["ranks"].first:
            return 0
        if not finished(folder):
            return INTERRUPTED
        print(f"Done: {folder}. Look at it with: embodyrl report {folder}")
    return 0


def _eval(a: argparse.Namespace) -> int:
    from embodyrl.training.evaluate import evaluate_checkpoint, print_evaluation

    if a.guidance != 1.0 and not a.base:
        raise UserError("--guidance goes on from another policy: name its checkpoint with --base.")
    options = {"episodes": a.episodes, "seed": a.seed, "base": a.base, "guidance": a.guidance}
    _show(a, evaluate_checkpoint(a.checkpoint, a.overrides, **options), print_evaluation)
    return 0


def _report(a: argparse.Namespace) -> int:
    from pathlib import Path

    from embodyrl.report import build_report

    runs = [Path(r) for r in a.runs]
    out = build_report(runs, Path(a.out) if a.out else runs[0] / "report.html")
    print(f"Wrote {out}")
    return 0


def _bench(a: argparse.Namespace) -> int:
    from embodyrl.cli.bench import bench_all, bench_curve, bench_env, print_bench
    from embodyrl.config import env_config

    how = {"chunk": a.chunk, "num_chunks": a.chunks, "repeats": a.repeats}
    if a.num_envs:
        result = bench_curve(a.env, a.overrides, a.num_envs, **how)
    else:
        result = bench_env(env_config(a.env, a.overrides), **how) if a.env else bench_all(**how)
    _show(a, result, print_bench)
    return 0


def _export(a: argparse.Namespace) -> int:
    from embodyrl.training.export import export

    print(f"Wrote {export(a.checkpoint, a.out)}")
    return 0


def _push(a: argparse.Namespace) -> int:
    from embodyrl.training.hub import push

    print(f"Pushed: {push(a.checkpoint, a.repo, public=a.public)}")
    return 0


def _pull(a: argparse.Namespace) -> int:
    from embodyrl.training.hub import pull

    folder = pull(a.repo, a.out, revision=a.revision)
    print(f"Wrote {folder}. Score it with: embodyrl eval {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
