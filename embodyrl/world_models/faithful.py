"""Which network's course looks most like a real one (``env.members=faithful``).

discriminator_loss    real transitions against those that the state model's networks predict
score_discriminator   what it knows of held-out episodes, and whether its choice is the better one
most_faithful         its choice

The discriminator is learned after the state model, whose networks stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from embodyrl.functional.held_out import auroc
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.discriminator import Discriminator
from embodyrl.world_models.nets.state import StateModel

BLUR = 0.05
"""Noise on what the networks predict and on what is real, in units of what is left to predict.

Without it the discriminator would tell them apart by what does not matter: a network says that an
object rests to the last digit, and a simulator does not.
"""


def discriminator_loss(
    model: WorldModel, clips: Clips, rows: Tensor, generator: torch.Generator
) -> Tensor:
    """The cross-entropy of real or predicted, half of the weight on each.

    Args:
        model: with a state model and a discriminator; only the discriminator has gradients.
        clips: with the state.
        rows: (B,) frames that have a next one.
        generator: of the noise.
    """
    assert model.discriminator is not None
    real, predicted = transitions(model, clips, rows)
    real, predicted = (
        _blurred(x, clips.actions.shape[1], generator).to(model.device) for x in (real, predicted)
    )
    said_real, said_predicted = model.discriminator(real), model.discriminator(predicted)
    ones, zeros = torch.ones_like(said_real), torch.zeros_like(said_predicted)
    return 0.5 * (
        F.binary_cross_entropy_with_logits(said_real, ones)
        + F.binary_cross_entropy_with_logits(said_predicted, zeros)
    )


@torch.no_grad()
def transitions(model: WorldModel, clips: Clips, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(B, F) the real transitions after ``rows``, and (E, B, F) those that the networks predict."""
    assert model.state is not None
    before, after, actions = _recorded(model, clips, rows)
    each = before.expand(len(model.state.members), -1, -1)
    predicted = model.state(each, actions)
    many = actions.expand(len(each), -1, -1)
    return (
        model.state.transition(before, actions, after),
        model.state.transition(each, many, predicted),
    )


def _recorded(model: WorldModel, clips: Clips, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The full states at ``rows`` and one action later, and the actions."""
    before, after = clips.full_state(rows), clips.full_state(rows + 1)
    assert before is not None and after is not None
    return before.to(model.device), after.to(model.device), clips.actions[rows].to(model.device)


def _blurred(transition: Tensor, actions: int, generator: torch.Generator) -> Tensor:
    """With noise on what was left to predict, the last numbers of a transition."""
    body = (transition.shape[-1] - actions) // 2
    noise = BLUR * torch.randn((*transition.shape[:-1], body), generator=generator)
    return torch.cat([transition[..., :-body], transition[..., -body:] + noise.to(transition)], -1)


def most_faithful(
    state: StateModel,
    discriminator: Discriminator,
    courses: Float[Tensor, "e t n d"],
    actions: Float[Tensor, "n h a"],
    count: Int[Tensor, " n"],
) -> Int[Tensor, " n"]:
    """The network whose transitions are together the likeliest to be real.

    Args:
        state: the state model.
        discriminator: judges each transition.
        courses: the states before and after each action, by each network.
        actions: of the chunk.
        count: how many of them are executed; later ones do not count.
    """
    steps = actions.transpose(0, 1).expand(len(courses), -1, -1, -1)
    logit = discriminator(state.transition(courses[:, :-1], steps, courses[:, 1:]))
    executed = torch.arange(actions.shape[1], device=count.device)[:, None] < count
    return torch.where(executed, logit, 0.0).sum(1).argmax(0)


@torch.no_grad()
def score_discriminator(model: WorldModel, clips: Clips, rows: Tensor) -> dict[str, Any]:
    """What the discriminator knows of transitions that it has not learned from.

    It need not tell real from predicted to be of use; its choice must be nearer to the truth.

    Args:
        model: the world model.
        clips: with the state.
        rows: (B,) held-out frames that have a next one.

    Returns:
        ``auroc`` of real against predicted, with the noise of training, and ``error``: the root
        mean square of the next state's error, in units of what is left to predict, of the network
        that is ``chosen``, of ``one`` at random, of the ``mean`` state, and of the ``best`` network.
    """
    assert model.state is not None and model.discriminator is not None
    state, discriminator = model.state, model.discriminator
    # Real against predicted, as many of both.
    real, predicted = transitions(model, clips, rows)
    generator = torch.Generator().manual_seed(0)
    pair = (real, predicted[torch.arange(len(rows)) % len(predicted), torch.arange(len(rows))])
    size = clips.actions.shape[1]
    scores = [discriminator(_blurred(x, size, generator)).cpu() for x in pair]
    labels = torch.cat([torch.ones(len(rows)), torch.zeros(len(rows))]).bool()
    # Whether the choice is the better one.
    before, after, actions = _recorded(model, clips, rows)
    one = torch.ones(len(rows), dtype=torch.long, device=model.device)
    courses = state.courses(before, actions[:, None], one)
    chosen = most_faithful(state, discriminator, courses, actions[:, None], one)
    error = ((courses[:, -1] - after) / state.std / state.scale).square().mean(-1)
    mean = ((courses[:, -1].mean(0) - after) / state.std / state.scale).square().mean(-1)
    squares = {
        "chosen": error.gather(0, chosen[None])[0],
        "one": error.mean(0),
        "mean": mean,
        "best": error.amin(0),
    }
    return {
        "auroc": auroc(torch.cat(scores).numpy(), labels.numpy()),
        "error": {name: float(square.mean().sqrt()) for name, square in squares.items()},
    }


def faithful_in_words(score: dict[str, Any]) -> str:
    """What ``score_discriminator`` found, in a sentence or two."""
    error = score["error"]
    numbers = ", ".join(f"{name} {error[name]:.3f}" for name in ("chosen", "one", "mean", "best"))
    text = f"Discriminator on held-out transitions: AUROC {score['auroc']:.2f}; error {numbers}."
    if error["chosen"] < error["one"]:
        return text
    return f"{text} Its choice is no nearer to the truth than one at random: leave env.members out."
