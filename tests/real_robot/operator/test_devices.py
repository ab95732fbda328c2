"""Gamepad and SpaceMouse: from the bytes that the kernel and the device really send to the arm."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodyrl.errors import UserError
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import VirtualInference
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.operator.device_operator import DeviceOperator
from embodyrl.real_robot.operator.devices import Gamepad, SpaceMouse, open_device
from embodyrl.real_robot.ros.config import load_robot
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig

A, B, BACK, START, AXIS, BUTTON, INITIAL = 0, 1, 6, 7, 2, 1, 0x80
SPACE, SAFETY = SPACES["mujoco", "ee_delta_pos"], load_robot("")[1]


class Pad:
    """A gamepad's file, of which this is the kernel's end."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "js0"
        os.mkfifo(self.path)
        self.end = os.open(self.path, os.O_RDWR)
        for number in range(8):  # what a driver says when it is opened
            self.send(AXIS | INITIAL, number, 0)

    def send(self, kind: int, number: int, value: int) -> None:
        os.write(self.end, struct.pack("IhBB", 0, value, kind, number))


@pytest.fixture
def pad(tmp_path: Path) -> Iterator[Pad]:
    pad = Pad(tmp_path)
    yield pad
    os.close(pad.end)


def until(holds: Callable[[], Any]) -> Any:
    end = time.monotonic() + 20.0
    while not (found := holds()):
        assert time.monotonic() < end
        time.sleep(0.005)
    return found


def test_a_gamepads_sticks_and_buttons(pad: Pad) -> None:
    gamepad = open_device(str(pad.path))
    assert not gamepad.read().motion.any()
    pad.send(AXIS, 1, -32767)  # left stick up
    pad.send(AXIS, 0, 16384)  # and right
    pad.send(AXIS, 2, 32767)  # a trigger: nothing
    pad.send(BUTTON, A, 1)
    os.write(pad.end, struct.pack("IhBB", 0, -32767, AXIS, 4)[:5])  # half an event
    reading = gamepad.read()
    np.testing.assert_allclose(reading.motion, [1.0, -0.5, 0.0, 0.0, 0.0, 0.0], atol=1e-3)
    assert reading.pressed == {"fingers"}
    os.write(pad.end, struct.pack("IhBB", 0, -32767, AXIS, 4)[5:])
    assert gamepad.read().motion[2] == 1.0
    gamepad.close()


def test_a_file_that_ends_is_a_device_that_is_gone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "js0")
    gamepad = Gamepad(str(tmp_path / "js0"))
    with pytest.raises(OSError, match="gone"):
        gamepad.read()
    with pytest.raises(UserError, match="There is no gamepad at /nowhere"):
        open_device("/nowhere")
    with pytest.raises(UserError, match="There is no device 'mouse'"):
        open_device("mouse")


