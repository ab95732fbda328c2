"""Compiles the denoising step of a policy; on a GPU it is replayed as a CUDA graph.

A sampler takes K small steps, one after the other. With few envs, launching their GPU kernels takes
longer than running them, so these steps are compiled. The rest is not: the observation is encoded
only once, and updates score all steps in one large pass. Compiled and plain steps differ by
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.policy import HasFlow, has_ability

StepFunction = Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""A policy's ``step_inputs``."""


def compile_sampling(policy: Any) -> None:
    """Compiles ``policy.step_inputs`` in place, for sampling only.

    The first steps then take a minute or more.

    Raises:
        UserError: the policy is no flow.
    """
    if not has_ability(policy, HasFlow):
        raise UserError(
            f"run.compile compiles the denoising steps of a flow, and {policy.config.name} is "
            "none. Leave run.compile out."
        )
    policy.step_inputs = CompiledStep(policy.step_inputs, next(policy.parameters()).device.type)


class CompiledStep:
    """A policy's ``step_inputs``, compiled for calls without gradients.

    Args:
        eager: the plain function.
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, eager: StepFunction, device: str) -> None:
        self.eager = eager
        mode = "reduce-overhead" if device == "cuda" else "default"  # the first: CUDA graphs
        self._compiled = torch.compile(eager, mode=mode, dynamic=False)

    def __call__(self, context: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """See ``FlowPolicy.step_inputs``.

        Raises:
            UserError: the compiler failed.
        """
        if torch.is_grad_enabled():
            return self.eager(context, x, t)
        torch.compiler.cudagraph_mark_step_begin()
        try:
            velocity, log_std = self._compiled(context, x, t)
        except Exception as error:
            # Only the compiler's own errors are explained. An error of the policy goes through.
            if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            first = next(line for line in str(error).splitlines() if line.strip())
            raise UserError(
                f"The policy's denoising step could not be compiled ({first.strip()[:300]}). A C++ "
                "compiler, and on a GPU Triton, must be installed; or set run.compile=false."
            ) from error
        # The next replay of the CUDA graph would overwrite these tensors.
        return velocity.clone(), None if log_std is None else log_std.clone()
