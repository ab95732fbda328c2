"""A run that is killed before any of its changes to the disk ends in the same state."""

from benchmarks.faults import kills


def test_a_kill_at_any_write_costs_nothing():
    """At every sixth change; ``make faults`` takes all of them."""
    found = kills.survive(12, seed=0)
    assert found["survived"] == found["tries"] > 10 and found["changes"] > 50
