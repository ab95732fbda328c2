"""A leader arm, from the bytes of its servos on a pseudo-terminal to the arm that follows it."""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from leader_device import LeaderDevice, crc, status

from embodyrl.errors import UserError
from embodyrl.real_robot.commands.record import _NoPolicy
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.clocks import PacedClock
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.operator import dynamixel
from embodyrl.real_robot.operator.leader import Leader, LeaderOperator, load_leader
from embodyrl.real_robot.record.recorder import Progress, Recorder
from embodyrl.real_robot.record.teleop import Teleop
from embodyrl.real_robot.ros.config import load_robot
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig

SIGNS = (1, -1, 1, 1, -1, 1, 1)
OFFSETS = (0.5, 3.2, -1.0, 6.3, 0.1, -2.0, 1.5)
SAFETY = load_robot("")[1]


@pytest.fixture
def device(tmp_path: Path) -> Iterator[LeaderDevice]:
    device = LeaderDevice(tmp_path / "leader")
    yield device
    device.unplug()


def config_of(device: LeaderDevice) -> Leader:
    return Leader(str(device.path), 57600, signs=SIGNS, offsets=OFFSETS)


def stand(device: LeaderDevice, q: np.ndarray) -> None:
    """Puts the leader into a posture of the robot."""
    device.angles[:7] = [s * a + o for s, a, o in zip(SIGNS, q, OFFSETS, strict=True)]


class Page(Operator):
    """The person's buttons."""

    def __init__(self) -> None:
        self.wished: list[str] = []
        self.status: dict[str, Any] = {}

    def wishes(self) -> list[str]:
        found, self.wished = self.wished, []
        return found

    def show(self, status: dict[str, Any], images: dict[str, Any]) -> None:
        self.status = status


def test_bytes_are_those_of_the_specification() -> None:
    """Examples of ROBOTIS' e-manual, and a CRC that is computed in another way."""
    asked = bytes.fromhex("FFFFFD00FE0900828400040001 02CEFA")
    assert dynamixel.sync_read([1, 2]) == asked
    assert dynamixel.packet(1, 1, b"") == bytes.fromhex("FFFFFD000103000119 4E")
    answers = bytes.fromhex("FFFFFD000108005500A60000008CC0 FFFFFD0002080055001F080000BABE")
    one, rest = dynamixel.take_packet(b"\x00\xff\xff" + answers)
    two, left = dynamixel.take_packet(rest)
    assert one is not None and two is not None and left == b""
    assert dynamixel.answer(one) == (1, b"\xa6\x00\x00\x00")
    assert dynamixel.answer(two) == (2, b"\x1f\x08\x00\x00")
    assert dynamixel.crc16(b"123456789") == 0xFEE8
    for length in range(1, 40):
        data = bytes((7 * k + length) % 256 for k in range(1, length + 1))
        assert dynamixel.crc16(data) == int.from_bytes(crc(data), "little")
    # A header among the parameters is stuffed, and comes out as it was.
    inside = b"\xff\xff\xfd\x00"
    stuffed = status(3, int.from_bytes(inside, "little"))
    assert len(stuffed) == 16 and dynamixel.answer(stuffed) == (3, inside)
    assert dynamixel.packet(3, 0x55, b"\x00" + inside) == stuffed
    # Cut anywhere, it is no packet yet.
    assert all(dynamixel.take_packet(asked[:k])[0] is None for k in range(len(asked)))


def test_angles_become_the_robots(device: LeaderDevice) -> None:
    q = np.array([0.1, -0.4, 0.2, -2.1, 0.3, 3.5, -0.7])  # joint 6 goes beyond pi
    stand(device, q)
    device.angles[3] += 4 * math.pi  # it was turned before it was switched on
    leader = LeaderOperator(config_of(device), Page())
    decoder = DeltaDecoder(SPACES["robot", "ee_delta_pose"], 25.0, SAFETY.box_low, SAFETY.box_high)
    twin = MujocoTwin(MujocoConfig(task="reach", cameras=(), renderer="none"))
    twin.begin(0)
    state = twin.state()
    twin.close()
    decoder.start(0.0, state)
    leader.begin(decoder)
    try:
        np.testing.assert_allclose(leader.q, q, atol=2 * dynamixel.TICK)
        # Followed step by step, the commanded hand comes to the leader's, turned as it is.
        position, rotation, _ = kinematics.forward(q)
        for _ in range(60):
            decoder.position = decoder.position + 0.035 * leader.action(7)[:3]
            turn = kinematics.exp_rotation(0.15 * leader.action(7)[3:6].astype(float))
            decoder.rotation = turn @ decoder.rotation
        np.testing.assert_allclose(decoder.position, position, atol=5e-3)
        np.testing.assert_allclose(decoder.rotation, rotation, atol=2e-2)
        # The trigger.
        assert leader.action(4)[3] == 1.0
        device.angles[7] = 0.9
        until(lambda: leader.action(4)[3] == -1.0)
        # How far the leader is from the robot, at which joint, and the offsets that would be right.
        said = leader.ready(state)
        away = q - state.q
        joint = int(np.abs(away).argmax())
        assert f"joint {joint + 1} of the leader is {away[joint]:+.2f} rad" in said
        offsets = [float(x) for x in re.findall(r"[-\d.]+", said.rpartition("[")[2])]
        np.testing.assert_allclose(
            np.array(SIGNS) * (np.array(device.angles[:7]) - offsets[:7]), state.q, atol=5e-3
        )
        stand(device, state.q + 0.1)
        until(lambda: leader.ready(state) == "")
    finally:
        leader.close()


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


