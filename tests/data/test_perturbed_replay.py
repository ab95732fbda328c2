"""Recorded successes replayed with a nudge, in the simulator."""

import numpy as np
import pytest
import torch

from embodyrl.data.collect import collect_dataset
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.perturbed_replay import NUDGE, ReplayActor, load_replays
from embodyrl.data.record import record_episodes
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test", 2, 3, 1, "m", 10.0, 20, {})
OBS = Obs({}, torch.zeros(2, 1), ["go"] * 2)


def test_one_nudge_before_success_and_none_of_the_gripper() -> None:
    record = np.tile(np.array([0.1, 0.2, -1.0], np.float32), (12, 1))
    actor = ReplayActor(SPEC, [(7, record, 10)], perturb=1.0, seed=3)
    assert [next(actor.inits) for _ in range(2)] == [7, 7]
    actor.reset([1, 0])
    taken = torch.stack([actor.act_on(OBS) for _ in range(15)], dim=1)  # (N, 15, A)
    moved = (taken[:, :12] - torch.from_numpy(record)).abs()
    assert (moved[..., -1] == 0).all() and (taken[:, 12:] == taken[:, 11:12]).all()
    for k in range(2):
        nudged = moved[k].sum(1).nonzero().flatten()
        assert len(nudged) == NUDGE and nudged[-1] - nudged[0] == NUDGE - 1 and nudged[-1] < 10
    assert not torch.equal(taken[0], taken[1])


def test_without_a_nudge_it_succeeds_again_and_with_a_large_one_often_not(tmp_path) -> None:
    config = MujocoConfig(num_envs=4, task="reach", cameras=(), renderer="none")
    collect_dataset(config, tmp_path / "data", num_episodes=6, past_success=2)
    env = MujocoEnv(config)
    try:
        again, off = (
            list(record_episodes(env, actor, 6, inits=actor.inits, keep="all"))
            for actor in (
                load_replays(tmp_path / "data", config, env, size, seed=0) for size in (0.0, 6.0)
            )
        )
    finally:
        env.close()
    known = set(open_dataset(tmp_path / "data", ["init"]).columns["init"].reshape(-1).tolist())
    assert all(e.success for e in again) and {e.init for e in again} == known and len(known) == 6
    assert not all(e.success for e in off)
    collect_dataset(
        config,
        tmp_path / "near",
        num_episodes=5,
        replay=str(tmp_path / "data"),
        perturb=3.0,
        keep_failures=True,
    )
    assert (
        set(open_dataset(tmp_path / "near", ["init"]).columns["init"].reshape(-1).tolist()) <= known
    )
    with pytest.raises(UserError, match=r"recorded in another env \(task was 'reach'"):
        other = MujocoConfig(num_envs=4, task="push", cameras=(), renderer="none")
        collect_dataset(other, tmp_path / "x", num_episodes=1, replay=str(tmp_path / "data"))


def test_what_makes_no_sense_is_refused(tmp_path) -> None:
    with pytest.raises(UserError, match="give neither a policy nor noise"):
        collect_dataset(MujocoConfig(), tmp_path / "a", num_episodes=1, replay="x", noise=0.1)
