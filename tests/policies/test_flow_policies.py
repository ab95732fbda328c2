"""FlowVLA: contract, sizes, text, augmentation, the separate critic, and refused settings."""

import dataclasses

import pytest
import torch
from linear_policy import OLD, Linear, observed
from torch.utils.flop_counter import FlopCounterMode

from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.errors import UserError
from embodyrl.functional.losses import ppo_policy_loss
from embodyrl.policies.flow_vla import FlowVLA, FlowVLAConfig
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.text import TextEncoder
from embodyrl.policy import num_executed
from embodyrl.types import EnvSpec, Obs

BLIND = EnvSpec("test/arm", 5, 4, 9, "ee_delta_pos", 25.0, 20, {}, privileged_dim=11)
SEEING = dataclasses.replace(BLIND, cameras={"front": (64, 64), "wrist": (32, 48)})
TINY = {"width": 32, "layers": 1, "heads": 2, "critic_width": 16, "vision_width": 4}
SENTENCES = [
    "pick up the red block",
    "push",
    "stack the blue block on the green block, and slowly",
    "push",
    "go",
]


def observation(spec: EnvSpec, seed: int = 0) -> Obs:
    generator, n = torch.Generator().manual_seed(seed), spec.num_envs
    return Obs(
        images={
            name: torch.randint(0, 256, (n, *size, 3), generator=generator, dtype=torch.uint8)
            for name, size in spec.cameras.items()
        },
        proprio=torch.randn(n, spec.proprio_dim, generator=generator),
        instruction=SENTENCES[:n],
        privileged=torch.randn(n, spec.privileged_dim, generator=generator),
    )


def make(spec: EnvSpec = BLIND, **settings) -> FlowVLA:
    """A tiny policy whose weights all matter: those that start at zero are moved as well."""
    policy = make_policy(FlowVLAConfig(**{**TINY, **settings}), spec, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    return policy


def seeds(n: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 + k) for k in range(n)]


@pytest.mark.parametrize("spec", [BLIND, SEEING], ids=["blind", "seeing"])
@pytest.mark.parametrize("transition", ["flow_sde", "flow_cps", "flow_noise"])
@pytest.mark.parametrize("trained_steps", ["all", "one"])
def test_promises_of_a_policy(spec, transition, trained_steps):
    policy = make(spec, transition=transition, trained_steps=trained_steps, context_layers=1)
    check_policy(policy, observation(spec), spec)


@pytest.mark.parametrize("transition", ["flow_sde", "flow_cps", "flow_noise"])
@pytest.mark.parametrize("parts", [{}, {"steer_width": 8}, {"chooser_width": 8, "proposals": 3}])
def test_promises_hold_where_only_a_part_of_the_plan_is_executed(transition, parts):
    policy = make(transition=transition, horizon=10, execute=3, **parts)
    check_policy(policy, observation(BLIND), BLIND)
    assert policy.flow_shape == (10, 4) and num_executed(policy.config) == 3
    # What is not executed has no density of its own, and yet changes what is executed.
    sample = policy.sample(observation(BLIND), generator=seeds(5), mode="train")
    assert sample.actions.shape == (5, 3, 4) and sample.trace.x.shape[2:] == (10, 4)
    # Imitation learns all of it.
    actions = torch.rand(5, 10, 4, generator=torch.Generator().manual_seed(3)) * 2 - 1
    mask = torch.ones(5, 10, dtype=torch.bool)
    loss = imitation_loss(
        policy, observation(BLIND), actions, mask, torch.Generator().manual_seed(4)
    )
    actions[:, 8] = -actions[:, 8]
    other = imitation_loss(
        policy, observation(BLIND), actions, mask, torch.Generator().manual_seed(4)
    )
    assert abs(float((loss - other).detach())) > 1e-3


