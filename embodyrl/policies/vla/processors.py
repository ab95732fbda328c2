"""LeRobot's pre- and post-processing as one module.

The statistics of the normalisation are part of the policy's state, and so of every checkpoint.

    Obs --pre-processing--> images in [0, 1], normalised proprioception, tokens of the instruction
    actions of the network --post-processing--> actions of the env
"""

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
"""Smallest standard deviation that is divided by.

Without it, a dim that hardly varies in the data would become very large for a new value.
"""


class Processors(nn.Module):
    """The pre- and post-processing pipelines of a LeRobot policy.

    Attributes:
        pre: LeRobot's ``PolicyProcessorPipeline`` from observations to the network's inputs.
        post: from the network's actions to those of the env.
        refused: why the statistics do not fit this env; empty if they do. Fitting them to data, or
            loading a checkpoint, clears it.
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
        # The step that moves tensors is left out: they stay on the policy's device, not on the one
        # of the training.
        self._steps = [s for s in pre.steps if not isinstance(s, DeviceProcessorStep)]
        # Each pipeline has exactly one step that holds the statistics.
        (self._normalizer,) = (s for s in pre.steps if isinstance(s, NormalizerProcessorStep))
        (self._unnormalizer,) = (s for s in post.steps if isinstance(s, UnnormalizerProcessorStep))

    def forward(self, obs: Obs) -> dict[str, Any]:
        """The network's inputs, by LeRobot's names.

        Returns:
            Images (N, 3, h, w) in [0, 1], normalised proprioception (N, P), token ids of the
            instructions (N, L) and their mask (N, L).

        Raises:
            UserError: the statistics do not fit this env (``refused``).
        """
        from lerobot.processor.converters import batch_to_transition, transition_to_batch

        self._check_statistics()
        # Images with channels first, as floats.
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
        """Actions (..., A) of the env, in the network's units."""
        return self._apply_to_actions(self._normalizer, actions)

    def unnormalize(self, actions: Tensor) -> Tensor:
        """Actions (..., A) of the network, in the env's units."""
        return self._apply_to_actions(self._unnormalizer, actions)

    def _apply_to_actions(self, step: Any, actions: Tensor) -> Tensor:
        """The actions after one step of a pipeline."""
        from lerobot.processor.converters import create_transition

        self._check_statistics()
        return step(create_transition(action=actions))[ACTION]

    def _check_statistics(self) -> None:
        if self.refused:
            raise UserError(self.refused)

    def fit(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the statistics to those of demonstrations, as LeRobot's fine-tuning does.

        Args:
            proprio: (B, P).
            actions: (B, A).
        """
        others = {k: v for k, v in self._normalizer.stats.items() if k not in (STATE, ACTION)}
        stats = {
            STATE: _statistics(proprio, MIN_STD[STATE]),
            ACTION: _statistics(actions, MIN_STD[ACTION]),
        }
        self._set_statistics({**others, **stats})

    def set_features(self, features: dict[str, Any]) -> None:
        """Sets the inputs and outputs that the pipelines process, as in LeRobot's config."""
        self._normalizer.features = features
        self._unnormalizer.features = {key: v for key, v in features.items() if key == ACTION}

    def forget(self, key: str) -> None:
        """Removes the statistics of ``key``."""
        self._set_statistics({k: v for k, v in self._normalizer.stats.items() if k != key})

    def dims(self, key: str) -> int | None:
        """Number of dims in the statistics of ``key``; None if there are none."""
        for value in self._normalizer.stats.get(key, {}).values():
            # Some statistics are a single number, such as a count.
            if torch.as_tensor(value).numel() > 1:
                return torch.as_tensor(value).numel()
        return None

    def _set_statistics(self, stats: dict[str, dict[str, Any]]) -> None:
        self.refused = ""
        for step in (self._normalizer, self._unnormalizer):
            step.stats = stats
            step.to()  # converts the statistics to tensors

    def get_extra_state(self) -> dict[str, Tensor]:
        """The statistics, for the policy's ``state_dict``; named as in LeRobot."""
        return self._normalizer.state_dict()

    def set_extra_state(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``get_extra_state``."""
        # Names are KEY.STATISTIC, for example "observation.state.mean".
        stats: dict[str, dict[str, Tensor]] = {}
        for name, value in state.items():
            key, _, statistic = name.rpartition(".")
            stats.setdefault(key, {})[statistic] = value.detach().clone()
        self._set_statistics(stats)


class ActionNormalizer:
    """The part of ``Processors`` for actions, with the interface of ``normalize.Normalizer``."""

    def __init__(self, processors: Processors) -> None:
        self._processors = processors

    def __call__(self, actions: Tensor) -> Tensor:
        """From the env's units to those of the network."""
        return self._processors.normalize(actions)

    def inverse(self, x: Tensor) -> Tensor:
        """From the network's units to those of the env."""
        return self._processors.unnormalize(x)

    def log_det(self, x: Tensor) -> Tensor:
        """(N,) log |d inverse(x) / dx| of x (N, H, A)."""
        # All normalisations of LeRobot are affine: the slope is the difference of two values.
        scale = self.inverse(torch.ones_like(x[:1, :1])) - self.inverse(torch.zeros_like(x[:1, :1]))
        return scale.abs().log().sum().mul(x.shape[-2]).expand(x.shape[:-2])


RANGES = {("min", "max"): (0.0, 1.0), ("q01", "q99"): (0.01, 0.99), ("q10", "q90"): (0.1, 0.9)}
"""LeRobot's names of two statistics -> the quantiles that they are."""


def _statistics(x: Tensor, min_std: float) -> dict[str, Tensor]:
    """The statistics that a LeRobot data set has, of the rows of x (B, D).

    Standard deviations and half ranges are at least ``min_std``.
    """
    x = x.double()
    mean = x.mean(0)
    std = x.std(0, correction=0).clamp_min(min_std)
    stats = {"mean": mean, "std": std}
    for (low_name, high_name), (low, high) in RANGES.items():
        low_value = x.quantile(low, dim=0)
        high_value = x.quantile(high, dim=0)
        middle = (low_value + high_value) / 2
        half_range = ((high_value - low_value) / 2).clamp_min(min_std)
        stats[low_name] = middle - half_range
        stats[high_name] = middle + half_range
    return {name: value.float() for name, value in stats.items()}
