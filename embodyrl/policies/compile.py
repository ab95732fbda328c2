"""The denoising step of a policy as one compiled program; on a GPU its kernels are launched as a CUDA graph.

A sampler takes K small steps, one after the other, and with few envs launching their kernels takes
longer than running them. The steps are what is compiled: pictures and words are encoded once per
observation, and updates score all steps in one large pass, which stays as it is. Compiled and plain
steps differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.policy import HasFlow, Policy, has_ability

StepFunction = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""A policy's ``step_inputs``."""


def compile_sampling(policy: Policy) -> None:
    """Compiles ``policy.step_inputs`` in place, for sampling alone; the first steps then take a minute or more.

    Raises:
        UserError: the policy has no denoising steps.
    """
    if not has_ability(policy, HasFlow):
        raise UserError(
            f"run.compile compiles denoising steps, and {policy.config.name} has none. Leave "
            "run.compile out."
        )
    flow = cast(Any, policy)
    flow.step_inputs = CompiledStep(flow.step_inputs, next(policy.parameters()).device.type)


class CompiledStep:
    """A policy's ``step_inputs``, compiled where no gradient is wanted."""

    def __init__(self, eager: StepFunction, device: str) -> None:
        self.eager = eager
        self._compiled = torch.compile(
            eager, mode="reduce-overhead" if device == "cuda" else "default", dynamic=False
        )

    def __call__(self, context: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``FlowPolicy.step_inputs``.

        Raises:
            UserError: the compiler gave up.
        """
        if torch.is_grad_enabled():
            return self.eager(context, x, t)
        torch.compiler.cudagraph_mark_step_begin()
        try:
            velocity, log_std = self._compiled(context, x, t)
        except Exception as error:
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            first = next(line for line in str(error).splitlines() if line.strip())
            raise UserError(
                f"The policy's denoising step could not be compiled ({first.strip()[:300]}). A C++ "
                "compiler, and on a GPU Triton, must be installed; or set run.compile=false."
            ) from error
        # The next replay of a CUDA graph writes over its results.
        return velocity.clone(), None if log_std is None else log_std.clone()