@pytest.mark.parametrize("spec", [BLIND, SEEING], ids=["blind", "seeing"])
def test_a_policy_that_chooses_among_proposals_keeps_them_too(spec):
    policy = make(spec, chooser_width=8, proposals=3)

    def act(seed):
        generator = torch.Generator().manual_seed(seed)
        return policy.sample(observation(spec), generator=generator, mode="eval").actions

    # Before the critics have learned, it is the policy alone.
    first = policy.propose(observation(spec), 1, torch.Generator().manual_seed(1))
    torch.testing.assert_close(act(1), first[:, 0])
    check_policy(policy, observation(spec), spec)
    policy.chooser.ready.fill_(True)
    check_policy(policy, observation(spec), spec)
    three = policy.propose(observation(spec), 3, torch.Generator().manual_seed(1))
    assert torch.equal(act(1), policy.chooser.best(observation(spec), three))
    # The chooser is no part of what an actor's optimiser trains.
    trained = {id(p) for p in policy.actor_parameters()}
    assert not trained & {id(p) for p in policy.chooser.parameters()}


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"proposals": 4}, "proposals"), ({"chooser_width": 8, "steer_width": 8}, "are both set")],
)
def test_settings_of_a_chooser_that_nothing_reads_are_refused(settings, words):
    with pytest.raises(UserError, match=words):
        FlowVLAConfig(**settings)


@pytest.mark.parametrize("transition", ["flow_sde", "flow_cps", "flow_noise"])
@pytest.mark.parametrize("trained_steps", ["all", "one"])
def test_the_first_ratio_is_one(transition, trained_steps):
    policy, obs = (
        make(SEEING, transition=transition, trained_steps=trained_steps),
        observation(SEEING),
    )
    sample = policy.sample(obs, generator=torch.Generator().manual_seed(0), mode="train")
    scored = policy.evaluate(obs, sample.trace)
    torch.testing.assert_close(scored.logprob, sample.logprob, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(scored.value, sample.value, atol=1e-5, rtol=1e-5)
    mask = torch.ones(len(obs), dtype=torch.bool)
    new, old = scored.logprob.sum(1), sample.logprob.sum(1)
    _, info = ppo_policy_loss(new, old, torch.randn(len(obs)), mask, 0.01, 0.01)
    assert info["clip_fraction"] == 0 and abs(info["ratio"] - 1) < 1e-3 and info["approx_kl"] < 1e-6
    # Only steps that drew noise count, and Flow-CPS never draws any in its last one.
    stochastic = sample.trace.stochastic
    noisy = 3 if transition == "flow_cps" else 4
    assert (stochastic.sum(1) == (noisy if trained_steps == "all" else 1)).all()
    assert not stochastic[:, noisy:].any()
    assert (sample.logprob[~stochastic] == 0).all() and (sample.logprob[stochastic] != 0).all()


def test_the_actions_are_the_end_of_the_path_in_the_datas_units():
    policy, obs = make(), observation(BLIND)
    policy.fit_inputs(torch.randn(50, 9), 0.3 + 0.1 * torch.randn(50, 4))
    sample = policy.sample(obs, generator=seeds(5), mode="train")
    wanted = policy.normalize_action.inverse(sample.trace.x[:, -1]).clamp(-1, 1)
    assert torch.equal(sample.actions, wanted) and sample.actions.shape == (5, 5, 4)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_a_row_depends_on_its_own_observation_and_generator_alone(mode):
    policy, obs = make(SEEING, context_layers=1, trained_steps="one"), observation(SEEING)
    together = policy.sample(obs, generator=seeds(5), mode=mode)
    rows = [3, 0]  # another order, fewer rows, and sentences of other lengths beside
    some = policy.sample(obs[torch.tensor(rows)], generator=[seeds(5)[k] for k in rows], mode=mode)
    torch.testing.assert_close(some.actions, together.actions[rows], atol=1e-5, rtol=1e-4)
    if mode == "train":
        torch.testing.assert_close(some.logprob, together.logprob[rows], atol=1e-3, rtol=1e-4)
        assert torch.equal(some.trace.stochastic, together.trace.stochastic[rows])


@pytest.mark.parametrize("transition", ["flow_sde", "flow_noise"])
def test_gradients_reach_every_part_of_the_actor_and_not_the_critic(transition):
    policy, obs = make(SEEING, context_layers=1, transition=transition), observation(SEEING)
    sample = policy.sample(obs, generator=seeds(5), mode="train")
    policy.evaluate(obs, sample.trace).logprob.sum().backward()
    untouched = {
        n for n, p in policy.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0
    }
    assert untouched == {n for n, _ in policy.named_parameters() if n.startswith("critic.")}


@pytest.mark.parametrize("steps", [1, 4])
def test_learned_noise_stays_in_its_range_and_depends_on_what_the_policy_sees(steps):
    settings = {
        "transition": "flow_noise",
        "num_denoise_steps": steps,
        "noise_min": 0.1,
        "noise_max": 0.4,
    }
    fresh = make_policy(FlowVLAConfig(**TINY, **settings), BLIND, seed=0)
    policy, obs, low, high = (
        make(**settings),
        observation(BLIND),
        0.1 / steps**0.5,
        0.4 / steps**0.5,
    )
    x, t = torch.randn(5, 1, 5, 4), torch.ones(5, 1)
    std = policy.step_inputs(policy.encode(obs), x, t)[1].exp()
    assert ((std > low) & (std < high)).all() and (std[0] != std[1]).all()
    middle = fresh.step_inputs(fresh.encode(obs), x, t)[1].exp()
    torch.testing.assert_close(middle, torch.full_like(middle, (low * high) ** 0.5))


def test_entropy_of_learned_noise_is_that_of_its_gaussians_and_has_a_gradient():
    policy, obs = make(transition="flow_noise"), observation(BLIND)
    trace = policy.sample(obs, generator=seeds(5), mode="train").trace
    entropy = policy.evaluate(obs, trace).entropy
    _, log_std = policy.step_inputs(
        policy.encode(obs), trace.x[:, :-1], torch.tensor([[1, 0.75, 0.5, 0.25]] * 5)
    )
    expected = torch.distributions.Normal(0.0, log_std.exp()).entropy().mean((1, 2, 3))
    torch.testing.assert_close(entropy, expected)
    entropy.sum().backward()
    assert policy.expert.noise.weight.grad.abs().sum() > 0


def flops(call) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    ("transition", "share"), [("flow_sde", 1 / 4), ("flow_cps", 1 / 3), ("flow_noise", 1 / 4)]
)
def test_scoring_one_step_costs_a_fraction_of_scoring_all(transition, share):
    cost = {}
    for which in ("all", "one"):
        policy, obs = make(transition=transition, trained_steps=which), observation(BLIND)
        trace = policy.sample(obs, generator=seeds(5), mode="train").trace
        once = flops(lambda: policy.value(obs, policy.encode(obs)))  # noqa: B023 - called at once
        cost[which] = flops(lambda: policy.evaluate(obs, trace)) - once  # noqa: B023
    assert cost["one"] == pytest.approx(share * cost["all"], rel=0.05)


