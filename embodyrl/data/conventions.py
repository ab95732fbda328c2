"""What is known of the meaning of a data set, and how a user says it: ``data.convention``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from embodyrl.data.lerobot_read import DatasetFiles
from embodyrl.storage.env_spec import conventions_from_json
from embodyrl.types import Conventions


def conventions_of(
    data: DatasetFiles, profile: Conventions, given: Mapping[str, Any]
) -> Conventions:
    """What is known of the meaning of a data set.

    Args:
        data: opened. What it says about itself comes last.
        profile: of its family, which comes before that.
        given: fields that the user gives (``data.convention``), which come first.

    Raises:
        UserError: the user gives a field that does not exist, or a value that cannot be.
    """
    own = data.origin.get("spec", {}).get("conventions", {})
    found = conventions_from_json(own, f"The conventions in {data.path}/meta/embodyrl.json")
    said = conventions_from_json(given, "data.convention")
    for upper in (profile, said):
        known = {f.name: value for f in fields(upper) if (value := getattr(upper, f.name))}
        found = replace(found, **known)
    return found


def convention_override(fix: Mapping[str, Any]) -> str:
    """``data.convention={...}`` as a user writes it."""
    parts = []
    for name, value in fix.items():
        values = value if isinstance(value, tuple) else (value,)
        words = [v if isinstance(v, str) else f"{v:.6g}" for v in values]
        text = ",".join(words)
        parts.append(f"{name}: [{text}]" if isinstance(value, tuple) else f"{name}: {text}")
    return f"data.convention={{{', '.join(parts)}}}"
