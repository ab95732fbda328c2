"""Maps names to classes, which are imported only when they are used.

Another package adds its own names by entry points in the groups ``embodyrl.envs``,
``embodyrl.policies``, ``embodyrl.algorithms`` and ``embodyrl.presets``.

Every registered class has a frozen config dataclass as its attribute ``Config``, and is built as

    envs          cls(config)
    policies      cls(config, spec)
    algorithms    cls(config, policy)

An ``EnvFactory`` stands in for an env's class where the config decides which class it is.

An env's package may have a module ``tasks`` beside the module of the env, with a function
``list_tasks()`` (see ``TaskInfo``) and a dict ``SPLITS``. ``embodyrl list`` shows both, so the
module must be cheap to import.
"""

from __future__ import annotations

import functools
import importlib
import importlib.resources
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from embodyrl.errors import MissingDependencyError, UserError, did_you_mean


@dataclass(frozen=True)
class TaskInfo:
    """One task, as ``list_tasks()`` returns it; any object with these attributes will do.

    Attributes:
        name: of the task.
        instruction: what the policy is told.
        select: the overrides that choose it, e.g. ``"env.task=pick"``.
        group: the heading under which it is listed, e.g. its suite.
        missing: names of the assets that this machine lacks; empty if the task can run.
        mend: the command that gets them.
    """

    name: str
    instruction: str
    select: str
    group: str = ""
    missing: tuple[str, ...] = ()
    mend: str = ""


@dataclass(frozen=True)
class EnvFactory:
    """A registered env whose class depends on its config, for example on the backend.

    Like a class, it has the attribute ``Config`` and is called with a config.

    Attributes:
        Config: the env's frozen config dataclass.
        make: builds the env from a config.
    """

    Config: type
    make: Callable[[Any], Any]

    def __call__(self, config: Any) -> Any:
        """The env that the config describes."""
        return self.make(config)


PRESETS = "embodyrl.presets"
"""Group of the entry points that name a package of YAML files."""

BUILT_IN: dict[str, dict[str, str]] = {
    "envs": {
        "mujoco": "embodyrl.sims.mujoco.env:MujocoEnv",
        "maniskill": "embodyrl.sims.maniskill.env:MANISKILL",
        "libero": "embodyrl.sims.libero.env:LIBERO",
        "robot": "embodyrl.real_robot.env.robot_env:RobotEnv",
        "ogbench": "embodyrl.sims.ogbench.env:OGBENCH",
        "metaworld": "embodyrl.sims.metaworld.env:METAWORLD",
        "gymnasium": "embodyrl.sims.gymnasium.env:GYMNASIUM",
        "world_model": "embodyrl.world_models.make_env:WORLD_MODEL",
    },
    "policies": {
        "flow_vla": "embodyrl.policies.flow_vla:FlowVLA",
        "flow_mlp": "embodyrl.policies.flow_mlp:FlowMLP",
        "smolvla": "embodyrl.policies.vla.policy:SmolVLA",
        "pi0": "embodyrl.policies.vla.policy:Pi0",
        "pi05": "embodyrl.policies.vla.policy:Pi05",
        "pi0_fast": "embodyrl.policies.vla.pi0_fast:Pi0Fast",
        "openvla": "embodyrl.policies.vla.openvla:OpenVLA",
        "openvla_oft": "embodyrl.policies.vla.openvla_oft:OpenVLAOFT",
        "act": "embodyrl.policies.vla.act:ACT",
        "diffusion": "embodyrl.policies.vla.diffusion:DiffusionPolicy",
        "token_vla": "embodyrl.policies.vla.tokens:TokenVLA",
        "small_token_vla": "embodyrl.policies.small_token_vla:SmallTokenVLA",
    },
    "algorithms": {
        "sft": "embodyrl.algorithms.sft:SFT",
        "distill": "embodyrl.algorithms.distill:Distill",
        "ppo": "embodyrl.algorithms.ppo:PPO",
        "fpo": "embodyrl.algorithms.fpo:FPO",
        "grpo": "embodyrl.algorithms.grpo:GRPO",
        "nft": "embodyrl.algorithms.nft:NFT",
        "sac_flow": "embodyrl.algorithms.sac_flow:SACFlow",
        "rlpd": "embodyrl.algorithms.rlpd:RLPD",
        "wsrl": "embodyrl.algorithms.wsrl:WSRL",
        "pa_rl": "embodyrl.algorithms.pa_rl:PARL",
        "pa_rl_offline": "embodyrl.algorithms.pa_rl_offline:PARLOffline",
        "dsrl": "embodyrl.algorithms.dsrl:DSRL",
        "fql": "embodyrl.algorithms.fql:FQL",
    },
}


