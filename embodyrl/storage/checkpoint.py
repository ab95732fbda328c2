"""Checkpoints: complete or not there at all, and verified on every load.

A checkpoint is a folder, ``step_000123``, with these files:

    NAME.safetensors    the tensors of each named state (policy, algorithm, ...)
    state.json          the structure of the states: keys, lists and plain numbers
    meta.json           config, EnvSpec and position of the run; also for people to read
    MANIFEST.sha256     the hash of each file; ``sha256sum -c MANIFEST.sha256`` checks them too

It is written into a hidden folder next to its place, flushed to disk, and then renamed. Only one
process may write into a folder of checkpoints at a time. A checkpoint holds no code.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodyrl.errors import UserError, did_you_mean
from embodyrl.policy import Policy
from embodyrl.storage import plain_data
from embodyrl.storage.atomic_files import remove_unfinished, replacing_folder
from embodyrl.storage.env_spec import check_compatible
from embodyrl.storage.paths import FileAccessError, expand_home, no_access, require_readable
from embodyrl.storage.plain_data import ANYTHING, COUNT, NUMBER, first_line
from embodyrl.storage.state_tree import flatten, is_name, unflatten
from embodyrl.types import EnvSpec

MANIFEST = "MANIFEST.sha256"
REMEDY = "Use an earlier one, or a copy of it."
RUN_META = {
    "spec": {...: ANYTHING},
    "config?": {...: {...: ANYTHING}},
    "position?": {
        "iteration": COUNT,
        "env_steps": COUNT,
        "minutes": NUMBER,
        "tasks?": {...: [NUMBER]},
        "starts?": {...: [NUMBER]},
    },
}
"""Structure of the ``meta.json`` of a run's checkpoint."""


class DamagedCheckpointError(UserError):
    """A file of a checkpoint is missing, truncated or altered."""


def save(
    path: str | Path,
    states: Mapping[str, Any],
    meta: Mapping[str, Any],
    *,
    keep_last: int = 0,
    also: Collection[str] = (),
) -> Path:
    """Writes a checkpoint. If that fails or is interrupted, existing checkpoints stay complete.

    Args:
        path: the folder to make, ``.../step_000123`` for checkpoints that ``latest`` finds. An
            existing one is replaced.
        states: name -> nested dicts (keys str or int), lists and tuples of tensors, numbers,
            strings and None. Such are the results of ``state_dict`` of modules and optimisers,
            ``torch.Generator.get_state`` and numpy's ``bit_generator.state``.
        meta: data that JSON can hold.
        keep_last: keep only the newest ``keep_last`` of the ``step_...`` folders up to this one,
            and delete older ones; 0 keeps all.
        also: names of older ones that stay.

    Returns:
        The path.

    Raises:
        UserError: the disk is full or may not be written.
        TypeError: a state holds a value of another type; the message names it.
    """
    path = Path(path)
    encoded = {name: flatten(state, name) for name, state in states.items()}
    try:
        # All files go into a hidden folder, the manifest last. If the process ends while an
        # existing checkpoint is put aside, ``latest`` finds that one.
        with replacing_folder(path) as scratch:
            for name, (_, tensors) in encoded.items():
                save_file(tensors, scratch / f"{name}.safetensors")
            _write_json(scratch / "state.json", {name: tree for name, (tree, _) in encoded.items()})
            _write_json(scratch / "meta.json", dict(meta))
            (scratch / MANIFEST).write_text(_manifest(scratch))
    except SafetensorError as error:  # it tells no kinds of errors apart
        raise FileAccessError(
            f"The checkpoint {path} could not be written ({error}). Earlier checkpoints are "
            "untouched: free some disk space, and the same command goes on from there."
        ) from error
    delete_old(path, keep_last, also)
    return path


