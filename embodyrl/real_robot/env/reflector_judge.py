"""A reflector beside a robot: it gives the reward, or calls a person when an episode takes long."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.errors import UserError
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.world_models.reflectors.base import Reflector, successes


class ReflectorJudge:
    """Judges the current episode by a reflector.

    It is a ``robot_env.Judge``: success is the reward, and ends the episode.

    Args:
        reflector: calibrated, for the robot's cameras.
    """

    def __init__(self, reflector: Reflector) -> None:
        self.reflector = reflector
        self.begin()

    def begin(self) -> None:
        """Starts a new episode."""
        self._first: dict[str, NDArray[np.uint8]] | None = None
        self._recent: deque[dict[str, NDArray[np.uint8]]] = deque(maxlen=self.reflector.window - 1)
        self._streak = torch.zeros(1, dtype=torch.long)

    def see(self, images: Mapping[str, NDArray[np.uint8]], prompt: str) -> tuple[float, bool]:
        """Judges the next images.

        Args:
            images: camera -> (h, w, 3).
            prompt: the instruction.

        Returns:
            The calibrated probability that the task is solved, NaN if the reflector cannot tell;
            and whether that counts as a success.
        """
        now = {name: images[name] for name in self.reflector.cameras if name in images}
        # A window of frames; at the start of an episode it is filled up with the first one.
        if self._first is None:
            self._first = now
        self._recent.append(now)
        padding = [self._first] * (self.reflector.window - len(self._recent))
        frames = [*padding, *self._recent]
        stacked = {
            name: torch.from_numpy(np.stack([f[name] for f in frames]))[None] for name in now
        }
        # The probability of the newest frame. A success may need several hits in a row.
        prob = self.reflector.judge(stacked, [prompt], 1)[:, -1:]
        solved, self._streak = successes(prob, self.reflector.calibration, self._streak)
        return float(self.reflector.calibration.apply(prob)), bool(solved)

    def __call__(self, seen: dict[str, Any]) -> tuple[float, bool]:
        """See ``robot_env.Judge``.

        Raises:
            NotReadyError: the reflector could not judge, which is neither success nor failure.
        """
        prob, solved = self.see(seen["images"], seen["prompt"])
        if np.isnan(prob):
            raise NotReadyError("the reflector could not judge")
        return float(solved), solved


class OverdueMonitor:
    """Asks for a person, once per episode, when the task is not solved in time.

    It is a ``checkpoint_policy.Monitor``.

    Args:
        reflector: calibrated, for the policy's cameras.
        max_steps: number of actions in an episode.
        share: share of the episode after which a person is asked for.
    """

    def __init__(self, reflector: Reflector, max_steps: int, share: float = 0.7) -> None:
        if not 0.0 < share <= 1.0:
            raise UserError(
                f"--overdue is {share}; it is a share of an episode, above 0 and at most 1."
            )
        self._judge = ReflectorJudge(reflector)
        self._due = share * max_steps
        self._max = max_steps
        self._step = -1
        self._asked = False
        self._best = 0.0  # highest probability in this episode

    def __call__(self, observation: dict[str, Any], chunk: NDArray[np.float32]) -> str:
        """Why a person is needed; empty while none is."""
        # A step that is not later than the last one begins a new episode.
        step = observation.get("step", self._step + 1)
        if step <= self._step:
            self._judge.begin()
            self._asked = False
            self._best = 0.0
        self._step = step
        prob, solved = self._judge.see(observation["images"], observation.get("prompt", ""))
        self._best = max(self._best, 0.0 if np.isnan(prob) else prob)
        if solved or self._asked or step < self._due:
            return ""
        self._asked = True
        return (
            f"after {step} of {self._max} actions it is not solved, as far as can be seen "
            f"(at best {self._best:.0%})"
        )
