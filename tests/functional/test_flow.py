"""The transitions against closed forms, mostly on a toy whose velocity field is known.

Toy: data a ~ N(m, s^2). Then x_t ~ N((1-t) m, S_t) with S_t = (1-t)^2 s^2 + t^2, and the exact
velocity is affine in x. Every transition is then affine too, so the distribution of its result
follows from a recursion, without sampling.
"""

import itertools
import math

import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.functional.flow import (
    DenoisingTransition,
    complete_noise,
    draw_stochastic_steps,
    flow_matching_pair,
    gaussian_log_prob,
    initial_log_prob,
    randn,
    sample_training_time,
    squash_log_std,
    timesteps,
)
from embodyrl.functional.losses import flow_matching_loss, ppo_policy_loss

M, S = 0.5, 0.3
SHAPE = (5, 2, 3)  # B, H, A
F64 = torch.float64


def toy_velocity(x, t):
    variance = (1 - t) ** 2 * S**2 + t**2
    return -M + (t - (1 - t) * S**2) / variance * (x - (1 - t) * M)


def affine(transition, k, log_std=None):
    """Slope, intercept and std of x_{k+1} = slope x_k + intercept + std e for the toy velocity."""
    x = torch.tensor([0.0, 1.0], dtype=F64).view(2, 1, 1)
    mean, std = transition.mean_std(x, toy_velocity(x, 1 - k / transition.num_steps), k, log_std)
    return float(mean[1] - mean[0]), float(mean[0]), float(std.flatten()[0])


def toy_result(transition, log_std=None):
    """Mean and std of the final sample, from x_0 ~ N(0, 1)."""
    mean, variance = 0.0, 1.0
    for k in range(transition.num_steps):
        slope, intercept, std = affine(transition, k, log_std)
        mean, variance = slope * mean + intercept, slope**2 * variance + std**2
    return mean, math.sqrt(variance)


def velocity(x, weight=0.3):
    """Some smooth field for tests that need no known answer."""
    return torch.tanh(weight * x + 0.1) * 1.5


def sample_path(transition, generator, stochastic=None, shape=SHAPE, log_std=None, dtype=F64):
    """A path (B, K+1, H, A), the log-prob of each step (B, K), and which steps drew noise."""
    steps = transition.num_steps
    if stochastic is None:
        stochastic = draw_stochastic_steps(shape[0], steps, "all", generator, transition.num_noisy)
    x = randn(shape, generator).to(dtype)
    path, log_probs = [x], []
    for k in range(steps):
        x, v, noise = path[-1], velocity(path[-1]), randn(shape, generator).to(dtype)
        path.append(transition.step(x, v, k, noise, stochastic[:, k], log_std))
        log_probs.append(transition.log_prob(x, path[-1], v, k, log_std))
    return torch.stack(path, 1), torch.where(stochastic, torch.stack(log_probs, 1), 0.0), stochastic


def score(transition, path, stochastic, log_std=None, weight=0.3, mask=None):
    """The log-prob of each step (B, K), all at once, as training computes it."""
    x, x_next = path[:, :-1], path[:, 1:]
    k = torch.arange(transition.num_steps)
    return torch.where(
        stochastic, transition.log_prob(x, x_next, velocity(x, weight), k, log_std, mask), 0.0
    )


NOISY = [
    DenoisingTransition("flow_sde", 4, 0.5),
    DenoisingTransition("flow_sde", 1, 0.5),
    DenoisingTransition("flow_cps", 4, 0.5),
    DenoisingTransition("flow_noise", 4),
]
IDS = [f"{t.kind}-{t.num_steps}" for t in NOISY]


def learned(transition, dtype=F64):
    """The log-std argument that a transition needs."""
    return (
        torch.full((1, 1), math.log(0.12), dtype=dtype) if transition.kind == "flow_noise" else None
    )


# Time, pairs and noise


