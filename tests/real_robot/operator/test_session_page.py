"""The page in a real Chromium: the buttons of a recording session, and those of a policy's run."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np

from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.control.operator import LABELS, WISHES
from embodyrl.real_robot.operator import OperatorPage
from embodyrl.real_robot.record.recorder import SAYS

STATUS = {"mode": "hold", "reason": "Press Start (t) to record episode 3 of 50.", "open": True}
STATUS |= {"task": "pick up the red block", "events": [], "can": (*SAYS, *WISHES)}
STATUS |= {"numbers": {"episode": "3 of 50", "time": "not begun", "disk": "48.1 GB left"}}
IMAGES = {"front": np.full((64, 64, 3), 90, np.uint8)}


def shown(chromium: Any, status: dict[str, Any]) -> tuple[dict[str, str], list[str], list[str]]:
    """Visible buttons by what they ask for; the wishes after every key; and what went wrong."""
    page = OperatorPage(RealClock(), wishes=tuple(dict.fromkeys((*WISHES, *LABELS))))
    closing = threading.Event()

    def show() -> None:
        while not closing.is_set():
            page.show(status, IMAGES)
            time.sleep(0.05)

    thread = threading.Thread(target=show)
    thread.start()
    context = chromium.new_context(viewport={"width": 1100, "height": 900})
    context.set_default_timeout(120e3)
    tab = context.new_page()
    wrong: list[str] = []
    tab.on("console", lambda m: wrong.append(m.text))
    tab.on("pageerror", lambda e: wrong.append(str(e)))
    try:
        tab.goto(page.address)
        tab.wait_for_selector("#mode[data-mode=hold]")
        buttons = {
            b.get_attribute("data-do"): b.inner_text().split("\n")[0]
            for b in tab.query_selector_all("button[data-do]")
            if b.is_visible()
        }
        # On a phone a stop that has nothing to stop lies over the numbers: they must not shine through.
        look = "button => { const s = getComputedStyle(button); return [s.opacity, s.backgroundColor] }"
        tab.evaluate("document.querySelector('#estop').disabled = true")
        opacity, background = tab.eval_on_selector("#estop", look)
        assert opacity == "1" and background.startswith("rgb("), background
        tab.evaluate("document.querySelector('#estop').disabled = false")
        for key in ("t", "h", "1", "0", "x", "p", "b", "Escape"):
            tab.keyboard.press(key)
        heard: list[str] = []
        end = time.monotonic() + 60.0
        while "estop" not in heard and time.monotonic() < end:
            heard += page.wishes()
            tab.wait_for_timeout(20)
        if (folder := os.environ.get("EMBODYRL_PICTURES")) and "says" in status:
            tab.screenshot(path=f"{folder}/record_page.png")
        return buttons, heard, wrong
    finally:
        closing.set()
        thread.join()
        context.close()
        page.close()


def test_a_session_has_its_own_buttons(chromium: Any) -> None:
    buttons, heard, wrong = shown(chromium, {**STATUS, "says": SAYS})
    assert buttons.keys() == SAYS.keys() and wrong == []
    assert all(buttons[what].startswith(SAYS[what]) for what in SAYS), buttons
    assert heard == ["takeover", "hold", "success", "failure", "discard", "estop"]


def test_a_policys_run_knows_no_discarding(chromium: Any) -> None:
    buttons, heard, wrong = shown(chromium, STATUS)
    assert buttons.keys() == set(WISHES) and wrong == []
    assert heard == ["takeover", "hold", "success", "failure", "run", "rewind", "estop"]
