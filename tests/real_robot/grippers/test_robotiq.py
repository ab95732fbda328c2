"""A Robotiq 2F, from its bytes on a pseudo-terminal to the arm that it stops."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from robotiq_device import CLOSED, OPEN, RobotiqDevice, crc

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.device_checks import gripper_report, watch_devices
from embodyrl.real_robot.control.limits import MAX_WIDTH
from embodyrl.real_robot.control.messages import Mode, RobotState, Target
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.grippers import modbus
from embodyrl.real_robot.grippers.robotiq import (
    GONE,
    Robotiq,
    RobotiqGripper,
    read_status,
)
from embodyrl.real_robot.libfranka.config import load_arm
from embodyrl.real_robot.serial_port import SerialPort

SAFETY = load_arm("")[1]


@pytest.fixture
def device(tmp_path: Path) -> Iterator[RobotiqDevice]:
    device = RobotiqDevice(tmp_path / "robotiq")
    yield device
    device.unplug()


@pytest.fixture
def gripper(device: RobotiqDevice) -> Iterator[Robotiq]:
    gripper = Robotiq(RobotiqGripper(str(device.path)), 0.1, 40.0)
    yield gripper
    gripper.close()


def until(holds: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_bytes_are_those_of_the_manual() -> None:
    """Robotiq's examples: set the activation, close with full speed and force, read the status."""
    write = lambda *values: modbus.write_request(9, 0x03E8, values)  # noqa: E731
    assert write(0, 0, 0) == bytes.fromhex("091003E80003060000000000007330")
    assert write(0x0100, 0, 0) == bytes.fromhex("091003E800030601000000000072E1")
    assert write(0x0900, 0x00FF, 0xFFFF) == bytes.fromhex("091003E8000306090000FFFFFF4229")
    assert write(0x0900, 0x0000, 0xFFFF) == bytes.fromhex("091003E800030609000000FFFF7219")
    assert modbus.read_request(9, 0x07D0, 1) == bytes.fromhex("090307D0000185CF")
    assert modbus.read_request(9, 0x07D0, 3) == bytes.fromhex("090307D00003040E")
    for data in (b"", b"\x09", bytes(range(40))):  # the device's own arithmetic is another one
        assert modbus.with_crc(data)[len(data) :] == crc(data)


def test_it_moves_at_its_speed_and_stops_at_a_thing(
    device: RobotiqDevice, gripper: Robotiq
) -> None:
    assert gripper.measured()[1] == pytest.approx(MAX_WIDTH)
    gripper.move(0.0)
    until(lambda: gripper.measured()[1] < 0.06)
    between = gripper.measured()[1]
    assert 0.0 < between < 0.06  # on its way: it takes time
    until(lambda: gripper.measured()[1] == 0.0)
    # 0.1 m/s of 0.02 to 0.15, 40 N of 20 to 235; as far as it goes.
    assert device.written[-1] == bytes([0x09, 0, 0, 255, 157, 24])
    gripper.move(MAX_WIDTH)
    until(lambda: gripper.measured()[1] == pytest.approx(MAX_WIDTH))
    assert device.written[-1][3] == 0
    gripper.move(0.04)
    until(lambda: abs(gripper.measured()[1] - 0.04) < 0.0005)
    # A thing of 3 cm keeps it open by that much.
    device.thing = round(CLOSED - 0.03 / MAX_WIDTH * (CLOSED - OPEN))
    gripper.move(0.0)
    until(lambda: device.object == 2)
    until(lambda: abs(gripper.measured()[1] - 0.03) < 0.0005)
    assert gripper.trouble() == ""
    with pytest.raises(UserError, match="not finite"):
        gripper.move(math.nan)


def test_of_many_commands_the_newest_counts(device: RobotiqDevice, gripper: Robotiq) -> None:
    for k in range(200):
        gripper.move(MAX_WIDTH * (k % 7) / 7)
    gripper.move(0.02)
    until(lambda: abs(gripper.measured()[1] - 0.02) < 0.0005)
    assert len(device.written) < 50


