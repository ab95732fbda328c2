"""Runs that draw initial states by success, or whose episodes grow: the same for every algorithm, resumed exactly."""

import shutil

import pytest
from scale_runs import DSRL, GRPO, NEEDS, PPO, RUN, make, rows

from embodyrl.errors import UserError
from embodyrl.storage import checkpoint
from embodyrl.training.runner import train
from embodyrl.training.shards import local_rollouts

pytestmark = pytest.mark.timeout(600)

SHORT = "env.max_episode_steps=12"
BY_SUCCESS = ("run.start_sampling=difficulty", "run.first_length=0.5", SHORT)


def position(folder):
    return checkpoint.load_run(checkpoint.find(folder), "position")[1]["position"]


@pytest.mark.parametrize("algorithm", [PPO, GRPO, DSRL], ids=lambda a: a["name"])
def test_a_run_goes_on_with_the_starts_that_it_would_have_drawn(tmp_path, algorithm):
    whole = train(make(tmp_path / "whole", *BY_SUCCESS, algorithm=algorithm))
    found = position(whole)["starts"]
    assert found and all(0 <= solved <= played for solved, played in found.values())
    shutil.copytree(whole, tmp_path / "run")
    newest = sorted((whole / "checkpoints").iterdir())[-1].name
    shutil.rmtree(tmp_path / "run" / "checkpoints" / newest)
    again = train(make(tmp_path, *BY_SUCCESS, algorithm=algorithm))
    assert rows(again) == rows(whole)
    assert position(again)["starts"] == found
    # Episodes of the first iteration end at half their time, and some starts are played again.
    later = rows(whole)[-1]
    assert later["drawn_episodes"] > later["train_episodes"]
    even = train(make(tmp_path / "even", SHORT, algorithm=algorithm))
    assert rows(even)[0]["env_steps"] != rows(whole)[0]["env_steps"] or algorithm is not GRPO
    assert rows(even)[-1] != later


def test_shards_draw_the_same(tmp_path):
    config = make(tmp_path / "one", *BY_SUCCESS, algorithm=GRPO)
    one = train(config, rollouts=lambda: local_rollouts(config))
    plain = train(make(tmp_path / "plain", *BY_SUCCESS, algorithm=GRPO))
    assert [{k: v for k, v in row.items() if k != "worker_restarts"} for row in rows(one)] == rows(
        plain
    )


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["run.start_sampling=difficulty"], "start_sampling.*12 actions and an episode up to 25"),
        (["algorithm.bc_schedule=success"], "bc_coef=0 imitates nothing"),
        (
            ["algorithm.bc_coef=1", "algorithm.bc_schedule=unsolved"],
            "bc_schedule is 'unsolved'.*a rollout has 12 actions, less than an episode",
        ),
        (["algorithm.reference_coef=1"], "random weights.*run.init_checkpoint"),
    ],
)
def test_what_would_come_to_nothing_is_refused(tmp_path, overrides, says):
    with pytest.raises(UserError, match=says):
        train(make(tmp_path, *overrides))
    assert not (tmp_path / "run").exists()


def test_successes_are_kept_only_where_a_start_comes_twice(tmp_path):
    settings = GRPO | {"rewards": ["success"], "replay_successes": 8, "keep_min": 0.1}
    with pytest.raises(UserError, match=r"none comes twice.*run.start_sampling=difficulty"):
        train(make(tmp_path, SHORT, algorithm=settings))
    assert RUN["iterations"] == 4 and "dsrl" in NEEDS
    row = rows(train(make(tmp_path, SHORT, BY_SUCCESS[0], algorithm=settings)))[-1]
    assert row["replayed_groups"] >= 0


SINGLE = {"group_size": 1, "baseline": "tracked", "rewards": ["success"]}
SINGLE |= {"keep_min": 0.1, "keep_max": 0.9}


@pytest.mark.parametrize("settings", [{"draw_groups": "ahead", "max_rounds": 2}, SINGLE], ids=str)
def test_groups_drawn_at_once_and_single_episodes_resume_and_shard_as_others(tmp_path, settings):
    algorithm = GRPO | settings
    config = make(tmp_path / "whole", SHORT, algorithm=algorithm)
    whole = train(config)
    # Resumed from an earlier checkpoint, it does what it would have done.
    shutil.copytree(whole, tmp_path / "run")
    newest = sorted((whole / "checkpoints").iterdir())[-1].name
    shutil.rmtree(tmp_path / "run" / "checkpoints" / newest)
    again = train(make(tmp_path, SHORT, algorithm=algorithm))
    assert rows(again) == rows(whole)
    # One shard plays what the plain loop does.
    config = make(tmp_path / "one", SHORT, algorithm=algorithm)
    one = train(config, rollouts=lambda: local_rollouts(config))
    assert [{k: v for k, v in row.items() if k != "worker_restarts"} for row in rows(one)] == rows(
        whole
    )
