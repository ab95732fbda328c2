"""``collect_rollout`` against a slow loop over single envs that keeps its own books, and what it promises beside."""

from itertools import cycle

import pytest
import torch
from chaser import Chaser, collect, make_env

from embodyrl.build import make_policy
from embodyrl.checks import check_env
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.fault_watch import FaultWindow, GuardedEnv
from embodyrl.sims.mujoco.env import MujocoEnv
from embodyrl.types import Obs


def test_collect_equals_a_slow_loop_of_single_envs():
    num_envs, num_chunks, inits = 4, 8, range(40, 80)
    policy = Chaser()
    batch = collect(make_env(num_envs), policy, num_chunks, inits, seed=0)

    generator, envs = torch.Generator().manual_seed(0), [make_env(1) for _ in range(num_envs)]
    queue = iter(inits)
    current = [next(queue) for _ in range(num_envs)]
    seen = [env.reset(init=[i]) for env, i in zip(envs, current, strict=True)]
    total, length, episodes, env_steps = [0.0] * num_envs, [0] * num_envs, [], 0
    began, ended = [0] * num_envs, []
    for t in range(num_chunks):
        obs = Obs.cat(seen)
        sample = policy.sample(obs, generator=generator, mode="train")
        rows = slice(t * num_envs, (t + 1) * num_envs)
        assert torch.equal(batch.obs.proprio[rows], obs.proprio)
        assert torch.equal(batch.obs.privileged[rows], obs.privileged)
        assert batch.obs.instruction[rows] == obs.instruction
        assert torch.equal(batch.trace.x[rows], sample.trace.x)
        assert torch.equal(batch.trace.stochastic[rows], sample.trace.stochastic)
        assert torch.equal(batch.logprob[rows], sample.logprob)
        assert torch.equal(batch.value[t], sample.value)
        for k, env in enumerate(envs):
            # One action at a time, stopping by hand.
            steps, over = 0, False
            while steps < 5 and not over:
                step = env.step(sample.actions[k : k + 1, steps : steps + 1])
                assert batch.reward[t, k, steps] == step.reward[0, 0] and batch.valid[t, k, steps]
                total[k] += float(step.reward)
                steps, length[k], over = steps + 1, length[k] + 1, bool(step.done)
            env_steps += steps
            assert not batch.valid[t, k, steps:].any() and not batch.reward[t, k, steps:].any()
            assert (
                batch.terminated[t, k] == step.terminated[0]
                and batch.truncated[t, k] == step.truncated[0]
            )
            # Of the observation where the chunk ended, before any reset.
            assert batch.next_value[t, k] == policy.value(step.obs)[0]
            seen[k] = step.obs
            if over:
                row = (current[k], bool(step.success), total[k], length[k])
                ended.append((began[k] + 12, row))
                current[k], total[k], length[k] = next(queue), 0.0, 0
                began[k] = 5 * (t + 1)
                seen[k] = env.reset(init=[current[k]])
        # Scored are those whose limit of 12 actions has passed, however early they ended.
        episodes += [row for due, row in ended if 5 * t < due <= 5 * (t + 1)]
    assert [(e.init, e.success, e.reward, e.length) for e in batch.episodes] == episodes
    assert batch.env_steps == env_steps == int(batch.valid.sum())
    assert batch.success_rate == sum(e[1] for e in episodes) / len(episodes)
    assert 0 < len(episodes) < len(ended)
    # The comparison covers every case.
    assert batch.terminated.any() and batch.truncated.any()
    ended = batch.terminated | batch.truncated
    assert (ended & ~batch.valid.all(-1)).any() and (~ended).any()
    assert all(e.task == "reach" for e in batch.episodes)


def assert_same(a, b):
    for name in ("logprob", "value", "next_value", "reward", "valid", "terminated", "truncated"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    assert torch.equal(a.obs.proprio, b.obs.proprio) and torch.equal(a.trace.x, b.trace.x)
    assert a.episodes == b.episodes and a.env_steps == b.env_steps


def test_a_rollout_is_a_function_of_parameters_inits_and_generator():
    env = make_env(3)
    policy = make_policy(
        FlowVLAConfig(width=32, layers=1, text_layers=0, critic_width=16), env.spec, seed=0
    )

    def run(seed, inits, env=env):
        return collect(env, policy, 4, inits, seed=seed)

    first = run(0, [5, 6, 7, 8])
    other = run(1, [5, 6, 7, 8])
    assert not torch.equal(first.trace.x, other.trace.x)
    assert not torch.equal(first.obs.proprio, run(0, [1, 2, 3, 4]).obs.proprio)
    assert_same(run(0, [5, 6, 7, 8]), first)  # whatever the env did in between
    assert_same(run(0, [5, 6, 7, 8], make_env(3, num_threads=2)), first)


def test_initial_states_are_taken_in_order_and_there_must_be_some():
    batch = collect(make_env(2, max_episode_steps=5), Chaser(), 3, cycle([7, 8, 9]))
    assert [e.init for e in batch.episodes] == [7, 8, 9, 7, 8, 9]
    with pytest.raises(UserError, match="need initial states"):
        collect(make_env(2), Chaser(), 1, [])


class Breaks(MujocoEnv):
    """Its env 1 explodes at the third action of its first episode."""

    broken = False

    def _step(self, actions, active):
        if not self.broken and self._elapsed[1] == 2:
            self.broken, self._state[1, 15] = True, float("nan")
        return super()._step(actions, active)


def test_a_broken_simulation_costs_its_chunk_and_counts_as_no_episode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes MUJOCO_LOG.TXT where it stands
    inits = range(20)
    batch = collect(make_env(3, Breaks), Chaser(), 2, inits, seed=0)
    clean = collect(make_env(3), Chaser(), 2, inits, seed=0)
    assert not batch.valid[0, 1].any() and not batch.reward[0, 1].any()
    assert batch.truncated[0, 1] and not batch.terminated[0, 1]
    assert batch.next_value[0, 1] == batch.value[0, 1]  # the last good observation
    assert batch.valid[1, 1].any()  # a new episode
    assert 1 not in [e.init for e in batch.episodes]
    assert torch.equal(batch.obs.proprio[[0, 2, 3, 5]], clean.obs.proprio[[0, 2, 3, 5]])
    assert all(
        torch.isfinite(x).all()
        for x in (batch.value, batch.next_value, batch.reward, batch.obs.proprio)
    )


class BreaksOften(MujocoEnv):
    """Its env 1 explodes at the third action of every episode."""

    def _step(self, actions, active):
        if self._elapsed[1] == 2:
            self._state[1, 15] = float("nan")
        return super()._step(actions, active)


def test_a_simulator_that_breaks_too_often_stops_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    env = make_env(3, BreaksOften)
    watched = GuardedEnv(env)

    def run(env, chunks):
        collect(env, Chaser(), chunks, range(20))

    run(watched, 4)  # four faults are borne; the fifth, in the next rollout, is not
    with pytest.raises(
        UserError, match=r"broke 5 times within 100 episodes.*env 1 \(initial state 1\)"
    ):
        run(watched, 1)
    env.guards_itself = True  # as a pool does
    run(env, 6)
    check_env(GuardedEnv(make_env(3)))


def test_faults_are_counted_over_the_last_hundred_episodes():
    faults = FaultWindow()
    for _ in range(20):
        faults.begin(26)
        assert faults.add() is None
    faults.begin(10)
    assert "5 times" in (faults.add() or "")


def test_between_may_give_the_rollout_up():
    calls = []

    def between():
        calls.append(0)
        if len(calls) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        collect(make_env(2), Chaser(), 9, range(9), between=between)
    assert len(calls) == 3