def names(kind: str) -> dict[str, str]:
    """Registered name -> ``"module:attribute"`` for ``"envs"``, ``"policies"`` or ``"algorithms"``."""
    found = dict(BUILT_IN[kind])
    for point in _entry_points(f"embodyrl.{kind}"):
        if found.setdefault(point.name, point.value) != point.value:
            warnings.warn(
                f"The entry point {point.name} = {point.value!r} of embodyrl.{kind} is not used: "
                f"{found[point.name]} has that name. Give it another one.",
                stacklevel=2,
            )
    return found


def load(kind: str, name: str) -> Any:
    """The class, or the ``EnvFactory``, registered under ``name``.

    Raises:
        UserError: no such name; the message gives the nearest ones.
    """
    known = names(kind)
    if name not in known:
        singular = {"envs": "env", "policies": "policy", "algorithms": "algorithm"}[kind]
        raise UserError(f"There is no {singular} {name!r}. {did_you_mean(name, known)}")
    module, _, attribute = known[name].partition(":")
    if name in BUILT_IN[kind]:
        return getattr(_own_module(module), attribute)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"The entry point {name} = {known[name]!r} of the group embodyrl.{kind} cannot be "
            f"imported ({error}). Correct it in the pyproject.toml of its package, and install the "
            "package again."
        ) from error


def judged(env: Any, config: Any) -> Any:
    """The env with the reward of ``config.reflector``; imported only where one is named."""
    return _own_module("embodyrl.world_models.judged_env").JudgedEnv(env, config)


def _own_module(module: str) -> Any:
    """A module of this package.

    Raises:
        MissingDependencyError: MuJoCo was told to draw with a driver that is not here.
    """
    try:
        return importlib.import_module(module)
    except (AttributeError, ImportError) as error:
        driver = os.environ.get("MUJOCO_GL", "")
        if "OpenGL" not in Path(traceback.extract_tb(error.__traceback__)[-1].filename).parts:
            raise
        raise MissingDependencyError(
            f"MUJOCO_GL is {driver!r}, and MuJoCo does not find that driver here. Unset MUJOCO_GL "
            "if nothing is drawn with OpenGL; or install EGL (Debian, Ubuntu: apt-get install "
            "libegl1 libgl1-mesa-dri) and set MUJOCO_GL=egl."
        ) from error


def preset_names(kind: str = "") -> dict[str, Path]:
    """Preset name -> file, of this package and of others.

    An entry point of another package in the group ``embodyrl.presets`` names the package that
    holds its YAML files. It cannot replace built-in names.

    Args:
        kind: the subfolder: ``""`` for presets of runs, ``"loops"`` for loops of policy and world
            model, ``"base"`` for blocks that presets share.
    """
    packages = ["embodyrl.configs", *(point.value for point in _entry_points(PRESETS))]
    found: dict[str, Path] = {}
    for package in packages:
        for path in sorted((_package_folder(package) / kind).glob("*.yaml")):
            found.setdefault(path.stem, path)
    return found


def _entry_points(group: str) -> EntryPoints:
    return _entry_points_on(tuple(sys.path)).select(group=group)


@functools.cache  # it reads the metadata of every installed package
def _entry_points_on(_path: tuple[str, ...]) -> EntryPoints:
    return entry_points()


def _package_folder(package: str) -> Path:
    """The folder of a package, which may be one without Python files."""
    root, _, inner = package.partition(".")
    return Path(str(importlib.resources.files(root))) / inner.replace(".", "/")


def tasks_module(env: str) -> ModuleType | None:
    """The module ``tasks`` beside the module of an env; None if there is none."""
    package = names("envs")[env].partition(":")[0].rpartition(".")[0]
    if not package or importlib.util.find_spec(f"{package}.tasks") is None:
        return None
    return importlib.import_module(f"{package}.tasks")
