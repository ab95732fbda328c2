"""Logs: what was written is read back, by us and by other readers, ROS 2's own among them."""

from __future__ import annotations

import importlib
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.exceptions import EndOfFile
from mcap.reader import NonSeekingReader, make_reader
from mcap.writer import Writer

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import VirtualInference
from embodyrl.real_robot.control.messages import Command, Mode, RobotState
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import RunLog, logged_picture, read
from embodyrl.real_robot.twin.mujoco_twin import BOX, MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig

H, HZ = 8, 25.0


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A second of the simulated arm, recorded."""
    twin, path = (
        MujocoTwin(MujocoConfig(task="reach", image_size=32, renderer="opengl")),
        tmp_path_factory.mktemp("log"),
    )
    twin.begin(0)
    chunk = {"actions": np.tile(np.array([0.1, 0.35, 0.2, 1.0], np.float32), (H, 1))}
    executor = Executor(
        ExecutorConfig(H, 4, HZ, "naive"), VirtualInference(lambda seen: chunk, lambda took: 0.05)
    )
    decoder = DeltaDecoder(SPACES["mujoco", "ee_delta_pos"], HZ, **BOX)
    guard = SafetyFilter(SafetyConfig(**BOX, robot="panda", max_force=None))  # type: ignore[arg-type]
    log = RunLog(path / "run.mcap", {"init": 0}, twin.now(), "panda")
    drive(twin, twin, guard, executor, decoder, log, seconds=1.0, record=True)
    log.close()
    twin.close()
    yield log.path


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    rng, zero = np.random.default_rng(0), np.zeros(7)
    states = [RobotState(0.01 * k, rng.normal(size=7), rng.normal(size=7), 0.04) for k in range(3)]
    states[2] = RobotState(0.0, zero * np.nan, zero, 0.08, None, "cartesian_reflex")
    modes = [Mode.HOLD, Mode.RUN, Mode.FAULT]
    told = [
        Command(0.01 * k, rng.normal(size=7), zero, rng.normal(size=7), 0.01 * k, modes[k])
        for k in range(3)
    ]
    seen = {
        "images": {"front": rng.integers(0, 256, (8, 6, 3), np.uint8)},
        "prompt": "pick up the übercube",
    }
    seen["proprio"] = rng.normal(size=5).astype(np.float32)
    actions = rng.normal(size=(3, 4)).astype(np.float32)
    log = RunLog(tmp_path / "a" / "run.mcap", {"seed": 1}, 0.0)
    for k, (command, state, action) in enumerate(zip(told, states, actions, strict=True)):
        log.tick(command, state)
        log.action(command.stamp, action, human=k == 2, seen=seen if k == 1 else None)
    log.event(0.03, "problem", "nothing works")
    log.put("/episode", 0.03, {"solved": False, "reason": "ü"})
    log.close()
    found = read(log.path)
    np.testing.assert_array_equal([m["q"] for m in found["/state"]], [s.q for s in states])
    np.testing.assert_array_equal([m["dq"] for m in found["/state"]], [s.dq for s in states])
    assert [m["width"] for m in found["/state"]] == [s.width for s in states]
    assert [m["reflex"] for m in found["/state"]] == ["", "", "cartesian_reflex"]
    for what in ("q", "dq", "ddq"):
        np.testing.assert_array_equal(
            [m[what] for m in found["/command"]], [getattr(c, what) for c in told]
        )
    assert [m["mode"] for m in found["/command"]] == modes
    assert np.diff([m["stamp"] for m in found["/command"]]) == pytest.approx(0.01, abs=1e-6)
    np.testing.assert_array_equal([m["action"] for m in found["/action"]], actions)
    assert [m["human"] for m in found["/action"]] == [False, False, True]
    assert [sorted({"prompt", "proprio"} & set(m)) for m in found["/action"]] == [
        [],
        ["prompt", "proprio"],
        [],
    ]
    np.testing.assert_array_equal(found["/action"][1]["proprio"], seen["proprio"])
    assert found["/action"][1]["prompt"] == seen["prompt"]
    np.testing.assert_array_equal(
        logged_picture(found["/camera/front"][0]), seen["images"]["front"]
    )
    assert (found["/event"][0]["kind"], found["/event"][0]["text"]) == ("problem", "nothing works")
    assert found["/run"][0]["settings"] == {"seed": 1}
    assert (found["/episode"][0]["solved"], found["/episode"][0]["reason"]) == (False, "ü")


def test_rosbags_reads_it_as_the_types_of_jazzy(log: Path) -> None:
    pytest.importorskip("rosbags", reason="make setup installs it")
    from rosbags.highlevel import AnyReader
    from rosbags.typesys import Stores, get_typestore

    jazzy, found = get_typestore(Stores.ROS2_JAZZY), read(log)
    messages: dict[str, list[Any]] = {}
    with AnyReader([log]) as reader:
        for connection, _, data in reader.messages():
            assert (
                reader.typestore.fielddefs[connection.msgtype]
                == jazzy.fielddefs[connection.msgtype]
            )
            messages.setdefault(connection.topic, []).append(
                jazzy.deserialize_cdr(data, connection.msgtype)
            )
    agrees(messages, found)


@pytest.mark.robot
def test_ros_2_itself_reads_it(log: Path) -> None:
    serialization = pytest.importorskip(
        "rclpy.serialization", reason="no rclpy here; make test-robot installs it"
    )
    messages: dict[str, list[Any]] = {}
    with log.open("rb") as stream:
        for schema, channel, message in make_reader(stream).iter_messages():
            assert schema is not None and (schema.encoding, channel.message_encoding) == (
                "ros2msg",
                "cdr",
            )
            package, _, name = schema.name.split("/")
            kind = getattr(importlib.import_module(f"{package}.msg"), name)
            messages.setdefault(channel.topic, []).append(
                serialization.deserialize_message(message.data, kind)
            )
    agrees(messages, read(log))


def agrees(messages: dict[str, list[Any]], found: dict[str, list[dict[str, Any]]]) -> None:
    """Another's messages say what ours do."""
    assert (
        len(messages["/state"])
        == len(messages["/command"])
        == len(messages["/command/acceleration"])
        > 100
    )
    for topic in ("/state", "/command"):
        told = messages[topic]
        assert list(told[0].name) == [f"panda_joint{k}" for k in range(1, 8)] + [
            f"panda_finger_joint{k}" for k in (1, 2)
        ]
        np.testing.assert_array_equal(
            [m.position[:7] for m in told], [m["q"] for m in found[topic]]
        )
        np.testing.assert_array_equal(
            [m.velocity[:7] for m in told], [m["dq"] for m in found[topic]]
        )
        assert [sum(m.position[7:]) for m in told] == [m["width"] for m in found[topic]]
        stamps = [m.header.stamp.sec + 1e-9 * m.header.stamp.nanosec for m in told]
        np.testing.assert_allclose(stamps, [m["stamp"] for m in found[topic]], atol=1e-5)
    np.testing.assert_array_equal(
        [m.data for m in messages["/command/acceleration"]], [m["ddq"] for m in found["/command"]]
    )
    np.testing.assert_array_equal(
        [m.data for m in messages["/action"]], [m["action"] for m in found["/action"]]
    )
    np.testing.assert_array_equal(
        [m.data for m in messages["/proprio"]], [m["proprio"] for m in found["/action"]]
    )
    assert [m.data for m in messages["/mode"]] == ["hold", "run", "hold"]
    assert [(m.name, m.msg, m.level) for m in messages["/event"]] == [
        ("mode", m["text"], 20) for m in found["/event"]
    ]
    assert json.loads(messages["/run"][0].data)["settings"] == {"init": 0}
    pictures = messages["/camera/front"]
    assert len(pictures) == len(found["/action"]) > 10 and pictures[0].format == "png"
    image = logged_picture({"format": "png", "data": bytes(pictures[0].data)})
    np.testing.assert_array_equal(image, logged_picture(found["/camera/front"][0]))


