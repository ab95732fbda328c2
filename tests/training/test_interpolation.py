"""Nothing that comes from elsewhere, and nothing that is saved, reaches for environment variables."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import embodyrl
from embodyrl.build import load_config
from embodyrl.config import compose, env_from_dict, resolve, to_dict
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.errors import UserError
from embodyrl.real_robot.robot_file import read_sections
from embodyrl.report.read import read_run
from embodyrl.storage import checkpoint
from embodyrl.storage.preset_files import apply_overrides, read_preset
from embodyrl.training.hub import push
from embodyrl.training.resume_check import check_folder

SECTIONS = {
    "env": {"name": "mujoco", "task": "reach"},
    "policy": {"name": "flow_vla"},
    "algorithm": {"name": "ppo"},
}
SECRET = "hf_the_secret_of_this_computer"
TEXTS = ("${oc.env:ROBOT_TOKEN}", "a ${oc.env:ROBOT_TOKEN} b", "${run.name}", "${oc.decode:1}")
REFUSED = r"\$\{.*plain text, in which nothing is replaced"


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("ROBOT_TOKEN", SECRET)


def places(text: str) -> list[dict]:
    """The config with a text in every kind of place."""
    return [
        SECTIONS | {"run": {"name": text}},
        SECTIONS | {"run": {"loggers": [text]}},
        SECTIONS | {"env": {"name": text}},
        SECTIONS | {"env": {**SECTIONS["env"], "cameras": [text]}},
        SECTIONS | {text: {"name": "x"}},
        SECTIONS | {"run": {text: 1}},
        SECTIONS | {"run": text},
        SECTIONS | {"run": {"init_checkpoint": text}},
    ]


def refused(call, *args) -> None:
    with pytest.raises(UserError, match=REFUSED) as caught:
        call(*args)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("text", TEXTS)
def test_a_config_that_was_sent_or_saved_is_not_interpolated(text, tmp_path):
    for number, sections in enumerate(places(text)):
        refused(resolve, sections)  # what a learner sends to the robot's computer
        path = tmp_path / f"step_{number:06d}"
        meta = {"config": sections, "spec": {}, "position": {}}
        meta["position"] = {"iteration": 1, "env_steps": 1, "minutes": 0.0}
        if isinstance(sections.get("run", {}), dict):
            checkpoint.save(path, {"policy": {}}, meta)
            refused(load_config, str(path))
            refused(push, str(path), "me/x")


@pytest.mark.parametrize("text", TEXTS)
def test_neither_a_file_nor_an_override_nor_the_env_of_a_world_model_is_interpolated(
    text, tmp_path
):
    file = tmp_path / "config.yaml"
    for sections in places(text):
        file.write_text(json.dumps(sections))  # YAML reads JSON
        refused(read_preset, str(file))
        refused(compose, str(file))
        refused(check_folder, tmp_path, resolve(SECTIONS))
        refused(read_run, tmp_path)
        refused(read_sections, str(file), list(sections), "")
    file.write_text(json.dumps({"base": [text]}))
    refused(compose, str(file))
    refused(apply_overrides, {}, [f"run.name={text}"])
    refused(resolve, SECTIONS, [f"run.name={text}"])
    refused(env_from_dict, {"name": "mujoco", "task": text})
    refused(env_from_dict, {"name": text})


def test_an_ordinary_dollar_is_a_text(tmp_path):
    config = resolve(SECTIONS, ["run.name=$5 {a}"])
    assert config.run.name == "$5 {a}"
    assert resolve(to_dict(config)) == config


def test_few_files_know_omegaconf_and_only_one_knows_yaml():
    root = Path(embodyrl.__file__).parent
    using = {
        name: {
            str(path.relative_to(root))
            for path in root.rglob("*.py")
            if re.search(rf"^\s*(from|import) {name}\b", path.read_text(), re.MULTILINE)
        }
        for name in ("omegaconf", "yaml")
    }
    assert using == {
        "omegaconf": {
            "config.py",
            "storage/config_section.py",
            "storage/plain_data.py",
            "storage/preset_files.py",
        },
        "yaml": {"storage/plain_data.py"},
    }
    for name in using["omegaconf"]:
        text = (root / name).read_text()
        assert "resolve=True" not in text and "OmegaConf.load" not in text
        assert "OmegaConf.resolve" not in text


def test_few_lines_of_yaml_that_stand_for_a_billion_values_are_refused(tmp_path):
    lines = ["a: &a [x, x, x, x, x, x, x, x, x, x]"]
    for old, new in zip("abcdefgh", "bcdefghi", strict=True):
        lines.append(f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]")
    file = tmp_path / "config.yaml"
    file.write_text("\n".join(lines))
    with pytest.raises(UserError, match="too large for a config"):
        read_preset(str(file))
    file.write_text("a: &a [*a]")
    with pytest.raises(UserError, match="nested too deeply"):
        read_preset(str(file))


def test_a_data_set_cannot_name_a_file_elsewhere(tmp_path):
    from embodyrl.data.lerobot_read import DatasetFiles, file_of

    for template in ("/etc/{video_key}", "../{video_key}.mp4", "{video_key.__class__}",
                     "{chunk_index:9999999999}", "x\0{video_key}", None, "{other}"):  # fmt: skip
        data = DatasetFiles(tmp_path, {"video_path": template}, {}, {}, [], {}, [], [], np.zeros(0))
        with pytest.raises(UserError):
            file_of(data, "video_path", video_key="front", chunk_index=0)
    info = {"video_path": "v/{video_key}/{chunk_index:03d}.mp4"}
    data = DatasetFiles(tmp_path, info, {}, {}, [], {}, [], [], np.zeros(0))
    assert file_of(data, "video_path", video_key="a", chunk_index=2) == tmp_path / "v/a/002.mp4"
    (tmp_path / "meta").mkdir()
    (tmp_path / "meta" / "info.json").write_text("[1]")
    with pytest.raises(UserError, match="malformed"):
        open_dataset(tmp_path)
