"""How many cores a process may use: those of its affinity, and of its container's quota."""

import os

import pytest

from embodyrl import cores
from embodyrl.cli import doctor

MINE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, MINE),
        ({"cpu.max": "max 100000"}, MINE),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "20000 100000"}, 1),  # a fifth of a core
        ({"cpu.max": "9900000 100000"}, MINE),  # more than there are
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, MINE),
        ({"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
    ],
)
def test_a_quota_of_the_container_counts(tmp_path, monkeypatch, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "CGROUPS", tmp_path)
    assert cores.usable_cores() == expected
    [row] = [f for f in doctor._machine(tmp_path) if f["name"] == "processor cores"]
    assert row["found"] == str(expected)
