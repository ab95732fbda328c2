"""The robot's commands: ``embodyrl serve``, ``deploy``, ``record``, ``act``, ``operator``, ``twin``.

``deploy`` is also a program of its own, ``embodyrl-robot``, for a computer without torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.ranges import require_finite
from embodyrl.real_robot.resets.command_line import add_reset_options, given_resets
from embodyrl.storage.paths import expand_paths, explain_os_error, require_writable

DEPLOY_HELP = """examples:
  embodyrl deploy runs/ppo --robot twin --dry-run        log the commands, move nothing
  embodyrl deploy runs/ppo --robot twin --episodes 20    on the simulated arm
  embodyrl deploy runs/ppo --robot twin --mode naive --latency 0.2
  embodyrl deploy runs/ppo --operator                    with a page to take over, stop and label
  embodyrl deploy runs/ppo --operator --detector runs/detector    it asks before it fails
  embodyrl deploy runs/ppo --operator ws://127.0.0.1:8002/left    one of several arms
  embodyrl deploy runs/ppo --reset return.yaml --episodes 20    waypoints bring the scene back
  embodyrl deploy runs/ppo --robot ros2                  on what `embodyrl twin runs/ppo` plays
  embodyrl deploy runs/ppo --robot ros2 --robot-file arm.yaml    its own topics and workspace
  embodyrl deploy arm.onnx --mode sync --robot ros2 --robot-file arm.yaml    exported, no PyTorch
  embodyrl deploy ws://10.0.0.2:8000 --token-file token --robot ros2 --robot-file arm.yaml
In the last one the policy is served elsewhere.
Ctrl-C and SIGTERM stop the arm within its limits, then the program.
"""
SERVE_HELP = """examples:
  embodyrl serve runs/ppo                                    on this machine alone
  embodyrl serve runs/ppo --host 0.0.0.0 --token-file token  for a robot that knows the token
  embodyrl serve runs/ppo --dream runs/world/model           what a dream likes best
  embodyrl serve runs/ppo policy.start_noise=0.3             more decided
  embodyrl serve runs/ppo --base runs/sft --guidance 1.5     further along what RL changed
It speaks openpi's websocket protocol; `GET /healthz` says OK.
"""
RECORD_HELP = """examples:
  embodyrl record --out data/mine                          on the simulated arm, by the page
  embodyrl record mujoco_pick_sft --teleop keyboard --out data/mine
  embodyrl record mujoco env.task=reach --teleop scripted --episodes 5 --out data/reach
  embodyrl record --robot ros2 --robot-file arm.yaml --teleop spacemouse --out data/mine
The same command goes on where a session ended, however it ended; no finished episode is lost.
"""
ACT_HELP = """examples:
  embodyrl act ws://10.0.0.2:8001 --token-file token env.robot=ros2 env.robot_file=arm.yaml
  embodyrl act ws://10.0.0.2:8001/left --token-file token env.operator_page=ws://10.0.0.3:8002/left \
      env.operator_token=token env.overdue=0.7
The last one is one of several arms, which has a name, and a place on the page of `embodyrl operator`.
The learner, on the machine with the GPU, is started by
    `embodyrl train robot_pick_rlpd --launcher robot --listen 0.0.0.0:8001 --token-file token`.
"""
OPERATOR_HELP = """examples:
  embodyrl operator                                      arms of this machine
  embodyrl operator --host 0.0.0.0 --token-file token    arms of other machines, which know the token
Each arm joins with the address of this page and a name of its own:
    `embodyrl deploy runs/ppo --operator ws://127.0.0.1:8002/left`, or `embodyrl act LEARNER
    env.operator_page=ws://127.0.0.1:8002/left`.
"""
TWIN_HELP = """examples:
  embodyrl twin runs/ppo                                 a ROS 2 node, in the task of runs/ppo
  embodyrl twin runs/ppo --transport ros1                needs a roscore
  embodyrl twin runs/ppo --transport rosbridge --port 9090
