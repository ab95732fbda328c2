"""Distillation: the student takes the teacher's actions in fewer steps, and reads no actions of the data."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from embodyrl.algorithms.distill import Distill, DistillConfig, flow_map
from embodyrl.build import make_policy
from embodyrl.checks import check_algorithm
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.functional.flow import DenoisingTransition
from embodyrl.functional.losses import flow_map_loss
from embodyrl.policies.flow_mlp import FlowMLP, FlowMLPConfig
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 8, 2, 3, "ee_delta_pos", 25.0, 20, {})
MEAN, STD = 0.3, 0.5


def seen(count: int = 64, p: int = 3, a: int = 2) -> Demonstrations:
    generator = torch.Generator().manual_seed(0)
    return Demonstrations(
        horizon=1,
        images={},
        proprio=torch.randn(count, p, generator=generator),
        # Nonsense, which must not be read.
        actions=torch.full((count, a), 1e30),
        episode=torch.arange(count) // 8,
        instruction=torch.zeros(count, dtype=torch.long),
        sentences=[""],
    )


class KnownField(FlowMLP):
    """The velocity of the flow to a ~ N(m, s^2), whose map from noise is known: a = m + s e as K grows.

    Until ``learned``, when the net speaks.
    """

    learned = True

    def step_inputs(self, context: Any, x: Any, t: Any) -> Any:
        velocity, log_std = super().step_inputs(context, x, t)
        if self.learned:
            return velocity, log_std
        t = t[..., None, None]
        spread = ((1 - t) * STD) ** 2 + t**2
        pull = (t - (1 - t) * STD**2) / spread
        return -MEAN + pull * (x - (1 - t) * MEAN), log_std


def known(steps: int, **settings: Any) -> KnownField:
    config = FlowMLPConfig(
        width=32, velocity="plain", squash=False, num_denoise_steps=steps, critic_width=8
    )
    torch.manual_seed(0)
    policy = KnownField(dataclasses.replace(config, **settings), SPEC)
    policy.normalize_proprio.fit(seen().proprio)
    return policy


def test_the_student_learns_the_known_map_of_the_teacher() -> None:
    policy = known(1)
    policy.learned = False
    config = DistillConfig(
        teacher_steps=50, batch_size=128, steps_per_iteration=150, lr=1e-2, ema=0.9, shift=0
    )
    distill = Distill(config, policy)
    for one in (distill.policy, distill.result):
        one.learned = True
    demos = seen()
    for i in range(4):
        losses = distill.update(demos, progress=i / 4, generator=torch.Generator().manual_seed(i))[
            "loss"
        ]
    noise = torch.randn(200, 1, 2, generator=torch.Generator().manual_seed(9))
    obs = Obs({}, torch.randn(200, 3, generator=torch.Generator().manual_seed(8)), [""] * 200)
    # Fifty steps are close to the exact map m + s e, one step of Euler is its mean alone.
    exact = MEAN + STD * noise
    taught = flow_map(distill.teacher, distill.steps, obs, noise)
    torch.testing.assert_close(taught, exact, atol=0.05, rtol=0)
    naive = flow_map(distill.teacher, DenoisingTransition(kind="ode", num_steps=1), obs, noise)
    torch.testing.assert_close(naive, torch.full_like(naive, MEAN), atol=1e-5, rtol=0)
    student = flow_map(distill.result, policy.transition, obs, noise)
    error = float((student - taught).square().mean().detach().sqrt())
    assert losses < 0.01 and error < 0.1, "naive would be about 0.5"


def test_the_loss_is_the_mean_square_and_moves_the_student_alone() -> None:
    end = torch.tensor([[[1.0, 2.0]]], requires_grad=True)
    target = torch.tensor([[[0.0, 4.0]]], requires_grad=True)
    loss = flow_map_loss(end, target)
    loss.backward()
    assert float(loss.detach()) == 2.5 and target.grad is None
    torch.testing.assert_close(end.grad, torch.tensor([[[1.0, -2.0]]]))


def test_a_student_with_the_teachers_steps_has_nothing_to_learn() -> None:
    policy = known(3)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    distill = Distill(DistillConfig(teacher_steps=4, steps_per_iteration=1, batch_size=8), policy)
    distill.steps = policy.transition
    found = distill.update(seen(), progress=0.0, generator=torch.Generator().manual_seed(0))
    assert found["loss"] == 0.0 and found["grad_norm"] == 0.0


def test_microbatches_give_the_same_gradient() -> None:
    after = []
    for size in (0, 3):
        policy = known(1)
        with torch.no_grad():
            for p in policy.parameters():
                noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
                p.add_(0.1 * noise)
        config = DistillConfig(batch_size=8, microbatch_size=size, steps_per_iteration=2)
        distill = Distill(config, policy)
        distill.update(seen(), progress=0.3, generator=torch.Generator().manual_seed(0))
        after.append(torch.cat([p.flatten() for p in policy.parameters()]))
    torch.testing.assert_close(after[0], after[1], atol=1e-6, rtol=1e-4)


def test_it_resumes_with_its_teacher() -> None:
    config = DistillConfig(batch_size=8, steps_per_iteration=2, shift=0)
    straight = Distill(config, known(1))
    generators = [torch.Generator().manual_seed(i) for i in range(2)]
    straight.update(seen(), progress=0.0, generator=generators[0])
    state = copy.deepcopy(straight.state_dict())
    weights = copy.deepcopy(straight.result.state_dict())
    # A run that resumes builds the algorithm on weights of another policy, and loads it all.
    again = Distill(config, known(1, width=32))
    again.teacher.load_state_dict(known(1).state_dict())
    again.result.load_state_dict(weights)
    again.load_state_dict(state)
    found = [
        one.update(seen(), progress=0.5, generator=torch.Generator().manual_seed(1))
        for one in (straight, again)
    ]
    assert found[0] == found[1]


def test_the_contract() -> None:
    env = MujocoEnv(MujocoConfig(task="reach", renderer="none", cameras=(), num_envs=2))
    demos = seen(p=env.spec.proprio_dim, a=env.spec.action_dim)
    config = DistillConfig(batch_size=8, steps_per_iteration=2)

    def make() -> Distill:
        policy: Any = make_policy(
            FlowMLPConfig(width=16, layers=1, num_denoise_steps=1, critic_width=16), env.spec, 0
        )
        policy.normalize_proprio.fit(demos.proprio)
        return Distill(config, policy)

    check_algorithm(make, env, demos=demos)
    env.close()


def test_what_cannot_be_distilled_is_refused_in_words() -> None:
    config = FlowVLAConfig(width=32, layers=1, heads=2, text_layers=0, critic_width=16)
    fresh = make_policy(dataclasses.replace(config, num_denoise_steps=1), SPEC, 0)
    with pytest.raises(UserError, match="The student must take fewer"):
        Distill(DistillConfig(teacher_steps=1), fresh)  # type: ignore[arg-type]
    distill = Distill(DistillConfig(steps_per_iteration=1, batch_size=4), fresh)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"run\.init_checkpoint=RUN"):
        distill.update(seen(), progress=0.0, generator=torch.Generator().manual_seed(0))
    # A head in one step acts in place of the flow.
    headed = make_policy(FlowMLPConfig(width=8, one_step_width=8, num_denoise_steps=1), SPEC, 0)
    with pytest.raises(UserError, match=r"policy\.one_step_width=0"):
        Distill(DistillConfig(), headed)  # type: ignore[arg-type]
