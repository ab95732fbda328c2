"""SAC-Flow: densities against closed forms, the defects of published code, the loop and its refusals."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from defects_offpolicy import DEFECTS
from torch import nn

from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.errors import UserError
from embodyrl.functional.flow import DenoisingTransition, complete_noise, randn
from embodyrl.functional.losses import sac_actor_loss, temperature_loss
from embodyrl.policies.critics import Critics
from embodyrl.policies.flow_mlp import FlowMLP, FlowMLPConfig
from embodyrl.policies.mlp_velocities import VELOCITIES, DecodedVelocity, GatedVelocity
from embodyrl.policies.normalize import TanhSquash
from embodyrl.policies.sample_path import integrate, sample_path
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.sims.gymnasium.env import GymnasiumConfig, GymnasiumEnv
from embodyrl.types import DenoisingTrace, EnvSpec, Obs

SPEC = EnvSpec("test/legs", 5, 2, 7, "torque", 50.0, 20, {})
K, D, LOG_SIGMA = 4, 6, -1.5
TINY = {"width": 16, "layers": 1, "critic_width": 8}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def observation(n=5):
    return Obs({}, torch.randn(n, SPEC.proprio_dim, generator=gen(1)), ["walk"] * n)


def policy(**settings):
    made = make_policy(FlowMLPConfig(**{**TINY, **settings}), SPEC, seed=0)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=gen(2)))
    return made


GAUSSIAN = {"velocity": "gaussian", "num_denoise_steps": 1, "transition": "flow_noise"}
KINDS = [{"velocity": v} for v in ("plain", "gated", "decoded")] + [GAUSSIAN]


@pytest.mark.parametrize(
    "settings", [*KINDS, {"squash": False}, {"transition": "flow_sde_learned", "horizon": 3}]
)
def test_promises_of_a_policy(settings):
    check_policy(policy(**settings), observation(), SPEC)


# The density of a path.


class Net(nn.Module):
    """Step inputs with a std of sigma d (sigma, d = 1/K: the example of the defect), and velocities that vary."""

    def __init__(self):
        super().__init__()
        self.log_sigma = nn.Parameter(torch.full((), LOG_SIGMA, dtype=torch.float64))

    def forward(self, x, t):
        return torch.sin(3 * x) + t[..., None, None], self.log_sigma - math.log(
            K
        ) + torch.zeros_like(x)


def draw(sample, n=64):
    net = Net()
    start = randn((n, 1, D), gen(3)).double()
    return net, sample(net, DenoisingTransition("flow_sde_learned", K), start, gen(4))


def check_density(sample):
    """The log-probability is that of the Gaussians that were sampled from."""
    net, path = draw(sample)
    transition, expected = DenoisingTransition("flow_sde_learned", K), 0.0
    for k in range(K):
        t = torch.full((len(path.x), 1), 1 - k / K, dtype=torch.float64)
        v, log_std = net(path.x[:, k : k + 1], t)
        mean, std = transition.mean_std(path.x[:, k], v[:, 0], k, log_std[:, 0])
        expected = expected + torch.distributions.Normal(mean, std).log_prob(path.x[:, k + 1]).sum(
            (-2, -1)
        )
    error = float((path.logprob.sum(1) - expected).mean().detach())
    assert abs(error) < 1e-6, f"off by {error:.1f} nats"


def check_entropy_gradient(sample):
    """20. The entropy of the path rises by 1 nat per noisy dim and step with log sigma."""
    net, path = draw(sample)
    entropy = -path.logprob.sum(1).mean()
    assert entropy.requires_grad
    (slope,) = torch.autograd.grad(entropy, net.log_sigma)
    assert float(slope) == pytest.approx(K * D)


def check_noise(sample):
    """Rows and dims have noise of their own."""
    _, path = draw(sample)
    net, transition = Net(), DenoisingTransition("flow_sde_learned", K)
    v, log_std = net(path.x[:, :1], torch.ones(len(path.x), 1, dtype=torch.float64))
    mean, std = transition.mean_std(path.x[:, 0], v[:, 0], 0, log_std[:, 0])
    noise = ((path.x[:, 1] - mean) / std).detach().flatten(1)
    assert float(noise.std(0).min()) > 0.5 and float(noise.std(1).min()) > 0.1


CHECKS = {
    "density": check_density,
    "entropy_gradient": check_entropy_gradient,
    "noise": check_noise,
}


@pytest.mark.parametrize("name", CHECKS)
def test_sample_path_passes_what_a_published_defect_fails(name):
    CHECKS[name](sample_path)
    with pytest.raises(AssertionError):
        CHECKS[name](DEFECTS[name])


def test_the_published_density_is_69_nats_off():
    with pytest.raises(AssertionError, match=r"off by -69\.3 nats"):
        check_density(DEFECTS["density"])


@pytest.mark.parametrize("kind", ["flow_noise", "flow_sde_learned"])
def test_path_and_tanh_are_a_change_of_variables(kind):
    """Log N(noise) - log |d (x_1 .. x_{K-1}, action) / d noise|, the Jacobian from autograd."""
    steps, dims = 3, 2
    start = randn((1, 1, dims), gen(5)).double()
    noise = randn((steps, 1, 1, dims), gen(6)).double()

    def step_inputs(x, t):
        return torch.tanh(x) * t[..., None, None], -0.7 + 0.3 * torch.sin(x)

    transition, squash = DenoisingTransition(kind, steps), TanhSquash()

    def walk(flat):
        x, out = start, []
        for k, e in enumerate(flat.view(steps, 1, 1, dims)):
            v, log_std = step_inputs(
                x[:, None], torch.full((1, 1), 1 - k / steps, dtype=torch.float64)
            )
            mean, std = transition.mean_std(x, v[:, 0], k, log_std[:, 0])
            x = mean + std * e
            out.append(x if k < steps - 1 else squash.inverse(x))
        return torch.stack(out).flatten(), x

    jacobian = torch.autograd.functional.jacobian(lambda e: walk(e)[0], noise.flatten())
    expected = (
        torch.distributions.Normal(0.0, 1.0).log_prob(noise).sum()
        - torch.linalg.slogdet(jacobian)[1]
    )
    x, logprob = start, torch.zeros(1)
    for k in range(steps):
        v, log_std = step_inputs(x[:, None], torch.full((1, 1), 1 - k / steps, dtype=torch.float64))
        mean, std = transition.mean_std(x, v[:, 0], k, log_std[:, 0])
        new = mean + std * noise[k]
        logprob = logprob + transition.log_prob(x, new, v[:, 0], k, log_std[:, 0])
        x = new
    logprob = logprob - squash.log_det(x)
    torch.testing.assert_close(logprob[0], expected)


def test_the_density_of_the_squashed_action_integrates_to_one():
    actions = torch.linspace(-1, 1, 200_001, dtype=torch.float64)[1:-1]
    x = torch.atanh(actions).view(-1, 1, 1)
    for mean, std in ((0.3, 0.2), (-1.0, 0.9)):
        logp = torch.distributions.Normal(mean, std).log_prob(x).sum(
            (-2, -1)
        ) - TanhSquash().log_det(x)
        assert float(torch.trapezoid(logp.exp(), actions)) == pytest.approx(1.0, abs=1e-4)


def test_the_tanh_correction_is_stable():
    x = torch.tensor([[[0.0]], [[3.0]], [[-8.0]]], dtype=torch.float64)
    torch.testing.assert_close(
        TanhSquash().log_det(x), torch.log1p(-torch.tanh(x).square()).sum((-2, -1))
    )
    far = torch.tensor([[[40.0]], [[-300.0]]], requires_grad=True)
    out = TanhSquash().log_det(far)
    out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(far.grad).all()
    torch.testing.assert_close(out.detach(), 2 * (math.log(2) - far.detach().abs()).flatten())


def test_normalised_actions_have_their_constant_too():
    made = policy(squash=False)
    data = torch.randn(100, 2, generator=gen(3)) * torch.tensor([0.2, 0.4])
    made.normalize_action.fit(data)
    x = torch.zeros(4, 3, 2)
    expected = 3 * data.std(0, correction=0).log().sum()
    torch.testing.assert_close(made.normalize_action.log_det(x), expected.expand(4))


# The velocities.


def set_gate(net, gate, candidate):
    with torch.no_grad():
        net.head.weight.zero_()
        gate_bias, h, _ = net.head.bias.view(3, -1)
        gate_bias.fill_(gate)
        h.copy_(candidate)


@pytest.mark.parametrize(("logit", "g"), [(-60.0, 0.0), (60.0, 1.0), (0.0, 0.5)])
def test_11_a_constant_gate_and_candidate(logit, g):
    net, h = GatedVelocity(3, 1, 2, 8, 1), torch.tensor([0.7, -0.4])
    set_gate(net, logit, h)
    x0 = torch.tensor([[[2.0, -1.0]]], requires_grad=True)
    end = integrate(partial(net, torch.zeros(1, 3)), DenoisingTransition(num_steps=4), x0)
    r = (1 - g / 4) ** 4
    if g == 1:
        assert r == pytest.approx(0.3164, abs=1e-4)
    torch.testing.assert_close(end[0, 0], r * x0[0, 0] + (1 - r) * h)
    one = partial(net, torch.zeros(1, 3), t=torch.ones(1, 1))
    step = torch.autograd.functional.jacobian(lambda x: x - one(x=x[:, None])[0][:, 0] / 4, x0)
    torch.testing.assert_close(step.view(2, 2), (1 - g / 4) * torch.eye(2))


def test_12_the_gate_starts_at_sigmoid_of_5_for_every_input():
    net = GatedVelocity(7, 3, 2, 16, 2)
    gate, _ = net.gate_and_candidate(
        torch.randn(9, 7), 5 * torch.randn(9, 4, 3, 2), torch.rand(9, 4)
    )
    torch.testing.assert_close(gate, torch.full_like(gate, 0.99331), atol=1e-5, rtol=0)


def test_13_the_decoder_is_equivariant_to_a_permutation_of_the_batch():
    net = DecodedVelocity(7, 3, 2, 16, 2)
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    features, x, t = torch.randn(6, 7), torch.randn(6, 4, 3, 2), torch.rand(6, 4)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    for straight, permuted in zip(
        net(features, x, t), net(features[order], x[order], t[order]), strict=True
    ):
        assert straight.abs().mean() > 0.01
        torch.testing.assert_close(straight[order], permuted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("velocity", [v for v in VELOCITIES if v != "gaussian"])
def test_the_gradient_reaches_every_step(velocity):
    made = policy(velocity=velocity)
    context = made.encode(observation())
    start = randn((5, 1, 2), gen(7)).requires_grad_()
    path = sample_path(partial(made.step_inputs, context), made.transition, start, gen(8))
    (gradient,) = torch.autograd.grad(path.end.square().sum(), start)
    assert (gradient != 0).all()


# A policy that plans more than is executed.


class Padded(FlowMLP):
    """It plans two actions more than it executes, of one dim more than the env has."""

    @property
    def flow_shape(self):
        return self.config.horizon + 2, self.spec.action_dim + 1

    def __init__(self, config, spec):
        super().__init__(config, spec)
        net = VELOCITIES[config.velocity]
        self.net = net(spec.proprio_dim, *self.flow_shape, config.width, config.layers)
        for p in self.net.parameters():
            nn.init.normal_(p, std=0.4)


def padded(**settings):
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Padded(FlowMLPConfig(**{**TINY, "horizon": 2, **settings}), SPEC)


def test_a_padded_policy_keeps_the_promises():
    check_policy(padded(steer_width=8), observation(), SPEC)


def test_what_sac_flow_proposes_is_what_a_padded_policy_does():
    made = padded()
    algorithm = SACFlow(SACFlowConfig(entropy="path"), made)
    choice, logprob, _ = algorithm._sample_choice(observation(), gen(9))
    acted = made.sample(observation(), generator=gen(9), mode="train")
    torch.testing.assert_close(choice, acted.actions)
    log_det = made.normalize_action.log_det(made.executed(acted.trace.x[:, -1]))
    torch.testing.assert_close(logprob, acted.logprob.sum(1) - log_det)


def test_what_is_planned_beside_the_executed_actions_begins_with_noise():
    chosen = torch.randn(500, 2, 3, generator=gen(1))
    start = complete_noise(chosen, (4, 5), gen(2))
    assert torch.equal(start[:, :2, :3], chosen)
    rest = torch.cat([start[:, :2, 3:].flatten(), start[:, 2:].flatten()])
    assert float(rest.mean()) == pytest.approx(0.0, abs=0.05)
    assert float(rest.std()) == pytest.approx(1.0, abs=0.05)
    # Where all is executed nothing is drawn.
    generator = gen(2)
    assert complete_noise(chosen, (2, 3), generator) is chosen
    assert torch.equal(generator.get_state(), gen(2).get_state())


def test_a_steered_padded_policy_does_what_dsrl_proposes_at_its_start():
    """Its steering noise aside, DSRL's actions are those of the base policy, not of padding with zeros."""
    made = padded(steer_width=8, horizon=1)
    context = made.encode(observation(1))
    obs = observation(1)
    many = Obs({}, obs.proprio.expand(400, -1), obs.instruction * 400)
    noise = torch.zeros(400, 1, SPEC.action_dim)
    spread = made.decode(
        context.expand(400, -1), complete_noise(noise, made.flow_shape, gen(3))
    ).std(0)
    made.steer.bound = 1e-9  # its noise is 0 now
    acted = made.sample(many, generator=gen(4), mode="eval").actions.std(0)
    assert float(acted.min()) > 0.0
    torch.testing.assert_close(acted, spread, rtol=0.2, atol=0.0)


