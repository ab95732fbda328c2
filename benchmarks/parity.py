"""GAE, group advantages and PPO losses beside RLinf and rsl_rl, on the same numbers in one run: equal, and how fast.

    uv pip install --target /tmp/peers --no-deps rlinf==0.3.0 rsl-rl-lib==5.5.1 tensordict pyvers
    uv pip install --target /tmp/peers "ray[default]" sortedcontainers
    python benchmarks/parity.py --peers /tmp/peers --out benchmarks/parity.json

The peers stay out of this project's environment; one that is not installed is left out of the
result by name. Their own functions are called. The two sides take turns, in CPU time;
``times_faster`` is the median of each pair's ratio.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from embodyrl.functional.losses import ppo_policy_loss, value_loss
from embodyrl.functional.returns import gae, group_advantages
from embodyrl.storage.provenance import git_commit, hardware, versions

GAMMA, LAMBDA, T, N, B, GROUPS, SIZE = 0.99, 0.95, 64, 256, 4096, 512, 8
Result = dict[str, Any]


def compare(
    name: str,
    ours: Callable[[], Any],
    theirs: Callable[[], Any],
    note: str = "",
    timed: bool = True,
) -> Result:
    """Largest difference, and theirs over ours in time."""
    a, b = ours(), theirs()
    pairs = list(zip(a, b, strict=True)) if isinstance(a, tuple) else [(a, b)]
    difference = max(float((x - y).abs().max()) for x, y in pairs)
    scale = max(float(y.abs().max()) for _, y in pairs)
    row: Result = {
        "what": name,
        "max_difference": difference,
        "equal": difference <= 2e-5 * max(scale, 1.0),
    }
    if note:
        row["note"] = note
    if timed:
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for i in range(300):
            for side, call in (("ours", ours), ("theirs", theirs))[:: 1 if i % 2 else -1]:
                began = time.process_time()
                call()
                times[side].append(time.process_time() - began)
        row |= {f"{side}_ms": 1e3 * statistics.median(values) for side, values in times.items()}
        row["times_faster"] = statistics.median(
            t / o for o, t in zip(times["ours"], times["theirs"], strict=True)
        )
    return row


def rollout(truncate: bool) -> dict[str, Tensor]:
    """Rewards, values of T + 1 observations, ends; after an end the next value is that of a fresh episode."""
    g = torch.Generator().manual_seed(0)
    reward, value = torch.randn(T, N, generator=g), torch.randn(T + 1, N, generator=g)
    done = torch.rand(T, N, generator=g) < 0.05
    return {
        "reward": reward,
        "value": value,
        "done": done,
        "terminated": torch.zeros_like(done) if truncate else done,
        "last_value": torch.where(
            done, torch.randn(T, N, generator=g), value[1:]
        ),  # of the last observation
    }


def our_gae(r: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Advantages and returns."""
    discount = torch.full_like(r["reward"], GAMMA)
    return gae(
        r["reward"], r["value"][:-1], r["last_value"], discount, r["terminated"], r["done"], LAMBDA
    )


def decisions() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """New and old log-probabilities, advantages and a mask."""
    g = torch.Generator().manual_seed(1)
    old, change, advantage = (torch.randn(B, generator=g) for _ in range(3))
    return old + 0.5 * change, old, advantage, torch.rand(B, generator=g) < 0.9


def with_gradient(loss: Callable[[Tensor], Tensor], at: Tensor) -> tuple[Tensor, Tensor]:
    """A loss and its gradient."""
    leaf = at.clone().requires_grad_()
    value = loss(leaf)
    return value.detach(), torch.autograd.grad(value, leaf)[0]


