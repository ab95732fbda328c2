"""A scripted person who helps the policy of the simulated arm, as slowly and as well as they are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from embodyrl.ranges import NotNegative, Range, Share
from embodyrl.real_robot.control import rewind
from embodyrl.real_robot.control.actions import DeltaDecoder
from embodyrl.real_robot.control.messages import Mode
from embodyrl.real_robot.control.operator import Operator
from embodyrl.real_robot.control.ticker import ASKS
from embodyrl.sims.mujoco.experts import ScriptedExpert


@dataclass(frozen=True)
class HelperConfig:
    """What a scripted person is like.

    Attributes:
        skill: 1 moves the hand as the task's expert does; less adds noise with a standard deviation
            of 1 - skill, in units of the action.
        reaction: s from when help is needed until they act.
        patience: share of an episode's time after which they see by themselves that it fails; 1
            leaves it to a detector.
        rewind: s of motion that they have the arm go back before they correct; 0 for none.
        gives_up: s of moving the arm after which they say that it failed: what they would grasp may
            lie where the arm may not go.
    """

    skill: Annotated[float, Range(0, 1, open_low=True)] = 1.0
    reaction: NotNegative = 1.0
    patience: Share = 0.6
    rewind: NotNegative = 1.0
    gives_up: Annotated[float, Range(0, 3600, open_low=True)] = 15.0


class ScriptedHelper(Operator):
    """Helps when the policy's side asks, or when the episode takes long, and finishes it.

    Args:
        twin: the simulated arm, and its clock.
        config: what they are like.
        seconds: time limit of an episode of the policy.
        seed: of the noise of their hand.
    """

    def __init__(self, twin: Any, config: HelperConfig, seconds: float, seed: int = 0) -> None:
        self._twin = twin
        self._config = config
        self._seconds = seconds
        self._expert = ScriptedExpert(twin, noise=1.0 - config.skill, seed=seed)
        self._decoder: DeltaDecoder | None = None

    def begin(self, decoder: DeltaDecoder) -> None:
        """Begins an episode.

        Args:
            decoder: of its actions.
        """
        self._decoder = decoder
        self._began = self._twin.now()
        self._acts_at: float | None = None  # when they will act
        self._back_until: float | None = None  # while the arm goes back
        self._has_arm = False
        self._had_since = 0.0
        self._mode = ""
        self._reason = ""

    def wishes(self) -> list[str]:
        """See ``Operator``."""
        now = self._twin.now()
        mode = self._mode
        self._mode = ""  # each picture is looked at once
        if mode in (Mode.FAULT, Mode.ESTOP):
            return ["failure"]
        # 1. Whoever has the arm keeps it until the episode ends, also after a hold.
        if self._has_arm:
            if now - self._had_since >= self._config.gives_up:
                return ["failure"]
            return ["takeover"] if mode == Mode.HOLD else []
        # 2. The arm goes back, for as long as they want or until the beginning.
        if self._back_until is not None:
            return self._correct() if now >= self._back_until or mode == Mode.HOLD else []
        # 3. They notice that help is needed, and act when they have reacted.
        asked = mode == Mode.HOLD and self._reason.startswith(ASKS)
        late = now - self._began >= self._config.patience * self._seconds
        if self._acts_at is None and (asked or (late and self._config.patience < 1.0)):
            self._acts_at = now + self._config.reaction
        if self._acts_at is None or now < self._acts_at:
            return []
        if not self._config.rewind:
            return self._correct()
        self._back_until = now + self._config.rewind / rewind.SPEED
        return ["rewind"]

    def alive(self, now: float) -> bool:
        """See ``Operator``."""
        return True

    def action(self, dims: int) -> NDArray[np.float32]:
        """See ``Operator``."""
        # The expert acts on the present state, and on where the arm was told to be.
        assert self._decoder is not None
        self._twin.observe(self._decoder)
        return self._expert.act()[0].cpu().numpy()

    def show(self, status: dict[str, Any], images: dict[str, NDArray[np.uint8]]) -> None:
        """See ``Operator``."""
        self._mode = status["mode"]
        self._reason = status["reason"]

    def _correct(self) -> list[str]:
        self._has_arm = True
        self._had_since = self._twin.now()
        self._expert.reset()
        return ["takeover"]
