"""Whether a run may go on with a config: what changes its results is refused, the rest is said."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from embodyrl.config import Config, to_dict
from embodyrl.errors import UserError
from embodyrl.storage.inputs import contents_of, listed, sort_changes
from embodyrl.storage.paths import settings_of
from embodyrl.storage.plain_data import ANYTHING, check, read_yaml
from embodyrl.storage.run_files import read_meta

CHANGEABLE = (
    "iterations", "minutes", "eval_every", "patience", "checkpoint_every", "keep_checkpoints",
    "loggers", "compile",
)  # fmt: skip
"""Keys of ``run`` that an existing run may change; the first two may only rise. The settings of the
machine may change too: those marked by ``machine_setting``."""
CHUNKS = "algorithm.num_chunks"
ENVS = "env.num_envs"


def check_folder(folder: Path, config: Config, say: Callable[[str], None] = print) -> None:
    """Refuses a folder that holds a run whose results another config would change.

    Its place, the settings of the machine and what is ``CHANGEABLE`` may differ; and a path, if
    what lies there is the same (``storage.paths.fingerprint``).

    Args:
        folder: of the run; it need not exist.
        config: that the run is to go on with.
        say: is told, in a line, what has changed; and what a longer run means.

    Raises:
        UserError: naming what differs, with the old and the new values.
    """
    path = folder / "config.yaml"
    if not path.exists():
        return
    plain = Config(**{f.name: type(getattr(config, f.name))() for f in dataclasses.fields(config)})
    defaults, new = (_flat(json.loads(json.dumps(to_dict(c)))) for c in (plain, config))
    saved = read_yaml(path)
    remedy = "Bring back a copy of it, or give this run another run.name."
    check(saved, {...: {...: ANYTHING}}, path, remedy)
    old = defaults | _flat(saved)  # what an older version did not write was as it is by default
    # What changed is sorted into what may change and what may not.
    meta = folder / "meta.json"
    allowed, refused = sort_changes(
        old,
        new,
        free=_free(config, old, new),
        was=read_meta(meta).get("inputs", {}) if meta.exists() else {},
        now=run_inputs(config),
    )
    if refused:
        raise UserError(
            f"{folder} holds a run with another config ({listed(refused)}). This would change its "
            f"results, so it does not go on. Give the old values to go on; or {_way_on(folder)}. "
            "An existing run can be made longer (run.iterations, run.minutes), not shorter."
        )
    # One line tells what is other than before; a longer run has a line of its own.
    if own := [text for text in allowed if not text.startswith(("run.out ", "run.name "))]:
        say(f"{folder} goes on; changed: {listed(own)}.{_about_envs(old, new)}")
    before = old.get("run.iterations")
    now = new["run.iterations"]
    if before != now:
        say(
            f"{folder} goes on to {now} iterations instead of {before}. What follows the share of "
            "the run that is done, such as a falling learning rate, now follows the share of "
            f"{now}; so this is not quite a run that was to have {now} from its start."
        )


def run_inputs(config: Config) -> dict[str, str]:
    """``section.key`` -> content of each path of a config that is there."""
    sections = [f.name for f in dataclasses.fields(config)]
    parts = [contents_of(getattr(config, name), name) for name in sections]
    return {key: what for part in parts for key, what in part.items()}


def _free(config: Config, old: dict[str, Any], new: dict[str, Any]) -> set[str]:
    """The keys that may change."""
    free = {f"run.{key}" for key in CHANGEABLE} - set(_lowered(old, new)) | {"run.out", "run.name"}
    for section in ("env", "policy", "algorithm", "run", "data"):
        free |= {f"{section}.{key}" for key in settings_of(getattr(config, section), "machine")}
    # Fewer envs may act for more chunks each, so that an iteration has as many as before.
    if _chunks(old) and _chunks(old) == _chunks(new):
        free.add(CHUNKS)
    return free


def _chunks(flat: dict[str, Any]) -> int:
    """Chunks of one iteration, of all envs together; 0 where the algorithm does not say."""
    return flat.get(ENVS, 0) * flat.get(CHUNKS, 0)


def _about_envs(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What another number of envs means for the episodes and for an iteration."""
    if old.get(ENVS) == new.get(ENVS) or not _chunks(new):
        return ""
    text = " Episodes begin anew, as whenever a run goes on."
    if _chunks(old) != _chunks(new):
        text += f" An iteration now has {_chunks(new)} chunks instead of {_chunks(old)}"
        keeps = _chunks(old) / new[ENVS]
        text += f"; {CHUNKS}={int(keeps)} keeps them." if keeps.is_integer() else "."
    return text


def _way_on(folder: Path) -> str:
    """How to use what is there in a run with the new settings."""
    if any((folder / "checkpoints").glob("step_*")):
        return (
            "start a new run from its weights, with another run.name and "
            f"run.init_checkpoint={folder}"
        )
    return "start a new run, with another run.name"


def _flat(tree: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """``section.key`` -> value."""
    return {
        f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()
    }


def _lowered(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """The limits that would be tightened; 0 minutes are no limit."""
    if new["run.iterations"] < old.get("run.iterations", 0):
        yield "run.iterations"
    if (new["run.minutes"] or math.inf) < (old.get("run.minutes") or math.inf):
        yield "run.minutes"
