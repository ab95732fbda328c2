"""What a vision-language model is asked, and how its answer becomes a probability."""

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
    """``"yes"`` or ``"no"`` where the token is that word, with whatever space, case and stop; else None."""
    word = token.strip(" \t\r\n\"'*.,:!Ġ▁").lower()
    return word if word in ("yes", "no") else None


def probability(tokens: Iterable[tuple[str, float]], min_mass: float) -> float:
    """P(yes) among yes and no, from the log-probabilities of the answer's first token.

    Args:
        tokens: (token, log-probability) of the likeliest tokens.
        min_mass: least probability of yes and no together; below it the model was not answering the
            question.

    Returns:
        In [0, 1], or NaN.
    """
    mass = {"yes": 0.0, "no": 0.0}
    for token, logprob in tokens:
        if (word := answer_of(token)) is not None:
            mass[word] += math.exp(logprob)
    total = mass["yes"] + mass["no"]
    # A thousandth is for rounding; more than that are no probabilities.
    return mass["yes"] / total if max(min_mass, 1e-12) <= total <= 1.001 else math.nan


def enlarged(picture: np.ndarray, shorter_side: int) -> Image.Image:
    """A picture (h, w, 3) uint8, enlarged where its shorter side has fewer pixels: small ones are made for no VLM."""
    image = Image.fromarray(picture)
    if (scale := shorter_side / min(image.size)) > 1:
        image = image.resize(
            (round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC
        )
    return image