# The objective.


def test_20_the_temperature_moves_with_the_entropy_s_distance_to_its_target():
    log_alpha = torch.tensor(0.3, requires_grad=True)
    logprob = torch.tensor([1.0, 2.5, -0.5])
    (slope,) = torch.autograd.grad(temperature_loss(log_alpha, logprob, -2.0), log_alpha)
    entropy = -logprob.mean()
    torch.testing.assert_close(
        slope, log_alpha.detach().exp() * (entropy + 2.0)
    )  # d/d alpha, times d alpha/d log alpha


def soft_optimum(defect=None):
    """The std that maximises E[Q] + alpha H for Q = -(a - .3)^2 / (2 tau^2), found by gradient descent."""
    tau, alpha = 0.5, 0.25
    mean, log_std = torch.zeros(1, requires_grad=True), torch.full((1,), -1.5, requires_grad=True)
    optimizer, generator = torch.optim.Adam([mean, log_std], lr=0.03), gen(0)
    transition = DenoisingTransition("flow_noise", 1)
    for _ in range(150):
        path = (defect or sample_path)(
            lambda x, t: (x - mean, log_std.expand_as(x)),
            transition,
            randn((256, 1, 1), generator),
            generator,
        )
        q = -(path.end - 0.3).square().sum((1, 2)) / (2 * tau**2)
        optimizer.zero_grad()
        sac_actor_loss(q, path.logprob.sum(1), alpha).backward()
        optimizer.step()
    return mean.item(), log_std.exp().item(), tau * math.sqrt(alpha)


