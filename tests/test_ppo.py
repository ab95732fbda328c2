"""PPO on synthetic rollouts: what goes up, what goes down, what stops it, and what a resume needs."""

import copy

import pytest
import torch

from embodyrl import checkpoint
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.buffers import RolloutBatch, minibatches
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 8, 4, 6, "ee_delta_pos", 25.0, 20, {}, privileged_dim=5)
T, N, H = 4, 8, 5


def make_ppo(policy=None, **settings) -> PPO:
    if policy is None:
        config = FlowVLAConfig(width=32, layers=1, heads=2, text_layers=0, critic_width=16)
        policy = make_policy(config, SPEC, seed=0)
    settings = {"warmup_iterations": 0, "minibatch_size": 16, "epochs": 3, "lr": 1e-3, **settings}
    return PPO(PPOConfig(**settings), policy)


def make_batch(policy, reward: torch.Tensor, seed: int = 0) -> RolloutBatch:
    """T*N chunks, each an episode of its own with a ``reward`` (T, N) at its last action."""
    generator, rows = torch.Generator().manual_seed(seed), T * N
    proprio, privileged = (torch.randn(rows, d, generator=generator) for d in (SPEC.proprio_dim, SPEC.privileged_dim))
    obs = Obs({}, proprio, ["push"] * rows, privileged)
    sample = policy.sample(obs, generator=generator, mode="train")
    per_action = torch.zeros(T, N, H)
    per_action[..., -1] = reward
    return RolloutBatch(
        obs=obs,
        trace=sample.trace,
        logprob=sample.logprob,
        value=sample.value.view(T, N),
        next_value=torch.full((T, N), 1e3),  # never bootstrapped from: every chunk is terminated
        reward=per_action,
        valid=torch.ones(T, N, H, dtype=torch.bool),
        terminated=torch.ones(T, N, dtype=torch.bool),
        truncated=torch.zeros(T, N, dtype=torch.bool),
    )


def half() -> torch.Tensor:
    reward = torch.zeros(T, N)
    reward[:, ::2] = 1.0
    return reward


def update(ppo: PPO, batch: RolloutBatch, seed: int = 0) -> dict[str, float]:
    return ppo.update(batch, progress=0.0, generator=torch.Generator().manual_seed(seed))


def parameters(ppo: PPO) -> dict[str, torch.Tensor]:
    return copy.deepcopy(ppo.policy.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], prefix: str = "") -> bool:
    return all(torch.equal(a[k], b[k]) for k in a if k.startswith(prefix))


