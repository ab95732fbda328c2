"""Robots that can be driven, and the policies that drive them."""

from __future__ import annotations

import dataclasses
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import ActionSpace
from embodyrl.real_robot.control.tracking import SafetyConfig
from embodyrl.real_robot.control.transports import Clock, RealClock, Robot
from embodyrl.real_robot.policy_link.client import PolicyClient
from embodyrl.real_robot.policy_link.server import PolicyServer

ROBOTS = ("twin", "ros2", "rosbridge", "ros1", "libfranka")


@dataclass
class Rig:
    """A robot that is connected.

    Attributes:
        robot: at rest.
        clock: of its stamps.
        safety: its limits and workspace.
        begin: arranges an initial state; the arm must be at rest.
        simulated: whether its time stands still while nobody sleeps in ``clock``.
        arranges: whether ``begin`` does that by itself; else a person has to.
    """

    robot: Robot
    clock: Clock
    safety: SafetyConfig
    begin: Callable[[int], None]
    simulated: bool
    arranges: bool


@contextmanager
def simulated_robot(config: Any) -> Iterator[Rig]:
    """The simulated arm in this process; ``config`` is the embedded task's."""
    from embodyrl.real_robot.env.twin import MujocoTwin
    from embodyrl.real_robot.ros.config import load_robot

    twin = MujocoTwin(config)
    try:
        yield Rig(twin, twin, load_robot("")[1], twin.begin, simulated=True, arranges=True)
    finally:
        twin.close()


@contextmanager
def ros_robot(
    kind: str,
    address: str,
    robot_file: str,
    space: ActionSpace,
    cameras: Mapping[str, tuple[int, int]],
    prompt: str,
) -> Iterator[Rig]:
    """An arm behind ROS.

    Args:
        kind: of ``ros.bus.KINDS``.
        address: of the rosbridge server.
        robot_file: see ``ros.config.load_robot``.
        space: of the policy's actions.
        cameras: of the policy, name -> (height, width).
        prompt: what the policy is told where no topic says it.
    """
    from embodyrl.real_robot.ros.config import load_robot
    from embodyrl.real_robot.ros.connect_bus import connect
    from embodyrl.real_robot.ros.robot import RosRobot

    topics, safety = load_robot(robot_file)
    bus = connect(kind, address)
    clock = RealClock()
    try:
        robot = RosRobot(bus, topics, safety.robot, clock, space, cameras, prompt, safety.tick)
        yield Rig(robot, clock, safety, robot.begin, simulated=False, arranges=bool(topics.reset))
    finally:
        bus.close()


@contextmanager
def libfranka_robot(
    address: str,
    robot_file: str,
    space: ActionSpace,
    cameras: Mapping[str, tuple[int, int]],
    prompt: str,
    scene: Any,
) -> Iterator[Rig]:
    """An arm by libfranka, or without a file franka-sim's in the scene of an embedded task.

    Args:
        address: of the arm, if the file does not say it.
        robot_file: see ``libfranka.config.load_arm``.
        space: of the policy's actions.
        cameras: of the policy, name -> (height, width).
        prompt: what the policy is told.
        scene: the embedded task's config.
    """
    from embodyrl.real_robot.libfranka.config import load_arm
    from embodyrl.real_robot.libfranka.robot import LibfrankaRobot

    arm, safety = load_arm(robot_file)
    arm = dataclasses.replace(arm, address=address or arm.address)
    if robot_file:
        robot = LibfrankaRobot(arm, safety, space, cameras, prompt)
    else:
        from embodyrl.real_robot.env.twin import MujocoTwin
        from embodyrl.real_robot.libfranka.scene import FrankaInScene

        robot = FrankaInScene(arm, safety, space, MujocoTwin(scene))
    try:
        yield Rig(robot, robot, safety, robot.begin, simulated=False, arranges=not robot_file)
    finally:
        robot.close()


def ask_at_terminal(sentence: str) -> None:
    """Says what a person must do, and waits for Enter.

    Raises:
        UserError: there is no terminal.
    """
    try:
        input(f"\n{sentence} [Enter] ")
    except EOFError as error:
        raise UserError(f"A person is needed, but there is no terminal: {sentence}") from error


def twin_config(path: str, overrides: Sequence[str]) -> Any:
    """The env that a checkpoint was trained in, on its evaluation split unless that is overridden.

    Raises:
        UserError: it is none that the twin can play.
    """
    from embodyrl.build import load_config

    config = load_config(path, overrides)
    if config.env.name != "mujoco":
        raise UserError(
            f"The twin plays the embedded MuJoCo tasks, but {path} was trained in "
            f"{config.env.name}."
        )
    if any(o.startswith("env.split=") for o in overrides):
        return config.env
    return dataclasses.replace(config.env, split=config.run.eval_split)


@contextmanager
def serve_here(policy: Any) -> Iterator[PolicyClient]:
    """A client of a policy (``infer`` and ``metadata``) that this process serves until this ends."""
    server = PolicyServer(
        policy.infer, policy.metadata, port=0, token=(token := secrets.token_hex(16))
    )
    thread = threading.Thread(target=server.serve_forever, name="server", daemon=True)
    thread.start()
    try:
        with _client(f"127.0.0.1:{server.port}", token) as client:
            yield client
    finally:
        server.close()
        thread.join(timeout=5.0)


@contextmanager
def serve_apart(
    path: str, device: str = "auto", seed: int = 0, patience: float = 180.0
) -> Iterator[PolicyClient]:
    """A client of a checkpoint's policy, which a process of its own serves, so that it never takes the ticker's time.

    Raises:
        UserError: it cannot be served.
    """
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder) / "token"
        said = Path(folder) / "said"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(16))
        command = [
            sys.executable,
            "-m",
            "embodyrl.cli",
            "serve",
            str(path),
            "--port",
            "0",
            "--token-file",
            str(token),
        ]
        with said.open("wb") as out:
            process = subprocess.Popen(
                [*command, "--device", device, "--seed", str(seed)], stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                # Ctrl-C belongs to the ticker, which needs the policy no longer than itself
                start_new_session=True,
            )  # fmt: skip
        try:
            end = time.monotonic() + patience
            while not (found := re.search(r"ws://(\S+)", said.read_text())):
                if process.poll() is not None or time.monotonic() > end:
                    raise UserError(
                        f"The policy of {path} cannot be served. {said.read_text().strip()[-2000:]}"
                    )
                time.sleep(0.05)
            with _client(found[1], token.read_text()) as client:
                yield client
        finally:
            process.terminate()
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextmanager
def serve_elsewhere(address: str, token: str) -> Iterator[PolicyClient]:
    """A client of a policy that another machine serves.

    Raises:
        ServerError: there is no such server, or it wants another token.
        UserError: it is a server of something else.
    """
    with _client(address, token) as client:
        needed = (
            "action_dim",
            "proprio_dim",
            "control_mode",
            "control_hz",
            "max_episode_steps",
            "horizon",
            "cameras",
        )
        if missing := [name for name in ("env", *needed) if name not in client.metadata]:
            raise UserError(
                f"The policy server at {address} does not say its {missing[0]}, so its actions "
                "cannot be carried out. Serve the policy by embodyrl serve."
            )
        yield client


@contextmanager
def _client(address: str, token: str) -> Iterator[PolicyClient]:
    client = PolicyClient(address, token, timeout=60.0)
    try:
        client.connect()
        yield client
    finally:
        client.close()