def against_rlinf() -> list[Result]:
    """Everything that RLinf has a function for."""
    advantages = importlib.import_module("rlinf.algorithms.advantages")
    losses = importlib.import_module("rlinf.algorithms.losses")

    def their_gae(r: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        dones = torch.cat([torch.zeros(1, N, dtype=torch.bool), r["done"]])
        return advantages.compute_gae_advantages_and_returns(
            r["reward"], GAMMA, LAMBDA, r["value"], normalize_advantages=False, dones=dones
        )

    def their_groups(returns: Tensor) -> Tensor:
        mask = torch.ones(1, returns.numel())
        return advantages.compute_grpo_advantages(returns, mask, SIZE)[0].view(-1, SIZE)

    g = torch.Generator().manual_seed(2)
    returns, alike = torch.randn(GROUPS, SIZE, generator=g), torch.full((GROUPS, SIZE), 0.1)
    new, old, advantage, mask = decisions()

    def our_loss(x: Tensor, weight: Tensor | None = None, anchor: Tensor = old) -> Tensor:
        return ppo_policy_loss(x, anchor, advantage, mask, 0.2, 0.28, 3.0, weight)[0]

    def their_loss(x: Tensor) -> Tensor:
        return losses.compute_ppo_actor_loss(x, old, 0.2, 0.28, advantage, mask, 3.0)[0]

    value, ret = torch.randn(B, generator=g), torch.randn(B, generator=g)
    before = value + 0.3 * torch.randn(B, generator=g)

    def their_value(x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.compute_ppo_critic_loss(x, ret, before, 0.2, 10.0, mask)

    proximal = old + 0.1 * torch.randn(B, generator=g)
    importance = (proximal - old).exp()

    def their_decoupled(x: Tensor, cap: float) -> Tensor:
        options = {"loss_mask": mask, "clip_ratio_c": 3.0, "behave_weight_threshold": cap}
        return losses.compute_decoupled_ppo_actor_loss(
            x, old, 0.2, 0.28, advantage, proximal, **options
        )[0]

    ended, cut = rollout(truncate=False), rollout(truncate=True)
    return [
        compare("GAE, every end a termination", partial(our_gae, ended), partial(their_gae, ended)),
        compare(
            "GAE, every end a time limit",
            partial(our_gae, cut),
            partial(their_gae, cut),
            (
                "not equal: RLinf has one flag for both ends and never bootstraps; ours does, from "
                "the last observation"
            ),
            timed=False,
        ),
        compare(
            "group advantages",
            lambda: group_advantages(returns),
            lambda: their_groups(returns),
            "both divide by std + 1e-6",
        ),
        compare(
            "group advantages of equal rewards of .1",
            lambda: group_advantages(alike),
            lambda: their_groups(alike),
            "not equal: right is 0; RLinf gives what rounding leaves of the mean, divided by 1e-6",
            timed=False,
        ),
        compare(
            "PPO loss and gradient, dual clip, clip-higher",
            lambda: with_gradient(our_loss, new),
            lambda: with_gradient(their_loss, new),
        ),
        compare(
            "decoupled PPO loss and gradient, no weight above the cap",
            lambda: with_gradient(lambda x: our_loss(x, importance, proximal), new),
            lambda: with_gradient(lambda x: their_decoupled(x, 100.0), new),
        ),
        compare(
            "decoupled PPO loss and gradient, cap 1.1",
            lambda: with_gradient(lambda x: our_loss(x, importance.clamp(max=1.1), proximal), new),
            lambda: with_gradient(lambda x: their_decoupled(x, 1.1), new),
            (
                "not equal: RLinf drops what is above the cap and divides by what is left, ours "
                "truncates the weight"
            ),
            timed=False,
        ),
        compare(
            "value loss and gradient, Huber 10, clip .2",
            lambda: with_gradient(lambda x: value_loss(x, before, ret, mask, 0.2, 10.0)[0], value),
            lambda: with_gradient(lambda x: their_value(x)[0], value),
        ),
        compare(
            "value clip fraction",
            lambda: value_loss(value, before, ret, mask, 0.2, 10.0)[1]["value_clip_fraction"],
            lambda: their_value(value)[1]["critic/value_clip_ratio"],
            "not equal: RLinf measures after clipping, where only rounding ever exceeds the clip",
            timed=False,
        ),
    ]


def against_rsl_rl() -> list[Result]:
    """GAE; its loss stands inside a method that cannot be called alone."""
    ppo = importlib.import_module("rsl_rl.algorithms.ppo").PPO

    def their_gae(r: dict[str, Tensor], bootstrap: bool = False) -> tuple[Tensor, Tensor]:
        reward = r["reward"]
        if bootstrap:  # as process_env_step does: by the value of the observation before the step
            reward = reward + GAMMA * r["value"][:-1] * r["done"]
        names = {
            "rewards": reward,
            "values": r["value"][:-1],
            "dones": r["done"],
            "returns": torch.zeros(T, N),
        }
        storage = SimpleNamespace(num_transitions_per_env=T, **names)

        class Critic:
            get_hidden_state = staticmethod(lambda: None)
            reset = staticmethod(lambda hidden_state: None)
            __call__ = staticmethod(lambda obs: r["value"][-1])

        keys = {"gamma": GAMMA, "lam": LAMBDA, "normalize_advantage_per_mini_batch": True}
        ppo.compute_returns(SimpleNamespace(storage=storage, critic=Critic(), **keys), None)
        return storage.advantages, storage.returns

    ended, cut = rollout(truncate=False), rollout(truncate=True)
    return [
        compare("GAE, every end a termination", partial(our_gae, ended), partial(their_gae, ended)),
        compare(
            "GAE, every end a time limit",
            partial(our_gae, cut),
            partial(their_gae, cut, bootstrap=True),
            (
                "not equal: rsl_rl bootstraps by the value of the observation before the last "
                "step, ours by the last one's"
            ),
            timed=False,
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="", help="folder that the peers were installed into")
    parser.add_argument("--out", default="benchmarks/parity.json")
    args = parser.parse_args()
    sys.path.append(args.peers)  # last, so that nothing of this project's environment is replaced
    torch.set_num_threads(1)
    out: dict[str, Any] = {}
    for package, run in (("rlinf", against_rlinf), ("rsl-rl-lib", against_rsl_rl)):
        try:
            out[package] = {"version": importlib.metadata.version(package), "results": run()}
        except (ImportError, importlib.metadata.PackageNotFoundError) as error:
            out[package] = {
                "missing": f"{error}; see the head of benchmarks/parity.py for how to install it"
            }
    sizes = {"gae": [T, N], "groups": [GROUPS, SIZE], "decisions": B}
    out |= {"sizes": sizes, "commit": git_commit(), "hardware": hardware(), "versions": versions()}
    Path(args.out).write_text(json.dumps(out, indent=1) + "\n")
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
