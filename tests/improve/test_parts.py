"""Turns, shares, the decision of a look, and who may do what beside the arm."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from embodyrl.data.recording import Recording
from embodyrl.improve.data import DataSet, nothing_to_learn, shares
from embodyrl.improve.person import WATCHING, Beside
from embodyrl.improve.play import counts
from embodyrl.improve.record import look_figures
from embodyrl.improve.scripted_helper import HelperConfig, ScriptedHelper
from embodyrl.real_robot.control.actions import SPACES, DeltaDecoder
from embodyrl.real_robot.control.operator import WISHES
from embodyrl.real_robot.logs.split_turns import split_turns
from embodyrl.real_robot.record.teleop import Teleop
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.sims.mujoco.env import MujocoConfig


def recording(who: str, solved: bool) -> Recording:
    """An episode in which each letter is an action: the policy's (a), a person's (P), or back (B)."""
    n = len(who)
    last = np.arange(n) == n - 1
    numbers = np.arange(n, dtype=np.float32)[:, None]
    return Recording(
        images={"front": np.arange(n, dtype=np.uint8)[:, None, None, None]},
        proprio=numbers, actions=numbers,
        reward=(last & solved).astype(np.float32), solved=last & solved, init=3, task="t",
        instruction="go", human=np.array([w != "a" for w in who]),
        recovery=np.array([w == "B" for w in who]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("who", "solved", "ended_by", "turns"),
    [
        ("aaa", True, "policy", [("012", True)]),
        ("aaa", False, "policy", [("012", False)]),  # the time was up
        ("aaa", False, "fault", []),
        ("aaa", False, "person", []),  # stopped
        ("aaBP", True, "person", [("01", False), ("23", True)]),
        ("PPP", True, "person", [("012", True)]),
        ("aaPP", False, "person", [("01", False)]),  # what a person did not solve is no failure
        ("aaPP", False, "fault", [("01", False)]),
        ("aPaa", True, "person", [("0", False), ("123", True)]),  # the policy finished it
        ("aPaaP", True, "person", [("0", False), ("1", True), ("23", False), ("4", True)]),
        ("aPaaP", False, "person", [("0", False), ("23", False)]),
    ],
)
def test_turns(who: str, solved: bool, ended_by: str, turns: list[tuple[str, bool]]) -> None:
    whole = recording(who, solved)
    found = split_turns(whole, ended_by)
    assert ["".join(str(int(x)) for x in p.actions[:, 0]) for p in found] == [t for t, _ in turns]
    assert [part.success for part in found] == [s for _, s in turns]
    for part in found:
        rows = part.actions[:, 0].astype(int)
        assert part.images["front"].ravel().tolist() == rows.tolist()
        assert part.human is not None and whole.human is not None
        assert part.recovery is not None and whole.recovery is not None
        assert part.human.tolist() == whole.human[rows].tolist()
        assert part.recovery.tolist() == whole.recovery[rows].tolist()
        assert part.reward.tolist() == [0.0] * (len(rows) - 1) + [float(part.success)]


def row(init: int, solved: bool) -> dict[str, Any]:
    return {"init": init, "solved": solved, "duration": 2.0}


def test_the_later_policy_is_served_unless_it_solved_fewer() -> None:
    old = [row(0, True), row(1, False), row(2, False)]
    for new, keeps in (((0, 0, 0), False), ((0, 1, 0), True), ((1, 0, 0), True), ((0, 0, 1), True)):
        look = look_figures(old, [row(k, bool(s)) for k, s in enumerate(new)])
        assert look["keeps"] == keeps, new
        assert (look["before"], look["after"], look["episodes"]) == (1, sum(new), 3)
        assert look["robot_seconds"] == 12.0
    # A state that only one of them came to an end at is not compared.
    look = look_figures(old, [row(1, True)])
    assert (look["episodes"], look["won"], look["lost"], look["before"]) == (1, 1, 0, 0)
    assert look_figures([], [])["keeps"]


def test_half_of_every_batch_is_from_the_rounds() -> None:
    def data(path: str, frames: int, solved: int = 1, episodes: int = 2) -> DataSet:
        return DataSet(path, {"frames": frames, "solved": solved, "episodes": episodes})

    demos = [data("a", 900), data("b", 100)]
    found = shares(demos, [data("x", 30), data("y", 10), data("z", 50, solved=0)])
    assert found == [("a", 0.9), ("b", 0.1), ("x", 0.75), ("y", 0.25)]
    assert shares([], [data("x", 30)]) == [("x", 1.0)]
    assert nothing_to_learn("imitate", [data("z", 50, solved=0)])
    assert not nothing_to_learn("imitate", [data("z", 50)])
    assert nothing_to_learn("rl", [data("z", 50, solved=2)])
    assert not nothing_to_learn("rl", [data("z", 50)])
    # A gate that is required takes 10 of each outcome.
    few, enough = data("z", 50, 9, 20), data("z", 50, 10, 20)
    assert "9 solved and 11 failed" in nothing_to_learn("edit", [few], "require")
    assert not nothing_to_learn("edit", [few], "warn")
    assert not nothing_to_learn("edit", [enough], "require")


def test_what_came_to_no_end_is_played_again() -> None:
    def ended(by: str, mode: str) -> bool:
        return counts({"ended_by": by, "mode": mode})

    assert ended("policy", "hold") and ended("person", "hold") and ended("policy", "fault")
    assert not ended("fault", "hold") and not ended("person", "estop")


class Hand:
    """A person's device that asks for everything."""

    def __init__(self) -> None:
        self.shown: list[dict[str, Any]] = []

    def wishes(self) -> list[str]:
        return [*WISHES, "discard"]

    def show(self, status: dict[str, Any], images: dict[str, Any]) -> None:
        self.shown.append(status)


class Still:
    """A robot of which only the state is asked."""

    def state(self) -> str:
        return "here"


def test_who_watches_cannot_help_and_a_leader_must_stand_where_the_robot_does() -> None:
    hand = Hand()
    where = {"here": ""}
    teleop = Teleop(cast(Any, hand), ready=lambda state: where[cast(str, state)])
    watching = Beside(teleop, cast(Any, Still()), WATCHING)
    assert set(watching.wishes()) == set(WATCHING)
    assert not {"takeover", "rewind", "discard"} & set(watching.wishes())
    helping = Beside(teleop, cast(Any, Still()), WISHES)
    assert set(helping.wishes()) == set(WISHES)
    where["here"] = "joint 3 is .6 rad away"
    assert "takeover" not in helping.wishes()
    helping.show({"reason": "the policy acts"}, {})
    assert hand.shown[-1] == {"reason": "joint 3 is .6 rad away", "can": WISHES}


def test_a_scripted_person_gives_up_what_they_cannot_reach() -> None:
    twin = MujocoTwin(MujocoConfig(task="pick", cameras=(), renderer="none", split="eval"))
    try:
        twin.begin(0)
        helper = ScriptedHelper(
            twin, HelperConfig(patience=0.0, reaction=0.0, rewind=0.0, gives_up=2.0), 6.0
        )
        helper.begin(DeltaDecoder(SPACES["mujoco", "ee_delta_pos"], 25.0, [0.2] * 3, [0.8] * 3))
        assert helper.wishes() == ["takeover"]
        began = twin.now()
        twin.sleep_until(began + 1.9)
        assert helper.wishes() == []
        twin.sleep_until(began + 2.1)
        assert helper.wishes() == ["failure"]
    finally:
        twin.close()