@pytest.mark.parametrize("noise", ["crc", "short", "late", "refuses", "other", "silent"])
def test_a_bad_answer_now_and_then_is_survived_and_the_command_arrives(
    device: RobotiqDevice, gripper: Robotiq, noise: str
) -> None:
    device.noise, device.every = noise, 3
    gripper.move(0.01)
    until(lambda: abs(gripper.measured()[1] - 0.01) < 0.0005)
    assert gripper.trouble() == ""


@pytest.mark.parametrize(
    ("noise", "told"),
    [
        ("crc", "CRC"),
        ("short", r"9 of 11 bytes"),
        ("late", "did not answer within 100 ms"),
        ("refuses", "refused .code 2.: it has no such register"),
        ("other", "device 10 answered"),
        ("silent", "did not answer within 100 ms"),
    ],
)
def test_a_gripper_that_stops_answering_is_a_named_fault(
    device: RobotiqDevice, gripper: Robotiq, noise: str, told: str
) -> None:
    device.noise = noise
    # On a busy machine some of its answers are late besides.
    said = re.compile(f"the Robotiq 2f_85 at .* did not answer for .* s .*{told}")
    until(lambda: said.search(gripper.trouble()))
    # It is trusted again when it answers.
    device.noise = ""
    until(lambda: not gripper.trouble())


def test_unplugged_and_plugged_in_again(device: RobotiqDevice, gripper: Robotiq) -> None:
    device.unplug()
    # A busy machine may first notice that no answer comes.
    until(lambda: "its port cannot be used" in gripper.trouble())
    device.plug()
    until(lambda: not gripper.trouble())
    gripper.move(0.02)
    until(lambda: abs(gripper.measured()[1] - 0.02) < 0.0005)


@pytest.mark.parametrize(
    ("code", "told"), [(0x0E, "fault 0E: its current was too high"), (0x0A, "below 22 V")]
)
def test_its_own_faults_are_named(
    device: RobotiqDevice, gripper: Robotiq, code: int, told: str
) -> None:
    device.fault = code
    until(gripper.trouble)
    assert told in gripper.trouble()


def test_a_passing_fault_is_none(device: RobotiqDevice, gripper: Robotiq) -> None:
    device.fault = 0x09
    answered = device.answered
    until(lambda: device.answered > answered + 3)
    assert gripper.trouble() == ""


def test_it_is_activated_only_where_that_is_allowed(tmp_path: Path) -> None:
    device = RobotiqDevice(tmp_path / "new", active=False)
    config = RobotiqGripper(str(device.path))
    with pytest.raises(UserError, match=r"open and close once.*activate: true"):
        Robotiq(config, 0.1, 40.0)
    assert not device.written  # nothing moved
    gripper = Robotiq(replace(config, activate=True), 0.1, 40.0)
    assert [w[0] for w in device.written] == [0x00, 0x01] and device.active
    # Switched off and on it is not activated while it may hold something.
    device.switch_off_and_on()
    until(gripper.trouble)
    assert "switched off and on" in gripper.trouble() and len(device.written) == 2
    gripper.close()
    device.unplug()


def test_what_cannot_be_connected_is_said(tmp_path: Path, device: RobotiqDevice) -> None:
    with pytest.raises(UserError, match=r"none: its port cannot be used .No such file"):
        Robotiq(RobotiqGripper(str(tmp_path / "none")), 0.1, 40.0)
    device.noise = "silent"
    with pytest.raises(UserError, match="did not answer within 100 ms"):
        Robotiq(RobotiqGripper(str(device.path)), 0.1, 40.0)
    device.noise, device.fault = "", 0x0D
    with pytest.raises(UserError, match="activation failed"):
        Robotiq(RobotiqGripper(str(device.path)), 0.1, 40.0)


