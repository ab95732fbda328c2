"""PA-RL's options: values after each action, edits as in EXPO, ResFiT and RLT, a frozen policy's features."""

import copy
import dataclasses
from typing import Any, cast

import pytest
import torch

from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.pa_rl import PARL, PARLConfig
from embodyrl.algorithms.pa_rl_offline import PARLOffline, PARLOfflineConfig
from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.policies.chooser import Chooser, ChooserConfig, Editor
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/arm", 4, 2, 3, "torque", 25.0, 20, {})
SEEN = EnvSpec("test/seen", 4, 2, 3, "torque", 25.0, 20, {"front": (32, 32)})
H = 3
SMALL: dict[str, Any] = {
    "warmup_chunks": 8,
    "critic_warmup": 2,
    "mc_steps": 0,
    "batch_size": 10,
    "actor_batch_size": 6,
    "capacity": 64,
    "critic_utd": 0.5,
    "actor_utd": 0.25,
}
RLT: dict[str, Any] = {"edit_scale": 2.0, "edit_only": True, "chooser_sees": "shared"}
RLT_TRAINING: dict[str, Any] = {"actor_utd": 0.0, "edit_bc_coef": 1.0, "edit_dropout": 0.5}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def make_small(policy=None, spec=SPEC, **settings):
    config: dict[str, Any] = {"num_denoise_steps": 2, "horizon": H, "chooser_width": 8}
    config |= {"proposals": 3, "layers": 1, **(policy or {})}
    torch.manual_seed(0)
    if spec.cameras:
        config |= {"width": 16, "heads": 2, "action_patch": H, "critic": "shared"}
        made = make_policy(FlowVLAConfig(**config), spec, 0)
    else:
        made = make_policy(FlowMLPConfig(**{"width": 8} | config), spec, 0)
    return PARL(PARLConfig(**SMALL | settings), cast(Any, made))


def played(count, spec=SPEC, first=0, seed=0, over=True, horizon=H):
    """One chunk of each of so many episodes; every second one is solved if they are over."""
    generator = gen(seed)

    def look():
        images = {
            name: torch.randint(256, (count, *size, 3), generator=generator, dtype=torch.uint8)
            for name, size in spec.cameras.items()
        }
        return Obs(images, torch.randn(count, 3, generator=generator), ["go"] * count)

    solved = torch.arange(count) % 2 == 0
    shape = (count, horizon)
    return Transitions(
        look(),
        torch.rand(*shape, spec.action_dim, generator=generator) * 2 - 1,
        torch.rand(*shape, generator=generator),
        torch.ones(*shape, dtype=torch.bool),
        solved & over,
        ~solved & over,
        look(),
        episode=torch.arange(first, first + count),
        success=solved & over,
    )


def update(algorithm, chunks, seed=0):
    return algorithm.update(TransitionBatch(chunks), progress=0.0, generator=gen(seed))


class Near(torch.nn.Module):
    """Two critics: minus ``weight`` times half the squared distance to a chunk."""

    def __init__(self, wanted, weight=1.0):
        super().__init__()
        self.wanted = wanted
        self.weight = torch.nn.Parameter(torch.tensor(weight))

    def forward(self, features, choice):
        value = -0.5 * self.weight * (choice - self.wanted).square().flatten(1).sum(1)
        return torch.stack([value, value])


# Values after each action.


def chain():
    """All chunks of three actions of +1 or -1 in a chain of two states; later ones mostly +1.

    In the second state the first action is the reward, and the episode is over. In the first state
    the second action earns its product with the first, and the third one half of itself.
    """
    spec = EnvSpec("test/chain", 4, 1, 1, "torque", 25.0, 20, {})
    mostly = (1.0, 1.0, 1.0, -1.0)
    actions = torch.cartesian_prod(
        torch.tensor([1.0, -1.0]), torch.tensor(mostly), torch.tensor(mostly)
    )
    n = len(actions)
    first, second, third = actions.unbind(1)
    zero = torch.zeros(n)
    rewards = [
        torch.stack([zero, first * second, 0.5 * third], 1),
        torch.stack([first, zero, zero], 1),
    ]
    before, middle, after = (Obs({}, torch.full((n, 1), s), ["go"] * n) for s in (-1.0, 1.0, 0.0))
    chunks = [
        Transitions(
            obs,
            actions[..., None],
            reward,
            torch.ones(n, 3, dtype=torch.bool),
            torch.full((n,), ends),
            torch.zeros(n, dtype=torch.bool),
            next_obs,
            episode=torch.arange(n) + n * number,
            success=torch.full((n,), ends),
        )
        for number, (obs, reward, ends, next_obs) in enumerate(
            [(before, rewards[0], False, middle), (middle, rewards[1], True, after)]
        )
    ]
    return spec, actions, chunks


