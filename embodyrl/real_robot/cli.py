"""``serve``, ``deploy``, ``act`` and ``twin`` on the command line; ``deploy`` also on its own, without torch."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from embodyrl.errors import MissingDependencyError, UserError

DEPLOY_HELP = """examples:
  embodyrl deploy runs/ppo --robot twin --dry-run        the filtered commands in the log, nothing moves
  embodyrl deploy runs/ppo --robot twin --episodes 20    with the simulated arm, through server and safety filter
  embodyrl deploy runs/ppo --robot twin --mode naive --latency 0.2
  embodyrl deploy runs/ppo --operator                    with a web page to take over, stop and label
  embodyrl deploy runs/ppo --robot ros2                  drives what `embodyrl twin runs/ppo` plays elsewhere
  embodyrl deploy runs/ppo --robot ros2 --robot-file arm.yaml    its own topics and workspace
  embodyrl deploy ws://10.0.0.2:8000 --token-file token --robot ros2 --robot-file arm.yaml    the policy is elsewhere
Ctrl-C stops the arm within its limits, then the program.
"""
SERVE_HELP = """examples:
  embodyrl serve runs/ppo                                    on this machine alone
  embodyrl serve runs/ppo --host 0.0.0.0 --token-file token  for a robot's computer, which must know the token
It speaks openpi's websocket protocol; `GET /healthz` says OK.
"""
ACT_HELP = """examples:
  embodyrl act ws://10.0.0.2:8001 --token-file token env.robot=ros2 env.robot_file=arm.yaml
Where the GPU is: embodyrl train robot_pick_rlpd --launcher robot --listen 0.0.0.0:8001 --token-file token
"""
TWIN_HELP = """examples:
  embodyrl twin runs/ppo                                 as a ROS 2 node, in the task that runs/ppo was trained on
  embodyrl twin runs/ppo --transport ros1                needs a roscore
  embodyrl twin runs/ppo --transport rosbridge --port 9090
In another terminal: embodyrl deploy runs/ppo --robot ros2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """``embodyrl-robot``: ``deploy`` alone; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="embodyrl-robot",
        description="Runs a served policy on a robot, behind a safety filter, after a pre-flight check.",
        epilog=DEPLOY_HELP.replace("embodyrl deploy", "embodyrl-robot"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    try:
        return deploy(parser.parse_args(argv))
    except UserError as error:
        print(f"embodyrl-robot: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def add_robot_verbs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds them to the command line, by its function that adds a verb."""
    sub = verb(
        "serve", _serve, "Offers a checkpoint's policy on a websocket, as openpi does.", SERVE_HELP
    )
    sub.add_argument("checkpoint", help="a checkpoint, or a run's folder: its newest")
    sub.add_argument(
        "--host", default="127.0.0.1", help="any other than this machine's needs a token"
    )
    sub.add_argument("--port", type=int, default=8000, help="(default: %(default)s)")
    sub.add_argument(
        "--token-file", default="", help="a file with the token that clients must send"
    )
    sub.add_argument("--device", default="auto")
    sub.add_argument("--seed", type=int, default=0, help="of the policy's noise")
    sub.add_argument(
        "--monitor", default="", metavar="MODULE:FUNCTION", help="makes what may ask for a person"
    )
    sub.add_argument(
        "--reflector",
        default="",
        help="a reflector's folder, which asks for a person when it takes long",
    )
    sub.add_argument(
        "--overdue",
        type=float,
        default=0.7,
        help="share of an episode that is long (default: %(default)s)",
    )

    text = "Runs a checkpoint on a robot, behind a safety filter, after a pre-flight check."
    add_options(verb("deploy", deploy, text, DEPLOY_HELP))

    sub = verb("act", _act, "Plays on this computer's robot for a learner elsewhere.", ACT_HELP)
    sub.add_argument("learner", help="ws://HOST:PORT of `embodyrl train --launcher robot`")
    sub.add_argument("overrides", nargs="*", metavar="env.key=value", help="which robot this is")
    sub.add_argument("--token-file", default="", help="a file with the learner's token")
    sub.add_argument("--device", default="auto")

    sub = verb(
        "twin", _twin, "Plays a simulated Franka as a ROS node, for deploy to drive.", TWIN_HELP
    )
    sub.add_argument("checkpoint", help="a checkpoint, or a run's folder, whose task is played")
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value")
    sub.add_argument(
        "--transport", default="ros2", help="ros2, rosbridge or ros1 (default: %(default)s)"
    )
    sub.add_argument(
        "--port", type=int, default=9090, help="of its rosbridge server (default: %(default)s)"
    )


