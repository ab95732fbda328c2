"""PPO on synthetic rollouts: what goes up, what goes down, what stops it, and what a resume needs."""

import copy
import dataclasses

import pytest
import torch

from embodyrl.algorithms.optim import minibatches
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.batches import RolloutBatch
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 8, 4, 6, "ee_delta_pos", 25.0, 20, {}, privileged_dim=5)
TINY = FlowVLAConfig(
    width=32, layers=1, heads=2, text_layers=0, critic="privileged", critic_width=16
)
"""Its critic sees what stays as it is while the actor learns."""
T, N, H = 4, 8, 5


def make_ppo(policy=None, **settings) -> PPO:
    if policy is None:
        policy = make_policy(TINY, SPEC, seed=0)
    settings = {"warmup_iterations": 0, "minibatch_size": 16, "epochs": 3, "lr": 1e-3, **settings}
    return PPO(PPOConfig(**settings), policy)


def make_batch(policy, reward: torch.Tensor, seed: int = 0) -> RolloutBatch:
    """T*N chunks, each an episode of its own with a ``reward`` (T, N) at its last action."""
    generator, rows = torch.Generator().manual_seed(seed), T * N
    proprio, privileged = (
        torch.randn(rows, d, generator=generator) for d in (SPEC.proprio_dim, SPEC.privileged_dim)
    )
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
    return {
        k: v for k, v in state.items() if not k.startswith(("critic.", "normalize_privileged."))
    }


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("ratio", ["joint", "per_step", "per_dim"])
def test_what_was_rewarded_becomes_likelier_and_the_rest_less(sign, ratio):
    ppo = make_ppo(ratio=ratio)
    batch = make_batch(ppo.policy, sign * half())
    stats = update(ppo, batch)
    with torch.no_grad():
        moved = (
            (ppo.policy.evaluate(batch.obs, batch.trace).logprob - batch.logprob).sum(1).view(T, N)
        )
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
    with pytest.raises(UserError, match="Ten gradient steps of the actor in a row were not finite"):
        update(ppo, batch)
    assert same(actor(before), actor(parameters(ppo)))
    assert not ppo.actor.optimizer.adam.state_dict()["state"]
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
    checkpoint.save(
        tmp_path / "step_1", {"policy": ppo.policy.state_dict(), "algorithm": ppo.state_dict()}, {}
    )
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
        ({"lr_schedule": "adaptive"}, "steers by algorithm.target_kl, which is 0"),
        (
            {"lr_schedule": "adaptive", "target_kl": 0.1, "lr_end": 0.1},
            "algorithm.lr_end is 0.1, but lr_schedule",
        ),
    ],
)
def test_wrong_settings_are_refused_in_words(settings, words):
    with pytest.raises(UserError, match=words):
        PPOConfig(**settings)


def tiny_policy(**settings):
    return make_policy(dataclasses.replace(TINY, **settings), SPEC, seed=0)


@pytest.mark.parametrize(
    "settings",
    [{"eta": 0.0}, {"transition": "flow_cps", "num_denoise_steps": 1}],
    ids=["eta 0", "one step of CPS"],
)
def test_a_policy_without_noise_is_refused_in_words(settings):
    with pytest.raises(
        UserError, match=r"needs denoising steps that draw noise.*policy\.eta.*num_denoise_steps"
    ):
        make_ppo(tiny_policy(**settings))


def test_an_entropy_bonus_on_fixed_noise_is_refused_and_on_learned_noise_widens_it():
    with pytest.raises(
        UserError, match=r"noise of flow_sde is fixed.*policy\.transition=flow_noise"
    ):
        make_ppo(entropy_coef=0.01)
    entropy = {}
    for coef in (0.0, 1.0):
        ppo = make_ppo(
            tiny_policy(transition="flow_noise"), entropy_coef=coef, lr_warmup=0, epochs=10
        )
        batch = make_batch(
            ppo.policy, torch.zeros(T, N)
        )  # no advantage: the bonus alone moves the actor
        update(ppo, batch)
        entropy[coef] = float(ppo.policy.evaluate(batch.obs, batch.trace).entropy.mean().detach())
    assert entropy[1.0] > entropy[0.0] + 0.01


def test_the_rate_rises_in_the_warm_up_and_falls_to_its_end():
    ppo = make_ppo(lr=1e-3, lr_warmup=4, lr_end=0.5)
    batch = make_batch(ppo.policy, half())
    rates = [
        ppo.update(batch, progress=p, generator=torch.Generator().manual_seed(0))["actor_lr"]
        for p in (0.0, 0.25, 0.5, 0.75, 1.0)
    ]
    assert rates == pytest.approx(
        [1e-3 / 4 * 1, 1e-3 / 2 * 0.875, 1e-3 * 0.75 * 0.75, 1e-3 * 0.625, 1e-3 * 0.5]
    )


@pytest.mark.parametrize(("target", "expected"), [(1e-9, 1 / 1.5), (1e3, 1.5)])
def test_the_adaptive_rate_follows_the_kl_and_survives_a_resume(target, expected):
    ppo = make_ppo(lr_schedule="adaptive", target_kl=target)
    batch = make_batch(ppo.policy, half())
    assert update(ppo, batch)["actor_lr"] == pytest.approx(
        1e-3
    ) and ppo.actor.optimizer.lr == pytest.approx(1e-3 * expected)
    other = make_ppo(lr_schedule="adaptive", target_kl=target)
    other.policy.load_state_dict(ppo.policy.state_dict())
    other.load_state_dict(copy.deepcopy(ppo.state_dict()))
    assert update(other, batch)["actor_lr"] == pytest.approx(1e-3 * expected)
    for _ in range(12):
        update(other, batch)
    assert 1e-3 / 30 * 0.999 < other.actor.optimizer.lr < 1e-3 * 30 * 1.001


