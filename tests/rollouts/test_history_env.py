"""``env.history``: the same episodes, and what was seen before each observation."""

import dataclasses

import pytest
import torch

from embodyrl.build import make_env
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.errors import UserError
from embodyrl.rollouts.batches import Transitions
from embodyrl.rollouts.history_env import HistoryEnv, remembering
from embodyrl.rollouts.replay_buffer import ReplayBuffer
from embodyrl.sims.mujoco.config import MujocoConfig
from embodyrl.types import EnvSpec, Obs
from embodyrl.world_models.config import WorldModelConfig


class Counter(SteppedVecEnv):
    """Shows how many actions were executed; action 1 solves it, action -1 breaks it."""

    def __init__(self, num_envs=3):
        spec = EnvSpec("test/counter", num_envs, 1, 2, "none", 10.0, 20, {"eye": (8, 8)})
        super().__init__(spec, EnvConfig(num_envs=num_envs))
        self.count = torch.zeros(num_envs)
        self.start = torch.zeros(num_envs)

    def _reset(self, env_ids, inits):
        self.start[env_ids] = 100.0 * torch.tensor(inits, dtype=torch.float32)
        self.count[env_ids] = 0

    def _step(self, actions, active):
        self.count += active
        solved, broken = actions[:, 0] == 1, actions[:, 0] == -1
        return Tick(self.count.clone(), solved & active, solved & active, broken & active)

    def _observe(self, env_ids):
        n = self.spec.num_envs
        proprio = torch.stack([self.start + self.count, self.count], dim=1)
        picture = self.count.view(-1, 1, 1, 1).expand(n, 8, 8, 3).to(torch.uint8)
        return Obs({"eye": picture}, proprio, ["count"] * n)


def seen(obs):
    """What is seen of each env, the oldest first."""
    return torch.stack([frame.proprio[:, 0] for frame in obs.frames()], dim=1).tolist()


def zeros(*shape):
    return torch.zeros(*shape, 1)


@pytest.mark.parametrize("history", [2, 3])
@pytest.mark.parametrize("horizon", [1, 2, 5])
def test_chunks_are_those_of_the_env_itself(history, horizon):
    plain, env = Counter(), HistoryEnv(Counter(), history)
    plain.reset(init=[0, 1, 2])
    env.reset(init=[0, 1, 2])
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        actions = torch.randint(-9, 10, (3, horizon, 1), generator=generator) / 9.0
        actions[0] *= 0.5  # never ends
        a, b = plain.step(actions), env.step(actions)
        for field in dataclasses.fields(a):
            mine, theirs = getattr(b, field.name), getattr(a, field.name)
            if isinstance(theirs, torch.Tensor):
                assert torch.equal(mine, theirs), field.name
        running = ~a.fault
        assert torch.equal(a.obs.proprio[running], b.obs.proprio[running])
        assert torch.equal(a.log["steps"], b.log["steps"])
        over = b.done.nonzero().flatten().tolist()
        plain.reset(over, init=over)
        env.reset(over, init=over)


def test_what_was_seen_before():
    env = HistoryEnv(Counter(), 3)
    obs = env.reset(init=[0, 1, 2])
    assert env.spec.history == 3
    assert seen(obs) == [[0, 0, 0], [100, 100, 100], [200, 200, 200]]
    assert seen(env.step(zeros(3, 4)).obs)[0] == [2, 3, 4]
    assert seen(env.step(zeros(3, 1)).obs)[1] == [103, 104, 105]
    # One env begins anew, the others still know what they saw.
    obs = env.reset([1], init=[3])
    assert seen(obs) == [[3, 4, 5], [300, 300, 300], [203, 204, 205]]
    assert [frame.images["eye"][0, 0, 0, 0].item() for frame in obs.frames()] == [3, 4, 5]
    # An env that has ended sees what it saw; where one broke, the chunk never was.
    actions = zeros(3, 2)
    actions[0, 0], actions[2, 1] = 1.0, -1.0
    step = env.step(actions)
    assert step.terminated.tolist() == [True, False, False]
    assert step.fault.tolist() == [False, False, True] and step.valid.sum(1).tolist() == [1, 2, 0]
    assert seen(step.obs) == [[4, 5, 6], [300, 301, 302], [203, 204, 205]]


class Assisted(Counter):
    """A person takes every second action, and does the opposite."""

    def _step(self, actions, active):
        tick = super()._step(actions, active)
        human = self.count % 2 == 0
        taken = torch.where(human[:, None], -actions, actions)
        return dataclasses.replace(tick, human=human, taken=taken)


def test_what_a_person_did_is_kept():
    plain, env = Assisted(1), HistoryEnv(Assisted(1), 2)
    for one in (plain, env):
        one.reset(init=[0])
    for last in (0.5, 1.0):
        actions = torch.tensor([[[0.25], [0.5], [last], [0.75]]])
        a, b = plain.step(actions), env.step(actions)
        assert torch.equal(a.human, b.human) and torch.equal(a.taken, b.taken)
    assert b.terminated.all() and b.human.any()


def test_a_dream_has_no_picture_in_between():
    with pytest.raises(UserError, match=r"env\.history is 2, but a dream has one picture"):
        WorldModelConfig(history=2)


def test_one_observation_needs_no_memory():
    env = Counter()
    assert remembering(env, 1) is env and env.reset().previous is None


def test_a_replay_buffer_keeps_what_was_seen_before():
    env = HistoryEnv(Counter(), 2)
    before = env.reset(init=[0, 1, 2])
    step = env.step(zeros(3, 2))
    buffer = ReplayBuffer(8, env.spec, 2)
    buffer.add(
        Transitions(
            before, zeros(3, 2), step.reward, step.valid, step.terminated, step.truncated, step.obs
        )
    )
    kept = buffer.rows(torch.tensor([1, 0]))
    assert seen(kept.next_obs) == [[101, 102], [1, 2]] and seen(kept.obs) == [[100, 100], [0, 0]]
    assert kept.next_obs.previous.images["eye"][0, 0, 0, 0] == 1


def test_it_is_asked_for_by_the_env_s_config():
    config = MujocoConfig(task="reach", renderer="none", cameras=(), num_envs=2, num_threads=1)
    env = make_env(dataclasses.replace(config, history=2))
    obs = env.reset(init=[0, 1])
    assert env.spec.history == 2 and torch.equal(obs.previous.proprio, obs.proprio)
    after = env.step(torch.ones(2, 3, env.spec.action_dim)).obs
    assert (after.previous.proprio - after.proprio).abs().max() > 1e-4
    env.close()
