"""The question to a vision-language model, and the probability from its answer."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from PIL import Image

from embodyrl.errors import UserError

QUESTION = (
    "The first half of these images shows the scene at the start, the other half shows it now. "
    'A robot was told: "{instruction}". Is this done, as it looks now? Answer with yes or no.'
)
"""One image per camera at the start, then one per camera now."""


def check_question(question: str) -> None:
    """Refuses a question that does not say what the task is.

    Raises:
        UserError: ``{instruction}`` does not occur in it.
    """
    if "{instruction}" not in question:
        raise UserError(
            f"The reflector's question {question!r} must contain {{instruction}}, where the task "
            "goes."
        )


def answer_of(token: str) -> str | None:
    """``"yes"`` or ``"no"`` if the token is that word, in any case, with any punctuation."""
    word = token.strip(" \t\r\n\"'*.,:!Ġ▁").lower()
    return word if word in ("yes", "no") else None


def probability(tokens: Iterable[tuple[str, float]], min_mass: float) -> float:
    """P(yes) / (P(yes) + P(no)), from the log-probabilities of the answer's first token.

    Args:
        tokens: (token, log-probability) of the likeliest tokens.
        min_mass: least probability of yes and no together; below it the model did not answer the
            question.

    Returns:
        In [0, 1], or NaN.
    """
    mass = {"yes": 0.0, "no": 0.0}
    for token, logprob in tokens:
        if (word := answer_of(token)) is not None:
            mass[word] += math.exp(logprob)
    total = mass["yes"] + mass["no"]
    # A thousandth more than 1 may be rounding; more than that cannot be probabilities.
    return mass["yes"] / total if max(min_mass, 1e-12) <= total <= 1.001 else math.nan


def enlarged(picture: np.ndarray, shorter_side: int) -> Image.Image:
    """A picture (h, w, 3) uint8, enlarged if its shorter side is smaller: VLMs need this."""
    image = Image.fromarray(picture)
    scale = shorter_side / min(image.size)
    if scale > 1:
        size = (round(image.width * scale), round(image.height * scale))
        image = image.resize(size, Image.Resampling.BICUBIC)
    return image
