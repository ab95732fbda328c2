"""``policy.critic=found``: critics that see what hindsight finds, in every algorithm that has some."""

import dataclasses
from typing import Any

import pytest
import torch
from reach_square import ReachSquare, demonstrations

from embodyrl.algorithms.dsrl import DSRL, DSRLConfig
from embodyrl.algorithms.fpo import FPO, FPOConfig
from embodyrl.algorithms.hindsight import Hindsight
from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.algorithms.rlpd import RLPD, RLPDConfig
from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.algorithms.wsrl import WSRL, WSRLConfig
from embodyrl.build import make_policy
from embodyrl.checks import check_algorithm, check_policy
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded

H = 2
LESSONS: dict[str, Any] = {"hindsight_steps": 3}
OFF_POLICY: dict[str, Any] = {
    **LESSONS,
    "num_chunks": 4,
    "capacity": 128,
    "warmup_chunks": 32,
    "batch_size": 8,
    "critic_width": 8,
    "utd": 0.2,
    "refresh_chunks": 32,
}
ON_POLICY: dict[str, Any] = {
    **LESSONS,
    "num_chunks": 5,
    "minibatch_size": 20,
    "epochs": 1,
    "critic_epochs": 1,
    "warmup_iterations": 1,
    "seen_chunks": 96,
    "refresh_chunks": 80,
}
ALGORITHMS: dict[str, tuple[Any, Any]] = {
    "ppo": (PPO, PPOConfig(**ON_POLICY)),
    "fpo": (FPO, FPOConfig(**ON_POLICY, num_pairs=2)),
    "sac_flow": (SACFlow, SACFlowConfig(**OFF_POLICY, random_warmup=False)),
    "rlpd": (RLPD, RLPDConfig(**OFF_POLICY, shared_critic=False)),
    "wsrl": (WSRL, WSRLConfig(**OFF_POLICY)),
    "dsrl": (DSRL, DSRLConfig(**OFF_POLICY)),
}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def small_policy(spec, **settings):
    config: dict[str, Any] = {
        "horizon": H,
        "action_patch": H,
        "width": 16,
        "heads": 2,
        "layers": 1,
        "text_layers": 0,
        "vision_width": 8,
        "critic_width": 8,
        "num_denoise_steps": 2,
        "critic": "found",
    }
    return make_policy(FlowVLAConfig(**config | settings), spec, 0)


def make(name, env, critic="found", **settings):
    cls, config = ALGORITHMS[name]
    extra = {"dsrl": {"steer_width": 8}, "ppo": {}, "fpo": {}}
    policy = small_policy(env.spec, critic=critic, **extra.get(name, {"transition": "flow_noise"}))
    torch.manual_seed(0)
    return cls(dataclasses.replace(config, **settings), policy)


def play(algorithm, env, iterations=1, first=0):
    """The last row of the log."""
    player = Player(env)
    row = {}
    for i in range(first, first + iterations):
        generator = seeded(0, i)
        batch = player.collect(algorithm, i, generator=generator)
        row = algorithm.update(batch, progress=0.0, generator=generator)
    return row


WITH_AND_WITHOUT = [(name, shown) for name in ALGORITHMS for shown in (True, False)]
WITH_AND_WITHOUT.remove(("rlpd", False))  # RLPD always has demonstrations


@pytest.mark.parametrize(("name", "shown"), WITH_AND_WITHOUT)
def test_it_learns_saves_and_resumes_bit_for_bit(name, shown):
    """From demonstrations too, and from own successes alone."""
    env = ReachSquare(near=0.7)
    demos = demonstrations(6, H) if shown else None
    check_algorithm(lambda: make(name, env), env, demos=demos)


def test_a_policy_keeps_its_promises():
    env = ReachSquare()
    check_policy(small_policy(env.spec), env.reset(list(range(8))), env.spec)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_found_is_taught_by_hindsight_alone(name, monkeypatch):
    """No loss of critic or actor moves it."""
    env = ReachSquare(near=0.7)
    algorithm = make(name, env, refresh_chunks=0)
    algorithm.add_demos(demonstrations(6, H))
    found = algorithm.policy.found
    rest = {
        id(p) for p in [*algorithm.policy.actor_parameters(), *algorithm.policy.critic_parameters()]
    }
    assert not rest & {id(p) for p in found.parameters()}
    after_lesson = {}
    begin = Hindsight.begin

    def lesson(self, *args):
        begin(self, *args)
        after_lesson.update({k: v.clone() for k, v in self.features.state_dict().items()})

    monkeypatch.setattr(Hindsight, "begin", lesson)
    fresh = {k: v.clone() for k, v in found.state_dict().items()}
    play(algorithm, env, 3)
    now = found.state_dict()
    assert all(torch.equal(v, after_lesson[k]) for k, v in now.items())
    moved = {k.split(".")[1] for k, v in now.items() if not torch.equal(v, fresh[k])}
    assert {"eyes", "head", "normalize_proprio"} <= moved


