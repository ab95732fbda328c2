"""What one env step of a dream collects while its chunk is imagined piece by piece."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from embodyrl.types import Obs, Step


@dataclass
class DreamOutcome:
    """How the dreams that run have ended in one piece; each (N,) bool, at most one True per dream.

    Attributes:
        success: the task is solved.
        doubtful: the dream cannot be trusted any more, and is over.
        fault: it broke: it left what is possible, or could not be judged.
        time_up: its time is up, and none of the above.
    """

    success: Tensor
    doubtful: Tensor
    fault: Tensor
    time_up: Tensor

    @property
    def over(self) -> Tensor:
        """(N,) bool: it has ended in one way or another."""
        return self.success | self.doubtful | self.fault | self.time_up


class StepRecord:
    """Rewards, masks and outcomes of N dreams over the H actions of one env step.

    Args:
        n: N.
        horizon: H.
        device: of its tensors.
        cut_doubt: a dream in doubt is truncated; otherwise it has failed.

    Attributes:
        fault: (N,) bool, broke in one of the pieces.
    """

    def __init__(
        self, n: int, horizon: int, device: torch.device, *, cut_doubt: bool = False
    ) -> None:
        self._cut_doubt = cut_doubt
        self._reward = torch.zeros(n, horizon, device=device)
        self._valid = torch.zeros(n, horizon, dtype=torch.bool, device=device)
        self._probability = torch.zeros(n, device=device)
        self._success = torch.zeros(n, dtype=torch.bool, device=device)
        self._doubtful = torch.zeros_like(self._success)
        self._time_up = torch.zeros_like(self._success)
        self.fault = torch.zeros_like(self._success)

    def add(
        self, first: int, count: Tensor, running: Tensor, outcome: DreamOutcome, probability: Tensor
    ) -> None:
        """Adds one piece.

        Args:
            first: the number of its first action.
            count: (N,) actions that were executed; 0 where a dream was over before.
            running: (N,) bool, whether the dream was still running before the piece.
            outcome: of the piece.
            probability: (N,) of success after it.
        """
        steps = torch.arange(self._reward.shape[1], device=count.device)
        self._valid |= (steps >= first) & (steps < first + count[:, None])
        # A success is rewarded with 1, at the last action that was executed.
        rows = outcome.success.nonzero().flatten()
        self._reward[rows, first + count[rows] - 1] = 1.0
        self._probability = torch.where(running, probability, self._probability)
        self._success |= outcome.success
        self._doubtful |= outcome.doubtful
        self._time_up |= outcome.time_up
        self.fault |= outcome.fault

    def to_step(self, obs: Obs) -> Step:
        """The ``Step`` that the env returns. The chunk of a dream that broke does not count."""
        valid = self._valid & ~self.fault[:, None]
        failed = torch.zeros_like(self._doubtful) if self._cut_doubt else self._doubtful
        cut = self._doubtful & ~failed
        return Step(
            obs=obs,
            reward=self._reward * ~self.fault[:, None],
            terminated=self._success | failed,
            truncated=self._time_up | self.fault | cut,
            valid=valid,
            success=self._success,
            fault=self.fault,
            log={
                "doubt": self._doubtful,
                "steps": valid.sum(1),
                "judged": self._probability,
            },
        )
