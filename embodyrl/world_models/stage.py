"""``Stage``: the networks, optimisers, schedule and weight average of one stage of training."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from embodyrl.storage.state_tree import load_optimizer

WARM_UP = 50
"""Steps in which the learning rates rise."""


class Stage:
    """Optimisers, a running average of the weights and a cosine schedule of one stage.

    Muon trains the matrices inside a transformer, AdamW everything else. The average of the
    weights is the result (``finish``).

    Args:
        nets: to be trained.
        matrices: those of their parameters that Muon trains.
        rates: learning rates of Muon and of AdamW.
        steps: of the stage.

    Attributes:
        done: steps so far.
    """

    def __init__(
        self, nets: nn.Module, matrices: list[nn.Parameter], rates: tuple[float, float], steps: int
    ) -> None:
        muon_lr, adamw_lr = rates
        by_muon = {id(p) for p in matrices}
        others = [p for p in nets.parameters() if id(p) not in by_muon]
        adamw = torch.optim.AdamW(others, lr=adamw_lr, weight_decay=0.0, fused=True)
        self.nets = nets
        self.steps = steps
        self.done = 0
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [(adamw, adamw_lr)]
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=muon_lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            )
            self.optimizers.append((muon, muon_lr))
        self.average = AveragedModel(nets, multi_avg_fn=_warm_average)

    def zero_grad(self) -> None:
        """Clears the gradients of the step before."""
        for optimizer, _ in self.optimizers:
            optimizer.zero_grad()

    def optimizer_step(self) -> None:
        """Updates the weights with the learning rates of this step, and their average."""
        # A linear warm-up times a cosine that ends just above 0.
        warm_up = min(1.0, (self.done + 1) / WARM_UP)
        factor = warm_up * (0.5 + 0.5 * math.cos(math.pi * self.done / self.steps)) + 1e-3
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
        self.average.update_parameters(self.nets)
        self.done += 1

    def finish(self) -> None:
        """Puts the average in place of the weights."""
        averages = self.average.module.parameters()
        with torch.no_grad():
            for weight, average in zip(self.nets.parameters(), averages, strict=True):
                weight.copy_(average)

    def state_dict(self) -> dict[str, Any]:
        """Everything that an exact resume needs besides the weights."""
        return {
            "average": self.average.state_dict(),
            "optimizers": [o.state_dict() for o, _ in self.optimizers],
            "done": self.done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.average.load_state_dict(state["average"])
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
            load_optimizer(optimizer, saved)
        self.done = int(state["done"])


@torch.no_grad()
def _warm_average(averages: Any, weights: Any, count: Any) -> None:
    """Exponential moving average whose decay rises to .998.

    The low decay at the start makes it forget the first, random weights soon.
    """
    n = float(count)
    decay = min(0.998, (1.0 + n) / (10.0 + n))
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight, 1.0 - decay)
