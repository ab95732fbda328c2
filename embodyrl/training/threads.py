"""How many of PyTorch's threads a run uses on the CPU: measured, where nobody says it.

More threads are not always faster: small nets wait for them, and other programs take their cores.
"""

from __future__ import annotations

import os
import time

import torch

from embodyrl import starting
from embodyrl.algorithm import Algorithm
from embodyrl.machine import usable_cores
from embodyrl.types import EnvSpec, Obs

BUDGET = 0.6
"""Seconds that a choice may take, beside one first try."""
WORTH = 1.1
"""More threads are taken where they are so many times as fast: the others serve the simulator."""
MOST_ROWS = 256


def set_threads(algorithm: Algorithm, spec: EnvSpec, before: int | None = None) -> int:
    """Sets PyTorch's threads for a run on the CPU, and returns their number.

    ``OMP_NUM_THREADS`` decides where it is set.

    Args:
        algorithm: is measured (``Algorithm.rehearse``).
        spec: of its env.
        before: the number with which the run began, if it goes on. It stays where there are as
            many cores, so that the run computes what it would have computed without a stop.
    """
    # Somebody decided already, or there is nothing to decide.
    cores = usable_cores()
    if cores < 2 or "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    if before is not None and 1 <= before <= cores:
        torch.set_num_threads(before)
        return before
    # A new run, or one that moved to a smaller machine.
    with starting.step("measuring how many threads are fastest"):
        times = measure(algorithm, spec, cores)
    chosen = fastest(times)
    torch.set_num_threads(chosen)
    table = ", ".join(f"{n}: {1e3 * seconds:.0f} ms" for n, seconds in times.items())
    print(f"run.threads={chosen} is fastest here, with something like a gradient step ({table}).")
    return chosen


def measure(algorithm: Algorithm, spec: EnvSpec, cores: int) -> dict[int, float]:
    """Threads -> seconds of a rehearsal: the best of several tries, made in turn.

    A net whose first try alone takes ``BUDGET`` is large enough for all cores: then nothing else
    is tried.
    """
    rows = min(MOST_ROWS, getattr(algorithm.config, "batch_size", 64))
    obs = _blank(spec, rows).to(next(algorithm.policy.parameters()).device)
    # The first try also builds what later ones keep.
    torch.set_num_threads(cores)
    first = _rehearsal(algorithm, obs)
    if first > BUDGET:
        return {cores: first}
    # In turn, so that other work on the machine hits all alike; the best try has least of it.
    times: dict[int, float] = {}
    end = time.perf_counter() + BUDGET
    while not times or time.perf_counter() < end:
        for threads in candidates(cores):
            torch.set_num_threads(threads)
            took = _rehearsal(algorithm, obs)
            times[threads] = min(times.get(threads, took), took)
    return times


def candidates(cores: int) -> list[int]:
    """The powers of two below the number of cores, and that number."""
    return [*(1 << k for k in range(cores.bit_length()) if 1 << k < cores), cores]


def fastest(times: dict[int, float]) -> int:
    """The fewest threads than which no more are ``WORTH`` their cores."""
    best = min(times.values())
    return min(n for n, seconds in times.items() if seconds <= WORTH * best)


def _rehearsal(algorithm: Algorithm, obs: Obs) -> float:
    began = time.perf_counter()
    algorithm.rehearse(obs, torch.Generator().manual_seed(0))
    return time.perf_counter() - began


def _blank(spec: EnvSpec, rows: int) -> Obs:
    """Observations of nothing."""
    images = {
        name: torch.zeros(rows, *size, 3, dtype=torch.uint8) for name, size in spec.cameras.items()
    }
    privileged = torch.zeros(rows, spec.privileged_dim) if spec.privileged_dim else None
    sentence = spec.tasks[0] if spec.tasks else ""
    obs = Obs(images, torch.zeros(rows, spec.proprio_dim), [sentence] * rows, privileged)
    return obs.at_start(spec.history)
