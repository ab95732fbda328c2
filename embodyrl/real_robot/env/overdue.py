"""An episode that takes long: the arm holds still and asks for a person, once."""

from __future__ import annotations

from embodyrl.real_robot.env.config import RobotConfig


class Overdue:
    """Watches the time of an episode.

    Args:
        config: its ``overdue`` says how long an episode may take.
    """

    def __init__(self, config: RobotConfig) -> None:
        self._share = config.overdue
        self._limit = config.overdue * config.max_episode_steps
        self._judge = (
            "the reflector has not seen it solved" if config.reflector else "it is not solved"
        )
        self._asked = False

    def begin(self) -> None:
        """Begins an episode."""
        self._asked = False

    def __call__(self, taken: int, person: bool) -> str:
        """Why a person is needed; empty while none is.

        Args:
            taken: actions of the episode so far.
            person: whether a person moves the arm already, who then is not asked again.
        """
        if not self._share or self._asked or taken < self._limit:
            return ""
        self._asked = True
        if person:
            return ""
        return f"overdue: {self._share:.0%} of the episode is over, and {self._judge}"
