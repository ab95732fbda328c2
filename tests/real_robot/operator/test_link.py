"""The pages in a real Chromium: a link that is lost, and the screen of a phone."""

import math
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embodyrl
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.control.operator import WISHES
from embodyrl.real_robot.operator import OperatorPage
from embodyrl.real_robot.operator.page import ALIVE

PLAY = Path(embodyrl.__file__).parent / "dreams" / "play.html"  # its module imports torch
PAGES = {"robot": (None, WISHES), "play": (PLAY, ("next", "again", "wake"))}
STATUS = {
    "mode": "run", "reason": "the policy moves the arm", "open": True, "can": WISHES,
    "task": "put the red block, which lies beside the green one, into the drawer at the far left",
    "events": ["1000000.00 s  human -> fault: " + "an_event_with_a_very_long_word" * 6] * 8,
    "numbers": {"hand told to be at (m)": "0.123 -0.456 0.789", "largest share of a limit": "99%"},
    "over": {"dream": "solved", "real": ""},
}  # fmt: skip
IMAGES = {name: np.full((64, 64, 3), 90, np.uint8) for name in ("dream front", "real front")}
SECONDS = 2.0
"""The page says within this time that the link is lost."""
SERVER = """
import sys, time
sys.path.insert(0, sys.argv[4])
from test_link import IMAGES, PAGES, STATUS
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.operator import OperatorPage
page = OperatorPage(RealClock(), int(sys.argv[2]), *PAGES[sys.argv[1]])
page._token = sys.argv[3] or page._token
print(page.port, page._token, flush=True)
while True:
    page.show(STATUS, IMAGES)
    time.sleep(0.1)
"""


class Program:
    """A program in a process of its own that serves a page; killed or stopped by its id."""

    def __init__(self, kind: str, port: int = 0, token: str = "") -> None:
        self.kind = kind
        here = str(Path(__file__).parent)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER, kind, str(port), token, here],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        port_text, self.token = self.process.stdout.readline().split()
        self.port = int(port_text)
        self.address = f"http://127.0.0.1:{self.port}/#{self.token}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(params=PAGES)
def program(request: pytest.FixtureRequest) -> Iterator[Program]:
    program = Program(request.param)
    yield program
    program.end()


@pytest.fixture
def opened(chromium: Any) -> Iterator[Callable[..., Any]]:
    contexts = []

    def open_page(address: str, width: int = 1280, height: int = 800, **settings: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **settings)
        context.set_default_timeout(120e3)  # other programs may keep the processor from it
        contexts.append(context)
        tab = context.new_page()
        tab.goto(address)
        good(tab)
        # When the link changed, by the clock that this process has, too.
        tab.evaluate("""() => new MutationObserver(() => {
            window.changed = [document.body.dataset.link, Date.now() / 1000];
        }).observe(document.body, {attributeFilter: ["data-link"]})""")
        return tab

    yield open_page
    for context in contexts:
        context.close()


def good(tab: Any) -> None:
    tab.wait_for_selector('body[data-link=""]')
    tab.wait_for_selector("#mode:not([data-mode=lost])", state="attached")
    tab.wait_for_function("() => document.querySelectorAll('img').length == 2")


def lost_after(tab: Any, since: float) -> float:
    """The seconds until the page said that the link is lost; what is shown is grey then."""
    tab.wait_for_selector("body[data-link=lost]")
    state, at = tab.evaluate("window.changed")
    assert state == "lost"
    assert tab.locator("#mode").inner_text() == "no link" and tab.locator("#mode").is_visible()
    assert "program does not answer" in tab.locator("#reason").inner_text()
    for shown in ("#cameras", "#task"):
        style = tab.locator(shown).evaluate(
            "e => [getComputedStyle(e).filter, getComputedStyle(e).opacity]"
        )
        assert style == ["grayscale(1)", "0.35"]
    for key in tab.locator("#keys button").all():
        assert key.evaluate("e => getComputedStyle(e).pointerEvents") == "none"
    enabled = tab.locator("button[data-do]:enabled").evaluate_all("all => all.map(b => b.id)")
    assert enabled in ([], ["estop"])
    return at - since


