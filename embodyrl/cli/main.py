"""The command line: parses the arguments of each command and calls the code that does the work.

Modules that take time to import, such as torch, are imported only when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NoReturn

from embodyrl import __version__, starting
from embodyrl.cli.completion import add_completion_verb
from embodyrl.cli.config_verb import add_config_verb
from embodyrl.cli.data import add_data_verbs
from embodyrl.cli.sweep import add_sweep_verb
from embodyrl.cli.world import add_world
from embodyrl.errors import UserError, did_you_mean
from embodyrl.interrupt import INTERRUPTED
from embodyrl.real_robot.cli import add_robot_verbs, robot_commands
from embodyrl.storage.cache_folders import choose_cache_folders
from embodyrl.storage.paths import expand_paths, explain_os_error

QUICKSTART_HELP = """examples:
  embodyrl quickstart
  embodyrl quickstart --seed 1 --out runs/quickstart1
Ctrl-C stops it at any point. The same command then continues from there.
"""
DOCTOR_HELP = """examples:
  embodyrl doctor             what works here, and the command that repairs what does not
  embodyrl doctor --json      the same as JSON, for a script
The exit status is 1 if something that every user needs does not work.
"""
REPORT_HELP = """examples:
  embodyrl report runs/mujoco_pick_ppo                  writes runs/mujoco_pick_ppo/report.html
  embodyrl report runs/seed0 runs/seed1 --out both.html     several runs, or seeds, on one page
"""
BENCH_HELP = """examples:
  embodyrl bench                                  every environment with its default settings
  embodyrl bench mujoco env.num_envs=64           64 episodes in parallel, with camera images
  embodyrl bench mujoco env.renderer=none --json  states only
  embodyrl bench mujoco --num-envs 1,16,256       how speed and memory grow with the number of envs
"Steps" are control steps of running episodes. The time includes the resets of ended episodes.
"""
TRAIN_HELP = """examples:
  embodyrl train mujoco_pick_sft data.path=data/pick
      learns from demonstrations, and writes the run runs/mujoco_pick_sft
  embodyrl train mujoco_pick_ppo run.init_checkpoint=runs/mujoco_pick_sft
      improves this policy by reinforcement learning
  embodyrl train mujoco_pick_ppo run.seed=1 algorithm.lr=3e-5
      any key of the config can be overridden
  embodyrl train mujoco_pick_ppo run.workers=2 --launcher ray
      collects rollouts in two processes, on this machine or on a cluster
  torchrun --nproc-per-node 8 -m embodyrl.cli train libero_object_vla_ppo ...
      collects rollouts and computes gradients on 8 GPUs
`embodyrl list presets` names the presets. `embodyrl train PRESET --dry-run` prints all keys.
If a run was interrupted, the same command continues it.
"""
EVAL_HELP = """examples:
  embodyrl eval runs/mujoco_pick_ppo
      the newest checkpoint, on held-out initial states
  embodyrl eval runs/mujoco_pick_ppo env.split=ood_camera
      with a camera position that was never trained on
  embodyrl eval runs/mujoco_pick_ppo --episodes 500 --json
  embodyrl eval runs/mujoco_pick_ppo --video films run.videos=4
      films the first four episodes: films/0000_pick_success.mp4 ...
  embodyrl eval runs/mujoco_pick_ppo --base runs/mujoco_pick_sft --guidance 1.5
      moves 1.5 times as far from the base policy as the training did
The score is the success rate; if the environment reports no success, it is the mean return. --json
has both.
"""
EXPORT_HELP = """examples:
  embodyrl export runs/my_smolvla out/my_smolvla
LeRobot then loads the folder: lerobot-eval --policy.path=out/my_smolvla ...
"""
PUSH_HELP = """examples:
  embodyrl push runs/mujoco_pick_ppo you/my_policy
  embodyrl push runs/mujoco_pick_ppo you/my_policy --dry-run    files, sizes and model card
It uploads weights, config, evaluations and a model card. A new repository is private by default.
Log in first: hf auth login. The environment variable HF_ENDPOINT selects another hub.
"""
PULL_HELP = """examples:
  embodyrl pull you/my_policy my_policy       then: embodyrl eval my_policy
For a private repository, log in first: hf auth login. The environment variable HF_ENDPOINT selects
another hub.
"""
LIST_HELP = """examples:
  embodyrl list               everything
  embodyrl list tasks         the tasks of all simulators, and whether they can run here
  embodyrl list tasks libero  all tasks of one simulator, one per line
