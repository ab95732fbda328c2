"""``embodyrl deploy``: runs a policy on a robot, behind the safety filter, and logs it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.functional.intervals import format_rate, wilson
from embodyrl.real_robot.commands.signals import ctrl_c_is_estop
from embodyrl.real_robot.commands.tokens import read_token
from embodyrl.real_robot.connect_robot import (
    ROBOTS,
    ConnectedRobot,
    ask_at_terminal,
    libfranka_robot,
    ros_robot,
    simulated_robot,
)
from embodyrl.real_robot.control.actions import DeltaDecoder, action_space
from embodyrl.real_robot.control.clocks import PacedClock
from embodyrl.real_robot.control.episode import EndedBy
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import Inference, ThreadInference, VirtualInference
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.preflight import preflight, print_checks
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import RunLog
from embodyrl.real_robot.operator.device_operator import open_operator
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.policy_link.connect_policy import serve_apart, serve_elsewhere, serve_here
from embodyrl.real_robot.policy_link.dream_options import DreamOptions
from embodyrl.real_robot.policy_link.metadata import camera_sizes
from embodyrl.storage.atomic_files import write_json

NO_DREAM = DreamOptions()


def deploy_checkpoint(
    path: str,
    overrides: Sequence[str] = (),
    *,
    robot: str = "twin",
    address: str = "",
    robot_file: str = "",
    prompt: str = "",
    token_file: str = "",
    mode: str = "rtc",
    execute: int = 0,
    episodes: int = 1,
    latency: float = -1.0,
    speed: float = 0.25,
    dry_run: bool = False,
    operator: int | str | None = None,
    hand: str = "",
    record: bool = False,
    out: str = "runs/deploy",
    seed: int = 0,
    detectors: Sequence[str] = (),
    dream: DreamOptions = NO_DREAM,
) -> dict[str, Any]:
    """Runs a policy on a robot: policy server, client, executor, safety filter, robot.

    Args:
        path: a checkpoint, or a run's folder; or ``ws://host:port``, where its policy is served
            already.
        overrides: of the config that it was trained with, e.g. ``env.task=reach`` or
            ``policy.start_noise=0``.
        robot: ``"twin"``, the simulated one in this process, whose time stands still while the
            policy infers; or the transport to one in real time: ``"ros2"``, ``"rosbridge"``,
            ``"ros1"`` or ``"libfranka"``.
        address: of the rosbridge server, or of the arm.
        robot_file: its topics and workspace (``ros.config.load_robot``); empty means those of
            ``embodyrl twin``. For libfranka see ``libfranka.config.load_arm``; empty means
            franka-sim in the checkpoint's task.
        prompt: instruction for the policy where no topic gives one.
        token_file: holds the token of the policy server, and of the page of several arms.
        mode: execution mode, see ``control.executor``.
        execute: actions of a chunk that are executed before the next one is requested; 0 takes as
            many as in training, or in a mode that infers meanwhile half of a chunk that was
            executed whole.
        episodes: number of episodes, one for each initial state of the evaluation split.
        latency: s of the twin's time that an inference takes; below 0 as long as it really took.
        speed: share of the control rate that the policy was trained at. Simulators let the arm
            accelerate harder than a Franka may, so at 1 the arm lags behind the policy.
        dry_run: send no command.
        operator: port of a page for a person beside the robot (0: a free one), or the address of a
            page of several arms, see ``open_operator``; None for no page.
        hand: the device in their hand, see ``operator.devices.open_device``.
        record: also log what the policy sees, so that ``export.export_logs`` can make a data set.
        out: folder of the logs and of ``result.json``.
        seed: of the policy's noise.
        detectors: folders of failure detectors; each asks for a person when it sees an episode fail.
        dream: lets a world model choose among the policy's proposals.

    Returns:
        ``execute`` (actions executed of each chunk) of ``horizon`` (planned), ``episodes``
        (counted), ``ended_by_person`` and ``ended_by_fault`` (not counted),
        ``successes``, ``success_rate`` (None for no counted episode), ``interval``,
        ``stopped_by`` (``"person"`` or ``"fault"``; empty where nothing was amiss), and per episode
        ``results``.

    Raises:
        UserError: the pre-flight check failed, or the policy does not fit the robot.
    """
    _check_arguments(path, robot, robot_file, episodes, speed)
    of_policy = [o for o in overrides if o.startswith("policy.")]
    watched = [word for folder in detectors for word in ("--detector", folder)]
    if path.startswith("ws://") and (given := [*watched[:1], *dream.words[:1], *of_policy]):
        raise UserError(f"{path} is served already: give {given[0]} to `embodyrl serve` there.")
    settings = {
        "checkpoint": str(path),
        "robot": robot,
        "mode": mode,
        "speed": speed,
        "dry_run": dry_run,
        "record": record,
        "detectors": [*detectors],
        "dream": dream.dream,
    }
    latency_of = (lambda took: latency) if latency >= 0 else float
    results: list[dict[str, Any]] = []
    result: dict[str, Any] = {}
    with ExitStack() as opened:
        # 1. Connect to the policy, the robot and the person.
        if robot == "twin":
            client, connected = _open_twin(opened, path, overrides, seed, detectors, dream)
        else:
            in_scene = robot == "libfranka" and not robot_file
            others = [o for o in overrides if o not in of_policy]
            _refuse_twin_options(() if in_scene else others, latency)
            words = [*of_policy, *watched, *dream.words]
            client = _open_policy(opened, path, token_file, seed, words)
            connected = _open_robot(
                opened, robot, address, robot_file, prompt, client.metadata,
                scene=(path, overrides) if in_scene else None,
            )  # fmt: skip
        if connected.simulated and (operator is not None or hand):
            connected.clock = PacedClock(connected.clock)
        person, page = open_operator(
            opened, connected.clock, operator, hand, read_token(token_file)
        )
        ask = ask_at_terminal if page is None else page.ask
        # 2. Check everything before anything moves.
        execution = _execution(client.metadata, mode, execute, speed)
        connected.begin(0)
        _require_preflight(connected, client, execution, latency_of)
        # 3. Run the episodes.
        for init in range(episodes):
            if not connected.arranges:
                ask(f"Arrange the scene for episode {init + 1}, and go on.")
            connected.begin(init)
            inference: Inference = (
                VirtualInference(client.infer, latency_of)
                if connected.simulated
                else ThreadInference(client.infer)
            )
            row = _run_episode(
                connected, client.metadata, inference, execution, init, Path(out), settings, person
            )
            results.append(row)
            # 4. Sum up, after every episode: what comes next may be a power cut.
            env = str(client.metadata["env"])
            chunk = {"execute": execution.asks_after, "horizon": execution.horizon}
            result = {"env": env, **settings, **chunk, **_summary(results)}
            write_json(Path(out) / "result.json", result)
            text = f"{row['reason']}, {row['seconds']:.1f} s; {score_line(result)}"
            print(f"  episode {init}: {text}", flush=True)
            if row["mode"] in (Mode.ESTOP, Mode.FAULT):
                break
    return result


def _check_arguments(path: str, robot: str, robot_file: str, episodes: int, speed: float) -> None:
    if not 0.0 < speed <= 1.0:
        raise UserError(
            f"--speed is {speed}; it is a share of the trained rate, above 0 and at most 1."
        )
    if episodes < 1:
        raise UserError("--episodes must be at least 1.")
    if robot not in ROBOTS:
        raise UserError(f"There is no robot {robot!r}. {did_you_mean(robot, ROBOTS)}")
    simulated = robot == "twin" or (robot == "libfranka" and not robot_file)
    if path.startswith("ws://") and simulated:
        raise UserError(
            f"The simulated arm of --robot {robot} plays the task of a checkpoint, but {path} is "
            "a server. Give a checkpoint, or another robot."
        )


def _refuse_twin_options(overrides: Sequence[str], latency: float) -> None:
    """Options that only the twin in this process has."""
    if overrides:
        raise UserError(
            f"{overrides[0]} would change a simulated env. Give it to the twin: embodyrl twin RUN "
            f"{overrides[0]}"
        )
    if latency >= 0:
        raise UserError(
            "--latency is charged in the simulated time of --robot twin; another robot has its "
            "own time."
        )


def _open_twin(
    opened: ExitStack,
    path: str,
    overrides: Sequence[str],
    seed: int,
    detectors: Sequence[str],
    dream: DreamOptions,
) -> tuple[PolicyClient, ConnectedRobot]:
    """The policy and the simulated arm, both in this process."""
    from embodyrl import starting  # a robot's computer has neither this module nor torch

    starting.load_torch()
    from embodyrl.build import load_config
    from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
    from embodyrl.real_robot.twin.config import twin_config
    from embodyrl.storage.env_spec import check_compatible

    config = twin_config(path, overrides)
    device = load_config(path, overrides).run.device
    of_policy = [o for o in overrides if o.startswith("policy.")]
    policy = CheckpointPolicy(
        path, device, seed, detectors=detectors, dream=dream, overrides=of_policy
    )
    connected = opened.enter_context(simulated_robot(config))
    # The overrides may have changed the task into one that the policy does not fit.
    spec = connected.robot.spec  # type: ignore[attr-defined]
    check_compatible(policy.spec, dataclasses.replace(spec, num_envs=policy.spec.num_envs))
    return opened.enter_context(serve_here(policy)), connected


def _open_policy(
    opened: ExitStack, path: str, token_file: str, seed: int, options: Sequence[str]
) -> PolicyClient:
    """The policy on another machine, or in a process of its own."""
    if path.startswith("ws://"):
        return opened.enter_context(serve_elsewhere(path, read_token(token_file)))
    return opened.enter_context(serve_apart(path, seed=seed, options=options))


def _open_robot(
    opened: ExitStack, robot: str, address: str, robot_file: str, prompt: str,
    metadata: dict[str, Any], scene: tuple[str, Sequence[str]] | None,
) -> ConnectedRobot:  # fmt: skip
    """An arm in real time; ``scene`` is the checkpoint whose task franka-sim's arm plays in."""
    space = action_space(metadata)
    cameras = camera_sizes(metadata)
    if robot != "libfranka":
        return opened.enter_context(ros_robot(robot, address, robot_file, space, cameras, prompt))
    config = None
    if scene is not None:
        from embodyrl.real_robot.twin.config import twin_config

        config = twin_config(*scene)
    return opened.enter_context(
        libfranka_robot(address, robot_file, space, cameras, prompt, config)
    )


