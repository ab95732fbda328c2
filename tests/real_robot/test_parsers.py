"""Every parser reads what is right, and refuses the rest in words, within bounds."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.faults import parsers as faults
from embodyrl.distributed import wire
from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.control.messages import Mode, RobotState
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.libfranka.process_link import Link
from embodyrl.real_robot.parsing import MAX_DEPTH, MAX_PARTS, MessageError, parse_json
from embodyrl.real_robot.policy_link import codec
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.config import PRESETS, load_robot
from embodyrl.real_robot.ros.robot import RosRobot
from embodyrl.real_robot.ros.rosbridge import RosbridgeBus
from embodyrl.real_robot.ros.stamps import StampConverter

QUICK = settings(max_examples=150, derandomize=True, deadline=None)
NUMBERS = st.integers() | st.floats() | st.booleans() | st.none() | st.just(10**400)
JSON = st.recursive(
    NUMBERS | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=20,
)
TOPICS = PRESETS["twin"]


def test_nonsense_is_refused_in_words_by_every_parser() -> None:
    counts = faults.survive(420, seed=3)
    parsers = {name.rpartition(" ")[0] for name in counts if " " in name}
    assert len(parsers) == 15
    assert all(counts.get(f"{name} refused", 0) for name in parsers)


@given(JSON)
@QUICK
def test_json_is_read_as_json_does(value: Any) -> None:
    text = json.dumps({"a": value})
    try:
        back = parse_json(text.encode() if len(text) % 2 else text)
    except MessageError:
        assert "0" * 400 in text or text.count("[") + text.count("{") > MAX_DEPTH
        return
    assert json.dumps(back) == text


@given(st.binary(max_size=300))
@QUICK
def test_bytes_are_read_or_refused(data: bytes) -> None:
    for read in (parse_json, codec.unpack, wire.from_bytes):
        try:
            read(data)
        except UserError as error:
            assert str(error)


@given(JSON)
@QUICK
def test_msgpack_survives_what_is_packed(value: Any) -> None:
    try:
        data = codec.pack({"a": value})
    except (TypeError, OverflowError, ValueError):
        return  # no message
    try:
        back = codec.unpack(data)["a"]
    except MessageError:
        return
    assert repr(back) == repr(value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 100_000, "no JSON|more than"),
        ('{"a":' * 100 + "1" + "}" * 100, f"deeper than {MAX_DEPTH}"),
        ('{"a": [' + "[]," * MAX_PARTS + "[]]}", "more than"),
        ("[1]", "no map"),
        (b"\xff\xfe{", "no JSON"),
        ('{"a": ' + "1" * 5000 + "}", "no JSON"),
    ],
)
def test_json_is_bounded_in_depth_size_and_time(text: str | bytes, said: str) -> None:
    began = time.monotonic()
    with pytest.raises(MessageError, match=said):
        parse_json(text)
    with pytest.raises(MessageError, match="at most 10 are read"):
        parse_json(text, max_bytes=10) if len(text) > 10 else parse_json(b" " * 11, 10)
    assert time.monotonic() - began < 5.0


def test_msgpack_is_bounded_in_memory() -> None:
    empties = b"\xdc\x01\x00" + (b"\xdc\x01\x00" + b"\x80" * 256) * 256  # 65,536 maps in 66 kB
    with pytest.raises(MessageError, match="more than 4096 lists and maps"):
        codec.unpack(empties)


@given(st.dictionaries(st.sampled_from(["sec", "nanosec", "secs", "nsecs"]), NUMBERS))
@QUICK
def test_a_stamp_that_is_no_time_is_refused(stamp: dict[str, Any]) -> None:
    stamps = StampConverter("the states", 0.5)
    for now in (5.0, 5.1):
        try:
            found = stamps.measured({"stamp": stamp}, now)
        except UserError:
            continue
        # A stamp that is not a number would never be too old.
        assert found is None or math.isfinite(found)
    assert math.isfinite(stamps._offset) or stamps._offset == -math.inf


@given(st.data())
@QUICK
def test_a_trajectory_is_finite_or_refused(data: st.DataObject) -> None:
    good = faults.trajectory_message()
    key = data.draw(st.sampled_from(["joint_names", "points", "positions", "velocities", "time"]))
    odd = data.draw(JSON)
    if key in ("joint_names", "points"):
        message = good | {key: odd}
    elif key == "time":
        message = good | {"points": [good["points"][0] | {"time_from_start": odd}]}
    else:
        row = list(good["points"][0][key])
        row[data.draw(st.integers(0, 6))] = odd
        message = good | {"points": [good["points"][0] | {key: row}]}
    try:
        times, q, dq = fields.read_trajectory(message, TOPICS.joints)
    except MessageError:
        return
    assert q.shape == dq.shape == (len(times), 7) and np.isfinite(q).all() and np.isfinite(dq).all()


def test_the_joints_of_a_trajectory_may_come_in_another_order() -> None:
    times, q, dq = np.array([0.1]), np.arange(7.0)[None], np.arange(7.0)[None] / 10
    message = fields.trajectory(TOPICS.joints[::-1], times, q[:, ::-1], dq[:, ::-1], 2)
    for got, wanted in zip(
        fields.read_trajectory(message, TOPICS.joints), (times, q, dq), strict=True
    ):
        np.testing.assert_allclose(got, wanted)


def test_the_twin_drops_what_it_does_not_understand_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    from websockets.sync.client import connect

    with faults.twin_node() as node, connect(f"ws://127.0.0.1:{node._bus.port}") as client:  # type: ignore[attr-defined]
        good = faults.trajectory_message()
        point = good["points"][0]
        wrong = [
            (TOPICS.command, {}, "must name the joints"),
            (TOPICS.command, good | {"points": []}, "1 to 1000 points"),
            (TOPICS.command, good | {"points": [point | {"positions": [9.0] * 7}]}, "beyond the ends"),
            (TOPICS.command, good | {"points": [point | {"positions": [math.nan] * 7}]}, "finite"),
            (TOPICS.command, good | {"points": [point | {"velocities": [1e9] * 7}]}, "above 10 rad/s"),
            (TOPICS.command, good | {"points": [point | {"time_from_start": {"sec": -1, "nanosec": 0}}]},
             "must rise from 0"),
            (TOPICS.gripper, {"data": math.inf}, "the gripper's width is inf"),
            (TOPICS.reset, {"data": 2**40}, "the initial state is"),
            (TOPICS.reset, {"data": "1"}, "the initial state is '1'"),
        ]  # fmt: skip
        for topic, message, said in wrong:
            before = node.refused
            client.send(json.dumps({"op": "publish", "topic": topic, "msg": message}))
            end = time.monotonic() + 20.0
            while node.refused == before:
                assert time.monotonic() < end, said
                time.sleep(0.001)
            assert (
                said in caplog.records[-1].getMessage() and topic in caplog.records[-1].getMessage()
            )
        node.run(0.02)
        client.send("[" * 100_000)
        assert json.loads(client.recv(timeout=20))["level"] == "error"
        client.send(json.dumps({"op": "publish", "topic": TOPICS.command, "msg": good}))
        end = time.monotonic() + 20.0
        while node._command is None:
            assert time.monotonic() < end
            time.sleep(0.001)
        node.run(0.02)
        assert np.isfinite(node._twin.data.qpos).all()


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 900 + "1" + "}" * 900,
        "[]",
        '{"op": "publish", "topic": "TOPIC", "msg": 3}',
        '{"op": "publish", "topic": "TOPIC", "msg": {"header": {"stamp": {"sec": NaN, "nanosec": 0}}, '
        '"name": ["NAMES"], "position": [], "velocity": []}}',
        '{"op": "publish", "topic": "TOPIC", "msg": {"name": null}}',
    ],
)
def test_nonsense_from_the_robots_side_is_a_fault_that_stops_the_arm(text: str) -> None:
    names = '", "'.join(TOPICS.joints)
    text = text.replace("TOPIC", TOPICS.states).replace("NAMES", names)
    bus = RosbridgeBus(faults.Told([text]), ros=2)
    space = SPACES["mujoco", "ee_delta_pos"]
    robot = RosRobot(bus, TOPICS, "panda", RealClock(), space, {})
    end = time.monotonic() + 20.0
    while not bus.trouble():
        assert time.monotonic() < end, "the reader's thread ended without a word"
        time.sleep(0.001)
    home = kinematics.HOME
    robot._state = RobotState(0.0, home, np.zeros(7))  # as it was before
    told = robot.state().trouble
    assert told
    guard = SafetyFilter(load_robot("")[1])
    guard.start(0.0, RobotState(0.0, home, np.zeros(7)))
    guard.run(0.0)
    guard.tick(0.01, robot.state(), None)
    assert guard.mode == Mode.FAULT and guard.reason == told
    robot.close()


@pytest.mark.parametrize("thread", ["reads", "writes"])
def test_whatever_ends_a_thread_of_the_bus_is_a_lost_link(thread: str) -> None:
    subscribed = threading.Event()

    def texts() -> Iterator[str]:
        subscribed.wait(20)
        if thread == "reads":
            yield '{"op": "publish", "topic": "/a", "msg": {}}'
        time.sleep(20)

    def fail(_: object) -> None:
        raise RuntimeError("no words")

    bus = RosbridgeBus(faults.Told(texts()), ros=2)
    bus.subscribe("/a", "std_msgs/String", fail)
    if thread == "writes":
        bus.advertise("/b", "std_msgs/String")({"data": object()})
    subscribed.set()
    said = "not understood" if thread == "reads" else "cannot be sent"
    end = time.monotonic() + 10.0
    while not bus.trouble():
        assert time.monotonic() < end, "a thread ended without a word"
        time.sleep(0.001)
    assert said in bus.trouble()
    bus.close()


@pytest.mark.parametrize(
    "data", [b"\xc1", b"\x91" * 3000, codec.pack([3, 4]), codec.pack({}), codec.pack([])]
)
def test_a_process_that_talks_nonsense_is_a_lost_link(data: bytes) -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    link = Link(here)
    there.send(codec.pack(["width", 0.04]))
    there.send(data)
    assert link.heard() == [["width", 0.04]]
    assert link.closed and "not understood" in link.trouble
    there.close()


def test_pictures_are_bounded_before_they_are_decoded() -> None:
    import struct
    import zlib

    def part(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    bomb = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", struct.pack(">IIBBBBB", 8000, 8000, 8, 2, 0, 0, 0))
    bomb += part(b"IDAT", zlib.compress(bytes(100))) + part(b"IEND", b"")
    with pytest.raises(UserError, match="larger than 4096"):
        fields.picture({"format": "png", "data": bomb})
    for change in ({"height": 0, "data": b""}, {"width": -1}, {"step": 3}, {"height": 4.0}):
        with pytest.raises(UserError, match="picture"):
            fields.picture(faults.picture_message() | change)
