"""Our client, openpi's and LeRobot's drive the same simulated arm with the same checkpoint, in the wall clock's time.

    pip install openpi-client
    python benchmarks/robot_clients.py runs/sft16 --episodes 16 --out benchmarks/robot_clients.json

The arm is ``embodyrl twin`` behind rosbridge, every action goes through the same safety filter and
into the same log, from which all numbers are taken. What differs is who asks for chunks and plays
them:

    rtc, naive, sync     our executor and client, our server
    openpi               openpi-client's Runtime, ActionChunkBroker and WebsocketClientPolicy, our server
    our client           our executor (sync) at openpi's own server (``--openpi SRC``: its websocket_policy_server.py)
    lerobot              LeRobot's RobotClient with its defaults, at LeRobot's PolicyServer, in which only the network
                         is ours; proprioception is given in mm, for it drops observations whose
                         state changed by less than 1

``--delay`` is added to every inference. Per row: ``success``; ``round_trip_ms``, from an
observation to its chunk; ``missed``, the share of control periods that got no action;
``period_ms``, between two actions; ``wait``, s of an episode without an action that was due;
``change``, mean length of the difference of two actions in a row; and of the commanded joints
``acceleration`` (rad/s^2) and ``jerk`` (rad/s^3), root mean squares. The first inference is left
out.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from robot_transports import twin  # pyright: ignore[reportMissingImports] - beside this file

from embodyrl.functional.intervals import wilson
from embodyrl.real_robot.connect_robot import ConnectedRobot, ros_robot
from embodyrl.real_robot.control.actions import DeltaDecoder, action_space
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import ThreadInference
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.step_driver import StepDriver
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.ros import rosbridge
from embodyrl.real_robot.twin.mujoco_twin import BOX
from embodyrl.storage.provenance import git_commit, hardware, versions

CLIENTS = ("rtc", "naive", "sync", "openpi", "our client", "lerobot")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.2])
    parser.add_argument("--clients", nargs="+", default=CLIENTS, choices=CLIENTS)
    parser.add_argument("--speed", type=float, default=0.25)
    parser.add_argument(
        "--patience", type=float, default=0.3, help="s that the filter waits for what is late"
    )
    parser.add_argument("--openpi", type=Path, help="openpi's websocket_policy_server.py")
    parser.add_argument(
        "--serve", choices=("embodyrl", "openpi", "lerobot"), help=argparse.SUPPRESS
    )
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    if a.serve:
        serve(a.serve, a.checkpoint, a.delays[0], a.openpi)
        return
    load, rows = os.getloadavg()[0], []
    with tempfile.TemporaryDirectory() as folder, twin(str(a.checkpoint), "rosbridge") as address:
        for delay in a.delays:
            for client in a.clients:
                if client == "our client" and a.openpi is None:
                    continue
                rows.append({"client": client, "delay_ms": round(delay * 1e3)})
                rows[-1] |= row(a, client, delay, address, Path(folder))
                print(json.dumps(rows[-1]), flush=True)
    result = {
        "checkpoint": str(a.checkpoint),
        "speed": a.speed,
        "rows": rows,
        "load": [load, os.getloadavg()[0]],
    }
    result |= {
        "commit": git_commit(),
        "hardware": hardware(),
        "versions": versions() | other_versions(),
    }
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


def other_versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("lerobot", "openpi-client", "grpcio"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def row(
    a: argparse.Namespace, client: str, delay: float, address: str, folder: Path
) -> dict[str, Any]:
    """All episodes of one client."""
    kind = {"lerobot": "lerobot", "our client": "openpi"}.get(client, "embodyrl")
    with server(a, kind, delay) as (at, told):
        cameras = {name: tuple(size) for name, size in told["cameras"].items()}
        # A busy machine is late; what is measured here is how late, not whether the filter notices.
        wide = {
            "max_gap": a.patience,
            "max_state_age": a.patience,
            "max_target_age": 0.2 + a.patience,
        }
        topics, file = (
            {"max_image_age": a.patience, "max_clock_jump": 0.5 + a.patience},
            folder / "arm.yaml",
        )
        safety = {**BOX, "robot": "panda", "resume": "fresh_target", **wide}
        file.write_text(json.dumps({"preset": "twin", "topics": topics, "safety": safety}))
        rosbridge.STALL = max(rosbridge.STALL, a.patience)
        with ros_robot("rosbridge", address, str(file), action_space(told), cameras, "") as rig:
            arm = Arm(rig, told, a.speed, folder)
            play = {"openpi": by_openpi, "lerobot": by_lerobot}.get(client)
            if play is None:
                mode = "sync" if client == "our client" else client
                play = functools.partial(by_our_client, mode=mode)
            solved = 0
            for init in range(a.episodes):
                rig.begin(init)
                solved += play(arm, at)
                arm.measure()
    numbers = {"success": round(solved / a.episodes, 3), "interval": wilson(solved, a.episodes)}
    return numbers | {"episodes": a.episodes, "ended": dict(Counter(arm.ended))} | arm.numbers()


class Arm:
    """The arm of one row: the filter and the log that all clients share, and what the log says."""

    def __init__(
        self, rig: ConnectedRobot, told: dict[str, Any], speed: float, folder: Path
    ) -> None:
        self.rig, self.told, self.safety, self.file = rig, told, rig.safety, folder / "run.mcap"
        self.hz = told["control_hz"] * speed
        self.seconds = told["max_episode_steps"] / self.hz
        self.trips: list[float] = []
        self.ended: list[str] = []
        self._found: dict[str, list[float]] = {}
        self._spans = [0.0, 0]

    def parts(self) -> tuple[DeltaDecoder, SafetyFilter, RunLog]:
        """Fresh ones for an episode."""
        decoder = DeltaDecoder(
            action_space(self.told), self.hz, self.safety.box_low, self.safety.box_high
        )
        return decoder, SafetyFilter(self.safety), RunLog(self.file, {}, self.rig.clock.now())

    @contextmanager
    def piloted(self) -> Iterator[StepDriver]:
        """For clients that hand over one action at a time."""
        decoder, guard, log = self.parts()
        pilot = StepDriver(self.rig.robot, self.rig.clock, guard, decoder, True, log)
        pilot.start()
        self._began, self._acted = time.monotonic(), False
        try:
            yield pilot
        finally:
            solved = self.rig.robot.solved()
            self.ended.append(pilot.broken or ("solved" if solved else "the time is up"))
            pilot.stop()
            log.close()

    def act(self, pilot: StepDriver, action: np.ndarray) -> None:
        """An action that is due now; the episode's time begins with the first."""
        if not self._acted:
            self._began, self._acted = time.monotonic(), True
        pilot.act(action.astype(np.float32))

    def over(self, pilot: StepDriver) -> bool:
        """Whether the episode is."""
        late = time.monotonic() - self._began > (self.seconds if self._acted else 60.0)
        return late or bool(pilot.broken) or self.rig.robot.solved()

    def measure(self) -> None:
        """Takes the numbers of an episode from its log."""
        messages = read(self.file)
        stamps = np.array([m["stamp"] for m in messages["/action"]])
        actions = np.array([m["action"] for m in messages["/action"]])
        moved = [m for m in messages["/command"] if m["mode"] == "run"]
        if len(stamps) < 2:
            return
        ddq = np.array([m["ddq"] for m in moved])
        span = float(stamps[-1] - stamps[0])
        self._spans[0] += span * self.hz
        self._spans[1] += len(stamps) - 1
        for name, values in (
            ("period_ms", np.diff(stamps) * 1e3),
            ("wait", [max(0.0, span - (len(stamps) - 1) / self.hz)]),
            ("change", np.linalg.norm(np.diff(actions[:, :-1], axis=0), axis=1)),
            ("acceleration", np.square(ddq).mean(1)),
            ("jerk", np.square(np.diff(ddq, axis=0) / self.safety.tick).mean(1)),
        ):
            self._found.setdefault(name, []).extend(np.asarray(values).tolist())

    def numbers(self) -> dict[str, Any]:
        """Of all episodes; none if no action was ever taken."""
        f, due = self._found, max(self._spans[0], 1.0)
        if not f:
            return {}
        return {
            "round_trip_ms": quantiles([1e3 * t for t in self.trips]),
            "missed": round(max(0.0, 1 - self._spans[1] / due), 4),
            "period_ms": quantiles(f["period_ms"]),
            "wait": round(float(np.mean(f["wait"])), 3),
            "change": round(float(np.mean(f["change"])), 3),
            "acceleration": round(float(np.sqrt(np.mean(f["acceleration"]))), 3),
            "jerk": round(float(np.sqrt(np.mean(f["jerk"]))), 1),
        }


