"""RLPD, WSRL and DSRL: what each adds to SAC-Flow, and what each refuses."""

import dataclasses
import math

import pytest
import torch

from embodyrl.algorithms.dsrl import DSRL, DSRLConfig
from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.rlpd import RLPD, RLPDConfig
from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.algorithms.side_by_side import fork
from embodyrl.algorithms.wsrl import WSRL, WSRLConfig
from embodyrl.build import make_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.functional.losses import sac_actor_loss
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.policies.noise_policy import NoisePolicy
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.types import EnvSpec, Obs
from tests.rollouts.test_replay_buffer import SPEC as PIXELS
from tests.rollouts.test_replay_buffer import chunks

SPEC = EnvSpec("test/arm", 4, 2, 3, "torque", 25.0, 20, {}, privileged_dim=3)
H = 3
SMALL = {"warmup_chunks": 8, "batch_size": 10, "critic_width": 8, "capacity": 64}


def make(cls, config, **policy):
    settings = {
        "width": 8,
        "layers": 1,
        "critic_width": 8,
        "num_denoise_steps": 2,
        "horizon": H,
        **policy,
    }
    torch.manual_seed(0)
    return cls(config, make_policy(FlowMLPConfig(**settings), SPEC, 0))


def online(n=8, seed=0, at=0.0):
    """Chunks whose proprioception is near ``at``, which tells where they came from."""
    batch = chunks(n, seed)
    obs = [Obs({}, at + 0.1 * torch.randn(n, 3), ["go"] * n) for _ in range(2)]
    kept = (getattr(batch, k) for k in ("reward", "valid", "terminated", "truncated"))
    return Transitions(obs[0], batch.choice[..., :2], *kept, obs[1])


def demos(n=12):
    generator = torch.Generator().manual_seed(1)
    actions = torch.rand(n, 2, generator=generator) * 2 - 1
    zeros = torch.zeros(n, dtype=torch.long)
    return Demonstrations(H, {}, 100.0 + torch.randn(n, 3), actions, zeros, zeros, ["go"])


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def test_rlpd_draws_half_of_every_batch_from_demonstrations():
    algorithm = make(RLPD, RLPDConfig(**SMALL))
    with pytest.raises(UserError, match="no demonstrations yet"):
        algorithm.state_dict()
    algorithm.add_demos(demos())
    row = algorithm.update(TransitionBatch(online()), progress=0, generator=gen())
    assert row["gradient_steps"] == 32 and math.isfinite(row["critic_loss"])
    batch = algorithm._batch(gen())
    assert (batch.obs.proprio[:, 0] > 50).sum() == 5 and len(batch) == 10
    algorithm.add_interventions(online(40, at=-100.0))
    batch = algorithm._batch(gen(1))
    assert (batch.obs.proprio[:5, 0] < -50).any() and (batch.obs.proprio[5:, 0] < -50).any()

    again = make(RLPD, RLPDConfig(**SMALL))
    again.add_demos(demos())
    again.load_state_dict(algorithm.state_dict())
    assert torch.equal(again._batch(gen(2)).obs.proprio, algorithm._batch(gen(2)).obs.proprio)


@pytest.mark.parametrize("own_encoder", [False, True])
def test_a_policy_from_nothing_takes_its_units_from_the_demonstrations(own_encoder):
    algorithm = make(RLPD, RLPDConfig(**SMALL | {"own_encoder": own_encoder}))
    assert not algorithm.policy.normalize_proprio.fitted
    algorithm.add_demos(demos())
    seen = [algorithm.policy] + ([algorithm.encoder] if own_encoder else [])
    for policy in seen:
        assert float(policy.normalize_proprio.mean[0]) == pytest.approx(100, abs=1)
    # One that knows units keeps them.
    other = demos()
    other.proprio = other.proprio - 100.0
    algorithm.add_demos(other)
    assert float(algorithm.policy.normalize_proprio.mean[0]) == pytest.approx(100, abs=1)


def test_rlpd_imitates_what_a_person_corrected_too():
    algorithm = make(RLPD, RLPDConfig(**SMALL))
    algorithm.add_demos(demos())
    corrected = dataclasses.replace(online(64, at=-100.0), choice=torch.full((64, H, 2), 0.8))
    algorithm.add_interventions(corrected)
    optimizer = torch.optim.Adam(algorithm.policy.parameters(), 0.03)
    for seed in range(200):
        optimizer.zero_grad()
        algorithm._imitation(gen(seed)).backward()
        optimizer.step()
    done = algorithm.policy.sample(corrected.obs, generator=gen(), mode="eval").actions
    assert (done - 0.8).abs().mean() < 0.15