def _execution(metadata: dict[str, Any], mode: str, execute: int, speed: float) -> ExecutorConfig:
    horizon = int(metadata["horizon"])
    # Of a longer plan, as many actions as in training.
    trained = int(metadata["execute"])
    if not execute and trained < horizon:
        execute = trained
    return ExecutorConfig(
        horizon=horizon,
        action_dim=int(metadata["action_dim"]),
        control_hz=metadata["control_hz"] * speed,
        mode=mode,
        execute=execute,
    )


def _require_preflight(
    connected: ConnectedRobot,
    client: PolicyClient,
    execution: ExecutorConfig,
    latency_of: Callable[[float], float],
) -> None:
    """Runs the pre-flight check and prints its table.

    Raises:
        UserError: something is wrong.
    """
    checks = preflight(
        connected.robot, client.infer, client.metadata, connected.safety, execution,
        charged=latency_of,
    )  # fmt: skip
    print_checks(checks)
    if not all(check.ok for check in checks):
        raise UserError(
            "The pre-flight check failed, so nothing was moved. The lines marked FAILS say what "
            "is wrong."
        )


def _run_episode(
    connected: ConnectedRobot, metadata: dict[str, Any], inference: Inference,
    execution: ExecutorConfig, init: int, out: Path, settings: dict[str, Any],
    person: Operator | None,
) -> dict[str, Any]:  # fmt: skip
    """Runs and logs one episode; returns its row of the result."""
    safety = connected.safety
    # The log begins with all that is needed to read it later.
    guard = SafetyFilter(safety)
    described = {
        **settings,
        "init": init,
        "safety": dataclasses.asdict(safety),
        "policy": metadata,
    }
    path = out / f"episode_{init:04d}.mcap"
    log = RunLog(path, described, connected.clock.now(), safety.robot)
    executor = Executor(execution, inference, lambda now, text: log.event(now, "problem", text))
    decoder = DeltaDecoder(
        action_space(metadata), execution.control_hz, safety.box_low, safety.box_high
    )
    # The time limit of training, stretched by the lower speed.
    seconds = metadata["max_episode_steps"] / execution.control_hz
    with ctrl_c_is_estop(guard):
        try:
            episode = drive(
                connected.robot, connected.clock, guard, executor, decoder, log,
                seconds=seconds, dry_run=settings["dry_run"], operator=person,
                record=settings["record"],
            )  # fmt: skip
        finally:
            inference.close()
            log.close()
    # The changes of mode are in the log already.
    outcome = dataclasses.asdict(dataclasses.replace(episode, events=[]))
    counts = dataclasses.asdict(executor.counts)
    return {"init": init, "log": str(log.path), **outcome, **counts}