def test_timesteps_run_from_noise_to_the_last_step_before_data():
    assert timesteps(4).tolist() == [1.0, 0.75, 0.5, 0.25]
    # LeRobot's sampler, bit for bit: float64, rounded once. In float32 3/5 from 1 is another number.
    for count in range(1, 33):
        exact = [1.0 + k * (-1.0 / count) for k in range(count)]
        assert torch.equal(timesteps(count), torch.tensor(exact, dtype=torch.float32))


def test_pair_interpolates_and_points_from_action_to_noise():
    a, e = torch.randn(3, 2, 2), torch.randn(3, 2, 2)
    x, u = flow_matching_pair(a, torch.tensor([0.0, 0.5, 1.0]), e)
    assert (
        torch.equal(x[0], a[0])
        and torch.equal(x[2], e[2])
        and torch.allclose(x[1], (a[1] + e[1]) / 2)
    )
    assert torch.equal(u, e - a)


def test_training_times():
    generator = torch.Generator().manual_seed(0)
    uniform = sample_training_time(100_000, generator, "uniform")
    beta = sample_training_time(100_000, generator, "beta")
    assert uniform.min() > 0 and uniform.max() <= 1 and abs(uniform.mean() - 0.5) < 0.005
    assert (
        beta.min() > 0 and beta.max() <= 1 and abs(beta.mean() - (0.001 + 0.999 * 0.6)) < 0.005
    )  # mean of Beta: 3/5
    assert abs(beta.var() - 0.999**2 * 0.6 * 0.4 / 3.5) < 0.002
    default, named = (
        sample_training_time(9, torch.Generator().manual_seed(1), *schedule)
        for schedule in ((), ("uniform",))
    )
    assert torch.equal(default, named)
    with pytest.raises(UserError, match="Did you mean 'beta'"):
        sample_training_time(1, generator, "betta")


def test_rows_with_their_own_generator_do_not_depend_on_the_others():
    def generators(seeds):
        return [torch.Generator().manual_seed(s) for s in seeds]

    full = randn((3, 4, 7), generators([5, 6, 7]))
    assert torch.equal(full[[2, 0]], randn((2, 4, 7), generators([7, 5])))
    assert randn((0, 4), []).shape == (0, 4)
    with pytest.raises(ValueError, match="2 generators"):
        randn((3, 1), generators([0, 1]))


def test_noise_around_what_was_chosen():
    chosen = torch.full((400, 2, 1), 7.0)
    start = complete_noise(chosen, (3, 4), torch.Generator().manual_seed(0))
    assert start.shape == (400, 3, 4) and (start[:, :2, :1] == 7).all()
    drawn = randn((400, 3, 4), torch.Generator().manual_seed(0))
    rest = torch.ones(3, 4, dtype=torch.bool)
    rest[:2, :1] = False
    assert torch.equal(start[:, rest], drawn[:, rest])
    # A chunk that is as long, or as wide, is completed in the other direction.
    for shape in ((2, 3), (5, 1)):
        assert complete_noise(chosen, shape, torch.Generator()).shape == (400, *shape)
    assert complete_noise(chosen, (2, 1), torch.Generator()) is chosen
    assert complete_noise(chosen.double(), (3, 4), torch.Generator()).dtype == F64


@pytest.mark.parametrize("several", [False, True])
def test_all_that_is_random_comes_from_the_generators_that_are_given(several):
    def draw(seed, other):
        torch.manual_seed(other)
        before = torch.random.get_rng_state()
        generators = [torch.Generator().manual_seed(seed + k) for k in range(6)]
        given = generators if several else generators[0]
        found = [
            randn((6, 2), given),
            sample_training_time(6, given),
            draw_stochastic_steps(6, 9, "one", given).float(),
        ]
        assert torch.equal(torch.random.get_rng_state(), before)
        return torch.cat([x.flatten() for x in found])

    assert torch.equal(draw(3, other=0), draw(3, other=1))
    assert not torch.equal(draw(3, other=0), draw(4, other=0))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_steps_have_the_precision_of_the_path(as_tensor):
    """K = 7 is exact in no binary format; in float32 the time is off by 1e-8."""
    steps, k, d = 7, 3, 1 / 7
    t, s2 = 1 - 3 / 7, 0.25 * (1 - 3 / 7) / (3 / 7)
    x, v = torch.randn(4, 1, 1, dtype=F64), torch.randn(4, 1, 1, dtype=F64)
    mean, std = DenoisingTransition("flow_sde", steps, 0.5).mean_std(
        x, v, torch.full((4,), k) if as_tensor else k
    )
    expected = (1 - t + d) * (x - t * v) + (t - d - s2 * d / (2 * t)) * (x + (1 - t) * v)
    torch.testing.assert_close(mean, expected, rtol=1e-13, atol=1e-14)
    assert std.flatten().tolist() == pytest.approx([math.sqrt(s2 * d)] * len(std), rel=1e-14)


