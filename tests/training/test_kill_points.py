"""A run that is killed before any of its changes to the disk ends in the same state."""

import json
import os
import subprocess
import sys
from pathlib import Path

HELPER = Path(__file__).parents[1] / "helpers" / "kill_points.py"
STRIDE = 6
"""Every sixth change; 1 is all of them, as ``python tests/helpers/kill_points.py FOLDER 1``."""


def test_a_kill_at_any_write_costs_nothing(tmp_path):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [sys.executable, str(HELPER), str(tmp_path), str(STRIDE)]
    done = subprocess.run(words, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["different"] == [] and found["in_place"] == []
    assert found["changes"] > 50 and found["tries"] >= found["changes"] // STRIDE
