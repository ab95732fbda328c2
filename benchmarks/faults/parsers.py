"""Nonsense for every parser: it is read, or refused in words; nothing else ever happens.

python -m benchmarks.faults.parsers [TRIES] [SEED]
"""

from __future__ import annotations

import collections
import io
import json
import logging
import math
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.faults import nonsense
from embodyrl.distributed import wire
from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.control.messages import Command, Mode, RobotState
from embodyrl.real_robot.libfranka.process_link import Link
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.parsing import parse_json
from embodyrl.real_robot.policy_link import codec
from embodyrl.real_robot.policy_link.metadata import check_metadata
from embodyrl.real_robot.policy_link.server import check_observation
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.config import PRESETS
from embodyrl.real_robot.ros.robot import RosRobot
from embodyrl.real_robot.ros.rosbridge import RosbridgeBus, WireError
from embodyrl.real_robot.ros.rosbridge_server import RosbridgeServer
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.real_robot.twin.ros_node import TwinNode
from embodyrl.sims.mujoco.env import MujocoConfig
from embodyrl.world_models.reflectors.server import parse_answer

SLOWEST = 5.0
"""s; a parser that takes longer counts as hung."""
TOPICS = PRESETS["twin"]
JOINTS = TOPICS.joints
HOME = kinematics.HOME
POLICY: dict[str, Any] = {
    "env": "robot/twin",
    "cameras": {"front": [4, 6]},
    "proprio_dim": 3,
    "horizon": 5,
    "execute": 5,
    "action_dim": 4,
    "control_mode": "ee_delta_pos",
    "control_hz": 25.0,
    "max_episode_steps": 40,
}


class Told:
    """A wire (``rosbridge.Wire``) on which given texts arrive, one after the other."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = iter(texts)

    def send(self, text: str) -> None:
        """Sends into the void."""

    def settle(self) -> None:
        """Nothing to wait for."""

    def receive(self) -> str:
        """The next text."""
        for each in self._texts:
            return each
        raise WireError("the texts are over")

    def close(self) -> None:
        """Nothing to close."""


def state_message(rng: random.Random) -> dict[str, Any]:
    """A good joint state, 0 to 1 ms older than now."""
    q = np.append(HOME, (0.04, 0.04))
    return fields.joint_state(
        (*JOINTS, *TOPICS.fingers), q, np.zeros(9), time.time() - rng.random() / 1e3, 2
    )


def trajectory_message() -> dict[str, Any]:
    """A good trajectory of two points."""
    return fields.trajectory(
        JOINTS, np.array([0.01, 0.02]), np.tile(HOME, (2, 1)), np.zeros((2, 7)), 2
    )


def picture_message() -> dict[str, Any]:
    """A good image."""
    return fields.image_fields(np.zeros((4, 6, 3), np.uint8), time.time(), 2)


def _png() -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.zeros((4, 6, 3), np.uint8)).save(out, "PNG")
    return out.getvalue()


def _with_bytes(rng: random.Random, message: Any) -> Any:
    """An image message whose data may also be bytes of another length."""
    if isinstance(message, dict) and rng.random() < 0.3:
        return message | {"data": rng.randbytes(rng.choice((0, 10, 72, 73)))}
    return message


def _map(message: Any) -> dict[str, Any]:
    """The message, if it is a map: its readers have already refused anything else."""
    return message if isinstance(message, dict) else {}


def _robot_hears(rng: random.Random) -> None:
    """A robot behind rosbridge whose server talks nonsense: the arm must hear of it."""
    good = {
        TOPICS.states: state_message(rng),
        TOPICS.pose: fields.pose(HOME, TOPICS.frame, time.time(), 2),
        TOPICS.cameras["front"]: picture_message() | {"data": "AAAA" * 24},
        TOPICS.instruction: {"data": "go"},
        TOPICS.success: {"data": False},
        TOPICS.init: {"data": 1},
    }
    topic = rng.choice(list(good))
    message = {"op": "publish", "topic": topic, "msg": good[topic]}
    bus = RosbridgeBus(Told([nonsense.text(rng, message)]), ros=2)
    robot = RosRobot(
        bus, TOPICS, "panda", RealClock(), SPACES["mujoco", "ee_delta_pos"], {"front": (4, 6)}
    )
    # The thread that reads has ended, so the link is lost in words, whatever it has read.
    end = time.monotonic() + SLOWEST
    while not bus.trouble():
        assert time.monotonic() < end, "the reader's thread ended without a word"
        time.sleep(1e-4)
    robot._state = robot._state or RobotState(0.0, HOME, np.zeros(7))
    assert robot.state().trouble
    state = robot.state()
    assert math.isfinite(state.stamp) and math.isfinite(state.width)
    assert state.hand is None or np.isfinite(state.hand).all()
    robot.close()
    if bus.trouble() != "the texts are over":
        raise UserError(bus.trouble())


@contextmanager
def twin_node() -> Iterator[TwinNode]:
    """A twin's node on a rosbridge server."""
    twin = MujocoTwin(MujocoConfig(task="reach", cameras=(), renderer="none", split="eval"))
    bus = RosbridgeServer(0)
    try:
        node = TwinNode(twin, bus, TOPICS)
        node.run(0.02)
        yield node
    finally:
        bus.close()
        twin.close()