@pytest.mark.parametrize("critic", ["privileged", "shared"])
def test_the_critic_sends_no_gradient_into_the_actor(critic):
    policy, obs = make(critic=critic), observation(BLIND)
    sample = policy.sample(obs, generator=seeds(5), mode="train")
    (policy.value(obs).sum() + policy.evaluate(obs, sample.trace).value.sum()).backward()
    assert all(p.grad is None for p in policy.actor_parameters())
    assert all(p.grad is not None for p in policy.critic.parameters())
    counted = len(policy.actor_parameters()) + len(list(policy.critic.parameters()))
    assert counted == len(list(policy.parameters()))


def test_the_critic_needs_no_privileged_state_by_default():
    policy, obs = make(dataclasses.replace(BLIND, privileged_dim=0)), observation(BLIND)
    assert policy.config.critic == "shared"
    assert policy.value(dataclasses.replace(obs, privileged=None)).shape == (5,)


def test_sizes_from_under_a_million_to_over_a_hundred_million_on_the_same_path():
    def size(policy):
        return sum(p.numel() for p in policy.parameters())

    assert size(make(SEEING)) < 1_000_000
    # On torch's meta device shapes are computed and nothing is stored.
    config = FlowVLAConfig(
        width=1024, layers=6, heads=16, context_layers=3, text_layers=2, vision_width=64
    )
    with torch.device("meta"):
        large = FlowVLA(config, SEEING).to("meta")
    assert size(large) > 100_000_000
    obs = observation(SEEING).to("meta")
    sample = large.sample(obs, generator=torch.Generator().manual_seed(0), mode="train")
    assert sample.actions.shape == (5, 5, 4) and sample.value.shape == (5,)
    assert large.evaluate(obs, sample.trace).logprob.shape == (5, 4)


