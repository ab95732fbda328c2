"""``train_trajectories``: a diffusion model of pieces of recorded episodes (arXiv:2404.06356).

The net learns to estimate the data of noisy pieces at random times. Some episodes are held out. On
them the error of its estimates is measured, which guidance needs (``functional.guided_diffusion``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.data.lerobot_write import require_free
from embodyrl.devices import keep_random_state, use_device
from embodyrl.errors import UserError
from embodyrl.functional.flow import flow_matching_pair, randn, random_uniform
from embodyrl.ranges import Count, Device, Positive, Range, Seed, check_config
from embodyrl.world_models.nets.trajectory import TrajectoryNet
from embodyrl.world_models.trajectories.pieces import Pieces, read_pieces
from embodyrl.world_models.trajectories.trajectory_model import TIMES, TrajectoryModel

HELD_OUT = 10
"""Of so many episodes one is held out."""
JUDGED = 512
"""Held-out pieces on which the error is measured, at most."""


@dataclass(frozen=True)
class TrajectoryTrainConfig:
    """Settings of ``train_trajectories``.

    Attributes:
        length: L, rows of a piece.
        steps: gradient steps.
        batch_size: pieces in each.
        lr: learning rate (AdamW), which falls to 0.
        width: of the net.
        layers: of the net.
        heads: of its attention; they divide ``width``.
        seed: of weights and minibatches.
        device: ``auto`` takes the GPU if there is one.
    """

    length: Annotated[int, Range(2, 1000)] = 16
    steps: Count = 3000
    batch_size: Count = 64
    lr: Positive = 1e-3
    width: Count = 128
    layers: Count = 3
    heads: Count = 4
    seed: Seed = 0
    device: Device = "auto"

    def __post_init__(self) -> None:
        if self.width % (2 * self.heads):
            raise UserError(
                f"heads is {self.heads} and width is {self.width}; width must be a multiple of twice "
                "the heads."
            )


def train_trajectories(
    data: Sequence[str],
    out: str,
    config: TrajectoryTrainConfig,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Trains a trajectory model and saves it.

    Args:
        data: LeRobot data sets of one env, without cameras, failures included.
        out: the model's folder.
        config: the settings.
        progress: is told how many steps are done.

    Returns:
        ``episodes`` and ``pieces`` that it learned from, ``held_out`` episodes, and the share of what
        varies in held-out pieces that is estimated from half noise: ``explained``.

    Raises:
        UserError: ``out`` exists, or data of which nothing can be learned.
    """
    check_config("trajectories", config)
    require_free(out)
    device = use_device(config.device, "--device")
    pieces = read_pieces(data, config.length)
    model, held_out = fit_trajectories(pieces, config, device, progress)
    model.save(out)
    return {
        "episodes": int(pieces.episode[~held_out].unique().numel()),
        "held_out": int(pieces.episode[held_out].unique().numel()),
        "pieces": int((~held_out).sum()),
        "explained": 1.0 - float(model.doubt_at(0.5).mean()),
    }


def fit_trajectories(
    pieces: Pieces,
    config: TrajectoryTrainConfig,
    device: torch.device | str = "cpu",
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[TrajectoryModel, Tensor]:
    """A trained model, and which of the pieces (M,) were held out."""
    generator = torch.Generator().manual_seed(config.seed)
    # Whole episodes are held out, spread evenly.
    every = min(HELD_OUT, int(pieces.episode.max()) + 1)
    held_out = pieces.episode % every == every - 1
    with keep_random_state():
        torch.manual_seed(config.seed)
        net = TrajectoryNet(
            pieces.spec.proprio_dim,
            pieces.rows.shape[1],
            config.length,
            len(pieces.sentences),
            config.width,
            config.layers,
            config.heads,
        )
    model = TrajectoryModel.of(pieces, net).to(device)
    # Minibatches of the others.
    learned = (~held_out).nonzero().flatten()
    optimizer = torch.optim.AdamW(net.parameters(), lr=config.lr, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.steps)
    net.train()
    for step in range(config.steps):
        rows = learned[torch.randint(len(learned), (config.batch_size,), generator=generator)]
        loss = denoising_loss(model, pieces, rows, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1)
    # What guidance has to know of the model.
    model.eval()
    model.doubt.copy_(measure_doubt(model, pieces, held_out.nonzero().flatten(), generator))
    return model, held_out


def denoising_loss(
    model: TrajectoryModel, pieces: Pieces, numbers: Tensor, generator: torch.Generator
) -> Tensor:
    """Error of the estimated data of noisy pieces, in units of the net's output.

    Args:
        model: which is trained.
        pieces: the data.
        numbers: (B,) of the pieces.
        generator: of times and noise.
    """
    t = random_uniform((len(numbers),), generator, model.device)
    error = _error(model, pieces, numbers, t, generator)
    # Of the estimate D = c_skip x + c_out F the error of F is that of D over c_out.
    scale = ((1.0 - t) ** 2 + t**2) / t.clamp_min(1e-3) ** 2
    return (scale[:, None, None] * error**2).mean()


@torch.no_grad()
def measure_doubt(
    model: TrajectoryModel, pieces: Pieces, numbers: Tensor, generator: torch.Generator
) -> Float[Tensor, "times a"]:
    """V_t of actions: the mean squared error of their estimate, at ``TIMES`` times from 0 to 1."""
    # Some of the pieces, at every time with noise of their own.
    numbers = numbers[torch.randperm(len(numbers), generator=generator)[:JUDGED]]
    found = []
    for t in torch.linspace(0, 1, TIMES, device=model.device):
        error = _error(model, pieces, numbers, t.expand(len(numbers)), generator)
        found.append((error[..., model.actions] ** 2).mean((0, 1)))
    return torch.stack(found)


def _error(
    model: TrajectoryModel, pieces: Pieces, numbers: Tensor, t: Tensor, generator: torch.Generator
) -> Float[Tensor, "b l d"]:
    """Estimated minus true pieces, at times (B,)."""
    rows = model.normalize(pieces.batch(numbers).to(model.device))
    noisy, _ = flow_matching_pair(rows, t, randn(rows.shape, generator, model.device))
    first = rows[:, 0, : pieces.spec.proprio_dim]
    told = pieces.sentence[numbers].to(model.device)
    return model.net(noisy, t, first, told) - rows
