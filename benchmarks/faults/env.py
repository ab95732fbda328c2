"""Kills, stops and crashes the worker processes of simulators at random moments, many times.

    python -m benchmarks.faults workers-mujoco

A try plays an episode twice, with the same initial states and actions: undisturbed, and with one
worker of two being hit by a signal. It survives if that worker's envs, and no others, have a fault;
if every chunk that counts is bit-equal to that of the undisturbed episode; and if after a reset all
envs go on.
"""

from __future__ import annotations

import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from embodyrl.config import env_config
from embodyrl.rollouts.fault_watch import FaultWindow
from embodyrl.sims.workers.pool import PooledVecEnv
from embodyrl.types import Step

ENVS: dict[str, tuple[str, tuple[str, ...], float]] = {
    "mujoco": ("mujoco", ("env.task=reach", "env.renderer=none", "env.num_threads=1"), 5.0),
    "gymnasium": ("gymnasium", ("env.id=Hopper-v5",), 5.0),
    "maniskill": ("maniskill", ("env.task=PickCube-v1", "env.backend=cpu"), 20.0),
    "libero": ("libero", ("env.task_ids=[0]", "env.cameras=[]", "env.num_threads=1"), 20.0),
}
"""Name -> registered env, its settings, and the deadline of a step in seconds."""
SIGNALS = (signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV)
NUM_ENVS = 2
CHUNKS = 4
HORIZON = 4


def survive(tries: int, seed: int, envs: Sequence[str] = tuple(ENVS)) -> dict[str, int]:
    """Tries so many signals in each of the envs.

    Args:
        tries: for each env; the signals take turns.
        seed: of initial states, actions, moments and victims.
        envs: names in ``ENVS``.

    Returns:
        ``tries`` and ``survived``; ``made_up``, the chunks that counted and were not those of the
        undisturbed episode; ``seconds``, the longest time from a signal to the next step in which
        every env acted (rounded up), which holds the deadline of a step where a worker is stopped.
    """
    total = {"tries": 0, "survived": 0, "made_up": 0, "seconds": 0}
    for name in envs:
        found = _survive(name, tries, seed)
        for key, value in found.items():
            total[key] = max(total[key], value) if key == "seconds" else total[key] + value
    return total


def _survive(name: str, tries: int, seed: int) -> dict[str, int]:
    registered, settings, deadline = ENVS[name]
    config = env_config(registered, [*settings, f"env.num_envs={NUM_ENVS}"])
    pool = PooledVecEnv(registered, config, num_workers=2, step_timeout=deadline)
    rng = random.Random(seed)
    out = {"tries": 0, "survived": 0, "made_up": 0, "seconds": 0}
    try:
        for number in range(tries):
            # So many faults would stop a run; here they are wanted.
            pool._faults = FaultWindow()
            survived, made_up, seconds = _one_try(pool, rng, SIGNALS[number % len(SIGNALS)])
            out["tries"] += 1
            out["survived"] += survived
            out["made_up"] += made_up
            out["seconds"] = max(out["seconds"], math.ceil(seconds))
    finally:
        pool.close()
    return out


def _one_try(
    pool: PooledVecEnv, rng: random.Random, kind: signal.Signals
) -> tuple[bool, int, float]:
    limit = pool.spec.num_init_states or 10_000
    inits = [rng.randrange(limit) for _ in range(NUM_ENVS)]
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    shape = (CHUNKS, NUM_ENVS, HORIZON, pool.spec.action_dim)
    actions = torch.rand(shape, generator=generator) * 0.6 - 0.3
    # Undisturbed, then with the signal before or in one of the first chunks.
    reference = _play(pool, inits, actions, lambda t: None)
    victim = rng.randrange(len(pool._workers))
    at = rng.randrange(CHUNKS - 1)
    delay = rng.choice([0.0, rng.uniform(0.0, 0.02)])
    hit: list[float] = []

    def disturb(t: int) -> None:
        if t == at:
            process: Any = pool._workers[victim].process
            threading.Timer(
                delay, lambda: (hit.append(time.monotonic()), _send(process.pid, kind))
            ).start()

    steps = _play(pool, inits, actions, disturb)
    pool.reset()
    after = pool.step(actions[0])
    # Judge them.
    faults = {k for step in steps for k in step.fault.nonzero().flatten().tolist()}
    made_up = sum(
        int(step.valid[k].any() and not _equal(step, other, k))
        for step, other in zip(steps, reference, strict=True)
        for k in range(NUM_ENVS)
    )
    others = [k for k in range(NUM_ENVS) if k != victim]
    untouched = all(_equal(a, b, k) for a, b in zip(steps, reference, strict=True) for k in others)
    goes_on = bool(after.valid.any(1).all())
    return faults == {victim} and untouched and goes_on, made_up, time.monotonic() - hit[0]


def _send(pid: int, kind: signal.Signals) -> None:
    os.kill(pid, kind)


def _play(
    pool: PooledVecEnv, inits: list[int], actions: torch.Tensor, before: Callable[[int], None]
) -> list[Step]:
    pool.reset(init=inits)
    steps = []
    for t, chunk in enumerate(actions):
        before(t)
        steps.append(pool.step(chunk))
    return steps


def _equal(a: Step, b: Step, k: int) -> bool:
    """Whether two chunks of env k are the same to the last bit."""
    names = ("reward", "valid", "terminated", "truncated", "success")
    return all(torch.equal(getattr(a, n)[k], getattr(b, n)[k]) for n in names) and torch.equal(
        a.obs.proprio[k], b.obs.proprio[k]
    )
