"""What a run's folder allows: the same config, a longer run, and nothing else."""

import json
from pathlib import Path

import pytest

from embodyrl.config import Config, resolve, to_yaml
from embodyrl.errors import UserError
from embodyrl.training.run_folder import check_folder, reopen, stalled

SECTIONS = {
    "env": {"name": "mujoco", "task": "reach", "renderer": "none"},
    "policy": {"name": "flow_vla"},
    "algorithm": {"name": "ppo"},
    "run": {"iterations": 6, "minutes": 10.0},
}


def episode(init: int, *, success: bool = False, reward: float = 0.0) -> dict:
    return {"init": init, "task": "reach", "success": success, "length": 4, "return": reward}


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
        f"run.{key}"
        for key in (
            "iterations=6",
            "iterations=9",
            "minutes=11",
            "minutes=0",
            "eval_every=1",
            "name=new",
        )
    ]
    + [
        f"run.{key}"
        for key in ("checkpoint_every=1", "keep_checkpoints=9", "loggers=[tensorboard]")
    ],
)
def test_a_run_may_be_moved_made_longer_and_watched_otherwise(folder, override):
    said: list[str] = []
    check_folder(folder, config(override), said.append)
    assert len(said) == (override == "run.iterations=9")
    assert not said or (
        "goes on to 9 iterations instead of 6" in said[0] and "learning rate" in said[0]
    )


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
        ("run.eval_episodes=9", "run.eval_episodes was 128, now 9"),
        ("run.seed=1", "run.seed was 0, now 1"),
        ("algorithm.lr=0.01", r"algorithm.lr was \S+, now 0.01"),
        ("env.cameras=[]", r"env.cameras was \['front'\], now \[\]"),
    ],
)
def test_nothing_else_may_change(folder, override, words):
    with pytest.raises(UserError, match=rf"another config \({words}\).*run\.name=.*made longer"):
        check_folder(folder, config(override), lambda text: pytest.fail(text))


def test_the_best_evaluation_has_most_successes_and_among_as_many_the_highest_return(tmp_path):
    (tmp_path / "evals").mkdir()
    assert not stalled(tmp_path, 1)

    def evaluated(iteration: int, success: int, reward: float) -> None:
        rows = [episode(i, success=i < success, reward=reward + i) for i in range(2)]
        text = json.dumps({"iteration": iteration, "episodes": rows})
        (tmp_path / "evals" / f"iter_{iteration:06d}.json").write_text(text)

    for iteration, reward in (
        (0, -300.0),
        (1, -20.0),
        (2, -50.0),
    ):  # as of an env that reports no success
        evaluated(iteration, 0, reward)
    assert stalled(tmp_path, 1) and not stalled(tmp_path, 2)
    evaluated(3, 1, -400.0)
    assert not stalled(tmp_path, 1)


def test_the_last_evaluation_becomes_one_on_the_way(tmp_path):
    (tmp_path / "evals").mkdir()
    (tmp_path / "videos").mkdir()
    rows = [
        episode(i) | {"video": f"videos/after_{i:04d}.mp4" if i < 2 else None} for i in range(3)
    ]
    text = json.dumps({"iteration": 6, "episodes": rows})
    (tmp_path / "evals" / "after.json").write_text(text)
    for i in range(2):
        (tmp_path / "videos" / f"after_{i:04d}.mp4").write_bytes(bytes([i]))
    reopen(tmp_path)
    (tmp_path / "evals" / "after.json").write_text(text)  # as if killed just before its end
    reopen(tmp_path)
    reopen(tmp_path)
    assert [p.name for p in (tmp_path / "evals").iterdir()] == ["iter_000006.json"]
    kept = json.loads((tmp_path / "evals" / "iter_000006.json").read_text())["episodes"]
    assert [row["video"] for row in kept] == [
        "videos/iter_000006_0000.mp4",
        "videos/iter_000006_0001.mp4",
        None,
    ]
    assert [(tmp_path / row["video"]).read_bytes() for row in kept[:2]] == [b"\x00", b"\x01"]
