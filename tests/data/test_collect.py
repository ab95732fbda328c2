import subprocess
import sys
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from embodyrl.data.collect import collect_dataset, shuffled_states
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.lerobot_write import DatasetWriter
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.partial import EpisodeParts
from embodyrl.data.record import CollectStats, record_episodes
from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.sims.mujoco.experts import ScriptedExpert
from embodyrl.types import EnvSpec, Obs


def record(num_envs, n, *, noise=0.0, **options):
    env = MujocoEnv(MujocoConfig(num_envs=num_envs, task="pick,reach", cameras=(), renderer="none"))
    try:
        return list(
            record_episodes(
                env, ScriptedExpert(env, noise=noise, seed=1), n, noise=noise, **options
            )
        )
    finally:
        env.close()


def test_recordings_hold_what_was_seen_done_and_earned():
    stats = CollectStats()
    episodes = record(4, 6, stats=stats)
    assert [e.init for e in episodes] == [0, 1, 2, 3, 4, 5] and {e.task for e in episodes} == {
        "pick",
        "reach",
    }
    assert stats.kept == stats.solved == stats.tried == 6 and stats.env_steps == sum(
        map(len, episodes)
    )
    env = MujocoEnv(MujocoConfig(num_envs=1, task="pick,reach", cameras=(), renderer="none"))
    for episode in episodes[:2]:  # replaying the actions gives the same episode
        obs = env.reset(init=[episode.init])
        assert obs.instruction == [episode.instruction]
        for t in range(len(episode)):
            np.testing.assert_allclose(obs.proprio[0].numpy(), episode.proprio[t], atol=1e-6)
            step = env.step(torch.from_numpy(episode.actions[t])[None, None])
            assert float(step.reward[0, 0]) == pytest.approx(float(episode.reward[t]), abs=1e-6)
            obs = step.obs
        assert bool(step.success[0]) and bool(step.done[0])
    env.close()


@pytest.mark.parametrize("size", [64, 256])
def test_pictures_of_any_size_are_kept(size, tmp_path):
    env = MujocoEnv(MujocoConfig(num_envs=1, task="reach", image_size=size))
    [episode] = record_episodes(env, ScriptedExpert(env), 1)
    env.close()
    with DatasetWriter(tmp_path / "data", env.spec) as writer:
        writer.add(episode)
    kept = load_demonstrations(tmp_path / "data", 1).images["front"].astype(float)
    seen = episode.images["front"][: len(kept)]
    psnr = 10 * np.log10(255**2 / ((kept - seen) ** 2).mean())
    assert psnr > {64: 40, 256: 35}[size], psnr


def test_the_number_of_envs_does_not_choose_the_episodes():
    few, many = record(2, 5), record(7, 5)
    assert [e.init for e in few] == [e.init for e in many]
    for a, b in zip(few, many, strict=True):
        np.testing.assert_allclose(a.actions, b.actions, atol=1e-5)


def test_failures_are_kept_on_request_alone():
    everything = record(8, 24, noise=1.2, keep="all")
    assert 0 < sum(e.success for e in everything) < 24 and all(e.noise == 1.2 for e in everything)
    solved = record(8, 6, noise=1.2)
    failed = record(8, 6, noise=1.2, keep="failure")
    assert all(e.success for e in solved) and not any(e.success for e in failed)


def test_an_expert_that_always_fails_is_reported():
    with pytest.raises(UserError, match="could be kept"):
        record(8, 4, noise=1e6)


@dataclass(frozen=True)
class CorridorConfig(EnvConfig):
    num_states: int = 6


class Corridor(SteppedVecEnv):
    """Walk right from position ``init`` to the end of a corridor; envs at state 2 break."""

    def __init__(self, config):
        spec = EnvSpec(
            "corridor",
            config.num_envs,
            1,
            1,
            "step",
            10.0,
            8,
            {},
            num_init_states=config.num_states,
        )
        super().__init__(spec, config)
        self.position = torch.zeros(config.num_envs)

    def _reset(self, env_ids, inits):
        self.position[env_ids] = torch.tensor([float(i) for i in inits])

    def _step(self, actions, active):
        self.position += torch.where(active, actions[:, 0], 0.0)
        success = self.position >= 7.0
        fault = torch.as_tensor(self.init == 2)
        return Tick(success.float(), success, success, fault)

    def _observe(self, env_ids):
        return Obs({}, self.position[:, None].clone(), ["walk"] * self.spec.num_envs)


class Walker:
    def __init__(self, env):
        self.env = env

    def reset(self, env_ids):
        pass

    def act(self):
        return torch.ones(self.env.spec.num_envs, 1)