def test_the_arm_follows_and_holds_whatever_happens_to_the_leader(device: LeaderDevice) -> None:
    twin = MujocoTwin(MujocoConfig(task="pick", cameras=(), renderer="none", split="eval"))
    twin.begin(0)
    q = twin.state().q
    stand(device, q + np.array([0, 0, 0, 0.6, 0, 0, 0]))
    page, guard = Page(), SafetyFilter(SAFETY)
    leader = LeaderOperator(config_of(device), page)
    teleop = Teleop(leader, begin=leader.begin, ready=leader.ready, problem=leader.problem)
    recorder = Recorder(teleop, twin, Progress(), lambda: False)
    decoder = DeltaDecoder(SPACES["mujoco", "ee_delta_pos"], 6.25, SAFETY.box_low, SAFETY.box_high)
    leader.begin(decoder)
    found: list[Any] = []
    executor = Executor(ExecutorConfig(1, 4, 6.25, "sync"), _NoPolicy())

    def work() -> None:
        found.append(
            drive(
                twin, PacedClock(twin), guard, executor, decoder, seconds=600.0, operator=recorder,
                record=True,
            )
        )  # fmt: skip

    thread = threading.Thread(target=work)
    thread.start()

    def follow() -> None:
        """Starts until the arm follows: on a busy machine it may rightly have stopped again."""
        end = time.monotonic() + 60.0
        while guard.mode != Mode.HUMAN:
            assert time.monotonic() < end, page.status
            page.wished.append("takeover")
            time.sleep(0.2)

    try:
        # Too far away: it does not begin, and says which joint.
        page.wished.append("takeover")
        until(lambda: "joint 4 of the leader is +0.60 rad" in page.status.get("reason", ""))
        assert guard.mode == Mode.HOLD
        stand(device, q)
        time.sleep(0.2)
        follow()
        # The leader turns at its base: the hand goes there.
        for part in np.linspace(0.0, 0.25, 20):
            stand(device, q + np.array([part, 0, 0, 0, 0, 0, 0]))
            time.sleep(0.05)
        goal = kinematics.forward(q + np.array([0.25, 0, 0, 0, 0, 0, 0]))[0]

        def there() -> bool:
            if guard.mode != Mode.HUMAN:
                follow()
            return bool(np.abs(kinematics.forward(twin.state().q)[0] - goal).max() < 0.01)

        until(there)
        # Each fault has its sentence, and the arm holds; the person starts again afterwards.
        for fault, words in (
            ("crc", "its CRC is wrong"),
            ("short", "bytes of an answer came"),
            ("alert", "servo 5 reports a hardware error"),
            ("refuses", "servo 5 answers with error 2: it does not know the instruction"),
            ("silent", "servo 1, 2, 3, 4, 5, 6, 7, 8 did not answer"),
        ):
            device.fault = fault
            until(lambda: guard.mode == Mode.HOLD)
            until(lambda words=words: words in page.status["reason"])
            page.wished.append("takeover")
            time.sleep(0.3)
            assert guard.mode == Mode.HOLD, fault
            device.fault = ""
            until(lambda: not leader.problem())
            follow()
        device.unplug()
        until(lambda: guard.mode == Mode.HOLD and "is gone" in page.status["reason"])
        device.plug()
        until(lambda: not leader.problem())
        follow()
        page.wished.append("success")
        thread.join(timeout=60.0)
        assert found[0].solved and max(found[0].peak.values()) <= 1.0
        assert recorder.frames == found[0].human > 5
    finally:
        page.wished.append("discard")
        thread.join(timeout=60.0)
        leader.close()
        twin.close()


def test_one_damaged_answer_is_no_reason_to_stop(device: LeaderDevice) -> None:
    leader = LeaderOperator(config_of(device), Page())
    device.fault = "crc"
    asked = device.asked
    until(lambda: device.asked > asked)
    device.fault = ""
    time.sleep(0.3)
    assert leader.problem() == "" and leader.alive(0.0)
    leader.close()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "has no section leader"),
        ("leader: {ids: [1, 2, 3]}", "leader.ids has 3 numbers"),
        ("leader: {ids: [1, 2, 3, 4, 5, 6, 8]}", "must be different"),
        ("leader: {signs: [1, 1, 1, 1, 1, 1, 2]}", "each must be 1 or -1"),
        ("leader: {baud: 1234}", "leader.baud is 1234"),
        ("leader: {gripper_closed: 0.01}", "the trigger's angles"),
        ("leader: {offsets: [.nan, 0, 0, 0, 0, 0, 0]}", "offsets is nan"),
        ("leader: {prot: /dev/ttyUSB0}", "prot"),
        ("leaders: {}", "has no key 'leaders'"),
    ],
)
def test_settings_that_cannot_be(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "arm.yaml").write_text(text)
    with pytest.raises(UserError, match=re.escape(said)):
        load_leader(str(tmp_path / "arm.yaml"))


def test_a_leader_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--robot-file with a section leader"):
        load_leader("")
    with pytest.raises(UserError, match=r"its port /nowhere is gone \(No such file"):
        LeaderOperator(Leader("/nowhere"), Page())
    device = LeaderDevice(tmp_path / "leader")
    device.fault = "silent"
    with pytest.raises(UserError, match="is the leader switched on"):
        LeaderOperator(config_of(device), Page())
    device.unplug()
