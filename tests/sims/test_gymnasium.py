"""Gymnasium's envs through the registry: the env API's promises, time limit, workers, and PPO."""

import contextlib
import io
import json
from pathlib import Path

import mujoco
import pytest
import torch

from embodyrl.algorithms.grpo import GRPO
from embodyrl.algorithms.nft import NFT
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.build import make_env, make_policy
from embodyrl.checks import check_env
from embodyrl.config import resolve
from embodyrl.data.collect import collect_dataset
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.collect import Player
from embodyrl.sims.gymnasium.env import GymnasiumConfig, GymnasiumEnv, no_deprecations
from embodyrl.sims.gymnasium.tasks import TASKS
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_from_json
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.evaluate import evaluate_checkpoint, print_evaluation
from embodyrl.training.hub import card
from embodyrl.training.runner import train


def test_promises_of_a_vec_env():
    env = make_env(GymnasiumConfig(id="Pendulum-v1", num_envs=3, max_episode_steps=20))
    assert env.spec.name == "gymnasium/Pendulum-v1" and env.spec.max_episode_steps == 20
    check_env(env, horizon=5)


def test_falling_is_an_end_and_the_time_limit_is_not():
    env = make_env(GymnasiumConfig(id="Hopper-v5", num_envs=2))
    assert env.spec.max_episode_steps == 1000
    env.reset(seed=0)
    ended = torch.zeros(2, dtype=torch.bool)
    for _ in range(40):
        step = env.step(torch.ones(2, 10, 3))
        assert not step.truncated.any()
        ended |= step.terminated
    assert ended.all()
    env = make_env(GymnasiumConfig(id="HalfCheetah-v5", num_envs=1, max_episode_steps=12))
    env.reset(seed=0)
    steps = [env.step(torch.zeros(1, 8, 6)) for _ in range(2)]
    assert steps[1].truncated.all() and not steps[1].terminated.any() and steps[1].valid.sum() == 4


def test_every_task_that_is_listed_exists():
    import gymnasium

    assert all(name in gymnasium.registry for name in TASKS)


@pytest.mark.slow
def test_workers_change_nothing():
    alone, shared = (
        make_env(GymnasiumConfig(id="Hopper-v5", num_envs=2, num_workers=w)) for w in (1, 2)
    )
    try:
        actions = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1
        for env in (alone, shared):
            env.reset(init=[3, 4])
        a, b = alone.step(actions), shared.step(actions)
        assert torch.equal(a.obs.proprio, b.obs.proprio) and torch.equal(a.reward, b.reward)
    finally:
        shared.close()


def test_ppo_runs_on_a_flow_of_states():
    env = make_env(GymnasiumConfig(id="Pendulum-v1", num_envs=4, max_episode_steps=20))
    policy = make_policy(
        FlowMLPConfig(width=16, layers=1, critic_width=16, num_denoise_steps=2, horizon=2),
        env.spec,
        0,
    )
    ppo = PPO(
        PPOConfig(num_chunks=5, minibatch_size=20, epochs=1, critic_epochs=1, warmup_iterations=0),
        policy,
    )
    generator = torch.Generator().manual_seed(0)
    batch = Player(env).collect(ppo, 0, generator=generator)
    row = ppo.update(batch, progress=0.0, generator=generator)
    assert row["ratio"] == pytest.approx(1.0, abs=1e-4) and row["grad_norm"] > 0


