"""Names to classes: the built-in ones, those of other packages, and names that do not exist."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl import registry
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, did_you_mean

ROOT = Path(__file__).parents[1]
ALL = [(kind, name) for kind, entries in registry.BUILT_IN.items() for name in entries]


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_every_built_in_name_is_a_class_with_a_frozen_config(kind: str, name: str) -> None:
    config = registry.load(kind, name).Config
    assert dataclasses.is_dataclass(config)
    assert config().name == name, "a config's default name is the one that it is registered under"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().name = "other"  # type: ignore[misc]
    if kind == "envs":
        assert issubclass(config, EnvConfig)


def test_every_config_key_is_documented() -> None:
    for kind, name in ALL:
        config = registry.load(kind, name).Config
        text = " ".join((base.__doc__ or "") for base in config.__mro__)
        missing = [
            f.name
            for f in dataclasses.fields(config)
            if f"{f.name}:" not in text and f.name != "name"
        ]
        assert not missing, f"{config.__name__} says nothing about {missing}"


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [
        ("envs", "mujco", "There is no env 'mujco'. Did you mean 'mujoco'?"),
        (
            "policies",
            "flowvla",
            "There is no policy 'flowvla'. Did you mean 'flow_vla' or 'flow_mlp'?",
        ),
        ("algorithms", "ppoo", "There is no algorithm 'ppoo'. Did you mean 'ppo'?"),
    ],
)
def test_unknown_names(kind: str, name: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        registry.load(kind, name)
    assert str(error.value) == said


def test_did_you_mean_lists_names_where_none_is_near() -> None:
    assert did_you_mean("zzz", ["b", "a"]) == "Valid names: a, b."
    assert did_you_mean("front", []) == "There is none to name."
    assert did_you_mean("x", [f"{k:02}" for k in range(30)]).endswith("19, ....")
    assert did_you_mean("pick", ["picks", "pick_2", "reach"]) == "Did you mean 'picks' or 'pick_2'?"


def test_another_package_adds_its_own_env_and_tasks(tmp_path: Path) -> None:
    """An entry point is all it takes; built-in names cannot be taken over."""
    package = tmp_path / "balance"
    package.mkdir()
    (package / "__init__.py").write_text('"""A pole to balance."""\n')
    (package / "env.py").write_text(
        "from embodyrl.env import EnvConfig\nclass Balance:\n    Config = EnvConfig\n"
    )
    (package / "tasks.py").write_text(
        "from embodyrl.registry import TaskInfo\nSPLITS = {'train': 'all of it'}\n"
        "def list_tasks():\n    return [TaskInfo('up', 'keep the pole up', 'env.task=up')]\n"
    )
    info = tmp_path / "balance-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: balance\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[embodyrl.envs]\nbalance = balance.env:Balance\nmujoco = balance.env:Balance\ngone = "
        "not_here.env:Env\n"
    )
    code = (
        "import json; from embodyrl import registry; from embodyrl.cli.listing import "
        "listing\nfound = listing('envs')['envs'] + listing('tasks', 'balance')['tasks'] + "
        "listing('tasks', 'gone')['tasks']\nprint(json.dumps([found, registry.load('envs', "
        "'balance').__module__, registry.names('envs')['mujoco']]))"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    found, module, mujoco = json.loads(done.stdout)
    assert module == "balance.env" and mujoco.startswith("embodyrl.")
    env = next(row for row in found if row["name"] == "balance")
    assert (
        env["summary"] == "A pole to balance."
        and env["splits"] == {"train": "all of it"}
        and env["tasks"] == 1
    )
    task = next(row for row in found if row["name"] == "up")
    assert task["select"] == "env.task=up" and task["available"]
    gone = [row for row in found if "gone" in (row["name"], row.get("env"))]
    assert len(gone) == 2 and not any(row["available"] for row in gone)
    assert all("not_here" in row["mend"] for row in gone)
