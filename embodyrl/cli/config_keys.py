"""``embodyrl config``: what a key of a config means, what it may be, and its default.

All of it comes from the config dataclasses: types and ranges from their annotations, meanings from
their docstrings. ``docs/config_keys.md`` is made of the same rows (``scripts/config_table.py``).
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from embodyrl import registry
from embodyrl.config import DataConfig, RunConfig, compose, to_dict
from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import Several, field_types, rules
from embodyrl.storage.preset_files import SECTIONS

WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


@dataclass(frozen=True)
class Key:
    """A key of a config.

    Attributes:
        key: with its section, as an override says it.
        of: the section's ``name`` that it goes with, e.g. ``ppo``; empty where there is one kind.
        type: in words.
        range: what it may be, in words; empty for any value of the type.
        default: as an override says it.
        meaning: from the docstring of the config class.
    """

    key: str
    of: str
    type: str
    range: str
    default: str
    meaning: str


def config_classes() -> list[tuple[str, str, type]]:
    """Section, ``name`` (empty for the fixed sections) and config class of all that is registered."""
    from embodyrl.dreams.loop_config import LoopConfig
    from embodyrl.world_models.config import WorldTrainConfig

    named = [
        (section, name, registry.load(kind, name).Config)
        for section, kind in SECTIONS.items()
        for name in registry.names(kind)
    ]
    return [
        ("run", "", RunConfig),
        ("data", "", DataConfig),
        *named,
        ("world", "", WorldTrainConfig),
        ("loop", "", LoopConfig),
    ]


def keys_of(section: str, name: str, cls: type) -> list[Key]:
    """The keys of a config class."""
    prefix = f"{section}."
    meanings = field_meanings(cls)
    hints = field_types(cls)
    return [
        Key(
            prefix + field.name,
            name,
            type_words(hints[field.name]),
            "; ".join(dict.fromkeys(rule.words for rule in rules(hints[field.name]))),
            default_text(field),
            meanings.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
        if field.name != "name" or not name
    ]


def field_meanings(cls: type) -> dict[str, str]:
    """What the docstrings of a config class and of its bases say of each field."""
    found: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        found |= dict(_attributes(inspect.cleandoc(owner.__doc__ or "")))
    return found


def _attributes(doc: str) -> Iterator[tuple[str, str]]:
    """Name and text of each entry under ``Attributes:``."""
    block = re.search(r"^Attributes:\n((?:    .*\n?|\n)+)", doc + "\n", re.M)
    for entry in re.split(r"\n(?=    \w)", block[1].rstrip("\n")) if block else ():
        names, _, text = entry.strip().partition(":")
        for name in names.split(","):
            yield name.strip(), " ".join(text.split())


def type_words(hint: Any) -> str:
    """A type in words, without its range."""
    origin = get_origin(hint)
    if origin is Annotated:
        if Several() in get_args(hint):
            return "names separated by commas, or a list of them"
        return type_words(get_args(hint)[0])
    if origin in (Union, types.UnionType):
        parts = [type_words(a) for a in get_args(hint) if a is not type(None)]
        return " or ".join([*parts, "null"])
    if origin is tuple:
        inner = get_args(hint)
        if inner[1:] == (...,):
            return f"list of {type_words(inner[0])}s"
        return f"list of {len(inner)} {type_words(inner[0])}s"
    if origin is dict:
        return "names and values"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def default_text(field: dataclasses.Field[Any]) -> str:
    """The default of a field as an override says it."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    return "required" if value is dataclasses.MISSING else as_override(value)


def as_override(value: Any) -> str:
    """A value as an override says it; an empty text as two quotes."""
    if isinstance(value, tuple | list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k}: {as_override(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return "''" if value == "" else str(value)


def find_keys(what: str) -> list[Key]:
    """The keys that a name means: one key, in all kinds that have it; a section; or all for "".

    Raises:
        UserError: no such key; the message gives the nearest ones.
    """
    # A key, a section, or a section's one name, such as algorithm.ppo.
    every = [key for entry in config_classes() for key in keys_of(*entry)]
    section, _, rest = what.partition(".")
    found = [
        k
        for k in every
        if not what or k.key == what or (k.key.startswith(f"{section}.") and rest in ("", k.of))
    ]
    if found:
        return found
    # A mistake: the keys of that name in any section, or else the nearest names.
    names = {k.key for k in every} | {k.key.partition(".")[0] for k in every}
    same = sorted({k.key for k in every if k.key.partition(".")[2] == what})
    hint = f"Did you mean {' or '.join(map(repr, same))}?" if same else ""
    raise UserError(
        f"There is no key, section or preset {what!r}. "
        f"{hint or did_you_mean(what, names | registry.preset_names().keys())}"
    )


def explain(what: str, as_json: bool = False) -> str:
    """The text that ``embodyrl config WHAT`` prints."""
    preset = what in registry.preset_names() or Path(what).is_file()
    rows = preset_rows(what) if preset else [dataclasses.asdict(k) for k in find_keys(what)]
    if as_json:
        return json.dumps(rows)
    if preset:
        return "\n".join(map(_preset_line, rows))
    one = len({row["key"] for row in rows}) == 1
    return "\n\n".join(map(_explanation, rows)) if one else "\n".join(map(_line, rows))


def preset_rows(preset: str) -> list[dict[str, Any]]:
    """Every key of a preset: its value, and the default where it is another."""
    # Both the value and the default as an override would say them.
    config = compose(preset)
    rows = []
    for section, values in to_dict(config).items():
        fields = {f.name: default_text(f) for f in dataclasses.fields(getattr(config, section))}
        for key, value in values.items():
            text = as_override(value)
            default = fields[key]
            rows.append({"key": f"{section}.{key}", "value": text, "default": default})
    return rows


def _preset_line(row: dict[str, Any]) -> str:
    changed = f"   (default {row['default']})" if row["value"] != row["default"] else ""
    return f"{row['key']}={row['value']}{changed}"


def _line(row: dict[str, Any]) -> str:
    of = f" ({row['of']})" if row["of"] else ""
    range_ = f", {row['range']}" if row["range"] else ""
    return f"{row['key']}{of}: {row['type']}{range_}; default {row['default']}"


def _explanation(row: dict[str, Any]) -> str:
    meaning = row["meaning"].replace("``", "`")
    return f"{_line(row)}\n  {meaning[:1].upper()}{meaning[1:]}"