def actor(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {k: v for k, v in state.items() if not k.startswith(("critic.", "normalize_privileged."))}


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ratio", ["joint", "per_step", "per_dim"])
def test_what_was_rewarded_becomes_likelier_and_the_rest_less(sign, ratio):
    ppo = make_ppo(ratio=ratio)
    batch = make_batch(ppo.policy, sign * half())
    stats = update(ppo, batch)
    with torch.no_grad():
        moved = (ppo.policy.evaluate(batch.obs, batch.trace).logprob - batch.logprob).sum(1).view(T, N)
    up, down = moved[:, ::2].mean(), moved[:, 1::2].mean()
    assert sign * up > 0.01 and sign * down < -0.01
    assert stats["actor_epochs"] == 3 and stats["approx_kl"] > 0 and stats["grad_norm"] > 0


def test_the_first_pass_has_ratio_one_and_clips_nothing():
    ppo = make_ppo(epochs=1, minibatch_size=T * N)
    stats = update(ppo, make_batch(ppo.policy, half()))
    assert abs(stats["ratio"] - 1) < 1e-3 and abs(stats["approx_kl"]) < 1e-6
    assert stats["clip_fraction"] == 0 and stats["dual_clip_fraction"] == 0


def test_the_critic_learns_the_return_and_the_actor_waits_for_it():
    ppo = make_ppo(warmup_iterations=1, critic_epochs=150, critic_lr=1e-2)
    batch, before = make_batch(ppo.policy, half()), parameters(ppo)
    stats = update(ppo, batch)
    assert same(actor(before), actor(parameters(ppo))) and stats["actor_epochs"] == 0
    value = ppo.policy.value(batch.obs).view(T, N)
    assert value[:, ::2].mean() > 0.8 and value[:, 1::2].mean() < 0.2
    update(ppo, batch)
    assert not same(actor(before), actor(parameters(ppo)))


def test_equal_rewards_teach_the_actor_nothing():
    ppo = make_ppo(epochs=2)
    before = actor(parameters(ppo))
    update(ppo, make_batch(ppo.policy, torch.ones(T, N)))
    after = actor(parameters(ppo))
    assert all(torch.equal(before[k], after[k]) for k in before)


def test_masked_chunks_have_no_influence():
    results = []
    for fill in (0.0, float("nan")):
        ppo = make_ppo()
        batch = make_batch(ppo.policy, half())
        batch.valid[1, 3] = batch.terminated[1, 3] = False
        batch.truncated[1, 3] = True
        row = 1 * N + 3
        batch.trace.x[row], batch.logprob[row] = fill, fill
        update(ppo, batch)
        results.append(parameters(ppo))
    assert same(*results)
    assert all(torch.isfinite(v).all() for v in results[0].values())


def test_a_step_that_is_not_finite_is_skipped_and_ten_in_a_row_stop_the_run():
    ppo = make_ppo(critic_epochs=1, epochs=3, minibatch_size=T * N)
    batch, before = make_batch(ppo.policy, half()), parameters(ppo)
    batch.logprob[2] = float("nan")
    stats = update(ppo, batch)
    assert same(actor(before), actor(parameters(ppo))) and stats["skipped_steps"] == 3
    # Good steps of the critic in between do not hide that the actor is stuck.
    update(ppo, batch)
    update(ppo, batch)
    with pytest.raises(UserError, match=r"Ten gradient steps in a row were not finite.*algorithm\.lr"):
        update(ppo, batch)
    assert same(actor(before), actor(parameters(ppo)))
    assert not ppo.actor_optimizer.state_dict()["state"]
    good = make_ppo(epochs=3)
    assert update(good, make_batch(good.policy, half()))["skipped_steps"] == 0


def test_target_kl_ends_the_actors_epochs():
    passes = {}
    for target in (0.0, 1e-6):
        ppo = make_ppo(lr=1e-2, epochs=5, target_kl=target)
        passes[target] = update(ppo, make_batch(ppo.policy, half()))["actor_epochs"]
    assert passes[0.0] == 5 and passes[1e-6] < 5


def test_what_is_saved_continues_bit_for_bit(tmp_path):
    ppo = make_ppo()
    update(ppo, make_batch(ppo.policy, half(), seed=1))
    checkpoint.save(tmp_path / "step_1", {"policy": ppo.policy.state_dict(), "algorithm": ppo.state_dict()}, {})
    states, _ = checkpoint.load(tmp_path / "step_1")
    other = make_ppo(make_policy(ppo.policy.config, SPEC, seed=9))
    other.policy.load_state_dict(states["policy"])
    other.load_state_dict(states["algorithm"])
    assert other.iteration == 1
    batch = make_batch(ppo.policy, half(), seed=2)
    assert update(ppo, batch, seed=3) == update(other, batch, seed=3)
    assert same(parameters(ppo), parameters(other))


def test_minibatches_are_a_partition_in_a_random_order():
    rows = torch.arange(50)[torch.arange(50) % 3 > 0]
    pieces = list(minibatches(rows, 8, torch.Generator().manual_seed(0)))
    assert torch.equal(torch.cat(pieces).sort().values, rows)
    assert not torch.equal(torch.cat(pieces), rows)
    assert {len(p) for p in pieces} <= {8, 9} and len(pieces) == 4
    assert [len(p) for p in minibatches(rows, 1000, torch.Generator())] == [33]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ratio": "mean"}, "algorithm.ratio is 'mean'.*joint, per_step, per_dim"),
        ({"gamma": 1.5}, r"algorithm.gamma must lie in \(0, 1\]"),
        ({"gae_lambda": -0.1}, "algorithm.gae_lambda"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip is 0.5; it must be above 1"),
    ],
)
def test_wrong_settings_are_refused_in_words(settings, words):
    with pytest.raises(UserError, match=words):
        PPOConfig(**settings)


def test_a_policy_without_noise_is_refused_in_words():
    config = FlowVLAConfig(width=32, layers=1, heads=2, text_layers=0, critic_width=16, eta=0.0)
    with pytest.raises(UserError, match="eta"):
        make_ppo(make_policy(config, SPEC, seed=0))