def test_what_was_recorded_past_success_belongs_to_no_chunk():
    # Episode 0 is solved after its fourth action and goes on for two; episode 1 fails.
    episode = torch.tensor([0] * 6 + [1] * 5)
    solved = torch.tensor([0, 0, 0, 1, 1, 1] + [0] * 5).bool()
    some = (
        torch.arange(11.0)[:, None].expand(11, 3),
        torch.zeros(11, 2),
        episode,
        torch.zeros(11, dtype=torch.long),
    )
    parts = Demonstrations(
        H, {}, *some, ["go"], success=episode == 0, solved=solved, reward=solved.float()
    )
    (t,) = parts.transitions()
    assert t.obs.proprio[:, 0].tolist() == [0, 1, 2, 3, 6, 7]
    assert t.terminated.tolist() == [False, True, True, True, False, False]
    assert t.reward.tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert t.valid.sum(1).tolist() == [3, 3, 2, 1, 3, 3]
    assert t.next_obs.proprio[[0, 4, 5], 0].tolist() == [3, 9, 10]


def test_rlpd_refuses_what_cannot_be_half_and_half():
    with pytest.raises(UserError, match="some of both kinds"):
        RLPDConfig(demo_fraction=0.0)
    vla = FlowVLAConfig(
        width=32,
        layers=1,
        heads=2,
        transition="flow_noise",
        horizon=H,
        action_patch=H,
        critic="privileged",
    )
    with pytest.raises(UserError, match=r"algorithm\.shared_critic"):
        RLPD(RLPDConfig(**SMALL, shared_critic=False), make_policy(vla, SPEC, 0))


def test_an_own_encoder_learns_from_the_critics_loss_and_leaves_the_actor_alone():
    spec = dataclasses.replace(PIXELS, cameras={"front": (32, 32)})
    vla = FlowVLAConfig(
        width=32, layers=1, heads=2, transition="flow_noise", horizon=H, action_patch=H
    )
    settings = {
        **SMALL,
        "own_encoder": True,
        "critic_shift": 1,
        "bc_coef": 0.0,
        "random_warmup": False,
    }

    def made():
        return SACFlow(
            SACFlowConfig(**settings, critic_warmup=4, utd=0.5), make_policy(vla, spec, 0)
        )

    algorithm, batch = made(), chunks(8)
    for obs in (batch.obs, batch.next_obs):
        obs.images["front"] = torch.randint(
            0, 256, (8, 32, 32, 3), generator=gen(), dtype=torch.uint8
        )
    assert algorithm.encoder is not None
    seen = algorithm._critic_features(batch.obs).detach()
    assert torch.equal(seen, algorithm.policy.features(algorithm.policy.encode(batch.obs)))
    start = {name: value.clone() for name, value in algorithm.policy.state_dict().items()}
    row = algorithm.update(TransitionBatch(batch), progress=0, generator=gen())
    assert row["gradient_steps"] == 4 and math.isfinite(row["critic_loss"])
    moved = {
        name
        for name, value in algorithm.encoder.state_dict().items()
        if not torch.equal(value, start[name])
    }
    assert {"vision.stem.weight", "proprio.0.weight", "pool.0.weight"} <= moved
    assert all(
        torch.equal(value, start[name]) for name, value in algorithm.policy.state_dict().items()
    )
    algorithm.update(TransitionBatch(batch), progress=0, generator=gen())
    assert not torch.equal(
        algorithm.policy.state_dict()["vision.stem.weight"], start["vision.stem.weight"]
    )

    again = made()
    again.load_state_dict(algorithm.state_dict())
    assert torch.equal(again._critic_features(batch.obs), algorithm._critic_features(batch.obs))


def test_wsrl_warms_up_with_the_policy_itself_and_lets_the_critics_learn_first():
    algorithm = make(
        WSRL, WSRLConfig(**{**SMALL, "critic_warmup": 4, "policy_delay": 2, "utd": 1.0})
    )
    obs = online().obs
    expected = algorithm.policy.sample(obs, generator=gen(3), mode="train").actions
    assert torch.equal(algorithm.act(obs, gen(3))[0], expected)
    before = [p.clone() for p in algorithm.policy.actor_parameters()]
    algorithm.update(TransitionBatch(online(4)), progress=0, generator=gen())
    row = algorithm.update(TransitionBatch(online(4)), progress=0, generator=gen())
    assert row["gradient_steps"] == 4 and "actor_loss" not in row
    assert all(
        torch.equal(a, b) for a, b in zip(before, algorithm.policy.actor_parameters(), strict=True)
    )
    assert "actor_loss" in algorithm.update(TransitionBatch(online(4)), progress=0, generator=gen())