"""

CHECKPOINT = "a checkpoint's folder, or a run's folder, which means its newest checkpoint"
OVERRIDES = "settings that override the config, for example run.seed=1"
JSON = "print the result as JSON"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit status: 0, 1 for an error that the user can correct, 130 if it was interrupted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    try:
        if not given:
            build_parser().print_help()
            return 1
        arguments = _parse(given)
        choose_cache_folders()
        arguments.command_line = shlex.join(["embodyrl", *given])
        whole_process = argv is None
        with starting.stoppable() if whole_process else contextlib.nullcontext():
            if arguments.command in ("train", "sweep"):
                from embodyrl.config import read_preset

                read_preset(arguments.preset)  # a mistyped name is told at once
            if arguments.torch:
                _import_torch(arguments.torch == "workers" and whole_process)
            status = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        return _refuse(str(error))
    except BrokenPipeError:
        # The reader of the output, such as `head`, has ended. Python must not write to it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if text := explain_os_error(error):
            return _refuse(text)
        raise
    except KeyboardInterrupt:
        print("\nembodyrl: stopped.", file=sys.stderr)
        return INTERRUPTED


def _refuse(text: str) -> int:
    """Says in one paragraph why a command ended; returns its exit status."""
    print(f"embodyrl: {' '.join(text.split())}", file=sys.stderr)
    return 1


class _Parser(argparse.ArgumentParser):
    """Reports mistakes like every other error: one sentence, with the nearest valid names."""

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
    """The parsed arguments.

    Overrides may stand anywhere. argparse does not accept them after an option, so they are added
    here.
    """
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
    expand_paths(arguments)
    return arguments


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands and their options."""
    parser = _Parser(
        prog="embodyrl",
        description="Reinforcement learning for vision-language-action policies: in simulators, "
        "in a learned world model, and on robots.",
        epilog="Start with: embodyrl quickstart. `embodyrl COMMAND --help` has examples.",
    )
    parser.add_argument("--version", action="version", version=f"embodyrl {__version__}")
    verb = _adder(parser.add_subparsers(metavar="COMMAND", dest="command", required=True))

    # First steps.
    _add_quickstart(verb)
    _add_list(verb)
    _add_doctor(verb)
    add_config_verb(verb)
    add_completion_verb(verb, build_parser)
    # From data to a trained policy and its scores.
    add_data_verbs(verb)
    _add_train(verb)
    add_sweep_verb(verb)
    _add_eval(verb)
    _add_report(verb)
    _add_bench(verb)
    # Exchange with LeRobot and the Hugging Face hub.
    _add_export(verb)
    _add_hub(verb)
    # Robots, and the world model.
    add_robot_verbs(verb)
    add_world(verb, _adder)
    return parser


def _import_torch(fork: bool) -> None:
    """Imports what takes longest, with a word.

    Args:
        fork: whether the command may start workers, which then need not import it again.
    """
    with starting.step("loading PyTorch"):
        importlib.import_module("torch")
    if fork:
        from embodyrl.sims.workers import fork_server

        fork_server.start_here()


Verb = Callable[..., argparse.ArgumentParser]
"""Adds a command: its name, the function that runs it, a sentence, and examples.

``torch`` says whether it needs PyTorch (``"yes"``), also in worker processes (``"workers"``).
"""


def _add_quickstart(verb: Verb) -> None:
    text = (
        "Trains a policy from camera images: demonstrations, imitation, reinforcement learning. "
        "It takes about ten minutes on two CPU cores."
    )
    sub = verb("quickstart", _quickstart, text, QUICKSTART_HELP, torch="workers")
    sub.add_argument(
        "--seed", type=int, default=0, help="of all random numbers (default: %(default)s)"
    )
    text = "folder for all results (default: %(default)s)"
    sub.add_argument("--out", default="runs/quickstart", help=text)
    sub.add_argument("--json", action="store_true", help="print the result as JSON at the end")


def _add_list(verb: Verb) -> None:
    text = "Lists environments, tasks, policies, algorithms, presets and loops."
    sub = verb("list", _list, text, LIST_HELP)
    kinds = ["envs", "tasks", "policies", "algorithms", "presets", "loops"]
    sub.add_argument("what", nargs="?", choices=kinds, help="what to list (default: everything)")
    text = "only this environment (for envs and tasks)"
    sub.add_argument("env", nargs="?", default="", help=text)
    sub.add_argument("--json", action="store_true", help=JSON)


def _add_doctor(verb: Verb) -> None:
    text = "Tests what works on this machine, and says how to repair what does not."
    sub = verb("doctor", _doctor, text, DOCTOR_HELP)
    sub.add_argument("--json", action="store_true", help=JSON)