def test_values_after_each_action_are_those_of_a_chain():
    """By hand: a value is the mean over what the replay's chunks do with the actions to come."""
    spec, actions, chunks = chain()
    policy = {"chooser_prefixes": True, "chooser_width": 64}
    settings = {"capacity": 64, "gamma": 0.5, "critic_lr": 3e-3, "tau": 0.05, "batch_size": 256}
    algorithm = make_small(policy, spec, **settings)
    algorithm.chooser.ready.fill_(True)
    rows = algorithm.buffer.store(Transitions.cat(chunks))
    algorithm.chooser.encoder.normalize_proprio.std.fill_(1.001)  # as it is
    algorithm.buffer.see(rows)
    algorithm.buffer.data["next_choice"][rows] = 1.0
    generator = gen()
    for lr, steps in ((3e-3, 500), (3e-4, 150)):
        algorithm.critic_optimizer.lr = lr
        for _ in range(steps):
            algorithm._update_critics(generator, Means())
    features = algorithm.buffer.data["features"][rows]
    with torch.no_grad():
        value = algorithm.chooser.critics.after_each_action(
            features, algorithm.buffer.data["choice"][rows]
        ).mean(0)
    first, second, third = actions.unbind(1)
    to_come = 0.5**3 * 1.0  # the second state, where +1 is chosen
    by_hand = [
        torch.stack(
            [
                0.5 * first * 0.5 + 0.25 * 0.5 * 0.5 + to_come,
                0.5 * first * second + 0.25 * 0.5 * 0.5 + to_come,
                0.5 * first * second + 0.25 * 0.5 * third + to_come,
            ],
            dim=1,
        ),
        first[:, None].expand(-1, 3),
    ]
    torch.testing.assert_close(value, torch.cat(by_hand), atol=0.03, rtol=0)


def test_all_prefixes_of_a_chunk_have_one_target():
    algorithm = make_small({"chooser_prefixes": True}, critic_warmup=0)
    update(algorithm, played(8))
    torch.nn.init.normal_(algorithm.chooser.critics.lengths)
    rows, target = algorithm._td_batch(gen(5))
    data = algorithm.buffer.data
    with torch.no_grad():
        each = algorithm.chooser.critics.after_each_action(
            data["features"][rows], data["choice"][rows]
        )
    stats = Means()
    algorithm._update_critics(gen(5), stats)
    found = stats.means()
    by_hand = sum((each[e, :, k] - target).square().mean() / H for e in range(2) for k in range(H))
    assert found["critic_loss"] == pytest.approx(float(by_hand), rel=1e-5)
    assert found["q"] == pytest.approx(float(each[..., -1].mean()), rel=1e-4)


def test_the_value_of_the_whole_chunk_chooses():
    algorithm = make_small({"chooser_prefixes": True})
    plain = make_small()
    critics = algorithm.chooser.critics
    torch.nn.init.normal_(critics.lengths)
    weights = {k: v for k, v in critics.state_dict().items() if k != "lengths"}
    plain.chooser.critics.load_state_dict(weights)
    proposals = torch.rand(6, 4, H, 2, generator=gen()) * 2 - 1
    features = torch.randn(6, algorithm.chooser.encoder.dim, generator=gen(1))
    assert torch.equal(
        algorithm.chooser.best_of(features, proposals), plain.chooser.best_of(features, proposals)
    )


# Edits.


