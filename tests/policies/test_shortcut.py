"""Shortcut policies: told the size of their step, they act in one step as in many."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch

from embodyrl.algorithms.distill import Distill, DistillConfig
from embodyrl.algorithms.fpo import FPO, FPOConfig
from embodyrl.algorithms.imitation import drawn_imitation, imitation_loss, shortcut_loss
from embodyrl.algorithms.nft import NFT, NFTConfig
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import make_policy
from embodyrl.checks import check_policy
from embodyrl.config import compose
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.functional.flow import DenoisingTransition
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 5, 2, 3, "ee_delta_pos", 25.0, 20, {})
MEAN, STD = 0.2, 0.3
CONFIGS: dict[str, Any] = {
    "plain": FlowMLPConfig(width=16, horizon=2, velocity="plain", critic_width=8),
    "gated": FlowMLPConfig(width=16, horizon=2, velocity="gated", critic_width=8),
    "decoded": FlowMLPConfig(width=16, horizon=2, velocity="decoded", critic_width=8),
    "vla": FlowVLAConfig(width=32, layers=1, heads=2, critic_width=8),
    "noise": FlowVLAConfig(width=32, layers=1, heads=2, critic_width=8, transition="flow_noise"),
}


def seen(count: int = 5, seed: int = 0) -> Obs:
    generator = torch.Generator().manual_seed(seed)
    return Obs({}, torch.randn(count, 3, generator=generator), ["push"] * count)


def make(config: Any, moved: bool = True, **settings: Any) -> Any:
    """A policy; ``moved``: with weights that all matter."""
    policy = make_policy(dataclasses.replace(config, **settings), SPEC, seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            noise = 0.1 * torch.randn(parameter.shape, generator=generator)
            if moved or ".step." not in name:
                parameter.add_(noise)
    return policy


def act(policy: Any, seed: int = 3) -> torch.Tensor:
    return policy.sample(seen(), generator=torch.Generator().manual_seed(seed), mode="eval").actions


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("steps", [1, 4])
def test_promises_of_a_policy(name: str, steps: int) -> None:
    policy = make(CONFIGS[name], shortcut_steps=8, num_denoise_steps=steps)
    check_policy(policy, seen(), SPEC)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fresh_one_is_the_flow_and_its_velocity_is_told_the_size(name: str) -> None:
    flow = make(CONFIGS[name], shortcut_steps=0)
    fresh = make(CONFIGS[name], moved=False, shortcut_steps=8)
    missing = fresh.load_state_dict(flow.state_dict(), strict=False).missing_keys
    assert missing and all(".step." in key for key in missing)
    assert torch.equal(act(flow), act(fresh))
    # Once it has learned, size 0 is still the flow, and other sizes are not.
    with torch.no_grad():
        for key, parameter in fresh.named_parameters():
            if ".step." in key:
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator()))
    x = torch.randn(5, 2, *flow.flow_shape, generator=torch.Generator().manual_seed(2))
    t = torch.tensor([[0.5, 1.0]]).expand(5, 2)
    before = flow.velocity(flow.encode(seen()), x, t)
    context = fresh.encode(seen())
    torch.testing.assert_close(fresh.velocity(context, x, t, torch.zeros(5, 2)), before)
    half, whole = (fresh.velocity(context, x, t, torch.full((5, 2), d)) for d in (0.5, 1.0))
    assert float((half - before).detach().abs().min(dim=-1).values.max()) > 1e-4
    assert not torch.allclose(half, whole, atol=1e-4)
    # It acts with the size of its own steps.
    quarter = fresh.velocity(context, x, t, torch.full((5, 2), 0.25))
    torch.testing.assert_close(fresh.velocity(context, x, t), quarter)
    torch.testing.assert_close(fresh.step_inputs(context, x, t)[0], quarter)


class KnownMap:
    """The exact mean velocity of the flow to a ~ N(m, s^2), with errors of one's choice."""

    config = FlowMLPConfig(horizon=2, shortcut_steps=8)
    spec = SPEC
    flow_shape: tuple[int, int] = (2, 2)
    off = 0.0

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []

    def normalize_action(self, actions: torch.Tensor) -> torch.Tensor:
        return actions

    def encode(self, obs: Any) -> Any:
        return obs

    @staticmethod
    def spread(t: Any) -> Any:
        """Standard deviation of x_t."""
        return ((1 - t) ** 2 * STD**2 + t**2).sqrt()

    def velocity(self, context: Any, x: Any, t: Any, d: Any) -> Any:
        self.calls.append(tuple(t.shape))
        t = t[..., None, None]
        d = d[..., None, None]
        grows = self.spread(t - d) / self.spread(t)
        end = (1 - t + d) * MEAN + grows * (x - (1 - t) * MEAN)
        ordinary = -MEAN + (t - (1 - t) * STD**2) / self.spread(t) ** 2 * (x - (1 - t) * MEAN)
        return torch.where(d > 0, (x - end) / d.clamp_min(1e-9) + self.off * d, ordinary)


