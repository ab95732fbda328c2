"""A run that is killed before any of its changes to the disk ends in the same state."""

import pytest

from benchmarks.faults import kills


def test_a_kill_at_any_write_costs_nothing():
    """At every sixth change; ``make faults`` takes all of them."""
    found = kills.survive(12, seed=0)
    assert found["survived"] == found["tries"] > 10 and found["changes"] > 50


@pytest.mark.parametrize("kind", ["replay", "sft", "world"])
def test_a_kill_costs_nothing_in_other_kinds_of_runs(kind):
    """With replay buffer and films, with a data set, and of a world model: at a few changes."""
    found = kills.survive(4, seed=0, kinds=[kind])
    assert found["survived"] == found["tries"] > 3 and found["changes"] > 40
