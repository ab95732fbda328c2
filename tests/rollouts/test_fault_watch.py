"""What is wrong with a simulator costs its episode, in every way episodes are played, and no other one."""

import random
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import count

import pytest
import torch
from chaser import Chaser, collect, make_env

from embodyrl.checks import check_env
from embodyrl.data.record import CollectStats, record_episodes
from embodyrl.errors import UserError
from embodyrl.rollouts.collect import Player, collect_episodes, collect_transitions
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.rollouts.fault_watch import FaultWindow, GuardedEnv, guarded
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv

NAN, INF = float("nan"), float("inf")


def put(field, value):
    """A change of one number of env ``k``."""

    def change(step, k):
        tensor = getattr(step, field, None)
        (tensor if tensor is not None else getattr(step.obs, field))[k, -1] = value
        return step

    return change


def retyped(field, fn):
    """A change of a whole field."""

    def change(step, k):
        if hasattr(step, field):
            return replace(step, **{field: fn(getattr(step, field))})
        return replace(step, obs=replace(step.obs, **{field: fn(getattr(step.obs, field))}))

    return change


ONE = {
    "reward nan": (put("reward", NAN), r"reward\[4\] is nan"),
    "reward inf": (put("reward", -INF), r"reward\[4\] is -inf"),
    "proprio nan": (put("proprio", NAN), r"proprio\[\d+\] is nan"),
    "state inf": (put("privileged", INF), r"privileged\[\d+\] is inf"),
}
ALL = {
    "double": (retyped("proprio", torch.Tensor.double), "proprio is .* of float64, not .* float32"),
    "shape": (retyped("privileged", lambda x: x[:, :-1]), r"privileged is \(3, \d+\)"),
    "reward of a step": (retyped("reward", lambda x: x[:, 0]), r"reward is \(3,\) of float32, not"),
    "flag of int": (retyped("success", torch.Tensor.int), r"success is \(3,\) of int32, not"),
    "done of float": (retyped("terminated", torch.Tensor.float), "terminated is .* of float32"),
    "no privileged": (retyped("privileged", lambda x: None), "privileged is missing"),
    "camera": (retyped("images", lambda x: {"front": x}), r"cameras are \['front'\]"),
    "words": (retyped("instruction", lambda x: x[:1]), "1 instructions for 3 envs"),
}


class Faulty(MujocoEnv):
    """Hands over what ``change`` makes of its step ``at``, in env 1 or in all of them."""

    at, change, calls = -1, None, 0

    def step(self, actions):
        step = super().step(actions)
        self.calls += 1
        return self.change(step, 1) if self.calls - 1 == self.at else step


def faulty(change, at=1, num_envs=3):
    env = make_env(num_envs, Faulty)
    env.change, env.at = change, at
    return env


def tape(num_envs=3, chunks=6, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(num_envs, 5, 4, generator=generator) * 2 - 1 for _ in range(chunks)]


def same(a, b, rows):
    for name in ("reward", "terminated", "truncated", "valid", "success", "fault"):
        assert torch.equal(getattr(a, name)[rows], getattr(b, name)[rows]), name
    assert torch.equal(a.obs.proprio[rows], b.obs.proprio[rows])
    assert torch.equal(a.obs.privileged[rows], b.obs.privileged[rows])


def masked(step, rows, before):
    assert step.fault[rows].all() and step.truncated[rows].all()
    assert not step.terminated[rows].any() and not step.success[rows].any()
    assert not step.valid[rows].any() and not step.reward[rows].any()
    assert torch.equal(step.obs.proprio[rows], before.proprio[rows])


@pytest.mark.parametrize("kind", ONE)
def test_a_number_that_is_none_costs_its_env_one_episode(kind, capsys):
    change, words = ONE[kind]
    env, quiet = guarded(faulty(change)), guarded(make_env(3))
    for e in (env, quiet):
        e.reset(init=[7, 8, 9])
    actions, others = tape(), [0, 2]
    before = env.step(actions[0])
    quiet.step(actions[0])
    step, normal = env.step(actions[1]), quiet.step(actions[1])
    masked(step, [1], before.obs)
    same(step, normal, others)
    said = capsys.readouterr().err
    assert "env 1 (initial state 8) of mujoco/reach broke" in said
    assert re.search(words, said), said
    # Until its reset it stays masked, whatever the simulator goes on to do.
    step, normal = env.step(actions[2]), quiet.step(actions[2])
    assert not step.valid[1].any() and not step.done[1] and not step.fault.any()
    same(step, normal, others)
    env.reset([1], init=[4])
    quiet.reset([1], init=[4])
    same(env.step(actions[3]), quiet.step(actions[3]), [0, 1, 2])