@pytest.mark.parametrize(
    "settings", [{"random_warmup": True}, {"warmup_chunks": 0}, {"bc_coef": 0.1}]
)
def test_wsrl_refuses_what_it_is_not(settings):
    with pytest.raises(UserError, match="WSRL"):
        WSRLConfig(**settings)


@pytest.mark.parametrize("name", ["flow_mlp", "flow_vla"])
def test_19_dsrl_with_normal_noise_is_the_base_policy(name):
    if name == "flow_mlp":
        configs = [FlowMLPConfig(width=8, layers=1, horizon=H, steer_width=w) for w in (0, 8)]
    else:
        size = {
            "width": 32,
            "layers": 1,
            "heads": 2,
            "vision_width": 4,
            "horizon": H,
            "action_patch": H,
        }
        configs = [FlowVLAConfig(**size, critic="shared", steer_width=w) for w in (0, 8)]
    base, steered = (make_policy(c, SPEC, 0) for c in configs)
    with torch.no_grad():
        for p in base.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=gen(5)))
    missing, unexpected = steered.load_state_dict(base.state_dict(), strict=False)
    assert not unexpected and all(k.startswith(steered.starts_fresh) for k in missing)
    algorithm = DSRL(DSRLConfig(**SMALL), steered)
    obs = online().obs
    actions, noise = algorithm.act(obs, gen(4))
    assert torch.equal(actions, base.sample(obs, generator=gen(4), mode="eval").actions)
    assert abs(float(noise.std()) - 1) < 0.3
    # Deployed, it is noise-free.
    first, second = (steered.sample(obs, generator=gen(s), mode="eval").actions for s in (0, 1))
    assert torch.equal(first, second)


def test_dsrl_trains_the_noise_alone():
    algorithm = make(DSRL, DSRLConfig(**SMALL), steer_width=8)
    before = {k: v.clone() for k, v in algorithm.policy.state_dict().items()}
    row = algorithm.update(TransitionBatch(online()), progress=0, generator=gen())
    assert row["gradient_steps"] == 16 and algorithm.target_entropy == -H * 2
    changed = {
        k.split(".")[0]
        for k, v in algorithm.policy.state_dict().items()
        if not torch.equal(v, before[k])
    }
    assert changed == {"steer"}
    actions, noise = algorithm.act(online().obs, gen())
    assert noise.abs().max() <= 1.5 and actions.abs().max() <= 1


def test_the_density_of_the_noise_integrates_to_one():
    steer, bound = NoisePolicy(2, 1, 1, 4, 1.5), 1.5
    features = torch.randn(1, 2)
    noise, logprob = steer.sample(features.expand(20_000, 2), gen())
    order = noise.flatten().argsort()
    w, p = noise.flatten()[order], logprob.exp()[order]
    assert (
        float(torch.trapezoid(p, w).detach()) == pytest.approx(1.0, abs=0.01)
        and w.abs().max() <= bound
    )


def test_dsrl_refuses_a_policy_without_noise_to_choose():
    with pytest.raises(UserError, match=r"policy\.steer_width"):
        make(DSRL, DSRLConfig(**SMALL))
    with pytest.raises(UserError, match="bc_coef"):
        DSRLConfig(bc_coef=1.0)
    with pytest.raises(UserError, match="sac_flow does not read it"):
        make(SACFlow, SACFlowConfig(**SMALL), steer_width=8)
    with pytest.raises(UserError, match="leaves the initial noise"):
        FlowMLPConfig(steer_bound=2.0)


def test_21_targets_are_discounted_by_what_was_executed():
    algorithm = make(SACFlow, SACFlowConfig(**{**SMALL, "entropy_backup": False, "gamma": 0.9}))
    q = 7.0
    assert algorithm.target is not None
    with torch.no_grad():
        for p in algorithm.target.parameters():
            p.zero_()
        algorithm.target.biases[-1].fill_(q)
    batch = online(8)
    expected = 0.0
    for k in range(8):
        h = 0
        for i in range(H):
            if batch.valid[k, i]:
                expected += 0.9**i * float(batch.reward[k, i])
                h += 1
        expected += 0.0 if batch.terminated[k] else 0.9**h * q
    seen = {}

    class Stats:
        def add(self, **figures):
            seen.update(figures)

    algorithm._update_critics(batch, gen(), Stats())
    assert float(seen["td_target"]) == pytest.approx(expected / 8, rel=1e-5)


def test_imitation_holds_the_actor_when_it_is_asked_to():
    algorithm = make(SACFlow, SACFlowConfig(**{**SMALL, "bc_coef": 1.0, "random_warmup": False}))
    assert algorithm.wants_demos
    algorithm.add_demos(demos())
    assert math.isfinite(
        algorithm.update(TransitionBatch(online()), progress=0, generator=gen())["bc_loss"]
    )


