"""The SLURM script: what is asked of SLURM is noted, and everything else is real."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics

ROOT = Path(__file__).parents[2]
PRESET = """# A preset of the tests: states only, so that nothing is drawn.
env: {name: mujoco, task: reach, renderer: none, cameras: [], num_envs: 2, max_episode_steps: 10}
policy: {name: flow_mlp, horizon: 5, width: 16, layers: 1}
algorithm: {name: ppo, num_chunks: 2, epochs: 1, critic_epochs: 1}
run: {name: tiny, iterations: 100000, eval_episodes: 2, eval_before: false, videos: 0, device: cpu,
      eval_every: 0, checkpoint_every: 100000}
"""


def command(folder: Path, *overrides: str) -> subprocess.Popen[bytes]:
    """Starts the script as SLURM would, with the node's own names."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (
        ("srun", 'exec "$@"'),
        ("torchrun", f'exec {sys.executable} -m torch.distributed.run "$@"'),
        ("scontrol", f'echo "$@" >> {folder}/scontrol.txt; [ "$1" = show ] && echo localhost'),
    ):
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_JOB_ID": "7",
    }
    script = ["bash", str(ROOT / "examples" / "slurm.sbatch"), "tiny.yaml", *overrides]
    return subprocess.Popen(script, cwd=folder, env=environment, stdin=subprocess.DEVNULL)


@pytest.mark.timeout(400)
def test_a_run_that_is_taken_away_saves_goes_back_into_the_queue_and_goes_on(
    tmp_path: Path,
) -> None:
    (tmp_path / "tiny.yaml").write_text(PRESET)
    job = command(tmp_path)
    try:
        began = time.monotonic()
        while len(read_metrics(tmp_path / "runs/tiny/metrics.jsonl")) < 2:
            assert job.poll() is None and time.monotonic() - began < 180
            time.sleep(0.5)
        job.send_signal(signal.SIGTERM)
        assert job.wait(90) == 0
    finally:
        job.kill()
    assert (tmp_path / "scontrol.txt").read_text().splitlines()[-1] == "requeue 7"
    saved = checkpoint.latest(tmp_path / "runs/tiny/checkpoints")
    assert saved is not None
    done = int(saved.name.removeprefix("step_"))
    # The same script goes on, and does not go back once the run is refused or done.
    (tmp_path / "scontrol.txt").unlink()
    again = command(tmp_path, "run.seed=5")
    assert again.wait(120) != 0
    assert (tmp_path / "scontrol.txt").read_text().splitlines() == ["show hostnames localhost"]
    assert done >= 2
