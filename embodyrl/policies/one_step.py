"""``OneStepHead``: acts in one step, beside a flow that takes K (FQL, arXiv:2502.02538).

    noise (N, C, D), features (N, F) --MLP--> actions (N, H, A) in the flow's units

A value can be maximised through one small net, where it would have to pass all K steps of the flow.
FQL teaches it what the flow makes of the same noise, and to be worth more. Once it has learned it
acts in place of the flow: in rollouts, in evaluation and on a robot.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.policies.mlp_velocities import mlp

ONE_STEP_PARTS = {"one_step_width": ("one_step.",)}
"""Config key -> parts that keep their fresh weights if the initial checkpoint has another value."""


def check_one_step(config: Any) -> None:
    """Refuses a one-step head beside another way to act.

    Raises:
        UserError: a chooser or a noise policy is set as well.
    """
    if not getattr(config, "one_step_width", 0):
        return
    for other, how in (("chooser_width", "a chooser"), ("steer_width", "a noise policy")):
        if getattr(config, other, 0):
            raise UserError(
                f"policy.one_step_width and policy.{other} are both set. The one-step head acts in "
                f"place of the flow, so {how} would have nothing to act on: set one of them to 0."
            )


class OneStepHead(nn.Module):
    """See the module's docstring.

    Args:
        features: F, width of the features.
        flow_shape: (C, D), of the noise that the flow starts from.
        executed: (H, A), of the actions.
        width: of the two hidden layers.

    Attributes:
        ready: bool scalar, whether it has learned, so that it acts in place of the flow.
    """

    ready: Tensor

    def __init__(
        self, features: int, flow_shape: tuple[int, int], executed: tuple[int, int], width: int
    ) -> None:
        super().__init__()
        self.executed = executed
        noise = flow_shape[0] * flow_shape[1]
        self.net = mlp(features + noise, width, 2, executed[0] * executed[1])
        self.register_buffer("ready", torch.tensor(False))

    def forward(
        self, features: Float[Tensor, "n f"], noise: Float[Tensor, "n c d"]
    ) -> Float[Tensor, "n h a"]:
        """Actions in the units of the flow."""
        found = self.net(torch.cat([features, noise.flatten(1)], dim=-1))
        return found.unflatten(-1, self.executed)
