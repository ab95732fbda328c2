"""check_algorithm passes what is right, and says in words what an algorithm of somebody else breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from embodyrl.algorithms.pa_rl import PARL, PARLConfig
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.build import make_policy
from embodyrl.checks import CheckError, check_algorithm, check_policy
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLP, FlowMLPConfig
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv

POLICY = FlowMLPConfig(width=16, layers=1, horizon=2, num_denoise_steps=2, critic_width=16)
CONFIG = PPOConfig(
    num_chunks=2, minibatch_size=8, epochs=1, critic_epochs=1, warmup_iterations=0, lr_warmup=0
)


@pytest.fixture(scope="module")
def env() -> MujocoEnv:
    return MujocoEnv(MujocoConfig(task="reach", renderer="none", cameras=(), num_envs=4))


def maker(cls: type[PPO], env: MujocoEnv) -> Callable[[], PPO]:
    return lambda: cls(CONFIG, make_policy(POLICY, env.spec, 0))


def test_ppo_passes(env):
    check_algorithm(maker(PPO, env), env)


def test_pa_rl_passes(env):
    policy = dataclasses.replace(POLICY, chooser_width=16)
    config = PARLConfig(
        num_chunks=2,
        warmup_chunks=4,
        critic_warmup=2,
        mc_steps=0,
        batch_size=8,
        actor_batch_size=4,
        actor_utd=0.5,
        capacity=64,
    )
    check_algorithm(lambda: PARL(config, cast(Any, make_policy(policy, env.spec, 0))), env)


class ReturnsNone(PPO):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        super().update(*args, **kwargs)


class ReturnsWords(PPO):
    def update(self, *args: Any, **kwargs: Any) -> Any:
        return super().update(*args, **kwargs) | {"mood": "good"}


class SavesASet(PPO):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seen": {1, 2}}


class ForgetsItsOptimiser(PPO):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = int(state["iteration"])


class ForgetsItsBase(PPO):
    def __init__(self, config: PPOConfig, policy: Any) -> None:
        self.config = config


class LearnsNothing(PPO):
    def update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return {}


class DrawsByItself(PPO):
    def update(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        return super().update(*args, **kwargs) | {"dice": float(torch.rand(()))}


class NoBatch(PPO):
    Batch = None


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (ReturnsNone, "update returned a NoneType, not a dict"),
        (ReturnsWords, r"update returned \['mood'\], which is no number"),
        (SavesASet, r"state_dict\(\): .* is a set"),
        (ForgetsItsOptimiser, r"state_dict\(\) lacks|next iteration differs"),
        (ForgetsItsBase, r"no attribute policy: __init__ must call super"),
        (LearnsNothing, "changed nothing"),
        (DrawsByItself, "same seeds gave other metrics"),
        (NoBatch, "Batch is not set"),
    ],
)
def test_a_broken_promise_is_said_in_words(cls, words, env):
    with pytest.raises(CheckError, match=words):
        check_algorithm(maker(cls, env), env)


def test_policies_that_differ_are_not_blamed_on_the_algorithm(env):
    with pytest.raises(CheckError, match=r"make\(\) built policies with different weights"):
        check_algorithm(lambda: PPO(CONFIG, FlowMLP(POLICY, env.spec)), env)


def test_an_ability_is_given_as_its_class(env):
    class Named(PPO):
        needs = ("ScoresPaths",)  # type: ignore[assignment]

    policy = make_policy(POLICY, env.spec, 0)
    with pytest.raises(UserError, match=r"needs holds 'ScoresPaths'.*without quotes"):
        Named(CONFIG, policy)


def test_a_path_of_unknown_length_is_named(env):
    class Sampler(FlowMLP):
        @property
        def transition(self) -> Any:
            return type("Steps", (), {"kind": "mine", "num_steps": 2})()

        @transition.setter
        def transition(self, value: Any) -> None: ...

    policy = Sampler(POLICY, env.spec)
    with pytest.raises(CheckError, match="transition lacks eta, num_noisy"):
        check_policy(policy, env.reset(seed=0), env.spec)
