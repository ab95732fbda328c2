"""The README: short, and its results are those of ``benchmarks/``."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())


def rates(cells: list[Sequence[float]]) -> str:
    """``48, 30, 20%`` of seeds, each successes of episodes."""
    return ", ".join(f"{100 * solved / episodes:.0f}" for solved, episodes in cells) + "%"


def rate(value: float, low: float, high: float) -> str:
    return f"{100 * value:.0f}% [{100 * low:.0f}, {100 * high:.0f}]"


def single(name: str, key: str) -> str:
    """One seed's rate with its interval."""
    [seed] = results(name)["seeds"]
    solved, episodes, low, high = seed[key]
    return rate(solved / episodes, low, high)


def seeds(name: str, key: str) -> str:
    return rates([seed[key][:2] for seed in results(name)["seeds"]])


def dreams(key: str) -> str:
    loops = [seed["loop"] for seed in results("imagination_mujoco_pick")["seeds"]]
    return rates([(loop[key]["solved"], loop[key]["episodes"]) for loop in loops])


def robot(last: bool) -> str:
    rows = [row for row in results("robot_online")["rows"] if row["person"]]
    row = rows[-1 if last else 0]
    return rate(row["success"], *row["interval"])


def steps(name: str) -> list[float]:
    return [seed["env_steps"] for seed in results(name)["seeds"]]


def dream_steps() -> list[float]:
    """Those that the loop learned from and those that it chose by."""
    loops = [seed["loop"] for seed in results("imagination_mujoco_pick")["seeds"]]
    return [loop["real_steps"] + loop["eval_steps"] for loop in loops]


EXPECTED = {
    "quickstart": (
        seeds("quickstart", "before"),
        seeds("quickstart", "after"),
        steps("quickstart"),
    ),
    "libero_object_pa_rl": (
        seeds("libero_object_pa_rl", "before"),
        seeds("libero_object_pa_rl", "after"),
        steps("libero_object_pa_rl"),
    ),
    "libero_smolvla": (
        single("libero_smolvla", "before"),
        single("libero_smolvla", "after"),
        steps("libero_smolvla"),
    ),
    "maniskill_pickcube_pa_rl": (
        seeds("maniskill_pickcube_pa_rl", "before"),
        seeds("maniskill_pickcube_pa_rl", "after"),
        steps("maniskill_pickcube_pa_rl"),
    ),
    "imagination_mujoco_pick": (dreams("before"), dreams("after"), dream_steps()),
    "robot_online": (robot(last=False), robot(last=True), []),
}
HIDDEN = {"libero_smolvla", "imagination_mujoco_pick"}
"""Whose critics read the simulator's state."""


def rows() -> list[list[str]]:
    """The cells of the table of results."""
    table = README.partition("| Task | Imitation |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 120


def test_it_has_six_results() -> None:
    assert len(rows()) == 6


def test_each_row_says_whether_critics_read_hidden_state() -> None:
    for task, *_, source in rows():
        bound = any(f"{name}.json" in source for name in HIDDEN)
        words = "hidden state (an upper bound)" if bound else "no hidden state"
        assert words in task and ("no hidden" in task) != bound, task


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[-1])
def test_results_are_those_of_the_benchmarks(row: list[str]) -> None:
    _, before, after, env_steps, source = row
    [name] = re.findall(r"benchmarks/(\w+)\.json", source)
    expected_before, expected_after, expected_steps = EXPECTED[name]
    assert before == expected_before
    assert after.replace("**", "") == expected_after
    if expected_steps:
        mean = sum(expected_steps) / len(expected_steps)
        assert float(env_steps.replace(",", "")) == pytest.approx(mean, rel=0.01)


def test_minutes_of_the_arm() -> None:
    rows = [row for row in results("robot_online")["rows"] if row["person"]]
    assert f"{rows[-1]['arm_minutes']:.0f} minutes of the arm's time" in README