def quantiles(values: list[float]) -> dict[str, float]:
    return {f"p{p}": round(float(np.percentile(values, p)), 1) for p in (50, 99)} if values else {}


def timed(infer: Callable[[Any], Any], trips: list[float]) -> Callable[[Any], Any]:
    """Notes how long all but the first call took."""
    calls = iter(range(10**9))

    def call(observation: Any) -> Any:
        began = time.monotonic()
        answer = infer(observation)
        if next(calls):
            trips.append(time.monotonic() - began)
        return answer

    return call


def by_our_client(arm: Arm, at: str, *, mode: str) -> bool:
    """One episode of our executor."""
    told, client = arm.told, PolicyClient(at, timeout=60.0)
    client.connect()
    decoder, guard, log = arm.parts()
    inference = ThreadInference(timed(client.infer, arm.trips))
    executor = Executor(
        ExecutorConfig(told["horizon"], told["action_dim"], arm.hz, mode), inference
    )
    try:
        episode = drive(
            arm.rig.robot, arm.rig.clock, guard, executor, decoder, log, seconds=arm.seconds
        )
        arm.ended.append(episode.reason)
        return episode.solved
    finally:
        inference.close()
        log.close()
        client.close()


def by_openpi(arm: Arm, at: str) -> bool:
    """One episode of openpi-client's runtime: a chunk is played to its end, then it waits for the next."""
    from openpi_client.action_chunk_broker import ActionChunkBroker
    from openpi_client.runtime.agents.policy_agent import PolicyAgent
    from openpi_client.runtime.environment import Environment
    from openpi_client.runtime.runtime import Runtime
    from openpi_client.websocket_client_policy import WebsocketClientPolicy

    with arm.piloted() as pilot:

        class TwinEnvironment(Environment):
            def reset(self) -> None:
                pass

            def is_episode_complete(self) -> bool:
                return arm.over(pilot)

            def get_observation(self) -> dict[str, Any]:
                return arm.rig.robot.observe(pilot.decoder)

            def apply_action(self, action: dict[str, Any]) -> None:
                arm.act(pilot, action["actions"])

        policy = WebsocketClientPolicy(f"ws://{at}")
        policy.infer = timed(policy.infer, arm.trips)
        agent = PolicyAgent(ActionChunkBroker(policy, arm.told["horizon"]))
        Runtime(TwinEnvironment(), agent, [], max_hz=arm.hz, num_episodes=1).run()
        policy._ws.close()
        return arm.rig.robot.solved()