def test_sac_learns_on_the_small_vla_from_pixels_too():
    size = {
        "width": 32,
        "layers": 1,
        "heads": 2,
        "vision_width": 4,
        "horizon": H,
        "action_patch": H,
        "critic_width": 8,
    }
    spec = EnvSpec(**{**PIXELS.__dict__, "cameras": {"front": (32, 32)}})
    policy = make_policy(FlowVLAConfig(**size, transition="flow_noise"), spec, 0)
    algorithm = SACFlow(
        SACFlowConfig(**{**SMALL, "random_warmup": False, "target_entropy": -2.0}), policy
    )
    batch = chunks(8)
    for obs in (batch.obs, batch.next_obs):
        obs.images = {"front": torch.randint(0, 256, (8, 32, 32, 3), dtype=torch.uint8)}
    before = {k: v.clone() for k, v in policy.state_dict().items()}
    row = algorithm.update(TransitionBatch(batch), progress=0, generator=gen())
    assert math.isfinite(row["actor_loss"]) and math.isfinite(row["critic_loss"])
    changed = {
        k.split(".")[0] for k, v in policy.state_dict().items() if not torch.equal(v, before[k])
    }
    assert {"expert", "vision"} <= changed and "critic" not in changed
    with pytest.raises(UserError, match=r"policy\.transition=flow_noise"):
        SACFlow(SACFlowConfig(**SMALL), make_policy(FlowVLAConfig(**size), spec, 0))


OFF_POLICY = {
    "sac_flow": (SACFlow, SACFlowConfig, {"bc_coef": 1.0, "random_warmup": False}),
    "crossq": (SACFlow, SACFlowConfig, {"critic_norm": "batch"}),
    "rlpd": (RLPD, RLPDConfig, {"critic_warmup": 2}),
    "wsrl": (WSRL, WSRLConfig, {"critic_warmup": 2}),
    "dsrl": (DSRL, DSRLConfig, {}),
}


def learned(name, threads):
    """What an algorithm has learned with so many threads."""
    cls, config, settings = OFF_POLICY[name]
    torch.manual_seed(0)
    steer = {"steer_width": 8} if cls is DSRL else {}
    noise = {} if cls is DSRL else {"transition": "flow_noise"}
    algorithm = make(cls, config(**{**SMALL, **settings}), **noise, **steer)
    if algorithm.wants_demos:
        algorithm.add_demos(demos())
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for i in range(3):
            torch.manual_seed(i)
            row = algorithm.update(TransitionBatch(online(16, i)), progress=0, generator=gen(i))
    finally:
        torch.set_num_threads(before)
    assert row["gradient_steps"] >= 48
    return [*algorithm.policy.state_dict().values(), *algorithm.critics.state_dict().values()]


@pytest.mark.parametrize("name", OFF_POLICY)
def test_the_number_of_threads_changes_nothing_but_rounding(name):
    one, four, again = (learned(name, threads) for threads in (1, 4, 4))
    for a, b, c in zip(one, four, again, strict=True):
        assert torch.equal(b, c)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_actors_gradient_is_that_of_both_losses_in_one():
    config = SACFlowConfig(**{**SMALL, "bc_coef": 0.7, "random_warmup": False, "alpha_lr": 0.0})
    algorithm = make(SACFlow, config, transition="flow_noise")
    torch.manual_seed(1)
    algorithm.add_demos(demos())
    obs = online(8).obs
    generator = gen(5)
    own, others = fork(generator), fork(generator)
    # The two losses as one sum, with PyTorch's own backward pass.
    choice, logprob, features = algorithm._sample_choice(obs, own)
    q = algorithm.critics(features, choice).amin(0)
    whole = sac_actor_loss(q, logprob, algorithm.log_alpha.detach().exp())
    (whole + 0.7 * algorithm._imitation(others)).backward()
    parameters = algorithm.actor_optimizer.parameters
    expected = [None if p.grad is None else p.grad.clone() for p in parameters]
    algorithm.actor_optimizer.zero_grad()
    seen = {}
    algorithm.actor_optimizer.step = lambda loss: seen.update(loss=loss) or 1.0
    algorithm._update_actor(obs, gen(5), Means())
    for p, then in zip(parameters, expected, strict=True):
        assert (p.grad is None) == (then is None)
        if then is not None:
            torch.testing.assert_close(p.grad, then)
    assert any(then is not None and then.any() for then in expected)
    whole = whole + 0.7 * algorithm._imitation(fork_second(gen(5)))
    torch.testing.assert_close(seen["loss"], whole.detach())


def fork_second(generator):
    fork(generator)
    return fork(generator)
