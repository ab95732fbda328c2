import numpy as np
import pytest
import torch

from embodyrl.data.collect import collect_dataset
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.policy_actor import PolicyActor
from embodyrl.data.record import record_episodes
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.sims.mujoco.experts import ScriptedExpert
from embodyrl.types import ActionSample, EnvSpec, Obs

SPEC = EnvSpec("test", 3, 4, 1, "m", 10.0, 20, {})


class Counter:
    """Its chunks count up from what is seen, so that every action tells when it was decided."""

    asked = 0
    chooses = False
    asked_for = ""

    def sample(self, obs, *, generator, mode):
        self.asked_for = mode
        self.asked += len(obs)
        steps = torch.arange(4.0)[None, :, None].expand(len(obs), 4, 4)
        return ActionSample(0.01 * (obs.proprio[:, None] + steps))


def seen(*values: float) -> Obs:
    return Obs({}, torch.tensor(values)[:, None], ["go"] * len(values))


def test_a_chunk_is_handed_out_one_action_at_a_time_and_an_episode_starts_with_a_new_one() -> None:
    policy = Counter()
    actor = PolicyActor(SPEC, policy)
    actor.reset([0, 1, 2])
    taken = []
    for t in range(6):
        if t == 2:
            actor.reset([1])
        taken.append((100 * actor.act_on(seen(t, t, t))[:, 0]).round().tolist())
    assert [row[0] for row in taken] == [0, 1, 2, 3, 4, 5]  # decided at 0 and at 4
    assert [row[1] for row in taken] == [0, 1, 2, 3, 4, 5]
    assert policy.asked == 3 + 1 + 2  # at 0 all, at 2 the one that was reset, at 4 the two others
    assert taken[4] == [4, 4, 4]
    assert policy.asked_for == "train"


def test_a_policy_that_chooses_among_proposals_does_so_here_too() -> None:
    policy = Counter()
    policy.chooses = True
    actor = PolicyActor(SPEC, policy)
    actor.reset([0, 1, 2])
    assert actor.act_on(seen(1, 2, 3)).shape == (3, 4) and policy.asked == 3
    assert policy.asked_for == "eval"


def test_a_policy_acts_without_its_exploration_noise_where_that_is_asked_for() -> None:
    policy = Counter()
    actor = PolicyActor(SPEC, policy, noise_free=True)
    actor.reset([0, 1, 2])
    actor.act_on(seen(1, 2, 3))
    assert policy.asked_for == "eval"


def test_a_share_of_the_episodes_derails_and_goes_on_as_chance_will() -> None:
    actor, shares = PolicyActor(SPEC, Counter(), derail=0.5, seed=1), []
    for _ in range(40):
        actor.reset([0, 1, 2])
        actions = torch.stack([actor.act_on(seen(0, 0, 0)) for _ in range(20)])
        assert actions.abs().max() <= 1
        shares += (
            (actions[..., -1].abs() == 1).any(0)
        ).tolist()  # a wandering gripper is quite open or quite closed
        assert (actions[0, :, -1].abs() < 1).all()  # nobody starts derailed
    assert 0.35 < np.mean(shares) < 0.65


def test_what_a_solved_task_looks_like_is_recorded_and_no_more() -> None:
    env = MujocoEnv(
        MujocoConfig(
            num_envs=4, task="reach", cameras=(), renderer="none", terminate_on_success=False
        )
    )
    try:
        episodes = list(record_episodes(env, ScriptedExpert(env), 6, past_success=3))
    finally:
        env.close()
    for episode in episodes:
        first = int(episode.solved.argmax())
        assert episode.success and len(episode) == first + 1 + 3 < env.spec.max_episode_steps


def test_past_success_is_how_it_was_recorded_and_not_another_env(tmp_path) -> None:
    config = MujocoConfig(num_envs=4, task="reach", cameras=(), renderer="none")
    collect_dataset(config, tmp_path / "data", num_episodes=3, past_success=3)
    origin = open_dataset(tmp_path / "data").origin["config"]
    assert origin["terminate_on_success"] is True  # what a world model of it scores policies in
    solved = open_dataset(tmp_path / "data", ["next.success", "episode_index"]).columns
    for episode in range(3):
        assert solved["next.success"][solved["episode_index"] == episode].reshape(-1).argmax() > 0


def test_an_actor_that_makes_no_sense_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="noise is the expert's"):
        collect_dataset(MujocoConfig(), tmp_path / "a", num_episodes=1, policy="runs/x", noise=0.1)
    with pytest.raises(UserError, match="noise_free is a policy's"):
        collect_dataset(MujocoConfig(), tmp_path / "a", num_episodes=1, noise_free=True)
    with pytest.raises(UserError, match="derail needs a policy"):
        collect_dataset(MujocoConfig(), tmp_path / "a", num_episodes=1, derail=0.1)
