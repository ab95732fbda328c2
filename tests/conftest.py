"""Settings for every test: one thread per process, no screen, no network; and what tests cost.

``pytest --cpu-times FILE`` writes the CPU seconds of each test, those of ended child processes
included, and shows the dearest. ``--repeat N`` runs each test N times.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

# Set before anything imports torch or MuJoCo, and inherited by worker processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MUJOCO_GL", "egl")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("MPLBACKEND", "agg")

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(autouse=True)
def ordinary_priority():
    """No test makes its process a real-time one: that, and what it starts, would keep all others from a processor."""
    yield
    assert not hasattr(os, "sched_getscheduler") or os.sched_getscheduler(0) not in (
        os.SCHED_FIFO,
        os.SCHED_RR,
    )


@pytest.fixture(scope="module")
def chromium():
    """A headless browser; its pages are in a context of their own."""
    playwright = pytest.importorskip("playwright.sync_api")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    own = os.environ.get("EMBODYRL_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    with playwright.sync_playwright() as started:
        own = own or started.chromium.executable_path
        if not os.path.exists(own):
            pytest.skip(
                "no Chromium here: apt-get install chromium, or playwright install chromium"
            )
        browser = started.chromium.launch(executable_path=own, args=FLAGS, timeout=180e3)
        yield browser
        browser.close()


def pytest_addoption(parser):
    parser.addoption("--cpu-times", metavar="FILE", help="write each test's CPU seconds to FILE")
    parser.addoption("--repeat", type=int, default=0, metavar="N", help="run each test N times")


def pytest_generate_tests(metafunc):
    if count := metafunc.config.getoption("repeat"):
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(count))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = sum(os.times()[:4])
    done = yield
    if path := item.config.getoption("cpu_times"):
        line = json.dumps({"test": item.nodeid, "cpu_s": round(sum(os.times()[:4]) - before, 2)})
        with open(path, "a") as file:  # the processes of pytest-xdist append to one file
            file.write(line + "\n")
    return done


def pytest_terminal_summary(terminalreporter, config):
    if not (path := config.getoption("cpu_times")):
        return
    rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
    rows.sort(key=lambda row: row["cpu_s"], reverse=True)
    terminalreporter.section(f"CPU seconds: {sum(row['cpu_s'] for row in rows):.0f} in all")
    for row in rows[:30]:
        terminalreporter.line(f"{row['cpu_s']:8.1f}  {row['test']}")
