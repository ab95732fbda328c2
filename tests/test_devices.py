"""What a device's name means, for every key: auto, cpu, cuda, cuda:N, alone and under torchrun."""

import pytest
import torch

from embodyrl.devices import env_device, keep_random_state, pick_device
from embodyrl.errors import UserError


@pytest.fixture
def machine(monkeypatch):
    """A machine with so many GPUs, where this process is one of torchrun's if it has a rank."""

    def make(gpus, rank=None, ranks=1):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        for key, value in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", ranks)):
            if rank is None:
                monkeypatch.delenv(key, raising=False)
            else:
                monkeypatch.setenv(key, str(value))

    return make


@pytest.mark.parametrize(
    ("gpus", "rank", "ranks", "name", "device"),
    [
        (0, None, 1, "auto", "cpu"),
        (2, None, 1, "auto", "cuda:0"),
        (2, None, 1, "cpu", "cpu"),
        (2, None, 1, "cuda", "cuda:0"),
        (2, None, 1, "cuda:1", "cuda:1"),
        (2, 1, 2, "auto", "cuda:1"),
        (2, 1, 2, "cuda", "cuda:1"),
        (2, 1, 2, "cpu", "cpu"),
        (0, 1, 2, "auto", "cpu"),
        (2, 1, 2, "cuda:1", "cuda:1"),  # its own by its number, as it tells its workers
        (2, 0, 1, "cuda:1", "cuda:1"),  # one process on this machine, others elsewhere
    ],
)
def test_a_name_is_a_device(machine, gpus, rank, ranks, name, device):
    machine(gpus, rank, ranks)
    assert pick_device(name) == torch.device(device)


@pytest.mark.parametrize(
    ("gpus", "rank", "ranks", "name", "words"),
    [
        (2, None, 1, "gpu", "'gpu', which is no device here. Use auto, cpu, cuda, or cuda:N"),
        (0, None, 1, "gpu", "'gpu', which is no device here"),
        (2, None, 1, "cuda:-1", "which is no device here"),
        (2, None, 1, "cuda:one", "which is no device here"),
        (2, None, 1, "", "which is no device here"),
        (0, None, 1, "cuda", "PyTorch sees no GPU here. Use env.device=auto"),
        (2, None, 1, "cuda:2", "PyTorch sees 2 GPUs, cuda:0 to cuda:1"),
        (1, None, 1, "cuda:1", "PyTorch sees one GPU, cuda:0"),
        (2, 0, 2, "cuda:1", "would put all 2 processes that torchrun started here on one GPU"),
        (1, 1, 2, "auto", "started 2 processes on this machine, but PyTorch sees 1 GPU. Start 1"),
    ],
)
def test_what_cannot_be_is_refused_in_words(machine, gpus, rank, ranks, name, words):
    machine(gpus, rank, ranks)
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        pick_device(name, "env.device")


@pytest.mark.parametrize(
    ("name", "uses_gpu", "run", "device"),
    [
        ("auto", True, "cuda:1", "cuda:1"),
        ("auto", True, "auto", "cuda:0"),
        ("auto", True, "cpu", "cpu"),
        ("auto", False, "cuda:1", "cpu"),
        ("cuda:1", True, "cuda:0", "cuda:1"),
        ("cuda", False, "cpu", "cuda:0"),
        ("cpu", True, "cuda", "cpu"),
    ],
)
def test_an_env_follows_the_run_or_its_own_key(machine, name, uses_gpu, run, device):
    machine(2)
    assert env_device(name, uses_gpu, run) == torch.device(device)


def test_random_state_is_kept_without_opening_a_gpu(machine, monkeypatch):
    machine(2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: pytest.fail("opens a GPU"))
    before = torch.random.get_rng_state()
    with keep_random_state():
        torch.rand(3)
        assert not torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(torch.random.get_rng_state(), before)
