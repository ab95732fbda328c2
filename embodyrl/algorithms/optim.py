"""What the algorithms share: a guarded optimiser, gradients in pieces, means of figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.algorithm import Peers
from embodyrl.errors import UserError
from embodyrl.storage.state_tree import load_optimizer

MAX_SKIPPED = 10
"""Gradient steps in a row that may be skipped before training stops."""

Figures = dict[str, Tensor | float]


class GuardedAdam:
    """Adam with a clipped gradient that skips steps whose loss or gradient is not finite."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        max_grad_norm: float,
        what: str,
        eps: float = 1e-8,
    ) -> None:
        """Makes the optimiser.

        Args:
            parameters: to be trained.
            lr: learning rate.
            max_grad_norm: the gradient is scaled down to this norm; 0 leaves it as it is.
            what: is trained, for messages.
            eps: of Adam.
        """
        self.parameters = list(parameters)
        self.max_grad_norm = max_grad_norm
        self.what = what
        self.adam = torch.optim.Adam(self.parameters, lr=lr, eps=eps, fused=True)
        self.skipped = 0

    @property
    def lr(self) -> float:
        """The learning rate."""
        return float(self.adam.param_groups[0]["lr"])

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = value

    def zero_grad(self) -> None:
        """Forgets the gradient."""
        self.adam.zero_grad(set_to_none=True)

    def step(self, loss: Tensor) -> float:
        """One gradient step with the gradient of ``loss``, which ``backward`` has computed.

        Returns:
            The gradient's norm before clipping.

        Raises:
            UserError: ten losses or gradients in a row were not finite.
        """
        norm = clip_gradient(self.parameters, self.max_grad_norm)
        # The loss is looked at too: clamps hide a NaN from the gradient.
        if math.isfinite(norm) and math.isfinite(float(loss.detach())):
            self.adam.step()
            self.skipped = 0
            return norm
        self.skipped += 1
        if self.skipped >= MAX_SKIPPED:
            raise UserError(
                f"Ten gradient steps of the {self.what} in a row were not finite, so training "
                "stopped; the weights are those before them. Lower its learning rate, or look for "
                "extreme rewards."
            )
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Adam's state and the counter."""
        return {"adam": self.adam.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        load_optimizer(self.adam, state["adam"])
        self.skipped = int(state["skipped"])


def clip_gradient(parameters: list[nn.Parameter], most: float) -> float:
    """Scales the gradient down to the norm ``most`` (0 leaves it); returns the norm it had."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    # Where the gradient is sharded, so is its norm.
    norm = getattr(norm, "full_tensor", lambda: norm)()
    nn.utils.clip_grads_with_norm_(parameters, most or math.inf, norm)
    return float(norm)


def minibatches(rows: Tensor, size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """The entries of ``rows`` in a random order, in pieces of about ``size``.

    The pieces differ by one row at most.
    """
    order = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
    yield from order.tensor_split(max(1, round(len(rows) / size)))


class Microbatches:
    """The gradient of a minibatch, computed in pieces that fit the memory.

    Where the memory runs out the pieces are halved, and the minibatch is done again.

    Args:
        size: rows of a piece; 0 for all at once.
        parameters: whose gradient it is.

    Attributes:
        peers: other processes that compute a share each; None for this one alone.
    """

    peers: Peers | None = None

    def __init__(self, size: int, parameters: Iterable[nn.Parameter]) -> None:
        if size < 0:
            raise UserError(
                f"algorithm.microbatch_size is {size}; it must be 0 (the whole minibatch) or more."
            )
        self.size = size
        self.parameters = list(parameters)

    def backward(
        self, rows: Tensor, loss_of: Callable[[Tensor], tuple[Tensor, Figures]]
    ) -> tuple[Tensor, Figures]:
        """Leaves the gradient of the losses' sum in the parameters.

        Args:
            rows: (B,) of the batch.
            loss_of: some of the rows to what they add to the batch's loss, and to figures: means
                over them, or their largest value where the name ends in ``_max``. It is called
                again after a failure, so it must draw nothing at random.

        Returns:
            The loss of the batch, and its figures.

        Raises:
            UserError: not even a single row fits.
        """
        while True:
            size = self.size or len(rows)
            try:
                return self._of_batch(self._backward_pieces(rows, size, loss_of))
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
            # Only here, after the exception let go of its tensors, can their memory be freed.
            self._halve(min(size, len(rows)))

    def _backward_pieces(
        self, rows: Tensor, size: int, loss_of: Callable[[Tensor], tuple[Tensor, Figures]]
    ) -> list[Figures]:
        """Adds up the gradients of all pieces; returns the figures of each."""
        for p in self.parameters:
            p.grad = None
        pieces: list[Figures] = []
        for part in self._pieces(rows, size):
            # All processes have as many pieces, so one of them may have none of the rows.
            loss, found = self._run(loss_of, part if len(part) else rows[:1])
            loss = loss if len(part) else 0.0 * loss
            loss.backward()
            pieces.append({"rows": len(part), "loss": loss.detach(), **found})
        return pieces

    def _halve(self, size: int) -> None:
        """Makes the pieces smaller than ``size``, which did not fit."""
        if self.peers is not None:
            raise UserError(
                f"Process {self.peers.rank} ran out of memory while it computed a gradient. The "
                "pieces cannot be halved in one process alone: set algorithm.microbatch_size "
                "(rows per piece and process), and the same command goes on from the last "
                "checkpoint."
            )
        if size <= 1:
            raise UserError(
                "The memory does not even hold one row of a batch while its gradient is computed. "
                "Set policy.checkpointing=true or policy.lora_rank where the policy has them, or "
                "train a smaller one."
            )
        self.size = size // 2
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(
            f"Out of memory: gradients are now computed {self.size} rows at a time "
            "(algorithm.microbatch_size)."
        )

    @torch.no_grad()
    def forward(self, rows: Tensor, fn: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """``fn`` of all rows (B,), at most ``size`` at a time and without gradient.

        Peers compute a share each.
        """
        if self.peers is None:
            return torch.cat([fn(part) for part in rows.split(size)])
        parts = self._pieces(rows, size)
        found = [self.peers.run(fn, part if len(part) else rows[:1])[: len(part)] for part in parts]
        return self.peers.gather(torch.cat(found))

    def _pieces(self, rows: Tensor, size: int) -> tuple[Tensor, ...]:
        """The rows that this process computes, at most ``size`` at a time."""
        rank, count = (0, 1) if self.peers is None else (self.peers.rank, self.peers.count)
        most = -(-len(rows) // count)
        return rows.tensor_split(count)[rank].tensor_split(-(-most // max(min(size, most), 1)))

    def _run(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args) if self.peers is None else self.peers.run(fn, *args)

    @torch.no_grad()
    def _of_batch(self, pieces: list[Figures]) -> tuple[Tensor, Figures]:
        """The sum of the losses, and the figures of a batch, from those of all pieces."""
        like = torch.as_tensor(pieces[0]["loss"])
        values = [
            [torch.as_tensor(x, dtype=like.dtype, device=like.device) for x in p.values()]
            for p in pieces
        ]
        table = torch.stack([torch.stack(row) for row in values])
        if self.peers is not None:
            table = self.peers.gather(table)
        share = table[:, :1] / table[:, 0].sum()
        means = (share * table).sum(0)
        largest = table.amax(0)
        figures: Figures = {
            k: largest[j] if k.endswith("_max") else means[j] for j, k in enumerate(pieces[0])
        }
        del figures["rows"], figures["loss"]
        return table[:, 1].sum(), figures


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class Means:
    """Means of named figures over the gradient steps of an update.

    Nothing is read from the device before the end.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}

    def add(self, **figures: Tensor | float) -> None:
        """One value of each figure."""
        for key, value in figures.items():
            tensor = torch.as_tensor(value, dtype=torch.float32).detach()
            self.values.setdefault(key, []).append(tensor)

    def means(self) -> dict[str, float]:
        """Name -> mean; a figure that never came is missing."""
        return {
            key: float(torch.stack([v.cpu() for v in values]).mean())
            for key, values in self.values.items()
        }
