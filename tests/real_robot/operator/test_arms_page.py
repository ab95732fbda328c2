"""One page for several arms: simulated ones in the wall clock's time, and a real Chromium."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from embodyrl.errors import UserError
from embodyrl.real_robot.control import kinematics
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.clocks import PacedClock, RealClock
from embodyrl.real_robot.control.episode import RobotEpisode
from embodyrl.real_robot.control.executor import Executor, ExecutorConfig
from embodyrl.real_robot.control.inference import ThreadInference
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.operator import HOLDS, LOST, WISHES
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.ticker import drive
from embodyrl.real_robot.env.robot_env import RobotConfig, RobotEnv
from embodyrl.real_robot.operator.arm_link import LATE, ArmLink
from embodyrl.real_robot.operator.arm_state import check_status
from embodyrl.real_robot.operator.arms_page import ArmsPage
from embodyrl.real_robot.parsing import MessageError
from embodyrl.real_robot.ports import listen
from embodyrl.real_robot.ros.config import load_robot
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig

H, HZ = 8, 12.5
SPACE, SAFETY = SPACES["mujoco", "ee_delta_pos"], load_robot("")[1]
TOKEN = "0123456789abcdef"
WHY = "after 24 actions the episode looks unlike those that succeed (float: 4.1, above 2.3)"
STATUS: dict[str, Any] = {
    "mode": "run", "reason": "the policy moves the arm", "open": True, "can": WISHES,
    "task": "pick up the red block", "numbers": {"time": "3.0 of 90 s"}, "events": [], "asks": "",
}  # fmt: skip


def until(holds: Callable[[], Any], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def page() -> Iterator[ArmsPage]:
    page = ArmsPage(port=0)
    yield page
    page.close()


class Person:
    """What a browser sends, without one, and what it was last shown of each arm."""

    def __init__(self, socket: ClientConnection, page: ArmsPage) -> None:
        self.socket = socket
        self._rows: dict[str, Any] = {}
        socket.send(page.address.split("#")[1])
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                data = self.socket.recv()
                if isinstance(data, str):
                    rows = json.loads(data)["status"]["arms"]
                    self._rows = {row["name"]: row for row in rows}

    def do(self, wish: str, arm: str = "") -> None:
        self.socket.send(json.dumps({"do": wish, "arm": arm}))

    def keys(self, held: str, arm: str) -> None:
        self.socket.send(json.dumps({"keys": list(held), "open": True, "arm": arm}))

    def rows(self) -> dict[str, Any]:
        """By the name of the arm."""
        return self._rows

    def linked(self, arm: str) -> bool:
        return bool(self._rows.get(arm, {}).get("linked"))


@pytest.fixture
def person(page: ArmsPage) -> Iterator[Person]:
    own: Any = f"http://127.0.0.1:{page.port}"
    with connect(f"ws://127.0.0.1:{page.port}/socket", origin=own, max_size=None) as link:
        yield Person(link, page)


@pytest.fixture
def join(page: ArmsPage) -> Iterator[Callable[[str], ArmLink]]:
    links = []

    def join(name: str) -> ArmLink:
        links.append(ArmLink(RealClock(), f"ws://127.0.0.1:{page.port}/{name}"))
        return links[-1]

    yield join
    for link in links:
        link.close()


Join = Callable[[str], ArmLink]


def heard(link: ArmLink, seconds: float = 20.0) -> list[str]:
    """The next wishes that an arm hears."""
    found: list[str] = []
    until(lambda: found.extend(link.wishes()) or found, seconds)
    return found


def obeyed(person: Person, wish: str, name: str, link: ArmLink) -> None:
    """Asks until the arm hears it: on a busy machine a wish may come late, and is then dropped."""
    for _ in range(20):
        person.do(wish, name)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            if found := link.wishes():
                assert set(found) == {wish}
                return
            time.sleep(0.01)
    raise AssertionError(f"{name} never heard {wish}")


def test_arms_wait_in_the_order_in_which_they_asked(
    page: ArmsPage, person: Person, join: Join
) -> None:
    links = {name: join(name) for name in ("a", "b", "c")}
    for name in ("c", "a", "b"):
        links[name].show(STATUS | {"asks": WHY}, {})
        until(lambda name=name: name in page.queue())
    assert page.queue() == ["c", "a", "b"]
    until(lambda: set(person.rows()) == {"a", "b", "c"})
    # Another reason does not send an arm to the end of the queue.
    links["c"].show(STATUS | {"asks": "a person said hold"}, {})
    until(lambda: person.rows()["c"]["asks"] == "a person said hold")
    assert page.queue() == ["c", "a", "b"]
    rows = person.rows()
    assert (
        rows["c"]["waits"] > rows["a"]["waits"] > rows["b"]["waits"] > 0
        and rows["a"]["asks"] == WHY
    )
    links["c"].show(STATUS, {})
    until(lambda: page.queue() == ["a", "b"])


def test_keys_and_wishes_are_for_one_arm_and_a_stop_is_for_all(
    page: ArmsPage, person: Person, join: Join
) -> None:
    left, right = join("left"), join("right")
    until(lambda: person.linked("left") and person.linked("right"))
    obeyed(person, "takeover", "left", left)
    until(lambda: person.keys("wq", "left") or left.alive(time.monotonic()))
    assert left.action(4).tolist() == pytest.approx([0.4, 0.0, 0.0, 1.0])
    assert not right.alive(time.monotonic()) and right.wishes() == []
    # Whoever takes over another arm lets go of the first, which is held.
    obeyed(person, "takeover", "right", right)
    assert set(heard(left)) == {"hold"}
    obeyed(person, "release", "right", right)
    obeyed(person, "takeover", "left", left)
    assert right.wishes() == []  # it was let go before
    person.do("estop")
    assert (heard(left), heard(right)) == (["estop"], ["estop"])
    # Without a word of the page no key moves an arm.
    until(lambda: not left.alive(time.monotonic()))


def test_an_arm_that_is_away_is_named_and_stopped_when_it_comes_back(
    page: ArmsPage, person: Person, join: Join
) -> None:
    join("right")
    code = (
        "import sys, time\n"
        "from embodyrl.real_robot.control.clocks import RealClock\n"
        "from embodyrl.real_robot.operator.arm_link import ArmLink\n"
        "link = ArmLink(RealClock(), sys.argv[1])\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, f"ws://127.0.0.1:{page.port}/left"])
    try:
        until(lambda: person.linked("left"), 120.0)
        with pytest.raises(UserError, match="there is an arm left at 127"):
            join("left")
    finally:
        process.kill()
        process.wait()
    until(lambda: "left" in person.rows() and not person.linked("left"))
    assert page.queue() == ["left"] and "no link" in person.rows()["left"]["asks"]
    until(lambda: person.linked("right"))
    person.do("estop")
    left = join("left")
    assert heard(left) == ["estop"]
    until(lambda: person.linked("left") and page.queue() == [])
    left.close()  # one that says goodbye is gone
    until(lambda: set(person.rows()) == {"right"})


def test_an_arm_whose_link_is_lost_holds_and_joins_again(page: ArmsPage) -> None:
    link = ArmLink(RealClock(), f"ws://127.0.0.1:{page.port}/left")
    try:
        page.close()
        assert heard(link) == [LOST] and LOST in HOLDS and LOST not in WISHES
        again = ArmsPage(port=page.port)
        try:
            link.show(STATUS | {"asks": HOLDS[LOST]}, {})
            until(lambda: again.queue() == ["left"])
            assert link.wishes() == []
        finally:
            again.close()
    finally:
        link.close()
    with pytest.raises(UserError, match=r"No page of several arms answers at .*embodyrl operator"):
        ArmLink(RealClock(), f"ws://127.0.0.1:{page.port}/left")


def test_what_comes_late_is_not_obeyed_unless_it_is_a_stop() -> None:
    told: list[dict[str, Any]] = []

    def talk(connection: Any) -> None:
        connection.send("{}")
        stamp = json.loads(connection.recv())["stamp"]
        time.sleep(2 * LATE)
        for message in told:
            connection.send(json.dumps({**message, "stamp": stamp}))
        with contextlib.suppress(ConnectionClosed):
            while True:
                connection.recv()

    told += [{"do": "takeover"}, {"keys": ["w"], "open": True}, {"do": "run"}, {"do": "estop"}]
    server = listen(talk, "127.0.0.1", 0, what="A slow page")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    link = ArmLink(RealClock(), f"ws://127.0.0.1:{server.socket.getsockname()[1]}/left")
    assert heard(link) == ["estop"] and not link.alive(time.monotonic())
    link.close()
    server.shutdown()


def test_who_may_come_in(page: ArmsPage) -> None:
    base = f"ws://127.0.0.1:{page.port}"
    own: Any = f"http://127.0.0.1:{page.port}"
    for path, origin in (("/socket", None), ("/left", own), ("/socket", "http://evil.example")):
        with pytest.raises(InvalidStatus, match="403"), connect(base + path, origin=origin):
            pass
    with connect(f"{base}/socket", origin=own) as guessed:
        guessed.send("guessed")
        with pytest.raises(ConnectionClosed, match="4001"):
            guessed.recv()
    with pytest.raises(UserError, match="Give a token"):
        ArmsPage("0.0.0.0", 0)
    closed = ArmsPage("0.0.0.0", 0, TOKEN)
    try:
        with pytest.raises(UserError, match="401"):
            ArmLink(RealClock(), f"ws://127.0.0.1:{closed.port}/left")
        ArmLink(RealClock(), f"ws://127.0.0.1:{closed.port}/left", TOKEN).close()
        origin: Any = f"http://127.0.0.1:{closed.port}"
        with connect(f"ws://127.0.0.1:{closed.port}/socket", origin=origin):
            pass
        # The page itself is not for other machines, whoever asks.
        address = socket.gethostbyname(socket.gethostname())
        if not address.startswith("127."):
            elsewhere: Any = f"http://{address}:{closed.port}"
            at = f"ws://{address}:{closed.port}/socket"
            with pytest.raises(InvalidStatus, match="403"), connect(at, origin=elsewhere):
                pass
    finally:
        closed.close()


@pytest.mark.parametrize(
    "data",
    ["[", "[]", "{}", '{"stamp": "x"}', '{"stamp": NaN}', b"\xff\xd8\xff not announced",
     json.dumps({"stamp": 1.0, "status": 3, "cameras": []}),
     json.dumps({"stamp": 1.0, "status": STATUS, "cameras": ["c"] * 9}),
     json.dumps({"stamp": 1.0, "status": STATUS | {"mode": 3}, "cameras": []})],
)  # fmt: skip
def test_an_arm_that_sends_nonsense_is_cut_off_and_the_others_go_on(
    page: ArmsPage, person: Person, join: Join, data: Any
) -> None:
    join("right")
    with connect(f"ws://127.0.0.1:{page.port}/left") as bad:
        bad.recv(timeout=20.0)
        bad.send(data)
        with pytest.raises(ConnectionClosed, match="4002"):
            while True:
                bad.recv(timeout=20.0)
    until(lambda: "left" in person.rows() and not person.linked("left"))
    until(lambda: person.linked("right"))


def test_a_status_is_read_field_by_field() -> None:
    long = check_status(STATUS | {"reason": "x" * 9999, "extra": 1, "can": ["run", "format c:"]})
    assert len(long["reason"]) == 512 and long["can"] == ["run"] and "extra" not in long
    for wrong in ({"numbers": {"a": 1}}, {"events": [3]}, {"numbers": []}, {"mode": "x" * 17}):
        with pytest.raises(MessageError):
            check_status(STATUS | wrong)


def test_an_arm_that_learns_asks_when_its_episode_is_overdue(
    page: ArmsPage, person: Person
) -> None:
    """``RobotEnv`` holds still, waits for the person, and goes on; the other arm is not asked."""
    env = RobotEnv(
        RobotConfig(
            task="reach", cameras=(), renderer="none", max_episode_steps=20, overdue=0.5,
            operator_page=f"ws://127.0.0.1:{page.port}/left",
        )
    )  # fmt: skip
    import torch

    try:
        env.reset(init=[0])
        still = torch.zeros(1, 10, env.spec.action_dim)
        done = threading.Event()
        result: list[Any] = []

        def play() -> None:
            result.append(env.step(still))
            done.set()

        threading.Thread(target=play, daemon=True).start()
        until(lambda: page.queue() == ["left"])
        asks = "overdue: 50% of the episode is over, and it is not solved"
        until(lambda: person.rows().get("left", {}).get("asks") == asks)
        assert not done.wait(0.5)
        for _ in range(60):
            person.do("run", "left")
            if done.wait(1.0):
                break
        assert done.is_set() and not result[0].human.any()
        until(lambda: page.queue() == [])
        env.step(still[:, :5])  # not asked twice in an episode
        assert page.queue() == []
    finally:
        env.close()
    until(lambda: person.rows() == {})
    bad: list[dict[str, Any]] = [
        {"overdue": 0.5},
        {"operator": 0, "operator_page": "ws://127.0.0.1:1/left"},
        {"operator_token": "x"},
        {"operator": 0, "corrector": 3},
    ]
    for wrong in bad:
        with pytest.raises(UserError, match=r"env\.operator"):
            RobotEnv(RobotConfig(task="reach", cameras=(), renderer="none", **wrong))


# ---- In a browser.


class Arm:
    """A simulated arm with an episode in a thread of its own, on the page."""

    def __init__(self, page: ArmsPage, name: str, init: int, asks_at: float) -> None:
        self.name = name
        self.asks_at = asks_at
        self.twin = MujocoTwin(MujocoConfig(task="pick", cameras=("front", "wrist"), split="eval"))
        self.twin.begin(init)
        self.clock = PacedClock(self.twin)
        self.guard = SafetyFilter(SAFETY)
        self.link = ArmLink(self.clock, f"ws://127.0.0.1:{page.port}/{name}")
        self.inference = ThreadInference(self.sway)
        self.executor = Executor(ExecutorConfig(H, 4, HZ, "naive"), self.inference)
        self.episode: RobotEpisode | None = None
        self.thread = threading.Thread(target=self._drive)
        self.thread.start()

    def sway(self, observation: dict[str, Any]) -> dict[str, Any]:
        """Slowly to the left and to the right; at its time it asks for a person."""
        way = 0.25 if observation["proprio"][4] < 0.0 else -0.25
        answer = {"actions": np.tile(np.array([0.0, way, 0.0, 1.0], np.float32), (H, 1))}
        if self.twin.now() > self.asks_at:
            self.asks_at = np.inf
            return {**answer, "ask": WHY}
        return answer

    def _drive(self) -> None:
        decoder = DeltaDecoder(SPACE, HZ, SAFETY.box_low, SAFETY.box_high)
        self.episode = drive(
            self.twin, self.clock, self.guard, self.executor, decoder,
            seconds=900.0, operator=self.link,
        )  # fmt: skip

    def hand(self) -> np.ndarray:
        return np.array(kinematics.tip(self.twin.data.qpos[:7].tolist()))

    def close(self) -> None:
        if self.thread.is_alive():
            self.link._wishes.put("failure")
            self.thread.join(timeout=30.0)
        self.link.close()
        self.inference.close()
        self.twin.close()


def test_a_page_without_an_arm_says_how_one_joins(page: ArmsPage, chromium: Any) -> None:
    context = chromium.new_context(viewport={"width": 390, "height": 844})
    context.set_default_timeout(120e3)
    tab = context.new_page()
    tab.goto(page.address)
    where = f"--operator ws://127.0.0.1:{page.port}/NAME"
    tab.wait_for_function(f"document.querySelector('#reason').textContent.includes({where!r})")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    context.close()


def test_a_person_helps_one_arm_while_the_others_go_on(page: ArmsPage, chromium: Any) -> None:
    names = os.environ.get("EMBODYRL_ARMS", "left,right").split(",")
    arms = {name: Arm(page, name, k, 2.0 if k == 1 else np.inf) for k, name in enumerate(names)}
    left, right = arms[names[0]], arms[names[1]]
    context = chromium.new_context(viewport={"width": 1280, "height": 860})
    context.set_default_timeout(120e3)
    wrong: list[str] = []
    tab = context.new_page()
    tab.on("console", lambda m: wrong.append(f"{m.type}: {m.text}"))
    tab.on("pageerror", lambda e: wrong.append(str(e)))

    def picture(name: str) -> None:
        if folder := os.environ.get("EMBODYRL_PICTURES"):
            tab.screenshot(path=f"{folder}/{name}.png")

    def seen(holds: Callable[[], Any], seconds: float = 120.0) -> None:
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, (left.guard.mode, right.guard.mode, right.guard.reason)
            tab.wait_for_timeout(20)

    def insist(act: Callable[[], None], holds: Callable[[], Any]) -> None:
        """Acts until it holds: on a busy machine an arm may rightly have stopped after the key."""
        end = time.monotonic() + 120.0
        while not holds():
            assert time.monotonic() < end, (left.guard.mode, right.guard.mode, right.guard.reason)
            act()
            again = time.monotonic() + 3.0
            while not holds() and time.monotonic() < again:
                tab.wait_for_timeout(20)

    try:
        tab.goto(page.address)
        sizes = "all => all.map(i => i.naturalWidth)"
        seen(lambda: tab.locator("article img").evaluate_all(sizes) == [64] * 2 * len(names))
        # One arm asks, holds still, and is in the queue with its reason and its time.
        seen(lambda: right.guard.mode == Mode.HOLD and page.queue() == [names[1]])
        said = tab.locator("#queue button").inner_text()
        assert said.startswith(f"{names[1]}, for ") and "unlike those that succeed" in said
        assert right.guard.reason.endswith(WHY)
        picture("arms_queue")
        # The person goes to it and moves it, while the other arm goes on by itself.
        tab.keyboard.press("n")
        seen(lambda: tab.locator("article.chosen").get_attribute("data-arm") == names[1])
        before = right.hand()
        taken = left.executor.counts.taken

        def push() -> None:
            if right.guard.mode != Mode.HUMAN:
                tab.keyboard.up("w")
                tab.keyboard.press("t")
                tab.wait_for_timeout(500)
            tab.keyboard.down("w")

        insist(push, lambda: right.hand()[0] > before[0] + 0.03)
        seen(lambda: left.executor.counts.taken > taken)
        assert left.guard.mode in (Mode.RUN, Mode.HOLD) and "human" not in {
            str(e.after) for e in (left.episode.events if left.episode else [])
        }
        picture("arms_takeover")
        # Another arm is chosen with the key still down: nobody moves then, and no key reaches it.
        tab.click(f'article[data-arm="{names[0]}"]')
        seen(lambda: right.guard.mode == Mode.HOLD)
        assert left.guard.mode != Mode.HUMAN and not left.link._keys.held
        tab.keyboard.up("w")
        # Handed back, it goes on; its turn of the queue is over.
        tab.click(f'article[data-arm="{names[1]}"]')
        done = right.executor.counts.taken
        insist(lambda: tab.keyboard.press("p"), lambda: right.executor.counts.taken > done + 3)
        # One key stops all.
        tab.keyboard.press("Escape")
        seen(lambda: all(arm.guard.mode == Mode.ESTOP for arm in arms.values()))
        seen(lambda: tab.locator("#queue button").count() == len(names))
        picture("arms_stop")
        for key in ("p", "t"):
            tab.keyboard.press(key)
        tab.wait_for_timeout(500)
        assert all(arm.guard.mode == Mode.ESTOP for arm in arms.values())
        tab.click("text=I have looked")
        seen(lambda: right.guard.mode == Mode.HOLD)
        assert left.guard.mode == Mode.ESTOP
        tab.keyboard.press("0")
        right.thread.join(timeout=60.0)
        assert right.episode is not None and right.episode.reason == "a person said failure"
        assert right.episode.human > 3 and max(right.episode.peak.values()) <= 1.0
        assert wrong == []
    finally:
        context.close()
        for arm in arms.values():
            arm.close()
