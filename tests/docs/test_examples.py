"""The Python of the guides does what the guides say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docs_text import ROOT, Document


def blocks(page: str) -> list[str]:
    """The Python code blocks of a page, in order."""
    document = Document(page, (ROOT / page).read_text(encoding="utf-8"))
    return [block for language, block in document.blocks if language == "python"]


def run(code: str, names: dict[str, Any]) -> None:
    exec(compile(code, "<documentation>", "exec", dont_inherit=True), names)


def test_the_env_of_the_guide_passes_its_check() -> None:
    names: dict[str, Any] = {"__name__": "guide"}
    for block in blocks("docs/howto/env.md"):
        run(block, names)
    env = names["PointEnv"](names["PointConfig"](num_envs=2))
    env.reset(init=[3, 3])
    assert (env.place[0] == env.place[1]).all()


@pytest.mark.slow  # imports LeRobot
def test_the_recording_of_the_guide_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lerobot")
    from embodyrl.data.verify import verify_dataset

    monkeypatch.chdir(tmp_path)
    [code] = blocks("docs/howto/data.md")
    run(code, {})
    assert not verify_dataset("data/mine").faults


@pytest.mark.slow  # collects, trains and films
def test_the_page_from_python_runs_on_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint here is a policy that was hardly trained."""
    from embodyrl.cli.main import main

    monkeypatch.chdir(tmp_path)
    demos = ["collect", "mujoco_pick_sft", "--episodes", "2", "--out", "data", "env.num_envs=2"]
    assert main([*demos, "env.num_threads=1"]) == 0
    small = [
        "run.iterations=1",
        "algorithm.steps_per_iteration=1",
        "run.eval_episodes=2",
        "env.num_envs=2",
    ]
    train = ["train", "mujoco_pick_sft", "data.path=data", "run.out=runs/quickstart", "run.name=rl"]
    assert main([*train, *small, "env.num_threads=1", "run.videos=0"]) == 0
    names: dict[str, Any] = {}
    for block in blocks("docs/python.md"):
        if "runner" in block:  # a training of its own
            continue
        run(block.replace("episodes=64", "episodes=2").replace("spec, 64", "spec, 2"), names)
    assert names["solved"].shape == (4,)
    assert (tmp_path / "episode.gif").stat().st_size > 1000
