"""The campaign of ``make faults`` on workers, with few tries."""

from benchmarks.faults import env


def test_a_killed_worker_is_survived():
    found = env.survive(1, seed=1, envs=["mujoco"])
    assert found["tries"] == found["survived"] == 1 and found["made_up"] == 0