@pytest.mark.parametrize("kind", ALL)
def test_a_field_of_a_wrong_kind_is_one_fault_of_all_envs(kind, capsys):
    change, words = ALL[kind]
    env = guarded(faulty(change))
    env.reset(init=[7, 8, 9])
    before = env.step(tape()[0])
    masked(env.step(tape()[1]), [0, 1, 2], before.obs)
    said = capsys.readouterr().err
    assert said.count("WARNING") == 1 and "Their episodes do not count" in said
    assert "envs 0, 1, 2 (initial states 7; 8; 9) of mujoco/reach broke: " in said
    assert re.search(words, said), said
    again = guarded(make_env(3))
    for e in (env, again):
        e.reset(init=[1, 2, 3])
    same(env.step(tape()[2]), again.step(tape()[2]), [0, 1, 2])


def test_a_hundred_faults_at_random_leave_every_other_env_as_it_was():
    rng = random.Random(0)
    env, quiet = faulty(None), guarded(make_env(3))
    tries = 0
    for number in range(100):
        # Each try has a guard of its own: so many faults would stop a run.
        watched = guarded(env)
        field = rng.choice(["reward", "proprio", "privileged"])
        env.change = put(field, rng.choice([NAN, INF, -INF]))
        env.calls, env.at = 0, 0
        init = [rng.randrange(1000) for _ in range(3)]
        for e in (watched, quiet):
            e.reset(init=init)
        for t, actions in enumerate(tape(chunks=1, seed=number)):
            step, normal = watched.step(actions), quiet.step(actions)
            broken = t == env.at and not normal.done.any() and bool(normal.valid[1].any())
            same(step, normal, [0, 2])
            tries += broken
            if broken:
                assert step.fault.tolist() == [False, True, False] and not step.valid[1].any()
        assert torch.isfinite(step.reward).all() and torch.isfinite(step.obs.proprio).all()
    assert tries > 80


class Raises(MujocoEnv):
    """Raises in a step or a reset of the initial states in ``bad``."""

    bad, where = (), "step"

    def _step(self, actions, active):
        if self.where == "step" and any(self.init[k] in self.bad for k in active.nonzero()):
            raise ArithmeticError("the gripper is gone")
        return super()._step(actions, active)

    def _reset(self, env_ids, inits):
        if self.where == "reset" and set(inits) & set(self.bad):
            raise ArithmeticError("the gripper is gone")
        super()._reset(env_ids, inits)

    def _observe(self, env_ids):
        obs = super()._observe(env_ids)
        if self.where == "first look":
            for k in range(3):
                if self.init[k] in self.bad and self._elapsed[k] == 0:
                    obs.proprio[k] = NAN
        return obs


def raising(where, bad=(5,)):
    env = make_env(3, Raises)
    env.where, env.bad = where, bad
    return env


def test_an_env_that_raises_costs_its_episodes_and_then_the_run(capsys):
    env = guarded(raising("step"))
    before = env.reset(init=[4, 5, 6])
    masked(env.step(tape()[0]), [0, 1, 2], before)
    said = capsys.readouterr().err
    assert "envs 0, 1, 2 (initial states 4; 5; 6) of mujoco/reach broke: " in said
    assert "ArithmeticError: the gripper is gone" in said
    env.reset(init=[1, 2, 3])
    assert env.step(tape()[0]).valid.any(1).all()
    with pytest.raises(UserError, match=r"(?s)broke 5 times within 100 episodes.*gripper is gone"):
        for _ in range(4):
            env.reset(init=[4, 5, 6])
            env.step(tape()[0])


def test_a_simulator_of_many_envs_that_raises_now_and_then_does_not_stop_the_run(capsys):
    """One raise costs all eight episodes of a step, and is one fault, not eight."""
    env = make_env(8, Faulty)
    env.change = retyped("proprio", torch.Tensor.double)
    watched = guarded(env)
    for number in range(30):
        env.calls = 0
        env.at = 0 if number % 20 == 5 else -1  # in one of 20 rounds: 5% of the episodes
        before = watched.reset(init=list(range(8)))
        step = watched.step(tape(8, 1)[0])
        if env.at == 0:
            masked(step, list(range(8)), before)
        else:
            assert step.valid.any(1).all() and not step.fault.any()
    assert capsys.readouterr().err.count("WARNING") == 2


@pytest.mark.parametrize("num_envs", [1, 8, 150])
def test_a_simulator_that_always_raises_stops_the_run_at_the_fifth_time(num_envs):
    """However many episodes begin in between."""

    class Gone(MujocoEnv):
        def step(self, actions):
            raise ArithmeticError("the GPU is gone")

    env = guarded(make_env(num_envs, Gone))
    for number in range(5):
        env.reset(init=list(range(num_envs)))
        with pytest.raises(UserError, match="broke 5 times") if number == 4 else nullcontext():
            env.step(torch.zeros(num_envs, 5, 4))


def test_numbers_that_are_none_in_all_envs_at_once_are_one_fault(capsys):
    def all_nan(step, k):
        step.obs.proprio[:, 2] = NAN
        return step

    env = guarded(faulty(all_nan, at=0, num_envs=8))
    before = env.reset(init=list(range(8)))
    masked(env.step(tape(8)[0]), list(range(8)), before)
    said = capsys.readouterr().err
    assert "envs 0, 1, 2, 3 and 4 more (initial states 0; 1; 2; 3 and 4 more) of" in said
    assert said.count("WARNING") == 1 and "proprio[2] is nan" in said
    env.reset(init=list(range(8)))
    assert env.step(tape(8)[0]).valid.any(1).all()