def test_the_actor_finds_the_soft_optimum_in_closed_form():
    mean, std, optimum = soft_optimum()
    assert mean == pytest.approx(0.3, abs=0.06) and std == pytest.approx(optimum, rel=0.2)
    _, without_log_std, _ = soft_optimum(DEFECTS["density"])
    assert without_log_std < 0.2 * optimum, "without -log(std) nothing holds the noise up"


# The critics.


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_critics_are_independent_nets(norm):
    torch.manual_seed(0)
    critics = Critics(4, 2, 3, 8, 2, norm).eval()
    features, choice = torch.randn(5, 4), torch.randn(5, 1, 2)
    q = critics(features, choice)
    assert q.shape == (3, 5) and (q[0] - q[1]).abs().max() > 1e-3
    grads = torch.autograd.grad(q[1].sum(), list(critics.weights))
    assert all((g[0] == 0).all() and (g[2] == 0).all() and (g[1] != 0).any() for g in grads)


# The loop.


def setup(num_envs=2, env=None, **settings):
    env = GymnasiumEnv(
        env or GymnasiumConfig(id="Pendulum-v1", num_envs=num_envs, max_episode_steps=30)
    )
    made = make_policy(FlowMLPConfig(**TINY, horizon=2, num_denoise_steps=2), env.spec, 0)
    defaults = {
        "num_chunks": 8,
        "warmup_chunks": 16,
        "batch_size": 16,
        "critic_width": 16,
        "capacity": 500,
    }
    torch.manual_seed(0)
    return env, SACFlow(SACFlowConfig(**{**defaults, **settings}), made)


