"""The folder in which LIBERO's compiled scenes are kept, and the message while one is made."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Where scenes are kept between runs; safe to delete at any time."""
    return Path(platformdirs.user_cache_dir("embodyrl")) / "libero"


@contextlib.contextmanager
def announce_first_compile(what: str, how_long: str, packages: tuple[str, ...]) -> Iterator[None]:
    """Prints why nothing happens for a while, where ``what`` is compiled for the first time.

    Args:
        what: is compiled inside the ``with`` block.
        how_long: it takes, in words.
        packages: with new versions of these it is compiled again.
    """
    versions = "_".join(importlib.metadata.version(name) for name in packages)
    done = cache_dir() / f"{what.replace(' ', '_')}_{versions}"
    if not done.exists():
        print(f"LIBERO: compiling the {what} ({how_long}, this once) ...", file=sys.stderr)
    yield
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()
