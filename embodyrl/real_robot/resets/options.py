"""Who brings the scene back between episodes, as settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from embodyrl.errors import UserError
from embodyrl.ranges import Count, CountOrZero, Range, check_config

SCRIPTS = (".yaml", ".yml", ".mcap")
"""What the name of a scripted return ends in: waypoints, or the log of an episode."""


@dataclass(frozen=True)
class ResetOptions:
    """Settings of a reset without a person.

    Attributes:
        path: of the scripted return (``SCRIPTS``), or the checkpoint of the policy whose task undoes
            the one of the episodes; empty for neither.
        practice: whether the policy of the episodes plays both tasks in turn.
        seconds: that one try may take, by the arm's clock.
        tries: after so many a person is asked.
        ask_after: failed episodes in a row after which a person is asked; 0 for never.
        prompt: instruction of the task that undoes the other, for an arm.
        reflector: folder of the reflector that tells whether the scene is back.
        home: (3,) m, where the hand goes when the scene is back.
    """

    path: str = ""
    practice: bool = False
    seconds: Annotated[float, Range(0, 3600, open_low=True)] = 30.0
    tries: Count = 2
    ask_after: CountOrZero = 0
    prompt: str = ""
    reflector: str = ""
    home: tuple[float, float, float] = (0.45, 0.0, 0.25)

    @property
    def scripted(self) -> bool:
        """Whether the path is a script, and no policy."""
        return Path(self.path).suffix in SCRIPTS


NO_RESET = ResetOptions()
OPTION_NAMES = {
    "path": "--reset",
    "practice": "--practice",
    "seconds": "--reset-seconds",
    "tries": "--reset-tries",
    "ask_after": "--ask-after",
    "prompt": "--reset-prompt",
    "reflector": "--reset-reflector",
    "home": "--home",
}
"""Field -> the option of a command line."""


def check_options(options: ResetOptions, names: dict[str, str]) -> None:
    """Refuses settings that do not go together.

    Args:
        options: to check.
        names: field -> what the user calls it.

    Raises:
        UserError: naming them.
    """
    check_config("reset", options)
    if options.path and options.practice:
        raise UserError(
            f"{names['practice']} has the policy bring the scene back by itself, and "
            f"{names['path']} names who else does. Leave one of them out."
        )
    if options.path and not options.path.startswith("ws://") and not Path(options.path).exists():
        raise UserError(
            f"There is no {options.path} ({names['path']}): give a file of waypoints (.yaml), a log "
            "(.mcap), a checkpoint or a run's folder."
        )
    if options.path or options.practice:
        return
    # Nothing would read these.
    for field, name in names.items():
        if getattr(options, field) != getattr(NO_RESET, field):
            raise UserError(
                f"{name} is about a reset without a person: give {names['path']} or "
                f"{names['practice']}, too."
            )
