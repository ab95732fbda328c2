"""The operator's page in a real Chromium, beside the simulated arm in the wall clock's time."""

from __future__ import annotations

import http.client
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.clocks import PacedClock, RealClock
from embodyrl.real_robot.control.episode import RobotEpisode
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import ThreadInference
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.logs.mcap_log import RunLog, read
from embodyrl.real_robot.operator import OperatorPage
from embodyrl.real_robot.ros.config import load_robot
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig

H, HZ = 8, 12.5
SPACE, SAFETY = SPACES["mujoco", "ee_delta_pos"], load_robot("")[1]


@pytest.fixture(scope="module")
def twin() -> Iterator[MujocoTwin]:
    twin = MujocoTwin(MujocoConfig(task="pick", cameras=("front", "wrist"), split="eval"))
    yield twin
    twin.close()


def sway(observation: dict[str, Any]) -> dict[str, Any]:
    """Slowly to the left and to the right."""
    way = 0.25 if observation["proprio"][4] < 0.0 else -0.25
    return {"actions": np.tile(np.array([0.0, way, 0.0, 1.0], np.float32), (H, 1))}


class Scene:
    """An episode in a thread, and its page in a browser."""

    def __init__(self, twin: MujocoTwin, folder: Path, browser: Any, seconds: float) -> None:
        twin.begin(0)
        self.twin, self.clock, self.guard = twin, PacedClock(twin), SafetyFilter(SAFETY)
        self.page = OperatorPage(self.clock)
        self.inference = ThreadInference(sway)
        self.executor = Executor(ExecutorConfig(H, 4, HZ, "naive"), self.inference)
        self.path, self.seconds, self.episode = folder / "run.mcap", seconds, None
        self.log = RunLog(self.path, {}, 0.0)
        self.thread = threading.Thread(target=self._drive)
        self.thread.start()
        self.wrong: list[str] = []
        self.context = browser.new_context(viewport={"width": 1100, "height": 760})
        self.context.set_default_timeout(120e3)  # other programs may keep the processor from it
        self.tab = self.context.new_page()
        self.tab.on("console", lambda m: self.wrong.append(f"{m.type}: {m.text}"))
        self.tab.on("pageerror", lambda e: self.wrong.append(str(e)))
        here = (f"http://127.0.0.1:{self.page.port}", f"ws://127.0.0.1:{self.page.port}", "blob:")
        self.tab.on(
            "request", lambda r: None if r.url.startswith(here) else self.wrong.append(r.url)
        )
        self.tab.goto(self.page.address)

    def _drive(self) -> None:
        decoder = DeltaDecoder(SPACE, HZ, SAFETY.box_low, SAFETY.box_high)
        self.episode: RobotEpisode | None = drive(
            self.twin, self.clock, self.guard, self.executor, decoder, self.log,
            seconds=self.seconds, operator=self.page,
        )  # fmt: skip

    def shows(self, mode: Mode, seconds: float = 120.0) -> None:
        self.tab.wait_for_selector(f"#mode[data-mode={mode}]", timeout=seconds * 1e3)

    def take_over(self) -> None:
        """Asks until a person drives: on a busy machine the arm may have stopped in between."""
        end = time.monotonic() + 120.0
        while self.guard.mode != Mode.HUMAN and time.monotonic() < end:
            self.tab.keyboard.press("t")
            self.tab.wait_for_timeout(2000)
        self.shows(Mode.HUMAN)

    def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, (self.guard.mode, self.guard.reason)
            self.tab.wait_for_timeout(20)

    def insist(self, act: Callable[[], None], holds: Callable[[], bool]) -> None:
        """Acts until it holds: on a busy machine the arm may rightly have stopped after the key."""
        end = time.monotonic() + 120.0
        while not holds():
            assert time.monotonic() < end, (self.guard.mode, self.guard.reason)
            act()
            again = time.monotonic() + 3.0
            while not holds() and time.monotonic() < again:
                self.tab.wait_for_timeout(20)

    def drive_on(self) -> None:
        self.take_over()
        self.tab.keyboard.down("w")

    def grip(self) -> None:
        self.take_over()
        if self.tab.locator("#grip").inner_text() == "open":
            self.tab.keyboard.press(" ")

    def let_go(self) -> None:
        self.take_over()
        self.tab.keyboard.press("g")

    def hand(self) -> np.ndarray:
        return np.array(kinematics.tip(self.twin.data.qpos[:7].tolist()))

    def picture(self, name: str) -> None:
        if folder := os.environ.get("EMBODYRL_PICTURES"):
            self.tab.screenshot(path=f"{folder}/{name}.png")

    def end(self) -> RobotEpisode:
        self.thread.join(timeout=60.0)
        self.log.close()
        assert self.episode is not None and self.wrong == []
        return self.episode

    def close(self) -> None:
        if self.thread.is_alive():
            self.page._wishes.put("failure")
            self.thread.join(timeout=20.0)
            self.log.close()
        self.context.close()
        self.inference.close()
        self.page.close()


@pytest.fixture
def scene(twin: MujocoTwin, tmp_path: Path, chromium: Any) -> Iterator[Scene]:
    scene = Scene(twin, tmp_path, chromium, seconds=600.0)
    yield scene
    scene.close()


