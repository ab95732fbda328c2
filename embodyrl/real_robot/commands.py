"""``embodyrl serve`` and ``embodyrl deploy``: a checkpoint behind a socket, and a checkpoint on a robot."""

from __future__ import annotations

import dataclasses
import json
import secrets
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from embodyrl import checkpoint
from embodyrl.build import load_config
from embodyrl.errors import UserError
from embodyrl.real_robot.actions import DeltaDecoder, action_space
from embodyrl.real_robot.client import PolicyClient
from embodyrl.real_robot.deploy import drive
from embodyrl.real_robot.executor import Executor, ExecutorConfig, VirtualInference
from embodyrl.real_robot.log import RunLog
from embodyrl.real_robot.messages import Mode
from embodyrl.real_robot.policy_side import CheckpointPolicy
from embodyrl.real_robot.preflight import preflight, print_checks
from embodyrl.real_robot.safety import SafetyFilter
from embodyrl.real_robot.server import PolicyServer
from embodyrl.real_robot.tracking import SafetyConfig
from embodyrl.stats import format_rate, wilson


def serve_checkpoint(path: str, host: str, port: int, token_file: str, device: str, seed: int) -> None:
    """Serves a checkpoint's policy until interrupted.

    Raises:
        UserError: no such checkpoint, an empty token file, or an address that may not be used.
    """
    token = ""
    if token_file:
        token = Path(token_file).read_text().strip() if Path(token_file).is_file() else ""
        if not token:
            raise UserError(f"There is no token in {token_file}. Write one: openssl rand -hex 16 > {token_file}")
    policy = CheckpointPolicy(path, device, seed)
    server = PolicyServer(policy.infer, policy.metadata, host, port, token)
    print(
        f"Serving {path} at ws://{server.host}:{server.port} ({'with' if token else 'no'} token). Ctrl-C stops.",
        flush=True,
    )
    # A service manager ends it with SIGTERM, and a shell's background job starts with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        server.serve_forever()
    finally:
        server.close()


