"""Whole runs: exact resume after Ctrl-C, kill -9 and a lost tail, limits, refusals, and where settings come from."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.build import load_config
from embodyrl.cli.main import main
from embodyrl.config import Config, compose, env_config, resolve, to_yaml
from embodyrl.errors import UserError
from embodyrl.interrupt import Interrupt, Interrupted
from embodyrl.rollouts.seeding import init_states
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.evaluate import evaluate_checkpoint, print_evaluation
from embodyrl.training.ood import evaluate_ood, print_ood
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from embodyrl.types import EnvSpec

pytestmark = pytest.mark.timeout(900)  # a machine may be busy with other things

ENV = {"name": "mujoco", "task": "reach", "renderer": "none", "num_envs": 8, "num_threads": 1}
POLICY = {
    "name": "flow_vla",
    "width": 32,
    "layers": 1,
    "heads": 2,
    "text_layers": 0,
    "critic_width": 32,
}
PPO = {
    "name": "ppo",
    "num_chunks": 10,
    "minibatch_size": 40,
    "epochs": 2,
    "critic_epochs": 1,
    "warmup_iterations": 1,
}
GRPO = {
    "name": "grpo",
    "num_episodes": 8,
    "group_size": 4,
    "minibatch_size": 40,
    "epochs": 2,
    "keep_max": 1.0,
}
GRPO |= {
    "keep_min": 0.0,
    "max_rounds": 1,
    "rewards": ["return"],
    "lr_schedule": "adaptive",
    "target_kl": 0.02,
}
RLPD = {
    "name": "rlpd",
    "num_chunks": 10,
    "capacity": 500,
    "warmup_chunks": 20,
    "batch_size": 8,
    "utd": 0.05,
}
RLPD |= {"critic_width": 16, "num_critics": 2, "policy_delay": 2, "critic_warmup": 2}
SFT = {"name": "sft", "steps_per_iteration": 4, "batch_size": 16}
RUN = {
    "iterations": 6, "eval_every": 2, "eval_episodes": 8, "checkpoint_every": 2, "keep_checkpoints": 0,
    "device": "cpu", "threads": 1, "videos": 0,
}  # fmt: skip
TIMES = ("minutes", "rollout_seconds", "env_steps_per_second")


def make(out: Path, algorithm=PPO, *overrides: str, data: str = "") -> Config:
    sections = {
        "env": ENV,
        "policy": POLICY,
        "algorithm": algorithm,
        "run": RUN,
        "data": {"path": data},
    }
    return resolve(sections, [f"run.out={out}", *overrides])


def result(folder: Path) -> tuple[dict, list[dict], dict]:
    """All that a run computed, without its clocks."""
    states, meta = checkpoint.load(checkpoint.find(folder))
    assert meta["position"]["iteration"] == 6
    rows = [
        {k: v for k, v in row.items() if k not in TIMES}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    evals = {
        p.name: json.loads(p.read_text())["episodes"]
        for p in sorted((folder / "evals").glob("*.json"))
    }
    return states, rows, evals


def assert_equal(a, b, path=""):
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_equal(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{path}/{i}")
    else:
        assert a == b, path


def forget_after(folder: Path, iteration: int) -> None:
    """Leaves what a run killed between that iteration's checkpoint and the next one would have left."""
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > iteration:
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    """A PPO run of six iterations that nothing disturbed."""
    return train(make(tmp_path_factory.mktemp("straight")))