def add_options(sub: argparse.ArgumentParser) -> None:
    """The options of ``deploy``."""
    sub.add_argument(
        "checkpoint", help="a checkpoint, a run's folder, or ws://HOST:PORT of its server"
    )
    sub.add_argument("overrides", nargs="*", metavar="key.sub=value")
    sub.add_argument(
        "--robot",
        default="twin",
        help="twin (simulated, here), ros2, rosbridge, ros1, libfranka (default: %(default)s)",
    )
    sub.add_argument(
        "--address",
        default="",
        help="of the rosbridge server (default: port 9090 of this machine), or of the arm",
    )
    sub.add_argument("--token-file", default="", help="a file with the policy server's token")
    sub.add_argument(
        "--robot-file",
        default="",
        help="its topics and workspace (default: those of embodyrl twin)",
    )
    sub.add_argument("--prompt", default="", help="what the policy is told, where no topic says it")
    sub.add_argument(
        "--mode", default="rtc", help="sync, naive, ensemble or rtc (default: %(default)s)"
    )
    sub.add_argument(
        "--execute", type=int, default=0, help="actions after which the next chunk is asked for"
    )
    sub.add_argument("--episodes", type=int, default=1)
    sub.add_argument(
        "--latency",
        type=float,
        default=-1.0,
        help="seconds charged per inference (default: what it took)",
    )
    sub.add_argument(
        "--speed",
        type=float,
        default=0.25,
        help="share of the trained control rate (default: %(default)s)",
    )
    sub.add_argument("--dry-run", action="store_true", help="send no command")
    sub.add_argument(
        "--operator",
        type=int,
        nargs="?",
        const=0,
        metavar="PORT",
        help="a web page to take over, stop and label",
    )
    sub.add_argument(
        "--hand",
        default="",
        metavar="DEVICE",
        help="spacemouse, gamepad or its file: whoever pushes it takes over",
    )
    sub.add_argument(
        "--record",
        action="store_true",
        help="log what the policy sees too: `embodyrl data from-logs`",
    )
    sub.add_argument(
        "--out", default="runs/deploy", help="folder of the logs (default: %(default)s)"
    )
    sub.add_argument("--seed", type=int, default=0, help="of the policy's noise")
    sub.add_argument("--json", action="store_true")


def deploy(a: argparse.Namespace) -> int:
    """Runs it; returns the exit status."""
    from embodyrl.functional.intervals import format_rate

    result = robot_commands().deploy_checkpoint(
        a.checkpoint, a.overrides, robot=a.robot, address=a.address, robot_file=a.robot_file, prompt=a.prompt,
        token_file=a.token_file, mode=a.mode, execute=a.execute, episodes=a.episodes, latency=a.latency, speed=a.speed,
        dry_run=a.dry_run, operator=a.operator, hand=a.hand, record=a.record,
        out=a.out, seed=a.seed,
    )  # fmt: skip
    if a.json:
        print(json.dumps(result))
    else:
        print(
            f"{result['env']} on {a.robot}: "
            f"{format_rate(result['successes'], result['episodes'])}; logs in {a.out}"
        )
    return 0


def _serve(a: argparse.Namespace) -> int:
    robot_commands().serve_checkpoint(
        a.checkpoint,
        a.host,
        a.port,
        a.token_file,
        a.device,
        a.seed,
        a.monitor,
        a.reflector,
        a.overdue,
    )
    return 0


def _act(a: argparse.Namespace) -> int:
    robot_commands().act_for(a.learner, a.token_file, a.overrides, a.device)
    return 0


def _twin(a: argparse.Namespace) -> int:
    robot_commands().run_twin(a.checkpoint, a.overrides, transport=a.transport, port=a.port)
    return 0


def robot_commands() -> Any:
    """The module ``commands``.

    Raises:
        MissingDependencyError: a package of the extra ``robot`` is not installed.
    """
    try:
        from embodyrl.real_robot import commands
    except ModuleNotFoundError as error:
        if error.name not in ("ruckig", "msgpack", "websockets", "mcap", "mcap_ros2"):
            raise
        raise MissingDependencyError(
            f"Robots need {error.name}, which is not installed. Install it with: pip install "
            "'embodyrl[robot]'"
        ) from error
    return commands


if __name__ == "__main__":
    sys.exit(main())