def by_lerobot(arm: Arm, at: str) -> bool:
    """One episode of LeRobot's asynchronous client."""
    from lerobot.async_inference.configs import RobotClientConfig
    from lerobot_twin import TwinConfig, client_class

    with arm.piloted() as pilot:
        config = RobotClientConfig(
            policy_type="smolvla", pretrained_name_or_path="ours", robot=TwinConfig(id="twin", arm=arm, pilot=pilot),
            actions_per_chunk=arm.told["horizon"], task=arm.rig.robot.prompt(), server_address=at,
            fps=arm.hz,  # pyright: ignore[reportArgumentType] - only 1 / fps is read
        )  # fmt: skip
        client = client_class()(config)
        client.trips = arm.trips
        if not client.start():
            raise RuntimeError("LeRobot's client could not talk to its server")
        receiver = threading.Thread(target=client.receive_actions, daemon=True)
        receiver.start()
        client.control_loop(task=config.task)
        client.stop()
        receiver.join(timeout=10.0)
        return arm.rig.robot.solved()


@contextmanager
def server(a: argparse.Namespace, kind: str, delay: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """A policy server in a process of its own: its address, and what it says of the policy."""
    command = [
        sys.executable,
        "-u",
        __file__,
        str(a.checkpoint),
        "--serve",
        kind,
        "--delays",
        str(delay),
    ]
    if a.openpi is not None:
        command += ["--openpi", str(a.openpi)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("serving "):
                told = json.loads(line.removeprefix("serving "))
                yield f"127.0.0.1:{told.pop('port')}", told
                return
        raise RuntimeError("the policy server did not start")
    finally:
        process.terminate()
        process.wait()


def serve(kind: str, checkpoint: Path, delay: float, openpi: Path | None) -> None:
    """Serves the checkpoint until it is terminated."""
    import torch

    from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
    from embodyrl.real_robot.policy_link.server import PolicyServer

    torch.set_num_threads(1)
    policy = CheckpointPolicy(str(checkpoint), "cpu")
    told = policy.metadata
    seen = {
        "images": {name: np.zeros((*size, 3), np.uint8) for name, size in told["cameras"].items()}
    }
    seen |= {"proprio": np.zeros(told["proprio_dim"], np.float32)}
    policy.infer(seen)  # cold starts are not compared, nor is that of guidance
    policy.infer(
        {
            **seen,
            "previous": np.zeros((told["horizon"], told["action_dim"]), np.float32),
            "delay": 1,
            "execute": 2,
        }
    )

    def infer(observation: dict[str, Any]) -> dict[str, Any]:
        due = time.monotonic() + delay
        answer = policy.infer(observation)
        time.sleep(max(0.0, due - time.monotonic()))
        return answer

    def say(port: int) -> None:
        print("serving " + json.dumps({**policy.metadata, "port": port}), flush=True)

    if kind == "embodyrl":
        own = PolicyServer(infer, policy.metadata, port=0)
        say(own.port)
        own.serve_forever()
    elif kind == "openpi":
        assert openpi is not None
        spec = importlib.util.spec_from_file_location("websocket_policy_server", openpi)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        logging.disable(logging.INFO)
        policy.infer, port = (
            policy.infer,
            free_port(),
        )  # its server finds out no free port by itself
        theirs = type("Policy", (), {"infer": staticmethod(infer)})()
        say(port)
        module.WebsocketPolicyServer(theirs, "127.0.0.1", port, policy.metadata).serve_forever()
    else:
        import grpc
        from lerobot.transport import services_pb2_grpc
        from lerobot_twin import server_class

        service = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
        services_pb2_grpc.add_AsyncInferenceServicer_to_server(
            server_class()(policy, delay), service
        )
        port = service.add_insecure_port("127.0.0.1:0")
        service.start()
        say(port)
        service.wait_for_termination()


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


if __name__ == "__main__":
    main()
