"""Advantages in a tree: by hand, as plain groups, and as an unbiased gradient by enumeration."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from embodyrl.functional.returns import group_advantages
from embodyrl.functional.tree import levels_of, nodes, numbers_within, tree_advantages

F64 = torch.float64


def returns(groups: int = 5, size: int = 12) -> torch.Tensor:
    return torch.randn(groups, size, generator=torch.Generator().manual_seed(0), dtype=F64)


def test_by_hand() -> None:
    # Two branches of two leaves: their means are 1 and 4, and 2.5 that of all.
    found = tree_advantages(torch.tensor([[0.0, 2.0, 3.0, 5.0]]), (2, 2), normalize=False)
    assert found[0, :, 0].tolist() == [-1.5, -1.5, 1.5, 1.5]
    assert found[0, :, 1].tolist() == [-1.0, 1.0, -1.0, 1.0]
    # Against the other branch alone it is twice as much.
    other = tree_advantages(
        torch.tensor([[0.0, 2.0, 3.0, 5.0]]), (2, 2), "leave_one_out", normalize=False
    )
    torch.testing.assert_close(other, 2 * found)


@pytest.mark.parametrize("branches", [(12,), (2, 6), (2, 2, 3), (3, 4)])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_leafs_levels_sum_to_its_advantage_in_a_plain_group(branches, normalize) -> None:
    found = tree_advantages(returns(), branches, normalize=normalize)
    assert found.shape == (5, 12, len(branches))
    flat = group_advantages(returns(), "mean", normalize)
    torch.testing.assert_close(found.sum(2), flat)
    # The siblings of every node sum to 0, weighted by their leaves.
    assert float(found.sum(1).abs().max()) < 1e-12


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("branches", [(12,), (12, 1), (12, 1, 1)])
def test_one_branch_at_all_levels_but_the_root_is_grpo(baseline, branches) -> None:
    flat = group_advantages(returns(), baseline)
    found = tree_advantages(returns(), branches, baseline)
    for level in range(len(branches)):
        torch.testing.assert_close(found[..., level], flat)


def test_a_level_without_siblings_has_the_advantage_of_the_one_before() -> None:
    with_gap = tree_advantages(returns(), (3, 1, 4))
    plain = tree_advantages(returns(), (3, 4))
    torch.testing.assert_close(with_gap[..., [0, 2]], plain)
    torch.testing.assert_close(with_gap[..., 1], plain[..., 0])


def test_equal_returns_teach_nothing() -> None:
    assert not tree_advantages(torch.full((2, 4), 0.1), (2, 2)).any()


P0, P1 = 0.3, torch.tensor([0.6, 0.2], dtype=F64)
VALUE = torch.tensor([[1.0, -2.0], [0.5, 3.0]], dtype=F64)
"""Two decisions: first[a], then second[a]; the chance of 1 is P0, then P1[a]; R = VALUE[a, b]."""


def score(action: int, p: float) -> float:
    """d log Bernoulli(action; p) / d logit."""
    return action - p


def moments(size: int, tree: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Exact mean (2,) and variance (2,) of the gradient of J by the logits of P0 and P1[1].

    There are ``size`` leaves; in the tree 2 branches of ``size`` / 2, which share the first decision.
    """
    firsts = 2 if tree else size
    below = size // firsts
    mean = torch.zeros(2, dtype=F64)
    square = torch.zeros(2, dtype=F64)
    for a in product((0, 1), repeat=firsts):
        chance_a = float(torch.tensor([P0 if x else 1 - P0 for x in a]).to(F64).prod())
        for b in product((0, 1), repeat=size):
            chance = chance_a
            first = [a[i // below] for i in range(size)]
            for x, y in zip(first, b, strict=True):
                chance *= float(P1[x] if y else 1 - P1[x])
            worth = torch.stack([VALUE[x, y] for x, y in zip(first, b, strict=True)])[None]
            if tree:
                found = tree_advantages(worth, (2, below), "leave_one_out", normalize=False)[0]
            else:
                flat = group_advantages(worth, "leave_one_out", normalize=False)[0]
                found = torch.stack([flat, flat], dim=1)
            gradient = torch.zeros(2, dtype=F64)
            for i, (x, y) in enumerate(zip(first, b, strict=True)):
                gradient[0] += score(x, P0) * found[i, 0] / size
                if x == 1:
                    gradient[1] += score(y, float(P1[1])) * found[i, 1] / size
            mean += chance * gradient
            square += chance * gradient**2
    return mean, square - mean**2


def test_the_gradient_of_every_level_is_unbiased_and_that_of_the_last_is_less_noisy() -> None:
    value_of = [float(P1[a] * VALUE[a, 1] + (1 - P1[a]) * VALUE[a, 0]) for a in (0, 1)]
    exact = torch.tensor(
        [
            P0 * (1 - P0) * (value_of[1] - value_of[0]),
            P0 * float(P1[1] * (1 - P1[1]) * (VALUE[1, 1] - VALUE[1, 0])),
        ],
        dtype=F64,
    )
    mean, variance = moments(4, tree=True)
    torch.testing.assert_close(mean, exact, atol=1e-7, rtol=1e-6)
    flat_mean, flat_variance = moments(4, tree=False)
    torch.testing.assert_close(flat_mean, exact, atol=1e-7, rtol=1e-6)
    # The price: two first decisions in place of four say less of the first logit.
    assert float(variance[1]) < 0.7 * float(flat_variance[1])
    assert float(variance[0]) > 2 * float(flat_variance[0])


def test_nodes_levels_and_numbers() -> None:
    chunk = torch.tensor([0, 1, 2, 3, 9])
    assert levels_of(chunk, (2, 3)).tolist() == [0, 0, 1, 2, 2]
    assert levels_of(chunk, ()).tolist() == [0] * 5
    leaf = torch.tensor([0, 5, 7, 11, 13])
    assert nodes(leaf, torch.zeros(5, dtype=torch.long), (2, 3)).tolist() == [0, 1, 2, 3, 4]
    assert nodes(leaf, torch.ones(5, dtype=torch.long), (2, 3)).tolist() == leaf.tolist()
    episode = torch.tensor([4, 0, 4, 2, 0, 4])
    assert numbers_within(episode).tolist() == [0, 0, 1, 0, 1, 2]
    assert numbers_within(torch.zeros(0, dtype=torch.long)).tolist() == []


def test_what_is_no_tree_is_refused() -> None:
    for branches in ((2, 2), (1, 12), (12, 2)):
        with pytest.raises(ValueError, match="branches"):
            tree_advantages(returns(), branches)
