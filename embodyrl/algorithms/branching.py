"""GRPO in trees: the episodes of a group part at chosen chunks, and each level has its own advantage.

BranchGRPO (arXiv:2509.06040) branches the denoising of one picture: samples share the first steps,
and the gain of a branch over its siblings goes to the steps at which it differs. Here a trajectory
is an episode of chunks, each of K denoising steps, and it branches between chunks: members of a
group share the noise of their first chunks, thus their actions, thus their states, and part before
the chunks of ``branch_chunks``. The chunks between two branching points get the advantage of that
level (``functional.tree``).

Nothing branches inside the denoising of a chunk, no branch is pruned, and no env step is saved: each
member plays the shared chunks itself, because envs begin at initial states alone. What is gained is
the baseline: a chunk is compared with what else was done in the same state.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.tree import levels_of, numbers_within, tree_advantages
from embodyrl.rollouts.batches import EpisodeBatch
from embodyrl.rollouts.noise_tree import NoiseTree


def check_branches(config: Any) -> None:
    """Refuses a tree that is none, or beside which a setting would come to nothing.

    Raises:
        UserError: naming the setting.
    """
    branches = config.branches
    if not branches:
        why = "algorithm.branches is empty, so a group branches at its start alone"
        refuse_unread(config, "algorithm", ("branch_chunks",), why)
        return
    # The leaves are the episodes of a group.
    size = math.prod(branches)
    if size != config.group_size or branches[0] < 2:
        raise UserError(
            f"algorithm.branches {list(branches)} makes {size} episodes of a group, and "
            f"algorithm.group_size is {config.group_size}. Their product must be that, and the first "
            "of them 2 or more."
        )
    # Each further level begins with a later chunk.
    at = config.branch_chunks
    if len(at) != len(branches) - 1 or list(at) != sorted(set(at)):
        raise UserError(
            f"algorithm.branch_chunks {list(at)} must rise, and name one chunk fewer than "
            f"algorithm.branches {list(branches)} has numbers: the first branches at the start."
        )
    if config.baseline == "median":
        raise UserError(
            "algorithm.baseline=median does not go with algorithm.branches, which compares means of "
            "branches. Take mean or leave_one_out."
        )
    why = "algorithm.branches compares the branches of one group by one number"
    refuse_unread(config, "algorithm", ("per_reward", "replay_successes"), why)


def noise_tree(config: Any, generator: torch.Generator) -> NoiseTree | None:
    """The tree of groups that are about to be played; None where all part at the start."""
    if not config.branches:
        return None
    return NoiseTree(config.branches, config.branch_chunks, generator)


def branch_advantages(
    config: Any, batch: EpisodeBatch, worth: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """The advantage (B,) of each chunk, from what the episodes were worth (E,); and figures.

    ``branch_gap`` is the largest difference of proprioception, in its own units, between episodes
    that were to be in one state when they parted. It is 0 where an env is a function of initial
    state and actions, but for rounding.
    """
    c = config
    # Each leaf's advantage at each level, and the level of each of its chunks.
    returns = worth.view(-1, c.group_size)
    levels = tree_advantages(returns, c.branches, c.baseline, c.normalize).flatten(0, 1)
    number = numbers_within(batch.episode)
    level = levels_of(number, c.branch_chunks)
    advantage = levels.to(batch.logprob.device)[batch.episode, level]
    # Were those that part really in one state?
    gap = 0.0
    for i, start in enumerate(c.branch_chunks):
        # Those of one node, which part at this chunk.
        rows = (number == start).nonzero().flatten()
        node = batch.episode[rows] // math.prod(c.branches[i + 1 :])
        gap = max(gap, _spread(batch.obs.proprio[rows], node))
    return advantage, {"advantage_std": float(levels.std()), "branch_gap": gap}


def _spread(x: Tensor, group: Tensor) -> float:
    """The largest difference within a column of x (B, P) between rows of one group; 0 for none."""
    if not len(x):
        return 0.0
    _, inverse = group.unique(return_inverse=True)
    index = inverse[:, None].expand_as(x)
    ends = [
        torch.zeros_like(x).scatter_reduce(0, index, x, kind, include_self=False)
        for kind in ("amax", "amin")
    ]
    return float((ends[0] - ends[1]).max())
