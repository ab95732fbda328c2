"""What a run was made from: the content of its paths, so that the same data are known elsewhere."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.paths import fingerprint, settings_of
from embodyrl.storage.plain_data import ANYTHING, TEXT, read_json

START = "run.init_checkpoint"
"""The one path whose content may change: it counts at the start of a run alone."""
CLAIM = {"inputs?": {...: TEXT}, ...: ANYTHING}
"""Structure of the file by which a folder is claimed."""
SHOWN = 8
"""Settings that a message names."""


def contents_of(config: Any, section: str = "") -> dict[str, str]:
    """The content of each path of a config that is there.

    Args:
        config: a dataclass with fields that are marked by ``path_setting``.
        section: its name, which is put before the keys.

    Returns:
        ``section.key`` -> fingerprint; of several paths, one after the other. Empty paths, and
        those that are not there, are left out.
    """
    found = {}
    for key in sorted(settings_of(config, "path")):
        if what := content(getattr(config, key)):
            found[f"{section}.{key}" if section else key] = what
    return found


def content(value: Any) -> str:
    """The fingerprint of a path, or of several; empty where one is not there.

    A run's folder means its newest checkpoint.
    """
    paths = [value] if isinstance(value, str) else list(value or [])
    found = []
    for path in filter(None, paths):
        steps = sorted((Path(path) / "checkpoints").glob("step_*"))
        found.append(fingerprint(steps[-1] if steps else path) or "")
    return " ".join(found) if all(found) else ""


def sort_changes(
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    free: Iterable[str],
    was: Mapping[str, str],
    now: Mapping[str, str],
) -> tuple[list[str], list[str]]:
    """Which changed settings keep the results of a run, and which do not.

    Args:
        old: key -> value, when the run was last started.
        new: key -> value, now.
        free: the keys that may have any value.
        was: key -> content of its path, when the run began (``contents_of``).
        now: the same, now.

    Returns:
        Sentences about the changes that are allowed, and about those that are not.
    """
    free = set(free)
    allowed = []
    refused = []
    for key in sorted(old.keys() | new.keys()):
        before = old.get(key, "not there")
        after = new.get(key, "gone")
        # What an older version did not note is read from the old place, if it is still there.
        known = was.get(key) or (content(before) if key in now and before else "")
        same = bool(known) and known == now.get(key)
        if before == after:
            if key in now and key in was and not same and key != START:
                refused.append(f"{key}={after} holds something else than when the run began")
            continue
        text = f"{key} was {_shown(before)}, now {_shown(after)}"
        if key in free:
            allowed.append(text)
        elif same:
            allowed.append(f"{text}, with the same content")
        else:
            refused.append(text)
    return allowed, refused


def claim(path: Path, config: Any, plain: Any, free: Iterable[str], what: str) -> None:
    """Writes a config into a new folder, or checks it against the one that is there.

    Args:
        path: of the file.
        config: a dataclass.
        plain: the same with its defaults: what an older version did not know had their effect.
        free: settings that may differ when it goes on.
        what: the folder holds, for the message.

    Raises:
        UserError: the folder holds one with other settings.
    """
    new = json.loads(json.dumps(dataclasses.asdict(config)))
    inputs = contents_of(config)
    if path.exists():
        old = read_json(path, CLAIM, "Bring back a copy of it, or give another folder.")
        was = old.pop("inputs", {})
        defaults = json.loads(json.dumps(dataclasses.asdict(plain)))
        before = {key: old.get(key, defaults[key]) for key in new}
        allowed, refused = sort_changes(before, new, free=free, was=was, now=inputs)
        if refused:
            raise UserError(
                f"{path.parent} holds {what} with other settings ({listed(refused)}), and these "
                "change its results. Give the old ones to go on, or give this one a folder of its "
                "own."
            )
        if own := [text for text in allowed if not text.startswith("out ")]:
            print(f"{path.parent} goes on; changed: {listed(own)}.")
        inputs |= was
    write_json(path, new | {"inputs": inputs})


def listed(changes: list[str]) -> str:
    """Changes as one text; of very many the first ones, names before other settings."""
    changes = sorted(changes, key=lambda text: not text.partition(" ")[0].endswith(".name"))
    more = f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return "; ".join(changes[:SHOWN]) + more


def _shown(value: Any) -> Any:
    return "empty" if value == "" else value
