"""``embodyrl eval --video`` and ``embodyrl push --dry-run``, on a run that was really trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.errors import UserError
from embodyrl.rollouts.batches import Episode
from embodyrl.storage.run_files import read_evaluation
from embodyrl.training.evaluate import evaluate_checkpoint
from embodyrl.training.films import film_name
from embodyrl.training.runner import train

PRESET = """# A preset of the tests.
env: {name: mujoco, task: reach, image_size: 32, num_envs: 2, max_episode_steps: 4, num_threads: 1}
policy: {name: flow_vla, width: 32, layers: 1, heads: 2}
algorithm: {name: ppo, num_chunks: 2, epochs: 1, critic_epochs: 1}
run: {name: tiny, iterations: 1, eval_episodes: 3, eval_before: false, videos: 1, device: cpu}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    (folder / "tiny.yaml").write_text(PRESET)
    return train(compose(str(folder / "tiny.yaml"), [f"run.out={folder}"]))


def test_the_first_episodes_are_filmed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    films = tmp_path / "films"
    assert main(["eval", str(run), "--video", str(films), "run.videos=2"]) == 0
    names = sorted(p.name for p in films.iterdir())
    assert len(names) == 2 and names[0].startswith("0000_reach_") and names[0].endswith(".mp4")
    assert names[0].split("_")[2] in ("success.mp4", "failure.mp4")
    assert f"Wrote 2 videos to {films}: {names[0]}" in capsys.readouterr().out
    assert main(["eval", str(run), "--video", str(films), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row.get("video") for row in rows] == [str(films / names[0]), None, None]


def test_what_cannot_be_filmed_is_said(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run\.videos is 0"):
        evaluate_checkpoint(str(run), ["run.videos=0"], video=str(tmp_path))


def test_names_say_task_and_outcome() -> None:
    episode = Episode(3, "put it/there, please", True, 1.5, 8)
    assert film_name(episode, True) == "0003_put-it-there-please_success.mp4"
    assert film_name(episode, False) == "0003_put-it-there-please_return-1.5.mp4"


def test_a_filmed_episode_keeps_its_instruction(run: Path) -> None:
    rows = read_evaluation(run / "evals" / "after.json")["episodes"]
    assert rows[0]["instruction"] and "instruction" not in rows[1]


def test_push_says_what_it_would_upload(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody answers there
    assert main(["push", str(run), "me/reach", "--dry-run", "--public"]) == 0
    out = capsys.readouterr().out
    assert "to me/reach (public if it is new)" in out
    for name in ("policy.safetensors", "config.yaml", "evals/after.json", "README.md"):
        assert name in out
    assert "algorithm.safetensors" not in out, "the optimiser is not uploaded"
    assert "embodyrl pull me/reach my_policy" in out
    assert main(["push", str(run), "reach", "--dry-run"]) == 1
    assert "give OWNER/NAME" in capsys.readouterr().err
