"""``embodyrl config``: every key with its meaning, range and default."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl.cli.config_keys import as_override, config_classes, find_keys, keys_of
from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.errors import UserError
from embodyrl.storage.config_section import build_section
from embodyrl.storage.preset_files import apply_overrides

ROOT = Path(__file__).parents[2]


def test_every_key_has_a_meaning_and_a_default_that_is_read_back() -> None:
    for section, name, cls in config_classes():
        keys = keys_of(section, name, cls)
        assert keys
        for key in keys:
            assert key.meaning, f"{key.key} ({key.of}): say what it means in the docstring"
        given = apply_overrides({}, [f"{key.key}={key.default}" for key in keys])
        named = {"name": name} if name else {}
        assert build_section(section, cls, {**given[section], **named}) == cls(**named)


def test_one_key_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "run.patience"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("run.patience: whole number, at least 0; default 0\n  End the run after")
    assert main(["config", "algorithm.utd", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["of"]: row["default"] for row in rows}["rlpd"] == "4.0"


def test_a_section_and_all_keys() -> None:
    assert {key.key for key in find_keys("algorithm.grpo")} >= {"algorithm.group_size"}
    assert {key.of for key in find_keys("policy")} >= {"flow_vla", "pi05"}
    assert len(find_keys("")) > 300


def test_a_preset_says_where_it_differs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "mujoco_pick_ppo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "env.num_envs=64   (default 8)" in lines and "run.seed=0" in lines
    # The lines are overrides that give the same config.
    config = compose("mujoco_pick_ppo")
    given = [line.partition("   (")[0] for line in lines]
    assert compose("mujoco_pick_grpo", given) == config
    assert len(lines) == sum(len(dataclasses.fields(part)) for part in vars(config).values())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("run.patiense", "Did you mean 'run.patience'"),
        ("group_size", "Did you mean 'algorithm.group_size'"),
        ("mujoco_pick_pp", "'mujoco_pick_ppo'"),
    ],
)
def test_a_mistake_is_told_the_nearest(what: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find_keys(what)


def test_values_as_overrides() -> None:
    assert as_override(("a", 1, None, True)) == "[a,1,null,true]"
    assert as_override("") == "''" and as_override({"a": "b"}) == "{a: b}"


def test_the_page_of_all_keys_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/config_table.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