def test_the_loss_of_the_exact_map_is_that_of_flow_matching_alone() -> None:
    policy = KnownMap()
    generator = torch.Generator().manual_seed(0)
    count = 512
    actions = MEAN + STD * torch.randn(count, 2, 2, generator=generator)
    mask = torch.ones(count, 2, dtype=torch.bool)
    mask[:, 1] = torch.arange(count) % 2 == 0
    _, given, mask, noise = drawn_imitation(policy, actions, mask, generator)
    assert len(given) == 6 and not noise
    noisy, t, target, _, start, size = given
    # At the finest size two steps of Euler are the target, which the map only nears: leave it out.
    rows = size > 0.2
    parts = [y[rows] for y in given]
    loss_of: Any = partial(shortcut_loss, policy, None)
    loss = loss_of(*parts, mask[rows])
    zero = torch.zeros(count, 1)
    error = policy.velocity(None, noisy[:, None], t[:, None], zero)[:, 0] - target
    matching = error[rows].square()[mask[rows]].mean()
    torch.testing.assert_close(loss, matching, atol=1e-6, rtol=1e-5)
    # With an error of 2 d in the mean velocity both half steps are off by d. The middle is then off
    # by -d^2 / 2, and the exact second half, whose slope in x is 2 (1 - r) / d, by -(1 - r) d.
    policy.off = 2.0
    worse = loss_of(*parts, mask[rows]) - matching
    r = KnownMap.spread(start - size) / KnownMap.spread(start - size / 2)
    off = (2 * size - size + (1 - r) * size / 2)[rows]
    expected = off.square()[:, None].expand(-1, 2)[mask[rows]].mean()
    torch.testing.assert_close(worse, expected, atol=1e-4, rtol=1e-4)
    # Both points of an observation go through in one pass; the target takes two more.
    policy.calls.clear()
    loss_of(*parts, mask[rows])
    n = int(rows.sum())
    assert policy.calls == [(n, 1), (n, 1), (n, 2)]


def demonstrations(count: int = 512) -> Demonstrations:
    """Actions that depend on nothing: N(m, s^2)."""
    generator = torch.Generator().manual_seed(0)
    return Demonstrations(
        horizon=1,
        images={},
        proprio=torch.randn(count, 3, generator=generator),
        actions=MEAN + STD * torch.randn(count, 2, generator=generator),
        episode=torch.arange(count),
        instruction=torch.zeros(count, dtype=torch.long),
        sentences=[""],
    )


def test_it_learns_to_act_in_one_step_as_in_eight() -> None:
    config = FlowMLPConfig(width=64, velocity="plain", squash=False, critic_width=8)
    learned = {}
    for most in (0, 8):
        policy = make_policy(
            dataclasses.replace(config, shortcut_steps=most, num_denoise_steps=1), SPEC, 0
        )
        sft = SFT(SFTConfig(batch_size=256, steps_per_iteration=150, lr=4e-3, shift=0), policy)
        demos = demonstrations()
        for i in range(5):
            sft.update(demos, progress=i / 5, generator=torch.Generator().manual_seed(i))
        learned[most] = sft.result
    obs = seen(2000, seed=7)
    noise = torch.randn(2000, 1, 2, generator=torch.Generator().manual_seed(8))

    def acts(policy: Any, steps: int) -> torch.Tensor:
        policy.config = dataclasses.replace(policy.config, num_denoise_steps=steps)
        policy.transition = DenoisingTransition(kind="flow_noise", num_steps=steps)
        return policy.decode(policy.encode(obs), noise)

    # One step of the flow is its mean, whatever the noise; the exact map is m + s e.
    exact = (MEAN + STD * noise).clamp(-1, 1)
    assert float(acts(learned[0], 1).std()) < 0.25 * STD
    for steps in (1, 2, 4, 8):
        error = (acts(learned[8], steps) - exact).square().mean().sqrt()
        assert float(error) < 0.25 * STD, steps