# MATHS: the identities


def test_1_exact_ode_maps_noise_affinely_and_euler_is_first_order():
    """K = 1 collapses to the mean; the error of the std falls as 1/K towards x_1 = m + s e."""
    mean, std = toy_result(DenoisingTransition("ode", 1))
    assert mean == pytest.approx(M) and std == pytest.approx(0.0, abs=1e-12)
    errors = []
    for steps in (50, 100, 200, 400):
        mean, std = toy_result(DenoisingTransition("ode", steps))
        assert mean == pytest.approx(M)
        errors.append(abs(std - S))
    assert [a / b for a, b in itertools.pairwise(errors)] == pytest.approx([2, 2, 2], rel=0.05)


def test_2_flow_sde_keeps_the_mean_and_its_std_tends_to_the_data_s():
    for steps in (1, 2, 3, 4, 10, 100):
        assert toy_result(DenoisingTransition("flow_sde", steps, 0.5))[0] == pytest.approx(M)
    assert toy_result(DenoisingTransition("flow_sde", 100, 0.5))[1] == pytest.approx(S, rel=0.02)
    assert toy_result(DenoisingTransition("flow_sde", 3, 0.5))[1] == pytest.approx(0.2394, abs=5e-5)


@pytest.mark.parametrize(
    ("steps", "stds"),
    [(3, [0.5, 0.408248, 0.204124]), (4, [0.5, 0.433013, 0.25, 0.144338])],
    ids=["K3", "K4"],
)
def test_2_flow_sde_std_by_step(steps, stds):
    x = torch.zeros(1, steps, 1, 1)
    _, std = DenoisingTransition("flow_sde", steps, 0.5).mean_std(x, x, torch.arange(steps))
    assert std.flatten().tolist() == pytest.approx(stds, abs=1e-6)


def test_3_score_follows_from_the_velocity():
    """grad log p_t(x) = -(x + (1-t) v) / t, by autograd on the toy's marginal."""
    for t in (0.1, 0.5, 0.9, 1.0):
        x = torch.linspace(-2, 2, 9, dtype=F64, requires_grad=True)
        log_p = -0.5 * (x - (1 - t) * M) ** 2 / ((1 - t) ** 2 * S**2 + t**2)
        (gradient,) = torch.autograd.grad(log_p.sum(), x)
        assert torch.allclose(gradient, -(x + (1 - t) * toy_velocity(x, t)) / t)


def test_3_flow_sde_is_the_euler_step_of_the_reverse_sde():
    """Mean = x - d v + (s^2 d / 2) grad log p_t(x)."""
    transition, d = DenoisingTransition("flow_sde", 5, 0.7), 0.2
    x = torch.linspace(-2, 2, 9, dtype=F64).view(-1, 1, 1)
    for k in range(1, 5):
        t = 1 - k * d
        v = toy_velocity(x, t)
        s2 = 0.7**2 * t / (1 - t)
        mean, std = transition.mean_std(x, v, k)
        assert torch.allclose(mean, x - d * v - 0.5 * s2 * d * (x + (1 - t) * v) / t)
        assert float(std.flatten()) == pytest.approx(math.sqrt(s2 * d))


