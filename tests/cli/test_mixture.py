"""``embodyrl mixture``: real runs of a design, a proposal, and its confirmation in other states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from embodyrl.cli.main import main
from embodyrl.training.mixture_search import Trial, confirm, design, mixture_table, propose

PRESET = """# A preset of the tests: states only, so that nothing is drawn.
env: {name: mujoco, task: reach, renderer: none, cameras: [], num_envs: 4}
policy: {name: flow_mlp, horizon: 5, width: 32, layers: 1}
algorithm: {name: sft, steps_per_iteration: 60, batch_size: 32}
run: {iterations: 1, eval_episodes: 2, eval_before: false, videos: 0, device: cpu}
"""
ENV = ["mujoco", "env.task=reach", "env.renderer=none", "env.cameras=[]", "env.num_envs=4"]


@pytest.fixture
def preset(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(PRESET)
    return path


def test_the_design_begins_with_what_is_done_without_weights() -> None:
    trials = design((0.8, 0.2), [3, 4])
    assert [trial.weights for trial in trials[::2]] == [(0.8, 0.2), (1, 0), (0, 1), (0.5, 0.5)]
    assert [trial.seed for trial in trials] == [3, 4] * 4
    # A default that is in the design anyway is trained once.
    assert len(design((0.5, 0.5), [0])) == 3
    assert Trial((0.333, 0.667), 2).overrides("out") == [
        "data.weights=[0.333,0.667]", "run.seed=2", "run.out=out", "run.name=0.333_0.667_seed_2",
    ]  # fmt: skip


def test_the_data_set_that_makes_good_policies_is_proposed() -> None:
    good, bad = [True] * 90 + [False] * 10, [True] * 10 + [False] * 90
    half = [True] * 60 + [False] * 40
    rows = {Trial((1, 0), 0): bad, Trial((0, 1), 0): good, Trial((0.5, 0.5), 0): half}
    found = propose(rows, (0.5, 0.5))
    assert found["weights"][1] >= 0.9 and found["better"] > 0.99
    assert [row["solved"] for row in mixture_table(rows)] == [10, 90, 60]
    assert confirm([half], [good])["verdict"] == "better"
    assert confirm([good], [half])["verdict"] == "worse"
    assert confirm([good], [good])["verdict"] == "undecided"


def test_it_trains_proposes_and_confirms(
    preset: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = [tmp_path / "a", tmp_path / "b"]
    for number, path in enumerate(data):
        given = ["--episodes", "4", "--seed", str(number), "--out", str(path)]
        assert main(["collect", *ENV, *given]) == 0
    out = tmp_path / "out"
    sets = [f"data.path={data[0]}", f"data.more=[{data[1]}]"]
    command = ["mixture", str(preset), *sets, "--episodes", "4", "--out", str(out)]
    assert main([*command, "--list"]) == 0
    named = capfd.readouterr().out.splitlines()[-4:]
    assert any(line.endswith("0.5_0.5_seed_0") for line in named) and not out.exists()
    assert main(command) == 0
    said = capfd.readouterr().out
    assert "by their frames" in said and "Proposed: [" in said and "One run of each" in said
    found = json.loads((out / "mixture.json").read_text())
    assert all(row["episodes"] == 4 for row in found["mixtures"])
    assert found["confirmed"]["episodes"] == 4
    name = "_".join(f"{w:g}" for w in found["proposed"]["weights"])
    assert (out / f"{name}_seed_0" / "checkpoints").is_dir()
    # The same command trains nothing again, and says the same.
    assert main(command) == 0
    assert "[1/" not in capfd.readouterr().out
    assert json.loads((out / "mixture.json").read_text()) == found


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["data.path=a"], "data.path and data.more name 1"),
        (["data.path=a", "data.more=[b]", "data.weights=[1,2]"], "leave it out"),
        (["data.path=a", "data.more=[b]", "run.seed=1"], "named and seeded here"),
        (["data.path=a", "data.more=[b]", "--episodes", "0"], "--episodes is 0"),
        (["data.path=a", "data.more=[b]", "--seeds", "1", "1"], "different numbers"),
        (["data.path=a", "data.more=[b,c,d,e,f,g]"], "name 7"),
    ],
)
def test_what_is_no_mixture_is_refused(
    preset: Path, capsys: pytest.CaptureFixture[str], given: list[str], words: str
) -> None:
    assert main(["mixture", str(preset), *given]) == 1
    assert words in capsys.readouterr().err