In another terminal: embodyrl deploy runs/ppo --robot ros2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """``embodyrl-robot``: ``deploy`` alone.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(
        prog="embodyrl-robot",
        description="Runs a served policy on a robot, behind a safety filter.",
        epilog=DEPLOY_HELP.replace("embodyrl deploy", "embodyrl-robot"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_deploy_options(parser)
    try:
        arguments = parser.parse_args(argv)
        require_finite(vars(arguments))
        expand_paths(arguments)
        return deploy(arguments)
    except UserError as error:
        print(f"embodyrl-robot: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except OSError as error:
        if text := explain_os_error(error):
            print(f"embodyrl-robot: {text}", file=sys.stderr)
            return 1
        raise
    except KeyboardInterrupt:
        return 130


def add_robot_verbs(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Adds the robot's commands to ``embodyrl``.

    Args:
        verb: adds a command, given its name, function, description and examples.
    """
    add_serve_options(
        verb(
            "serve",
            _serve,
            "Serves a checkpoint's policy on a websocket, like openpi.",
            SERVE_HELP,
            torch="yes",
        )
    )
    text = "Runs a checkpoint on a robot, behind a safety filter, after a pre-flight check."
    add_deploy_options(verb("deploy", deploy, text, DEPLOY_HELP))
    text = "Records demonstrations on a robot by teleoperation, and writes a LeRobotDataset."
    add_record_options(verb("record", _record, text, RECORD_HELP, torch="yes"))
    text = "Plays on this computer's robot for a learner elsewhere."
    add_act_options(verb("act", _act, text, ACT_HELP, torch="yes"))
    text = "Serves a page on which one person watches and helps several arms."
    add_operator_options(verb("operator", _operate, text, OPERATOR_HELP))
    text = "Plays a simulated Franka as a ROS node, for deploy to drive."
    add_twin_options(verb("twin", _twin, text, TWIN_HELP, torch="yes"))


def add_serve_options(sub: argparse.ArgumentParser) -> None:
    """The options of ``serve``."""
    add = sub.add_argument
    add("checkpoint", help="a checkpoint, a run's folder (its newest), or an exported file")
    add(
        "overrides",
        nargs="*",
        metavar="policy.key=value",
        help="of the config that it was trained with",
    )
    add("--host", default="127.0.0.1", help="any other than this machine's needs a token")
    add("--port", type=int, default=8000, help="(default: %(default)s)")
    add("--token-file", default="", help="a file with the token that clients must send")
    add("--device", default="auto")
    add("--seed", type=int, default=0, help="of the policy's noise")
    text = "makes a monitor, which may ask for a person"
    add("--monitor", default="", metavar="MODULE:FUNCTION", help=text)
    add_detector_option(sub)
    text = "a reflector's folder; it asks for a person when an episode takes long"
    add("--reflector", default="", help=text)
    text = "share of an episode that is long (default: %(default)s)"
    add("--overdue", type=float, default=0.7, help=text)
    add_dream_options(sub)
    add_guidance_options(sub)


def add_deploy_options(sub: argparse.ArgumentParser) -> None:
    """The options of ``deploy``."""
    add = sub.add_argument
    text = "a checkpoint, a run's folder, an exported file, or ws://HOST:PORT of its server"
    add("checkpoint", help=text)
    add("overrides", nargs="*", metavar="key.sub=value")
    text = (
        "twin (simulated, here), ros2, rosbridge, ros1, libfranka, lerobot (default: %(default)s)"
    )
    add("--robot", default="twin", help=text)
    text = "of the rosbridge server (default: port 9090 of this machine), or of the arm"
    add("--address", default="", help=text)
    text = "a file with the token of the policy server, and of `embodyrl operator`"
    add("--token-file", default="", help=text)
    text = "the robot's topics and workspace (default: those of embodyrl twin)"
    add("--robot-file", default="", help=text)
    add("--prompt", default="", help="instruction for the policy, where no topic gives one")
    add("--mode", default="rtc", help="sync, naive, ensemble or rtc (default: %(default)s)")
    text = "number of actions after which the next chunk is requested (default: as in training)"
    add("--execute", type=int, default=0, help=text)
    add("--episodes", type=int, default=1)
    text = "simulated seconds per inference (default: what it really takes)"
    add("--latency", type=float, default=-1.0, help=text)
    text = "share of the trained control rate (default: %(default)s)"
    add("--speed", type=float, default=0.25, help=text)
    add("--dry-run", action="store_true", help="send no command")
    text = (
        "a web page to take over, stop and label; ws://HOST:PORT/NAME: that of `embodyrl operator`"
    )
    add("--operator", type=port_or_address, nargs="?", const=0, metavar="PORT", help=text)
    text = "spacemouse, gamepad or its file: whoever pushes it takes over"
    add("--hand", default="", metavar="DEVICE", help=text)
    text = "also log what the policy sees, for `embodyrl data from-logs`"
    add("--record", action="store_true", help=text)
    add("--out", default="runs/deploy", help="folder of the logs (default: %(default)s)")
    add("--seed", type=int, default=0, help="of the policy's noise")
    add_detector_option(sub)
    add_dream_options(sub)
    add_guidance_options(sub)
    add_reset_options(sub, practice=False)
    add("--json", action="store_true")


