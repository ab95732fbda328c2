"""The tokens by which servers know their clients."""

from __future__ import annotations

from pathlib import Path

from embodyrl.errors import UserError
from embodyrl.real_robot.ports import NEW_TOKEN, require_strong


def read_token(file: str) -> str:
    """The token in a file; empty if no file is named.

    Raises:
        UserError: the file is missing, empty or no text, or the token is too short.
    """
    if not file:
        return ""
    try:
        token = Path(file).read_text().strip() if Path(file).is_file() else ""
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is no text. {NEW_TOKEN} > {file}") from error
    if not token:
        raise UserError(f"There is no token in {file}. {NEW_TOKEN} > {file}")
    require_strong(token, f"The token in {file}")
    return token
