"""``step_one_by_one``: envs of one process whose simulations MuJoCo steps one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick
from embodyrl.errors import try_each
from embodyrl.sims.silent_reset import was_reset_silently


def step_one_by_one(
    env: SteppedVecEnv, active: Tensor, step_one: Callable[[int], tuple[float, bool, Any]]
) -> Tick:
    """One step of the active envs; success ends an episode.

    An env that raised, or whose simulation MuJoCo reset by itself, has a fault, and
    ``env.fault_texts`` says which.

    Args:
        env: of N envs.
        active: (N,) bool.
        step_one: steps env k, and returns its reward, its success and its ``MjData``.
    """
    n = env.spec.num_envs
    reward = torch.zeros(n)
    success = torch.zeros(n, dtype=torch.bool)
    fault = torch.zeros(n, dtype=torch.bool)

    def work(k: int) -> None:
        reward[k], success[k], data = step_one(k)
        if was_reset_silently(data):
            fault[k] = True
            env.fault_texts[k] = "MuJoCo found NaN or infinity, and reset the simulation"

    failed = try_each(active.nonzero().flatten().tolist(), work)
    env.fault_texts |= failed
    fault[list(failed)] = True
    # A broken simulation solves nothing.
    success &= ~fault
    return Tick(*(x.to(env.device) for x in (reward, success.clone(), success, fault)))