@pytest.mark.parametrize("name", ["sac_flow", "rlpd", "wsrl", "dsrl"])
def test_the_buffer_keeps_what_the_critics_see_as_it_is_seen_now(name):
    env = ReachSquare(near=0.7)
    algorithm = make(name, env)
    algorithm.add_demos(demonstrations(6, H))
    play(algorithm, env, 3)
    # More than one lesson was given, and every batch holds the features of the last one.
    assert algorithm.hindsight.begun and algorithm.hindsight.chunks < 3 * 32
    batch = algorithm._batch(gen())
    found = algorithm.policy.found
    torch.testing.assert_close(batch.features, found(batch.obs))
    torch.testing.assert_close(batch.next_features, found(batch.next_obs))
    assert algorithm.critics.weights[0].shape[1] == found.dim + H * 2


def test_td_targets_are_those_of_the_found_features():
    """By hand: reward plus the discounted smaller value of the next choice, at what is found there."""
    env = ReachSquare(near=0.7)
    algorithm = make("sac_flow", env, entropy_backup=False)
    algorithm.add_demos(demonstrations(6, H))
    play(algorithm, env, 2)
    batch = algorithm._batch(gen(1))
    following = algorithm._following(batch, gen(2))
    values = algorithm.target(algorithm.policy.found(batch.next_obs), following[0]).amin(0)
    reward = batch.reward[:, 0] * batch.valid[:, 0] + 0.99 * batch.reward[:, 1] * batch.valid[:, 1]
    executed = batch.valid.sum(1).float()
    wanted = reward + 0.99**executed * values * ~batch.terminated
    stats = Means()
    algorithm._update_critics(batch, gen(3), stats, following)
    assert stats.means()["td_target"] == pytest.approx(float(wanted.mean()), rel=1e-4)


def test_ppo_values_what_is_found_and_labels_the_episodes_of_its_rollouts():
    env = ReachSquare(near=0.7)
    algorithm = make("ppo", env, critic_epochs=3)
    play(algorithm, env)
    buffer = algorithm.hindsight.buffer
    # A solved episode ended near the square, and the hand's last place is its first label.
    rows = buffer.solved_ones()
    assert len(rows)
    for row in rows.tolist():
        same = (buffer.data["episode"] == buffer.data["episode"][row]).nonzero().flatten()
        last = buffer.data["next_obs/proprio"][same[-1]]
        assert torch.equal(buffer.data["places"][row, 0], last)
    # No chunk of an episode that still went on has a label.
    assert not (buffer.data["solved"] & ~buffer.data["over"]).any()
    obs = buffer.rows(rows).obs
    policy = algorithm.policy
    value = policy.critic(policy.found(obs)).squeeze(-1)
    assert torch.equal(policy.value(obs), value) and value.any()


@pytest.mark.parametrize("name", ["ppo", "sac_flow"])
def test_without_pictures_it_is_normalised_proprioception(name):
    env = ReachSquare(near=0.7, cameras=False)
    config = ALGORITHMS[name][1]
    plain = {
        f.name: f.default
        for f in dataclasses.fields(config)
        if f.name in ("hindsight_steps", "refresh_chunks", "seen_chunks")
    }
    algorithm = make(name, env, **plain)
    play(algorithm, env, 2)
    found = algorithm.policy.found
    obs = env.reset(list(range(8)))
    assert found.fitted and torch.equal(found(obs), found.normalize_proprio(obs.proprio))
    with pytest.raises(UserError, match="has no pictures"):
        make(name, env)
    assert not algorithm.takes_demos


@pytest.mark.parametrize("name", ["ppo", "sac_flow", "dsrl"])
def test_without_any_success_it_says_what_to_do(name):
    env = ReachSquare(near=0.0)
    with pytest.raises(UserError, match=r"data\.path=FOLDER"):
        play(make(name, env), env, 2)
    failed = make(name, env)
    failed.add_demos(demonstrations(6, H, solved=False))
    with pytest.raises(UserError, match=r"data\.path=FOLDER"):
        play(failed, env, 2)
    # Demonstrations of success alone are enough.
    shown = make(name, env)
    shown.add_demos(demonstrations(6, H))
    play(shown, env, 2)
    assert shown.hindsight.begun


def test_settings_that_say_two_things_or_nothing_are_refused():
    env = ReachSquare()
    for key in ("shared_critic", "own_encoder"):
        with pytest.raises(UserError, match=rf"algorithm\.{key}=false"):
            make("sac_flow", env, **{key: True})
    with pytest.raises(UserError, match=r"shared_critic=false"):
        make("rlpd", env, shared_critic=True)
    for name in ("ppo", "sac_flow"):
        with pytest.raises(UserError, match=r"policy\.critic is not found"):
            make(name, env, critic="shared")
    assert not make("sac_flow", env, "shared", hindsight_steps=450, refresh_chunks=5000).takes_demos
