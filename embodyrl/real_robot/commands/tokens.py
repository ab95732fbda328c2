"""The tokens by which servers know their clients."""

from __future__ import annotations

from pathlib import Path

from embodyrl.errors import UserError


def read_token(file: str) -> str:
    """The token in a file; empty if no file is named.

    Raises:
        UserError: the file is missing or empty.
    """
    token = Path(file).read_text().strip() if file and Path(file).is_file() else ""
    if file and not token:
        raise UserError(f"There is no token in {file}. Write one: openssl rand -hex 16 > {file}")
    return token