def test_3_the_learned_sde_with_flow_sdes_noise_is_flow_sde():
    """And any other std changes the mean by -(std^2 - s^2 d) / (2t) x1."""
    plain, learns = (
        DenoisingTransition("flow_sde", 4, 0.7),
        DenoisingTransition("flow_sde_learned", 4),
    )
    x, v = torch.randn(5, 4, 2, 3, dtype=F64), torch.randn(5, 4, 2, 3, dtype=F64)
    k = torch.arange(4)
    mean, std = plain.mean_std(x, v, k)
    again, same = learns.mean_std(x, v, k, std.log().expand_as(x))
    torch.testing.assert_close(again, mean)
    torch.testing.assert_close(same, std.expand_as(x))
    other, wide = learns.mean_std(x, v, k, torch.full_like(x, math.log(0.9)))
    t = 1 - k.view(4, 1, 1) / 4
    x1 = x + (1 - t) * v
    torch.testing.assert_close(other, mean - (0.81 - std**2) / (2 * t) * x1)
    torch.testing.assert_close(wide, torch.full_like(x, 0.9))


@pytest.mark.parametrize("kind", ["flow_sde", "flow_cps"])
def test_4_without_noise_every_transition_is_the_ode(kind):
    x, v = torch.randn(5, 4, 2, 3, dtype=F64), torch.randn(5, 4, 2, 3, dtype=F64)
    transition = DenoisingTransition(kind, 4, eta=0.0)
    mean, std = transition.mean_std(x, v, torch.arange(4))
    assert torch.allclose(mean, x - v / 4) and (std == 0).all() and transition.num_noisy == 0


def test_4_flow_noise_without_sigma_is_the_ode():
    x, v = torch.randn(SHAPE), torch.randn(SHAPE)
    mean, std = DenoisingTransition("flow_noise", 4).mean_std(
        x, v, 2, torch.full((1, 1), -torch.inf)
    )
    assert torch.equal(mean, x - v / 4) and (std == 0).all()


@pytest.mark.parametrize("eta", [0.1, 0.5, 1.0])
def test_5_cps_preserves_the_coefficients_of_the_flow(eta):
    """Weight w1 of x1 and std satisfy w1^2 + std^2 = (t-d)^2; the weight of x0 is 1 - (t-d)."""
    transition = DenoisingTransition("flow_cps", 4, eta)
    for k in range(4):
        t, after = 1 - k / 4, 1 - (k + 1) / 4
        # v chosen such that (x0, x1) = (1, 0), then (0, 1)
        weight0 = transition.mean_std(torch.full((1, 1, 1), 1 - t), torch.full((1, 1, 1), -1.0), k)[
            0
        ].item()
        mean, std = transition.mean_std(torch.full((1, 1, 1), t), torch.ones(1, 1, 1), k)
        assert weight0 == pytest.approx(1 - after)
        assert mean.item() ** 2 + std.item() ** 2 == pytest.approx(after**2, abs=1e-7)
        assert std.item() == pytest.approx(after * math.sin(math.pi * eta / 2), abs=1e-7)


def test_6_flow_noise_with_one_step_is_a_gaussian_policy():
    x, v, x_next = (torch.randn(SHAPE, dtype=F64) for _ in range(3))
    log_std = torch.randn(SHAPE, dtype=F64)
    expected = torch.distributions.Normal(x - v, log_std.exp()).log_prob(x_next).sum((1, 2))
    assert torch.allclose(
        DenoisingTransition("flow_noise", 1).log_prob(x, x_next, v, 0, log_std), expected
    )


def path_gaussian(transition, log_std=None):
    """The toy's path (x_0, ..., x_K) as one Gaussian: x = mean + L e with e ~ N(0, I), and L."""
    steps = transition.num_steps
    mean, lower = torch.zeros(steps + 1, dtype=F64), torch.zeros(steps + 1, steps + 1, dtype=F64)
    lower[0, 0] = 1.0
    for k in range(steps):
        slope, intercept, std = affine(transition, k, log_std)
        mean[k + 1] = slope * mean[k] + intercept
        lower[k + 1] = slope * lower[k]
        lower[k + 1, k + 1] = std
    return mean, lower


