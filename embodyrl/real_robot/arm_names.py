"""The names of arms, where one learner or one person has several.

An arm says its name as the last part of the address that it connects to: ``ws://HOST:PORT/NAME``.
"""

from __future__ import annotations

import re
import socket
from urllib.parse import urlsplit

from embodyrl.errors import UserError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
"""It stands in addresses, logs and metrics."""


def check_name(name: str) -> str:
    """The name of an arm.

    Raises:
        UserError: it is none.
    """
    if NAME.fullmatch(name) is None:
        raise UserError(
            f"{name[:40]!a} is no name of an arm. It must be 1 to 32 letters, digits, dots, dashes "
            "or underscores, the first a letter or a digit."
        )
    return name


def with_name(address: str) -> str:
    """An address with the name of this arm: the given one, or that of this computer.

    Args:
        address: ``ws://HOST:PORT`` or ``ws://HOST:PORT/NAME``.

    Raises:
        UserError: the name cannot be.
    """
    name = urlsplit(address).path.strip("/")
    if name:
        check_name(name)
        return address
    own = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname()).lstrip("_.-")[:32]
    return f"{address.rstrip('/')}/{own or 'arm'}"
