"""What the algorithms share: a guarded optimiser, and means of an update's figures."""

from __future__ import annotations

import math
from collections.abc import Iterable
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
