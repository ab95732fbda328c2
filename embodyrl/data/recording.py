"""What collecting produces and a data set holds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Recording:
    """One episode of T control steps: row t is what was seen before action t, the action, and what it earned.

    Attributes:
        images: camera -> (T, h, w, 3) uint8.
        proprio: (T, P) float32.
        actions: (T, A) float32 in [-1, 1], as the env executed them.
        reward: (T,) float32.
        solved: (T,) bool, the task is solved after that action; in an env that goes on it can come
            undone.
        init: initial state.
        task: the task's name.
        instruction: the sentence that the policy is told.
        noise: the expert's noise level.
        human: (T,) bool, a person had taken over; None where nobody can.
        privileged: (T, S) float32, the simulator's state; None where there is none. No policy may
            see it.
    """

    images: dict[str, np.ndarray]
    proprio: np.ndarray
    actions: np.ndarray
    reward: np.ndarray
    solved: np.ndarray
    init: int
    task: str
    instruction: str
    noise: float = 0.0
    human: np.ndarray | None = None
    privileged: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def success(self) -> bool:
        """Whether the task was ever solved."""
        return bool(self.solved.any())
