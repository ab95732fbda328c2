"""Inverse dynamics: which action was taken, told from what was seen before and after it.

A small net that is trained on a few episodes with actions names those of episodes without (semi-supervised
offline RL with action-free trajectories, arXiv:2210.06518). It sees the moment before an action, its own,
and two after it, because an arm follows its commands with a delay. It says a mean and a standard
deviation of each number, so what it is not sure of can be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.devices import keep_random_state

OFFSETS = (-1, 0, 1, 2)
"""Frames that are seen, counted from that of the action; at an episode's ends the last one again."""
NOW = OFFSETS.index(0)
SIDE = 64
"""Pixels to which pictures are scaled."""
LOG_STD = (-5.0, 2.0)
"""Least and largest log of a standard deviation, in units of the data's own."""
BATCH = 64
SHIFT = 4
"""Pixels by which pictures are shifted at random in training, so that few episodes teach more."""
DROPOUT = 0.1
"""Share of what is told from pictures that is left out in training."""


@dataclass
class Footage:
    """What is seen of F frames of one data set.

    Attributes:
        pictures: camera -> (F, SIDE, SIDE, 3) uint8; cameras in the same order everywhere.
        states: (F, P) float32; P = 0 where there are none.
        episode: (F,) of each frame, ascending.
    """

    pictures: dict[str, np.ndarray]
    states: Tensor
    episode: Tensor

    def __post_init__(self) -> None:
        edges = torch.searchsorted(self.episode, self.episode)
        self.first = edges
        self.last = torch.searchsorted(self.episode, self.episode, right=True) - 1

    def seen(
        self, rows: Int[Tensor, " b"], generator: torch.Generator | None = None
    ) -> tuple[list[Tensor], Tensor]:
        """Pictures (B, 3 * 4, SIDE, SIDE) of each camera in [-1, 1], and states (B, 4 * P).

        Each is the moment of the action, and how the others differ from it. With a generator the
        pictures are shifted at random, all alike.
        """
        # The frames of each moment, within its episode.
        places = torch.stack([rows + k for k in OFFSETS], dim=1)
        places = places.maximum(self.first[rows, None]).minimum(self.last[rows, None])
        pictures = []
        for frames in self.pictures.values():
            x = torch.from_numpy(frames[places.numpy()])  # (B, 4, SIDE, SIDE, 3)
            x = x if generator is None else _shifted(x, generator)
            x = x.permute(0, 1, 4, 2, 3).float() / 127.5 - 1.0
            pictures.append(_changes(x).flatten(1, 2))
        return pictures, _changes(self.states[places]).flatten(1)


def _shifted(frames: Tensor, generator: torch.Generator) -> Tensor:
    """Frames (B, 4, SIDE, SIDE, 3) of a batch, shifted alike; the border is repeated."""
    # Source rows and columns; clamping repeats the border.
    ways = torch.randint(-SHIFT, SHIFT + 1, (2, 1), generator=generator)
    down, right = (torch.arange(SIDE) + ways).clamp(0, SIDE - 1)
    return frames.index_select(2, down).index_select(3, right)


def _changes(x: Float[Tensor, "b 4 ..."]) -> Float[Tensor, "b 4 ..."]:
    """The moment of the action, and how much the others differ from it."""
    now = x[:, NOW : NOW + 1]
    return torch.cat([now, *(x[:, k : k + 1] - now for k in range(len(OFFSETS)) if k != NOW)], 1)