def score_line(result: dict[str, Any]) -> str:
    """The success rate of a result, and beside it the episodes that it leaves out."""
    rate = format_rate(result["successes"], result["episodes"])
    if result["episodes"]:
        rate += f" (executing {result['execute']} of {result['horizon']} actions)"
    said = [rate]
    left_out = {who: result[f"ended_by_{who}"] for who in (EndedBy.PERSON, EndedBy.FAULT)}
    total = result["episodes"] + sum(left_out.values())
    for who, count in left_out.items():
        if count:
            verb = "were" if count > 1 else "was"
            said.append(f"{count} of {total} {verb} ended by a {who}, not counted")
    return "; ".join(said)


def _stopped_by(results: list[dict[str, Any]]) -> str:
    """Who kept the command from playing all its episodes to their end; empty for nobody."""
    if results[-1]["mode"] == Mode.ESTOP:
        return EndedBy.PERSON
    faults = any(row["ended_by"] == EndedBy.FAULT for row in results)
    return EndedBy.FAULT if faults or results[-1]["mode"] == Mode.FAULT else ""


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    counted = [row for row in results if row["ended_by"] == EndedBy.POLICY]
    n = len(counted)
    solved = sum(row["solved"] for row in counted)
    return {
        "episodes": n,
        "ended_by_person": sum(row["ended_by"] == EndedBy.PERSON for row in results),
        "ended_by_fault": sum(row["ended_by"] == EndedBy.FAULT for row in results),
        "successes": solved,
        "success_rate": solved / n if n else None,
        "interval": wilson(solved, n),
        "stopped_by": _stopped_by(results),
        "results": results,
    }
