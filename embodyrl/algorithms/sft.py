"""Supervised fine-tuning: flow matching on demonstrations (arXiv:2210.02747, pi0 arXiv:2410.24164)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from embodyrl.algorithms.optim import Figures, Microbatches, clip_gradient
from embodyrl.errors import UserError
from embodyrl.functional.flow import flow_matching_pair, randn, sample_training_time
from embodyrl.functional.losses import flow_matching_loss
from embodyrl.policies.flow_base import pad
from embodyrl.policies.sample_path import given_prefix
from embodyrl.policies.vision import random_shift
from embodyrl.types import Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations


@dataclass(frozen=True)
class SFTConfig:
    """Settings of supervised fine-tuning.

    Attributes:
        name: registry name.
        steps_per_iteration: gradient steps between two rows of the log.
        batch_size: action chunks per step.
        microbatch_size: chunks whose gradient is computed at a time; 0 for all of the batch. Halved
            by itself when the memory runs out.
        lr: peak of AdamW's learning rate.
        warmup: fraction of the run in which it rises from zero; after it, it follows a half cosine
            to a tenth.
        weight_decay: of AdamW.
        max_grad_norm: of all gradients together.
        ema: decay of the averaged weights, which are what is evaluated and saved.
        shift: images are shifted by up to that many pixels.
        time: how training times are drawn: ``uniform`` or ``beta`` (more weight near the noise, as
            pi0).
    """

    name: str = "sft"
    steps_per_iteration: int = 50
    batch_size: int = 256
    microbatch_size: int = 0
    lr: float = 1e-3
    warmup: float = 0.05
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    ema: float = 0.99
    shift: int = 2
    time: str = "uniform"


def imitation_loss(
    policy: Any,
    obs: Obs,
    actions: Tensor,
    mask: Tensor,
    generator: torch.Generator,
    time: str = "uniform",
) -> Tensor:
    """The flow matching loss of actions (B, H, A), those with ``mask`` (B, H), at times and noise drawn at random."""
    return pair_loss(policy, obs, *noisy_pair(policy, actions, generator, time), mask)


def noisy_pair(
    policy: Any, actions: Tensor, generator: torch.Generator, time: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy chunks (B, C, D), the times (B,) that they are at, and the velocity (B, H, A) of the actions there."""
    clean = policy.normalize_action(actions)
    clean = pad(clean, getattr(policy, "flow_shape", clean.shape[1:]))
    noise = randn(tuple(clean.shape), generator, clean.device)
    t = sample_training_time(len(clean), generator, time, clean.device)
    noisy, target = flow_matching_pair(clean, t, noise)
    h, a = actions.shape[1:]  # a pretrained model's chunk may be longer and wider than the actions
    return noisy, t, target[:, :h, :a]


def pair_loss(
    policy: Any, obs: Obs, noisy: Tensor, t: Tensor, target: Tensor, mask: Tensor
) -> Tensor:
    """The flow matching loss of what ``noisy_pair`` drew."""
    velocity = policy.velocity(policy.encode(obs), noisy[:, None], t[:, None])[:, 0]
    h, a = target.shape[1:]
    return flow_matching_loss(velocity[:, :h, :a], target, mask)


class SFT:
    """See the module's docstring."""

    Config = SFTConfig
    source = "demos"

    def __init__(self, config: SFTConfig, policy: Any) -> None:
        self.config = config
        self.policy = policy
        self.parameters = list(policy.actor_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, weight_decay=config.weight_decay
        )
        self.result = copy.deepcopy(policy).requires_grad_(False)
        self.microbatches = Microbatches(config.microbatch_size, self.parameters)
        self.iteration = 0

    def update(
        self, batch: Demonstrations, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """``steps_per_iteration`` gradient steps on random chunks of the demonstrations."""
        c = self.config
        if self.iteration == 0:
            self.policy.fit_inputs(batch.proprio, batch.actions)
            self.result.load_state_dict(self.policy.state_dict())
        rate = min(1.0, 0.2 + progress / c.warmup if c.warmup else 1.0) * (
            0.55 + 0.45 * math.cos(math.pi * progress)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = c.lr * max(rate, 1e-2)
        losses = []
        norms = []
        for _ in range(c.steps_per_iteration):
            index = batch.draw(c.batch_size, generator)
            obs, actions, mask = batch.batch(index)
            device = self.parameters[0].device
            obs = obs.to(device)
            actions = actions.to(device)
            mask = mask.to(device)
            obs = replace(
                obs, images={n: random_shift(x, c.shift, generator) for n, x in obs.images.items()}
            )
            loss_of = self._loss_of(obs, actions, mask, generator)
            loss, _ = self.microbatches.backward(torch.arange(len(mask), device=device), loss_of)
            norm = clip_gradient(self.parameters, c.max_grad_norm)
            if not math.isfinite(norm):
                raise UserError(
                    "The loss of supervised fine-tuning is not finite: lower algorithm.lr or "
                    "check the data."
                )
            self.optimizer.step()
            self._average()
            losses.append(float(loss))
            norms.append(norm)
        self.iteration += 1
        return {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def _loss_of(
        self, obs: Obs, actions: Tensor, mask: Tensor, generator: torch.Generator
    ) -> Callable[[Tensor], tuple[Tensor, Figures]]:
        """What some rows add to the loss of a batch; all that is random in it is drawn here."""
        policy = self.policy
        given: tuple[Tensor, ...] = (actions,)
        loss = getattr(policy, "imitation_loss", None)
        if loss is None:  # it has a flow
            loss = partial(pair_loss, policy)
            noisy, t, target = noisy_pair(policy, actions, generator, self.config.time)
            if most := getattr(policy.config, "max_prefix", 0):
                count = torch.randint(most + 1, (len(t),), generator=generator).to(t.device)
                clean = pad(policy.normalize_action(actions), (noisy.shape[1], noisy.shape[2]))
                noisy, t = given_prefix(noisy, t, clean, count)
                mask = mask & (t > 0)  # what is given is not asked for
            given = (noisy, t, target)
        total = mask.sum()
        fn = cast("Callable[..., Tensor]", loss)
        return lambda i: (fn(obs[i], *(x[i] for x in given), mask[i]) * (mask[i].sum() / total), {})

    @torch.no_grad()
    def _average(self) -> None:
        for averaged, current in zip(
            self.result.parameters(), self.policy.parameters(), strict=True
        ):
            averaged.lerp_(current, 1.0 - self.config.ema)

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, raw weights and counter; the averaged weights are the checkpoint's policy."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "policy": self.policy.state_dict(),
            "iteration": self.iteration,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.policy.load_state_dict(state["policy"])
        self.iteration = int(state["iteration"])
