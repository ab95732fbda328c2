"""The weights of a ``flow_mlp`` as plain arrays, which ``runner`` and the C source compute with."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import nn

from embodyrl.errors import UserError
from embodyrl.functional.flow import timesteps
from embodyrl.policies.action_expert import sinusoid
from embodyrl.policies.flow_mlp import FlowMLP
from embodyrl.policies.mlp_velocities import (
    TIME_FEATURES,
    GatedVelocity,
    GaussianVelocity,
    PlainVelocity,
)


def flow_mlp_arrays(policy: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """What acting takes: arrays, and the facts ``kind``, ``layers`` and ``squash``.

    Raises:
        UserError: another policy, or one whose parts are no simple net.
    """
    if not isinstance(policy, FlowMLP):
        raise UserError(
            f"Only a flow_mlp can be written as plain arrays, and this is a {policy.config.name}. "
            "Write it as ONNX: --to policy.onnx"
        )
    # What the noise-free policy does beyond one small net.
    chosen = "a chooser" if policy.chooses else "a noise policy" if policy.steer else ""
    if chosen or policy.config.velocity == "decoded":
        raise UserError(
            f"This flow_mlp acts with {chosen or 'the velocity decoded'}, which plain arrays do "
            "not hold. Write it as ONNX: --to policy.onnx"
        )
    # The layers, and what stands before and behind them.
    kind, net = _net(policy)
    layers = [m for m in net if isinstance(m, nn.Linear)]
    proprio = policy.normalize_proprio
    arrays = {
        "proprio_mean": proprio.mean,
        "proprio_std": proprio.std,
        "proprio_clip": torch.tensor(proprio.clip),
        "start_noise": torch.tensor(policy.start_noise),
        "time": sinusoid(timesteps(policy.transition.num_steps), TIME_FEATURES),
    }
    # Weights (outputs, inputs), as nn.Linear has them.
    for i, layer in enumerate(layers):
        arrays |= {f"weight{i}": layer.weight, f"bias{i}": layer.bias}
    if not policy.config.squash:
        arrays |= {
            "action_mean": policy.normalize_action.mean,
            "action_std": policy.normalize_action.std,
        }
    found = {name: x.detach().cpu().numpy().astype(np.float32) for name, x in arrays.items()}
    return found, {"kind": kind, "layers": len(layers), "squash": policy.config.squash}


@torch.no_grad()
def _net(policy: FlowMLP) -> tuple[str, nn.Sequential]:
    """How it acts, and the layers that it takes."""
    if policy.acts_in_one_step:
        assert policy.one_step is not None
        return "one_step", policy.one_step.net
    if isinstance(policy.net, GaussianVelocity):
        return "gaussian", policy.net.net
    assert isinstance(policy.net, PlainVelocity)
    kind = "gated" if isinstance(policy.net, GatedVelocity) else "plain"
    first, *rest = policy.net.trunk
    assert isinstance(first, nn.Linear)
    if policy.config.shortcut_steps:
        # The size of the step is the same in every step, so its offset is a part of the bias.
        first = copy.deepcopy(first)
        first.bias += policy.net.step(first.bias.new_tensor(1 / policy.config.num_denoise_steps))
    return kind, nn.Sequential(first, *rest, policy.net.head)