def test_who_pushes_takes_over_and_who_goes_away_no_longer_moves(pad: Pad) -> None:
    person = DeviceOperator(Gamepad(str(pad.path)))
    pad.send(AXIS, 1, -3000)  # a stick that does not quite come back
    time.sleep(0.1)
    assert person.wishes() == [] and not person.action(4)[:3].any()
    pad.send(AXIS, 1, -32767)
    assert until(person.wishes) == ["takeover"]
    np.testing.assert_allclose(person.action(4), [0.4, 0.0, 0.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(person.action(7), [0.4, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0], atol=1e-6)
    person.show({"mode": "human"}, {})
    for button, wish in ((START, "release"), (BACK, "hold"), (B, "estop")):
        pad.send(BUTTON, button, 1)
        assert until(person.wishes) == [wish]
    pad.send(BUTTON, A, 1)
    until(lambda: person.action(4)[3] == -1.0)
    assert person.alive(0.0)
    person.show({"mode": "hold", "open": False}, {})
    pad.send(BUTTON, START, 0)
    time.sleep(0.1)
    pad.send(BUTTON, START, 1)
    assert until(person.wishes) == ["run"] and person.action(4)[3] == -1.0
    # Unplugged.
    os.dup2(os.open("/dev/null", os.O_RDONLY), person._device._file)  # type: ignore[attr-defined]
    until(lambda: not person.alive(0.0))
    assert not person.action(4)[:3].any()
    person.close()


class Reports:
    """The reports of a SpaceMouse in place of its USB cable."""

    def __init__(self) -> None:
        self.waiting: list[bytes] = []

    def read(self, size: int) -> bytes:
        return self.waiting.pop(0)[:size] if self.waiting else b""

    def close(self) -> None:
        pass


@pytest.mark.parametrize("model", ["SpaceMouseCompact", "SpaceMouseWireless"])
def test_a_spacemouses_reports(model: str) -> None:
    """By pyspacemouse's own table and parser."""
    pyspacemouse = pytest.importorskip("pyspacemouse", exc_type=ImportError)
    from pyspacemouse.config_helpers import apply_axis_convention
    from pyspacemouse.loader import get_device_specs

    info, cable = get_device_specs()[model], Reports()
    info = apply_axis_convention(info, pyspacemouse.AxisConvention.ROS)
    mouse = SpaceMouse(pyspacemouse.SpaceMouseDevice(info, cable))
    assert not mouse.read().motion.any() and not mouse.read().pressed
    # Pushed away from the user, and up; turned to the left: HID's y and z come towards the user and
    # down.
    push, turn = struct.pack("<3h", 0, -350, -175), struct.pack("<3h", 0, 0, -350)
    together = len({spec.channel for spec in info.mappings.values()}) == 1
    cable.waiting = [b"\x01" + push + turn] if together else [b"\x01" + push, b"\x02" + turn]
    np.testing.assert_allclose(mouse.read().motion, [1.0, 0.0, 0.5, 0.0, 0.0, 1.0], atol=1e-6)
    cable.waiting = [b"\x03\x02" + bytes(5)]
    assert mouse.read().pressed == {"on"}
    mouse.close()


def test_a_person_with_a_gamepad_moves_the_arm_within_its_limits(pad: Pad, tmp_path: Path) -> None:
    twin = MujocoTwin(MujocoConfig(task="reach", cameras=(), renderer="none", split="eval"))
    twin.begin(0)
    person, guard = DeviceOperator(Gamepad(str(pad.path))), SafetyFilter(SAFETY)
    still = {"actions": np.tile(np.array([0, 0, 0, 1], np.float32), (8, 1))}
    executor = Executor(
        ExecutorConfig(8, 4, 12.5, "naive"), VirtualInference(lambda seen: still, lambda took: 0.02)
    )
    decoder, log = (
        DeltaDecoder(SPACE, 12.5, SAFETY.box_low, SAFETY.box_high),
        RunLog(tmp_path / "a.mcap", {}, 0.0),
    )

    todo = [
        (0.5, (AXIS, 1, -32767)), (1.5, (AXIS, 1, 0)),
        (1.6, (BUTTON, START, 1)), (1.8, (BUTTON, START, 0)),
        (2.0, (BUTTON, START, 1)), (2.5, (BUTTON, 3, 1)),
    ]  # fmt: skip

    class Clock:
        """The twin's, in which the person does something at its time."""

        def now(self) -> float:
            return twin.now()

        def sleep_until(self, stamp: float) -> None:
            while todo and todo[0][0] < stamp:
                pad.send(*todo.pop(0)[1])
                time.sleep(0.1)  # the device's thread has looked
            twin.sleep_until(stamp)

    hand = twin.state().q
    episode = drive(twin, Clock(), guard, executor, decoder, log, seconds=30.0, operator=person)
    log.close()
    person.close()
    assert (
        episode.solved
        and episode.reason == "a person said success"
        and max(episode.peak.values()) <= 1.0
    )
    messages = read(tmp_path / "a.mcap")
    texts = " | ".join(m["text"] for m in messages["/event"])
    assert "run -> human: taken over" in texts and "human -> hold: a person let go" in texts, texts
    assert guard.mode == Mode.HOLD
    assert 10 <= episode.human <= 16 and np.abs(twin.state().q - hand).max() > 0.1
    modes = {c["mode"] for c in messages["/command"]}
    assert {"run", "human", "hold"} <= modes
    twin.close()
