"""Reads JSON and YAML files, and checks that what they hold has the expected structure.

Files of a run, a checkpoint or a world model may come from elsewhere, and a valid hash says only
that they arrived as they were sent. So every reader states what it expects, and gets that or a
``UserError``. Texts are plain data: nothing in them is ever interpolated.

A structure is written like the data:

    TEXT, FLAG, COUNT, NUMBER, ANYTHING     one value
    (TEXT, None)                            a text or null
    [COUNT]                                 a list of counts
    {"iteration": COUNT, "video?": TEXT}    these keys; those with "?" may be missing
    {...: NUMBER}                           any keys, and a number for each
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.storage.paths import no_access

MAX_DEPTH = 32
"""Levels of lists and mappings in one another; a config has 3."""
MAX_YAML = 1 << 20
"""The largest YAML file, in bytes, and the most values in it."""


@dataclass(frozen=True)
class Kind:
    """One value: what it is called in messages, and whether a value is one."""

    name: str
    test: Callable[[Any], bool]


ANYTHING = Kind("anything", lambda value: True)
TEXT = Kind("a text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
COUNT = Kind("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value < 2**53)
NUMBER = Kind(
    "a finite number", lambda value: type(value) in (int, float) and -1e300 < value < 1e300
)


def mismatch(data: Any, structure: Any, where: str = "") -> str | None:
    """Compares plain data with a structure (see the module).

    Returns:
        The first difference, as a sentence without a full stop; None if there is none.
    """
    place = where or "the content"
    if structure is None:
        return None if data is None else f"{place} must be null"
    if isinstance(structure, Kind):
        return None if structure.test(data) else f"{place} must be {structure.name}"
    if isinstance(structure, tuple):
        found = [mismatch(data, option, where) for option in structure]
        return None if None in found else " or ".join(str(text) for text in found)
    if isinstance(structure, list):
        if not isinstance(data, list | tuple):
            return f"{place} must be a list"
        problems = (mismatch(v, structure[0], f"{where}[{i}]") for i, v in enumerate(data))
        return next((text for text in problems if text), None)
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        return f"{place} must be a mapping"
    for key, inner in structure.items():
        if key is ...:
            names = list(data)
        elif key.endswith("?"):
            names = [key[:-1]] if key[:-1] in data else []
        elif key not in data:
            return f"{place} has no {key!r}"
        else:
            names = [key]
        for name in names:
            if problem := mismatch(data[name], inner, f"{where}.{name}" if where else name):
                return problem
    return None


def check(data: Any, structure: Any, file: str | Path, remedy: str) -> None:
    """Refuses data that do not have a structure.

    Args:
        data: that were read.
        structure: see the module.
        file: that they come from.
        remedy: what to do, as a sentence.

    Raises:
        UserError: naming the first difference.
    """
    if problem := mismatch(data, structure):
        raise UserError(f"{file} is malformed: {problem}. {remedy}")


def read_json(path: Path, structure: Any, remedy: str) -> Any:
    """Reads a JSON file that must have a structure.

    Args:
        path: of the file, which must exist.
        structure: see the module.
        remedy: what to do if the file is damaged, as a sentence.

    Raises:
        UserError: it cannot be read, is no JSON, or has another structure.
    """
    try:
        if not path.is_file():  # reading a pipe or a device would not end
            raise FileNotFoundError("there is no such file")
        data = json.loads(path.read_text(encoding="utf-8"))
    except PermissionError as error:
        raise no_access(error, path) from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}). {remedy}") from error
    check(data, structure, path, remedy)
    return data


def read_yaml(path: Path) -> Any:
    """Reads a YAML file as plain data; nothing is interpolated.

    Raises:
        UserError: it cannot be read, is no valid YAML, too large, or holds ``${``.
    """
    import yaml
    from omegaconf import OmegaConf

    try:
        with path.open(encoding="utf-8") as stream:
            text = stream.read(MAX_YAML + 1)
        if len(text) > MAX_YAML or _num_values(yaml.compose(text, yaml.SafeLoader)) > MAX_YAML:
            raise ValueError("it is too large for a config")
        data = OmegaConf.to_container(OmegaConf.create(text), resolve=False)
        require_plain(data, path)
        return data
    except UserError:
        raise
    except OSError as error:
        raise no_access(error, path) from error
    except Exception as error:  # YAML's parser and OmegaConf raise different ones
        raise UserError(f"{path} is not valid YAML: {error}") from error


def _num_values(node: Any) -> int:
    """The values of a YAML tree, those counted several times that several aliases repeat.

    Ten lines of YAML can stand for a billion values.
    """
    counts: dict[int, int] = {}

    def visit(node: Any, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise ValueError("it is nested too deeply, or in itself")
        if node is None or not isinstance(node.value, list):
            return 1
        if id(node) not in counts:
            pairs = [part for item in node.value for part in _parts(item)]
            counts[id(node)] = 1 + sum(visit(part, depth + 1) for part in pairs)
        return counts[id(node)]

    return visit(node, 0)


def _parts(item: Any) -> tuple[Any, ...]:
    return item if isinstance(item, tuple) else (item,)


def require_plain(data: Any, where: str | Path) -> None:
    """Refuses a config that holds ``${`` in a text, or a number that is none or too large.

    OmegaConf would replace it by the value of an environment variable, among others. A config may
    come from elsewhere, and may be sent or published: so it must not reach for such values.

    Args:
        data: mappings, lists and values.
        where: they come from, for the message.

    Raises:
        UserError: there is such a text or number, or the data are nested too deeply.
    """

    def visit(value: Any, depth: int, key: object = "") -> None:
        if depth > MAX_DEPTH:
            raise UserError(f"{where} is malformed: it is nested too deeply.")
        if isinstance(value, str) and "${" in value:
            start = value.index("${")
            raise UserError(
                f"{where} holds {value[start : start + 60]!r}. A config is plain text, in which "
                "nothing is replaced: write the value itself. On the command line the shell can "
                "fill in a variable: key=$NAME."
            )
        if isinstance(value, int | float) and (
            value != value or (isinstance(value, int) and abs(value) >= 2**63)
        ):
            number = "nan" if value != value else "beyond 64 bits"
            raise UserError(f"{where}: {key} is {number}; give a number of at most 64 bits.")
        if isinstance(value, Mapping):
            for key, inner in value.items():
                visit(key, depth + 1)
                visit(inner, depth + 1, key)
        elif isinstance(value, list | tuple):
            for inner in value:
                visit(inner, depth + 1, key)

    visit(data, 0)


def inside(folder: Path, name: str, *, links: bool = False) -> Path:
    """The path of a file in a folder, whose name comes from a file.

    Args:
        folder: must hold the file.
        name: relative to it.
        links: accept a link that leads out of the folder, as in the cache of the Hugging Face hub.

    Raises:
        UserError: it lies outside of the folder: by ``..``, by a link, or because it is absolute.
    """
    try:
        if len(os.fsencode(name)) > 255:
            raise ValueError("it is too long")
        path = Path(os.path.abspath(folder / name))
        if path.is_relative_to(os.path.abspath(folder)) and (
            links or path.resolve().is_relative_to(folder.resolve())
        ):
            return path
    except (OSError, ValueError) as error:  # a null byte, or a name that is too long
        raise UserError(f"{folder} names {name[:60]!r}, which is no file ({error}).") from error
    raise UserError(f"{folder} names {name[:60]!r}, which lies outside of it.")


def first_line(error: BaseException) -> str:
    """The kind of an exception and the start of its text, for a message."""
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
