"""What looks at every observation and chunk of a served policy, and may ask for a person."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.detectors.detector import Detector
from embodyrl.errors import UserError
from embodyrl.types import Obs

Monitor = Callable[[dict[str, Any], NDArray[np.float32]], str]
"""(observation, chunk (H, A) that answers it) -> why a person is needed; empty while none is."""


def request_obs(observation: dict[str, Any], device: torch.device) -> Obs:
    """An observation as ``server.check_observation`` accepts it, as a batch of one."""
    images = observation.get("images", {})
    return Obs(
        images={name: torch.tensor(image)[None] for name, image in images.items()},
        proprio=torch.tensor(observation["proprio"])[None],
        instruction=[observation.get("prompt", "")],
    ).to(device)


def load_monitor(name: str) -> Monitor:
    """The monitor that a function makes.

    Args:
        name: ``MODULE:FUNCTION``; the function takes no arguments and returns a ``Monitor``.

    Raises:
        UserError: there is no such function.
    """
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"There is no monitor {name!r} ({error}). Name a function as MODULE:FUNCTION."
        ) from error


def first_reason(monitors: Sequence[Monitor]) -> Monitor:
    """All of them look, whatever the others say; the first that asks is heard."""

    def look(observation: dict[str, Any], chunk: NDArray[np.float32]) -> str:
        said = [monitor(observation, chunk) for monitor in monitors]
        return next(filter(None, said), "")

    return look


class DetectorMonitor:
    """Asks for a person, once per episode, when a failure detector sees it fail.

    The detector looks as often as it did at the episodes that it was fitted to: once in every
    ``every`` actions, however often the arm asks for a chunk.

    Args:
        detector: fitted to ``policy``.
        policy: that is served.
        device: of the policy.
        seed: of what the detector samples.
    """

    def __init__(
        self, detector: Detector, policy: Any, device: torch.device, seed: int = 0
    ) -> None:
        self._detector = detector
        self._policy = policy
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)
        self._begin()

    def _begin(self) -> None:
        self._readings: list[Tensor] = []
        self._steps: list[int] = []
        self._asked = False

    def __call__(self, observation: dict[str, Any], chunk: NDArray[np.float32]) -> str:
        """Why a person is needed; empty while none is.

        Raises:
            UserError: the client does not say how many actions have been taken.
        """
        if "step" not in observation:
            raise UserError(
                "The observation has no `step`, the number of actions taken in the episode, so "
                "the failure detector cannot tell when an episode begins. Send it, or serve "
                "without --detector."
            )
        step = observation["step"]
        every = self._detector.every
        # A step that is not later than the last one begins a new episode.
        if self._steps and step <= self._steps[-1]:
            self._begin()
        # Once in every H actions is often enough, and one question too.
        if self._asked or (self._steps and step // every == self._steps[-1] // every):
            return ""
        # Read this decision, and judge the episode as of now.
        obs = request_obs(observation, self._device)
        actions = torch.tensor(chunk[:every])[None].to(self._device)
        read = self._detector.signal.read(self._policy, obs, actions, self._generator)
        self._readings.append(read[0])
        self._steps.append(step)
        deviation = self._detector.deviation(torch.stack(self._readings), self._steps)
        if deviation <= self._detector.threshold:
            return ""
        self._asked = True
        kind = self._detector.signal.kind
        return (
            f"after {step} actions the episode looks unlike those that succeed ({kind}: "
            f"{deviation:.3g}, above {self._detector.threshold:.3g})"
        )
