"""check_env and check_policy: they pass what is right, and say in words what is wrong."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodyrl import registry
from embodyrl.checks import CheckError, check_env, check_policy
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick, split_index
from embodyrl.errors import UserError
from embodyrl.policies.vla.fixed_size import FixedSizeConfig
from embodyrl.policies.vla.openvla import PrismaticConfig
from embodyrl.policies.vla.pi0_fast import Pi0FastConfig
from embodyrl.policies.vla.policy import VLAConfig
from embodyrl.sims.mujoco import tasks
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.types import EnvSpec, Obs, Step


@pytest.mark.parametrize(
    ("task", "settings"),
    [(task, {"renderer": "none", "cameras": ()}) for task in tasks.TASKS]
    + [
        ("pick", {"renderer": "warp", "image_size": 32}),
        ("pick,stack", {"renderer": "opengl", "image_size": 32, "cameras": ("front", "wrist")}),
        (
            "push",
            {"renderer": "none", "cameras": (), "control_mode": "ee_delta_pose", "reward": "dense"},
        ),
    ],
)
def test_mujoco_keeps_its_promises(task: str, settings: dict[str, Any]) -> None:
    env = MujocoEnv(
        MujocoConfig(task=task, num_envs=2, max_episode_steps=12, num_threads=1, **settings)
    )
    check_env(env)
    env.close()


def test_policies_keep_their_promises() -> None:
    """Every registered policy, by its default config, on states and on pixels."""
    for cameras in ((), ("front",)):
        env = MujocoEnv(
            MujocoConfig(
                num_envs=2, renderer="opengl" if cameras else "none", cameras=cameras, image_size=64
            )
        )
        obs = env.reset(seed=0)
        for name in registry.BUILT_IN["policies"]:
            cls = registry.load("policies", name)
            if name == "flow_mlp" and cameras:
                with pytest.raises(UserError, match="neither pictures nor instructions"):
                    cls(cls.Config(), env.spec)
                continue
            kinds = VLAConfig | FixedSizeConfig | PrismaticConfig | Pi0FastConfig
            if name == "token_vla" or issubclass(cls.Config, kinds):
                with pytest.raises(UserError, match=r"needs policy\.(pretrained|vlm)"):
                    cls(cls.Config(), env.spec)
                continue
            check_policy(cls(cls.Config(), env.spec), obs, env.spec)
        env.close()


class Counter(SteppedVecEnv):
    """Counts its steps: the smallest env there is. Its subclasses below each break one promise."""

    def __init__(self, num_envs: int = 3) -> None:
        spec = EnvSpec(
            "counter", num_envs, 2, 3, "count", 10.0, 9, {"eye": (4, 4)}, privileged_dim=1
        )
        super().__init__(spec, EnvConfig(num_envs=num_envs))
        self.state = torch.zeros(num_envs, 3)

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        for k, init in zip(env_ids, inits, strict=True):
            self.state[k] = torch.from_numpy(np.random.default_rng(init).random(3, np.float32))

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        n = self.spec.num_envs
        self.state = torch.where(
            active[:, None], self.state + actions.sum(1, keepdim=True), self.state
        )
        never = torch.zeros(n, dtype=torch.bool)
        return Tick(torch.ones(n), never, never.clone(), never.clone())

    def _observe(self, env_ids: list[int] | None) -> Obs:
        n = self.spec.num_envs
        picture = torch.arange(n * 48, dtype=torch.uint8).reshape(n, 4, 4, 3)
        return Obs({"eye": picture}, self.state.clone(), ["count"] * n, self.state[:, :1].clone())


class Unseeded(Counter):
    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        self.calls = getattr(self, "calls", 0) + 1
        super()._reset(env_ids, [init + self.calls for init in inits])


class TouchesOthers(Counter):
    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        super()._reset(env_ids, inits)
        if len(env_ids) == 1:
            self.state[1:] += 1


class FlatPicture(Counter):
    def _observe(self, env_ids: list[int] | None) -> Obs:
        obs = super()._observe(env_ids)
        obs.images["eye"] = torch.zeros_like(obs.images["eye"])
        return obs


class FloatPicture(Counter):
    def _observe(self, env_ids: list[int] | None) -> Obs:
        obs = super()._observe(env_ids)
        obs.images["eye"] = obs.images["eye"].float()
        return obs


class NoPicture(Counter):
    def _observe(self, env_ids: list[int] | None) -> Obs:
        return dataclasses.replace(super()._observe(env_ids), images={})


class DoubleProprio(Counter):
    def _observe(self, env_ids: list[int] | None) -> Obs:
        return dataclasses.replace(super()._observe(env_ids), proprio=self.state.double())


class NotANumber(Counter):
    def _observe(self, env_ids: list[int] | None) -> Obs:
        return dataclasses.replace(super()._observe(env_ids), proprio=self.state / 0 * 0)


class NoWords(Counter):
    def _observe(self, env_ids: list[int] | None) -> Obs:
        return dataclasses.replace(super()._observe(env_ids), instruction=[""] * self.spec.num_envs)


class NoPrivileged(Counter):
    def _observe(self, env_ids: list[int] | None) -> Obs:
        return dataclasses.replace(super()._observe(env_ids), privileged=None)


class TakesAnything(Counter):
    def step(self, actions: Tensor) -> Step:
        return super().step(torch.nan_to_num(actions))


class TakesAnyShape(Counter):
    def step(self, actions: Tensor) -> Step:
        return super().step(actions[..., : self.spec.action_dim])


class RewardsTheDead(Counter):
    def step(self, actions: Tensor) -> Step:
        step = super().step(actions)
        return dataclasses.replace(
            step, reward=torch.ones_like(step.reward), valid=torch.zeros_like(step.valid)
        )


class EndsTwiceOver(Counter):
    def step(self, actions: Tensor) -> Step:
        step = super().step(actions)
        both = torch.ones_like(step.truncated)
        return dataclasses.replace(step, terminated=both, truncated=both)


class NeverEnds(Counter):
    def step(self, actions: Tensor) -> Step:
        step = super().step(actions)
        return dataclasses.replace(step, truncated=torch.zeros_like(step.truncated))


class KeepsEnding(Counter):
    def step(self, actions: Tensor) -> Step:
        step = super().step(actions)
        return dataclasses.replace(step, terminated=self._elapsed > 0)

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        tick = super()._step(actions, active)
        return dataclasses.replace(tick, terminated=torch.ones_like(tick.terminated))


class Gaps(Counter):
    def step(self, actions: Tensor) -> Step:
        step = super().step(actions)
        step.valid[:, 1] = False
        step.reward[:, 1] = 0
        return step


class NumpyReward(Counter):
    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        tick = super()._step(actions, active)
        return dataclasses.replace(tick, reward=tick.reward.numpy(), fault=tick.fault.numpy())


class NumpyProprio(Counter):
    def _observe(self, env_ids: list[int] | None) -> Obs:
        return dataclasses.replace(super()._observe(env_ids), proprio=self.state.numpy())


class OneBuffer(Counter):
    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        before = self.state
        tick = super()._step(actions, active)
        self.state = before.copy_(self.state)
        return tick

    def _observe(self, env_ids: list[int] | None) -> Obs:
        return dataclasses.replace(super()._observe(env_ids), proprio=self.state)


class StepsTheDead(Counter):
    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        tick = super()._step(actions, torch.ones_like(active))
        return dataclasses.replace(tick, terminated=torch.arange(3) == 0)


class OneSplit(Counter):
    Config = EnvConfig

    def __init__(self, config: EnvConfig | None = None) -> None:
        super().__init__()


class TwoSplits(OneSplit):
    def __init__(self, config: EnvConfig | None = None) -> None:
        super().__init__()
        self.config = config or EnvConfig()

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        super()._reset(env_ids, inits)
        self.state[env_ids] += split_index(self.config.split)


def test_the_smallest_env_passes() -> None:
    check_env(Counter())
    check_env(Counter(num_envs=1), horizon=1)
    check_env(TwoSplits())


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (Unseeded, "must repeat exactly"),
        (TouchesOthers, "changed the observation of another env"),
        (FlatPicture, "one flat colour"),
        (FloatPicture, "uint8"),
        (NoPicture, "cameras"),
        (DoubleProprio, "float32"),
        (NotANumber, "proprio.* is nan in env 0"),
        (NumpyReward, r"step raised TypeError: .*must be torch tensors"),
        (NumpyProprio, r"reset: proprio is a ndarray, not a torch tensor \(3, 3\) of float32"),
        (OneBuffer, "_observe must return new tensors"),
        (StepsTheDead, "_step must leave envs alone that are not active"),
        (OneSplit, "the same in the splits train and eval"),
        (NoWords, "instruction is empty"),
        (NoPrivileged, "privileged"),
        (TakesAnything, "accepted NaN"),
        (TakesAnyShape, "wrong shape"),
        (RewardsTheDead, "not zero where"),
        (EndsTwiceOver, "terminated and truncated at once"),
        (NeverEnds, "still runs after max_episode_steps=9"),
        (KeepsEnding, "reported its end again"),
        (Gaps, "has a gap"),
    ],
)
def test_each_broken_promise_is_named(broken: type[Counter], said: str) -> None:
    with pytest.raises(CheckError, match=said):
        check_env(broken())
