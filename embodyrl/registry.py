"""Names to classes, imported only when asked for.

A third party adds its own by an entry point in the groups ``embodyrl.envs``, ``embodyrl.policies`` and
``embodyrl.algorithms``; nothing here needs to change. Every registered class has a frozen config dataclass as its
attribute ``Config`` and is built as ``cls(config)`` (envs), ``cls(config, spec)`` (policies) or
``cls(config, policy)`` (algorithms).
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from embodyrl.errors import UserError, did_you_mean

BUILT_IN: dict[str, dict[str, str]] = {
    "envs": {
        "mujoco": "embodyrl.sims.mujoco.env:MujocoEnv",
        "maniskill": "embodyrl.sims.maniskill.env:ManiSkillEnv",
        "libero": "embodyrl.sims.libero.env:LiberoEnv",
    },
    "policies": {"flow_vla": "embodyrl.policies.flow_vla:FlowVLA"},
    "algorithms": {
        "sft": "embodyrl.algorithms.sft:SFT",
        "ppo": "embodyrl.algorithms.ppo:PPO",
    },
}


def names(kind: str) -> dict[str, str]:
    """Registered name -> ``"module:Class"`` for ``"envs"``, ``"policies"`` or ``"algorithms"``."""
    found = dict(BUILT_IN[kind])
    for point in entry_points(group=f"embodyrl.{kind}"):
        found.setdefault(point.name, point.value)
    return found


def load(kind: str, name: str) -> Any:
    """The class registered under ``name``.

    Raises:
        UserError: no such name; the message gives the nearest ones.
    """
    known = names(kind)
    if name not in known:
        raise UserError(
            f"There is no {kind[:-1] if kind != 'policies' else 'policy'} {name!r}. {did_you_mean(name, known)}"
        )
    module, _, attribute = known[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