@pytest.mark.parametrize("transition", [NOISY[0], NOISY[3]], ids=["flow_sde", "flow_noise"])
def test_7_chain_rule_gives_the_joint_density_of_the_path(transition):
    log_std = learned(transition)
    mean, lower = path_gaussian(transition, log_std)
    path = mean + 0.7 * torch.randn(6, 5, dtype=F64) @ lower.T
    joint = torch.distributions.MultivariateNormal(mean, scale_tril=lower).log_prob(path)
    x = path[..., None, None]
    t = timesteps(4).to(F64).view(1, 4, 1, 1)
    steps = transition.log_prob(
        x[:, :-1], x[:, 1:], toy_velocity(x[:, :-1], t), torch.arange(4), log_std
    )
    assert torch.allclose(initial_log_prob(x[:, 0]) + steps.sum(1), joint)


@pytest.mark.parametrize("transition", NOISY, ids=IDS)
@pytest.mark.parametrize("mode", ["all", "one"])
def test_8_first_minibatch_has_ratio_1(transition, mode):
    """Scoring all steps at once gives what sampling computed step by step."""
    generator = torch.Generator().manual_seed(1)
    stochastic = draw_stochastic_steps(
        SHAPE[0], transition.num_steps, mode, generator, transition.num_noisy
    )
    log_std = learned(transition, torch.float32)
    path, old, _ = sample_path(
        transition, generator, stochastic, log_std=log_std, dtype=torch.float32
    )
    new = score(transition, path, stochastic, log_std)
    _, stats = ppo_policy_loss(
        new.sum(1), old.sum(1), torch.randn(5), torch.ones(5, dtype=torch.bool), 0.2, 0.2
    )
    assert stats["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert (
        stats["log_ratio_max"] < 1e-6 and stats["approx_kl"] < 1e-6 and stats["clip_fraction"] == 0
    )


@pytest.mark.parametrize("limit", ["clamp", "tanh"])
def test_8_limited_actions_keep_the_ratio_of_the_path(limit):
    """The path is scored as drawn, and the action limited after it.

    A clamp or tanh of the result is then a part of the world, not of the density: tanh's Jacobian
    depends on the sample alone and cancels, so the ratio is that of the path.
    """
    transition = DenoisingTransition("flow_sde", 4, 0.9)
    path, old, stochastic = sample_path(transition, torch.Generator().manual_seed(2))
    for weight, expected in ((0.3, True), (0.4, False)):
        new = score(transition, path, stochastic, weight=weight)
        if limit == "tanh":
            action = path[:, -1].tanh()
            log_det = torch.log1p(-(action**2)).sum((1, 2))
            log_ratio = (new.sum(1) - log_det) - (old.sum(1) - log_det)
            assert torch.allclose(log_ratio, new.sum(1) - old.sum(1))
        else:
            assert (path[:, -1].clamp(-1, 1) != path[:, -1]).any()
            log_ratio = new.sum(1) - old.sum(1)
        assert torch.allclose(log_ratio, torch.zeros(5, dtype=F64), atol=1e-6) is expected


def test_8_masked_actions_and_padded_dims_count_neither_in_sampling_nor_in_scoring():
    transition = NOISY[0]
    path, _, stochastic = sample_path(transition, torch.Generator().manual_seed(3))
    mask = torch.ones(5, 1, 2, 3, dtype=torch.bool)
    mask[2, :, 1] = False  # the episode ended after the first action
    mask[..., 2] = False  # a padded dim
    scored = score(transition, path, stochastic, mask=mask)
    parts = score(transition, path[..., :2], stochastic)
    assert torch.allclose(scored[[0, 1, 3, 4]], parts[[0, 1, 3, 4]])
    assert torch.allclose(scored[2], score(transition, path[2:3, :, :1, :2], stochastic[2:3])[0])
    garbled = torch.where(mask.expand(5, 5, 2, 3), path, torch.nan)
    assert torch.equal(score(transition, garbled, stochastic, mask=mask), scored)


