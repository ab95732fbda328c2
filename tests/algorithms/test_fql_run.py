"""A whole run of FQL: data first and then play, a lost tail, what is scored, and who may take the weights."""

import shutil

import pytest
import torch
from scale_runs import ENV, POLICY
from vla_models import SPEC, observation

from embodyrl.algorithms.fql import FQL, FQLConfig
from embodyrl.algorithms.optim import Means
from embodyrl.build import make_env, make_policy
from embodyrl.checks import check_policy
from embodyrl.config import resolve
from embodyrl.data.collect import collect_dataset
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.policies.flow_vla import FlowVLA, FlowVLAConfig
from embodyrl.policies.guidance import GuidedPolicy
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.sims.mujoco.config import MujocoConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.evaluate import evaluate_checkpoint
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from tests.training.test_off_policy_run import outcome
from tests.training.test_runner import assert_equal, forget_after

LIMIT = 12
ENVS = ENV | {"max_episode_steps": LIMIT, "num_envs": 4}
SECTIONS = {
    "env": ENVS,
    "policy": POLICY | {"one_step_width": 16, "squash": False},
    "algorithm": {
        "name": "fql", "offline_steps": 6, "steps_per_iteration": 2, "num_chunks": 6, "capacity": 96,
        "warmup_chunks": 24, "batch_size": 16, "critic_width": 16, "utd": 0.25,
    },
    "run": {
        "iterations": 6, "eval_every": 0, "eval_before": False, "eval_episodes": 4, "checkpoint_every": 1,
        "keep_checkpoints": 9, "videos": 0, "device": "cpu", "threads": 1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "tried"
    config = MujocoConfig(**ENVS)
    collect_dataset(config, folder, num_episodes=8, noise=0.7, keep_failures=True)
    return folder


@pytest.fixture(scope="module")
def straight(data, tmp_path_factory):
    return train(make(data, tmp_path_factory.mktemp("straight")))


def make(data, out, *overrides):
    given = [f"data.path={data}", "data.keep=all", f"run.out={out}", *overrides]
    return resolve(SECTIONS, given)


def test_it_learns_from_data_and_then_plays(straight):
    assert finished(straight)
    rows = list(read_metrics(straight / "metrics.jsonl"))
    assert [row["gradient_steps"] for row in rows] == [2, 4, 6, 12, 18, 24]
    assert [row["env_steps"] for row in rows[:3]] == [0, 0, 0] and rows[3]["env_steps"] > 0
    assert [row["replay_chunks"] for row in rows[:4]] == [0, 0, 0, 24]
    assert all(row["head_distance"] > 0 for row in rows)


@pytest.mark.parametrize("kept", [2, 4])
def test_a_lost_tail_is_computed_again_bit_for_bit(data, straight, tmp_path, kept):
    """It was lost while it learned from the data, or later while it played."""
    folder = tmp_path / "again" / "run"
    shutil.copytree(straight, folder)
    forget_after(folder, kept)
    assert_equal(outcome(train(make(data, tmp_path / "again"))), outcome(straight))


def test_what_is_scored_acts_in_one_step(straight):
    scored = evaluate_checkpoint(str(straight), episodes=4)
    assert scored["episodes"] == 4
    spec = make_env(MujocoConfig(**ENVS)).spec
    policy = make_policy(FlowMLPConfig(**SECTIONS["policy"]), spec, 0)
    checkpoint.load_weights(straight, policy, spec)
    assert policy.acts_in_one_step
    with pytest.raises(UserError, match=r"Set policy\.one_step_width=0 to guide its flow"):
        GuidedPolicy(policy, policy, 0.5)
    # Without the head the flow acts, and it is the same flow.
    alone = make_policy(FlowMLPConfig(**SECTIONS["policy"] | {"one_step_width": 0}), spec, 0)
    checkpoint.load_weights(straight, alone, spec)
    assert not alone.acts_in_one_step
    assert torch.equal(alone.net.head.weight, policy.net.head.weight)


def test_a_rollout_by_densities_refuses_a_head_that_acts(straight, tmp_path):
    given = [f"run.out={tmp_path}", f"run.init_checkpoint={straight}", "run.iterations=1"]
    sections = SECTIONS | {"algorithm": {"name": "ppo", "num_chunks": 6}}
    with pytest.raises(UserError, match="gives no trace"):
        train(resolve(sections, given))


def test_a_policy_with_pictures_and_a_longer_plan_keeps_its_promises():
    config = FlowVLAConfig(
        width=16, layers=1, heads=2, text_layers=0, horizon=4, execute=2, action_patch=1,
        one_step_width=8, critic="shared", critic_width=8, num_denoise_steps=2,
    )  # fmt: skip
    policy = FlowVLA(config, SPEC)
    obs = observation()
    check_policy(policy, obs, SPEC)
    # The head reads the noise of the whole plan, and gives what is executed of it.
    features = policy.features(policy.encode(obs))
    noise = torch.randn(len(obs), 4, SPEC.action_dim)
    actions = policy.one_step_actions(features, noise)
    assert actions.shape == (len(obs), 2, SPEC.action_dim)
    noise[:, 3] += 1.0
    assert not torch.equal(policy.one_step_actions(features, noise), actions)
    # It is no part of what imitation trains.
    head = {id(p) for p in policy.one_step.parameters()}
    assert head and not head & {id(p) for p in policy.actor_parameters()}


def test_a_policy_with_pictures_learns():
    """The encoder learns to imitate, and neither critics nor head reach it."""
    config = FlowVLAConfig(
        width=16, layers=1, heads=2, text_layers=0, horizon=3, action_patch=1,
        one_step_width=8, critic="shared", critic_width=8, num_denoise_steps=2,
    )  # fmt: skip
    algorithm = FQL(
        FQLConfig(offline_steps=0, warmup_chunks=1, batch_size=4, capacity=16, critic_width=8),
        FlowVLA(config, SPEC),
    )
    n = len(observation())
    never = torch.zeros(n, dtype=torch.bool)
    choice = torch.rand(n, 3, SPEC.action_dim) * 2 - 1
    whole = torch.ones(n, 3, dtype=torch.bool)
    batch = Transitions(observation(), choice, whole.float(), whole, never, never, observation())
    row = algorithm.update(TransitionBatch(batch), progress=0.0, generator=torch.Generator())
    assert row["gradient_steps"] == n and algorithm.policy.acts_in_one_step
    encoder = [p.detach().clone() for p in algorithm.policy.vision.parameters()]
    algorithm._update_critics(batch, torch.Generator(), Means())
    algorithm._update_head(batch.obs, torch.Generator(), Means())
    seen = algorithm.policy.vision.parameters()
    assert all(torch.equal(a, b) for a, b in zip(encoder, seen, strict=True))
    algorithm._update_flow(batch, torch.Generator(), Means())
    seen = algorithm.policy.vision.parameters()
    assert not all(torch.equal(a, b) for a, b in zip(encoder, seen, strict=True))
