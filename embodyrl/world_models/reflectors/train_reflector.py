"""Trains a ``TrainedReflector`` on labelled episodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from embodyrl.errors import UserError
from embodyrl.world_models.reflectors.labelled_episodes import LabelledEpisodes
from embodyrl.world_models.reflectors.trained import TrainedReflector

COLOURS = ("red", "green", "blue", "yellow")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of ``train_on_episodes``."""

    steps: int = 1000
    batch_size: int = 48
    lr: float = 2e-3
    weight_decay: float = 1e-3
    solved: float = 0.5
    """Share of windows whose newest frame is solved, however rare that is in the data; calibration mends the prior."""
    swapped: float = 0.5
    """Share of those that are asked about another object, and so count as failures."""
    swap_words: tuple[str, ...] = COLOURS
    """Words that name objects of which only one is solved at a time; empty for tasks where that does not hold."""
    augment: bool = True
    """Whether windows are shifted, lit otherwise and blurred, as imagined frames are."""
    seed: int = 0


def train_on_episodes(
    episodes: LabelledEpisodes,
    config: TrainConfig,
    model: TrainedReflector,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> TrainedReflector:
    """Binary cross-entropy on every frame of windows that end anywhere in an episode.

    A window that ends before the task is solved is a failure (temporal clipping), and so is a
    solved one whose instruction is swapped for one that cannot hold at the same time; see
    ``counterparts``.

    Args:
        episodes: to learn from.
        config: see there.
        model: is trained in place, on the device that it is on.
        progress: called with the step and the loss.

    Returns:
        The model.

    Raises:
        UserError: only solved or only unsolved frames.
    """
    solved = np.flatnonzero(episodes.label)
    unsolved = np.flatnonzero(~episodes.label)
    if not len(solved) or not len(unsolved):
        raise UserError(
            f"{len(solved)} of {len(episodes)} frames are solved; a reflector learns from both "
            "kinds. Collect with env.terminate_on_success=false, --noise and --keep-failures."
        )
    rng = np.random.default_rng(config.seed)
    generator = torch.Generator().manual_seed(config.seed)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=config.lr, weight_decay=config.weight_decay
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, config.lr, total_steps=config.steps, pct_start=0.1
    )
    swaps = [counterparts(sentence, config.swap_words) for sentence in episodes.sentences]
    model.train()
    for step in range(config.steps):
        from_solved = rng.random(config.batch_size) < config.solved
        frame = np.where(
            from_solved,
            rng.choice(solved, config.batch_size),
            rng.choice(unsolved, config.batch_size),
        )
        frames, sentences, target, weight = _batch(episodes, frame, swaps, config, rng, model)
        if config.augment:
            frames = {name: augment(pixels, generator) for name, pixels in frames.items()}
        logits = model(frames, sentences)
        target = target.to(logits)
        weight = weight.to(logits)
        loss = (
            F.binary_cross_entropy_with_logits(logits, target, reduction="none") * weight
        ).sum() / weight.sum()
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
        optimiser.step()
        schedule.step()
        if progress is not None:
            progress(step, loss.item())
    return model.eval()


def _batch(
    episodes: LabelledEpisodes,
    frame: np.ndarray,
    swaps: list[list[str]],
    config: TrainConfig,
    rng: np.random.Generator,
    model: TrainedReflector,
) -> tuple[dict[str, Tensor], list[str], Tensor, Tensor]:
    """Windows, their instructions, and target and weight (B, T-1) of each of their frames but the first."""
    target = episodes.windowed(episodes.label, frame, model.window)[:, 1:].float()
    weight = torch.ones_like(target)
    sentences = [episodes.sentences[i] for i in episodes.sentence[frame]]
    for k, others in enumerate(swaps[i] for i in episodes.sentence[frame]):
        if episodes.label[frame[k]] and others and rng.random() < config.swapped:
            sentences[k] = others[rng.integers(len(others))]
            # Of the frames before, nobody knows whether the other task was solved in them.
            weight[k] = target[k].clone()
            target[k] = 0.0
    return (
        {name: episodes.window(name, frame, model.window) for name in model.cameras},
        sentences,
        target,
        weight,
    )


def counterparts(sentence: str, words: tuple[str, ...]) -> list[str]:
    """The sentence with its first word of ``words`` replaced by each one that it does not contain.

    ``"pick up the red block"`` becomes ``"pick up the blue block"`` and so on: of these only one
    can hold at a time.
    """
    given = sentence.split()
    place = next((i for i, word in enumerate(given) if word in words), None)
    if place is None:
        return []
    return [
        " ".join([*given[:place], word, *given[place + 1 :]]) for word in words if word not in given
    ]


def augment(
    frames: Tensor, generator: torch.Generator, shift: int = 2
) -> Float[Tensor, "b t h w 3"]:
    """Windows shifted by up to ``shift`` pixels, a little brighter or darker, and every third one blurred.

    Args:
        frames: (B, T, h, w, 3); all frames of a window are changed alike.
        generator: of the CPU.
        shift: pixels.
    """
    b, t, h, w, _ = frames.shape
    x = frames.float().flatten(0, 1).permute(0, 3, 1, 2)
    padded = F.pad(x, (shift,) * 4, mode="replicate").unflatten(0, (b, t))
    up, left = torch.randint(2 * shift + 1, (2, b), generator=generator).tolist()
    x = torch.stack([padded[k, ..., up[k] : up[k] + h, left[k] : left[k] + w] for k in range(b)])
    blurred = F.avg_pool2d(x.flatten(0, 1), 3, 1, 1, count_include_pad=False).unflatten(0, (b, t))
    pick = torch.rand(b, generator=generator).to(x.device) < 1 / 3
    light = 0.85 + 0.3 * torch.rand(b, generator=generator).to(x.device)
    x = torch.where(pick[:, None, None, None, None], blurred, x) * light[:, None, None, None, None]
    return x.clamp(0, 255).permute(0, 1, 3, 4, 2)
