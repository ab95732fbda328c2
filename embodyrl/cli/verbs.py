"""What several commands of the command line share."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

Verb = Callable[..., argparse.ArgumentParser]
"""Adds a command: its name, the function that runs it, a sentence, and examples.

``torch`` says whether it needs PyTorch (``"yes"``), also in worker processes (``"workers"``).
"""

CHECKPOINT = "a checkpoint's folder, or a run's folder, which means its newest checkpoint"
OVERRIDES = "settings that override the config, for example run.seed=1"
JSON = "print the result as JSON"


def print_as(a: argparse.Namespace, result: Any, as_text: Callable[[Any], None]) -> None:
    """Prints a result as JSON, or by the function ``as_text``."""
    if a.json:
        print(json.dumps(result))
    else:
        as_text(result)
