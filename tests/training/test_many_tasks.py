"""Runs of several tasks: drawn by difficulty, resumed exactly, scored by task, limited each by its own time."""

import json
import shutil

import pytest
from scale_runs import ENV, PPO, RUN, rows

from embodyrl.config import resolve
from embodyrl.errors import UserError
from embodyrl.functional.by_task import tasks_in_words
from embodyrl.storage import checkpoint
from embodyrl.storage.run_files import read_evaluation
from embodyrl.training.evaluate import evaluate_checkpoint, print_evaluation
from embodyrl.training.runner import train
from embodyrl.training.shards import local_rollouts

pytestmark = pytest.mark.timeout(600)

GRPO = {
    "name": "grpo", "num_episodes": 12, "group_size": 2, "minibatch_size": 64, "epochs": 1,
    "keep_min": 0.0, "keep_max": 1.0, "max_rounds": 1, "rewards": ["return"],
}  # fmt: skip
POLICY = {
    "name": "flow_vla", "horizon": 5, "num_denoise_steps": 2, "width": 16, "layers": 1, "heads": 2,
    "text_layers": 0, "critic_width": 16,
}  # fmt: skip
TASKS = "env.task=[reach,push]"
BY_DIFFICULTY = "run.task_sampling=difficulty"


def make(out, *overrides, algorithm=PPO):
    sections = {"env": ENV, "policy": POLICY, "algorithm": algorithm, "run": RUN}
    return resolve(sections, [f"run.out={out}", "env.reward=dense", *overrides])


def position(folder):
    return checkpoint.load_run(checkpoint.find(folder), "position")[1]["position"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    config = make(tmp_path_factory.mktemp("many"), TASKS, BY_DIFFICULTY, algorithm=GRPO)
    return config, train(config)


def test_a_run_goes_on_with_the_same_tasks_that_it_would_have_drawn(whole, tmp_path):
    folder = whole[1]
    shutil.copytree(folder, tmp_path / "run")
    newest = sorted((folder / "checkpoints").iterdir())[-1].name
    shutil.rmtree(tmp_path / "run" / "checkpoints" / newest)
    again = train(make(tmp_path, TASKS, BY_DIFFICULTY, algorithm=GRPO))
    assert rows(again) == rows(folder)
    assert position(again)["tasks"] == position(folder)["tasks"]
    assert set(position(folder)["tasks"]) == {"reach", "push"}
    # The record decides what is drawn: without it, other tasks are.
    meta = json.loads((tmp_path / "run" / "config.yaml").with_name("meta.json").read_text())
    assert meta["finished"]
    drawn = [
        {k: v for k, v in row.items() if k.startswith("task_episodes/")} for row in rows(folder)
    ]
    even = train(make(tmp_path / "even", TASKS, algorithm=GRPO))
    assert drawn != [
        {k: v for k, v in row.items() if k.startswith("task_episodes/")} for row in rows(even)
    ]


def test_shards_draw_by_the_same_odds(whole, tmp_path):
    config = make(tmp_path, TASKS, BY_DIFFICULTY, algorithm=GRPO)
    one = train(config, rollouts=lambda: local_rollouts(config))
    restarts = [{k: v for k, v in row.items() if k != "worker_restarts"} for row in rows(one)]
    assert restarts == rows(whole[1])
    two = make(tmp_path / "two", TASKS, BY_DIFFICULTY, "run.workers=2", algorithm=GRPO)
    assert set(position(train(two))["tasks"]) == {"reach", "push"}


def test_every_row_and_evaluation_scores_the_tasks_and_none_is_drawn_for_it(whole, capsys):
    config, folder = whole
    for row in rows(folder):
        counts = {t: row.get(f"task_episodes/{t}", 0) for t in ("reach", "push")}
        assert sum(counts.values()) == row["drawn_episodes"] >= row["train_episodes"]
        solved = sum(row.get(f"task_success/{t}", 0) * n for t, n in counts.items())
        assert solved == pytest.approx(row["drawn_success"] * row["drawn_episodes"])
    page = read_evaluation(folder / "evals" / "after.json")
    assert [row["init"] for row in page["episodes"]] == list(range(config.run.eval_episodes))
    for task, score in page["tasks"].items():
        own = [row for row in page["episodes"] if row["task"] == task]
        assert score["episodes"] == len(own) == config.run.eval_episodes // 2
        assert score["successes"] == sum(row["success"] for row in own)
        low, high = score["interval"]
        assert low <= score["success_rate"] <= high
        # Reach ends after its own 25 steps, push after 50.
        assert max(row["length"] for row in own) <= {"reach": 25, "push": 50}[task]
    # The same table from the command line.
    result = evaluate_checkpoint(str(folder), episodes=4)
    assert result["tasks"].keys() == {"reach", "push"}
    print_evaluation(result)
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[1:3]] == ["reach", "push"]
    assert all("/2)" in line for line in said[1:3])


def test_tasks_that_an_evaluation_leaves_out_are_named(whole):
    said = []
    evaluate_checkpoint(str(whole[1]), episodes=1, say=said.append)
    assert any("1 evaluation episodes play 1 of the 2 tasks" in text for text in said)


@pytest.mark.parametrize(
    ("overrides", "algorithm", "says"),
    [
        (["env.task=reach"], GRPO, "mujoco/reach has one task"),
        ([TASKS, "algorithm.num_chunks=2"], None, "episode up to 50.*Raise algorithm.num_chunks"),
        ([TASKS], {"name": "sft"}, "sft plays no episodes"),
    ],
)
def test_sampling_by_difficulty_is_refused_where_nothing_comes_of_it(
    tmp_path, overrides, algorithm, says
):
    more = {"algorithm": algorithm} if algorithm else {}
    with pytest.raises(UserError, match=says):
        train(make(tmp_path, *overrides, BY_DIFFICULTY, **more))
    assert not (tmp_path / "run").exists()


def test_many_tasks_fit_into_one_line():
    assert tasks_in_words({"pick": (3, 4)}) == ""
    assert tasks_in_words({"pick": (3, 4), "push": (1, 4)}) == "pick 75%, push 25%"
    scores = {f"libero_90/{'long_' * 20}{i}": (min(i, 10), 10) for i in range(40)}
    text = tasks_in_words(scores)
    assert "of 40 tasks 1 never solved, 9 at times, 30 always" in text
    assert "lowest: libero_90/" in text and len(text) < 250