def _add_train(verb: Verb) -> None:
    text = "Trains a policy, by supervised fine-tuning or reinforcement learning."
    sub = verb("train", _train, text, TRAIN_HELP, torch="workers")
    sub.add_argument("preset", help="a preset's name, or a YAML file")
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help=OVERRIDES)
    text = (
        "print the complete config, build one env, the policy without weights and the tables of "
        "the data, and refuse what the run would refuse; nothing is written"
    )
    sub.add_argument("--dry-run", action="store_true", help=text)
    text = "with --dry-run: estimate how much of the device's memory the run will need"
    sub.add_argument("--memory", action="store_true", help=text)
    text = (
        "where rollouts are collected. ray: by run.workers processes, each with its part of the "
        "envs; robot: by `embodyrl act` on the robot's computer"
    )
    sub.add_argument("--launcher", choices=["ray", "robot"], help=text)
    text = "robot: the address where this command waits for `embodyrl act` (default: %(default)s)"
    sub.add_argument("--listen", default="127.0.0.1:8001", metavar="HOST:PORT", help=text)
    text = "robot: a file with the token that `embodyrl act` must send"
    sub.add_argument("--token-file", default="", metavar="FILE", help=text)
    text = "ray: address of a running cluster, or auto (default: start one for this run)"
    sub.add_argument("--ray-address", default="", metavar="ADDRESS", help=text)
    text = "ray: CPU cores per process (default: %(default)s)"
    sub.add_argument("--worker-cpus", type=float, default=1.0, metavar="N", help=text)
    text = "ray: GPUs per process (default: %(default)s)"
    sub.add_argument("--worker-gpus", type=float, default=0.0, metavar="N", help=text)


def _add_eval(verb: Verb) -> None:
    text = "Scores a checkpoint on held-out initial states."
    sub = verb("eval", _eval, text, EVAL_HELP, torch="workers")
    sub.add_argument("checkpoint", help=CHECKPOINT)
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value", help=OVERRIDES)
    text = "number of episodes (default: as in training)"
    sub.add_argument("--episodes", type=int, default=0, metavar="N", help=text)
    text = "of the policy's noise (default: %(default)s)"
    sub.add_argument("--seed", type=int, default=0, help=text)
    text = "the checkpoint from which training started, for --guidance"
    sub.add_argument("--base", default="", metavar="CHECKPOINT", help=text)
    text = (
        "how far to move from the policy of --base: 0 is that policy, 1 the trained one, more "
        "goes further (default: %(default)s)"
    )
    sub.add_argument("--guidance", type=float, default=1.0, metavar="W", help=text)
    text = "also film the first run.videos episodes, as files of this folder"
    sub.add_argument("--video", default="", metavar="FOLDER", help=text)
    sub.add_argument("--json", action="store_true", help=JSON)


def _add_report(verb: Verb) -> None:
    text = "Writes an HTML page about one or more runs; it can be read offline."
    sub = verb("report", _report, text, REPORT_HELP)
    sub.add_argument("runs", nargs="+", help="folders of runs")
    text = "the file to write (default: report.html in the first run's folder)"
    sub.add_argument("--out", default="", metavar="FILE", help=text)


def _add_bench(verb: Verb) -> None:
    text = "Measures the speed of an environment."
    sub = verb("bench", _bench, text, BENCH_HELP, torch="workers")
    text = "an environment's name, or a preset, whose env section is used (default: all envs)"
    sub.add_argument("env", nargs="?", help=text)
    text = "settings of the environment, for example env.num_envs=64"
    sub.add_argument("overrides", nargs="*", metavar="env.key=value", help=text)
    text = "measure with each of these numbers of parallel envs"
    sub.add_argument("--num-envs", default="", metavar="N,N...", help=text)
    text = "actions per chunk (default: %(default)s)"
    sub.add_argument("--chunk", type=int, default=5, metavar="N", help=text)
    text = "chunks per measurement (default: %(default)s)"
    sub.add_argument("--chunks", type=int, default=20, metavar="N", help=text)
    text = "number of measurements, whose median is printed (default: %(default)s)"
    sub.add_argument("--repeats", type=int, default=5, metavar="N", help=text)
    sub.add_argument("--json", action="store_true", help=JSON)


def _add_export(verb: Verb) -> None:
    text = "Writes a SmolVLA, pi0 or pi0.5 policy as a checkpoint of LeRobot."
    sub = verb("export", _export, text, EXPORT_HELP, torch="yes")
    sub.add_argument("checkpoint", help=CHECKPOINT)
    sub.add_argument("out", help="the folder to write")


def _add_hub(verb: Verb) -> None:
    text = "Uploads a checkpoint and its evaluations to the Hugging Face hub."
    sub = verb("push", _push, text, PUSH_HELP, torch="yes")
    sub.add_argument("checkpoint", help=CHECKPOINT)
    sub.add_argument("repo", help="OWNER/NAME; it is created if it does not exist")
    sub.add_argument("--public", action="store_true", help="create a public repository")
    text = "say what would be uploaded, and upload nothing; it needs no network and no login"
    sub.add_argument("--dry-run", action="store_true", help=text)

    text = "Downloads a checkpoint that was uploaded with push."
    sub = verb("pull", _pull, text, PULL_HELP, torch="yes")
    sub.add_argument("repo", help="OWNER/NAME")
    sub.add_argument("out", help="the folder to write")
    sub.add_argument("--revision", default="", help="a branch, tag or commit")


