"""Reads presets: YAML files that name others as their ``base``, with overrides on top."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from embodyrl.errors import UserError, did_you_mean
from embodyrl.registry import preset_names
from embodyrl.storage.config_section import plain
from embodyrl.storage.paths import expand_home
from embodyrl.storage.plain_data import read_yaml, require_plain

SECTIONS = {"env": "envs", "policy": "policies", "algorithm": "algorithms"}
"""Sections whose ``name`` is a registered one -> its kind in the registry."""


def read_preset(preset: str) -> DictConfig:
    """The preset's YAML on top of the presets that its key ``base`` names; not yet checked.

    Raises:
        UserError: no such preset, no valid YAML, or presets that are based on one another.
    """
    return _read_with_bases(preset, ())


def _read_with_bases(preset: str, based_on_it: tuple[str, ...]) -> DictConfig:
    """``read_preset`` of a preset on which the presets ``based_on_it`` are based."""
    known = preset_names() | preset_names("base")
    path = known.get(preset, Path(expand_home(preset)))
    if preset in based_on_it:
        circle = " -> ".join((*based_on_it, preset))
        raise UserError(f"Presets are based on one another: {circle}.")
    if not path.is_file():
        where = f"base of {based_on_it[-1]}, " if based_on_it else ""
        raise UserError(
            f"There is no preset {preset!r}, {where}nor a file of that name. "
            f"{did_you_mean(preset, known)}"
        )
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise UserError(
            f"{path} must hold sections ({', '.join((*SECTIONS, 'run', 'data'))}), not a list or a "
            "text."
        )
    # The bases in their order, then the preset itself.
    bases = raw.pop("base", [])
    merged = cast(DictConfig, OmegaConf.create({}))
    if not isinstance(bases, str | list):
        raise UserError(f"{path}: base must be the name of a preset, or a list of names.")
    for base in [bases] if isinstance(bases, str) else bases:
        merged = _merge_presets(merged, _read_with_bases(str(base), (*based_on_it, preset)))
    return _merge_presets(merged, OmegaConf.create(raw))


def _merge_presets(lower: DictConfig, upper: DictConfig) -> DictConfig:
    """Two presets as one, in which the keys of ``upper`` win.

    If both name a different class in a section, the keys of ``lower`` there are dropped.
    """
    kept = dict(lower)
    for section in SECTIONS:
        upper_section = upper.get(section)
        lower_section = lower.get(section)
        if not isinstance(upper_section, DictConfig) or not isinstance(lower_section, DictConfig):
            continue
        upper_name = upper_section.get("name")
        if upper_name is not None and lower_section.get("name", upper_name) != upper_name:
            del kept[section]
    return cast(DictConfig, OmegaConf.merge(OmegaConf.create(kept), upper))


def apply_overrides(raw: DictConfig | dict[str, Any], overrides: Sequence[str]) -> DictConfig:
    """A mapping of sections with ``key.sub=value`` overrides on top.

    Raises:
        UserError: an override is not of this form.
    """
    require_plain(plain(raw), "The config")
    require_plain(list(overrides), "An override")
    items = []
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign:
            raise UserError(
                f"{item!r} is not an override: write key.sub=value, for example run.seed=1."
            )
        try:
            value = OmegaConf.select(OmegaConf.from_dotlist([item]), key)
        except Exception as error:  # YAML's parser and OmegaConf raise different ones
            raise UserError(
                f"The override {item!r} cannot be read: {str(error).splitlines()[0]}."
            ) from error
        # Three kinds of values are quoted, so that YAML reads them as text:
        # - an empty one. A shell makes "key=" of key='', and YAML would read null.
        # - a name like 0_20, which YAML would read as the number 16. If the key is a number, the
        #   text is converted later.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # - the home folder alone, which YAML would read as null.
        quote = text in ("", "~") or (is_number and str(value) != text)
        items.append(f"{key}='{text}'" if quote else item)
    return cast(DictConfig, OmegaConf.merge(raw, OmegaConf.from_dotlist(items)))
