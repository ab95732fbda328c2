"""The rows of the fault tables of the docs: the test of each, many times."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
ROWS: dict[str, dict[str, tuple[str, ...]]] = {
    "simulators": {
        "a worker is killed, stopped or crashes": (
            "sims/test_workers.py::test_killed_in_mid_step",
            "sims/test_workers.py::test_stopped_worker_is_found_within_its_deadline",
            "sims/test_workers.py::test_segfault_names_the_signal_and_repeated_faults_stop_the_run",
        ),
        "an env raises": (
            "sims/test_workers.py::test_exception_comes_across_as_text_and_only_its_worker_is_remade",
            "rollouts/test_fault_watch.py::test_an_env_that_raises_costs_its_episodes_and_then_the_run",
        ),
        "NaN in an observation or a reward": (
            "rollouts/test_fault_watch.py::test_a_number_that_is_none_costs_its_env_one_episode",
            "rollouts/test_fault_watch.py::test_nothing_of_a_fault_is_learned_from",
        ),
        "MuJoCo's silent reset": (
            "rollouts/test_fault_watch.py::test_mujocos_silent_reset_is_a_fault_also_in_the_first_step",
        ),
    },
    "dreams": {
        "a dream breaks": (
            "world_models/test_world_model.py::test_a_dream_that_breaks_is_masked_and_leaves_the_others_alone",
        ),
        "a judge's server is down or slow": (
            "world_models/reflectors/test_server.py::test_slow_server_ends_at_the_deadline",
            "world_models/reflectors/test_server.py::test_server_that_dies_between_answers",
        ),
    },
    "saving": {
        "a kill while saving": (
            "storage/test_checkpoint.py::test_kill_9_while_saving_never_costs_a_checkpoint",
        ),
    },
    "checkpoints": {
        "the disk is full": (
            "storage/test_checkpoint.py::test_full_disk_leaves_the_earlier_checkpoint_whole",
        ),
        "a damaged checkpoint": (
            "storage/test_checkpoint.py::test_damage_is_named",
            "storage/test_checkpoint.py::test_latest_passes_over_a_damaged_one_aloud",
        ),
        "resuming": ("storage/test_checkpoint.py::test_resume_is_bit_equal_for_100_updates",),
    },
    "runs": {
        "Ctrl-C and kill -9 in a run": (
            "training/test_runner.py::test_ctrl_c_saves_at_once_and_the_same_command_goes_on",
            "training/test_runner.py::test_kill_9_costs_no_more_than_the_work_since_the_last_checkpoint",
        ),
    },
    "robot": {
        "faults in mid-motion": (
            "real_robot/test_faults.py::test_what_happens_in_mid_motion_ends_at_rest_within_limits_and_in_the_log",
        ),
        "delays, doubles and reordering": (
            "real_robot/test_faults.py::test_what_needs_no_stop_does_not_stop_it",
        ),
        "targets out of reach": (
            "real_robot/test_faults.py::test_where_it_cannot_go_the_arm_stays_within_limits",
        ),
        "a push against the workspace": (
            "real_robot/test_faults.py::test_who_pushes_against_the_workspace_stays_in_it",
        ),
        "the policy is gone, slow or wrong": (
            "real_robot/control/test_ticker.py::test_a_fault_in_mid_run_ends_at_rest_and_in_the_log",
            "real_robot/control/test_ticker.py::test_a_cold_start_waits_at_rest_and_a_dead_policy_is_given_up",
        ),
        "a takeover during inference": (
            "real_robot/control/test_ticker.py::test_an_answer_that_comes_after_a_takeover_is_not_obeyed",
        ),
    },
}
"""Table -> row -> the tests in ``tests/``."""


def survive(tries: int, seed: int, tables: Sequence[str] = tuple(ROWS)) -> dict[str, int]:
    """Runs the tests of each row ``tries`` times; ``tries`` and ``survived`` count tests.

    A test with several cases counts each of them; its slow cases are left to ``make test-all``. A
    row that failed is printed with its number.
    """
    total: Counter[str] = Counter()
    tests = [test for table in tables for row in ROWS[table].values() for test in row]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "2",
            "--tb=line",
            "-p",
            "no:randomly",
            "-m",
            "not slow",
        ]
        command += [f"--repeat={tries}", f"--junitxml={report}", *(f"tests/{t}" for t in tests)]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
        for case in ElementTree.parse(report).iter("testcase"):
            bad = [c.get("message", "") for c in case if c.tag in ("failure", "error")]
            skipped = any(child.tag == "skipped" for child in case)
            total["tries"] += not skipped
            total["survived"] += not (bad or skipped)
            total["skipped"] += skipped
            if bad:
                name = f"{case.get('classname')}.{case.get('name')}"
                print(f"failed: {name}: {bad[0][:300]}", flush=True)
    rows = sum(len(ROWS[table]) for table in tables)
    return {**total, "rows": rows, "repetitions": tries}