def _adder(parsers: Any) -> Verb:
    """The function that adds a command to ``parsers``."""

    def verb(
        name: str,
        run: Any,
        text: str,
        examples: str = "",
        torch: Literal["", "yes", "workers"] = "",
    ) -> argparse.ArgumentParser:
        sub = parsers.add_parser(
            name,
            help=text,
            description=text,
            epilog=examples,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(run=run, parser=sub, torch=torch)
        return sub

    return verb


def _show(a: argparse.Namespace, result: Any, as_text: Callable[[Any], None]) -> None:
    """Prints a result as JSON, or by the function ``as_text``."""
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

    _refuse_unread_options(a)
    config = compose(a.preset, a.overrides)
    if a.dry_run:
        from embodyrl.training.dry_run import try_run
        from embodyrl.training.memory_estimate import estimate, table

        # Remarks are comments, so that all of it is a preset.
        print(to_yaml(config), end="", flush=True)
        lines, spec = try_run(config)
        if a.memory and spec is not None:
            lines += table(estimate(config, spec)).splitlines()
        print("\n".join(f"# {line}" for line in lines))
        return 0
    from embodyrl.training.run_folder import finished
    from embodyrl.training.runner import train

    options: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        # Where rollouts are collected and gradients computed: by torchrun's processes, by those of
        # Ray, on a robot's computer, or (without an option) in this process.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "TORCHELASTIC_RUN_ID" in os.environ:
            from embodyrl.distributed.fsdp import join_ranks

            if a.launcher:
                raise UserError(
                    "torchrun starts the processes already. Leave it or --launcher out."
                )
            options["ranks"] = stack.enter_context(join_ranks(config))
            config = options["ranks"].config
        elif a.launcher == "ray":
            from embodyrl.distributed.ray_pool import ray_rollouts

            where = {"address": a.ray_address, "cpus": a.worker_cpus, "gpus": a.worker_gpus}
            options["rollouts"] = partial(ray_rollouts, config, **where)
        elif a.launcher == "robot":
            options["rollouts"] = robot_commands().remote_actor(config, a.listen, a.token_file)
        folder = train(config, command=a.command_line, **options)
        # Of torchrun's processes only the first reports.
        if "ranks" in options and not options["ranks"].first:
            return 0
        if not finished(folder):
            return INTERRUPTED
        print(f"Done: {folder}. Look at it with: embodyrl report {folder}")
    return 0


def _refuse_unread_options(a: argparse.Namespace) -> None:
    """Refuses options of ``train`` that another one makes useless."""
    if a.memory and not a.dry_run:
        raise UserError("--memory estimates what a run will need: give --dry-run too.")
    for launcher, names in (
        ("ray", ("ray_address", "worker_cpus", "worker_gpus")),
        ("robot", ("listen", "token_file")),
    ):
        changed = [n for n in names if getattr(a, n) != a.parser.get_default(n)]
        if changed and a.launcher != launcher:
            option = "--" + changed[0].replace("_", "-")
            raise UserError(f"{option} is read with --launcher {launcher} alone. Leave it out.")


def _eval(a: argparse.Namespace) -> int:
    from embodyrl.training.evaluate import evaluate_checkpoint, print_evaluation

    if a.guidance != 1.0 and not a.base:
        raise UserError(
            "--guidance moves away from another policy: name its checkpoint with --base."
        )
    options: dict[str, Any] = {"base": a.base, "guidance": a.guidance, "video": a.video}
    options |= {"episodes": a.episodes, "seed": a.seed, "say": starting.say}
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

    options = {"chunk": a.chunk, "num_chunks": a.chunks, "repeats": a.repeats}
    if a.num_envs:
        result = bench_curve(a.env, a.overrides, a.num_envs, **options)
    elif a.env:
        result = bench_env(env_config(a.env, a.overrides), **options)
    else:
        result = bench_all(**options)
    _show(a, result, print_bench)
    return 0


def _export(a: argparse.Namespace) -> int:
    from embodyrl.training.export import export

    print(f"Wrote {export(a.checkpoint, a.out)}")
    return 0


def _push(a: argparse.Namespace) -> int:
    from embodyrl.training.hub import preview, push

    if a.dry_run:
        print(preview(a.checkpoint, a.repo, public=a.public))
    else:
        print(f"Pushed: {push(a.checkpoint, a.repo, public=a.public)}")
    return 0


def _pull(a: argparse.Namespace) -> int:
    from embodyrl.training.hub import pull

    folder = pull(a.repo, a.out, revision=a.revision)
    print(f"Wrote {folder}. Score it with: embodyrl eval {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
