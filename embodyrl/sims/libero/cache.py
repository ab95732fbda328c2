"""What LIBERO's native backend keeps on disk between runs, and what it says while it is made."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

import platformdirs


def cache_dir() -> Path:
    """Where scenes are kept; safe to delete at any time."""
    return Path(platformdirs.user_cache_dir("embodyrl")) / "libero"


@contextlib.contextmanager
def told_once(what: str, seconds: str, packages: tuple[str, ...]) -> Iterator[None]:
    """Says why nothing happens for a while, the first time that these packages' versions compile ``what`` here."""
    versions = "_".join(importlib.metadata.version(name) for name in packages)
    done = cache_dir() / f"{what.replace(' ', '_')}_{versions}"
    if not done.exists():
        print(f"LIBERO: compiling the {what} ({seconds}, this once) ...", file=sys.stderr)
    yield
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()