def test_a_killed_program_leaves_all_but_its_last_second(tmp_path: Path) -> None:
    log, state = RunLog(tmp_path / "run.mcap", {}, 0.0), RobotState(0.0, np.zeros(7), np.zeros(7))
    rng = np.random.default_rng(0)
    for k in range(500):
        q, dq, ddq = rng.normal(size=(3, 7))  # nothing that could be compressed
        log.tick(Command(0.01 * k, q, dq, ddq, 0.0, Mode.RUN), state)
    while not log._items.empty():
        time.sleep(0.01)
    time.sleep(0.1)
    there, left = 0, log.path.read_bytes()
    with pytest.raises(EndOfFile):
        for _ in NonSeekingReader(io.BytesIO(left)).iter_messages("/command", log_time_order=False):
            there += 1
    assert there > 400
    log.close()
    assert len(read(log.path)["/command"]) == 500


def test_what_is_no_log_is_said_in_words(tmp_path: Path, log: Path) -> None:
    old = tmp_path / "old.mcap"
    with old.open("wb") as stream:
        writer = Writer(stream)
        writer.start(library="embodyrl")
        number = writer.register_schema("embodyrl.run", "jsonschema", b"{}")
        writer.add_message(writer.register_channel("/run", "json", number), 0, b"{}", 0)
        writer.finish()
    with pytest.raises(UserError, match="logs were JSON in an earlier version"):
        read(old)
    old.write_bytes(log.read_bytes()[:-100])  # its program was killed
    with pytest.raises(UserError, match=r"no whole log .* mcap recover"):
        read(old)
    old.write_bytes(b"nothing")
    with pytest.raises(UserError, match="no whole log"):
        read(old)


def test_a_disk_that_is_full_is_said_at_the_end() -> None:
    log = RunLog("/dev/full", {}, 0.0)
    for k in range(20):  # nobody waits meanwhile
        log.event(0.1 * k, "problem", "x" * 1_000_000)
    with pytest.raises(UserError, match=r"/dev/full could not be written: The disk of .* is full"):
        log.close()
