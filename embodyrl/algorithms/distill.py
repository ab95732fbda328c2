"""Distillation of a flow policy into few denoising steps: the same actions, in less time.

A flow takes K network passes for a chunk. Its noise-free chunk is a function of the initial noise,

    F_K(o, e) = x_0,   x_1 = e,   x_{t - 1/K} = x_t - v(x_t, t, o) / K

The student, with k < K steps (``policy.num_denoise_steps``), learns this function at the
observations of a data set: |G_k(o, e) - F_K(o, e)|^2 with the same noise e for both. It starts as
the teacher, that is, as the teacher's own k steps of Euler. With k = 1 it is the last stage of
RL-100 (arXiv:2510.14830), which makes one step of a policy that RL improved. As the targets are
the teacher's own, no action of the data is read: episodes that anybody played will do.

The student is a flow policy like any other: it can be exported, deployed and trained by RL again
(ReinFlow fine-tunes one-step flows, arXiv:2505.22094).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.algorithm import MemoryPlan, SharesGradients
from embodyrl.algorithms.hindsight_head import HindsightHead
from embodyrl.algorithms.optim import Figures
from embodyrl.algorithms.sft import SFT, ImitationConfig
from embodyrl.errors import UserError
from embodyrl.functional.flow import DenoisingTransition, randn
from embodyrl.functional.losses import flow_map_loss
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.sample_path import integrate
from embodyrl.policy import FlowPolicyProtocol, HasFlow
from embodyrl.ranges import Count
from embodyrl.types import DenoisingTrace, EnvSpec, Obs

if TYPE_CHECKING:
    from embodyrl.data.demonstrations import Demonstrations


@dataclass(frozen=True)
class DistillConfig(ImitationConfig):
    """Settings of distillation; those of its gradient steps are in ``ImitationConfig``.

    Attributes:
        name: registry name.
        teacher_steps: K, denoising steps of the teacher, which is the policy of
            ``run.init_checkpoint``. Take those that it was trained with.
    """

    name: str = "distill"
    teacher_steps: Count = 4


class Distill(SFT):
    """See the module's docstring."""

    Config = DistillConfig
    needs = (HasFlow,)

    def __init__(self, config: DistillConfig, policy: FlowPolicyProtocol) -> None:
        super().__init__(config, policy)
        if config.teacher_steps <= policy.transition.num_steps:
            raise UserError(
                f"The student takes {policy.transition.num_steps} denoising steps "
                f"(policy.num_denoise_steps) and the teacher {config.teacher_steps} "
                "(algorithm.teacher_steps). The student must take fewer."
            )
        if getattr(policy, "one_step", None) is not None:
            raise UserError(
                "policy.one_step_width is set, and that head acts in place of the flow, so nobody "
                "would follow what distill teaches. Set policy.one_step_width=0, or keep the head: "
                "it acts in one step already."
            )
        if getattr(policy.config, "shortcut_steps", 0):
            raise UserError(
                "policy.shortcut_steps is set, and such a policy acts in fewer steps with the same "
                "weights, so there is nothing to distil: set policy.num_denoise_steps alone where it "
                "acts. To make a shortcut policy of another one, imitate with it: algorithm.name=sft "
                "run.init_checkpoint=RUN policy.shortcut_steps=8."
            )
        # The teacher is the policy as it is now, with its own number of steps.
        self.teacher: Any = copy.deepcopy(policy).requires_grad_(False)
        self.steps = DenoisingTransition(kind="ode", num_steps=config.teacher_steps)

    def _make_head(self) -> HindsightHead | None:
        return None

    def _begin(self, batch: Demonstrations) -> None:
        """Keeps the teacher's normalisation, which the student's map is made of.

        Raises:
            UserError: the teacher has learned nothing.
        """
        # A policy that was trained knows the units of what it sees.
        normalizers = [m for m in self.teacher.modules() if isinstance(m, Normalizer)]
        if normalizers and not any(m.fitted for m in normalizers):
            raise UserError(
                "distill teaches what a trained policy does, and this one has fresh weights. Name "
                "the teacher: run.init_checkpoint=RUN."
            )

    def _loss_of(
        self,
        obs: Obs,
        actions: Tensor,
        mask: Tensor,
        generator: torch.Generator,
        led: tuple[Tensor, Tensor] | None = None,
    ) -> Callable[[Tensor], tuple[Tensor, Figures]]:
        """What some rows add to the loss of a batch; the noise of all of them is drawn here."""
        # Teacher and student start from the same noise.
        noise = randn((len(obs), *self.policy.flow_shape), generator, actions.device)
        total = len(obs)

        def share(i: Tensor) -> tuple[Tensor, Figures]:
            # The teacher's chunk, by its K steps.
            with torch.no_grad():
                target = flow_map(self.teacher, self.steps, obs[i], noise[i])
            # The student's, by its k steps from the same noise.
            end = flow_map(self.policy, self.policy.transition, obs[i], noise[i])
            return flow_map_loss(end, target) * (len(i) / total), {}

        return share

    def state_dict(self) -> dict[str, Any]:
        """As ``SFT.state_dict``, and the teacher."""
        return {**super().state_dict(), "teacher": self.teacher.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        super().load_state_dict(state)
        self.teacher.load_state_dict(state["teacher"])

    def shared_gradients(self) -> list[SharesGradients]:
        """See ``Algorithm``: the teacher is not sharded, so processes cannot share it."""
        return []

    @classmethod
    def memory_plan(cls, config: Any, policy: Any, spec: EnvSpec) -> MemoryPlan | None:
        """See ``Algorithm``."""
        rows = min(config.microbatch_size or config.batch_size, config.batch_size)
        return MemoryPlan(rows, _loss_of_shapes, extra_policies=2)


def flow_map(
    policy: FlowPolicyProtocol, steps: DenoisingTransition, obs: Obs, noise: Tensor
) -> Tensor:
    """The end (B, C, A) of the noise-free path, in the flow's units, with gradients.

    Args:
        policy: whose velocity is followed.
        steps: how many of them.
        obs: B observations.
        noise: (B, C, D), the path's start.
    """
    context = policy.encode(obs)
    end = integrate(partial(policy.step_inputs, context), steps, noise)
    # A pretrained model pads actions to a width that nobody reads.
    return end[..., : policy.spec.action_dim]


def _loss_of_shapes(policy: Any, obs: Obs, trace: DenoisingTrace) -> Tensor:
    end = flow_map(policy, policy.transition, obs, trace.x[:, 0])
    return flow_map_loss(end, torch.zeros_like(end))
