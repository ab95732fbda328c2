"""``Recording``: one recorded episode, as collecting produces it and a data set holds it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Recording:
    """One episode of T control steps.

    Row t is the observation before action t, the action, and its reward.

    Attributes:
        images: camera -> (T, h, w, 3) uint8.
        proprio: (T, P) float32.
        actions: (T, A) float32 in [-1, 1], as the env executed them.
        reward: (T,) float32.
        solved: (T,) bool, the task is solved after that action. In an env that goes on after
            success this can become False again.
        init: initial state.
        task: the task's name.
        instruction: the sentence that the policy is told.
        noise: the expert's noise level.
        human: (T,) bool, a person had taken over; None if nobody can.
        recovery: (T,) bool, the arm went back the way that it came, as a person wanted; None for
            never.
        privileged: (T, S) float32, the simulator's state; None if there is none. No policy may see
            it.
        depth: camera -> (T, h, w) uint16 mm, 0 where nothing was measured; of cameras that have it.
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
    recovery: np.ndarray | None = None
    privileged: np.ndarray | None = None
    depth: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def success(self) -> bool:
        """Whether the task was solved at any time."""
        return bool(self.solved.any())