def test_an_editor_stays_in_its_bounds_and_its_gradient_ends_nowhere():
    reference = torch.rand(64, H, 2, generator=gen()) * 2 - 1
    features = torch.zeros(64, 5)
    for scale in (0.1, 2.0):
        editor = Editor(5, H, 2, scale)
        assert torch.equal(editor(features, reference), reference)
        for sign in (1.0, -1.0):
            bias = cast(torch.nn.Linear, editor.net[-1]).bias
            torch.nn.init.constant_(bias, 20 * sign)
            wanted = (reference + sign * scale).clamp(-1, 1)
            torch.testing.assert_close(editor(features, reference), wanted)
            # Halfway there is a slope, also near the edge of the range.
            torch.nn.init.constant_(bias, 0.5 * sign)
            edited = editor(features, 0.99 * reference.sign())
            (slope,) = torch.autograd.grad(edited.sum(), bias)
            assert edited.abs().amax() < 1 and (slope > 0).all()


def ready_to_edit(policy, wanted, weight=1.0, rows=8, **settings):
    """An algorithm whose critics want a chunk, with references that differ from row to row."""
    settings = {"critic_warmup": 0, "critic_lr": 1e-2, "actor_utd": 0.0, **settings}
    algorithm = make_small(policy, **settings)
    algorithm.chooser.critics = Near(wanted, weight)
    places = algorithm.buffer.add(played(rows))
    data = algorithm.buffer.data
    data["features"][places] = torch.randn(rows, algorithm.chooser.encoder.dim, generator=gen(3))
    data["reference"][places] = torch.rand(rows, H, 2, generator=gen(4)) - 0.5
    return algorithm, places, data


def test_the_anchor_balances_value_and_distance_as_by_hand():
    """Value -|a - w|^2 / 2 and beta times the mean square of a - r: a = (w + k r) / (1 + k)."""
    wanted = torch.full((H, 2), 0.8)
    for beta in (0.0, 3.0):
        algorithm, rows, data = ready_to_edit({"edit_scale": 2.0}, wanted, edit_bc_coef=beta)
        for _ in range(300):
            algorithm.edits.step(rows, gen(), Means())
        k = 2 * beta / (H * 2)
        reference = data["reference"][rows]
        edited = algorithm.chooser.editor(data["features"][rows], reference)
        torch.testing.assert_close(edited, (wanted + k * reference) / (1 + k), atol=0.03, rtol=0)


def test_reference_dropout_hides_whole_chunks_and_the_anchor_remains_the_reference():
    policy, settings = {"edit_scale": 2.0}, {"edit_bc_coef": 1.0, "edit_dropout": 0.5}
    algorithm, rows, data = ready_to_edit(policy, torch.zeros(H, 2), 0.0, **settings)
    reference = data["reference"][rows]
    told = []
    algorithm.chooser.editor.register_forward_pre_hook(lambda _, given: told.append(given[1]))
    generator = gen()
    for _ in range(400):
        stats = Means()
        algorithm.edits.step(rows, generator, stats)
    hidden = torch.stack(told).flatten(2).eq(0).all(-1)
    assert 0.45 < hidden.float().mean() < 0.55
    kept = torch.stack(told)[~hidden]
    assert torch.equal(kept, reference.expand(400, -1, -1, -1)[~hidden])
    # The log says how far it goes where it knows the reference.
    known = ~hidden[-1]
    change = (algorithm.chooser.editor(data["features"][rows], reference) - reference).detach()
    assert 0 < known.sum() < len(rows)
    found = stats.means()["edit"]
    assert found == pytest.approx(float(change[known].abs().mean()), abs=2e-3)
    # From features alone it finds what it was not told, and it leaves alone what it was told.
    features = data["features"][rows]
    for given in (torch.zeros_like(reference), reference):
        torch.testing.assert_close(
            algorithm.chooser.editor(features, given), reference, atol=0.05, rtol=0
        )


def test_a_step_of_the_editor_moves_the_editor_alone():
    algorithm = make_small({"edit_scale": 0.5}, critic_warmup=0)
    update(algorithm, played(8))
    algorithm.critic_optimizer.zero_grad()
    algorithm.actor.optimizer.zero_grad()
    before = copy.deepcopy(algorithm.policy.state_dict())
    algorithm.edits.step(torch.arange(8), gen(), Means())
    moved = {n for n, v in algorithm.policy.state_dict().items() if not torch.equal(v, before[n])}
    assert moved and all(name.startswith("chooser.editor.") for name in moved)
    slopes = {n for n, p in algorithm.policy.named_parameters() if p.grad is not None}
    assert slopes and all(name.startswith("chooser.editor.") for name in slopes)


