"""Supervised fine-tuning on synthetic demonstrations: it learns them, averages its weights, and resumes exactly."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from embodyrl.algorithms.hindsight_head import HindsightHead
from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.build import make_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.mixture import Mixture
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.policies.localiser import PLACES
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec, Obs

CAMERAS = {"front": (32, 32)}
SPEC = EnvSpec("test/arm", 8, 2, 3, "ee_delta_pos", 25.0, 20, {}, privileged_dim=5)
SEEING = EnvSpec("test/arm", 8, 2, 3, "ee_delta_pos", 25.0, 20, CAMERAS, privileged_dim=5)


def demonstrations(episodes: int = 20, length: int = 12, cameras=None) -> Demonstrations:
    """The sentence says which way to go, proprio how far; the action is the same all through an episode."""
    generator = torch.Generator().manual_seed(0)
    goal = torch.rand(episodes, 1, 3, generator=generator) * 2 - 1
    sentence = torch.arange(episodes) % 2
    proprio = goal.expand(episodes, length, 3).reshape(-1, 3)
    sign = (1.0 - 2.0 * sentence).repeat_interleave(length)[:, None]
    images = {
        name: torch.randint(
            0, 256, (episodes * length, *size, 3), generator=generator, dtype=torch.uint8
        ).numpy()
        for name, size in (cameras or {}).items()
    }
    return Demonstrations(
        horizon=5,
        images=images,
        proprio=proprio,
        actions=0.8 * sign * proprio[:, :2],
        episode=torch.arange(episodes).repeat_interleave(length),
        instruction=sentence.repeat_interleave(length),
        sentences=["move as shown", "move the other way"],
    )


def make_sft(spec: EnvSpec = SPEC, **settings) -> SFT:
    config = FlowVLAConfig(
        width=32, layers=1, heads=2, text_layers=0, critic_width=16, vision_width=4
    )
    settings = {"batch_size": 64, "steps_per_iteration": 50, "lr": 3e-3, "ema": 0.9, **settings}
    torch.manual_seed(0)  # as training/setup.py does
    return SFT(SFTConfig(**settings), make_policy(config, spec, seed=0))


def run(sft: SFT, demos: Demonstrations, iterations: range, total: int) -> list[dict[str, float]]:
    return [
        sft.update(demos, progress=i / total, generator=torch.Generator().manual_seed(i))
        for i in iterations
    ]


def test_the_demonstrated_actions_come_back_from_noise():
    sft, demos = make_sft(), demonstrations()
    critic = copy.deepcopy(sft.policy.critic.state_dict())
    rows = run(sft, demos, range(6), 6)
    assert rows[-1]["loss"] < 0.5 * rows[0]["loss"]
    obs, actions, mask = demos.batch(torch.arange(0, len(demos), 7))
    sampled = sft.result.sample(
        obs, generator=torch.Generator().manual_seed(0), mode="eval"
    ).actions
    error = (sampled - actions).abs()[mask].mean()
    other_way = Obs(
        {}, obs.proprio, [demos.sentences[1 - demos.sentences.index(s)] for s in obs.instruction]
    )
    flipped = sft.result.sample(
        other_way, generator=torch.Generator().manual_seed(0), mode="eval"
    ).actions
    assert error < 0.1
    assert (flipped - actions).abs()[mask].mean() > 3 * error  # the sentence is heard
    assert all(torch.equal(critic[k], v) for k, v in sft.policy.critic.state_dict().items())


def test_the_result_is_an_average_without_gradients():
    sft, demos = make_sft(ema=0.9, steps_per_iteration=1), demonstrations()
    before = copy.deepcopy(sft.policy.state_dict())
    run(sft, demos, range(1), 1)
    assert not any(p.requires_grad for p in sft.result.parameters())
    now = sft.policy.state_dict()
    for name, averaged in sft.result.named_parameters():
        torch.testing.assert_close(
            averaged, 0.9 * before[name] + 0.1 * now[name], atol=1e-6, rtol=1e-5
        )
    torch.testing.assert_close(sft.result.normalize_action.mean, demos.actions.mean(0))
    torch.testing.assert_close(sft.result.normalize_proprio.std, demos.proprio.std(0, correction=0))


def test_images_are_changed_by_the_generator_of_the_iteration():
    demos = demonstrations(4, cameras=CAMERAS)
    states = []
    for settings in ({}, {}, {"shift": 0}, {"jitter": 0.2}):
        sft = make_sft(SEEING, steps_per_iteration=2, batch_size=16, **settings)
        run(sft, demos, range(1), 1)
        states.append(sft.policy.state_dict())
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
    seen = [k for k in states[0] if k.startswith("vision.") and k.endswith("weight")]
    for other in states[2:]:
        assert seen and not any(torch.equal(states[0][k], other[k]) for k in seen)


def test_the_learning_rate_rises_and_falls():
    sft, demos = make_sft(steps_per_iteration=1, warmup=0.2), demonstrations(4)
    rates = [row["lr"] for row in run(sft, demos, range(20), 20)]
    assert rates[0] < 0.5 * max(rates) and rates[-1] < 0.2 * max(rates) and max(rates) <= 3e-3
    peak = rates.index(max(rates))
    assert 2 <= peak <= 5 and rates[peak:] == sorted(rates[peak:], reverse=True)


def test_what_is_saved_continues_bit_for_bit(tmp_path):
    demos, straight, first = (
        demonstrations(),
        make_sft(steps_per_iteration=5),
        make_sft(steps_per_iteration=5),
    )
    run(straight, demos, range(4), 4)
    run(first, demos, range(2), 4)
    states = {"policy": first.result.state_dict(), "algorithm": first.state_dict()}
    loaded, _ = checkpoint.load(checkpoint.save(tmp_path / "step_2", states, {}))
    second = make_sft(steps_per_iteration=5)
    second.result.load_state_dict(loaded["policy"])
    second.load_state_dict(loaded["algorithm"])
    run(second, demos, range(2, 4), 4)
    for a, b in ((straight.policy, second.policy), (straight.result, second.result)):
        assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


def test_data_that_is_not_finite_stops_it_in_words():
    demos = demonstrations(4)
    demos.actions = demos.actions.clone()
    demos.actions[3] = float(np.nan)
    with pytest.raises(UserError, match=r"not finite: lower algorithm\.lr or check the data"):
        run(make_sft(), demos, range(1), 1)


def test_an_unknown_time_schedule_is_refused_in_words():
    with pytest.raises(
        UserError, match=r"algorithm\.time is 'cosine', but it must be uniform or beta"
    ):
        run(make_sft(time="cosine"), demonstrations(4), range(1), 1)


class Planner:
    """Plans 4x3 numbers, of which 2x2 are executed; its one-step plan is 3 everywhere."""

    flow_shape = (4, 3)
    config = SimpleNamespace()

    def __init__(self):
        self.seen = []

    def normalize_action(self, actions):
        return actions

    def encode(self, obs):
        return obs

    def velocity(self, context, x, t):
        self.seen.append((x[:, 0], t[:, 0]))
        return x - 3.0


def test_what_nobody_executed_is_the_policys_own_plan():
    policy = Planner()
    actions = torch.full((4096, 2, 2), 5.0)
    mask = torch.ones(4096, 2, dtype=torch.bool)
    imitation_loss(policy, None, actions, mask, torch.Generator().manual_seed(0))
    (noise, start), (noisy, t) = policy.seen
    assert torch.equal(start, torch.ones(4096)) and noise.std().sub(1).abs() < 0.02
    # What is left of each part without the clean chunk is t times noise.
    t = t[:, None, None]
    clean = torch.full((1, 4, 3), 3.0)
    clean[:, :2] = torch.tensor([5.0, 5.0, 0.0])
    left = (noisy - (1 - t) * clean) / t
    assert left.mean((0, 2)).abs().amax() < 0.05 and left.std((0, 2)).sub(1).abs().amax() < 0.05
    # A policy that plans no further than H is asked once.
    policy.flow_shape, policy.seen = (2, 3), []
    imitation_loss(policy, None, actions, mask, torch.Generator().manual_seed(0))
    assert len(policy.seen) == 1


# Imitation that must also tell where episodes lead.

SMALL_STEPS = {"steps_per_iteration": 2, "batch_size": 24, "shift": 0}


def make_head() -> HindsightHead:
    policy = make_policy(FlowVLAConfig(width=32, layers=1, heads=2, vision_width=4), SEEING, seed=0)
    return HindsightHead(policy)


def make_seeing(**settings) -> SFT:
    return make_sft(SEEING, hindsight_coef=1.0, **{**SMALL_STEPS, **settings})


def test_the_loss_is_the_huber_loss_of_solved_episodes_in_units_of_the_data():
    head, demos = make_head(), demonstrations(4, cameras=CAMERAS)
    head.fit_inputs(demos)
    for p in head.net.parameters():
        torch.nn.init.zeros_(p)  # it says that all places are the mean
    places = torch.zeros(3, PLACES, 3)
    places[0], places[1] = 0.15, 2.0  # half of .3 is squared; 2 is far out
    summary = torch.zeros(3, 32, requires_grad=True)
    near, far = 0.15**2 / (2 * 0.3), 2.0 - 0.3 / 2
    all_solved = head.loss(summary, places, torch.tensor([True, True, True]))
    torch.testing.assert_close(all_solved, torch.tensor(near + far))
    one_failed = head.loss(summary, places, torch.tensor([True, False, True]))
    torch.testing.assert_close(one_failed, torch.tensor(near))
    # A label is where the robot was at the end, in standard deviations of the data.
    labels, solved = head.labels(demos, torch.tensor([0, 13]))
    ends = (demos.proprio[[11, 23]] - demos.proprio.mean(0)) / demos.proprio.std(0, correction=0)
    torch.testing.assert_close(labels[:, 0], ends)
    assert labels.shape == (2, PLACES, 3) and solved.all()


def test_it_teaches_the_eyes_what_actions_do_not():
    """Actions are zero; where the episode leads is drawn in the picture alone."""
    demos = demonstrations(40, cameras=CAMERAS)
    bright = torch.linspace(0, 1, 40).repeat_interleave(12)
    demos.images["front"][:] = (255 * bright).to(torch.uint8)[:, None, None, None].numpy()
    demos.actions = torch.zeros_like(demos.actions)
    demos.proprio = torch.zeros_like(demos.proprio)
    demos.proprio[11::12] = bright[11::12, None]  # only the last frame of an episode tells it
    sft = make_seeing(steps_per_iteration=40, batch_size=64)
    rows = run(sft, demos, range(4), 4)
    assert rows[-1]["hindsight_loss"] < 0.3 * rows[0]["hindsight_loss"]
    # Its gradient reaches the eyes of the policy.
    before = copy.deepcopy(sft.policy.vision.state_dict())
    led = sft.head.labels(demos, torch.arange(0, 480, 20))
    obs, actions, mask = demos.batch(torch.arange(0, 480, 20))
    loss_of = sft._loss_of(obs, actions, mask, torch.Generator().manual_seed(0), led)
    sft.microbatches.backward(torch.arange(24), loss_of)
    assert sft.policy.vision.stem.weight.grad.abs().sum() > 0
    assert all(torch.equal(before[k], v) for k, v in sft.policy.vision.state_dict().items())


def test_several_data_sets_teach_as_one_does():
    """Corrections beside demonstrations, one data set without a success among them."""
    failed = demonstrations(2, cameras=CAMERAS)
    failed.success = torch.zeros(24, dtype=torch.bool)
    both = Mixture([demonstrations(4, cameras=CAMERAS), failed])
    assert both.success.tolist() == [True] * 48 + [False] * 24
    assert run(make_seeing(), both, range(1), 1)[0]["hindsight_loss"] > 0
    with pytest.raises(UserError, match="No demonstration was solved"):
        run(make_seeing(), Mixture([failed, failed]), range(1), 1)


def test_pieces_have_the_gradient_of_the_whole():
    demos = demonstrations(6, cameras=CAMERAS)
    demos.success = torch.arange(72) >= 24  # two episodes failed
    found = []
    for size in (0, 5):
        sft = make_seeing(microbatch_size=size)
        sft.policy.fit_inputs(demos.proprio, demos.actions)
        sft.head.fit_inputs(demos)
        frames = torch.arange(0, 72, 3)
        obs, actions, mask = demos.batch(frames)
        led = sft.head.labels(demos, frames)
        loss_of = sft._loss_of(obs, actions, mask, torch.Generator().manual_seed(0), led)
        loss, _ = sft.microbatches.backward(torch.arange(24), loss_of)
        found.append([loss, *(p.grad for p in sft.microbatches.parameters)])
    for whole, pieces in zip(*found, strict=True):
        torch.testing.assert_close(whole, pieces, atol=1e-5, rtol=1e-4)


def test_the_head_is_saved_beside_the_policy_and_continues_bit_for_bit(tmp_path):
    demos = demonstrations(6, cameras=CAMERAS)
    straight, first, second = make_seeing(), make_seeing(), make_seeing()
    run(straight, demos, range(4), 4)
    run(first, demos, range(2), 4)
    states = {"policy": first.result.state_dict(), "algorithm": first.state_dict()}
    loaded, _ = checkpoint.load(checkpoint.save(tmp_path / "step_2", states, {}))
    second.result.load_state_dict(loaded["policy"])
    second.load_state_dict(loaded["algorithm"])
    run(second, demos, range(2, 4), 4)
    for a, b in ((straight.policy, second.policy), (straight.head, second.head)):
        assert all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())
    # The head is no part of what is saved as the policy.
    assert set(straight.result.state_dict()) == set(make_sft(SEEING).result.state_dict())


def test_what_cannot_be_taught_so_is_refused_in_words():
    with pytest.raises(
        UserError, match=r"test/arm has no pictures\. Set algorithm\.hindsight_coef=0"
    ):
        make_sft(SPEC, hindsight_coef=1.0)
    demos = demonstrations(4, cameras=CAMERAS)
    demos.success = torch.zeros(48, dtype=torch.bool)
    with pytest.raises(UserError, match="No demonstration was solved"):
        run(make_seeing(), demos, range(1), 1)
    frozen = torch.zeros(2, 32)
    with pytest.raises(UserError, match="features of this policy are frozen"):
        make_head().loss(frozen, torch.zeros(2, PLACES, 3), torch.ones(2, dtype=torch.bool))