def picture(tab: Any, name: str) -> None:
    if folder := os.environ.get("EMBODYRL_PICTURES"):
        tab.screenshot(path=f"{folder}/{name}.png")


def test_a_killed_program_is_seen_and_so_is_its_return(program: Program, opened: Any) -> None:
    tab = opened(program.address)
    picture(tab, f"{program.kind}_wide")
    times = [math.inf]
    while min(times) > SECONDS and len(times) < 4:  # a busy machine may be late, not three times
        since = time.time()
        program.process.kill()
        times.append(lost_after(tab, since))
        program.process.wait()
        again = Program(program.kind, program.port, program.token)
        program.process = again.process
        good(tab)
    assert min(times) < SECONDS, times
    # A program that was started anew has another token, which the old address does not know.
    program.end()
    lost_after(tab, time.time())
    program.process = Program(program.kind, program.port).process
    tab.wait_for_selector("text=wrong token: open the address that the program printed last")


def test_a_stopped_program_is_seen_and_so_is_its_return(program: Program, opened: Any) -> None:
    tab = opened(program.address)
    times = [math.inf]
    while min(times) > SECONDS and len(times) < 4:
        since = time.time()
        program.process.send_signal(signal.SIGSTOP)
        times.append(lost_after(tab, since))
        picture(tab, f"{program.kind}_lost")
        program.process.send_signal(signal.SIGCONT)
        good(tab)
    assert min(times) < SECONDS, times


class Network:
    """Passes on what comes, until it is ``cut``: then nothing passes, and nothing is closed."""

    def __init__(self, port: int) -> None:
        self.cut = False
        self._to = port
        self._ears = socket.create_server(("127.0.0.1", 0))
        self.port = self._ears.getsockname()[1]
        self._closed = False
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        other: dict[socket.socket, socket.socket] = {}
        while not self._closed:
            if self.cut:
                time.sleep(0.01)
                continue
            for end in select.select([self._ears, *other], [], [], 0.02)[0]:
                if end is self._ears:
                    near = self._ears.accept()[0]
                    far = socket.create_connection(("127.0.0.1", self._to))
                    other |= {near: far, far: near}
                elif end in other:
                    try:
                        data = end.recv(65536)
                        other[end].sendall(data)
                    except OSError:
                        data = b""
                    if not data:
                        partner = other.pop(end)
                        other.pop(partner)
                        end.close()
                        partner.close()
        for end in (self._ears, *other):
            end.close()

    def close(self) -> None:
        self._closed = True


class Loop:
    """Shows something ten times a second, until it ``stands`` still."""

    def __init__(self, page: OperatorPage) -> None:
        self._page = page
        self.stands = False
        self.mode = "run"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        while not self._over.wait(0.1):
            if not self.stands:
                self._page.show({**STATUS, "mode": self.mode}, IMAGES)

    def end(self) -> None:
        self._over.set()
        self._thread.join()


@pytest.fixture
def page() -> Iterator[OperatorPage]:
    """The robot's page, in this process."""
    page = OperatorPage(RealClock())
    yield page
    page.close()


@pytest.fixture
def loop(page: OperatorPage) -> Iterator[Loop]:
    loop = Loop(page)
    yield loop
    loop.end()