def test_references_are_proposals_and_the_next_chunks_reference_is_that_after_this_one():
    algorithm = make_small({"edit_scale": 0.5}, warmup_chunks=1000)
    with torch.no_grad():
        for parameter in algorithm.policy.actor_parameters():  # so that observations matter
            parameter += torch.randn(parameter.shape, generator=gen())
    first, second = played(2, over=False), played(2, seed=1)
    second = dataclasses.replace(second, obs=first.next_obs)
    rows = algorithm.buffer.add(Transitions.cat([first, second]))
    algorithm.buffer.data["episode"][rows] = torch.tensor([1, 2, 1, 2])
    algorithm.edits.note_references(rows, gen(7))
    data, generator = algorithm.buffer.data, gen(7)
    proposed = algorithm.policy.propose(algorithm.buffer.rows(rows).obs, 1, generator)[:, 0]
    assert torch.equal(data["reference"][rows], proposed)
    assert torch.equal(data["next_reference"][rows[:2]], proposed[2:])
    after = algorithm.policy.propose(second.next_obs, 1, generator)[:, 0]
    assert torch.equal(data["next_reference"][rows[2:]], after)
    # They are noted when chunks are stored.
    update(algorithm, played(4, first=9))
    assert data["reference"][4:8].any() and not data["reference"][8:].any()


def test_edited_alone_or_beside_the_proposals():
    proposals = torch.rand(5, 4, H, 2, generator=gen()) * 0.5
    for only in (False, True):
        config = ChooserConfig(chooser_width=8, edit_scale=0.25, edit_only=only)
        chooser = Chooser(SPEC, H, config)
        chooser.critics = Near(torch.full((H, 2), -1.0))  # edits make it worse
        torch.nn.init.constant_(cast(Any, chooser.editor).net[-1].bias, 20.0)
        best = chooser.best_of(torch.zeros(5, chooser.encoder.dim), proposals)
        value = chooser.critics(None, proposals.flatten(0, 1))[0].view(5, 4)
        wanted = proposals[torch.arange(5), value.argmax(1)] + 0.25 * only
        torch.testing.assert_close(best, wanted)


def test_a_policy_that_is_always_edited_is_valued_by_what_its_editor_does_by_now():
    algorithm = make_small({"edit_scale": 0.25, "edit_only": True}, critic_warmup=0)
    update(algorithm, played(8, over=False))
    data = algorithm.buffer.data
    data["next_choice"][:8] = 0.0
    torch.nn.init.constant_(algorithm.chooser.editor.net[-1].bias, 20.0)
    torch.nn.init.zeros_(algorithm.chooser.editor.net[-1].weight)
    rows, target = algorithm._td_batch(gen(3))
    edited = (data["next_reference"][rows] + 0.25).clamp(-1, 1)
    value = algorithm.target(data["next_features"][rows], edited).mean(0)
    reward = (data["reward"][rows] * 0.99 ** torch.arange(H)).sum(1)
    torch.testing.assert_close(target, (reward + 0.99**H * value).detach())


# A small actor beside a frozen policy, whose features it reads (RLT).


@pytest.mark.parametrize("spec", [SPEC, SEEN], ids=["flow_mlp", "flow_vla"])
def test_beside_a_frozen_policy_only_critics_and_editor_learn(spec):
    algorithm = make_small(RLT, spec, **RLT_TRAINING)
    before = copy.deepcopy(algorithm.policy.state_dict())
    update(algorithm, played(8, spec))
    row = update(algorithm, played(8, spec, first=8, seed=1))
    assert row["gradient_steps"] > 2 and row["actor_steps"] == 0 and row["edit"] > 0
    moved = {n for n, v in algorithm.policy.state_dict().items() if not torch.equal(v, before[n])}
    learned = ("chooser.editor.", "chooser.critics.", "chooser.encoder.normalize.", "chooser.ready")
    assert moved and all(name.startswith(learned) for name in moved)
    assert {name.split(".")[1] for name in moved} >= {"editor", "critics", "encoder"}


