"""LeRobot's pre- and post-processing as one module: its statistics are part of the policy's state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.types import Obs

STATE = "observation.state"
ACTION = "action"
IMAGES = "observation.images."
MIN_STD = {STATE: 1e-2, ACTION: 0.05}
"""Dims that hardly vary in the data are normalised by at least this, or the unseen would be blown up."""


class Processors(nn.Module):
    """The two pipelines of a LeRobot policy.

    Attributes:
        pre: LeRobot's ``PolicyProcessorPipeline`` from observations to what the network takes.
        post: and from its actions to the env's.
        refused: why the statistics do not fit, until they are set from data or from a checkpoint.
    """

    def __init__(self, pre: Any, post: Any, keys: dict[str, str]) -> None:
        """``keys``: camera of the env -> key of the LeRobot policy."""
        from lerobot.processor import (
            DeviceProcessorStep,
            NormalizerProcessorStep,
            UnnormalizerProcessorStep,
        )

        super().__init__()
        self.pre = pre
        self.post = post
        self.keys = keys
        self.refused = ""
        # Tensors stay where they are: the device that a checkpoint was made on means nothing here.
        self._steps = [s for s in pre.steps if not isinstance(s, DeviceProcessorStep)]
        (self._normalizer,) = (s for s in pre.steps if isinstance(s, NormalizerProcessorStep))
        (self._unnormalizer,) = (s for s in post.steps if isinstance(s, UnnormalizerProcessorStep))

    def forward(self, obs: Obs) -> dict[str, Any]:
        """What the network takes: pictures in [0, 1], normalised proprioception, tokens and their mask."""
        from lerobot.processor.converters import batch_to_transition, transition_to_batch

        self._check()
        images = {
            key: obs.images[name].permute(0, 3, 1, 2).float() / 255.0
            for name, key in self.keys.items()
        }
        transition = batch_to_transition(
            {**images, STATE: obs.proprio, "task": list(obs.instruction)}
        )
        for step in self._steps:
            transition = step(transition)
        return transition_to_batch(transition)

    def normalize(self, actions: Tensor) -> Tensor:
        """Actions (..., A) of the env in the network's units."""
        return self._through(self._normalizer, actions)

    def unnormalize(self, actions: Tensor) -> Tensor:
        """The inverse."""
        return self._through(self._unnormalizer, actions)

    def _through(self, step: Any, actions: Tensor) -> Tensor:
        from lerobot.processor.converters import create_transition

        self._check()
        return step(create_transition(action=actions))[ACTION]

    def _check(self) -> None:
        if self.refused:
            raise UserError(self.refused)

    def fit(self, proprio: Tensor, actions: Tensor) -> None:
        """Takes the statistics of demonstrations, as LeRobot's fine-tuning does: proprio (B, P) and actions (B, A)."""
        kept = {k: v for k, v in self._normalizer.stats.items() if k not in (STATE, ACTION)}
        stats = {
            STATE: _statistics(proprio, MIN_STD[STATE]),
            ACTION: _statistics(actions, MIN_STD[ACTION]),
        }
        self._set({**kept, **stats})

    def set_features(self, features: dict[str, Any]) -> None:
        """What the pipelines are for, as LeRobot's config says it."""
        self._normalizer.features = features
        self._unnormalizer.features = {key: v for key, v in features.items() if key == ACTION}

    def forget(self, key: str) -> None:
        """Removes the statistics of ``key``."""
        self._set({k: v for k, v in self._normalizer.stats.items() if k != key})

    def dims(self, key: str) -> int | None:
        """Of the statistics of ``key``; None without any."""
        values = (
            v
            for v in self._normalizer.stats.get(key, {}).values()
            if torch.as_tensor(v).numel() > 1
        )
        return next((torch.as_tensor(v).numel() for v in values), None)

    def _set(self, stats: dict[str, dict[str, Any]]) -> None:
        self.refused = ""
        for step in (self._normalizer, self._unnormalizer):
            step.stats = stats
            step.to()  # makes tensors of them

    def get_extra_state(self) -> dict[str, Tensor]:
        """The statistics, as LeRobot names them."""
        return self._normalizer.state_dict()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``get_extra_state``."""
        stats: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            key, _, statistic = name.rpartition(".")
            stats.setdefault(key, {})[statistic] = value.detach().clone()
        self._set(stats)


class ActionNormalizer:
    """The actions' part of ``Processors``, as algorithms expect it of a policy."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors

    def __call__(self, actions: Tensor) -> Tensor:
        """To the network's units."""
        return self._processors.normalize(actions)

    def inverse(self, x: Tensor) -> Tensor:
        """To the env's."""
        return self._processors.unnormalize(x)

    def log_det(self, x: Tensor) -> Tensor:
        """(N,) log |d inverse / dx| of x (N, H, A); every normalisation of LeRobot's is affine."""
        scale = self.inverse(torch.ones_like(x[:1, :1])) - self.inverse(torch.zeros_like(x[:1, :1]))
        return scale.abs().log().sum().mul(x.shape[-2]).expand(x.shape[:-2])


def _statistics(x: Tensor, min_std: float) -> dict[str, Tensor]:
    """Those of a LeRobot data set, of the rows of x (B, D); spreads are at least that of ``min_std``."""
    x = x.double()
    mean = x.mean(0)
    std = x.std(0, correction=0).clamp_min(min_std)
    stats = {"mean": mean, "std": std}
    for low, high in ((0.0, 1.0), (0.01, 0.99), (0.1, 0.9)):
        a = x.quantile(low, dim=0)
        b = x.quantile(high, dim=0)
        middle = (a + b) / 2
        half = ((b - a) / 2).clamp_min(min_std)
        names = (
            ("min", "max")
            if low == 0
            else (f"q{round(100 * low):02d}", f"q{round(100 * high):02d}")
        )
        stats |= {names[0]: middle - half, names[1]: middle + half}
    return {name: value.float() for name, value in stats.items()}
