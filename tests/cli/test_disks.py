"""Commands on full disks, and in folders that may not be read or written: a sentence, and nothing is lost."""

import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from bound_by_rights import run

from embodyrl.cli.main import main
from embodyrl.config import compose, env_config
from embodyrl.errors import UserError
from embodyrl.registry import preset_names
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.paths import settings_of
from embodyrl.training.load_demos import require_data_sets
from embodyrl.training.run_folder import finished

pytestmark = pytest.mark.timeout(900)

SMALL = {
    "env": {
        "name": "mujoco", "task": "reach", "renderer": "none", "num_envs": 2, "num_threads": 1,
        "max_episode_steps": 10,
    },
    "policy": {
        "name": "flow_vla", "width": 16, "layers": 1, "heads": 1, "text_layers": 0,
        "critic_width": 8, "num_denoise_steps": 1,
    },
    "algorithm": {"name": "ppo", "num_chunks": 2, "minibatch_size": 4, "epochs": 1, "critic_epochs": 1},
    "run": {
        "iterations": 2, "eval_every": 0, "eval_before": False, "eval_episodes": 2,
        "checkpoint_every": 1, "keep_checkpoints": 0, "device": "cpu", "threads": 1, "videos": 0,
    },
}  # fmt: skip


@pytest.fixture
def preset(tmp_path) -> str:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(SMALL))
    return str(tmp_path / "small.yaml")


@pytest.fixture
def command(tmp_path):
    """Calls the command line in a process that permissions bind; returns status and text."""

    def call(*argv: object, **how) -> tuple[int, str]:
        status, text = run(lambda: main([str(word) for word in argv]), tmp_path / "said", **how)
        assert "Traceback" not in text, text
        return status, text

    return call


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.yaml").write_text(yaml.safe_dump(SMALL))
    assert main(["train", str(folder / "small.yaml"), f"run.out={folder}"]) == 0
    return folder / "small"


@pytest.mark.parametrize("largest", [3_000, 9_000, 40_000])
def test_training_that_a_full_disk_stopped_goes_on_later(preset, command, tmp_path, largest):
    out = tmp_path / "runs"
    status, text = command("train", preset, f"run.out={out}", largest_file=largest)
    last = text.strip().splitlines()[-1]
    assert status == 1 and last.startswith("embodyrl: ") and "same command goes on" in last
    status, text = command("train", preset, f"run.out={out}")
    assert status == 0 and finished(out / "small"), text
    assert [row["iteration"] for row in read_metrics(out / "small" / "metrics.jsonl")] == [1, 2]


def test_a_folder_that_may_not_be_written_is_named_before_anything_is_built(
    preset, command, trained, tmp_path
):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    out = closed / "a" / "b"
    for words in (
        ("train", preset, f"run.out={out}"),
        ("collect", "mujoco", "--out", out),
        ("report", trained, "--out", out),
        ("export", trained, out),
        ("pull", "me/policy", out),
        ("quickstart", "--out", out),
        ("world", "train", "data=[x]", f"out={out}"),
        ("world", "loop", "mujoco_pick_few", "policy=x", "demos=y", f"out={out}"),
        ("deploy", trained, "--out", out),
    ):
        status, text = command(*words)
        assert status == 1 and f"no permission to write into {closed}" in text, (words, text)
        assert text.count("\n") == 1, (words, text)
    assert not list(closed.iterdir())


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("config.yaml", ("train", "report")),
        ("metrics.jsonl", ("train", "report")),
        ("meta.json", ("train", "report")),
        ("evals", ("train", "report")),
        ("checkpoints", ("train", "eval")),
        ("checkpoints/step_000002", ("train", "eval")),
        ("checkpoints/step_000002/policy.safetensors", ("train", "eval")),
        ("checkpoints/step_000002/MANIFEST.sha256", ("train", "eval")),
        (".", ("train", "eval", "report")),
    ],
)
def test_a_file_of_a_run_that_may_not_be_read_is_not_called_damaged(
    name, commands, command, trained, preset, tmp_path
):
    folder = tmp_path / "runs" / "small"
    shutil.copytree(trained, folder)
    rights = (folder / name).stat().st_mode
    argv = {
        "train": ("train", preset, f"run.out={tmp_path / 'runs'}", "run.iterations=3"),
        "eval": ("eval", folder, "--episodes", 1),
        "report": ("report", folder, "--out", tmp_path / "report.html"),
    }
    (folder / name).chmod(0)
    for verb in commands:
        status, text = command(*argv[verb])
        assert status == 1 and f"no permission to read {folder / name}" in text, (verb, text)
        for word in ("damaged", "delete", "malformed", "There is no checkpoint", "no run's"):
            assert word not in text
    (folder / name).chmod(rights)
    assert command(*argv["train"])[0] == 0


def test_a_data_set_that_is_missing_is_named_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = 0
    for name in preset_names():
        config = compose(name)
        if not config.data.path or config.env.name == "world_model":
            continue
        with pytest.raises(UserError, match=rf"no data set {config.data.path}\b") as refusal:
            require_data_sets(config)
        # An arm records its own.
        if config.env.for_demonstrations() is None:
            assert config.env.name == "robot"
            assert "Or record it: embodyrl record --robot lerobot --out" in str(refusal.value)
            continue
        # The command collects in the env of the preset.
        words = shlex.split(str(refusal.value).partition("Or make it: ")[2])
        assert words[:2] == ["embodyrl", "collect"] and words[-2:] == ["--out", config.data.path]
        # Who learns from failures is told of a policy's episodes, an expert's being solved.
        tries = config.data.keep == "all" and bool(config.run.init_checkpoint)
        assert ("--keep-failures" in words) == tries
        assert not tries or words[words.index("--policy") + 1] == config.run.init_checkpoint
        wanted = config.env if tries else config.env.for_demonstrations()
        made = env_config(words[2], [word for word in words if word.startswith("env.")])
        machine = settings_of(wanted, "machine")
        for key, value in vars(wanted).items():
            assert key in machine or getattr(made, key) == value, (name, key)
        found += 1
    assert found > 8


def test_no_hub_is_asked_for_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["data", "verify", "data/mujoco_pick"]) == 1
    said = capsys.readouterr().out
    assert "there is no such folder" in said and "hub" not in said
    assert "embodyrl collect ENV --out data/mujoco_pick" in said
