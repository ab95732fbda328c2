"""The gate before offline PA-RL: what opens it, what it estimates, and what happens where it is closed."""

import numpy as np
import pytest
import torch
from small_offline import H, gen, make_small, recorded, update

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.mixture import Mixture, episode_sources
from embodyrl.errors import UserError

FAST = {"gate": "require", "lr": 3e-3, "critic_lr": 3e-3, "actor_share": 1.0, "critic_warmup": 300}


def by_chance(count=300, seed=0, share=0.5, shift=0.0, person=False):
    """Episodes of two actions whose outcome has nothing to do with what was done."""
    generator = gen(seed)
    actions = torch.rand(count, 2, 2, generator=generator) * 2 - 1
    actions[:, 0, 0] = actions[:, 0, 0] / 4 + shift
    success = torch.rand(count, generator=generator) < share
    return Demonstrations(
        H,
        {},
        torch.randn(count * 2, 3, generator=generator),
        actions.flatten(0, 1),
        torch.arange(count).repeat_interleave(2),
        torch.zeros(count * 2, dtype=torch.long),
        ["go"],
        success.repeat_interleave(2),
        intervention=torch.full((count * 2,), person),
    )


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


def test_it_opens_where_what_is_done_matters_and_estimates_what_that_brings(capsys):
    algorithm = make_small(**FAST, success_coef=0.0)
    data = recorded(400)
    for i in range(6):
        row = update(algorithm, data, i)
    # The outcome depends on the action alone: the value of states tells nothing.
    assert row["gate_open"] == 1 and row["gate_slope_low"] > 0
    assert row["gate_slope"] == pytest.approx(1.0, abs=0.15)
    assert row["gate_auroc_low"] < 0.5 < row["gate_auroc_high"]
    # It says that it helped, and by how much: an episode is solved where the first number is above 0.
    obs = data.batch(torch.arange(0, 800, 2))[0]
    chosen = algorithm.actor.choose(obs, algorithm.chooser.encoder(obs), gen(3))[0]
    solved = float((chosen[:, 0, 0] > 0).float().mean())
    assert row["gate"] == 1 and algorithm.verdict.startswith("helped: ")
    truth = 0.99 * (solved - float(data.success.float().mean()))
    assert truth > 0.3 and row["gate_gain"] == pytest.approx(truth, abs=0.12)
    assert "They may choose." in capsys.readouterr().out
    # A policy that takes what is worth least does harm.
    with torch.no_grad():
        algorithm.chooser.critics.weights[-1].neg_()
        for p in algorithm.policy.actor_parameters():
            p.zero_()
    row = algorithm.gate.figures(gen(4))
    assert row["gate"] == -1 and algorithm.verdict.startswith("did harm: ")


def test_where_critics_cannot_tell_solved_episodes_alone_are_imitated():
    algorithm = make_small(**FAST)
    critics, actor = weights(algorithm.chooser.critics), weights(algorithm.policy)
    row = update(algorithm, by_chance())
    assert row["gate_open"] == 0 and row["gate"] == 0 and "value_chosen" not in row
    assert row["error_held_out"] > 2 * row["error_trained"]
    # Nothing chooses, here or where the policy acts, and its own weights learned.
    assert not algorithm.chooser.ready and not algorithm.critic_steps
    same = zip(critics, weights(algorithm.chooser.critics), strict=True)
    assert all(torch.equal(a, b) for a, b in same)
    assert row["actor_steps"] == 10 and np.isfinite(row["actor_loss"]) and "choice_gain" not in row
    after = weights(algorithm.policy)
    assert not all(torch.equal(a, b) for a, b in zip(actor, after, strict=True))
    assert algorithm.verdict.startswith("cannot tell. ")
    assert "imitates solved episodes alone" in algorithm.verdict
    # A policy that imitates nothing stays as it is.
    still = make_small(**FAST | {"actor_share": 0.0})
    update(still, by_chance())
    assert "stays as it is" in still.verdict


def test_with_warn_it_says_so_and_goes_on_and_with_skip_it_does_not_ask(capsys):
    warned = make_small(**FAST | {"gate": "warn"})
    row = update(warned, by_chance())
    assert warned.chooser.ready and row["gate_open"] == 0 and row["gate"] == 0
    assert np.isfinite(row["gate_gain"]) and warned.critic_steps == 310
    assert "choose all the same (gate=warn)" in capsys.readouterr().out
    skipped = make_small(**FAST | {"gate": "skip"})
    row = update(skipped, by_chance())
    assert skipped.chooser.ready and not [name for name in row if name.startswith("gate")]
    assert skipped.verdict == "" and capsys.readouterr().out == ""


def test_too_few_episodes_are_refused_or_said():
    data = recorded(30)
    with pytest.raises(UserError, match=r"takes 10 of each.*algorithm\.gate=warn"):
        update(make_small(gate="require"), by_chance(30, share=0.2))
    update(make_small(gate="require"), data)  # 10 of each are enough to ask
    warned = make_small()
    row = update(warned, by_chance(30, share=0.2))
    assert "gate" not in row and "takes 10 of each" in warned.verdict
    assert update(warned, data, 1)["gradient_steps"] == 120


def test_a_person_who_does_better_does_not_open_it():
    # A person acts otherwise and is always successful; what the policy does is left to chance.
    person = by_chance(200, seed=1, share=1.0, shift=0.7, person=True)
    data = Mixture([by_chance(200), person])
    kinds = set(episode_sources(data).values())
    assert kinds == {(0, "go", False), (1, "go", True)} and len(episode_sources(data)) == 400
    row = update(make_small(**FAST), data)
    assert row["gate_open"] == 0
    # A data set of another policy, which does not say who acted, has a constant of its own.
    data = Mixture([by_chance(200), by_chance(200, seed=1, share=1.0, shift=0.7)])
    assert update(make_small(**FAST), data)["gate_open"] == 0
