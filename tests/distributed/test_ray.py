"""Workers as Ray's actors: the bits of the same shards in one process, also when one is killed, and refusals."""

import threading
import time
from importlib.util import find_spec

import psutil
import pytest
from scale_runs import SAC, assert_same, make

from embodyrl.cli.main import main
from embodyrl.config import to_yaml
from embodyrl.distributed.ray_pool import ray_rollouts
from embodyrl.errors import UserError
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.runner import train

needs_ray = pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'embodyrl[scale]'")
pytestmark = [pytest.mark.timeout(900), needs_ray]
LAG = (
    "run.workers=2",
    "run.max_lag=1",
    "algorithm.behaviour_cap=5",
    "run.iterations=6",
    "run.checkpoint_every=6",
)


def workers() -> list[psutil.Process]:
    return [
        p
        for p in psutil.Process().children(recursive=True)
        if p.name().startswith("ray::RayWorker")
    ]


def test_ray_gives_the_bits_of_one_process_and_goes_on_when_a_worker_is_killed(tmp_path):
    config, killed = make(tmp_path / "ray", *LAG), []

    def kill() -> None:
        metrics = tmp_path / "ray" / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 1):
            time.sleep(0.01)
        killed.append(workers()[0])
        killed[0].kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    remote = train(config, rollouts=lambda: ray_rollouts(config, cpus=0.5))
    thread.join()
    assert killed and not killed[0].is_running() and not workers()
    assert read_metrics(remote / "metrics.jsonl")[-1]["worker_restarts"] == 1
    assert_same(remote, train(make(tmp_path / "local", *LAG)))


def test_off_policy_workers_give_the_bits_of_one_process_too(tmp_path):
    ray, local = (make(tmp_path / where, *LAG[:2], algorithm=SAC) for where in ("ray", "local"))
    assert_same(train(ray, rollouts=lambda: ray_rollouts(ray, cpus=0.5)), train(local))


def test_the_command_line_refuses_more_workers_than_there_are_cores(tmp_path, capsys):
    preset = tmp_path / "preset.yaml"
    preset.write_text(to_yaml(make(tmp_path)))
    assert main(["train", str(preset), "--launcher", "ray", "--worker-cpus", "999"]) == 1
    assert "1 workers with 999 CPU each do not fit where there are" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_cluster_without_a_token_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(UserError, match="RAY_AUTH_MODE"):
        ray_rollouts(make(tmp_path))
