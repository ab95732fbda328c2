"""One section of a config: a mapping that becomes a frozen dataclass, checked."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import check_values, join_names
from embodyrl.storage.paths import expand_home
from embodyrl.storage.plain_data import require_plain


def build_section[T](section: str, cls: type[T], given: DictConfig | dict[str, Any]) -> T:
    """One frozen dataclass from a mapping.

    Args:
        section: its name, for messages.
        cls: the dataclass.
        given: its keys and values; missing ones take their defaults.

    Raises:
        UserError: a key that ``cls`` does not have, or a value of the wrong type or out of its range.
    """
    require_plain(plain(given), f"The section {section!r}")
    given = join_names(cls, cast(dict[str, Any], plain(given)))
    # OmegaConf checks keys and types. Its errors become sentences that name the key.
    try:
        merged = OmegaConf.merge(OmegaConf.structured(cls), given)
        values = cast(
            dict[str, Any], OmegaConf.to_container(merged, resolve=False, throw_on_missing=True)
        )
    except ConfigKeyError as error:
        key = str(error.key)
        valid = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        raise UserError(
            f"{section} has no key {key!r} ({cls.__name__}). {did_you_mean(key, valid)}"
        ) from error
    except OmegaConfBaseException as error:
        problem = re.sub(r"\s+", " ", str(error).split("\n")[0])
        key = error.full_key or _find_wrong_key(cls, given)
        where = f"{section}.{key}" if key else section
        raw = OmegaConf.to_container(OmegaConf.create(cast(Any, given)), resolve=False)
        value = cast(dict[str, Any], raw).get(key)
        if "is not a TupleConfig" in problem or "is not a ListConfig" in problem:
            problem = f"it takes a list, not {value!r}: write {where}=[{value}]"
        # OmegaConf leaves this placeholder unfilled.
        problem = problem.replace("Value '$VALUE' of type '$VALUE_TYPE'", f"one of {value}")
        raise UserError(f"{where} is wrong: {problem.rstrip('.')}.") from error
    check_values(section, cls, values)
    return cls(**{key: _freeze(expand_home(value)) for key, value in values.items()})


def plain(given: DictConfig | dict[str, Any]) -> Any:
    """Plain data as they were given: nothing is interpolated."""
    is_config = isinstance(given, DictConfig)
    return OmegaConf.to_container(given, resolve=False) if is_config else given


def _find_wrong_key(cls: type, given: DictConfig | dict[str, Any]) -> str:
    """The first key that is refused if it is given alone; "" if there is none.

    OmegaConf does not name the key if an element of a tuple is wrong.
    """
    for key in map(str, given):
        try:
            OmegaConf.merge(OmegaConf.structured(cls), {key: given[key]})
        except OmegaConfBaseException:
            return key
    return ""


def _freeze(value: Any) -> Any:
    """Lists as tuples, also inside one another."""
    if isinstance(value, list | tuple):
        return tuple(_freeze(v) for v in value)
    return value