def test_masks_leave_dims_out_of_entropy_and_initial_density():
    x = torch.randn(4, 2, 3, dtype=F64)
    mask = torch.tensor([[True, True, False], [True, False, False]])
    unit = 0.5 * math.log(2 * math.pi * math.e)
    entropy = NOISY[3].entropy(x, x, 1, learned(NOISY[3]), mask)
    torch.testing.assert_close(entropy, torch.full((4,), 3 * (unit + math.log(0.12)), dtype=F64))
    expected = torch.distributions.Normal(0.0, 1.0).log_prob(x[:, mask]).sum(1)
    torch.testing.assert_close(initial_log_prob(x, mask), expected)
    assert (initial_log_prob(x, ~mask & mask) == 0).all()


@pytest.mark.parametrize("transition", NOISY, ids=IDS)
def test_9_density_integrates_to_1(transition):
    axis = torch.linspace(-6, 6, 601, dtype=F64)
    grid = torch.stack(torch.meshgrid(axis, axis, indexing="ij"), -1).view(-1, 1, 2)  # H = 1, A = 2
    x = torch.tensor([[[0.4, -0.9]]], dtype=F64)
    for k in range(transition.num_noisy):
        p = transition.log_prob(
            x.expand_as(grid), grid, velocity(x).expand_as(grid), k, learned(transition)
        ).exp()
        assert float(p.sum() * (axis[1] - axis[0]) ** 2) == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("transition", [NOISY[0], NOISY[3]], ids=["flow_sde", "flow_noise"])
def test_10_path_entropy_against_action_entropy(transition):
    """H(path) = H(x_0) + sum of steps = log-det of the joint = H(action) + H(rest | action)."""
    log_std = learned(transition)
    _, lower = path_gaussian(transition, log_std)
    covariance = lower @ lower.T
    x = torch.zeros(1, 4, 1, 1, dtype=F64)
    steps = transition.entropy(x, x, torch.arange(4), log_std).sum()
    unit = 0.5 * math.log(2 * math.pi * math.e)
    path = unit + float(steps)
    assert path == pytest.approx(5 * unit + 0.5 * float(torch.logdet(covariance)))
    action = unit + math.log(toy_result(transition, log_std)[1])
    rest = covariance[:4, :4] - covariance[:4, 4:] @ covariance[4:, :4] / covariance[4, 4]
    assert path - action == pytest.approx(4 * unit + 0.5 * float(torch.logdet(rest)))
    assert unit + math.log(float(lower[4, 4])) < action  # H(a | x_{K-1}) bounds H(a) from below


def test_10_a_path_may_be_noisy_and_its_end_exact():
    """With velocity K x, the last step forgets where it came from, for any noise."""
    transition, log_std = DenoisingTransition("flow_noise", 2), torch.tensor([1.0, -3.0], dtype=F64)
    x, generator = torch.zeros(20_000, 1, 1, dtype=F64), torch.Generator().manual_seed(0)
    for k in range(2):
        mean, std = transition.mean_std(x, 2 * x, k, log_std[k].expand_as(x))
        x = mean + std * randn(x.shape, generator).to(F64)
    unit = 0.5 * math.log(2 * math.pi * math.e)
    assert float(unit + x.std().log()) == pytest.approx(unit - 3.0, abs=0.02)  # of the action
    two = torch.zeros(1, 2, 1, 1, dtype=F64)
    assert float(transition.entropy(two, two, torch.arange(2), log_std.view(1, 2, 1, 1)).sum()) > 0


def test_entropy_is_the_expected_surprise():
    transition = NOISY[0]
    x, v = torch.zeros(200_000, 1, 1, dtype=F64), torch.zeros(200_000, 1, 1, dtype=F64)
    noise = randn((200_000, 1, 1), torch.Generator().manual_seed(0)).to(F64)
    x_next = transition.step(x, v, 1, noise, torch.ones(200_000, dtype=torch.bool))
    assert float(-transition.log_prob(x, x_next, v, 1).mean()) == pytest.approx(
        float(transition.entropy(x[:1], v[:1], 1)), abs=0.01
    )


