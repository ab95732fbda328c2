"""The command line: parses the arguments of each command and calls the code that does the work.

Modules that take time to import, such as torch, are imported only when a command runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from embodyrl import __version__, starting
from embodyrl.cli.compare import add_compare_verb
from embodyrl.cli.completion import add_completion_verb
from embodyrl.cli.config_verb import add_config_verb
from embodyrl.cli.data import add_data_verbs
from embodyrl.cli.detector import add_detector
from embodyrl.cli.hub import add_exchange_verbs
from embodyrl.cli.improve import add_improve_verb
from embodyrl.cli.judge import add_judge_verb
from embodyrl.cli.mixture import add_mixture_verb
from embodyrl.cli.sweep import add_sweep_verb
from embodyrl.cli.training import add_eval_verb, add_train_verb
from embodyrl.cli.verbs import JSON, Verb, print_as
from embodyrl.cli.world import add_world
from embodyrl.errors import UserError, did_you_mean
from embodyrl.interrupt import INTERRUPTED
from embodyrl.ranges import require_finite
from embodyrl.real_robot.cli import add_robot_verbs
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
  embodyrl report runs/seed0 runs/seed1 --extrapolate       how far success may still rise
"""
BENCH_HELP = """examples:
  embodyrl bench                                  every environment with its default settings
  embodyrl bench mujoco env.num_envs=64           64 episodes in parallel, with camera images
  embodyrl bench mujoco env.renderer=none --json  states only
  embodyrl bench mujoco --num-envs 1,16,256       how speed and memory grow with the number of envs
"Steps" are control steps of running episodes. The time includes the resets of ended episodes.
"""
LIST_HELP = """examples:
  embodyrl list               everything
  embodyrl list tasks         the tasks of all simulators, and whether they can run here
  embodyrl list tasks libero  all tasks of one simulator, one per line
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit status: 0, 1 for an error that the user can correct (or ``UserError.status``), 130
        if it was interrupted.
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
            if arguments.command in ("train", "sweep", "mixture"):
                from embodyrl.storage.preset_files import read_preset

                read_preset(arguments.preset)  # a mistyped name is told at once
            if arguments.torch:
                _import_torch(arguments.torch == "workers" and whole_process)
            status = arguments.run(arguments) or 0
        sys.stdout.flush()
        return status
    except UserError as error:
        return _refuse(str(error), error.status)
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


def _refuse(text: str, status: int = 1) -> int:
    """Says in one paragraph why a command ended; returns its exit status."""
    print(f"embodyrl: {' '.join(text.split())}", file=sys.stderr)
    return status


class _Parser(argparse.ArgumentParser):
    """Reports mistakes like every other error: one sentence, with the nearest valid names."""

    def error(self, message: str) -> NoReturn:
        raise UserError(
            f"{message[:1].upper()}{message[1:].rstrip('.')}. `{self.prog} --help` says how it is "
            "used."
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
    require_finite(vars(arguments))
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
    add_train_verb(verb)
    add_sweep_verb(verb)
    add_mixture_verb(verb)
    add_eval_verb(verb)
    add_compare_verb(verb)
    add_judge_verb(verb)
    _add_report(verb)
    _add_bench(verb)
    # Exchange with LeRobot and the Hugging Face hub.
    add_exchange_verbs(verb)
    # Robots, what watches them, and the world model.
    add_robot_verbs(verb)
    add_improve_verb(verb)
    add_detector(verb, _adder)
    add_world(verb, _adder)
    return parser


def _import_torch(fork: bool) -> None:
    """Imports what takes longest, with a word.

    Args:
        fork: whether the command may start workers, which then need not import it again.
    """
    starting.load_torch()
    if fork:
        from embodyrl.sims.workers import fork_server

        fork_server.start_here()


def _add_quickstart(verb: Verb) -> None:
    text = (
        "Trains a policy from camera images: demonstrations, imitation, reinforcement learning. "
        "It took 5 minutes on two idle CPU cores, 14 to 17 on one shared core. "
        "Each stage says how much is left."
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


def _add_report(verb: Verb) -> None:
    text = "Writes an HTML page about one or more runs; it can be read offline."
    sub = verb("report", _report, text, REPORT_HELP)
    sub.add_argument("runs", nargs="+", help="folders of runs")
    text = "the file to write (default: report.html in the first run's folder)"
    sub.add_argument("--out", default="", metavar="FILE", help=text)
    text = "continue the curves of success to two and four times the compute, and print them"
    sub.add_argument("--extrapolate", action="store_true", help=text)


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


def _quickstart(a: argparse.Namespace) -> int:
    from embodyrl.cli.quickstart import quickstart

    result = quickstart(a.out, a.seed, command=a.command_line)
    if a.json:
        print(json.dumps(result))
    return 0 if result else INTERRUPTED


def _list(a: argparse.Namespace) -> int:
    from embodyrl.cli.listing import listing, print_listing

    print_as(a, listing(a.what, a.env), print_listing)
    return 0


def _doctor(a: argparse.Namespace) -> int:
    from embodyrl.cli.doctor import diagnose, print_findings

    findings = diagnose()
    print_as(a, findings, print_findings)
    return 0 if all(f["ok"] or f["optional"] for f in findings) else 1


def _report(a: argparse.Namespace) -> int:
    from pathlib import Path

    from embodyrl.report import build_report
    from embodyrl.report.extrapolate import fit_runs, print_fits
    from embodyrl.report.read import read_run

    folders = [Path(r) for r in a.runs]
    out = Path(a.out) if a.out else folders[0] / "report.html"
    print(f"Wrote {build_report(folders, out, extrapolate=a.extrapolate)}")
    if a.extrapolate:
        runs = [read_run(folder) for folder in folders]
        print_fits(runs, fit_runs(runs))
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
    print_as(a, result, print_bench)
    return 0


if __name__ == "__main__":
    sys.exit(main())
