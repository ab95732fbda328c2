"""The one exception that a user's mistake or a missing piece of the machine raises.

The command line prints its text as a plain paragraph (what, why, what to do) and no traceback; all
else is a bug.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import fields
from typing import Any


class UserError(Exception):
    """Something the user can mend: the message says what happened, why, and what to do."""


class MissingDependencyError(UserError):
    """An optional package, driver or asset is not here; the message says what to install."""


def did_you_mean(given: str, valid: Iterable[str]) -> str:
    """The valid names nearest to what was given, as the end of an error message.

    Args:
        given: what the user wrote.
        valid: the names that would have been right.

    Returns:
        ``"Did you mean 'a' or 'b'?"``, or the list of valid names when none is near.
    """
    names = sorted(valid)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.6)
    if near:
        return "Did you mean " + " or ".join(repr(name) for name in near) + "?"
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"Valid names: {shown}."


def refuse_unread(config: Any, section: str, keys: Iterable[str], why: str) -> None:
    """Refuses settings that were changed from their defaults although nothing would read them.

    Args:
        config: a dataclass.
        section: of the config, for the message.
        keys: its fields that are not read.
        why: what makes it so, as a sentence without its stop.

    Raises:
        UserError: naming the first one.
    """
    defaults = {f.name: f.default for f in fields(config)}
    for key in keys:
        if getattr(config, key) != defaults[key]:
            given = getattr(config, key)
            default = defaults[key]
            raise UserError(
                f"{section}.{key} is {given!r}, but {why}. Leave it out (its default is "
                f"{default!r})."
            )