def run(env, algorithm, iterations, first=0, player=None):
    player, row = player or Player(env), {}
    for i in range(first, first + iterations):
        generator = seeded(0, i)
        batch = player.collect(algorithm, i, generator=generator)
        row = algorithm.update(batch, progress=0.0, generator=generator)
    return row


@pytest.mark.parametrize("entropy", ["action", "path"])
def test_whose_entropy_the_temperature_holds(entropy):
    """The log-probability is that of the last step, given the one before it, or of all steps."""
    env, algorithm = setup(entropy=entropy)
    p, obs = algorithm.policy, env.reset([0, 1])
    choice, logprob, _ = algorithm._sample_choice(obs, gen(1))
    start, steps = randn((2, 2, 1), generator := gen(1)), 2 if entropy == "path" else 1
    path = sample_path(partial(p.step_inputs, p.encode(obs)), p.transition, start, generator)
    torch.testing.assert_close(choice, torch.tanh(path.end))
    trace = DenoisingTrace(path.x, torch.ones(2, 2, dtype=torch.bool))
    scored = p.evaluate(obs, trace).logprob[:, -steps:].sum(1)
    torch.testing.assert_close(logprob, scored - TanhSquash().log_det(path.end))
    assert algorithm.target_entropy == -2 * steps  # H A dims, and K


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_a_few_updates_move_everything(norm):
    env, algorithm = setup(critic_norm=norm)
    before = {k: v.clone() for k, v in algorithm.policy.state_dict().items()}
    row = run(env, algorithm, 3)
    assert (
        row["gradient_steps"] == 48
    )  # three rollouts of 16 chunks; the first one fills the warm-up
    assert all(math.isfinite(v) for v in row.values())
    after = algorithm.policy.state_dict()
    assert any(not torch.equal(before[k], after[k]) for k in before if k.startswith("net."))
    assert all(torch.equal(before[k], after[k]) for k in before if k.startswith("critic."))
    assert row["alpha"] != pytest.approx(0.2)