def test_22_flow_matching_is_minimised_by_the_exact_field():
    """The best affine field of a ~ N(m, s^2), e ~ N(0, 1) has gradient 0.

    Four points with the moments of these distributions have the same best field.
    """
    a = torch.tensor([M + S, M + S, M - S, M - S], dtype=F64).view(4, 1, 1)
    e = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=F64).view(4, 1, 1)
    for t in (0.2, 0.6, 0.95):
        x, target = flow_matching_pair(a, torch.full((4,), t, dtype=F64), e)
        slope = toy_velocity(torch.ones((), dtype=F64), t) - toy_velocity(
            torch.zeros((), dtype=F64), t
        )
        intercept = toy_velocity(torch.zeros((), dtype=F64), t)
        parameters = [slope.requires_grad_(), intercept.requires_grad_()]
        gradients = torch.autograd.grad(
            flow_matching_loss(slope * x + intercept, target), parameters
        )
        assert all(abs(float(g)) < 1e-12 for g in gradients)


def seeded_paths(seeds, transition, mode):
    generators = [torch.Generator().manual_seed(s) for s in seeds]
    stochastic = draw_stochastic_steps(
        len(seeds), transition.num_steps, mode, generators, transition.num_noisy
    )
    log_std = learned(transition, torch.float32)
    return sample_path(
        transition, generators, stochastic, (len(seeds), 2, 3), log_std, torch.float32
    )


@pytest.mark.parametrize("mode", ["all", "one"])
@pytest.mark.parametrize("transition", NOISY, ids=IDS)
def test_24_batch_size_and_env_order_do_not_change_a_trace(transition, mode):
    full = seeded_paths([0, 1, 2, 3], transition, mode)
    again = seeded_paths([0, 1, 2, 3], transition, mode)
    turned = seeded_paths([3, 1], transition, mode)
    for a, b, c in zip(full, again, turned, strict=True):
        assert torch.equal(a, b) and torch.equal(a[[3, 1]], c)


# Which steps are trained


def test_one_random_step_is_drawn_for_each_env_on_its_own():
    chosen = draw_stochastic_steps(4000, 4, "one", torch.Generator().manual_seed(0))
    assert (chosen.sum(1) == 1).all()
    assert chosen.float().mean(0).tolist() == pytest.approx([0.25] * 4, abs=0.03)


def test_only_noisy_steps_are_drawn():
    """Flow-CPS ends without noise: choosing that step would train nothing."""
    cps, generator = DenoisingTransition("flow_cps", 4, 0.5), torch.Generator().manual_seed(0)
    assert cps.num_noisy == 3
    chosen = draw_stochastic_steps(500, 4, "one", generator, cps.num_noisy)
    assert (chosen.sum(1) == 1).all() and not chosen[:, 3].any()
    assert (
        draw_stochastic_steps(2, 4, "all", generator, cps.num_noisy).tolist()
        == [[True, True, True, False]] * 2
    )
    assert not draw_stochastic_steps(9, 4, "one", generator, 0).any()
    with pytest.raises(UserError, match="Valid names: all, one"):
        draw_stochastic_steps(1, 4, "some", generator)


def test_rows_that_are_not_stochastic_follow_the_ode():
    transition = NOISY[0]
    x, v, noise = torch.randn(SHAPE), torch.randn(SHAPE), torch.randn(SHAPE)
    stochastic = torch.tensor([True, False, True, False, False])
    x_next = transition.step(x, v, 1, noise, stochastic)
    mean, std = transition.mean_std(x, v, 1)
    assert torch.equal(x_next[~stochastic], (x - v / 4)[~stochastic])
    assert torch.equal(x_next[stochastic], (mean + std * noise)[stochastic])