def add_record_options(sub: argparse.ArgumentParser) -> None:
    """The options of ``record``."""
    add = sub.add_argument
    text = "an env or a preset that the data are for (default: robot)"
    add("env", nargs="?", default="robot", help=text)
    text = "its settings, for example env.task=reach env.image_size=128"
    add("overrides", nargs="*", metavar="env.key=value", help=text)
    text = (
        "twin (simulated, here), ros2, rosbridge, ros1, libfranka, lerobot (default: %(default)s)"
    )
    add("--robot", default="twin", help=text)
    add("--address", default="", help="of the rosbridge server, or of the arm")
    add("--robot-file", default="", help="the robot's topics, workspace and leader arm")
    text = "page, keyboard, gamepad or its file, spacemouse, leader, lerobot:TYPE, scripted (default: page)"
    add("--teleop", default="page", metavar="DEVICE", help=text)
    add("--task", default="", help="the instruction, where no topic gives one")
    add("--episodes", type=int, default=50, help="episodes to record (default: %(default)s)")
    text = "longest episode, without pauses (default: %(default)s)"
    add("--seconds", type=float, default=60.0, help=text)
    text = "share of the control rate of training (default: %(default)s)"
    add("--speed", type=float, default=0.25, help=text)
    add("--keep-failures", action="store_true", help="failed episodes count, with success=false")
    add("--page", type=int, default=0, metavar="PORT", help="of the page (default: a free one)")
    text = "of the order of the twin's initial states (default: %(default)s)"
    add("--seed", type=int, default=0, help=text)
    add("--out", required=True, help="the data set's folder")
    add("--json", action="store_true", help="print the result as JSON at the end")


def add_detector_option(sub: argparse.ArgumentParser) -> None:
    """Which failure detectors watch a policy."""
    text = "a failure detector's folder: it asks for a person; may be given several times"
    sub.add_argument("--detector", action="append", default=[], metavar="FOLDER", help=text)


def add_dream_options(sub: argparse.ArgumentParser) -> None:
    """How a world model chooses among a policy's proposals."""
    add = sub.add_argument
    text = "a world model's folder: it ranks what the policy proposes, and the best is done"
    add("--dream", default="", metavar="MODEL", help=text)
    text = "chunks that it ranks (default: %(default)s)"
    add("--proposals", type=int, default=8, metavar="N", help=text)
    text = "keep the policy's first unless another promises more by this (default: %(default)s)"
    add("--margin", type=float, default=0.0, metavar="P", help=text)


def add_guidance_options(sub: argparse.ArgumentParser) -> None:
    """How far a policy moves away from the one that its training began with."""
    text = "the checkpoint from which training started, for --guidance"
    sub.add_argument("--base", default="", metavar="CHECKPOINT", help=text)
    text = (
        "how far to move from the policy of --base: 0 is that policy, 1 the trained one, more "
        "goes further (default: %(default)s)"
    )
    sub.add_argument("--guidance", type=float, default=1.0, metavar="W", help=text)


def guidance_options(a: argparse.Namespace) -> Any:
    """What ``add_guidance_options`` was given."""
    from embodyrl.real_robot.policy_link.guidance_options import GuidanceOptions

    return GuidanceOptions(a.base, a.guidance)


def dream_options(a: argparse.Namespace) -> Any:
    """What ``add_dream_options`` was given."""
    from embodyrl.real_robot.policy_link.dream_options import DreamOptions

    return DreamOptions(a.dream, a.proposals, a.margin)


def add_act_options(sub: argparse.ArgumentParser) -> None:
    """The options of ``act``."""
    add = sub.add_argument
    text = "ws://HOST:PORT of `embodyrl train --launcher robot`; /NAME behind it names this arm"
    add("learner", help=text)
    add("overrides", nargs="*", metavar="env.key=value", help="which robot this is")
    add("--token-file", default="", help="a file with the learner's token")
    add("--device", default="auto")


