"""What the algorithms share: a guarded optimiser, gradients in pieces that fit the memory, means of figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.errors import UserError


class GuardedAdam:
    """Adam with a clipped gradient; a loss or gradient that is not finite changes nothing, and ten in a row stop."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, max_grad_norm: float, what: str, eps: float = 1e-8
    ) -> None:
        self.parameters, self.max_grad_norm, self.what = list(parameters), max_grad_norm, what
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

    def step(self, loss: Tensor) -> float:
        """One gradient step; returns the gradient's norm before clipping."""
        self.adam.zero_grad(set_to_none=True)
        loss.backward()
        return self.apply(loss)

    def apply(self, loss: Tensor) -> float:
        """``step`` with the gradient that is there already, that of ``loss``."""
        norm = float(nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm or math.inf))
        if math.isfinite(norm) and math.isfinite(float(loss.detach())):  # clamps hide a NaN from the gradient
            self.adam.step()
            self.skipped = 0
            return norm
        self.skipped += 1
        if self.skipped >= 10:
            raise UserError(
                f"Ten gradient steps of the {self.what} in a row were not finite, so training stopped; the weights are "
                "those before them. Lower its learning rate, or look for extreme rewards."
            )
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Adam's state and the counter."""
        return {"adam": self.adam.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.adam.load_state_dict(state["adam"])
        self.skipped = int(state["skipped"])


Figures = dict[str, Tensor | float]


class Microbatches:
    """The gradient of a batch in pieces; where the memory runs out the pieces are halved, and the step is done again.

    Args:
        size: rows of a piece; 0 for all at once.
        parameters: whose gradient it is.
    """

    def __init__(self, size: int, parameters: Iterable[nn.Parameter]) -> None:
        if size < 0:
            raise UserError(f"algorithm.microbatch_size is {size}; it must be 0 (the whole minibatch) or more.")
        self.size, self.parameters = size, list(parameters)

    def backward(
        self, rows: Tensor, loss_of: Callable[[Tensor], tuple[Tensor, Figures]]
    ) -> tuple[Tensor, list[Figures]]:
        """Leaves the gradient of the losses' sum in the parameters.

        Args:
            rows: (B,) of the batch.
            loss_of: what some of them add to the batch's loss, and figures; called again after a failure, so it must
                draw nothing.

        Returns:
            The loss of the batch, and the figures of each piece.

        Raises:
            UserError: not even a single row fits.
        """
        while True:
            size = min(self.size or len(rows), len(rows))
            for p in self.parameters:
                p.grad = None
            losses, figures = [], []
            try:
                for part in rows.tensor_split(-(-len(rows) // max(size, 1))):
                    loss, found = loss_of(part)
                    loss.backward()
                    losses.append(loss.detach())
                    figures.append(found)
                return torch.stack(losses).sum(), figures
            except RuntimeError as error:
                if not _out_of_memory(error):
                    raise
            # Only here, after the exception let go of its tensors, can their memory be freed.
            if size <= 1:
                raise UserError(
                    "The memory does not even hold one row of a batch while its gradient is computed. Set "
                    "policy.checkpointing=true or policy.lora_rank where the policy has them, or train a smaller one."
                )
            self.size = size // 2
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            print(f"Out of memory: gradients are now computed {self.size} rows at a time (algorithm.microbatch_size).")


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


class Means:
    """Means of named figures over the gradient steps of an update; nothing is read from the device before the end."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor]] = {}

    def add(self, **figures: Tensor | float) -> None:
        """One value of each figure."""
        for key, value in figures.items():
            self.values.setdefault(key, []).append(torch.as_tensor(value, dtype=torch.float32).detach())

    def means(self) -> dict[str, float]:
        """Name -> mean; a figure that never came is missing."""
        return {key: float(torch.stack([v.cpu() for v in values]).mean()) for key, values in self.values.items()}