def test_it_stops_the_arm(device: RobotiqDevice, gripper: Robotiq) -> None:
    """As ``LibfrankaRobot.state`` puts it into the state: the safety filter goes to FAULT."""
    q = kinematics.HOME
    guard = SafetyFilter(replace(SAFETY, max_force=None))
    here = kinematics.forward(q)

    def tick(now: float, width: float, trouble: str) -> Mode:
        state = RobotState(now, q, np.zeros(7), width, trouble=trouble)
        guard.tick(now, state, Target(now, here[0], here[1], 0.0))
        return guard.mode

    def begin() -> None:
        guard.start(0.0, RobotState(0.0, q, np.zeros(7), gripper.measured()[1]))
        guard.run(0.0)

    begin()
    assert tick(0.01, gripper.measured()[1], gripper.trouble()) == Mode.RUN
    device.noise = "silent"
    until(gripper.trouble)
    assert tick(0.02, gripper.measured()[1], gripper.trouble()) == Mode.FAULT
    assert "the Robotiq 2f_85" in guard.reason and "did not answer" in guard.reason
    guard.clear(0.03, RobotState(0.03, q, np.zeros(7)))
    begin()
    assert tick(0.01, math.nan, "") == Mode.FAULT and "opening of the gripper" in guard.reason


def test_pre_flight_measures_its_rate(device: RobotiqDevice, gripper: Robotiq) -> None:
    assert "measurements/s" in gripper_report(gripper, watch_devices({}, gripper)[1])
    device.noise, device.every = "late", 2
    with pytest.raises(UserError, match="times in a second, and 10 are needed"):
        gripper_report(gripper, watch_devices({}, gripper)[1])
    device.every = 1
    time.sleep(GONE + 0.3)
    with pytest.raises(UserError, match="cannot be trusted"):
        gripper_report(gripper, watch_devices({}, gripper)[1])


def test_the_robots_file_chooses_it(tmp_path: Path) -> None:
    file = tmp_path / "arm.yaml"
    safety = "safety: {box_low: [0.3, -0.3, 0.0], box_high: [0.7, 0.3, 0.5]}\n"

    def arm(gripper: str, more: str = "") -> object:
        file.write_text(f"libfranka: {{gripper: {gripper}{more}}}\n{safety}")
        return load_arm(str(file))[0].gripper

    assert arm("true") is True and arm("false") is False and arm("{kind: franka_hand}") is True
    found = arm("{kind: robotiq, port: /dev/ttyUSB1, model: 2f_140}", ", gripper_speed: 0.2")
    assert found == RobotiqGripper("/dev/ttyUSB1", "2f_140")
    for given, more, told in (
        ("{kind: robotic}", "", "Did you mean 'robotiq'"),
        ("hand", "", "has no kind 'hand'"),
        ("{kind: robotiq, prot: x}", "", "no key 'prot'"),
        ("{kind: robotiq, model: 2f_90}", "", "2f_85"),
        ("{kind: robotiq, counts: [228, 3]}", "", "the position when open comes first"),
        ("{kind: robotiq, baud: 115201}", "", "serial ports have"),
        ("{kind: robotiq}", ", gripper_speed: 0.2", r"gripper_speed is 0.2.*0.15.*Robotiq 2f_85"),
        ("{kind: robotiq}", ", gripper_force: 10.0", r"gripper_force is 10.*20 to 235"),
        ("{kind: franka_hand, force: 5}", "", "gripper_force"),
        ("true", ", gripper_speed: 0.2", "Franka's hand can do nothing else"),
    ):
        with pytest.raises(UserError, match=told):
            arm(given, more)


def test_its_status_is_read_as_the_manual_has_it(device: RobotiqDevice) -> None:
    port = SerialPort(str(device.path), 115200)
    try:
        device.thing = 0xBD
        modbus.write_registers(port, 9, 0x03E8, [0x0900, 0xFF, 0xFFFF], 1.0)
        until(lambda: device.object == 2)
        status = read_status(port, 9)
        assert (status.state, status.object, status.fault, status.position) == (3, 2, 0, 0xBD)
    finally:
        port.close()