RUN = {
    "env": {"name": "gymnasium", "id": "HalfCheetah-v5", "num_envs": 2, "max_episode_steps": 20},
    "policy": {
            "name": "flow_mlp", "width": 16, "layers": 1, "critic_width": 8,
            "num_denoise_steps": 2,
        },
    "algorithm": {
        "name": "sac_flow", "num_chunks": 20, "capacity": 64, "warmup_chunks": 20,
            "batch_size": 16, "critic_width": 16,
    },
    "run": {
        "name": "cheetah", "iterations": 2, "eval_every": 1, "eval_episodes": 3,
            "checkpoint_every": 1, "videos": 0,
        "device": "cpu", "threads": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def cheetah(tmp_path_factory) -> tuple[Path, str]:
    """A run's folder, and what it printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        folder = train(resolve(RUN, [f"run.out={tmp_path_factory.mktemp('runs')}"]))
    return folder, out.getvalue()


def test_a_run_without_success_speaks_of_its_return(cheetah):
    folder, said = cheetah
    assert said.count("evaluation after iteration") == 3 and said.count("(3 episodes)") == 3
    assert "train return" in said and "success" not in said and "%" not in said
    rows = read_metrics(folder / "metrics.jsonl")
    assert all("train_return" in row and "train_success" not in row for row in rows)
    page = json.loads((folder / "evals" / "after.json").read_text())
    assert page["reports_success"] is False and len(page["episodes"]) == 3
    _, meta = checkpoint.load(checkpoint.find(folder))
    assert not spec_from_json(meta["spec"]).reports_success
    text = card("me/cheetah", meta, {"after": page}, folder)
    assert (
        "| mean return, 95% interval |" in text
        and "(3 episodes) |" in text
        and "success" not in text
    )


def test_its_checkpoint_is_scored_by_its_return(cheetah, capsys):
    scored = evaluate_checkpoint(str(cheetah[0]))
    returns = [e["reward"] for e in scored["results"]]
    assert (
        scored["return_mean"] == pytest.approx(sum(returns) / 3) and scored["success_rate"] == 0.0
    )
    low, high = scored["return_interval"]
    assert low < scored["return_mean"] < high
    print_evaluation(scored)
    said = capsys.readouterr().out
    assert said.startswith("gymnasium/HalfCheetah-v5, split eval: return ")
    assert said.endswith("(3 episodes) (executing 1 of 1 actions)\n")
    assert evaluate_checkpoint(str(cheetah[0]), episodes=1)["return_interval"] is None
    with pytest.raises(UserError, match="reports no success, so no attempt solves it"):
        evaluate_checkpoint(str(cheetah[0]), episodes=1, attempts=2)


def test_only_what_is_deprecated_in_gymnasiums_xml_is_not_said(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes MUJOCO_LOG.TXT where it stands
    mujoco.set_mju_user_warning(None)  # dm_control's, which OGBench imports, is another one
    body = '<body><freejoint/><geom size="1"/></body>'
    xml = f'<mujoco><compiler settotalmass="14"/><worldbody>{body}</worldbody></mujoco>'
    make_env(GymnasiumConfig(id="HalfCheetah-v5", num_envs=2)).close()
    with no_deprecations():
        mujoco.MjModel.from_xml_string(xml)
    out, err = capfd.readouterr()
    assert (
        out + err == "" and list(tmp_path.iterdir()) == [] and mujoco.get_mju_user_warning() is None
    )
    with no_deprecations():
        broken = mujoco.MjData(
            model := mujoco.MjModel.from_xml_string(xml.replace(' settotalmass="14"', ""))
        )
        broken.qpos[0] = float("nan")
        mujoco.mj_step(model, broken)
    assert "WARNING: " in capfd.readouterr().err


@pytest.mark.parametrize("algorithm", [GRPO, NFT])
def test_what_learns_from_success_refuses_an_env_that_reports_none(algorithm):
    env = GymnasiumEnv(GymnasiumConfig(id="Pendulum-v1"))
    policy = make_policy(FlowMLPConfig(width=8, critic_width=8), env.spec, 0)
    with pytest.raises(UserError, match=r"reports no success.*algorithm\.rewards=\[return\]"):
        algorithm(algorithm.Config(), policy)


def test_successes_cannot_be_collected_where_there_are_none(tmp_path):
    with pytest.raises(UserError, match=r"reports no success.*--keep-failures"):
        collect_dataset(
            GymnasiumConfig(id="Pendulum-v1"), tmp_path / "data", num_episodes=1, policy="run"
        )
