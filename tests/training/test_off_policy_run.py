"""A whole off-policy run: what it leaves, that a lost tail is computed again bit for bit, and what is refused."""

import shutil
from pathlib import Path

import pytest
import torch

from embodyrl.config import resolve
from embodyrl.errors import UserError
from embodyrl.rollouts.collect import Player, collect_transitions
from embodyrl.sims.gymnasium.env import GymnasiumConfig, GymnasiumEnv
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.evaluate import evaluate_checkpoint
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from tests.training.test_runner import TIMES, assert_equal, forget_after

SECTIONS = {
    "env": {"name": "gymnasium", "id": "Pendulum-v1", "num_envs": 2, "max_episode_steps": 15},
    "policy": {"name": "flow_mlp", "width": 16, "layers": 1, "critic_width": 8, "num_denoise_steps": 2, "horizon": 2},
    "algorithm": {
        "name": "sac_flow", "num_chunks": 5, "capacity": 64, "warmup_chunks": 20, "batch_size": 16, "critic_width": 16,
    },
    "run": {
        "iterations": 6, "eval_every": 0, "eval_before": False, "eval_episodes": 4, "checkpoint_every": 2,
        "keep_checkpoints": 9, "videos": 0, "device": "cpu", "threads": 1,
    },
}  # fmt: skip


def make(out: Path, *overrides: str):
    return resolve(SECTIONS, [f"run.out={out}", *overrides])


def outcome(folder: Path):
    states, _ = checkpoint.load(checkpoint.find(folder))
    rows = [
        {k: v for k, v in row.items() if k not in TIMES}
        for row in read_metrics(folder / "metrics.jsonl")
    ]
    return states, rows


def test_a_lost_tail_is_computed_again_bit_for_bit(tmp_path):
    straight = train(make(tmp_path / "straight"))
    states, rows = outcome(straight)
    assert finished(straight) and len(rows) == 6
    assert len(states["algorithm"]["replay"]["data"]["reward"]) == 60
    assert rows[1]["gradient_steps"] == 10 and rows[-1]["gradient_steps"] == 50
    assert [row["train_episodes"] for row in rows] == [0, 2] * 3 and rows[1]["train_return"] < 0
    scored = evaluate_checkpoint(str(straight), episodes=2)
    assert scored["episodes"] == 2 and all(e["reward"] < 0 for e in scored["results"])

    folder = tmp_path / "again" / "run"
    shutil.copytree(straight, folder)
    forget_after(folder, 4)
    assert_equal(outcome(train(make(tmp_path / "again"))), outcome(straight))


def test_demonstrations_that_nobody_would_read_are_refused(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(UserError, match="sac_flow with these settings reads no demonstrations"):
        train(make(tmp_path, f"data.path={tmp_path / 'data'}"))
    # What is not there at all is told first, before an env is built.
    with pytest.raises(UserError, match="There is no data set somewhere"):
        train(make(tmp_path, "data.path=somewhere"))
    with pytest.raises(UserError, match="learns from demonstrations"):
        train(make(tmp_path, "algorithm.bc_coef=1.0"))


def test_checkpoints_that_would_cut_every_episode_are_refused(tmp_path):
    with pytest.raises(UserError, match="no episode of 15 steps would ever end"):
        train(make(tmp_path, "run.checkpoint_every=1"))


def test_episodes_go_on_from_one_rollout_to_the_next():
    env = GymnasiumEnv(GymnasiumConfig(id="Pendulum-v1", num_envs=2, max_episode_steps=11))
    player, seen = Player(env), []

    def act(obs, generator):
        seen.append(obs.proprio.clone())
        actions = torch.rand(2, 3, 1, generator=generator) * 2 - 1
        return actions, actions

    generator = torch.Generator().manual_seed(0)
    batches = [
        collect_transitions(player.ongoing_episodes(), act, 3, generator=generator)
        for _ in range(2)
    ]
    first, second = (batch.chunks for batch in batches)
    assert torch.equal(seen[3], first.next_obs.proprio[-2:])  # chunk 4 starts where chunk 3 ended
    assert first.valid.all() and not first.truncated.any()
    assert second.truncated.tolist() == [True, True, False, False, False, False]
    assert second.valid.sum(1).tolist() == [2, 2, 3, 3, 3, 3]
    assert [[e.length for e in batch.episodes] for batch in batches] == [[], [11, 11]]
    assert not torch.equal(
        second.next_obs.proprio[:2], second.obs.proprio[2:4]
    )  # the end of one, the start of another
    player.restart_episodes()
    player.begin(0)
    collect_transitions(player.ongoing_episodes(), act, 1, generator=generator)
    assert torch.equal(seen[6], seen[0])
