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
    """Share of windows whose newest frame is solved. In the data it may be rarer; the calibration
    corrects the prior."""
    swapped: float = 0.5
    """Share of those windows that get an instruction about another object, and so are failures."""
    swap_words: tuple[str, ...] = COLOURS
    """Words that name objects of which only one can be solved at a time; empty if several can."""
    discount: float = 0.0
    """g: a frame that is k frames from being solved has the target g**k, so that the probability
    says how far the task is (``LabelledEpisodes.progress``); 0 learns "solved" alone."""
    augment: bool = True
    """Whether windows are shifted, relit and blurred, as imagined frames may be."""
    seed: int = 0


def train_on_episodes(
    episodes: LabelledEpisodes,
    config: TrainConfig,
    model: TrainedReflector,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> TrainedReflector:
    """Trains with binary cross-entropy on every frame of windows from anywhere in an episode.

    A window that ends before the task is solved is a failure (temporal clipping). So is a solved
    one whose instruction is replaced by one that cannot hold at the same time (``counterparts``).

    Args:
        episodes: to learn from.
        config: the settings.
        model: trained in place, on its device.
        progress: called with the step and the loss.

    Returns:
        The model.

    Raises:
        UserError: only solved or only unsolved frames.
    """
    if not 0 <= config.discount < 1:
        raise UserError(f"The discount is {config.discount}; it must be at least 0 and below 1.")
    targets = episodes.progress(config.discount)
    solved = np.flatnonzero(episodes.label)
    unsolved = np.flatnonzero(~episodes.label)
    if not len(solved) or not len(unsolved):
        raise UserError(
            f"{len(solved)} of {len(episodes)} frames are solved; a reflector learns from both "
            "kinds. Collect with --past-success 5, --noise and --keep-failures."
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
        # Windows whose newest frame is solved or not.
        from_solved = rng.random(config.batch_size) < config.solved
        frame = np.where(
            from_solved,
            rng.choice(solved, config.batch_size),
            rng.choice(unsolved, config.batch_size),
        )
        frames, sentences, target, weight = _batch(
            episodes, targets, frame, swaps, config, rng, model
        )
        if config.augment:
            frames = {name: augment(pixels, generator) for name, pixels in frames.items()}
        # Weighted binary cross-entropy.
        logits = model(frames, sentences)
        target = target.to(logits)
        weight = weight.to(logits)
        by_frame = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        loss = (by_frame * weight).sum() / weight.sum()
        # Backpropagation and the optimiser's step.
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
    targets: np.ndarray,
    frame: np.ndarray,
    swaps: list[list[str]],
    config: TrainConfig,
    rng: np.random.Generator,
    model: TrainedReflector,
) -> tuple[dict[str, Tensor], list[str], Tensor, Tensor]:
    """A minibatch of windows.

    Returns:
        Frames by camera, instructions, and (B, T-1) target and weight of each frame but the first.
    """
    target = episodes.windowed(targets, frame, model.window)[:, 1:].clone()
    solved = episodes.windowed(episodes.label, frame, model.window)[:, 1:].float()
    weight = torch.ones_like(target)
    sentences = [episodes.sentences[i] for i in episodes.sentence[frame]]
    for k, others in enumerate(swaps[i] for i in episodes.sentence[frame]):
        if episodes.label[frame[k]] and others and rng.random() < config.swapped:
            sentences[k] = others[rng.integers(len(others))]
            # Solved frames become failures. For the others it is unknown whether the new task was
            # solved in them, so they do not count.
            weight[k] = solved[k]
            target[k] = 0.0
    return (
        {name: episodes.window(name, frame, model.window) for name in model.cameras},
        sentences,
        target,
        weight,
    )


def counterparts(sentence: str, words: tuple[str, ...]) -> list[str]:
    """Variants of a sentence: its first word from ``words`` replaced by each of the others.

    ``"pick up the red block"`` gives ``"pick up the blue block"`` and so on. Only one of them can
    hold at a time.
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
    """Shifts windows by up to ``shift`` pixels, changes their brightness, and blurs one in three.

    Args:
        frames: (B, T, h, w, 3); all frames of a window are changed in the same way.
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
