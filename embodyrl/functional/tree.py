"""Advantages in a tree of episodes: each level is compared with its own siblings.

The idea is BranchGRPO's (arXiv:2509.06040): rollouts share a prefix and part at branching points, so
that credit goes to the level at which they part. A group of S = b_0 b_1 ... b_{L-1} episodes is the
leaves of a tree: its root has b_0 children, each of them b_1, and so on. Leaves are numbered in
order, so those below a node follow one another. With the mean return R of the leaves below a node,
the advantage of level l is

    A_l(node) = R(node) - R(parent)

A leaf's advantages over the levels sum to R(leaf) - R(root), its advantage in a plain group. Pure
functions of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

BASELINES = ("mean", "leave_one_out")


def tree_advantages(
    returns: Float[Tensor, "g s"],
    branches: Sequence[int],
    baseline: str = "mean",
    normalize: bool = True,
    eps: float = 1e-6,
) -> Float[Tensor, "g s l"]:
    """The advantage of each leaf at each of L levels.

    A level at which nothing branches (b = 1) has no siblings; it has the advantage of the level
    before. So (S, 1, 1) gives at every level what ``returns.group_advantages`` gives.

    Args:
        returns: G groups of S leaves.
        branches: b_0 .. b_{L-1}, whose product is S; b_0 is 2 or more.
        baseline: the ``mean`` of all siblings, or ``leave_one_out``: of the others. That multiplies
            by b / (b - 1), which makes the gradient of every level unbiased (RLOO).
        normalize: divide by the standard deviation of the group's returns (of a sample: S - 1), one
            number for all levels.
        eps: added to it.
    """
    count, size = returns.shape
    if math.prod(branches) != size or branches[0] < 2 or baseline not in BASELINES:
        raise ValueError(f"{size} leaves, branches {tuple(branches)}, baseline {baseline!r}.")
    # Subtracting the first return changes no difference, and makes equal returns exactly 0.
    shifted = returns - returns[:, :1]
    parent = shifted.mean(1, keepdim=True).expand_as(shifted)
    levels: list[Tensor] = []
    leaves = size
    for b in branches:
        leaves //= b
        # Without siblings there is nothing to compare.
        if b == 1:
            levels.append(levels[-1])
            continue
        # The mean over the leaves below each node, put at each of these leaves.
        below = shifted.view(count, -1, leaves).mean(2, keepdim=True)
        node = below.expand(-1, -1, leaves).reshape(count, size)
        # R - mean of the others = b / (b - 1) (R - mean of all).
        scale = b / (b - 1) if baseline == "leave_one_out" else 1.0
        levels.append((node - parent) * scale)
        # The next level is compared within this node.
        parent = node
    advantage = torch.stack(levels, dim=2)
    if normalize:
        advantage = advantage / (shifted.std(1)[:, None, None] + eps)
    return advantage


def nodes(
    leaf: Int[Tensor, " n"], level: Int[Tensor, " n"], branches: Sequence[int]
) -> Int[Tensor, " n"]:
    """The node of each leaf at a level, numbered through over the nodes of that level.

    Args:
        leaf: numbered through over the groups.
        level: 0 for the root's children.
        branches: see ``tree_advantages``.
    """
    # Leaves below a node of each level.
    below = [math.prod(branches[i + 1 :]) for i in range(len(branches))]
    return leaf // torch.tensor(below, device=leaf.device)[level]


def levels_of(chunk: Int[Tensor, " n"], starts: Sequence[int]) -> Int[Tensor, " n"]:
    """The level to which each chunk of an episode belongs.

    Args:
        chunk: its number in its episode, from 0.
        starts: the chunks with which levels 1, 2, ... begin.
    """
    return torch.bucketize(chunk, torch.tensor(starts, device=chunk.device), right=True)


def numbers_within(episode: Int[Tensor, " b"]) -> Int[Tensor, " b"]:
    """The number of each row among the rows of its episode, in their order, from 0."""
    # Rows sorted by episode; each counts from the first row of its own.
    order = episode.argsort(stable=True)
    _, inverse, count = episode.unique(return_inverse=True, return_counts=True)
    first = count.cumsum(0) - count
    number = torch.empty_like(episode)
    number[order] = torch.arange(len(episode), device=episode.device) - first[inverse[order]]
    return number
