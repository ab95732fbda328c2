"""``Calibration``: temperature, bias, threshold and hits, fitted on held-out episodes."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.functional.held_out import auroc
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.paths import require_readable
from embodyrl.world_models.reflectors import metrics

FILE = "calibration.json"
EPS = 1e-6
"""Probabilities are clipped this far from 0 and 1, so that their logits are finite."""


@dataclass(frozen=True)
class Calibration:
    """p -> sigmoid(logit(p) / temperature + bias), and the threshold for success.

    It is a success if the result reaches ``threshold`` in ``hits`` frames in a row. Temperature and
    bias are Platt scaling (1999); with bias 0 it is temperature scaling (arXiv:1706.04599).
    """

    temperature: float = 1.0
    bias: float = 0.0
    threshold: float = 0.5
    hits: int = 1

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UserError: temperature not positive, threshold outside (0, 1], hits less than 1, or not
                finite.
        """
        numbers = (self.temperature, self.bias, self.threshold)
        finite = all(isinstance(x, int | float) and math.isfinite(x) for x in numbers)
        if (
            not finite
            or not isinstance(self.hits, int)
            or self.temperature <= 0
            or not 0 < self.threshold <= 1
            or self.hits < 1
        ):
            raise UserError(
                f"{self} is not valid: temperature must be above 0, threshold in (0, 1] and "
                "hits at least 1."
            )

    def apply(self, prob: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Calibrated probabilities; NaN stays NaN."""
        return torch.sigmoid(torch.logit(prob.double(), EPS) / self.temperature + self.bias)

    def save(self, folder: str | Path) -> None:
        """Writes ``calibration.json`` into a reflector's folder."""
        write_json(Path(folder) / FILE, asdict(self), indent=2)

    @classmethod
    def load(cls, folder: str | Path) -> Calibration:
        """Reads a reflector's calibration; without a file it is the default one.

        Raises:
            UserError: the file is damaged.
        """
        file = Path(folder) / FILE
        if not file.exists():
            return cls()
        require_readable(file)
        try:
            values = json.loads(file.read_text())
            return cls(**{f.name: values[f.name] for f in fields(cls)})
        except (ArithmeticError, OSError, RecursionError, ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{file} is damaged ({error!r}). Calibrate the reflector again."
            ) from error


def fit_calibration(
    prob: np.ndarray,
    label: np.ndarray,
    episode: np.ndarray,
    *,
    max_false_positive_rate: float = 0.02,
    hits: int = 2,
) -> Calibration:
    """Fits a calibration on episodes that the reflector was not trained on.

    Temperature and bias maximise the likelihood of the frames' labels. The targets are Platt's
    smoothed ones, which keep the two finite even if the labels are separable. The threshold is the
    one with the highest F1 over frames, of those that end at most ``max_false_positive_rate`` of
    the failing episodes as a success.

    Args:
        prob: (F,) as ``judge`` returns it, episodes one after the other; NaN is left out.
        label: (F,) bool, whether the task is solved as of that frame.
        episode: (F,) number of each frame's episode.
        max_false_positive_rate: of episodes in which no frame is solved.
        hits: frames in a row.

    Raises:
        UserError: no failing or no solved episode, or the probabilities do not rise with success.
    """
    seen = np.isfinite(prob)
    prob = prob[seen]
    label = label[seen].astype(bool)
    episode = episode[seen]
    solved = metrics.any_per_episode(label, episode)
    require_both(solved)
    # Temperature and bias.
    slope, bias = platt(torch.logit(torch.from_numpy(prob).double(), EPS), label)
    temperature = 1 / slope
    calibrated = Calibration(temperature, bias).apply(torch.from_numpy(prob)).numpy()
    # The lowest threshold that failing episodes allow, just above the best score of the first one
    # that must not be ended.
    failing = metrics.ending_scores(calibrated, episode, hits)[~solved]
    allowed = math.floor(max_false_positive_rate * len(failing))
    floor = np.nextafter(np.sort(failing)[::-1][allowed], 2.0) if allowed < len(failing) else EPS
    if floor > calibrated.max():
        raise UserError(
            f"The reflector is as sure of {allowed + 1} failing episodes (of {len(failing)}) as of "
            f"any solved one, so no threshold ends at most {max_false_positive_rate:.1%} of them. "
            "Train it on more failures."
        )
    # Candidates from there on: a few hundred, spread over the thousands that there may be.
    candidates = np.unique(np.append(calibrated[calibrated > floor], floor))
    spread = np.linspace(0, len(candidates) - 1, 400).round().astype(int)
    candidates = candidates[np.unique(spread)]
    scores = [metrics.f1(calibrated >= threshold, label) for threshold in candidates]
    # The middle of the best ones: the two ends are closest to mistakes on the next data set.
    best = np.flatnonzero(np.asarray(scores) == max(scores))
    return Calibration(temperature, bias, float(candidates[best[len(best) // 2]]), hits)


def require_both(solved: np.ndarray) -> None:
    """Refuses episodes that cannot calibrate a reflector.

    Args:
        solved: (E,) bool, of each episode.

    Raises:
        UserError: all of them are solved, or none is.
    """
    if solved.all() or not solved.any():
        raise UserError(
            f"Of {len(solved)} episodes {int(solved.sum())} are solved; a calibration needs solved "
            "and failing ones. Collect more, with --noise and --keep-failures."
        )


def platt(score: Float[Tensor, " f"], label: np.ndarray) -> tuple[float, float]:
    """Slope and bias of a logistic regression of labels on scores, by Platt (1999).

    Its targets are smoothed: a little below 1 and above 0.

    Raises:
        UserError: the scores do not rise with the labels.
    """
    score = score.double()
    positive = torch.from_numpy(label)
    n_pos = int(positive.sum())
    n_neg = int((~positive).sum())
    target = torch.where(positive, (n_pos + 1) / (n_pos + 2), 1 / (n_neg + 2)).double()
    weights = torch.tensor([1.0, 0.0], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS(
        [weights], max_iter=200, line_search_fn="strong_wolfe", tolerance_grad=1e-10
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = torch.nn.functional.binary_cross_entropy_with_logits(
            score * weights[0] + weights[1], target
        )
        value.backward()
        return value

    optimiser.step(loss)  # pyright: ignore[reportArgumentType] - a Tensor is what LBFGS wants
    slope, bias = weights.tolist()
    area = auroc(score.numpy(), label)
    if area <= 0.5 or slope <= 0:
        raise UserError(
            "The reflector's scores do not rise with success on these episodes (AUROC "
            f"{area:.2f}), so they cannot be calibrated. Train it on more episodes, or ask another "
            "question."
        )
    return slope, bias
