"""What may change when a run goes on: its machine and its place, not what changes its results."""

import json
import shutil
from pathlib import Path

import pytest

from embodyrl.config import Config, resolve, to_yaml
from embodyrl.errors import UserError
from embodyrl.storage.inputs import listed
from embodyrl.storage.paths import settings_of
from embodyrl.training.resume_check import check_folder, run_inputs

SECTIONS = {
    "env": {"name": "mujoco", "task": "reach", "renderer": "none"},
    "policy": {"name": "flow_vla"},
    "algorithm": {"name": "ppo"},
    "run": {"iterations": 6, "minutes": 10.0},
}


def config(*overrides: str) -> Config:
    return resolve(SECTIONS, overrides)


def test_a_logger_that_does_not_exist_is_refused_with_the_config():
    with pytest.raises(
        UserError, match=r"no logger 'wandbb' \(run.loggers\). Did you mean 'wandb'"
    ):
        config("run.loggers=[wandbb]")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(to_yaml(config("run.out=elsewhere", "run.name=old")))
    return tmp_path


@pytest.mark.parametrize(
    "override",
    [
        "run.iterations=9",
        "run.minutes=11.0",
        "run.minutes=0.0",
        "run.eval_every=1",
        "run.checkpoint_every=1",
        "run.keep_checkpoints=9",
        "run.loggers=[tensorboard]",
        "run.eval_episodes=9",
        "run.videos=0",
        "run.device=cuda:1",
        "run.threads=2",
        "run.workers=4",
        "env.num_envs=4",
        "env.num_threads=2",
        "env.device=cuda",
    ],
)
def test_a_run_goes_on_on_another_machine_and_says_what_changed(folder, override):
    said: list[str] = []
    check_folder(folder, config(override), said.append)
    key, _, value = override.partition("=")
    assert f"{key} was " in said[0]
    assert f", now {value.strip('[]')}" in said[0].replace("['tensorboard']", "tensorboard")
    assert len(said) == 1 + (key == "run.iterations")
    if key == "run.iterations":
        assert "goes on to 9 iterations instead of 6" in said[1] and "learning rate" in said[1]


def test_a_run_that_was_only_moved_says_nothing(folder):
    check_folder(folder, config("run.name=new", "run.out=~/runs"), pytest.fail)


def test_another_number_of_envs_says_what_becomes_of_an_iteration(folder):
    said: list[str] = []
    check_folder(folder, config("env.num_envs=4"), said.append)
    chunks = config().algorithm.num_chunks
    assert f"has {4 * chunks} chunks instead of {8 * chunks}" in said[0]
    assert f"algorithm.num_chunks={2 * chunks} keeps them" in said[0] and "begin anew" in said[0]
    # As many chunks as before may be played by fewer envs; no other number.
    check_folder(
        folder, config("env.num_envs=4", f"algorithm.num_chunks={2 * chunks}"), said.append
    )
    assert "instead of" not in said[1]
    with pytest.raises(UserError, match=r"algorithm.num_chunks was \d+, now 3"):
        check_folder(folder, config("env.num_envs=4", "algorithm.num_chunks=3"))


def test_a_setting_that_an_older_version_did_not_write_was_its_default(folder):
    path = folder / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "target_kl" not in line))
    check_folder(folder, config("run.seed=0"))
    with pytest.raises(UserError, match=r"algorithm.target_kl was \S+, now 0.5"):
        check_folder(folder, config("algorithm.target_kl=0.5"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.iterations=5", "run.iterations was 6, now 5"),
        ("run.minutes=9", "run.minutes was 10.0, now 9.0"),
        ("run.eval_split=train", "run.eval_split was eval, now train"),
        ("run.seed=1", "run.seed was 0, now 1"),
        ("algorithm.lr=0.01", r"algorithm.lr was \S+, now 0.01"),
        ("env.cameras=[]", r"env.cameras was \['front'\], now \[\]"),
        ("env.task=pick", "env.task was reach, now pick"),
        ("policy.width=64", r"policy.width was \d+, now 64"),
        ("data.path=elsewhere", "data.path was empty, now elsewhere"),
    ],
)
def test_what_changes_the_results_is_refused_with_the_way_on(folder, override, words):
    new_run = "start a new run, with another run.name"
    with pytest.raises(UserError, match=rf"another config \({words}\).*{new_run}.*made longer"):
        check_folder(folder, config(override), pytest.fail)
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    with pytest.raises(UserError, match=rf"{words}.*run.init_checkpoint={folder}") as refusal:
        check_folder(folder, config(override), pytest.fail)
    assert "delete" not in str(refusal.value).lower()


def test_the_same_data_are_known_at_another_place_and_other_data_at_the_same(tmp_path):
    folder = tmp_path / "run"
    data = tmp_path / "data"
    (data / "meta").mkdir(parents=True)
    (data / "meta" / "info.json").write_text("{}")
    (data / "frames.parquet").write_bytes(bytes(300_000))
    first = config(f"data.path={data}", f"data.more=[{data}]")
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(first))
    (folder / "meta.json").write_text(json.dumps({"inputs": run_inputs(first)}))
    check_folder(folder, first, pytest.fail)

    # Moved, or named in another way.
    moved = tmp_path / "elsewhere" / "d"
    shutil.copytree(data, moved)
    (moved / ".cache").mkdir()
    (moved / ".cache" / "frames.npy").touch()
    shutil.rmtree(data)
    said: list[str] = []
    second = config(f"data.path={moved}", f"data.more=[{moved}]")
    check_folder(folder, second, said.append)
    assert f"data.path was {data}, now {moved}, with the same content" in said[0]

    # Other data, at either place: of the same size, with one other byte near the end.
    with (moved / "frames.parquet").open("r+b") as file:
        file.seek(-9, 2)
        file.write(b"x")
    with pytest.raises(UserError, match=rf"data.path was {data}, now {moved}\b(?!, with)"):
        check_folder(folder, second, pytest.fail)
    moved.rename(data)
    with pytest.raises(UserError, match=f"data.path={data} holds something else than when"):
        check_folder(folder, first, pytest.fail)


def test_a_mark_stays_where_a_class_gives_a_field_another_default():
    hopper = resolve({**SECTIONS, "env": {"name": "gymnasium"}})
    assert {"num_envs", "num_workers", "device"} <= settings_of(hopper.env, "machine")


def test_another_algorithm_is_named_first():
    """Of many changes only some are listed; the name explains the others."""
    text = listed([f"algorithm.a{k} was 1, now 2" for k in range(20)] + ["algorithm.name was x"])
    assert text.startswith("algorithm.name was x; algorithm.a0 was 1") and "more" in text