@pytest.mark.parametrize("steps", range(1, 33))
@pytest.mark.parametrize("as_tensor", [False, True])
def test_step_without_noise_has_neither_density_nor_entropy(steps, as_tensor):
    cps = DenoisingTransition("flow_cps", steps, 0.5)
    last = torch.tensor(steps - 1) if as_tensor else steps - 1
    x, v = torch.randn(SHAPE), torch.randn(SHAPE, requires_grad=True)
    x_next = cps.step(x, v, last, torch.randn(SHAPE), torch.ones(5, dtype=torch.bool))
    assert torch.allclose(x_next, x - v / steps, atol=1e-6)
    log_prob = cps.log_prob(x, x_next.detach() + 1, v, last)
    assert (log_prob == 0).all() and (cps.entropy(x, v, last) == 0).all()
    (gradient,) = torch.autograd.grad(log_prob.sum(), v)
    assert (gradient == 0).all()


# Edges


def test_all_ways_to_give_the_step_agree():
    transition = NOISY[0]
    x, v, x_next = (torch.randn(5, 4, 2, 3) for _ in range(3))
    at_once = transition.log_prob(x, x_next, v, torch.arange(4))
    assert torch.equal(at_once, transition.log_prob(x, x_next, v, torch.arange(4).expand(5, 4)))
    for k in range(4):
        one = transition.log_prob(x[:, k], x_next[:, k], v[:, k], k)
        assert one.shape == (5,) and torch.allclose(one, at_once[:, k], rtol=1e-6)
        assert torch.equal(
            one, transition.log_prob(x[:, k], x_next[:, k], v[:, k], torch.full((5,), k))
        )
    with pytest.raises(ValueError, match="no step 4"):
        transition.mean_std(x[:, 0], v[:, 0], 4)


def test_joint_is_the_sum_over_the_chunk():
    x, mean = torch.randn(SHAPE, dtype=F64), torch.randn(SHAPE, dtype=F64)
    std = torch.full((1, 1), 0.3, dtype=F64)
    expected = torch.distributions.Normal(mean, 0.3).log_prob(x).sum((1, 2))
    assert torch.allclose(gaussian_log_prob(x, mean, std), expected)


def test_half_precision_paths_are_scored_in_full_precision():
    x, v = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE).bfloat16()
    assert NOISY[0].log_prob(x, x, v, 0).dtype == torch.float32


def test_squashed_log_std_stays_in_its_range():
    raw = torch.tensor([-50.0, 0.0, 50.0], dtype=F64)
    low, middle, high = squash_log_std(raw, 0.08, 0.16).exp().tolist()
    assert (low, high) == pytest.approx((0.08, 0.16)) and middle == pytest.approx(
        math.sqrt(0.08 * 0.16)
    )


def test_flow_noise_needs_its_range_scaled_with_k():
    """With a fixed std the added variance grows with K; with std / sqrt(K) it converges."""

    def spread(steps, sigma):
        return toy_result(
            DenoisingTransition("flow_noise", steps), torch.full((1, 1), math.log(sigma), dtype=F64)
        )[1]

    assert spread(400, 0.1) > 1.8 * spread(100, 0.1)
    assert spread(400, 0.1 * math.sqrt(4 / 400)) == pytest.approx(
        spread(100, 0.1 * math.sqrt(4 / 100)), rel=0.02
    )


def test_wrong_settings_are_refused_in_words():
    with pytest.raises(UserError, match="Did you mean 'flow_sde'"):
        DenoisingTransition("flow-sde")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="at least 1"):
        DenoisingTransition("ode", 0)
    with pytest.raises(UserError, match="not above 1"):
        DenoisingTransition("flow_cps", 4, 1.5)
    with pytest.raises(ValueError, match="not used by a flow_sde"):
        NOISY[0].mean_std(torch.zeros(SHAPE), torch.zeros(SHAPE), 0, torch.zeros(1, 1))
    with pytest.raises(ValueError, match="needed by a flow_noise"):
        NOISY[3].mean_std(torch.zeros(SHAPE), torch.zeros(SHAPE), 0)
