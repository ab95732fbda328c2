"""The exception for what a user can correct: a wrong setting, a missing package or file.

The command line prints its text as one paragraph without a traceback. The text says what is wrong,
why, and what to do. Any other exception is a bug.
"""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any


class UserError(Exception):
    """Something the user can correct; the message says what is wrong, why, and what to do.

    Attributes:
        status: exit status of the command that it ends.
    """

    status = 1


class MissingDependencyError(UserError):
    """An optional package, driver or asset is missing; the message says what to install."""


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """The valid names nearest to a wrong one, as the end of an error message.

    Args:
        given: the wrong name.
        valid: all valid names.

    Returns:
        ``"Did you mean 'a' or 'b'?"``, or the list of valid names if none is near; that there
        is none, where the list is empty.
    """
    names = sorted(valid)
    if not names:
        return "There is none to name."
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.6)
    if near:
        return "Did you mean " + " or ".join(repr(name) for name in near) + "?"
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"Valid names: {shown}."


def refuse_unread(config: Any, section: str, keys: Iterable[str], why: str) -> None:
    """Refuses settings that differ from their defaults but have no effect.

    Args:
        config: a dataclass.
        section: of the config, for the message.
        keys: its fields that have no effect.
        why: the reason, as a sentence without a full stop.

    Raises:
        UserError: the message names the first such setting.
    """
    defaults = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in fields(config)
    }
    for key in keys:
        if getattr(config, key) != defaults[key]:
            given = getattr(config, key)
            default = defaults[key]
            raise UserError(
                f"{section}.{key} is {given!r}, but {why}. Leave it out (its default is "
                f"{default!r})."
            )


def try_each(rows: Iterable[int], work: Callable[[int], None]) -> dict[int, str]:
    """Calls ``work(k)`` for every k in ``rows``, whatever happens to the others.

    Returns:
        Of those that raised, the number and ``error_text``, for ``fault_texts``.

    Raises:
        UserError: one of them raised it: a mistake of the user's is no fault of a simulator.
    """
    failed: dict[int, str] = {}
    for k in rows:
        try:
            work(k)
        except UserError:
            raise
        except Exception as error:
            failed[k] = error_text(error)
    return failed


def error_text(error: BaseException) -> str:
    """An exception and where it was raised, in one line, as the end of a sentence."""
    said = " ".join(str(error).split())
    said = said if len(said) <= 300 else f"{said[:300]}..."
    text = f"{type(error).__name__}: {said.rstrip('.')}" if said else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return (
        f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
    )
