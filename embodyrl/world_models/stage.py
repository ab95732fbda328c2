"""``Stage``: the optimisers of one stage of training, its schedule, and the average of the weights that counts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from embodyrl.errors import UserError


class Stage:
    """Optimisers, a running average of the weights and a cosine schedule of one stage.

    Matrices inside a transformer are trained by Muon, everything else by AdamW; the average is what
    counts.
    """

    def __init__(
        self, nets: nn.Module, matrices: list[nn.Parameter], rates: tuple[float, float], steps: int
    ) -> None:
        chosen = {id(p) for p in matrices}
        rest = [p for p in nets.parameters() if id(p) not in chosen]
        self.nets = nets
        self.steps = steps
        self.done = 0
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.AdamW(rest, lr=rates[1], weight_decay=0.0, fused=True), rates[1])
        ]
        if matrices:
            muon = torch.optim.Muon(
                matrices, lr=rates[0], weight_decay=0.01, adjust_lr_fn="match_rms_adamw"
            )
            self.optimizers.append((muon, rates[0]))
        self.average = AveragedModel(nets, multi_avg_fn=_warm_average)

    def step(self, loss: Tensor) -> None:
        """One gradient step.

        Raises:
            UserError: the loss is not finite.
        """
        if not torch.isfinite(loss):
            raise UserError(
                f"The loss of step {self.done} is {float(loss)}; lower the learning rates (lr, "
                "muon_lr)."
            )
        rise = min(1.0, (self.done + 1) / 50)
        factor = rise * (0.5 + 0.5 * math.cos(math.pi * self.done / self.steps)) + 1e-3
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.nets.parameters(), 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
        self.average.update_parameters(self.nets)
        self.done += 1

    def finish(self) -> None:
        """Puts the average in place of the weights."""
        with torch.no_grad():
            for mine, mean in zip(
                self.nets.parameters(), self.average.module.parameters(), strict=True
            ):
                mine.copy_(mean)

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
            optimizer.load_state_dict(saved)
        self.done = int(state["done"])


@torch.no_grad()
def _warm_average(averages: Any, weights: Any, count: Any) -> None:
    """Exponential average with a decay that rises to .998, so that the first, random weights are soon forgotten."""
    n = float(count)
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight, 1.0 - min(0.998, (1.0 + n) / (10.0 + n)))