def test_broken_episodes_are_replaced():
    env, stats = Corridor(CorridorConfig(num_envs=3)), CollectStats()
    episodes = list(record_episodes(env, Walker(env), 5, stats=stats))
    assert [e.init for e in episodes] == [0, 1, 3, 4, 5] and stats.faults == 1 and stats.tried == 5
    assert [len(e) for e in episodes] == [7, 6, 4, 3, 2]


def test_running_out_of_initial_states_is_said():
    env = Corridor(CorridorConfig(num_envs=3))
    with pytest.raises(UserError, match="ran out after 5 of 9"):
        list(record_episodes(env, Walker(env), 9, inits=shuffled_states(env.spec, 0)))


def test_initial_states_take_turns_and_are_used_once():
    spec = EnvSpec("e", 1, 1, 1, "m", 1.0, 1, {}, tasks=("a", "b", "c"), num_init_states=30)
    order = list(shuffled_states(spec, 0))
    assert sorted(order) == list(range(30)) and [i % 3 for i in order] == [0, 1, 2] * 10
    assert order != list(shuffled_states(spec, 1)) and order == list(shuffled_states(spec, 0))
    endless = shuffled_states(EnvSpec("e", 1, 1, 1, "m", 1.0, 1, {}, tasks=("a", "b")), 0)
    drawn = [next(endless) for _ in range(100)]
    assert len(set(drawn)) == 100 and [i % 2 for i in drawn] == [0, 1] * 50 and max(drawn) < 2**31


def test_collecting_where_something_is_already_fails_before_any_work(tmp_path):
    with pytest.raises(UserError, match="exists already"):
        collect_dataset(MujocoConfig(), tmp_path, num_episodes=1)


KILLED = """
import os, signal, sys
from embodyrl.data import partial
from embodyrl.data.collect import collect_dataset
from embodyrl.sims.mujoco.env import MujocoConfig
add = partial.EpisodeParts.add
def add_and_die(self, recording):
    add(self, recording)
    if len(self) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
partial.EpisodeParts.add = add_and_die
config = MujocoConfig(num_envs=2, task="reach", cameras=(), renderer="none")
collect_dataset(config, sys.argv[1], num_episodes=5)
"""


def test_kill_9_loses_no_finished_episode_and_the_same_command_goes_on(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(killed)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -9, done.stderr
    assert not killed.exists() and len(list((tmp_path / "killed.parts").glob("*.npz"))) == 3
    with pytest.raises(UserError, match=r"killed.parts holds an unfinished collection"):
        open_dataset(killed)
    config = MujocoConfig(num_envs=2, task="reach", cameras=(), renderer="none")
    with pytest.raises(UserError, match=r"other settings \(seed was 0, now 1\).*another --out"):
        collect_dataset(config, killed, num_episodes=5, seed=1)
    newest = tmp_path / "killed.parts" / "000002.npz"
    newest.write_bytes(newest.read_bytes()[:-99])  # as a power cut may leave it
    stats = collect_dataset(replace(config, num_envs=3), killed, num_episodes=5)
    assert stats.kept == 3 and not (tmp_path / "killed.parts").exists()
    collect_dataset(config, whole, num_episodes=5)
    columns = ["action", "observation.state", "init", "success"]
    a, b = open_dataset(killed, columns).columns, open_dataset(whole, columns).columns
    for name in a:
        np.testing.assert_allclose(a[name], b[name], atol=1e-5)


def test_a_recording_is_kept_as_it_was(tmp_path):
    env = MujocoEnv(MujocoConfig(num_envs=1, task="reach", renderer="none", cameras=()))
    recording = next(record_episodes(env, ScriptedExpert(env), 1))
    env.close()
    recording.images = {"a/b": np.arange(len(recording) * 12, dtype=np.uint8).reshape(-1, 2, 2, 3)}
    recording.depth = {"a/b": np.arange(len(recording) * 4, dtype=np.uint16).reshape(-1, 2, 2)}
    EpisodeParts(tmp_path / "x", {"seed": (0,)}).add(recording)
    parts = EpisodeParts(tmp_path / "x", {"seed": [0]})
    (again,) = parts
    assert vars(again).keys() == vars(recording).keys() and type(again.success) is bool
    assert (
        all(np.array_equal(again.images[k], v) for k, v in recording.images.items())
        and again.task == "reach"
    )
    assert again.depth.keys() == {"a/b"} and again.depth["a/b"].dtype == np.uint16
    assert np.array_equal(again.depth["a/b"], recording.depth["a/b"])
    assert (
        np.array_equal(again.actions, recording.actions)
        and again.instruction == recording.instruction
    )
    parts.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_collection_that_kept_nothing_does_not_bind_the_next_one(tmp_path):
    EpisodeParts(tmp_path / "x", {"seed": 0})
    assert len(EpisodeParts(tmp_path / "x", {"seed": 1, "policy": "runs/a"})) == 0