def deploy_checkpoint(
    path: str,
    overrides: Sequence[str] = (),
    *,
    robot: str = "twin",
    mode: str = "rtc",
    execute: int = 0,
    episodes: int = 1,
    latency: float = -1.0,
    speed: float = 0.5,
    dry_run: bool = False,
    out: str = "runs/deploy",
    seed: int = 0,
) -> dict[str, Any]:
    """Runs a checkpoint on a robot: server, client, executor, safety filter, robot; a log of every episode.

    Args:
        path: a checkpoint, or a run's folder.
        overrides: of the config that it was trained with, e.g. ``env.task=reach``.
        robot: ``"twin"``, the simulated one, whose time stands still while the policy thinks.
        mode: see ``executor``.
        execute: see ``ExecutorConfig``.
        episodes: initial states, of the evaluation split.
        latency: s that an inference is charged in the twin's time; below 0 what it took.
        speed: share of the control rate that it was trained at. Simulators let the arm accelerate harder than a
            Franka may, so at 1 the arm lags behind the policy.
        dry_run: no command is sent.
        out: folder of the logs and of ``result.json``.
        seed: of the policy's noise.

    Returns:
        ``episodes``, ``successes``, ``success_rate``, ``interval``, and per episode ``results``.

    Raises:
        UserError: the pre-flight check failed, or the checkpoint does not fit the robot.
    """
    from embodyrl.real_robot.twin import BOX, MujocoTwin

    if not 0.0 < speed <= 1.0:
        raise UserError(f"--speed is {speed}; it is a share of the trained rate, above 0 and at most 1.")
    if episodes < 1:
        raise UserError("--episodes must be at least 1.")
    if robot != "twin":
        raise UserError(f"There is no robot {robot!r} yet; 'twin' is the simulated one.")
    config = load_config(path, overrides)
    if config.env.name != "mujoco":
        raise UserError(f"The twin plays the embedded MuJoCo tasks, but {path} was trained in {config.env.name}.")
    if not any(o.startswith("env.split=") for o in overrides):
        config = dataclasses.replace(config, env=dataclasses.replace(config.env, split=config.run.eval_split))
    policy = CheckpointPolicy(path, config.run.device, seed)
    twin = MujocoTwin(config.env)  # type: ignore[arg-type]
    try:
        checkpoint.check_compatible(policy.spec, dataclasses.replace(twin.spec, num_envs=policy.spec.num_envs))
        safety = SafetyConfig(BOX["box_low"], BOX["box_high"], robot="panda")
        spec, horizon = policy.spec, int(policy.metadata["horizon"])
        rate = spec.control_hz * speed
        execution = ExecutorConfig(
            horizon,
            spec.action_dim,
            rate,
            mode,
            execute or (horizon if mode == "sync" else max(1, horizon // 2)),
        )
        with _served(policy) as client:
            twin.begin(0)
            checks = preflight(twin, client.infer, policy.metadata, safety, execution)
            print_checks(checks)
            if not all(check.ok for check in checks):
                raise UserError(
                    "The pre-flight check failed, so nothing was moved. What is wrong is said in its lines."
                )
            results = []
            for init in range(episodes):
                twin.begin(init)
                guard = SafetyFilter(safety)
                inference = VirtualInference(client.infer, lambda took: latency if latency >= 0 else took)
                settings = {"checkpoint": str(path), "init": init, "mode": mode, "speed": speed, "dry_run": dry_run}
                settings |= {"safety": dataclasses.asdict(safety), "policy": policy.metadata}
                log = RunLog(Path(out) / f"episode_{init:04d}.mcap", settings, twin.now())
                executor = Executor(execution, inference, lambda now, text, log=log: log.event(now, "problem", text))
                decoder = DeltaDecoder(action_space(policy.metadata), rate, safety.box_low, safety.box_high)
                seconds = twin.spec.max_episode_steps / rate
                with _ctrl_c_is_estop(guard):
                    try:
                        episode = drive(twin, twin, guard, executor, decoder, log, seconds=seconds, dry_run=dry_run)
                    finally:
                        log.close()
                counts = dataclasses.asdict(executor.counts)
                results.append(
                    {
                        "init": init,
                        "log": str(log.path),
                        **dataclasses.asdict(dataclasses.replace(episode, events=[])),
                        **counts,
                    }
                )
                done = sum(r["solved"] for r in results)
                print(
                    f"  episode {init}: {episode.reason}, {episode.seconds:.1f} s; {format_rate(done, len(results))}",
                    flush=True,
                )
                if episode.mode == Mode.ESTOP:
                    break
    finally:
        twin.close()
    solved = sum(r["solved"] for r in results)
    rate = solved / len(results)
    result = {
        "checkpoint": str(path),
        "env": spec.name,
        "mode": mode,
        "speed": speed,
        "episodes": len(results),
        "successes": solved,
    }
    result |= {"success_rate": rate, "interval": wilson(solved, len(results)), "results": results}
    (Path(out) / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


@contextmanager
def _served(policy: CheckpointPolicy) -> Iterator[PolicyClient]:
    """A client of the policy, over a socket of this machine."""
    token = secrets.token_hex(16)
    server = PolicyServer(policy.infer, policy.metadata, port=0, token=token)
    thread = threading.Thread(target=server.serve_forever, name="server", daemon=True)
    thread.start()
    client = PolicyClient(f"127.0.0.1:{server.port}", token, timeout=60.0)
    try:
        client.connect()
        yield client
    finally:
        client.close()
        server.close()
        thread.join(timeout=5.0)


@contextmanager
def _ctrl_c_is_estop(guard: SafetyFilter) -> Iterator[None]:
    """Ctrl-C stops the arm first, within its limits; the program ends once it is at rest."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda *_: guard.estop("Ctrl-C"))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
