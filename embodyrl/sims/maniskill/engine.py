"""``Engine``: what ``ManiSkillEnv`` asks of its two engines."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from torch import Tensor

from embodyrl.env import Tick


class Engine(Protocol):
    """N scenes of a task: one by one on the CPU (``cpu.py``) or all at once on the GPU (``gpu.py``).

    Attributes:
        base: ManiSkill's env object; on the CPU the first of the N.
        cameras: those that ``observe`` draws.
        fault_texts: number of a scene -> what it raised in the last step.
    """

    base: Any
    cameras: list[str]
    fault_texts: dict[int, str]

    @property
    def size(self) -> int:
        """N."""
        ...

    def grow(self, count: int) -> None:
        """Builds ``count`` more scenes."""
        ...

    def reset(self, ids: list[int], seeds: list[int]) -> None:
        """Puts those scenes into the initial states of those seeds."""
        ...

    def step(self, actions: Tensor, active: Tensor) -> Tick:
        """One control step.

        Args:
            actions: (N, A) in the controller's own units.
            active: (N,) bool; the outcome of the other scenes means nothing.
        """
        ...

    def observe(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """State (N, S), proprio (N, P) and images (N, h, w, 3) uint8."""
        ...

    def tool(self) -> np.ndarray:
        """(N, 7) pose of the tool between the fingers: metres, and a quaternion, real part first."""
        ...

    def pose(self, name: str) -> np.ndarray:
        """(N, 7) of an actor, or a pose, by its attribute's name in ManiSkill's env."""
        ...

    def close(self) -> None:
        """Frees the scenes."""
        ...