def test_a_run_leaves_what_its_docstring_says(straight):
    _, rows, evals = result(straight)
    assert [row["iteration"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert list(evals) == ["after.json", "before.json", "iter_000002.json", "iter_000004.json"]
    assert [e["init"] for e in evals["after.json"]] == list(range(8))
    assert sorted(p.name for p in (straight / "checkpoints").iterdir()) == [
        "step_000002",
        "step_000004",
        "step_000006",
    ]
    assert finished(straight)
    assert compose(str(straight / "config.yaml")) == make(straight.parent)


def test_a_lost_tail_is_computed_again_bit_for_bit_in_a_folder_that_was_moved(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    config = make(tmp_path)
    forget_after(folder, 2)
    assert_equal(result(train(config)), result(straight))
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 6


def test_groups_are_played_again_bit_for_bit(tmp_path):
    whole = train(make(tmp_path / "a", GRPO, "env.reward=dense"))
    _, rows, _ = result(whole)
    assert all(
        row["groups"] == 2 and row["train_episodes"] == 8 and row["actor_epochs"] == 2
        for row in rows
    )
    assert len({row["actor_lr"] for row in rows}) > 1  # the rate is part of what is resumed
    shutil.copytree(whole, tmp_path / "b" / "run")
    forget_after(tmp_path / "b" / "run", 2)
    assert_equal(result(train(make(tmp_path / "b", GRPO, "env.reward=dense"))), result(whole))


def start(config: Config, folder: Path, rows: int) -> subprocess.Popen:
    """The run in a process of its own, once it has written that many rows."""
    preset = folder.with_suffix(".yaml")
    preset.write_text(to_yaml(config))
    command = [sys.executable, "-m", "embodyrl.cli", "train", str(preset)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 250
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_bytes().count(b"\n") >= rows:
            return process
        time.sleep(0.002)
    process.kill()
    raise AssertionError(
        f"The run ended before it could be disturbed: {process.communicate()[0].decode()}"
    )


def last_checkpoint(folder: Path) -> int:
    return int(checkpoint.find(folder).name.removeprefix("step_"))


def test_ctrl_c_saves_at_once_and_the_same_command_goes_on(straight, tmp_path):
    folder = tmp_path / "run"
    process = start(make(tmp_path), folder, rows=1)
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=120)[0].decode()
    assert process.returncode == 130, output
    assert (
        "the same command goes on from there" in output
        and "Traceback" not in output
        and "Done" not in output
    )
    assert 1 <= last_checkpoint(folder) < 6 and not finished(folder)
    train(make(tmp_path))
    straight_states, straight_rows, straight_evals = result(straight)
    states, rows, evals = result(folder)
    assert_equal(states, straight_states)
    assert rows == straight_rows and evals == straight_evals and finished(folder)
    assert len(json.loads((folder / "meta.json").read_text())["sessions"]) == 2


def test_kill_9_costs_no_more_than_the_work_since_the_last_checkpoint(straight, tmp_path):
    folder = tmp_path / "run"
    process = start(make(tmp_path), folder, rows=3)
    process.kill()
    process.communicate()
    assert last_checkpoint(folder) in (2, 4)
    train(make(tmp_path))
    assert_equal(result(folder), result(straight))


def test_the_first_signal_asks_and_the_second_acts(capfd):
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        interrupt.check()
        signal.raise_signal(signal.SIGINT)
        assert "stops after the current update" in capfd.readouterr().err
        with pytest.raises(Interrupted):
            interrupt.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture(scope="module")
def demos(tmp_path_factory) -> str:
    from embodyrl.data.collect import collect_dataset
    from embodyrl.sims.mujoco.env import MujocoConfig as MujocoConfig

    path = tmp_path_factory.mktemp("data") / "reach"
    settings = {k: v for k, v in ENV.items() if k != "num_envs"}
    collect_dataset(MujocoConfig(**settings, num_envs=4), path, num_episodes=4)
    return str(path)


def test_what_learns_from_demonstrations_and_its_own_episodes_resumes_exactly(demos, tmp_path):
    noisy = ("policy.transition=flow_noise", "policy.critic=shared")
    whole = train(make(tmp_path / "a", RLPD, *noisy, data=demos))
    assert read_metrics(whole / "metrics.jsonl")[-1]["gradient_steps"] > 10
    shutil.copytree(whole, tmp_path / "b" / "run")
    forget_after(tmp_path / "b" / "run", 4)
    assert_equal(result(train(make(tmp_path / "b", RLPD, *noisy, data=demos))), result(whole))


def test_supervised_fine_tuning_resumes_exactly_and_hands_its_policy_to_ppo(demos, tmp_path):
    config = make(tmp_path / "a", SFT, data=demos)
    whole = train(config)
    states, rows, _ = result(whole)
    assert not (whole / "evals" / "before.json").exists() and rows[-1]["env_steps"] == 0
    shutil.copytree(whole, tmp_path / "b" / "run")
    forget_after(tmp_path / "b" / "run", 4)
    assert_equal(result(train(make(tmp_path / "b", SFT, data=demos))), result(whole))

    # PPO starts from the averaged weights, and scores them before it changes them.
    after = train(make(tmp_path / "c", PPO, f"run.init_checkpoint={whole}", "run.iterations=1"))
    first = json.loads((after / "evals" / "before.json").read_text())["episodes"]
    assert first == json.loads((whole / "evals" / "after.json").read_text())["episodes"]
    kept, _ = checkpoint.load(
        checkpoint.find(after)
    )  # the actor waits for the critic in the first iteration
    actor = [k for k in states["policy"] if not k.startswith(("critic.", "normalize_privileged."))]
    assert all(torch.equal(kept["policy"][k], states["policy"][k]) for k in actor)


def test_learning_from_demonstrations_without_any_is_refused_in_words(tmp_path):
    with pytest.raises(UserError, match=r"learns from demonstrations: give data\.path=FOLDER"):
        train(make(tmp_path, SFT))
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_alone(straight):
    files = {
        p: p.stat().st_mtime_ns
        for p in straight.rglob("*")
        if p.is_file() and p.name != "config.yaml"
    }
    assert train(make(straight.parent)) == straight
    assert {p: p.stat().st_mtime_ns for p in files} == files


def test_a_run_killed_in_its_last_evaluation_makes_it_without_training(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    (folder / "evals" / "after.json").unlink()
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"finished": None}))
    assert not finished(folder)
    train(make(tmp_path))
    assert finished(folder)
    assert_equal(result(folder), result(straight))
    # Killed between that evaluation and the note that it came to its end:
    (folder / "meta.json").write_text(json.dumps(meta | {"finished": None}))
    train(make(tmp_path))
    assert finished(folder)


def test_another_config_in_the_same_folder_is_refused_and_nothing_is_touched(straight):
    before = (straight / "config.yaml").read_text()
    with pytest.raises(
        UserError, match=r"another config \(algorithm.lr was 0.\d+, now 0.01\).*run\.name"
    ):
        train(make(straight.parent, PPO, "algorithm.lr=0.01"))
    assert (straight / "config.yaml").read_text() == before


def test_a_finished_run_may_be_made_longer(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    rows = read_metrics(folder / "metrics.jsonl")
    train(make(tmp_path, PPO, "run.iterations=7", "run.eval_every=100", "run.keep_checkpoints=1"))
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step_000007"] and finished(
        folder
    )
    assert read_metrics(folder / "metrics.jsonl")[:-1] == rows
    evals = {p.stem: json.loads(p.read_text())["iteration"] for p in (folder / "evals").iterdir()}
    assert evals == {"before": 0, "iter_000002": 2, "iter_000004": 4, "iter_000006": 6, "after": 7}
    assert compose(str(folder / "config.yaml")).run.iterations == 7


def test_a_checkpoint_that_does_not_fit_is_refused_before_anything_is_written(straight, tmp_path):
    start_from = f"run.init_checkpoint={straight}"
    for override, words in (
        ("env.control_mode=ee_delta_pose", r"action_dim\) was 4 and is 7.*control mode"),
        ("policy.width=64", "policy.width was 32 and is 64"),
        ("run.init_checkpoint=" + str(tmp_path / "nowhere"), "There is no checkpoint in .*nowhere"),
    ):
        with pytest.raises(UserError, match=words):
            train(make(tmp_path, PPO, start_from, override))
        assert not (tmp_path / "run").exists()


def test_the_time_limit_ends_a_run_for_good(tmp_path):
    config = make(tmp_path, PPO, "run.minutes=1e-9")
    folder = train(config)
    assert last_checkpoint(folder) == 1 and finished(folder)
    assert (folder / "evals" / "after.json").exists()
    train(config)
    assert last_checkpoint(folder) == 1


def test_patience_ends_a_run_that_gets_no_better_and_more_of_it_goes_on(tmp_path):
    still, short = "algorithm.lr=1e-12", [f"run.out={tmp_path}", "run.patience=2"]
    folder = train(make(tmp_path, PPO, still, *short))
    names = {
        p.stem: json.loads(p.read_text())["iteration"] for p in (folder / "evals").glob("*.json")
    }
    assert names == {"before": 0, "iter_000002": 2, "after": 4} and finished(folder)
    before = (folder / "metrics.jsonl").read_bytes()
    train(make(tmp_path, PPO, still, *short))
    assert (folder / "metrics.jsonl").read_bytes() == before
    assert_equal(
        result(train(make(tmp_path, PPO, still))), result(train(make(tmp_path / "b", PPO, still)))
    )
    with pytest.raises(UserError, match=r"run\.patience=2 waits for evaluations"):
        make(tmp_path, PPO, "run.patience=2", "run.eval_every=0")


def test_the_policys_settings_come_from_the_initial_checkpoint(straight, tmp_path):
    preset = tmp_path / "more.yaml"
    preset.write_text(
        "env: {name: mujoco, task: reach, renderer: none}\npolicy: {name: flow_vla, eta: "
        f"0.3}}\nalgorithm: {{name: ppo}}\nrun: {{init_checkpoint: {straight}}}\n"
    )
    saved = make(straight.parent).policy
    assert compose(str(preset)).policy == dataclasses.replace(saved, eta=0.3)
    on_top = compose(str(preset), ["policy.trained_steps=one", "policy.eta=0.7"]).policy
    assert on_top == dataclasses.replace(saved, eta=0.7, trained_steps="one")
    assert compose(str(preset), ["run.init_checkpoint="]).policy.width != saved.width
    preset.write_text(preset.read_text().replace("policy: {name: flow_vla, eta: 0.3}\n", ""))
    assert compose(str(preset)).policy == saved
    missing = compose(
        str(preset), ["run.init_checkpoint=nowhere", "policy.name=flow_vla"]
    )  # refused by train alone
    assert missing.policy.name == "flow_vla"


def test_a_checkpoint_scores_as_its_run_said(straight):
    said = json.loads((straight / "evals" / "after.json").read_text())["episodes"]
    scored = evaluate_checkpoint(str(straight), ["env.num_envs=3"])
    assert scored["split"] == "eval" and scored["episodes"] == 8
    assert [r["success"] for r in scored["results"]] == [e["success"] for e in said]
    assert [r["length"] for r in scored["results"]] == [e["length"] for e in said]
    other = evaluate_checkpoint(
        str(straight / "checkpoints" / "step_000002"), ["env.split=train"], episodes=3
    )
    assert other["split"] == "train" and other["episodes"] == 3


def test_several_attempts_are_those_of_several_seeds(straight, capsys):
    found = evaluate_checkpoint(str(straight), attempts=3)
    runs = [evaluate_checkpoint(str(straight), seed=seed) for seed in range(3)]
    assert found["results"] == runs[0]["results"]
    solved = [sum(e["success"] for e in one) for one in zip(*(r["results"] for r in runs))]  # noqa: B905
    assert list(found["solved"].values()) == solved
    assert [k for k, _, _ in found["pass_at"]] == pytest.approx(
        [np.mean(solved) / 3, found["pass_at"][1][0], np.mean([s > 0 for s in solved])]
    )
    print_evaluation(found)
    assert "solved at least once in 3 attempts: " in capsys.readouterr().out
    with pytest.raises(UserError, match="attempts is 0"):
        evaluate_checkpoint(str(straight), attempts=0)


def test_all_splits_out_of_distribution_are_scored_by_one_call(straight, capsys):
    found = evaluate_ood(str(straight), episodes=4)
    # A policy of states sees neither colours nor light nor a camera.
    config = load_config(str(straight))
    assert set(found) == {"eval", *config.env.ood_splits()}
    for split, result in found.items():
        assert result["split"] == split and result["episodes"] == 4 and result["about"]
        one = evaluate_checkpoint(str(straight), [f"env.split={split}"], episodes=4)
        assert result["results"] == one["results"]
    print_ood(found)
    said = capsys.readouterr().out
    assert "ood_language" in said and "paraphrased instructions" in said and "executing" in said
    with pytest.raises(UserError, match=r"env\.split=eval has no effect"):
        evaluate_ood(str(straight), ["env.split=eval"])


def test_the_inputs_of_a_checkpoint_are_ablated_by_one_command(straight, capsys):
    assert main(["eval", str(straight), "--ablate", "--json", "--episodes", "6"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = json.loads(json.dumps(evaluate_checkpoint(str(straight), episodes=6)))
    assert found["split"] == "eval" and found["execute"] == one["execute"]
    assert {key: one[key] for key in found["as_is"]} == found["as_is"]
    # All that a policy of states sees is in proprio.
    assert set(found["cases"]) == {"no instruction", "proprio"}
    assert found["not_applicable"]["camera"] == "the env has no cameras"
    for more in ("--ood", "--attempts=2", "--video=films"):
        assert main(["eval", str(straight), "--ablate", more]) == 1
        assert "--ablate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("env", "settings", "splits"),
    [
        ("mujoco", ["env.task=reach"], {"position", "colour", "lighting", "camera", "language"}),
        ("mujoco", ["env.task=pick", "env.cameras=[]"], {"position", "clutter", "language"}),
        ("libero", ["env.suite=libero_object"], {"swap", "object", "lan", "task"}),
        ("libero", ["env.suite=libero_90"], set()),
        ("maniskill", [], set()),
    ],
)
def test_the_splits_of_an_env_are_those_that_change_something(env, settings, splits):
    found = env_config(env, settings).ood_splits()
    assert set(found) == {f"ood_{name}" for name in splits}


def test_every_iteration_starts_from_states_of_its_own():
    spec = EnvSpec("test/arm", 4, 4, 9, "ee_delta_pos", 25.0, 20, {}, num_init_states=10)

    def first_of(seed, iteration, shard=0):
        return list(islice(init_states(spec, seed, iteration, shard), 24))

    first = first_of(0, 0)
    assert first == first_of(0, 0) and min(first) >= 0 and max(first) < 10
    assert first not in (first_of(0, 1), first_of(1, 0), first_of(0, 0, shard=1))


def test_no_metrics_are_lost_or_doubled_by_a_crash_in_the_middle_of_a_line(straight, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(straight, folder)
    forget_after(folder, 4)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 7, "env_')
        file.flush()
        os.fsync(file.fileno())
    train(make(tmp_path))
    assert_equal(result(folder), result(straight))
