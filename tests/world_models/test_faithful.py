"""Which network looks most like the real env: choice, loss, and what it is worth on held-out data."""

import math

import pytest
import torch
import torch.nn.functional as F
from known_members import DRIFT, HORIZON, dreams, save, three
from squares import SETTINGS, hardly_trained, squares
from torch import nn

from embodyrl.errors import UserError
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.faithful import (
    discriminator_loss,
    faithful_in_words,
    most_faithful,
    score_discriminator,
    transitions,
)
from embodyrl.world_models.init import build_model
from embodyrl.world_models.model import WorldModel


class DriftsAsTold(nn.Module):
    """Real is what drifts by as much as the first number of the action says."""

    def forward(self, transition: torch.Tensor) -> torch.Tensor:
        return -((transition[..., -1] - transition[..., 3]) ** 2)


def test_it_chooses_the_likeliest_course_of_the_actions_that_are_executed() -> None:
    state = three()
    told = torch.tensor([[-0.9, 0.0], [0.4, 0.0], [1.8, 0.0], [0.4, -9.0]])
    actions = torch.stack([told, torch.zeros(4, 2)], dim=2)
    count = torch.tensor([2, 1, 1, 1])
    courses = state.courses(torch.zeros(4, 3), actions, count)
    chosen = most_faithful(state, DriftsAsTold(), courses, actions, count)
    # Row 0: (-1 + .9)^2 + 1 = 1.01 and (.5 + .9)^2 + .25 = 2.21. The last row's second action
    # would speak for network 0, but it is not executed.
    assert chosen.tolist() == [0, 1, 2, 1]
    # Each row is chosen for by itself.
    for k in range(4):
        row = slice(k, k + 1)
        alone = most_faithful(state, DriftsAsTold(), courses[:, :, row], actions[row], count[row])
        assert alone.tolist() == [int(chosen[k])]
    two = torch.tensor([2])
    courses = state.courses(torch.zeros(1, 3), actions[3:], two)
    both = most_faithful(state, DriftsAsTold(), courses, actions[3:], two)
    assert both.tolist() == [0]


def crooked() -> tuple[WorldModel, Clips, torch.Tensor]:
    """A linear model of the square; of three networks the middle one is right, two are off."""
    clips = squares(80, 0, state=True)
    rows = (torch.arange(len(clips)) + 1 < clips.end).nonzero().flatten()
    config = WorldTrainConfig(**SETTINGS, state=True, state_members=3, faithful_steps=1)
    model = build_model(config, clips, rows)
    with torch.no_grad():
        for net, off in zip(model.state.members, (-1.5, 0.0, 1.5), strict=True):
            net[-1].bias[-1] = off
    return model, clips, rows


def test_it_learns_which_network_is_off_and_nothing_else_learns() -> None:
    model, clips, rows = crooked()
    before = {name: p.clone() for name, p in model.state.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    # It begins by saying nothing.
    loss = discriminator_loss(model, clips, rows[:64], generator)
    assert float(loss.detach()) == pytest.approx(math.log(2))
    with torch.no_grad():
        model.discriminator.net[-1].bias.fill_(2.0)
    loss = discriminator_loss(model, clips, rows[:64], generator)
    by_hand = 0.5 * (F.softplus(torch.tensor(-2.0)) + F.softplus(torch.tensor(2.0)))
    assert float(loss.detach()) == pytest.approx(float(by_hand))
    adam = torch.optim.Adam(model.discriminator.parameters(), lr=3e-3)
    for _ in range(200):
        drawn = rows[torch.randint(len(rows), (128,), generator=generator)]
        adam.zero_grad()
        discriminator_loss(model, clips, drawn, generator).backward()
        adam.step()
    for name, parameter in model.state.named_parameters():
        assert torch.equal(parameter, before[name]) and parameter.grad is None
    # On other episodes: real is likelier than what is off, and the choice is the right one.
    other = squares(40, 99, state=True)
    unseen = (torch.arange(len(other)) + 1 < other.end).nonzero().flatten()
    real, predicted = transitions(model, other, unseen)
    with torch.no_grad():
        said = model.discriminator(predicted).mean(1)
        assert model.discriminator(real).mean() > said[[0, 2]].max() + 1.0
    assert said[1] > said[[0, 2]].max() + 1.0
    score = score_discriminator(model, other, unseen)
    error = score["error"]
    assert score["auroc"] > 0.7
    assert error["best"] <= error["chosen"] < 0.9 * error["one"]
    assert error["one"] > error["mean"]
    assert "leave env.members out" not in faithful_in_words(score)
    # Turned round it chooses what is off, and says so.
    with torch.no_grad():
        model.discriminator.net[-1].weight.neg_()
        model.discriminator.net[-1].bias.neg_()
    turned = score_discriminator(model, other, unseen)
    assert turned["auroc"] == pytest.approx(1 - score["auroc"], abs=1e-3)
    assert "leave env.members out" in faithful_in_words(turned)


def test_a_dream_follows_the_most_faithful_and_a_model_without_one_refuses(tmp_path) -> None:
    folder = save(tmp_path / "model", faithful_steps=1)
    env = dreams(folder, members="faithful")
    env.model.discriminator.forward = DriftsAsTold().forward
    env.reset(seed=0)
    before = env._observe().privileged[:, 0].clone()
    actions = torch.zeros(4, HORIZON, 2)
    actions[:, :, 0] = torch.tensor([-0.9, 0.4, 1.0, 0.6])[:, None]
    moved = env.step(actions).obs.privileged[:, 0] - before
    # The action is clipped to 1, and 0.5 is nearer to it than 2 is.
    torch.testing.assert_close(moved / HORIZON, DRIFT[[0, 1, 1, 1]])
    loaded, saved = WorldModel.load(folder), env.model
    for a, b in zip(
        loaded.discriminator.parameters(), saved.discriminator.parameters(), strict=True
    ):
        assert torch.equal(a, b)
    plain = save(tmp_path / "plain")
    with pytest.raises(UserError, match="Train it with faithful_steps=1000"):
        WorldModelEnv(WorldModelConfig(model=plain, num_envs=2, members="faithful"))
    with pytest.raises(UserError, match="no several networks"):
        save(tmp_path / "single", state_members=1, faithful_steps=1)
    with pytest.raises(UserError, match="faithful_steps"):
        WorldTrainConfig(data=("memory",), frames=False, faithful_steps=5)


def test_training_says_what_it_is_worth_and_goes_on_without_it(
    tmp_path, monkeypatch, capsys
) -> None:
    data = squares(60, 0, state=True)
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: data))
    quick = SETTINGS | {"codec_steps": 4, "state_steps": 40, "steps": 4, "inverse_steps": 4}
    quick |= {"state_members": 2}
    run = WorldTrainConfig(**quick, faithful_steps=30, out=str(tmp_path / "run"))
    folder = hardly_trained(run)
    assert "Discriminator on held-out transitions: AUROC" in capsys.readouterr().out
    assert WorldModel.load(folder).discriminator is not None
    # Networks that learn on are no longer those that it knows.
    on = WorldTrainConfig(**quick, init=folder, out=str(tmp_path / "on"))
    assert WorldModel.load(hardly_trained(on)).discriminator is None
