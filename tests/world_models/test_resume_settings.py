"""A world model's training, and a loop, go on on another machine with moved data; nothing else may change."""

import dataclasses
import json
from pathlib import Path

import pytest

from embodyrl.dreams.loop_config import LoopConfig, claim_folder
from embodyrl.errors import UserError
from embodyrl.storage.config_section import build_section
from embodyrl.storage.inputs import contents_of
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.train import _check_folder


@pytest.fixture
def data(tmp_path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a").write_text("x")
    return tmp_path / "data"


def test_a_world_models_training_goes_on_with_moved_data(data, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    given = {"data": [str(data)], "out": str(folder), "threads": 4}
    config = build_section("world", WorldTrainConfig, given)
    (folder / "config.json").write_text(json.dumps(dataclasses.asdict(config)))
    (folder / "meta.json").write_text(json.dumps({"inputs": contents_of(config)}))
    _check_folder(folder, config)
    assert not capsys.readouterr().out
    moved = data.rename(tmp_path / "moved")
    config = dataclasses.replace(config, data=(str(moved),), threads=2)
    _check_folder(folder, config)
    said = capsys.readouterr().out
    assert "threads was 4, now 2" in said and f"now ['{moved}'], with the same content" in said
    with pytest.raises(UserError, match=r"\(lr was 0.003, now 0.5\).*init=\S*/run/model"):
        _check_folder(folder, dataclasses.replace(config, lr=0.5))


def test_a_loop_goes_on_with_moved_demonstrations(data, tmp_path, capsys):
    config = build_section("loop", LoopConfig, {"demos": str(data), "out": str(tmp_path)})
    claim_folder(tmp_path, config)
    claim_folder(tmp_path, config)
    assert not capsys.readouterr().out
    moved = data.rename(tmp_path / "moved")
    config = dataclasses.replace(config, demos=str(moved))
    claim_folder(tmp_path, config)
    assert f"now {moved}, with the same content" in capsys.readouterr().out
    (moved / "a").write_text("y")
    with pytest.raises(UserError, match=r"demos=.*/moved holds something else"):
        claim_folder(tmp_path, config)