@pytest.mark.parametrize("spec", [SPEC, SEEN], ids=["flow_mlp", "flow_vla"])
def test_shared_features_are_the_policys_and_proprioception_normalised(spec):
    policy = make_small(RLT, spec, **RLT_TRAINING).policy
    encoder = policy.chooser.encoder
    obs = played(40, spec).obs
    assert not encoder.fitted
    encoder.fit_inputs(obs)
    raw = torch.cat([policy.features(policy.encode(obs)), obs.proprio], dim=-1)
    raw = (raw - raw.mean(0)) / raw.std(0, correction=0).clamp_min(1e-2)
    # More observations than are encoded at once.
    torch.testing.assert_close(encoder(obs), raw, atol=1e-4, rtol=1e-4)
    assert encoder.fitted and not encoder(obs).requires_grad
    # The policy is no part of its chooser, and a copy reads the copy's features.
    assert {name.split(".")[0] for name in encoder.state_dict()} == {"normalize"}
    copied = copy.deepcopy(policy)
    with torch.no_grad():
        for parameter in copied.actor_parameters():
            parameter += 0.1
    if spec.cameras:
        assert not torch.allclose(copied.chooser.encoder(obs), encoder(obs))
    torch.testing.assert_close(encoder(obs), raw, atol=1e-4, rtol=1e-4)


def test_it_goes_where_no_proposal_is():
    """A bandit: the reward is how near the first action is to a corner."""
    algorithm = make_small(
        RLT | {"width": 32, "chooser_width": 64},
        **RLT_TRAINING | {"edit_bc_coef": 0.05},
        warmup_chunks=64,
        critic_warmup=100,
        batch_size=64,
        capacity=4096,
        critic_utd=1.0,
        critic_lr=3e-3,
    )
    corner = torch.tensor([0.9, -0.9])
    obs = Obs({}, torch.randn(128, 3, generator=gen(5)), ["go"] * 128)
    proposals = algorithm.policy.propose(obs, 3, gen(9))[:, :, 0]
    nearest = (proposals - corner).norm(dim=-1).amin(1).mean()
    for i in range(20):
        chunks = played(32, first=32 * i, seed=i)
        choice = algorithm.act(chunks.obs, gen(100 + i))[0]
        reward = torch.zeros(32, H)
        reward[:, 0] = -(choice[:, 0] - corner).square().sum(-1)
        chunks = dataclasses.replace(chunks, choice=choice, reward=reward)
        update(algorithm, chunks, seed=i)
    reached = (algorithm.act(obs, gen(9))[0][:, 0] - corner).norm(dim=-1).mean()
    assert reached < 0.5 * nearest


def everything(**settings):
    return make_small(RLT | {"chooser_prefixes": True}, **RLT_TRAINING | settings)


def test_a_resumed_run_with_all_options_goes_on_bit_for_bit():
    first, second = everything(), everything()
    update(first, played(16))
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    chunks = played(8, first=20, seed=2)
    assert update(first, chunks) == update(second, chunks)
    for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.buffer.data["reference"], second.buffer.data["reference"])


@pytest.mark.parametrize(
    ("policy", "settings", "words"),
    [
        ({"chooser_width": 0, "chooser_prefixes": True}, {}, "chooser_prefixes is True, but"),
        ({"chooser_width": 0, "chooser_sees": "shared"}, {}, "chooser_sees is 'shared', but"),
        ({"edit_only": True}, {}, "edit_only is True, but edit_scale=0"),
        ({}, {"edit_bc_coef": 1.0}, "edit_bc_coef is 1.0, but policy.edit_scale=0"),
        ({}, {"edit_dropout": 0.5}, "edit_dropout is 0.5, but policy.edit_scale=0"),
        ({"edit_scale": 0.1}, {"edit_dropout": 0.5}, "Set policy.edit_scale=2"),
        ({"chooser_sees": "shared"}, {}, "algorithm.actor_utd=0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused_in_words(policy, settings, words):
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        make_small(policy, **settings)


def test_hindsight_that_nothing_reads_is_refused():
    with pytest.raises(UserError, match="asks for no hindsight"):
        make_small(RLT, SEEN, **RLT_TRAINING, hindsight_steps=9)
    with pytest.raises(UserError, match="summarises observations"):
        Chooser(SPEC, H, ChooserConfig(chooser_width=8, chooser_sees="shared"))


def test_offline_names_its_own_setting_of_a_frozen_policy():
    policy = make_small(RLT, **RLT_TRAINING).policy
    with pytest.raises(UserError, match=r"algorithm\.actor_share=0"):
        PARLOffline(PARLOfflineConfig(), cast(Any, policy))
    PARLOffline(PARLOfflineConfig(actor_share=0.0), cast(Any, policy))
