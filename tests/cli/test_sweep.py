"""``embodyrl sweep``: which runs it means, and that a failed one ends no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from embodyrl.cli.main import main
from embodyrl.cli.sweep import plan, short_names, split_values
from embodyrl.errors import UserError
from embodyrl.storage.run_files import read_meta

PRESET = """# A preset of the tests: states only, so that nothing is drawn.
env: {name: mujoco, task: reach, renderer: none, cameras: [], num_envs: 2, max_episode_steps: 10}
policy: {name: flow_mlp, horizon: 5, width: 16, layers: 1}
algorithm: {name: ppo, num_chunks: 2, epochs: 1, critic_epochs: 1}
run: {iterations: 1, eval_episodes: 2, eval_before: false, videos: 0, device: cpu}
"""


def test_every_combination_has_a_readable_name() -> None:
    runs = plan(["algorithm.lr=1e-4,3e-4", "env.num_envs=8", "run.seed=0,1"])
    assert [run.name for run in runs] == [
        "lr-1e-4_seed-0", "lr-1e-4_seed-1", "lr-3e-4_seed-0", "lr-3e-4_seed-1",
    ]  # fmt: skip
    assert runs[1].overrides == ("algorithm.lr=1e-4", "env.num_envs=8", "run.seed=1")
    assert short_names(["env.seed", "run.seed", "algorithm.lr"]) == {
        "env.seed": "env.seed", "run.seed": "run.seed", "algorithm.lr": "lr",
    }  # fmt: skip


def test_a_list_in_brackets_is_one_value() -> None:
    assert split_values("[front,wrist],[front]") == ["[front,wrist]", "[front]"]
    assert split_values("'a,b',c") == ["'a,b'", "c"]
    assert split_values("") == [""]
    runs = plan(["env.cameras=[front,wrist],[front]"])
    assert [run.name for run in runs] == ["cameras-front-wrist", "cameras-front"]
    # Names that would be the same are numbered.
    assert [r.name for r in plan(["data.path=a/b,a-b"])] == ["000_path-a-b", "001_path-a-b"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["run.seed=1"], "nothing to sweep"),
        (["run.seed=1,1"], "a value twice"),
        (["run.seed=1,2", "run.seed=3"], "given twice"),
        (["run.name=a,b"], "leave run.name out"),
        (["run.seed"], "not an override"),
        ([f"run.seed={','.join(map(str, range(1001)))}"], "at most 1000"),
    ],
)
def test_what_cannot_be_meant_is_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan(overrides)


def test_a_mistake_in_one_run_is_said_before_any_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preset = tmp_path / "tiny.yaml"
    preset.write_text(PRESET)
    assert main(["sweep", str(preset), "run.seed=0,-1", "--out", str(tmp_path / "out")]) == 1
    assert "run.seed is -1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_failed_run_ends_no_other_and_is_tried_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    preset = tmp_path / "tiny.yaml"
    preset.write_text(PRESET)
    out = tmp_path / "out"
    # Three workers cannot share two envs, which shows when the run starts.
    command = ["sweep", str(preset), "run.workers=3,1", "--out", str(out)]
    assert main([*command, "--list"]) == 0
    assert "workers-3" in capfd.readouterr().out and not out.exists()
    assert main(command) == 1
    said = capfd.readouterr().out
    assert "workers-3  no score   FAILED (exit status 1)" in said
    assert "1 of 2 runs failed. The same command tries them again." in said
    assert read_meta(out / "workers-1" / "meta.json")["finished"]
    assert "(0/2)" in said or "(1/2)" in said or "(2/2)" in said
    assert (out / "report.html").is_file()
    assert main(command) == 1
    assert "1 of 2 runs are done already" in capfd.readouterr().out
    # Other settings for what is there already are refused, and not taken for done.
    assert main([*command, "algorithm.gamma=0.5"]) == 1
    assert "algorithm.gamma was" in capfd.readouterr().err
