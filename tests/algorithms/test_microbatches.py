"""Gradients in pieces are those of the whole, and a step that does not fit the memory is done again in smaller ones."""

import copy

import pytest
import torch
from scale_runs import PPO, make
from torch import nn

from embodyrl.algorithms.optim import Microbatches
from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLP, FlowMLPConfig
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.training.setup import Envs, build_algorithm
from embodyrl.types import EnvSpec

CPU = torch.device("cpu")
SPEC = EnvSpec("test", 4, 2, 3, "ee_delta_pos", 25.0, 20, {})


class Hungry(nn.Module):
    """A linear layer that asks for as much memory as no machine has, for more than ``most`` rows."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.layer, self.most, self.seen = nn.Linear(3, 1), most, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        if len(x) > self.most:
            torch.empty(2**50)
        return self.layer(x).square()


def test_a_step_that_does_not_fit_is_done_again_in_halves(capsys):
    model, x = Hungry(2), torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    micro = Microbatches(0, model.parameters())
    loss, _ = micro.backward(torch.arange(8), lambda i: (model(x[i]).sum() / 8, {}))
    assert model.seen == [8, 4, 2, 2, 2, 2] and micro.size == 2
    assert "2 rows at a time" in capsys.readouterr().out
    whole = model.layer(x).square().mean()
    (gradient,) = torch.autograd.grad(whole, [model.layer.weight])
    torch.testing.assert_close(loss, whole.detach())
    torch.testing.assert_close(model.layer.weight.grad, gradient)
    model.seen.clear()
    micro.backward(torch.arange(8), lambda i: (model(x[i]).sum() / 8, {}))
    assert model.seen == [2, 2, 2, 2]  # it does not try again what failed


def test_a_row_that_does_not_fit_is_said_and_other_errors_are_not_swallowed():
    model, x = Hungry(0), torch.zeros(2, 3)
    with pytest.raises(UserError, match="not even hold one row"):
        Microbatches(0, model.parameters()).backward(
            torch.arange(2), lambda i: (model(x[i]).sum(), {})
        )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Microbatches(0, []).backward(
            torch.arange(2), lambda i: (torch.zeros(2, 3) @ torch.zeros(2, 3), {})
        )
    with pytest.raises(UserError, match="microbatch_size"):
        Microbatches(-1, [])


def after_ppo(tmp_path, size: int) -> tuple[torch.Tensor, dict[str, float]]:
    """The weights and the figures of an update, a gradient ``size`` rows at a time."""
    sections = {
        **PPO,
        "warmup_iterations": 0,
        "minibatch_size": 24,
        "epochs": 2,
        "microbatch_size": size,
    }
    config = make(tmp_path, algorithm=sections)
    envs = Envs(config)
    algorithm = build_algorithm(config, envs, CPU)
    generator = seeded(0, 0)
    batch = Player(envs.train).collect(algorithm, 0, generator=generator)
    envs.close()
    figures = algorithm.update(batch, progress=0.0, generator=generator)
    return nn.utils.parameters_to_vector(algorithm.policy.parameters()), figures


def test_ppo_in_pieces_is_ppo(tmp_path):
    whole, figures = after_ppo(tmp_path, 0)
    pieces, same = after_ppo(tmp_path, 7)
    torch.testing.assert_close(pieces, whole, atol=1e-6, rtol=1e-4)
    assert same == pytest.approx(figures, abs=1e-6, rel=1e-4)


def test_the_figures_of_a_batch_count_its_rows_not_its_pieces():
    x, layer = torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0]), nn.Linear(1, 1)

    def loss_of(i):
        return layer(x[i, None]).sum() / len(x), {"x": x[i].mean(), "x_max": x[i].max()}

    for size in (0, 1, 2, 3):
        _, figures = Microbatches(size, layer.parameters()).backward(torch.arange(5), loss_of)
        assert figures == pytest.approx({"x": 3.8, "x_max": 9.0})


def test_imitation_in_pieces_is_imitation():
    g = torch.Generator().manual_seed(0)
    episode = (
        torch.arange(40) // 9
    )  # of unequal lengths, so that pieces differ in the actions that count
    demos = Demonstrations(
        3, {}, torch.randn(40, 3, generator=g), torch.rand(40, 2, generator=g) * 2 - 1, episode,
        torch.zeros(40, dtype=torch.long), ["go"],
    )  # fmt: skip
    policy = FlowMLP(FlowMLPConfig(horizon=3, width=8, layers=1, critic_width=8), SPEC)
    vectors = []
    for size in (0, 5):
        sft = SFT(
            SFTConfig(steps_per_iteration=2, batch_size=16, microbatch_size=size),
            copy.deepcopy(policy),
        )
        sft.update(demos, progress=0.5, generator=torch.Generator().manual_seed(1))
        vectors.append(nn.utils.parameters_to_vector(sft.policy.parameters()))
    torch.testing.assert_close(vectors[0], vectors[1], atol=1e-6, rtol=1e-4)
