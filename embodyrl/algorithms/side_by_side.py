"""Independent pieces of a gradient step, computed side by side in threads.

PyTorch's own threads share every single operation and meet after each. In small nets, and on a
machine with other work, they mostly wait for one another. Whole pieces (the next actions of two
critic steps, the two losses of an actor step) need to meet only once. Each piece has a generator of
its own, drawn before (``fork``), and results keep their order: so how many threads there are
changes nothing but rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch
from torch import Tensor, nn


def fork(generator: torch.Generator) -> torch.Generator:
    """A new generator for one piece; it depends on ``generator``, which moves on by one draw."""
    return torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=generator)))


def side_by_side[T](
    pieces: Sequence[Callable[[], T]], device: torch.device | str = "cpu"
) -> list[T]:
    """The results of all pieces, in their order.

    Args:
        pieces: none of them may change what another one reads. The gradient mode of the caller
            does not reach them: each sets its own.
        device: where they compute. Off the CPU they run one after the other, because its queue
            takes one operation at a time.

    Raises:
        BaseException: what the first piece that failed raised, after all have ended.
    """
    threads = torch.get_num_threads()
    # As many lanes as there are pieces and threads; what is left over serves the single operations.
    lanes = min(threads, len(pieces))
    if lanes < 2 or torch.device(device).type != "cpu":
        return [piece() for piece in pieces]
    own = threads // lanes  # PyTorch's threads in each lane

    def run(piece: Callable[[], T]) -> T:
        torch.set_num_threads(own)
        return piece()

    # The first piece is computed in this thread. The pool waits for the others, whatever it raises.
    try:
        with ThreadPoolExecutor(lanes - 1) as pool:
            jobs = [pool.submit(run, piece) for piece in pieces[1:]]
            first = run(pieces[0])
            return [first, *(job.result() for job in jobs)]
    finally:
        torch.set_num_threads(threads)


def gradient_of_sum(
    losses: Sequence[Callable[[], Tensor]],
    parameters: Iterable[nn.Parameter],
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Leaves the gradient of the sum of several losses in ``parameters``.

    Args:
        losses: pieces of ``side_by_side``, each of which computes one loss.
        parameters: whose gradient it is; None where no loss depends on one.
        device: see ``side_by_side``.

    Returns:
        The losses, without their graphs.
    """
    parameters = list(parameters)

    def piece(loss_of: Callable[[], Tensor]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
        # Not backward(), by which the pieces would add to the same tensors.
        loss = loss_of()
        return loss.detach(), torch.autograd.grad(loss, parameters, allow_unused=True)

    found = side_by_side([partial(piece, loss_of) for loss_of in losses], device)
    for parameter, *parts in zip(parameters, *(gradient for _, gradient in found), strict=True):
        there = [part for part in parts if part is not None]
        # In the parameter's memory layout: a fused optimiser pairs the numbers as they lie.
        total = torch.zeros_like(parameter)
        for part in there:
            total += part
        parameter.grad = total if there else None
    return [loss for loss, _ in found]