# Decoupled PPO (arXiv:2110.00641): a rollout of an older policy


def run_with(behaviour_cap: float, stale: float):
    """One update on a rollout whose recorded log-probabilities are ``stale`` away from the policy's own."""
    ppo = make_ppo(behaviour_cap=behaviour_cap, epochs=2)
    batch = make_batch(ppo.policy, half())
    batch.logprob = batch.logprob - stale * torch.randn(
        batch.logprob.shape, generator=torch.Generator().manual_seed(5)
    )
    stats = update(ppo, batch)
    return stats, parameters(ppo)


def test_decoupled_ppo_is_ppo_where_behaviour_and_proximal_policy_coincide():
    plain, decoupled = run_with(0.0, stale=0.0), run_with(5.0, stale=0.0)
    assert decoupled[0]["behaviour_weight"] == pytest.approx(1.0, abs=1e-4)
    assert decoupled[0]["behaviour_truncated"] == 0
    for key, value in plain[1].items():
        torch.testing.assert_close(decoupled[1][key], value, atol=2e-4, rtol=1e-3)


def test_decoupled_ppo_clips_around_the_proximal_policy_and_bounds_the_importance_weight():
    plain, _ = run_with(0.0, stale=1.0)
    decoupled, _ = run_with(1.5, stale=1.0)
    assert (
        plain["clip_fraction"] > 0.5
    )  # of a stale rollout most ratios leave the range before anything is learned
    assert decoupled["clip_fraction"] < plain["clip_fraction"] - 0.2
    assert 0.2 < decoupled["behaviour_truncated"] < 0.8 and decoupled["behaviour_weight"] <= 1.5


SEEN = set()


class Reads(PPOConfig):
    """A config that remembers which of its settings were looked at."""

    def __getattribute__(self, name):
        SEEN.add(name)
        return super().__getattribute__(name)


def test_every_setting_is_read():
    ppo = make_ppo(behaviour_cap=2.0, behaviour_filter="mask")
    reads = Reads(**vars(ppo.config))
    SEEN.clear()
    ppo = PPO(reads, ppo.policy)
    update(ppo, make_batch(ppo.policy, half()))
    left = {f.name for f in dataclasses.fields(PPOConfig)} - SEEN
    assert left == {"num_chunks", "rollout_precision"}  # the rollout's


# Returns over chunks


def test_advantages_of_chunks_by_hand():
    """gamma .5, lambda .8: a full chunk of three discounts by 1/8, a shorter one by less.

    Env 0 goes on after its first chunk; env 1 ends in the second action of its first one.
    """
    ppo = make_ppo(gamma=0.5, gae_lambda=0.8)
    no, yes = torch.tensor([[False, False]] * 2), torch.tensor([[False, True], [False, False]])
    batch = RolloutBatch(
        obs=None,
        trace=None,
        logprob=None,
        value=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        next_value=torch.tensor([[3.0, 9.0], [8.0, 16.0]]),
        reward=torch.tensor([[[1.0, 2, 4], [2, 4, 0]], [[0, 0, 8], [1, 1, 1]]]),
        valid=torch.tensor([[[1, 1, 1], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]]).bool(),
        terminated=yes,
        truncated=no,
    )
    last = [0 + 8 / 4 + 8 / 8 - 3, 1 + 1 / 2 + 1 / 4 + 16 / 8 - 4]
    first = [(1 + 1 + 1 + 3 / 8 - 1) + 0.8 / 8 * last[0], 2 + 2 - 2]
    expected = torch.tensor([first, last])
    advantage, returns = ppo._advantages(batch)
    torch.testing.assert_close(advantage, expected)
    torch.testing.assert_close(returns, expected + batch.value)
    # A time limit bootstraps from the value after the two actions, discounted by 1/4.
    batch.terminated, batch.truncated = no, yes
    advantage, _ = ppo._advantages(batch)
    expected[0, 1] = 2 + 2 + 9 / 4 - 2
    torch.testing.assert_close(advantage, expected)


def test_figures_and_losses_of_an_iteration_by_hand():
    """The critic's first loss, explained variance, and what the actor is given."""
    ppo = make_ppo(
        critic_epochs=1, minibatch_size=1000, epochs=1, huber_delta=0.3, max_grad_norm=0.0
    )
    reward = torch.randn(T, N, generator=torch.Generator().manual_seed(4))
    batch = make_batch(ppo.policy, reward)
    batch.value = torch.randn(T, N, generator=torch.Generator().manual_seed(5))
    batch.valid[2, 1] = False  # it counts in nothing
    reward = reward * batch.valid.any(-1)
    mask = batch.valid.any(-1)
    returns = (reward * 0.99**4)[mask]
    old = batch.value[mask]
    stats = update(ppo, batch)
    assert stats["return"] == pytest.approx(float(returns.mean()), abs=1e-5)
    assert stats["value"] == pytest.approx(float(old.mean()), abs=1e-5)
    explained = 1 - (returns - old).var(correction=0) / returns.var(correction=0)
    assert stats["explained_variance"] == pytest.approx(float(explained), rel=1e-4)
    # A fresh critic says zero.
    huber = torch.nn.functional.huber_loss(torch.zeros_like(returns), returns, delta=0.3)
    assert stats["value_loss"] == pytest.approx(float(huber), rel=1e-4)
    assert stats["value_error"] == pytest.approx(float(returns.abs().mean()), rel=1e-4)
    # At ratio 1 the loss is minus the mean advantage, which whitening makes 0.
    assert stats["policy_loss"] == pytest.approx(0.0, abs=1e-4)
    assert stats["ratio"] == pytest.approx(1.0, abs=1e-4)
