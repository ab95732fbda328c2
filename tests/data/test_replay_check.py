"""Good data whose initial states nobody knows: what a replay from another start may say of them."""

from functools import partial

import numpy as np
import torch

from embodyrl.data.replay_check import ReplayedEpisode, replay_findings
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.types import Conventions, EnvSpec, Obs

CONVENTIONS = Conventions(actions="delta", scale=(0.1,) * 3, gripper=(-1.0, 1.0))


class Carry(SteppedVecEnv):
    """A hand, its fingers, and a cube that it carries once they have closed around it.

    Proprio is that of a simulator's state mode: hand (3), fingers (2), cube (3), cube from the hand
    (3), and whether it is held. The cube lies where the initial state says.
    """

    def __init__(self, layout, num_envs):
        spec = EnvSpec(
            "test/carry",
            num_envs,
            4,
            12,
            "delta",
            20.0,
            40,
            {},
            layout=layout,
            conventions=CONVENTIONS,
        )
        super().__init__(spec, EnvConfig(num_envs=num_envs))
        self.hand = torch.zeros(num_envs, 3)
        self.fingers = torch.ones(num_envs)
        self.cube = torch.zeros(num_envs, 3)

    def _reset(self, env_ids, inits):
        for k, init in zip(env_ids, inits, strict=True):
            self.hand[k] = torch.tensor([0.0, 0.0, 1.0])
            place = np.random.default_rng(init).uniform(-0.5, 0.5, 2)
            self.cube[k] = torch.tensor([*place, 0.0])
            self.fingers[k] = 1.0

    @property
    def held(self):
        return ((self.hand - self.cube).norm(dim=1) < 0.15) & (self.fingers < 0.5)

    def _step(self, actions, active):
        carried = self.held[:, None]
        # Closing fingers stop at the cube.
        near = (self.hand - self.cube).norm(dim=1) < 0.15
        self.fingers = (self.fingers + 0.5 * actions[:, 3]).clamp(0, 1)
        self.fingers = torch.where(near, self.fingers.clamp_min(0.4), self.fingers)
        self.hand = self.hand + 0.1 * actions[:, :3]
        self.cube = torch.where(carried, self.cube + 0.1 * actions[:, :3], self.cube)
        never = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        return Tick(never.float(), never, never.clone(), never.clone())

    def _observe(self, env_ids):
        fingers = self.fingers[:, None].expand(-1, 2)
        parts = (self.hand, fingers, self.cube, self.cube - self.hand, self.held[:, None].float())
        return Obs({}, torch.cat(parts, dim=1), ["carry it"] * self.spec.num_envs)


LAYOUT = (("hand", 0, 3), ("robot", 3, 2), ("object", 5, 3), ("relative", 8, 3))


def episode(init: int, change=lambda actions: actions) -> ReplayedEpisode:
    """It goes to the cube, closes, lifts it and carries it elsewhere."""
    env = Carry(LAYOUT, 1)
    obs = env.reset(init=[init])
    states, actions = [], []
    for t in range(36):
        target = env.cube[0] if t < 20 else torch.tensor([0.3, -0.2, 0.8])
        move = ((target - env.hand[0]) / 0.1).clamp(-0.8, 0.8)
        action = torch.cat([move, torch.tensor([1.0 if t < 17 else -1.0])])
        states.append(obs.proprio[0].numpy())
        actions.append(action.numpy())
        obs = env.step(action[None, None]).obs
    assert env.held[0]
    return ReplayedEpisode(-1, change(np.stack(actions)), np.stack(states))


def found(change=lambda actions: actions):
    episodes = [episode(101, change), episode(102, change)]
    return [f.field for f in replay_findings(partial(Carry, LAYOUT), episodes, Conventions())]


def test_what_the_cube_does_from_another_start_is_not_held_against_good_data():
    assert found() == []


def test_faults_are_still_named():
    assert found(change=lambda a: a * [-1, 1, 1, 1]) == ["scale"]
    assert found(change=lambda a: a * [1, 1, 1, -1]) == ["gripper"]
    assert found(change=lambda a: a[:, [1, 0, 2, 3]]) == ["actions"]
    # Nothing that is known explains these.
    assert found(change=lambda a: np.roll(a, 1, axis=1)) == ["replay"]


def test_a_state_that_the_start_decides_is_not_compared():
    still = episode(101)
    frozen = np.repeat(still.states[:1], len(still.states), axis=0)
    episodes = [ReplayedEpisode(-1, still.actions, frozen)]
    (told,) = replay_findings(partial(Carry, LAYOUT), episodes, Conventions())
    assert told.field == "replay" and "are not compared" in told.text and not told.certain
