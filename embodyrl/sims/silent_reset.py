"""``was_reset_silently``: MuJoCo finds NaN or infinity, and begins anew without a word."""

from __future__ import annotations

from typing import Any

import mujoco

_mujoco: Any = mujoco  # its type stubs lack the warnings
_RESETS = (
    _mujoco.mjtWarning.mjWARN_BADQPOS,
    _mujoco.mjtWarning.mjWARN_BADQVEL,
    _mujoco.mjtWarning.mjWARN_BADQACC,
)


def was_reset_silently(data: Any) -> bool:
    """Whether MuJoCo has reset this ``MjData`` by itself; False of anything else."""
    warning = getattr(data, "warning", None)
    return warning is not None and any(warning[kind].number for kind in _RESETS)