def test_pieces_of_a_batch_have_the_loss_of_the_whole() -> None:
    policy = make(CONFIGS["plain"], shortcut_steps=4)
    actions = torch.rand(6, 2, 2, generator=torch.Generator().manual_seed(0)) - 0.5
    mask = torch.ones(6, 2, dtype=torch.bool)
    obs = seen(6)
    loss, given, mask, _ = drawn_imitation(policy, actions, mask, torch.Generator().manual_seed(5))
    whole = loss(obs, *given, mask)
    halves = [loss(obs[i], *(x[i] for x in given), mask[i]) for i in (slice(0, 3), slice(3, 6))]
    torch.testing.assert_close(whole, sum(halves) / 2)
    same = imitation_loss(policy, obs, actions, mask, torch.Generator().manual_seed(5))
    torch.testing.assert_close(whole, same)


def test_the_plan_of_what_nobody_executed_is_one_step() -> None:
    policy = KnownMap()
    policy.flow_shape = (4, 2)
    generator = torch.Generator().manual_seed(0)
    actions = torch.zeros(8, 2, 2)
    given: list[torch.Tensor] = []
    exact = policy.velocity

    def velocity(context: Any, x: Any, t: Any, d: Any) -> Any:
        given.append(d)
        return exact(context, x, t, d)

    policy.velocity = velocity  # type: ignore[method-assign]
    imitation_loss(policy, None, actions, torch.ones(8, 2, dtype=torch.bool), generator)  # type: ignore[arg-type]
    assert torch.equal(given[0], torch.ones(8, 1))


def test_checkpoints_of_flows_begin_shortcut_policies_but_not_the_reverse(tmp_path: Any) -> None:
    def save(policy: Any, name: str) -> Any:
        section = {"name": policy.config.name, **dataclasses.asdict(policy.config)}
        meta = {"config": {"policy": section}, "spec": spec_to_json(SPEC)}
        return checkpoint.save(tmp_path / name, {"policy": policy.state_dict()}, meta)

    flow = make(CONFIGS["vla"], shortcut_steps=0)
    short = make(CONFIGS["vla"], shortcut_steps=8)
    fresh = make(CONFIGS["vla"], moved=False, shortcut_steps=8)
    checkpoint.load_weights(save(flow, "step_000001"), fresh, SPEC)
    assert torch.equal(act(fresh), act(flow))
    # With fewer sizes the offsets of those that are left stay.
    fewer = make(CONFIGS["vla"], moved=False, shortcut_steps=4)
    path = save(short, "step_000002")
    checkpoint.load_weights(path, fewer, SPEC)
    assert torch.equal(act(fewer), act(short))
    with pytest.raises(UserError, match=r"policy\.shortcut_steps was 8 and is 0"):
        checkpoint.load_weights(path, flow, SPEC)


def test_what_it_cannot_be_is_refused_in_words() -> None:
    for config in (FlowMLPConfig, FlowVLAConfig):
        with pytest.raises(UserError, match="must be a power of two"):
            config(shortcut_steps=6)
        with pytest.raises(UserError, match="1, 2, 4 and so on up to 8"):
            config(shortcut_steps=8, num_denoise_steps=3)
        with pytest.raises(UserError, match="1, 2, 4 and so on up to 2"):
            config(shortcut_steps=2, num_denoise_steps=4)
    with pytest.raises(UserError, match=r"policy\.shortcut_steps is 2"):
        FlowMLPConfig(
            velocity="gaussian", shortcut_steps=2, num_denoise_steps=1, transition="flow_noise"
        )
    with pytest.raises(UserError, match=r"policy\.max_prefix is 2"):
        FlowVLAConfig(shortcut_steps=2, num_denoise_steps=1, action_patch=1, max_prefix=2)


def test_algorithms_that_would_not_train_it_refuse_it() -> None:
    policy = make(CONFIGS["vla"], shortcut_steps=8, num_denoise_steps=1)
    for make_algorithm in (
        lambda: FPO(FPOConfig(), policy),
        lambda: NFT(NFTConfig(), policy),
    ):
        with pytest.raises(UserError, match="mean velocities over whole steps"):
            make_algorithm()
    with pytest.raises(UserError, match="nothing to distil"):
        Distill(DistillConfig(), policy)


@pytest.mark.parametrize("name", ["smolvla", "pi0", "pi05", "diffusion"])
def test_published_architectures_have_no_room_for_the_size(name: str) -> None:
    with pytest.raises(UserError, match="shortcut_steps"):
        compose("mujoco_pick_sft", [f"policy.name={name}", "policy.shortcut_steps=8"])
