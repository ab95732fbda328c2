"""``collect``: the policy acts in the env, and what happened becomes a ``RolloutBatch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from embodyrl.buffers import Episode, RolloutBatch
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.policy import Policy
from embodyrl.types import DenoisingTrace, Obs, Step


@torch.no_grad()
def collect(
    env: VecEnv,
    policy: Policy,
    num_chunks: int,
    *,
    inits: Tensor,
    generator: torch.Generator,
    device: torch.device | str = "cpu",
    between: Callable[[], None] = lambda: None,
) -> RolloutBatch:
    """Runs every env for ``num_chunks`` chunks, starting a new episode wherever one ended.

    Starting from named initial states each time, rather than going on where the last rollout stopped, makes a rollout
    a function of (parameters, inits, generator) alone: a resumed run repeats it bit for bit, and no simulator state
    needs to be saved.

    Args:
        env: N envs.
        policy: sampled in ``"train"`` mode.
        num_chunks: T.
        inits: (>= 1,) initial states, used in order; the first N at the start, and each reset takes the next. When
            they run out they are used again from the first.
        generator: source of the policy's noise.
        device: of the policy.
        between: called before every chunk; may raise, to give the rollout up.

    Raises:
        UserError: there are no initial states, or the policy has no critic.
    """
    if len(inits) == 0:
        raise UserError("A rollout needs initial states, but the list of them is empty.")
    queue = _Queue(inits)
    n = env.spec.num_envs
    current = queue.take(n)
    obs = env.reset(init=current).to(device)
    reward_sum, length = torch.zeros(n), torch.zeros(n, dtype=torch.long)
    all_obs: list[Obs] = []
    traces: list[DenoisingTrace] = []
    logprobs: list[Tensor] = []
    values: list[Tensor] = []
    next_values: list[Tensor] = []
    steps: list[Step] = []
    episodes: list[Episode] = []
    for _ in range(num_chunks):
        between()
        sample = policy.sample(obs, generator=generator, mode="train")
        if sample.trace is None or sample.logprob is None or sample.value is None:
            raise UserError(f"{type(policy).__name__} gives no trace, log-probability or value, which a rollout needs.")
        step = env.step(sample.actions)
        after = step.obs.to(device)
        all_obs.append(obs)
        traces.append(sample.trace)
        logprobs.append(sample.logprob)
        values.append(sample.value)
        next_values.append(policy.value(after))
        steps.append(step)
        reward_sum += step.reward.sum(1).cpu()
        length += step.valid.sum(1).cpu()
        obs = after
        if ended := step.done.nonzero().flatten().tolist():
            fault = step.log.get("fault", torch.zeros(n))
            for k in ended:
                if not bool(fault[k]):
                    init, success = current[k], bool(step.success[k])
                    task = env.spec.task_of(init)
                    episodes.append(Episode(init, task, success, float(reward_sum[k]), int(length[k])))
                reward_sum[k], length[k] = 0.0, 0
            fresh = queue.take(len(ended))
            for k, init in zip(ended, fresh, strict=True):
                current[k] = init
            obs = env.reset(ended, init=fresh).to(device)
    return RolloutBatch(
        obs=Obs.cat(all_obs),
        trace=DenoisingTrace.cat(traces),
        logprob=torch.cat(logprobs),
        value=torch.stack(values),
        next_value=torch.stack(next_values),
        reward=torch.stack([s.reward for s in steps]).to(device),
        valid=torch.stack([s.valid for s in steps]).to(device),
        terminated=torch.stack([s.terminated for s in steps]).to(device),
        truncated=torch.stack([s.truncated for s in steps]).to(device),
        episodes=episodes,
        env_steps=int(sum(int(s.valid.sum()) for s in steps)),
    )


class _Queue:
    def __init__(self, inits: Tensor) -> None:
        self.inits = cast(list[int], inits.tolist())
        self.used = 0

    def take(self, count: int) -> list[int]:
        out = [self.inits[(self.used + i) % len(self.inits)] for i in range(count)]
        self.used += count
        return out
