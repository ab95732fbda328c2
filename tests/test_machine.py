"""What a process may use of the machine: within its affinity and its container."""

import os

import pytest

from embodyrl import machine
from embodyrl.cli import doctor
from embodyrl.rollouts.replay_buffer import free_memory, whole_memory

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
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    assert machine.usable_cores() == expected
    [row] = [f for f in doctor._machine(tmp_path) if f["name"] == "processor cores"]
    assert row["found"] == str(expected)


GIB = 2**30


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (8, 6)),
        ({"memory.max": "max", "memory.current": f"{GIB}"}, (8, 6)),
        ({"memory.max": f"{4 * GIB}", "memory.current": f"{GIB}"}, (4, 3)),
        # Cached files can be dropped; others on the machine may have the rest.
        (
            {
                "memory.max": f"{4 * GIB}\n",
                "memory.current": f"{3 * GIB}\n",
                "memory.stat": f"active_file 7\ninactive_file {2 * GIB}\n",
            },
            (4, 3),
        ),
        ({"memory.max": f"{7 * GIB}", "memory.current": "0"}, (7, 6)),
        ({"memory.max": f"{GIB}", "memory.current": f"{2 * GIB}"}, (1, 0)),
        # Version 1, without and with a limit.
        ({"memory/memory.limit_in_bytes": f"{2**63 - 4096}", "memory/memory.usage_in_bytes": "1"}, (8, 6)),
        (
            {
                "memory/memory.limit_in_bytes": f"{2 * GIB}",
                "memory/memory.usage_in_bytes": f"{2 * GIB}",
                "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB}\n",
            },
            (2, 1),
        ),
    ],
)  # fmt: skip
def test_the_memory_of_the_container_counts(tmp_path, monkeypatch, files, expected):
    table = tmp_path / "meminfo"
    table.write_text(f"MemTotal: {8 * 2**20} kB\nMemAvailable:  {6 * 2**20} kB\n")
    monkeypatch.setattr(machine, "MEMINFO", table)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "CGROUPS", tmp_path)
    found = [size / GIB for size in machine.usable_memory()]
    assert found == pytest.approx(expected, abs=1e-6)
    # A run's check of its memory and the doctor go by it.
    assert [whole_memory() / GIB, free_memory() / GIB] == found
    [row] = [f for f in doctor._machine(tmp_path) if f["name"] == "memory"]
    assert f"{found[0]:.0f}" in row["found"]