def _twin_hears(rng: random.Random, node: TwinNode) -> None:
    """A message for the twin: it is dropped or obeyed, and the physics stay finite."""
    good = {
        TOPICS.command: trajectory_message(),
        TOPICS.gripper: {"data": 0.04},
        TOPICS.reset: {"data": 3},
    }
    topic = rng.choice(list(good))
    before = node.refused
    for _, callback in node._bus._callbacks[topic]:  # type: ignore[attr-defined]
        callback(_map(nonsense.spoiled(rng, good[topic])))
    if rng.random() < 0.05:
        node.run(0.02)
        assert np.isfinite(node._twin.data.qpos).all()
    if node.refused > before:
        raise UserError("dropped")


def _link_hears(rng: random.Random) -> None:
    """A message between the processes of libfranka."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(here)
    good = codec.pack(["state", 1.0, 2.0, [0.0] * 7])
    there.send(nonsense.mutated(rng, good)[:4000] or b"\xc1")
    heard = link.heard()
    there.close()
    assert heard or link.trouble, "a link that heard nonsense must be closed, and say so"
    link.close()
    if link.trouble:
        raise UserError(link.trouble)


def _log_of_a_run(folder: Path) -> bytes:
    """The bytes of a small log."""
    path = folder / "good.mcap"
    log = RunLog(path, {"policy": POLICY, "init": 0}, 0.0)
    seen = {
        "prompt": "go",
        "proprio": np.zeros(3),
        "images": {"front": np.zeros((4, 6, 3), np.uint8)},
    }
    for k in range(5):
        zero = np.zeros(7)
        command = Command(0.01 * k, HOME, zero, zero, 0.04, Mode.RUN)
        log.tick(command, RobotState(0.01 * k, HOME, zero))
        log.action(0.01 * k, np.zeros(4, np.float32), False, seen)
    log.event(0.05, "mode", "run -> hold")
    log.put("/episode", 0.05, {"solved": True, "reason": ""})
    log.close()
    return path.read_bytes()


def _log(rng: random.Random, good: bytes, folder: Path) -> None:
    from embodyrl.real_robot.logs.export import recorded

    path = folder / "bad.mcap"
    path.write_bytes(nonsense.mutated(rng, good))
    recorded(read(path), path)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keeps a logger's warnings out of the output."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def survive(tries: int, seed: int) -> dict[str, int]:
    """Gives nonsense to every parser in turn.

    Returns:
        Numbers of ``tries``, and for each parser of what it ``read`` and ``refused`` in words.

    Raises:
        Exception: whatever a parser raised that is no ``UserError``.
        AssertionError: it took too long, or let something through.
    """
    rng = random.Random(seed)
    counts: collections.Counter[str] = collections.Counter(tries=tries, survived=tries)
    observation = {
        "images": {"front": np.zeros((4, 6, 3), np.uint8)},
        "proprio": np.zeros(3, np.float32),
        "prompt": "go",
        "step": 3,
    }
    packed = codec.pack(observation)
    message = wire.to_bytes({"a": torch.zeros(3), "b": [1, {"c": torch.ones(2, dtype=torch.bool)}]})
    answer = {"choices": [{"logprobs": {"content": [{"top_logprobs": [
        {"token": "yes", "logprob": -0.1}, {"token": "no", "logprob": -3.0}]}]}}]}  # fmt: skip
    png = _png()
    with (
        _quiet("embodyrl.real_robot.twin.ros_node"),
        tempfile.TemporaryDirectory() as name,
        twin_node() as node,
    ):
        folder = Path(name)
        log = _log_of_a_run(folder)
        parsers: dict[str, Callable[[], Any]] = {
            "json": lambda: parse_json(nonsense.text(rng, {"op": "publish", "msg": answer})),
            "json bytes": lambda: parse_json(nonsense.mutated(rng, json.dumps(answer).encode())),
            "msgpack": lambda: codec.unpack(nonsense.mutated(rng, packed)),
            "msgpack nests": lambda: codec.unpack(rng.choice((b"\x91", b"\x81\xa1a")) * 3000),
            "msgpack empties": lambda: codec.unpack(b"\xdc\x01\x00" + b"\x80" * 256 * 40),
            "observation": lambda: check_observation(nonsense.spoiled(rng, observation), POLICY),
            "metadata": lambda: check_metadata(_map(nonsense.spoiled(rng, POLICY))),
            "actor's bytes": lambda: wire.from_bytes(nonsense.mutated(rng, message)),
            "image": lambda: fields.picture(
                _with_bytes(rng, nonsense.spoiled(rng, picture_message()))
            ),
            "png": lambda: fields.picture({"format": "png", "data": nonsense.mutated(rng, png)}),
            "link": lambda: _link_hears(rng),
            "rosbridge": lambda: _robot_hears(rng),
            "twin": lambda: _twin_hears(rng, node),
            "log": lambda: _log(rng, log, folder),
        }
        names = list(parsers)
        for k in range(tries):
            parser = names[k % len(names)]
            began = time.monotonic()
            try:
                parsers[parser]()
                counts[f"{parser} read"] += 1
            except UserError as error:
                assert str(error) and "Traceback" not in str(error)
                counts[f"{parser} refused"] += 1
            took = time.monotonic() - began
            assert took < SLOWEST, (parser, took)
        for _ in range(tries // len(names)):  # this one answers NaN instead of raising
            given = parse_answer(nonsense.text(rng, answer).encode(), 0.5)
            assert math.isnan(given) or 0.0 <= given <= 1.0
            counts["VLM's answer " + ("refused" if math.isnan(given) else "read")] += 1
    return dict(counts)