def test_utd_and_delay_count_gradient_steps():
    env, algorithm = setup(utd=0.5, warmup_chunks=0, policy_delay=4)
    row = run(env, algorithm, 3)
    assert row["gradient_steps"] == 24  # 48 chunks
    steps = int(algorithm.actor_optimizer.adam.state_dict()["state"][0]["step"])
    assert steps == 24 // 4


def test_critics_learn_first():
    env, algorithm = setup(warmup_chunks=0, critic_warmup=1000)
    before = {k: v.clone() for k, v in algorithm.policy.state_dict().items()}
    run(env, algorithm, 2)
    assert all(torch.equal(before[k], v) for k, v in algorithm.policy.state_dict().items())


@pytest.mark.parametrize("save_replay", [True, False])
def test_resume_repeats_the_run(save_replay):
    env, straight = setup(save_replay=save_replay)
    run(env, straight, 3)
    state, weights = (
        straight.state_dict(),
        {k: v.clone() for k, v in straight.policy.state_dict().items()},
    )
    state = torch.utils._pytree.tree_map(
        lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state
    )
    run(env, straight, 2, first=3)

    env, resumed = setup(save_replay=save_replay)
    resumed.policy.load_state_dict(weights)
    resumed.load_state_dict(state)
    assert len(resumed.buffer) == (48 if save_replay else 0)
    run(env, resumed, 2, first=3)
    same = all(
        torch.equal(v, resumed.policy.state_dict()[k])
        for k, v in straight.policy.state_dict().items()
    )
    assert same is save_replay


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"critic_norm": "batch", "tau": 0.01}, "has no target nets"),
        ({"alpha_lr": 0.0, "target_entropy": -2.0}, "leaves the temperature as it is"),
        ({"critic_shift": 2}, "own_encoder=false shifts no pictures"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        SACFlowConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"velocity": "gaussian"}, "num_denoise_steps=1"),
        ({"noise_min": 2.0}, "must not be above policy.noise_max"),
    ],
)
def test_policies_that_cannot_be_meant_are_refused(settings, said):
    with pytest.raises(UserError, match=said):
        FlowMLPConfig(**settings)


def test_an_entropy_out_of_reach_is_refused():
    made = make_policy(FlowMLPConfig(**TINY, noise_min=0.01, noise_max=0.05), SPEC, 0)
    with pytest.raises(UserError, match="no step has more than"):
        SACFlow(SACFlowConfig(), made)


def test_flow_mlp_refuses_what_it_cannot_see():
    for change in ({"cameras": {"front": (64, 64)}}, {"tasks": ("a", "b")}):
        with pytest.raises(UserError, match="neither pictures nor instructions"):
            make_policy(FlowMLPConfig(), dataclasses.replace(SPEC, **change), 0)
