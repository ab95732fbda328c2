"""Which device a name means: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.

One rule for all keys (``run.device``, ``env.device``, ``--device``):

    cpu       the CPU, for simulator and renderer too, also where there are GPUs
    cuda      this process's own GPU: under torchrun the one of its rank, in a Ray worker the one
              that Ray gave it, otherwise the first that PyTorch sees
    cuda:N    exactly that one of the GPUs that PyTorch sees
    auto      ``cuda`` where PyTorch sees a GPU, otherwise ``cpu``; for an env, the run's device
              where any of it can use a GPU (``EnvConfig.uses_gpu``), otherwise ``cpu``
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

import torch

from embodyrl.errors import UserError


def pick_device(name: str, key: str = "run.device") -> torch.device:
    """The device of a name; a GPU always has its number.

    Args:
        name: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``; on a Mac also ``"mps"``.
        key: the setting that holds it, for messages.

    Raises:
        UserError: no device, a GPU that PyTorch does not see, or one GPU for all of torchrun's
            processes.
    """
    # What is no GPU of NVIDIA's.
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if name == "mps" and torch.backends.mps.is_available():
        return torch.device("mps")
    if not re.fullmatch(r"auto|cuda(:\d+)?", name):
        raise UserError(
            f"{key} is {name!r}, which is no device here. Use auto, cpu, cuda, or cuda:N for the "
            "GPU of number N."
        )
    if not torch.cuda.is_available():
        raise UserError(
            f"{key} is {name!r}, but PyTorch sees no GPU here. Use {key}=auto or {key}=cpu."
        )
    # A number that the user chose, or the process's own GPU.
    count = torch.cuda.device_count()
    _, _, number = name.partition(":")
    if not number:
        return torch.device("cuda", _own_gpu(count, key))
    # A process may say its own GPU by its number, as it does to its workers.
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if ranks > 1 and number != os.environ.get("LOCAL_RANK"):
        raise UserError(
            f"{key} is {name!r}, which would put all {ranks} processes that torchrun started here "
            f"on one GPU. Use {key}=cuda: then each has its own."
        )
    if int(number) >= count:
        has = "one GPU, cuda:0" if count == 1 else f"{count} GPUs, cuda:0 to cuda:{count - 1}"
        raise UserError(f"{key} is {name!r}, but PyTorch sees {has}.")
    return torch.device("cuda", int(number))


def _own_gpu(count: int, key: str) -> int:
    """The number of this process's GPU among the ``count`` that PyTorch sees."""
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if rank >= count:
        ranks = os.environ.get("LOCAL_WORLD_SIZE", str(rank + 1))
        raise UserError(
            f"torchrun started {ranks} processes on this machine, but PyTorch sees "
            f"{count} GPU{'s' if count > 1 else ''}. Start {count} (--nproc-per-node {count}), or "
            f"use {key}=cpu."
        )
    return rank


def use_device(name: str, key: str = "run.device") -> torch.device:
    """``pick_device``, and makes a GPU the current one of this process.

    Libraries that know only "the GPU" then take the same one.
    """
    device = pick_device(name, key)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def env_device(name: str, uses_gpu: bool, run_device: str = "auto") -> torch.device:
    """The device of a simulator, its renderer and the tensors that it hands over.

    Args:
        name: ``env.device``.
        uses_gpu: whether any part of the simulator can run on a GPU.
        run_device: ``run.device``, which ``"auto"`` follows.

    Raises:
        UserError: see ``pick_device``.
    """
    if name != "auto":
        return pick_device(name, "env.device")
    device = pick_device(run_device)
    return device if uses_gpu and device.type == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def keep_random_state() -> Iterator[None]:
    """What this block draws from PyTorch's global generators changes nothing after it.

    PyTorch's own ``fork_rng`` opens every GPU of the machine, in every process. Here it is the
    current GPU, and no GPU in a process that has used none.
    """
    used = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=used):
        yield
