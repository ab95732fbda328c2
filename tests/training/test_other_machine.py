"""Whole runs that are interrupted, moved with their data, and finished with other numbers of threads and envs."""

import shutil
from pathlib import Path

import pytest

from embodyrl.data.collect import collect_dataset
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.config import MujocoConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.run_files import read_evaluations
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from tests.training.test_runner import PPO, RLPD, SFT, assert_equal, forget_after, make

pytestmark = pytest.mark.timeout(900)  # a machine may be busy with other things

BEFORE = ("run.threads=4", "env.num_envs=4", "env.num_threads=4", "run.eval_episodes=4")
AFTER = ("run.threads=2", "env.num_envs=2", "env.num_threads=2", "run.eval_episodes=6")
SHORT = ("env.max_episode_steps=10", "run.eval_every=0", "run.eval_before=false")


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("demos") / "reach"
    config = MujocoConfig(task="reach", renderer="none", num_envs=4, num_threads=1)
    collect_dataset(config, path, num_episodes=4)
    return path


@pytest.mark.parametrize("algorithm", [PPO, RLPD, SFT], ids=lambda algorithm: algorithm["name"])
def test_a_run_goes_on_with_fewer_threads_and_envs_from_moved_folders(
    algorithm, demos, tmp_path, capsys
):
    data = tmp_path / "data"
    wants_data = algorithm is not PPO
    shutil.copytree(demos, data)
    noisy = ("policy.transition=flow_noise", "policy.critic=shared") if algorithm is RLPD else ()
    common = (*SHORT, *noisy)
    options = {"data": str(data) if wants_data else ""}
    folder = train(make(tmp_path / "runs", algorithm, *BEFORE, *common, **options))
    forget_after(folder, 4)
    before = checkpoint.load(checkpoint.find(folder))[0]

    # Run and data are moved; another number of everything that only the machine asks for.
    shutil.move(tmp_path / "runs", tmp_path / "moved")
    data = data.rename(tmp_path / "moved_data")
    options = {"data": str(data) if wants_data else ""}
    capsys.readouterr()
    again = train(make(tmp_path / "moved", algorithm, *AFTER, *common, **options))
    said = capsys.readouterr().out
    assert "run.threads was 4, now 2" in said and "env.num_envs was 4, now 2" in said
    assert ("with the same content" in said) == wants_data
    assert ("instead of 40" in said) == (algorithm is not SFT)
    # Asked again with other threads there is nothing to do, so nothing is said to go on.
    other = [key.replace("threads=2", "threads=3") for key in AFTER]
    train(make(tmp_path / "moved", algorithm, *other, *common, **options))
    assert "goes on" not in capsys.readouterr().out
    assert finished(again) and again == tmp_path / "moved" / "run"
    assert [row["iteration"] for row in read_metrics(again / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert len(read_evaluations(again)["after"]["episodes"]) == 6
    if algorithm is RLPD:  # what was played before is still learned from
        after = checkpoint.load(checkpoint.find(again))[0]
        count = before["algorithm"]["replay"]["position"]
        old, new = (s["algorithm"]["replay"]["data"]["choice"] for s in (before, after))
        assert count < len(new)
        assert_equal(old[:count], new[:count])

    # What changes the results is refused, and nothing is touched.
    config = (again / "config.yaml").read_text()
    key = "utd" if algorithm is RLPD else "lr"
    words = rf"algorithm.{key} was [\d.e-]+, now 0.125\).*run.init_checkpoint={again}"
    with pytest.raises(UserError, match=words):
        train(
            make(
                tmp_path / "moved", algorithm, *AFTER, *common, f"algorithm.{key}=0.125", **options
            )
        )
    assert (again / "config.yaml").read_text() == config
    assert len(read_metrics(again / "metrics.jsonl")) == 6
