"""Every script of ``examples/`` runs on its own, and prints and writes what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

ROOT = Path(__file__).parents[2]
SCRIPTS = {path.stem for path in (ROOT / "examples").glob("*.py")}
# A script that needs another one -> that one.
NEEDS = {
    "improve_by_ppo": "demonstrate_and_imitate",
    "load_evaluate_film": "demonstrate_and_imitate",
    "serve_a_policy": "demonstrate_and_imitate",
    "drive_the_simulated_arm": "demonstrate_and_imitate",
    "dream": "record_and_replay",
    "judge_frames": "record_and_replay",
}
Run = Callable[[str], str]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of all scripts."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Runs a script once, after what it needs, and gives what it printed."""
    said: dict[str, str] = {}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}

    def run_once(name: str) -> str:
        if name in NEEDS:
            run_once(NEEDS[name])
        if name not in said:
            script = ROOT / "examples" / f"{name}.py"
            quick = ["--quick"] if "--quick" in script.read_text() else []
            done = subprocess.run(
                [sys.executable, str(script), *quick],
                cwd=folder, env=env, capture_output=True, text=True, timeout=500,
            )  # fmt: skip
            assert done.returncode == 0, done.stdout + done.stderr
            said[name] = done.stdout
        return said[name]

    return run_once


def written(folder: Path, name: str) -> Path:
    return folder / "runs" / "examples" / name


def test_make_an_env(run: Run, folder: Path) -> None:
    said = run("make_an_env")
    assert "env.task=stack" in said and "envs 0 and 1 look alike: True" in said
    assert "truncated [True, True, True, True]" in said
    assert Image.open(written(folder, "scene.png")).size == (256, 256)


def test_write_an_env(run: Run) -> None:
    said = run("write_an_env")
    assert "Cart keeps all promises." in said and "an episode must repeat exactly" in said


def test_a_training_loop_by_hand_learns(run: Run) -> None:
    said = run("a_training_loop_by_hand")
    assert re.search(r"trace\.x +\(1280, 5, 2, 1\)", said)
    before, after = (int(k) for k in re.findall(r"\((\d+)/128\)", said))
    assert before < 64 and after > 96


def test_a_path_is_scored_by_hand_as_by_the_policy(run: Run) -> None:
    said = run("score_a_path")
    steps = re.findall(r"by hand +(\S+), by the policy +(\S+)", said)
    assert len(steps) == 4
    for mine, its in steps:
        assert abs(float(mine) - float(its)) < 1e-3
    before, after = re.findall(r"ratio \w+: +\[(\S+), (\S+),", said)
    assert before == ("1.0", "1.0") and float(after[0]) > 1 > float(after[1])


def test_demonstrate_and_imitate(run: Run, folder: Path) -> None:
    assert re.search(r"The imitation solves \d+% .*/64\)", run("demonstrate_and_imitate"))
    assert (written(folder, "demos") / "meta" / "info.json").is_file()
    assert list((written(folder, "imitation") / "checkpoints").glob("step_*"))


def test_improve_by_ppo(run: Run) -> None:
    said = run("improve_by_ppo")
    assert re.search(r"iteration +1: return \S+, explained variance -?0", said)
    assert len(re.findall(r"^(before|after) +\d+% ", said, re.M)) == 2


def test_load_evaluate_film(run: Run, folder: Path) -> None:
    said = run("load_evaluate_film")
    assert len(re.findall(r"/(16|64) solved, 95% interval", said)) == 2
    assert written(folder, "episode.mp4").stat().st_size > 1000
    frames = Image.open(written(folder, "episode.gif"))
    assert frames.size == (128, 128) and frames.n_frames > 5  # type: ignore[attr-defined]


def test_serve_a_policy(run: Run) -> None:
    pytest.importorskip("websockets")
    said = run("serve_a_policy")
    assert "mujoco/push" in said and "inference took" in said
    assert "proprio must be (40,) float32" in said


def test_drive_the_simulated_arm(run: Run, folder: Path) -> None:
    pytest.importorskip("ruckig")
    said = run("drive_the_simulated_arm")
    assert "FAILS" not in said and int(re.findall(r"(\d+) commands in", said)[0]) > 100
    assert written(folder, "deploy/episode_0000.mcap").is_file()


def test_record_and_replay(run: Run, folder: Path) -> None:
    said = run("record_and_replay")
    episodes, solved = map(int, re.findall(r"(\d+) episodes, (\d+) of them solved", said)[0])
    assert 0 < solved < episodes
    assert float(re.findall(r"by (\S+) at the most", said)[0]) < 1e-4
    assert Image.open(written(folder, "replayed.png")).size == (768, 192)


@pytest.mark.slow
def test_dream(run: Run, folder: Path) -> None:
    pytest.importorskip("diffusers")
    assert len(re.findall(r"after +\d+ actions: pixels", run("dream"))) == 6
    assert Image.open(written(folder, "dream.png")).size == (7 * 96, 192)


def test_judge_frames(run: Run, folder: Path) -> None:
    pytest.importorskip("diffusers")
    said = run("judge_frames")
    assert re.search(r"held-out AUROC [01]\.\d\d", said) and "\nsolved " in said
    assert (written(folder, "reflector") / "reflector.json").is_file()


def test_the_table_of_the_readme_names_every_script() -> None:
    table = (ROOT / "examples" / "README.md").read_text()
    assert set(re.findall(r"^\| \[(\w+)\.py\]", table, re.M)) == SCRIPTS
    rows = dict(re.findall(r"^\| \[(\w+)\.py\].*\| ([^|]*) \|$", table, re.M))
    assert {name: rows[name].split(".py")[0].strip("` ") for name in NEEDS} == NEEDS


def test_every_script_says_what_it_costs_and_prints() -> None:
    for name in SCRIPTS:
        text = (ROOT / "examples" / f"{name}.py").read_text()
        for words in ("You learn", "Costs:", "Prints:"):
            assert words in text.split('"""')[1], (name, words)
        assert max(map(len, text.splitlines())) <= 100, name