@pytest.mark.usefixtures("loop")
def test_a_network_that_is_gone_stops_the_arm_and_brings_no_late_wish(
    page: OperatorPage, opened: Any
) -> None:
    network = Network(page.port)
    clock = RealClock()
    tab = opened(page.address.replace(str(page.port), str(network.port)))

    def until(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 120.0
        while not holds():
            assert time.monotonic() < end
            tab.wait_for_timeout(20)

    try:
        times = [math.inf]
        while min(times) > SECONDS and len(times) < 4:
            tab.keyboard.down("w")
            until(lambda: page.alive(clock.now()) and page.action(4)[0] > 0)
            since = time.time()
            network.cut = True
            times.append(lost_after(tab, since))
            assert not page.alive(clock.now()) and ALIVE < SECONDS
            assert tab.locator(".held").count() == 0
            tab.keyboard.up("w")
            # Only a stop may come late.
            for key in ("p", "t", "1"):
                tab.keyboard.press(key)
            network.cut = False
            good(tab)
            tab.wait_for_timeout(500)
            assert page.wishes() == [] and page.action(4)[0] == 0
        assert min(times) < SECONDS, times
        network.cut = True
        tab.wait_for_selector("body[data-link=lost]")
        tab.keyboard.press("p")
        tab.click("#estop")
        assert "STOP is sent as soon as it does" in tab.locator("#reason").inner_text()
        network.cut = False
        good(tab)
        wishes: list[str] = []
        until(lambda: bool(wishes.extend(page.wishes()) or wishes))
        assert wishes == ["estop"]
    finally:
        network.close()


def test_a_loop_that_stands_still_is_not_taken_for_a_lost_link(
    page: OperatorPage, loop: Loop, opened: Any
) -> None:
    tab = opened(page.address)
    loop.stands = True
    tab.wait_for_selector("body[data-link=old]")
    assert "shown nothing new for" in tab.locator("#reason").inner_text()
    tab.keyboard.press("p")
    tab.keyboard.press("Escape")
    tab.wait_for_timeout(500)
    assert page.wishes() == ["estop"]
    loop.stands = False
    good(tab)
    assert tab.locator("#mode").inner_text() == "RUN"


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_screen(program: Program, opened: Any, width: int) -> None:
    phone = width < 760
    tab = opened(program.address, width, 844 if phone else 800, is_mobile=phone, has_touch=phone)
    tab.wait_for_timeout(500)  # a phone zooms out to what is too wide
    assert tab.evaluate("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
    picture(tab, f"{program.kind}_{width}")
    buttons = tab.locator("button:visible").all()
    boxes = [button.bounding_box() for button in buttons]
    assert len(boxes) > 10 and all(b["x"] >= 0 and b["x"] + b["width"] <= width for b in boxes)
    if phone:  # of a thumb: 48 px high and wide, with gaps
        assert all(b["height"] >= 48 and b["width"] >= 48 for b in boxes), boxes
    if program.kind == "robot":
        for where in ("0", "document.body.scrollHeight"):
            tab.evaluate(f"scrollTo(0, {where})")
            tab.wait_for_timeout(200)
            stop = tab.locator("#estop").bounding_box()
            assert stop["y"] >= 0 and stop["y"] + stop["height"] <= tab.viewport_size["height"]
            # Nothing lies over it.
            middle = [stop["x"] + stop["width"] / 2, stop["y"] + stop["height"] / 2]
            hit = "([x, y]) => document.elementFromPoint(x, y).closest('#estop') !== null"
            assert tab.evaluate(hit, middle)
        picture(tab, f"{program.kind}_{width}_bottom")


def test_a_finger_on_a_button_moves_the_arm_until_it_is_lifted(
    page: OperatorPage, loop: Loop, opened: Any
) -> None:
    tab = opened(page.address, 390, 844)
    button = tab.locator("button[data-key=a]")
    button.scroll_into_view_if_needed()
    box = button.bounding_box()

    def until(holds: Callable[[], bool]) -> None:
        end = time.monotonic() + 120.0
        while not holds():
            assert time.monotonic() < end
            tab.wait_for_timeout(20)

    tab.mouse.move(box["x"] + 20, box["y"] + 20)
    tab.mouse.down()
    until(lambda: page.action(4)[1] > 0)
    tab.mouse.move(box["x"] + 20, box["y"] - 200)  # also if it slides away
    tab.mouse.up()
    until(lambda: page.action(4)[1] == 0)
    # Before a takeover the fingers are the policy's.
    loop.mode = "human"
    tab.wait_for_selector("#mode[data-mode=human]")
    tab.click("#gripper")
    assert tab.locator("#grip").inner_text() == "closed"
