"""The script for a machine with a GPU: at its smallest here, in earnest there."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_all.py"


def run(out: Path, *arguments: str) -> dict:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--out", str(out), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


def check(found: dict) -> None:
    rows = found["algorithms"]["result"]
    assert set(rows) > {"sft", "ppo", "sac_flow", "pa_rl"}
    assert all("error" not in row and row["seconds"] > 0 for row in rows.values()), rows
    assert found["maniskill"]["result"]["checked"]
    assert all(
        row["env_steps_per_s"]["median"] > 0 and row["faults"] == 0
        for row in found["maniskill"]["result"]["speed"]
    )
    assert any(
        row.get("env_steps_per_s", {"median": 0})["median"] > 0
        for row in found["mujoco_native"]["result"]
    )
    libero = [row for row in found["libero_warp"]["result"] if "error" not in row]
    assert {row["cameras"] for row in libero} == {"[]", "[agentview,wrist]"}
    assert all(row["env_steps_per_s"]["median"] > 0 and row["faults"] == 0 for row in libero)
    assert found["training"]["result"]["last_iteration"]["env_steps"] > 0
    assert found["training"]["result"]["evaluation"]["episodes"] >= 1
    assert all(
        row["sample_per_s"] > 0 and row["score_per_s"] > 0 for row in found["throughput"]["result"]
    )
    for model in ("small", "smolvla", "pi0"):
        if model in found["vla"]["result"]:
            rows = found["vla"]["result"][model]
            assert all(
                isinstance(r[k], float) for r in rows["sample"] for k in ("ours_s", "lerobot_s")
            )
            assert all(
                isinstance(r[f"{k}_s"], float)
                for r in rows["train"]
                for k in ("ppo", "imitation", "lerobot_forward")
            )
    check_world(found["world"]["result"])
    assert found["versions"]["torch"] and found["hardware"]["cpu"]


def check_world(found: dict) -> None:
    for model in ("embedded", "wan"):
        assert {row["sampling_steps"] for row in found[model]["speed"]} == {0, 1, 2, 4}
        assert all(
            row["latent_frames_per_second"] > 0 and row["frames_per_second"] > 0
            for row in found[model]["speed"]
        )
        assert found[model]["training_step_s"] > 0 and found[model]["parameters"] > 1e5


def test_world_models_dream_in_both_sizes(tmp_path):
    found = run(tmp_path / "out.json", "--device", "cpu", "--only", "world")
    check_world(found["world"]["result"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_part_runs_without_a_gpu(tmp_path):
    check(run(tmp_path / "out.json", "--device", "cpu"))


@pytest.mark.gpu
@pytest.mark.timeout(3600)
def test_every_part_runs_on_the_gpu(tmp_path):
    found = run(tmp_path / "out.json")
    check(found)
    assert sum(found[part]["seconds"] for part in ("maniskill", "training", "throughput")) < 600