def test_a_few_broken_envs_of_a_thousand_do_not_stop_the_run():
    window = FaultWindow(1000)
    window.begin(1000)
    assert [window.add() for _ in range(49)] == [None] * 49
    assert window.add() == "broke 50 times within 1000 episodes, so the run stops."
    # One fault of many envs is none too many; five are.
    window = FaultWindow(1000)
    for number in range(5):
        window.begin(1000)
        assert (window.add(1000) is None) == (number < 4)


@pytest.mark.parametrize("where", ["reset", "first look"])
def test_an_initial_state_that_cannot_be_had_costs_one_episode(where, capsys):
    env, quiet = guarded(raising(where)), guarded(make_env(3))
    shown = env.reset(init=[4, 5, 6])
    assert torch.isfinite(shown.proprio).all()
    quiet.reset(init=[4, 9, 6])
    step, normal = env.step(tape()[0]), quiet.step(tape()[0])
    assert step.fault.tolist() == [False, True, False] == step.truncated.tolist()
    assert not step.valid[1].any() and torch.isfinite(step.obs.proprio).all()
    same(step, normal, [0, 2])
    said = capsys.readouterr().err
    assert "env 1 (initial state 5) of mujoco/reach broke" in said
    assert ("gripper is gone" if where == "reset" else "proprio[0] is nan") in said
    for e in (env, quiet):
        e.reset([1], init=[3])
    same(env.step(tape()[1]), quiet.step(tape()[1]), [0, 1, 2])
    # Where no env can be had at all, the reset is tried again until it is too often.
    with pytest.raises(UserError, match="broke 5 times"):
        guarded(raising(where)).reset(init=[5, 5, 5])


def finite(*tensors):
    return all(bool(torch.isfinite(x).all()) for x in tensors)


@pytest.mark.parametrize("kind", [*ONE, "double", "flag of int"])
def test_nothing_of_a_fault_is_learned_from(kind):
    change = (ONE | ALL)[kind][0]
    batch = collect(faulty(change), Chaser(), 8, range(40))
    assert finite(batch.reward, batch.obs.proprio, batch.obs.privileged, batch.next_value)
    assert batch.truncated[1, 1] and not batch.valid[1, 1].any()
    assert finite(*(torch.tensor(e.reward) for e in batch.episodes))

    stream = Player(faulty(change)).new_episodes()
    act = Chaser()
    parts = collect_transitions(
        stream,
        lambda obs, generator: (act.sample(obs, generator=generator, mode="train").actions,) * 2,
        6,
        generator=torch.Generator().manual_seed(0),
    ).chunks
    assert finite(parts.reward, parts.obs.proprio, parts.next_obs.proprio)
    lost = 3 if kind in ALL else 1
    assert len(parts) == 18 - lost and parts.valid.any(1).all()

    group = collect_episodes(
        faulty(change), Chaser(), list(range(6)), generator=torch.Generator().manual_seed(0)
    )
    assert finite(group.obs.proprio) and group.episodes.count(None) == lost


@pytest.mark.parametrize("kind", ["reward nan", "double"])
def test_evaluation_and_recording_play_such_an_episode_again_or_leave_it_out(kind):
    change = (ONE | ALL)[kind][0]
    whole = evaluate(make_env(3), Chaser(), range(6))
    result = evaluate(faulty(change), Chaser(), range(6))
    assert result.faults == (3 if kind in ALL else 1) and result.episodes == whole.episodes

    class Recorded(MujocoEnv):
        calls = 0

        def rollout(self, act, horizon):
            step, actions = super().rollout(act, horizon)
            self.calls += 1
            return (change(step, 1) if self.calls == 1 else step), actions

    def record(cls):
        env, stats = make_env(3, cls, max_episode_steps=60), CollectStats()
        found = record_episodes(env, env.make_expert(), 4, inits=count(), stats=stats)
        return {r.init: r for r in found}, stats.faults

    (clean, none), (found, faults) = record(MujocoEnv), record(Recorded)
    assert none == 0 and faults == (3 if kind in ALL else 1) and len(found) == 4
    for init in clean.keys() & found.keys():
        assert (clean[init].proprio == found[init].proprio).all()
    assert all((r.reward == r.reward).all() for r in found.values())


def test_a_guarded_env_keeps_the_promises_of_an_env_and_is_guarded_once():
    env = guarded(make_env(2))
    check_env(env)
    assert guarded(env) is env and isinstance(Player(env).env, GuardedEnv)


def test_mujocos_silent_reset_is_a_fault_also_in_the_first_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes MUJOCO_LOG.TXT where it stands
    env = MujocoEnv(MujocoConfig(task="pick", num_envs=3, renderer="none", num_threads=1))
    for value in (NAN, 1e12):
        env.reset(init=[0, 1, 2])
        env._state[1, 12] = value
        step = env.step(tape()[0])
        assert step.fault.tolist() == [False, True, False] and not step.valid[1].any()