def add_operator_options(sub: argparse.ArgumentParser) -> None:
    """The options of ``operator``."""
    add = sub.add_argument
    text = (
        "where arms may connect; any other than this machine's needs a token (default: %(default)s)"
    )
    add("--host", default="127.0.0.1", help=text)
    add("--port", type=int, default=8002, help="of the page and of the arms (default: %(default)s)")
    add("--token-file", default="", help="a file with the token that arms must send")


def port_or_address(place: str) -> int | str:
    """A port of a page, or the address of the page of several arms.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if place.startswith("ws://"):
        return place
    if not place.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{place} is neither a port of this machine nor ws://HOST:PORT/ARM, the address that "
            "`embodyrl operator` prints."
        )
    return int(place)


def add_twin_options(sub: argparse.ArgumentParser) -> None:
    """The options of ``twin``."""
    add = sub.add_argument
    add("checkpoint", help="a checkpoint, or a run's folder, whose task is played")
    add("overrides", nargs="*", metavar="key.sub=value")
    add("--transport", default="ros2", help="ros2, rosbridge or ros1 (default: %(default)s)")
    add("--port", type=int, default=9090, help="of its rosbridge server (default: %(default)s)")


EXIT = {"": 0, "fault": 2, "person": 130}
"""Exit status of ``deploy`` by who kept it from playing all episodes to their end."""


def deploy(a: argparse.Namespace) -> int:
    """Runs ``deploy`` and prints its result.

    Returns:
        The exit status: 0 where all episodes were played, 2 where a fault ended one, 130 where a
        person stopped the arm (Ctrl-C or the stop button).
    """
    require_writable(a.out, "--out FOLDER")
    commands = robot_commands()
    commands.sigterm_is_ctrl_c()  # before, after and between episodes
    result = commands.deploy_checkpoint(
        a.checkpoint,
        a.overrides,
        robot=a.robot,
        address=a.address,
        robot_file=a.robot_file,
        prompt=a.prompt,
        token_file=a.token_file,
        mode=a.mode,
        execute=a.execute,
        episodes=a.episodes,
        latency=a.latency,
        speed=a.speed,
        dry_run=a.dry_run,
        operator=a.operator,
        hand=a.hand,
        record=a.record,
        out=a.out,
        seed=a.seed,
        detectors=a.detector,
        dream=dream_options(a),
        guidance=guidance_options(a),
        resets=given_resets(a),
    )
    if a.json:
        print(json.dumps(result))
    else:
        score = commands.score_line(result)
        print(f"{result['env']} on {a.robot}: {score}; logs in {a.out}")
    return EXIT[result["stopped_by"]]


def _record(a: argparse.Namespace) -> int:
    robot_commands().sigterm_is_ctrl_c()
    from embodyrl.config import env_config
    from embodyrl.data.doubts import print_doubts
    from embodyrl.real_robot.commands.record import record_demonstrations, session_line

    # Overrides may stand where the env would.
    named = "=" not in a.env
    name = a.env if named else "robot"
    overrides = a.overrides if named else [a.env, *a.overrides]
    result = record_demonstrations(
        env_config(name, overrides),
        a.out,
        robot=a.robot,
        address=a.address,
        robot_file=a.robot_file,
        teleop=a.teleop,
        task=a.task,
        episodes=a.episodes,
        seconds=a.seconds,
        speed=a.speed,
        keep_failures=a.keep_failures,
        page=a.page,
        seed=a.seed,
    )
    if a.json:
        print(json.dumps(result))
    else:
        print_doubts(result.get("doubts", ()))
        print(session_line(result, a.out))
    return EXIT["person"] if result["stopped"] else 0


def _serve(a: argparse.Namespace) -> int:
    robot_commands().serve_checkpoint(
        a.checkpoint,
        a.host,
        a.port,
        a.token_file,
        a.device,
        a.seed,
        a.monitor,
        a.detector,
        a.reflector,
        a.overdue,
        dream_options(a),
        a.overrides,
        guidance_options(a),
    )
    return 0


def _act(a: argparse.Namespace) -> int:
    robot_commands().act_for(a.learner, a.token_file, a.overrides, a.device)
    return 0


def _operate(a: argparse.Namespace) -> int:
    robot_commands().serve_arms_page(a.host, a.port, a.token_file)
    return 0


def _twin(a: argparse.Namespace) -> int:
    robot_commands().run_twin(a.checkpoint, a.overrides, transport=a.transport, port=a.port)
    return 0


def robot_commands() -> Any:
    """The package ``commands``, imported when it is used.

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
