"""The campaign of ``make faults`` on workers, with few tries."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks" / "faults" / "env.py"


def test_a_killed_worker_is_survived():
    spec = importlib.util.spec_from_file_location("faults_env", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.survive(1, seed=1, envs=["mujoco"])
    assert found["tries"] == found["survived"] == 1 and found["made_up"] == 0
