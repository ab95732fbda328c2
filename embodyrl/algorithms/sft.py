"""Supervised fine-tuning: flow matching on demonstrations.

Flow matching is arXiv:2210.02747; pi0, arXiv:2410.24164, trains a VLA with it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from torch import Tensor

from embodyrl.algorithm import Algorithm, MemoryPlan, SharesGradients
from embodyrl.algorithms.hindsight_head import HindsightHead
from embodyrl.algorithms.imitation import context_loss, drawn_imitation, flow_loss_of_shapes
from embodyrl.algorithms.optim import Figures, Means, Microbatches, clip_gradient
from embodyrl.errors import UserError, refuse_unread
from embodyrl.policies.augment import augmented
from embodyrl.policy import (
    HasFlow,
    Imitates,
    ImitatesFromContext,
    Policy,
    has_ability,
    imitated_rows,
)
from embodyrl.ranges import Choice, Count, CountOrZero, NotNegative, Positive, Range, Share
from embodyrl.storage.state_tree import load_optimizer
from embodyrl.types import EnvSpec, Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations


@dataclass(frozen=True)
class ImitationConfig:
    """Settings of gradient steps on demonstrations, for ``sft`` and ``distill``.

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
        fit_inputs: whether states and actions are normalised by the statistics of these data, from
            the first update on. False keeps those of ``run.init_checkpoint``, whose network has
            learned from them.
        shift: images are shifted by up to that many pixels.
        jitter: brightness, contrast and saturation of images are changed by up to that share, and
            hue a little; .2 is usual.
    """

    name: str = ""
    steps_per_iteration: Count = 50
    batch_size: Count = 256
    microbatch_size: CountOrZero = 0
    lr: Positive = 1e-3
    warmup: Share = 0.05
    weight_decay: NotNegative = 1e-4
    max_grad_norm: NotNegative = 1.0
    ema: Annotated[float, Range(0, 1, open_high=True)] = 0.99
    fit_inputs: bool = True
    shift: CountOrZero = 2
    jitter: Share = 0.0


@dataclass(frozen=True)
class SFTConfig(ImitationConfig):
    """Settings of supervised fine-tuning; those of its gradient steps are in ``ImitationConfig``.

    Attributes:
        name: registry name.
        time: how training times are drawn: ``uniform`` or ``beta`` (more weight near the noise, as
            pi0).
        hindsight_coef: weight of a second loss: features must tell where the robot was later in a
            solved demonstration (``algorithms.hindsight_head``). So pictures are read better. It is
            for policies with a flow, and for ``small_token_vla``.
    """

    name: str = "sft"
    time: Annotated[str, Choice("uniform", "beta")] = "uniform"
    hindsight_coef: NotNegative = 0.0


class SFT(Algorithm):
    """See the module's docstring."""

    Config = SFTConfig
    plays = False

    def __init__(self, config: ImitationConfig, policy: Policy) -> None:
        super().__init__(config, policy)
        if not (has_ability(policy, HasFlow) or has_ability(policy, Imitates)):
            raise UserError(
                f"{config.name} needs a policy with the ability HasFlow, or Imitates (an "
                f"imitation_loss of its own), and {type(policy).__name__} has neither. See "
                "embodyrl/policy.py."
            )
        if not policy.spec.cameras:
            why = f"{policy.spec.name} has no pictures"
            refuse_unread(config, "algorithm", ("jitter",), why)
        self.parameters = list(policy.actor_parameters())
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.lr, weight_decay=config.weight_decay
        )
        # The averaged weights are what is evaluated and saved.
        self.result = copy.deepcopy(policy).requires_grad_(False)
        self.head = self._make_head()
        taught = [] if self.head is None else list(self.head.parameters())
        self.microbatches = Microbatches(config.microbatch_size, [*self.parameters, *taught])
        self.iteration = 0

    def _make_head(self) -> HindsightHead | None:
        """What learns the second loss beside the policy; None without one."""
        if not self.config.hindsight_coef:
            return None
        own = has_ability(self.policy, Imitates)
        if own and not has_ability(self.policy, ImitatesFromContext):
            why = f"{type(self.policy).__name__} has an imitation loss of its own"
            refuse_unread(self.config, "algorithm", ("hindsight_coef",), why)
        return HindsightHead(self.policy)

    def _begin(self, batch: Demonstrations) -> None:
        """Before the first gradient step: normalises by the demonstrations."""
        if self.config.fit_inputs:
            self.policy.fit_inputs(batch.proprio, batch.actions)
        if self.head is not None:
            self.head.fit_inputs(batch)
        self.result.load_state_dict(self.policy.state_dict())

    def update(
        self, batch: Demonstrations, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """``steps_per_iteration`` gradient steps on random chunks of the demonstrations."""
        c = self.config
        if self.iteration == 0:
            self._begin(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = self._scheduled_lr(progress)
        losses = []
        norms = []
        hindsight = Means()
        for _ in range(c.steps_per_iteration):
            # Draw chunks of demonstrations, with randomly shifted images.
            frames, obs, actions, mask = self._draw(batch, generator)
            # Loss, backward pass and optimiser step.
            led = None if self.head is None else self.head.labels(batch, frames)
            loss_of = self._loss_of(obs, actions, mask, generator, led)
            rows = torch.arange(len(mask), device=mask.device)
            loss, found = self.microbatches.backward(rows, loss_of)
            norm = clip_gradient(self.parameters, c.max_grad_norm)
            if not math.isfinite(norm):
                raise UserError(
                    f"The loss of {c.name} is not finite: lower algorithm.lr or check the data."
                )
            self.optimizer.step()
            if self.head is not None:
                self.head.step(loss, self.microbatches.peers)
            # The averaged weights follow.
            self._average()
            losses.append(float(loss))
            norms.append(norm)
            hindsight.add(**found)
        self.iteration += 1
        return {
            "loss": sum(losses) / len(losses),
            "grad_norm": sum(norms) / len(norms),
            "lr": self.optimizer.param_groups[0]["lr"],
            **hindsight.means(),
        }

    def _scheduled_lr(self, progress: float) -> float:
        """A linear warm-up times a half cosine from 1 to a tenth."""
        c = self.config
        warmup = min(1.0, 0.2 + progress / c.warmup) if c.warmup else 1.0
        cosine = 0.55 + 0.45 * math.cos(math.pi * progress)
        return c.lr * max(warmup * cosine, 1e-2)

    def _draw(
        self, batch: Demonstrations, generator: torch.Generator
    ) -> tuple[Tensor, Obs, Tensor, Tensor]:
        """Frames (B,), observations, actions (B, H, A) and their mask (B, H), on the policy's device.

        Where the policy imitates actions before the observation as well, H counts them.
        """
        c = self.config
        device = self.parameters[0].device
        before, without_last = imitated_rows(self.policy)
        frames = batch.draw(c.batch_size, generator, without_last=without_last)
        obs, actions, mask = batch.batch(frames, before=before)
        obs = augmented(obs.to(device), generator, shift=c.shift, jitter=c.jitter)
        return frames, obs, actions.to(device), mask.to(device)

    def _loss_of(
        self,
        obs: Obs,
        actions: Tensor,
        mask: Tensor,
        generator: torch.Generator,
        led: tuple[Tensor, Tensor] | None = None,
    ) -> Callable[[Tensor], tuple[Tensor, Figures]]:
        """What some rows add to the loss of a batch; all that is random is drawn here.

        ``led`` says where their episodes led, and whether they were solved (``HindsightHead``).
        """
        policy = self.policy
        loss, given, mask, noise = drawn_imitation(
            policy, actions, mask, generator, self.config.time
        )
        of_context = cast(
            "Callable[..., Tensor]",
            policy.imitation_loss_of
            if has_ability(policy, ImitatesFromContext)
            else context_loss(policy),
        )
        total = mask.sum()

        def share(i: Tensor) -> tuple[Tensor, Figures]:
            rest = (*(x[i] for x in given), mask[i], *(x[i] for x in noise))
            if self.head is None or led is None:
                return loss(obs[i], *rest) * (mask[i].sum() / total), {}
            # The observations are encoded once for both losses.
            context = policy.encode(obs[i])
            own = of_context(context, *rest) * (mask[i].sum() / total)
            places, solved = (x[i] for x in led)
            missed = self.head.loss(policy.summary(context), places, solved)
            figure = missed.detach() / solved.sum().clamp_min(1)
            missed = missed / led[1].sum().clamp_min(1)
            return own + self.config.hindsight_coef * missed, {"hindsight_loss": figure}

        return share

    @torch.no_grad()
    def _average(self) -> None:
        pairs = zip(self.result.parameters(), self.policy.parameters(), strict=True)
        for averaged, current in pairs:
            averaged.lerp_(current, 1.0 - self.config.ema)

    def state_dict(self) -> dict[str, Any]:
        """Optimiser, raw weights and counter; the averaged weights are the checkpoint's policy."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "policy": self.policy.state_dict(),
            "iteration": self.iteration,
            "hindsight": None if self.head is None else self.head.whole_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        load_optimizer(self.optimizer, state["optimizer"])
        self.policy.load_state_dict(state["policy"])
        self.iteration = int(state["iteration"])
        if self.head is not None:
            self.head.load_whole_state(state["hindsight"])

    def shared_gradients(self) -> list[SharesGradients]:
        """See ``Algorithm``."""
        return [self.microbatches]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """See ``Algorithm``."""
        return [self.optimizer]

    @classmethod
    def memory_plan(cls, config: Any, policy: Any, spec: EnvSpec) -> MemoryPlan | None:
        """See ``Algorithm``; known for policies with a flow."""
        if not has_ability(policy, HasFlow):
            return None
        rows = min(config.microbatch_size or config.batch_size, config.batch_size)
        return MemoryPlan(rows, flow_loss_of_shapes, extra_policies=1)
