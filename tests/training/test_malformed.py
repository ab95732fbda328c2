"""Checkpoints and runs whose hashes are right and whose content is not: words, no tracebacks."""

import json
import os
from pathlib import Path

import pytest
import torch

from benchmarks.faults.files import campaign, sign, tiny_run
from embodyrl.errors import UserError
from embodyrl.policies.vla.pipeline_files import read_pipeline
from embodyrl.storage import checkpoint
from embodyrl.storage.plain_data import COUNT, NUMBER, TEXT, inside, mismatch, read_json
from embodyrl.storage.run_files import read_evaluations


def test_every_reader_of_a_changed_run_succeeds_or_refuses_it_in_words(tmp_path):
    found = campaign(tiny_run(tmp_path), tries=70, seed=0)
    assert found["failures"] == []
    assert found["tries"] == 70 and found["refused"] > 10 and found["read"] > 10


@pytest.fixture
def saved(tmp_path) -> Path:
    return checkpoint.save(tmp_path / "step_000001", {"policy": {"w": torch.zeros(2)}}, {"a": 1})


def test_a_state_cannot_name_a_file_elsewhere(saved, tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.ones(2)}, tmp_path / "other.safetensors")
    for name in ("../other", str(tmp_path / "other"), "", "a/b", "state", "x" * 300, "\0"):
        (saved / "state.json").write_text(json.dumps({name: {"dict": [["w", {"tensor": "w"}]]}}))
        sign(saved)
        with pytest.raises(checkpoint.DamagedCheckpointError, match="cannot be named"):
            checkpoint.load(saved)


def test_a_link_or_a_pipe_is_no_file_of_a_checkpoint(saved, tmp_path):
    (tmp_path / "elsewhere").write_text("{}")
    (saved / "more.json").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"more\.json is no file of this"):
        checkpoint.load(saved)
    (saved / "more.json").unlink()
    os.mkfifo(saved / "more.json")
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"more\.json is no file of this"):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    "name", ["../a", "/etc/passwd", "videos/../../a", "out/a", "\0", "x" * 5000, "link"]
)
def test_a_name_in_a_file_never_leads_out_of_its_folder(name, tmp_path):
    folder = tmp_path / "run"
    (folder / "evals").mkdir(parents=True)
    (folder / "out").symlink_to(tmp_path)
    (folder / "link").symlink_to("/etc/passwd")
    row = {"init": 0, "task": "x", "success": True, "length": 1, "return": 0.0, "video": name}
    page = {"iteration": 1, "env_steps": 1, "minutes": 0.0, "episodes": [row]}
    (folder / "evals" / "after.json").write_text(json.dumps(page))
    with pytest.raises(UserError):
        inside(folder, name)
    with pytest.raises(UserError):
        read_evaluations(folder)


def test_the_first_difference_is_named():
    structure = {"a": COUNT, "b?": [TEXT], "c?": {...: (NUMBER, None)}}
    assert mismatch({"a": 1, "b": ["x"], "c": {"d": None, "e": 2.0}, "more": 0}, structure) is None
    for data, words in (
        ([], "the content must be a mapping"),
        ({}, "the content has no 'a'"),
        ({"a": True}, "a must be a whole number, 0 or more"),
        ({"a": 10**400}, "a must be a whole number, 0 or more"),
        ({"a": 1, "b": ["x", 2]}, "b[1] must be a text"),
        ({"a": 1, "c": {"d": float("nan")}}, "c.d must be a finite number or c.d must be null"),
        ({"a": 1, "c": {"d": 10**400}}, "c.d must be a finite number or c.d must be null"),
    ):
        assert mismatch(data, structure) == words


def test_json_that_is_nested_without_end_is_damaged(tmp_path):
    for text in ("[" * 100_000, "9" * 10_000, "\xff", "{"):
        (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(UserError, match=r"a\.json is damaged .*Copy it again"):
            read_json(tmp_path / "a.json", {}, "Copy it again.")


def test_a_pipeline_cannot_choose_python_code_or_a_file_elsewhere(tmp_path):
    file = tmp_path / "policy_preprocessor.json"
    good = {"registry_name": "normalizer_processor", "state_file": "a.safetensors", "config": {}}
    file.write_text(json.dumps({"name": "x", "steps": [good]}))
    assert read_pipeline(tmp_path, "policy_preprocessor")["steps"] == [good]
    for bad in (
        {"class": "subprocess.Popen", "config": {"args": ["true"]}},
        good | {"class": "subprocess.Popen"},
        good | {"state_file": "../a.safetensors"},
        good | {"state_file": "/a.safetensors"},
        {"config": {}},
        [],
    ):
        file.write_text(json.dumps({"name": "x", "steps": [good, bad]}))
        with pytest.raises(UserError, match=r"registry|elsewhere|malformed"):
            read_pipeline(tmp_path, "policy_preprocessor")
