"""Each rank of torchrun and each worker of Ray is on its own GPU: policy, simulator and renderer."""

import os
from importlib.util import find_spec

import pytest
import torch.distributed as dist
from fake_gpus import FakeGpus
from scale_runs import make

from embodyrl.config import to_dict
from embodyrl.distributed import fsdp, ray_pool
from embodyrl.errors import UserError
from embodyrl.training.shards import LocalPool

PICTURES = ("env.renderer=warp", "env.image_size=32", "run.device=auto")


@pytest.fixture
def gpus(monkeypatch):
    fake = FakeGpus(monkeypatch)
    fake.put_into_warp()
    yield fake
    fake.close()


def places(shard, gpus):
    """Where the parts of a shard are: its policy, its env, and what drew the pictures."""
    env = shard.envs.train  # built here, if it was not
    return str(shard.device), str(env.device), {*gpus.warp} - {"cpu"} or {"cpu"}


def join(monkeypatch, config, rank):
    """One of torchrun's two processes, as far as it comes without the other."""
    started = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    for name, value in started.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **options: None)
    monkeypatch.setattr(fsdp, "init_device_mesh", lambda kind, shape: None)
    return fsdp.FsdpRanks(config)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_is_on_its_own_gpu(gpus, monkeypatch, tmp_path, rank):
    ranks = join(monkeypatch, make(tmp_path, *PICTURES), rank)
    own = f"cuda:{rank}"
    assert places(ranks._shard, gpus) == (own, own, {own})
    assert gpus.current == [own]  # NCCL and Warp take the current one
    ranks.close()


def test_ranks_on_the_cpu_ask_for_no_gpu(gpus, monkeypatch, tmp_path):
    ranks = join(monkeypatch, make(tmp_path, *PICTURES[:2], "run.device=cpu"), 1)
    assert places(ranks._shard, gpus) == ("cpu", "cpu", {"cpu"})
    assert not gpus.current and not gpus.tensors
    ranks.close()


@pytest.mark.parametrize("key", ["run.device", "env.device"])
def test_one_gpu_for_all_ranks_is_refused(gpus, monkeypatch, tmp_path, key):
    config = make(tmp_path, *PICTURES, f"{key}=cuda:1")
    with pytest.raises(UserError, match=rf"{key} is 'cuda:1', which would put all 2 processes"):
        join(monkeypatch, config, 0)


@pytest.mark.parametrize(
    ("device", "where"), [("auto", "cuda:0"), ("cuda:1", "cuda:0"), ("cpu", "cpu")]
)
def test_a_ray_worker_is_on_the_gpu_that_it_was_given(gpus, tmp_path, device, where):
    config = make(tmp_path, *PICTURES[:2], f"run.device={device}", "run.workers=2")
    sent = to_dict(ray_pool.worker_device(config, gpus=1.0))
    gpus.see(1)  # Ray shows a worker its own alone, by CUDA_VISIBLE_DEVICES
    worker = ray_pool.RayWorker(sent, 1)
    assert places(worker._shard, gpus) == (where, where, {where})
    worker._shard.envs.close()


def test_a_ray_worker_without_a_gpu_is_on_the_cpu(gpus, tmp_path):
    config = make(tmp_path, *PICTURES, "run.workers=2")
    worker = ray_pool.RayWorker(to_dict(ray_pool.worker_device(config, gpus=0.0)), 0)
    assert places(worker._shard, gpus) == ("cpu", "cpu", {"cpu"})
    worker._shard.envs.close()


@pytest.mark.parametrize(
    ("device", "reserved", "words"),
    [
        ("cuda", 0.0, "the workers reserve no GPU. Give each one with --worker-gpus 1"),
        ("cuda:1", 1.0, "Ray gives every worker its GPU"),
    ],
)
def test_what_a_ray_worker_cannot_have_is_refused(tmp_path, device, reserved, words):
    config = make(tmp_path, f"env.device={device}", "run.workers=2")
    with pytest.raises(UserError, match=words):
        ray_pool.ray_rollouts(config, gpus=reserved)


@pytest.mark.skipif(find_spec("ray") is None, reason="pip install 'embodyrl[scale]'")
@pytest.mark.timeout(600)
def test_ray_gives_each_worker_a_gpu_of_its_own():
    """The real Ray, told that the machine has two."""
    ray_pool.make_token()
    ray = ray_pool.require_ray()

    class Asked:
        def visible(self):
            return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    ray.init("local", include_dashboard=False, num_cpus=2, num_gpus=2)
    try:
        actors = [ray.remote(Asked).options(num_gpus=1).remote() for _ in range(2)]
        seen = ray.get([actor.visible.remote() for actor in actors])
        assert sorted(seen) == ["0", "1"]
    finally:
        ray.shutdown()


def test_shards_of_one_process_are_on_its_device(gpus, tmp_path):
    config = make(tmp_path, *PICTURES[:2], "run.device=cuda:1", "run.workers=2")
    pool = LocalPool(config)
    for shard in pool._shards:
        shard.envs.train.reset()
        assert places(shard, gpus) == ("cuda:1", "cuda:1", {"cuda:1"})
    pool.close()
