"""Tasks are drawn by the variance of their success, with a floor, and all their states alike."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from embodyrl.rollouts.batches import Episode
from embodyrl.rollouts.seeding import init_states
from embodyrl.rollouts.start_sampling import Draws
from embodyrl.rollouts.task_sampling import FLOOR, MEMORY, difficulty_odds, task_figures, updated
from embodyrl.types import EnvSpec

TASKS = ("never", "half", "always")


def episodes(task: str, solved: int, failed: int, **more) -> list[Episode]:
    outcomes = [True] * solved + [False] * failed
    return [Episode(0, task, success, 0.0, 1, **more) for success in outcomes]


def spec(num_init_states: int | None = None) -> EnvSpec:
    return EnvSpec(
        "test/arm", 4, 4, 9, "box", 20.0, 20, {}, tasks=TASKS, num_init_states=num_init_states
    )


def test_the_odds_are_those_of_the_formula():
    record = {"never": (0.0, 48.0), "half": (24.0, 48.0), "always": (48.0, 48.0)}
    odds = difficulty_odds(record, TASKS)
    solved = np.array([0, 24, 48])
    variance = (solved + 1) * (49 - solved) / (50 * 51)  # of the posterior Beta(solved + 1, ...)
    np.testing.assert_allclose(odds, FLOOR / 3 + (1 - FLOOR) * variance / variance.sum())
    assert sum(odds) == pytest.approx(1.0)
    # What is never or always solved keeps its share of the floor, and little more.
    assert odds[0] == pytest.approx(odds[2])
    assert odds[1] > 0.7 and FLOOR / 3 < odds[0] < 0.13


def test_tasks_of_which_nothing_is_known_are_tried():
    assert difficulty_odds({}, TASKS) == pytest.approx([1 / 3] * 3)
    known = {"never": (0.0, 60.0), "always": (60.0, 60.0)}
    odds = difficulty_odds(known, TASKS)
    assert odds[1] == max(odds)


def test_old_episodes_fade_so_that_a_task_that_was_learned_is_noticed():
    record = updated({}, episodes("half", 0, 200))
    solved, played = record["half"]
    assert solved == 0.0 and played == pytest.approx(MEMORY, rel=0.05)  # 1 / (1 - keep)
    record = updated(record, episodes("half", 3 * MEMORY, 0))
    solved, played = record["half"]
    assert solved / played > 0.94
    # A person's episodes say nothing of the policy.
    assert updated(record, episodes("half", 0, 50, person=True)) == record


@pytest.mark.parametrize("limit", [None, 11])
def test_states_are_drawn_by_the_odds_of_their_task_and_evenly_in_it(limit):
    odds = [0.1, 0.7, 0.2]
    draws = Draws(tasks=tuple(odds))
    drawn = list(islice(init_states(spec(limit), 0, 0, draws=draws), 6000))
    assert drawn == list(islice(init_states(spec(limit), 0, 0, draws=draws), 6000))
    assert drawn[:50] != list(islice(init_states(spec(limit), 0, 1, draws=draws), 50))
    share = Counter(spec().task_of(init) for init in drawn)
    assert [share[task] / 6000 for task in TASKS] == pytest.approx(odds, abs=0.02)
    if limit:
        # 11 states of 3 tasks: the last task has one fewer. Within a task all are as likely.
        counts = Counter(drawn)
        assert sorted(counts) == list(range(11))
        assert [counts[i] / share["always"] for i in (2, 5, 8)] == pytest.approx(
            [1 / 3] * 3, abs=0.05
        )
        assert [counts[i] / share["half"] for i in (1, 4, 7, 10)] == pytest.approx(
            [1 / 4] * 4, abs=0.03
        )


def test_without_odds_states_are_drawn_as_ever():
    rng = np.random.default_rng([3, 5, 1])
    expected = [int(rng.integers(11)) for _ in range(20)]
    assert list(islice(init_states(spec(11), 3, 5, 1), 20)) == expected


def test_the_figures_of_an_iteration_are_those_of_its_tasks():
    played = [
        *episodes("half", 2, 2),
        *episodes("always", 3, 0),
        *episodes("half", 9, 0, person=True),
    ]
    assert task_figures(TASKS, played) == {
        "task_success/half": 0.5,
        "task_episodes/half": 4,
        "task_success/always": 1.0,
        "task_episodes/always": 3,
    }
    assert task_figures(("half",), played) == {}