def test_padding_does_not_change_a_sentences_features():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = TextEncoder(width=32, layers=2, heads=2)
    alone, _, pooled_alone = encoder([SENTENCES[0]])
    tokens, mask, pooled = encoder([SENTENCES[2], SENTENCES[0], SENTENCES[2]])
    length = alone.shape[1]
    assert tokens.shape[1] > length and mask[1].sum() == length
    torch.testing.assert_close(tokens[1, :length], alone[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled[1], pooled_alone[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(tokens[0], tokens[2])
    assert (pooled[0] - pooled[1]).abs().max() > 1e-2


def test_the_order_of_words_and_the_colour_matter():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoder = TextEncoder(width=32, layers=1, heads=2)
    _, _, pooled = encoder(["stack red on blue", "stack blue on red", "stack red on green", ""])
    for i in range(4):
        for j in range(i):
            assert (pooled[i] - pooled[j]).abs().max() > 1e-4


def test_normalizer_standardises_inverts_and_bounds():
    data = torch.tensor([3.0, -1.0, 5.0]) + torch.tensor([2.0, 0.1, 0.0]) * torch.randn(4000, 3)
    normalizer = Normalizer(3, min_std=0.05, clip=10.0)
    assert torch.equal(normalizer(data), data.clamp(-10, 10))
    normalizer.fit(data)
    out = normalizer(data)
    torch.testing.assert_close(out.mean(0), torch.zeros(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(out[:, :2].std(0), torch.ones(2), atol=1e-2, rtol=0)
    torch.testing.assert_close(normalizer.inverse(out), data, atol=1e-5, rtol=1e-5)
    assert normalizer(torch.full((1, 3), 1e9)).max() == 10.0
    assert set(normalizer.state_dict()) == {"mean", "std"}


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    a = make_policy(FlowVLAConfig(**TINY), BLIND, seed=3).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(6)
    b = make_policy(FlowVLAConfig(**TINY), BLIND, seed=3).state_dict()
    other = make_policy(FlowVLAConfig(**TINY), BLIND, seed=4).state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not all(torch.equal(a[k], other[k]) for k in a)
    assert not any("table" in k for k in a)  # the word embeddings come with their package


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"transition": "flow_noise", "eta": 0.7},
            "policy.eta is 0.7, but transition=flow_noise does not read it",
        ),
        ({"noise_max": 0.5}, "policy.noise_max is 0.5, but transition=flow_sde does not read it"),
        (
            {"transition": "flow_noise", "noise_min": 1.5},
            "policy.noise_min is 1.5; it must not be above policy.noise_max",
        ),
        ({"steer_width": 8, "start_noise": 0.5}, "policy.start_noise is 0.5, but the noise policy"),
        ({"horizon": 5, "execute": 6}, "policy.execute is 6, but a chunk has 5 actions"),
        ({"horizon": 6}, "policy.action_patch 5 does not divide policy.horizon 6"),
        ({"width": 30}, "policy.width 30 is not an even multiple of policy.heads"),
        ({"eta": -1.0}, "eta is -1.0"),
        ({"transition": "flow_cps", "eta": 1.5}, "eta is 1.5"),
        ({"num_denoise_steps": 0}, "must be at least 1"),
    ],
)
def test_wrong_settings_are_refused_in_words(settings, words):
    with pytest.raises(UserError, match=words):
        FlowVLA(FlowVLAConfig(**settings), BLIND)


def test_an_env_without_privileged_state_is_refused_in_words():
    with pytest.raises(UserError, match=r"gives no privileged state.*policy.critic=shared"):
        FlowVLA(FlowVLAConfig(critic="privileged"), dataclasses.replace(BLIND, privileged_dim=0))


def test_less_initial_noise_makes_the_noise_free_policy_more_decided():
    """Through a linear flow chunks are as wide as the noise they start from; training is not touched."""
    wide, narrow, none = (Linear(OLD, start_noise=std) for std in (0.2, 0.1, 0.0))
    obs = observed(32)

    def drawn(policy, mode):
        return policy.sample(obs, generator=torch.Generator().manual_seed(7), mode=mode).actions

    full = drawn(wide, "eval")
    assert full.std() > 0.02 and full.abs().max() < 1.0  # nothing is clipped
    torch.testing.assert_close(drawn(narrow, "eval"), 0.5 * full)
    assert not drawn(none, "eval").any()
    torch.testing.assert_close(drawn(narrow, "train"), drawn(wide, "train"))
    # So are the proposals that a critic or a dream chooses from.
    proposals = [p.propose(obs, 3, torch.Generator().manual_seed(7)) for p in (wide, narrow)]
    torch.testing.assert_close(proposals[1], 0.5 * proposals[0])
