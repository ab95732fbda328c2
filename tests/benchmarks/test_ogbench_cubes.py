"""The comparison on OGBench's cubes: how its runs are put together, and that they all run."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import ogbench_cubes as bench  # noqa: E402

from embodyrl.config import resolve  # noqa: E402

needs_ogbench = pytest.mark.skipif(
    importlib.util.find_spec("ogbench") is None, reason="the extra ogbench is not installed"
)


def test_all_methods_have_the_same_net_batches_and_steps():
    """Also those of an algorithm whose settings have other names."""
    for name, method in bench.METHODS.items():
        sections = {
            "env": bench.env_of("cube-single", bench.FULL),
            "policy": bench.NET | method.policy,
            "algorithm": bench.online_algorithm(method, bench.FULL),
            "data": {"path": "data"},
        }
        config = resolve(sections)
        a = config.algorithm
        assert (a.batch_size, a.gamma, a.num_chunks, a.warmup_chunks) == (256, 0.99, 3, 500)
        assert getattr(a, "utd", getattr(a, "critic_utd", None)) == 1.0
        assert (config.policy.width, config.policy.layers, config.policy.horizon) == (256, 2, 5)
        widths = [getattr(a, "critic_width", None), getattr(config.policy, "chooser_width", None)]
        assert 256 in widths, name


def test_looks_stand_where_a_stage_ends():
    size = bench.FULL
    looks = size.online_iterations // bench.LOOKS
    assert size.offline_iterations % looks == 0 and size.online_iterations % looks == 0
    assert size.offline_steps % size.offline_iterations == 0
    assert (size.offline_steps - size.critic_warmup) % size.offline_iterations == 0


def test_a_stage_counts_by_its_last_look():
    def look(stage, success):
        return {"stage": stage, "success": success}

    curves = [
        [look("imitation", 0.1), look("offline", 0.4), look("online", 0.2), look("online", s)]
        for s in (0.6, 0.8)
    ]
    found = bench.summary(curves)
    assert [round(found[stage][0], 6) for stage in found] == [0.1, 0.4, 0.7]
    # Without an offline stage there is no row of it.
    assert list(bench.summary([[look("imitation", 0.1), look("online", 0.5)]])) == [
        "imitation",
        "online",
    ]


@needs_ogbench
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_methods_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in bench.METHODS:
        bench.measure("cube-single", name, 0, bench.TINY)
        bench.measure("cube-single", name, 0, bench.TINY)  # what is done is not done again
        looks = bench.looks_of("cube-single", name, 0, bench.TINY)
        both = name in ("fql", "pa_rl_offline")
        wanted = ["imitation"] + ["offline"] * both + ["online"] * bench.LOOKS
        assert [row["stage"] for row in looks] == wanted
        assert all(row["episodes"] == bench.TINY.eval_episodes for row in looks)
        assert looks[-1]["env_steps"] > 0
    found = bench.summarise(bench.TINY)["tasks"]["cube-single"]
    assert set(found) == set(bench.METHODS) and found["fql"]["seeds"] == 1