class ActionNamer(nn.Module):
    """The net; its outputs are in units of the targets that it was fitted to.

    Args:
        cameras: how many.
        state_dim: P.
        target_dim: numbers that it names.
        width: of the hidden layers.
    """

    state_mean: Tensor
    state_std: Tensor
    target_mean: Tensor
    target_std: Tensor

    def __init__(self, cameras: int, state_dim: int, target_dim: int, width: int = 256) -> None:
        super().__init__()
        self.eyes = nn.ModuleList(_eye() for _ in range(cameras))
        seen = cameras * 64 * (SIDE // 16) ** 2 + len(OFFSETS) * state_dim
        self.head = nn.Sequential(
            nn.Linear(seen, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 2 * target_dim),
        )
        for name, size in (("state", len(OFFSETS) * state_dim), ("target", target_dim)):
            self.register_buffer(f"{name}_mean", torch.zeros(size))
            self.register_buffer(f"{name}_std", torch.ones(size))

    def fit_units(self, states: Float[Tensor, "f s"], targets: Float[Tensor, "f t"]) -> None:
        """Normalises by the data; what never changes keeps its units."""
        for name, data in (("state", states), ("target", targets)):
            if not data.numel():
                continue
            std = data.std(0, correction=0)
            getattr(self, f"{name}_mean").copy_(data.mean(0))
            getattr(self, f"{name}_std").copy_(torch.where(std > 1e-4, std, torch.ones_like(std)))

    def forward(
        self, pictures: list[Tensor], states: Tensor
    ) -> tuple[Float[Tensor, "b t"], Float[Tensor, "b t"]]:
        """Mean and log standard deviation, normalised."""
        parts = [eye(x) for eye, x in zip(self.eyes, pictures, strict=True)]
        parts.append((states - self.state_mean) / self.state_std)
        mean, log_std = self.head(torch.cat(parts, dim=1)).chunk(2, dim=1)
        return mean, log_std.clamp(*LOG_STD)

    @torch.no_grad()
    def name(self, film: Footage, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation (R, T) in the targets' units."""
        found = []
        for part in rows.split(4 * BATCH):
            mean, log_std = self(*film.seen(part))
            found.append((mean * self.target_std + self.target_mean, log_std.exp()))
        means, stds = zip(*found, strict=True)
        return torch.cat(means), torch.cat(stds) * self.target_std


def _eye() -> nn.Module:
    """Patches of four pixels, then two convolutions: (B, 12, 64, 64) to (B, 64 * 16)."""
    return nn.Sequential(
        nn.Conv2d(3 * len(OFFSETS), 32, 4, stride=4),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(DROPOUT),
    )


def fit_namer(
    film: Footage,
    targets: Float[Tensor, "f t"],
    rows: Int[Tensor, " r"],
    *,
    steps: int,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> ActionNamer:
    """Trains a net on frames ``rows``, by the likelihood of the targets.

    Args:
        film: what is seen.
        targets: of every frame.
        rows: frames to learn from.
        steps: gradient steps.
        seed: of weights and batches.
        say: is told how far it is, ten times.
    """
    with keep_random_state():
        torch.manual_seed(seed)
        net = ActionNamer(len(film.pictures), film.states.shape[1], targets.shape[1])
    net.fit_units(film.seen(rows)[1], targets[rows])
    # Normalised targets, and an optimiser whose rate falls to 0.
    wanted = (targets - net.target_mean) / net.target_std
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        # A batch of moments.
        drawn = rows[torch.randint(len(rows), (BATCH,), generator=generator)]
        mean, log_std = net(*film.seen(drawn, generator))
        # Gaussian, up to a constant.
        loss = (0.5 * ((wanted[drawn] - mean) / log_std.exp()).square() + log_std).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, steps // 10) == 0:
            say(f"inverse dynamics {step + 1}/{steps}, loss {loss.item():.2f}")
    return net.eval()


def explained(named: Float[Tensor, "r t"], true: Float[Tensor, "r t"]) -> list[float]:
    """R^2 of each number: 1 names it exactly, 0 is no better than its mean.

    A number that never changes is 1 where it is named as it is.
    """
    # The share of the variance that is left.
    error = (named - true).square().mean(0)
    variance = true.var(0, correction=0)
    constant = variance < 1e-8
    share = torch.where(constant, error, error / variance.clamp_min(1e-8))
    return (1 - share).tolist()