def test_cameras_takeover_and_a_label(scene: Scene) -> None:
    scene.shows(Mode.RUN)
    images = scene.tab.locator("img")
    scene.until(lambda: images.evaluate_all("all => all.map(i => i.naturalWidth)") == [64, 64])
    assert "block" in scene.tab.locator("#task").inner_text()
    scene.picture("operator_run")

    before = scene.hand()
    scene.insist(scene.drive_on, lambda: scene.hand()[0] > before[0] + 0.03)
    assert scene.tab.locator(".held kbd").inner_text() == "w"
    scene.picture("operator_takeover")
    scene.tab.keyboard.up("w")
    scene.insist(scene.grip, lambda: scene.twin.state().width < 0.02)

    scene.insist(
        scene.let_go, lambda: scene.tab.locator("#reason").inner_text() == "a person let go"
    )
    scene.shows(Mode.HOLD)
    taken = scene.executor.counts.taken
    scene.insist(
        lambda: scene.tab.keyboard.press("p"), lambda: scene.executor.counts.taken > taken + 3
    )

    scene.tab.keyboard.press("1")
    episode = scene.end()
    assert (episode.solved, episode.reason, episode.mode) == (
        True,
        "a person said success",
        Mode.HOLD,
    )
    assert episode.human > 3 and max(episode.peak.values()) <= 1.0
    messages = read(scene.path)
    human = [m["action"] for m in messages["/action"] if m["human"]]
    assert len(human) == episode.human and [0.4, 0.0, 0.0, 1.0] in [
        np.round(a, 3).tolist() for a in human
    ]
    assert human[-1][3] == -1.0  # closed by the space bar
    texts = " | ".join(m["text"] for m in messages["/event"])
    assert (
        "-> human: taken over" in texts
        and "hold -> run" in texts
        and "human -> hold: a person let go" in texts
    )


def test_a_page_that_nobody_opens_calls_in_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = OperatorPage(RealClock())
    own: Any = f"http://127.0.0.1:{page.port}"
    status = {"mode": "fault", "reason": "reflex: x", "asks": "reflex: x", "events": []}
    try:
        # Once for what it asks, and not for a state that asks for nobody.
        for asks in ("", "reflex: x", "reflex: x", ""):
            page.show({**status, "asks": asks}, {})
        said = capsys.readouterr().out
        assert said.count("Nobody has the page open") == 1
        assert f"the arm waits for a person: reflex: x. Open {page.address}" in said
        # Who has it open sees it there.
        with connect(f"ws://127.0.0.1:{page.port}/socket", origin=own) as link:
            link.send(page.address.split("#")[1])
            page.show({**status, "asks": ""}, {})
            link.recv(timeout=30)
            page.show(status, {})
            assert capsys.readouterr().out == ""
        end = time.monotonic() + 30
        while not (said := capsys.readouterr().out) and time.monotonic() < end:
            page.show(status, {})
            page.show({**status, "asks": ""}, {})
            time.sleep(0.02)
        assert "Nobody has the page open" in said
    finally:
        page.close()


def test_stop_is_left_only_by_who_has_looked(scene: Scene) -> None:
    scene.shows(Mode.RUN)
    scene.until(lambda: np.abs(scene.twin.state().dq).max() > 0.05)
    scene.tab.click("#estop")
    scene.shows(Mode.ESTOP)
    scene.until(lambda: np.abs(scene.twin.state().dq).max() < 0.01)
    scene.picture("operator_stop")
    for key in ("p", "t"):
        scene.tab.keyboard.press(key)
        scene.tab.wait_for_timeout(300)
        assert scene.guard.mode == Mode.ESTOP
    scene.tab.click("text=I have looked")
    scene.shows(Mode.HOLD)
    scene.tab.keyboard.press("p")
    scene.shows(Mode.RUN)
    scene.tab.keyboard.press("0")
    episode = scene.end()
    assert (
        not episode.solved
        and episode.reason == "a person said failure"
        and max(episode.peak.values()) <= 1.0
    )


def test_a_page_that_dies_with_a_key_down_stops_the_arm(scene: Scene) -> None:
    scene.shows(Mode.RUN)

    def driven() -> bool:
        return scene.guard.mode == Mode.HUMAN and bool(np.abs(scene.twin.state().dq).max() > 0.02)

    scene.insist(scene.drive_on, driven)
    scene.wrong.clear()
    scene.tab.close()
    end = time.monotonic() + 120.0
    while scene.guard.mode == Mode.HUMAN and time.monotonic() < end:
        time.sleep(0.02)
    assert scene.guard.mode == Mode.HOLD and scene.guard.reason.startswith("stale: no fresh target")


def test_who_does_not_know_the_token_or_comes_from_elsewhere_is_refused(
    chromium: Any, twin: MujocoTwin
) -> None:
    page = OperatorPage(twin)
    base = f"ws://127.0.0.1:{page.port}/socket"
    try:
        evil: Any = "http://evil.example"
        with pytest.raises(InvalidStatus, match="403"), connect(base, origin=evil):
            pass
        request = http.client.HTTPConnection("127.0.0.1", page.port)
        request.request("GET", "/", headers={"Host": "evil.example"})
        assert request.getresponse().status == 403
        own: Any = f"http://127.0.0.1:{page.port}"
        with connect(base, origin=own) as socket:
            socket.send("guessed")
            with pytest.raises(ConnectionClosed):
                socket.recv()
        context = chromium.new_context()
        tab = context.new_page()
        tab.goto(page.address[:-3])
        tab.wait_for_selector("text=wrong token")
        assert page.wishes() == [] and not page.alive(twin.now())
        context.close()
    finally:
        page.close()
