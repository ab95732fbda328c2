"""Episodes at another rate end where they ended, and take as long."""

from __future__ import annotations

import numpy as np
import pytest

from embodyrl.data.resample import Resampled
from embodyrl.errors import UserError

EPISODE = np.array([0] * 10 + [1] * 7)


def plan(wanted: float, rate: float = 10.0) -> Resampled:
    return Resampled.plan(EPISODE, rate, wanted)


@pytest.mark.parametrize("wanted", [25.0, 20.0, 5.0, 10.0, 4.0])
def test_changes_add_up_to_the_same(wanted: float) -> None:
    actions = np.random.default_rng(0).normal(size=(17, 3))
    made = plan(wanted)
    found = made.of_actions(actions, "delta", "d")
    new = EPISODE[made.rows]
    for number, length in ((0, 10), (1, 7)):
        assert (new == number).sum() == max(1, round(length * wanted / 10))
        total = actions[number == EPISODE][:, :2].sum(axis=0)
        # An episode that is no whole number of new frames loses or gains a part of one.
        rest = np.abs(actions).max() * max(1.0, 10 / wanted)
        assert np.abs(found[new == number][:, :2].sum(axis=0) - total).max() <= rest
    if wanted in (20.0, 10.0):
        np.testing.assert_allclose(found[:, :2].sum(axis=0), actions[:, :2].sum(axis=0))
        np.testing.assert_allclose(found[:, 2], np.repeat(actions[:, 2], round(wanted / 10)))


def test_the_same_rate_changes_nothing() -> None:
    values = np.random.default_rng(0).normal(size=(17, 3))
    made = plan(10.0)
    for found in (
        made.of_actions(values, "delta", "d"),
        made.of_actions(values, "absolute", "d"),
        made.of_actions(values, "velocity", "d"),
        made.of_state(values),
    ):
        np.testing.assert_allclose(found, values)


def test_states_are_interpolated_and_never_across_episodes() -> None:
    state = np.where(EPISODE == 0, np.arange(17.0), 100.0)[:, None]
    found = plan(20.0).of_state(state)[:, 0]
    np.testing.assert_allclose(found[:19], np.arange(19) / 2)
    assert found[19] == 9.0 and (found[20:] == 100.0).all()


def test_velocities_keep_their_size() -> None:
    found = plan(25.0).of_actions(np.full((17, 2), 0.3), "velocity", "d")
    np.testing.assert_allclose(found[:24], 0.3, rtol=1e-6)


def test_success_and_reward_come_at_the_end_of_their_frame() -> None:
    flags = np.zeros(17, bool)
    flags[9] = flags[16] = True
    for wanted in (25.0, 5.0):
        made = plan(wanted)
        new = EPISODE[made.rows]
        last = np.flatnonzero(np.r_[new[1:] != new[:-1], True])
        assert np.flatnonzero(made.of_flags(flags)).tolist() == last.tolist()
        rewards = made.of_rewards(flags.astype(np.float32))
        assert rewards.sum() == 2 and (rewards[last] == 1).all()


def test_actions_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.convention=\{actions: delta\}"):
        plan(20.0).of_actions(np.zeros((17, 2)), "", "d")
