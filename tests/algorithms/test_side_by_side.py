"""Pieces of a gradient step in threads: the same results whatever the number of threads."""

import threading
import time

import pytest
import torch

from embodyrl.algorithms.side_by_side import fork, gradient_of_sum, side_by_side


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def threads():
    """Sets PyTorch's threads, and puts back how many there were."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize(("count", "own"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_results_keep_their_order_and_pieces_share_the_threads(threads, count, own):
    threads(count)
    seen = []

    def piece(k):
        seen.append((threading.get_ident(), torch.get_num_threads()))
        time.sleep(0.05 * (2 - k))  # the first ends last
        return k

    assert side_by_side([lambda k=k: piece(k) for k in range(2)]) == [0, 1]
    assert len({ident for ident, _ in seen}) == min(count, 2)
    assert {n for _, n in seen} == {own}
    assert torch.get_num_threads() == count


def test_pieces_really_run_at_the_same_time(threads):
    threads(2)
    both = threading.Barrier(2, timeout=20)  # breaks if one waits for the other's end
    assert sorted(side_by_side([both.wait, both.wait])) == [0, 1]


def test_off_the_cpu_they_run_one_after_the_other_in_this_thread(threads):
    threads(4)
    here = threading.get_ident()
    assert side_by_side([threading.get_ident] * 3, "cuda") == [here] * 3


@pytest.mark.parametrize("wrong", [0, 1])
def test_an_error_comes_after_all_have_ended_and_leaves_the_threads_as_they_were(threads, wrong):
    threads(2)
    ended = []

    def piece(k):
        if k == wrong:
            raise ValueError(f"piece {k}")
        time.sleep(0.1)
        ended.append(k)

    with pytest.raises(ValueError, match=f"piece {wrong}"):
        side_by_side([lambda k=k: piece(k) for k in range(2)])
    assert ended == [1 - wrong]
    assert torch.get_num_threads() == 2


def test_a_fork_depends_on_its_generator_and_moves_it_on():
    one, two = gen(3), gen(3)
    first, again = fork(one), fork(two)
    assert torch.equal(torch.rand(4, generator=first), torch.rand(4, generator=again))
    assert not torch.equal(
        torch.rand(4, generator=fork(one)), torch.rand(4, generator=fork(gen(3)))
    )


@pytest.mark.parametrize("count", [1, 2])
def test_the_gradient_is_that_of_the_sum(threads, count):
    threads(count)
    both, first, none = (torch.nn.Parameter(torch.tensor(x)) for x in (2.0, 3.0, 5.0))
    none.grad = torch.tensor(7.0)  # of an earlier step
    losses = gradient_of_sum([lambda: both * first, lambda: 4.0 * both**2], [both, first, none])
    assert losses == [6.0, 16.0] and not any(loss.requires_grad for loss in losses)
    # d(xy + 4x^2)/dx = y + 8x, d/dy = x.
    assert both.grad == 3.0 + 16.0 and first.grad == 2.0 and none.grad is None


@pytest.mark.parametrize("size", [1, 3])
def test_a_fused_optimiser_steps_as_after_backward(size):
    """The gradient of a convolution may come in another memory layout than its weights."""
    torch.manual_seed(0)
    picture = torch.randn(4, 16, 16, 8).permute(0, 3, 1, 2)  # as pictures lie: channels last
    nets = [torch.nn.Conv2d(8, 6, size) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1, fused=True) for net in nets]
    for _ in range(2):
        optimizers[0].zero_grad()
        torch.stack([nets[0](picture[i::2]).square().mean() for i in range(2)]).sum().backward()
        gradient_of_sum(
            [lambda i=i: nets[1](picture[i::2]).square().mean() for i in range(2)],
            nets[1].parameters(),
        )
        for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            assert other.grad is not None and other.grad.stride() == other.stride()
            torch.testing.assert_close(one.grad, other.grad)
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        torch.testing.assert_close(one, other)