def load(
    path: str | Path, *, device: torch.device | str = "cpu"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Verifies and reads a checkpoint.

    Args:
        path: its folder.
        device: of the tensors. (The state of a generator must stay on the CPU.)

    Returns:
        The states and the meta as they were saved; tensors and numbers are bit-equal.

    Raises:
        DamagedCheckpointError: a file is missing, truncated or altered; or the hashes are right,
            but the files do not hold a checkpoint.
    """
    path = Path(path)
    if wrong := damage(path):
        raise DamagedCheckpointError(f"The checkpoint {path} is damaged: {wrong}. {REMEDY}")
    try:
        trees = plain_data.read_json(path / "state.json", {...: ANYTHING}, REMEDY)
        meta = plain_data.read_json(path / "meta.json", {...: ANYTHING}, REMEDY)
        states = {}
        for name, tree in trees.items():
            # The name is part of a path, so it must be one that ``save`` accepts.
            if not is_name(name):
                raise ValueError(f"a state cannot be named {name[:60]!r}")
            require_readable(path / f"{name}.safetensors")
            tensors = load_file(path / f"{name}.safetensors", device=str(device))
            states[name] = unflatten(tree, tensors)
    except FileAccessError:
        raise
    except UserError as error:
        raise DamagedCheckpointError(str(error)) from error
    except PermissionError as error:
        raise no_access(error, error.filename or path) from error
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise DamagedCheckpointError(
            f"The checkpoint {path} is malformed ({first_line(error)}). {REMEDY}"
        ) from error
    return states, meta


def load_run(
    path: str | Path, *needed: str, device: torch.device | str = "cpu"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """``load`` of a checkpoint that a run wrote: ``RUN_META`` says what its meta then holds.

    Args:
        path: its folder.
        needed: entries of the meta that must be there.
        device: of the tensors.

    Raises:
        DamagedCheckpointError: see ``load``; or it is no checkpoint of a run.
    """
    states, meta = load(path, device=device)
    structure = RUN_META | {key: RUN_META[f"{key}?"] for key in needed if f"{key}?" in RUN_META}
    problem = plain_data.mismatch(meta, structure)
    if problem is None and not isinstance(states.get("policy"), dict):
        problem = "it holds no state of a policy"
    if problem is not None:
        raise DamagedCheckpointError(f"The checkpoint {path} is malformed: {problem}. {REMEDY}")
    return states, meta


def damage(path: Path) -> str | None:
    """Compares the files of a checkpoint with its manifest.

    Returns:
        What is wrong, for an error message; None if every file is as it was written.

    Raises:
        FileAccessError: a file may not be read.
    """
    try:
        written = (path / MANIFEST).read_bytes().decode()
        found = _manifest(path)
    except FileNotFoundError:
        return f"{MANIFEST} is missing" if path.is_dir() else "there is no such folder"
    except PermissionError as error:
        raise no_access(error, error.filename or path) from error
    except (OSError, UnicodeDecodeError) as error:
        return f"it cannot be read ({error})"
    if written == found:
        return None
    # Each line is "HASH  NAME". The names of the lines that differ are the damaged files.
    differing = set(written.splitlines()) ^ set(found.splitlines())
    names = {line.partition("  ")[2] for line in differing}
    altered = sorted(name for name in names if (path / name).is_file())
    missing = sorted(name for name in names if name and name not in altered)
    problems = [f"{name} is not as it was written" for name in altered]
    problems += [f"{name} is missing" for name in missing]
    return ", ".join(problems) or f"{MANIFEST} is not as it was written"


def latest(folder: str | Path, say: Callable[[str], None] | None = None) -> Path | None:
    """The newest valid checkpoint of a folder; None only if the folder has no checkpoint.

    Args:
        folder: holds ``step_...`` folders.
        say: called with a sentence about every newer checkpoint that is damaged; None prints to
            stderr.

    Raises:
        DamagedCheckpointError: there are checkpoints, and all are damaged.
    """
    say = say or (lambda text: print(text, file=sys.stderr))
    damaged = {}
    for path in reversed(_steps(Path(folder))):
        problem = damage(path)
        if problem is None:
            for other, what in damaged.items():
                say(
                    f"The checkpoint {other} is damaged ({what}), so the one before it that is "
                    f"whole is used: {path}."
                )
            return path
        damaged[path] = problem
    if damaged:
        listed = "; ".join(f"{path.name}: {what}" for path, what in damaged.items())
        raise DamagedCheckpointError(
            f"No checkpoint in {folder} is whole ({listed}). Nothing was started afresh: bring "
            "back a copy of one, or begin anew in another folder (run.name)."
        )
    return None


def find(path: str | Path) -> Path:
    """The checkpoint that a path means.

    Args:
        path: a checkpoint's own folder; or a folder of checkpoints or of a run, which mean their
            newest checkpoint.

    Raises:
        UserError: there is none.
    """
    path = Path(expand_home(str(path)))
    if (path / MANIFEST).exists() or re.fullmatch(r"step_\d+", path.name):
        return path
    for folder in (path / "checkpoints", path):
        if folder.is_dir() and (found := latest(folder)):
            return found
    # There is none: name the folders with a similar name.
    hint = "Give a run's folder, or a step_... folder."
    if path.is_file():
        hint = (
            "It is a file, and a checkpoint is a folder: give a run's folder, or a step_... folder. "
            "An exported policy (.onnx, .npz) goes to `eval --policy`, `deploy` and `serve` alone."
        )
    elif not path.exists() and path.parent.is_dir():
        near = [p.name for p in path.parent.iterdir() if p.is_dir()]
        if near:
            hint = did_you_mean(path.name, near)
    raise UserError(f"There is no checkpoint in {path}. {hint}")


def load_weights(path: str | Path, policy: Policy, spec: EnvSpec) -> dict[str, Any]:
    """Loads the policy of a checkpoint into ``policy``, after checking that it fits.

    Two attributes of the policy's class name parts that may keep their fresh weights:
    ``starts_fresh``, prefixes of tensors that may be missing from the checkpoint; and
    ``belongs_to``, prefixes of tensors that are ignored if the checkpoint was made with another
    value of a config key.

    Args:
        path: see ``find``.
        policy: with a ``config`` dataclass.
        spec: of the env that it will act in.

    Returns:
        The checkpoint's meta.

    Raises:
        UserError: it does not fit; the message names the differences.
    """
    where = find(path)
    states, meta = load_run(where)
    check_compatible(meta["spec"], spec)
    given = states["policy"]
    wanted = policy.state_dict()

    # Parts that the checkpoint lacks and may lack keep their fresh weights.
    fresh = tuple(getattr(policy, "starts_fresh", ()))
    given = {k: v for k, v in wanted.items() if k.startswith(fresh)} | given
    # So do the parts of a setting that has changed.
    old_config = meta.get("config", {}).get("policy", {})
    new_config: dict[str, Any] = json.loads(json.dumps(asdict(policy.config)))  # type: ignore[arg-type]
    for key, parts in getattr(policy, "belongs_to", {}).items():
        if old_config.get(key) != new_config[key]:
            given = {k: v for k, v in given.items() if not k.startswith(parts)}
            given |= {k: v for k, v in wanted.items() if k.startswith(parts)}

    # Refuse what does not fit. Differing config keys explain it better than names of tensors.
    wrong = [f"{k} is missing" for k in wanted if k not in given]
    wrong += [f"{k} is not part of this policy" for k in given if k not in wanted]
    wrong += [text for k, v in given.items() if k in wanted and (text := _unlike(k, v, wanted[k]))]
    if wrong:
        keys = [
            f"policy.{k} was {old_config[k]!r} and is {new_config[k]!r}"
            for k in old_config
            if k in new_config and old_config[k] != new_config[k]
        ]
        raise UserError(
            f"The policy in {where} is built differently from this one: "
            f"{'; '.join(keys) or '; '.join(wrong[:5])}. Give this run the settings of the "
            "checkpoint's config."
        )
    policy.load_state_dict(given)
    return meta


def num_values(state: Any) -> int:
    """Numbers in the tensors of a nested state."""
    if isinstance(state, Tensor):
        return state.numel()
    inner = state.values() if isinstance(state, dict) else state
    return sum(map(num_values, inner)) if isinstance(state, dict | list | tuple) else 0


def _unlike(name: str, given: Any, wanted: Any) -> str:
    """How a part of a policy's state differs in kind from what the policy has; empty if it fits."""
    if given is wanted:  # fresh weights, which in a dry run have no values
        return ""
    if not isinstance(wanted, Tensor):
        return "" if type(given) is type(wanted) else f"{name} is no {type(wanted).__name__}"
    if not isinstance(given, Tensor):
        return f"{name} is no tensor"
    if given.shape != wanted.shape:
        return f"{name} has the shape {tuple(given.shape)}, not {tuple(wanted.shape)}"
    if given.dtype != wanted.dtype and not (
        given.is_floating_point() and wanted.is_floating_point()
    ):
        return f"{name} has the dtype {given.dtype}, not {wanted.dtype}"
    return f"{name} holds NaN" if given.is_floating_point() and bool(given.isnan().any()) else ""


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")


def _manifest(path: Path) -> str:
    """The hashes of the files in a folder, in the format of ``sha256sum``."""
    lines = []
    for file in sorted(path.iterdir()):
        if file.name != MANIFEST and not file.name.startswith("."):
            # A link out of the folder, or a pipe, is no part of a checkpoint.
            if not file.is_file() or file.resolve().parent != path.resolve():
                raise OSError(f"{file.name} is no file of this folder")
            with file.open("rb") as stream:
                lines.append(f"{hashlib.file_digest(stream, 'sha256').hexdigest()}  {file.name}\n")
    return "".join(lines)


def _steps(folder: Path) -> list[Path]:
    """The checkpoints of a folder, oldest first.

    One that was put aside by ``save`` counts if its replacement was never renamed into place.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if match := re.fullmatch(r"step_(\d+)|\.step_(\d+)\.old-[0-9a-f]{8}", path.name):
            # "." sorts before "s", so a checkpoint in its place overwrites the one put aside.
            found[int(match[1] or match[2])] = path
    return [found[number] for number in sorted(found)]


def delete_old(path: Path, keep_last: int, also: Collection[str] = ()) -> None:
    """Deletes old checkpoints; does nothing for one that ``save`` has put aside.

    These are what interrupted saves left behind, what ``path`` replaced, and all but the newest
    ``keep_last`` checkpoints, and those with a name of ``also``.
    """
    if re.fullmatch(r"step_\d+", path.name):
        remove_unfinished(path.parent)
    if keep_last and re.fullmatch(r"step_\d+", path.name):
        steps = _steps(path.parent)
        for old in steps[: steps.index(path) + 1][:-keep_last]:
            if old.name in also:
                continue
            # Rename it first: an interrupted deletion must not leave half a checkpoint that looks
            # like a whole one.
            to_delete = old.with_name(f".{old.name}.tmp-{secrets.token_hex(4)}")
            old.rename(to_delete)
            shutil.rmtree(to_delete, ignore_errors=True)
