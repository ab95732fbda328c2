"""``embodyrl serve``, ``deploy`` and ``twin``: a policy behind a socket, a policy on a robot, and a simulated robot."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.functional.intervals import format_rate, wilson
from embodyrl.real_robot.connect import (
    ROBOTS,
    Rig,
    ask_at_terminal,
    libfranka_robot,
    ros_robot,
    serve_apart,
    serve_elsewhere,
    serve_here,
    simulated_robot,
    twin_config,
)
from embodyrl.real_robot.control.actions import DeltaDecoder, action_space
from embodyrl.real_robot.control.executor import (
    Executor,
    ExecutorConfig,
    Inference,
    ThreadInference,
    VirtualInference,
)
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.preflight import preflight, print_checks
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import INTERRUPTED, Episode, Operator, drive
from embodyrl.real_robot.control.transports import PacedClock
from embodyrl.real_robot.logs.mcap_log import RunLog
from embodyrl.real_robot.operator.devices import operator_of
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.policy_link.server import PolicyServer


def serve_checkpoint(
    path: str,
    host: str,
    port: int,
    token_file: str,
    device: str,
    seed: int,
    monitor: str = "",
    reflector: str = "",
    overdue: float = 0.7,
) -> None:
    """Serves a checkpoint's policy until interrupted.

    Args:
        path: a checkpoint, or a run's folder.
        host: address to listen at.
        port: of the server.
        token_file: holds the token of its clients.
        device: of the policy.
        seed: of its noise.
        monitor: ``MODULE:FUNCTION``, see ``checkpoint_server.load_monitor``.
        reflector: a reflector's folder; a person is asked when it sees an episode unsolved for too
            long.
        overdue: share of an episode that is too long.

    Raises:
        UserError: no such checkpoint, an empty token file, or an address that may not be used.
    """
    from embodyrl.real_robot.policy_link.checkpoint_server import CheckpointPolicy, load_monitor

    token = _token(token_file)
    policy = CheckpointPolicy(path, device, seed, load_monitor(monitor))
    if reflector:
        from embodyrl.real_robot.env.reflect import Overdue
        from embodyrl.world_models.reflectors.folder import load_reflector

        if monitor:
            raise UserError("Give --monitor or --reflector, not both.")
        policy.monitor = Overdue(load_reflector(reflector), policy.spec.max_episode_steps, overdue)
    server = PolicyServer(policy.infer, policy.metadata, host, port, token)
    print(
        (
            f"Serving {path} at ws://{server.host}:{server.port} ({'with' if token else 'no'} token). "
            "Ctrl-C stops."
        ),
        flush=True,
    )
    _sigterm_is_ctrl_c()
    try:
        server.serve_forever()
    finally:
        server.close()


def _token(file: str) -> str:
    token = Path(file).read_text().strip() if file and Path(file).is_file() else ""
    if file and not token:
        raise UserError(f"There is no token in {file}. Write one: openssl rand -hex 16 > {file}")
    return token


def remote_actor(config: Any, listen: str, token_file: str) -> Callable[[], Any]:
    """What ``training.runner.train`` takes as ``rollouts`` so that ``embodyrl act`` plays.

    Raises:
        UserError: no HOST:PORT, or an empty token file.
    """
    from embodyrl.real_robot.remote.learner import RemoteActor

    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--listen is {listen!r}; write HOST:PORT, for example 0.0.0.0:8001.")
    return partial(RemoteActor, config, host, int(port), _token(token_file))


def act_for(address: str, token_file: str, overrides: Sequence[str], device: str) -> None:
    """Plays on this computer's robot until the learner's run is over."""
    from embodyrl.real_robot.remote.remote_actor import act

    _sigterm_is_ctrl_c()
    played = act(address, _token(token_file), list(overrides), device)
    print(f"The learner's run is over; {played} chunks were played for it.")


def run_twin(
    path: str, overrides: Sequence[str] = (), *, transport: str = "ros2", port: int = 0
) -> None:
    """Plays a simulated arm in the env that a checkpoint was trained in, until interrupted.

    Args:
        path: a checkpoint, or a run's folder.
        overrides: of its config.
        transport: ``"ros2"``, ``"ros1"``, or ``"rosbridge"``, whose server then runs here as well.
        port: of that server; 0 takes a free one.
    """
    from embodyrl.real_robot.env.twin import MujocoTwin
    from embodyrl.real_robot.ros.config import PRESETS
    from embodyrl.real_robot.ros.connect_bus import connect
    from embodyrl.real_robot.ros.rosbridge_server import RosbridgeServer
    from embodyrl.real_robot.ros.twin_node import TwinNode

    config = twin_config(path, overrides)
    _sigterm_is_ctrl_c()
    bus = (
        RosbridgeServer(port)
        if transport == "rosbridge"
        else connect(transport, name="embodyrl_twin")
    )
    try:
        twin = MujocoTwin(config)
        try:
            node = TwinNode(twin, bus, PRESETS["twin"])
            at = f" at ws://127.0.0.1:{bus.port}" if isinstance(bus, RosbridgeServer) else ""
            print(f"The twin of {twin.spec.name} is on {transport}{at}. Ctrl-C stops.", flush=True)
            node.run()
        finally:
            twin.close()
        if why := bus.trouble():
            raise UserError(f"The twin stopped: {why}.")
    finally:
        bus.close()


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
    operator: int | None = None,
    hand: str = "",
    record: bool = False,
    out: str = "runs/deploy",
    seed: int = 0,
) -> dict[str, Any]:
    """Runs a checkpoint on a robot: server, client, executor, safety filter, robot; a log of every episode.

    Args:
        path: a checkpoint, or a run's folder; or ``ws://host:port``, where its policy is served
            already.
        overrides: of the config that it was trained with, e.g. ``env.task=reach``.
        robot: ``"twin"``, the simulated one in this process, whose time stands still while the
            policy thinks; or the transport to one that has its own time: ``"ros2"``,
            ``"rosbridge"``, ``"ros1"`` or ``"libfranka"``.
        address: of the rosbridge server, or of the arm.
        robot_file: its topics and workspace (``ros.config.load_robot``); empty means those of
            ``embodyrl twin``. For libfranka see ``libfranka.config.load_arm``; empty means
            franka-sim in the checkpoint's task.
        prompt: what the policy is told where no topic says it.
        token_file: holds the token of that server.
        mode: see ``executor``.
        execute: see ``ExecutorConfig``.
        episodes: initial states, of the evaluation split.
        latency: s that an inference is charged in the twin's time; below 0 what it took.
        speed: share of the control rate that it was trained at. Simulators let the arm accelerate
            harder than a Franka may, so at 1 the arm lags behind the policy.
        dry_run: no command is sent.
        operator: port of a page for a person beside the robot (0: a free one); None for no page.
        hand: what they hold in it: ``operator.devices.open_device``.
        record: the logs get what the policy sees, so that ``export.export_logs`` makes a data set
            of them.
        out: folder of the logs and of ``result.json``.
        seed: of the policy's noise.

    Returns:
        ``episodes``, ``successes``, ``success_rate``, ``interval``, and per episode ``results``.

    Raises:
        UserError: the pre-flight check failed, or the checkpoint does not fit the robot.
    """
    if not 0.0 < speed <= 1.0:
        raise UserError(
            f"--speed is {speed}; it is a share of the trained rate, above 0 and at most 1."
        )
    if episodes < 1:
        raise UserError("--episodes must be at least 1.")
    if robot not in ROBOTS:
        raise UserError(f"There is no robot {robot!r}. {did_you_mean(robot, ROBOTS)}")
    settings = {
        "checkpoint": str(path),
        "robot": robot,
        "mode": mode,
        "speed": speed,
        "dry_run": dry_run,
        "record": record,
    }
    elsewhere = path.startswith("ws://")
    if elsewhere and (robot == "twin" or (robot == "libfranka" and not robot_file)):
        raise UserError(
            f"The simulated arm of --robot {robot} plays the task of a checkpoint; {path} is a "
            "server's."
        )
    results: list[dict[str, Any]] = []
    with ExitStack() as opened:
        if robot == "twin":
            client, rig = _open_twin(opened, path, overrides, seed)
        else:
            in_scene = robot == "libfranka" and not robot_file
            _refuse_twins_options(() if in_scene else overrides, latency)
            served = (
                serve_elsewhere(path, _token(token_file))
                if elsewhere
                else serve_apart(path, seed=seed)
            )
            client = opened.enter_context(served)
            space = action_space(client.metadata)
            cameras = _cameras(client.metadata)
            if robot == "libfranka":
                scene = twin_config(path, overrides) if in_scene else None
                rig = opened.enter_context(
                    libfranka_robot(address, robot_file, space, cameras, prompt, scene)
                )
            else:
                rig = opened.enter_context(
                    ros_robot(robot, address, robot_file, space, cameras, prompt)
                )
        if rig.simulated and (operator is not None or hand):
            rig.clock = PacedClock(rig.clock)
        person, page = operator_of(opened, rig.clock, operator, hand)
        execution = _execution(client.metadata, mode, execute, speed)
        rig.begin(0)
        charged = (lambda took: latency) if latency >= 0 else float
        checks = preflight(
            rig.robot, client.infer, client.metadata, rig.safety, execution, charged=charged
        )
        print_checks(checks)
        if not all(check.ok for check in checks):
            raise UserError(
                "The pre-flight check failed, so nothing was moved. What is wrong is said in its "
                "lines."
            )
        for init in range(episodes):
            if not rig.arranges:
                ask = ask_at_terminal if page is None else page.ask
                ask(f"Arrange the scene for episode {init + 1}, and go on.")
            rig.begin(init)
            inference: Inference = (
                VirtualInference(client.infer, charged)
                if rig.simulated
                else ThreadInference(client.infer)
            )
            episode, row = _episode(
                rig, client.metadata, inference, execution, init, Path(out), settings, person
            )
            results.append(row)
            done = sum(r["solved"] for r in results)
            print(
                (
                    f"  episode {init}: {episode.reason}, {episode.seconds:.1f} s; "
                    f"{format_rate(done, len(results))}"
                ),
                flush=True,
            )
            if episode.mode in (Mode.ESTOP, Mode.FAULT):
                break
        env = str(client.metadata["env"])
    solved = sum(r["solved"] for r in results)
    result = {"env": env, **settings, "episodes": len(results), "successes": solved}
    result |= {
        "success_rate": solved / len(results),
        "interval": wilson(solved, len(results)),
        "results": results,
    }
    (Path(out) / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def _open_twin(
    opened: ExitStack, path: str, overrides: Sequence[str], seed: int
) -> tuple[PolicyClient, Rig]:
    """The simulated arm and the policy in this process."""
    from embodyrl.build import load_config
    from embodyrl.real_robot.policy_link.checkpoint_server import CheckpointPolicy
    from embodyrl.storage import checkpoint

    config = twin_config(path, overrides)
    policy = CheckpointPolicy(path, load_config(path, overrides).run.device, seed)
    rig = opened.enter_context(simulated_robot(config))
    spec = rig.robot.spec  # type: ignore[attr-defined]
    checkpoint.check_compatible(
        policy.spec, dataclasses.replace(spec, num_envs=policy.spec.num_envs)
    )
    return opened.enter_context(serve_here(policy)), rig


def _cameras(metadata: dict[str, Any]) -> dict[str, tuple[int, int]]:
    return {name: (int(size[0]), int(size[1])) for name, size in metadata["cameras"].items()}


def _episode(
    rig: Rig, metadata: dict[str, Any], inference: Inference, execution: ExecutorConfig, init: int, out: Path,
    settings: dict[str, Any], person: Operator | None,
) -> tuple[Episode, dict[str, Any]]:  # fmt: skip
    """One episode, its log and its row of the result."""
    guard = SafetyFilter(rig.safety)
    said = {**settings, "init": init, "safety": dataclasses.asdict(rig.safety), "policy": metadata}
    log = RunLog(out / f"episode_{init:04d}.mcap", said, rig.clock.now(), rig.safety.robot)
    executor = Executor(execution, inference, lambda now, text: log.event(now, "problem", text))
    decoder = DeltaDecoder(
        action_space(metadata), execution.control_hz, rig.safety.box_low, rig.safety.box_high
    )
    seconds = metadata["max_episode_steps"] / execution.control_hz
    with _ctrl_c_is_estop(guard):
        try:
            episode = drive(
                rig.robot, rig.clock, guard, executor, decoder, log,
                seconds=seconds, dry_run=settings["dry_run"], operator=person,
                record=settings["record"],
            )  # fmt: skip
        finally:
            inference.close()
            log.close()
    outcome = dataclasses.asdict(dataclasses.replace(episode, events=[]))
    return episode, {
        "init": init,
        "log": str(log.path),
        **outcome,
        **dataclasses.asdict(executor.counts),
    }


def _execution(metadata: dict[str, Any], mode: str, execute: int, speed: float) -> ExecutorConfig:
    horizon = int(metadata["horizon"])
    return ExecutorConfig(
        horizon, int(metadata["action_dim"]), metadata["control_hz"] * speed, mode, execute
    )


def _refuse_twins_options(overrides: Sequence[str], latency: float) -> None:
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


def _sigterm_is_ctrl_c() -> None:
    """A service manager ends a program with SIGTERM, and a shell's background job starts with SIGINT ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@contextmanager
def _ctrl_c_is_estop(guard: SafetyFilter) -> Iterator[None]:
    """Ctrl-C stops the arm first, within its limits; the program ends once it is at rest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: guard.estop(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
