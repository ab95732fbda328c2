"""``Calibration``: temperature, bias, threshold and hits in a row, fitted on held-out episodes."""

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
from embodyrl.world_models.reflectors import metrics

FILE = "calibration.json"
EPS = 1e-6
"""Probabilities are kept this far from 0 and 1, so that a reflector that is quite sure has a logit."""


@dataclass(frozen=True)
class Calibration:
    """p -> sigmoid(logit(p) / temperature + bias); at ``threshold`` or more ``hits`` times in a row it is a success.

    The two parameters are Platt's (1999); with bias 0 it is temperature scaling (arXiv:1706.04599).
    """

    temperature: float = 1.0
    bias: float = 0.0
    threshold: float = 0.5
    hits: int = 1

    def __post_init__(self) -> None:
        """Refuses values that mean nothing.

        Raises:
            UserError: temperature not positive, threshold outside (0, 1], hits less than 1, or not
                finite.
        """
        numbers = (self.temperature, self.bias, self.threshold)
        sound = all(
            isinstance(x, int | float) and math.isfinite(x) for x in numbers
        ) and isinstance(self.hits, int)
        if not sound or self.temperature <= 0 or not 0 < self.threshold <= 1 or self.hits < 1:
            raise UserError(
                f"{self} is no calibration: temperature must be above 0, threshold in (0, 1] and "
                "hits at least 1."
            )

    def apply(self, prob: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
        """Calibrated probabilities; NaN stays NaN."""
        return torch.sigmoid(torch.logit(prob.double(), EPS) / self.temperature + self.bias)

    def save(self, folder: str | Path) -> None:
        """Writes ``calibration.json`` into a reflector's folder."""
        (Path(folder) / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: str | Path) -> Calibration:
        """Reads a reflector's calibration; one that was never calibrated has none to change its answers.

        Raises:
            UserError: the file is damaged.
        """
        file = Path(folder) / FILE
        if not file.exists():
            return cls()
        try:
            values = json.loads(file.read_text())
            return cls(**{f.name: values[f.name] for f in fields(cls)})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(
                f"{file} is damaged ({error!r}); calibrate the reflector again."
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

    Temperature and bias maximise the likelihood of the frames' labels, with Platt's smoothed
    targets, which keep them finite where the labels are separable. Of the thresholds that end at
    most ``max_false_positive_rate`` of the failing episodes as a success, the one with the highest
    F1 over frames is taken.

    Args:
        prob: (F,) as ``judge`` gave them, episodes one after the other; NaN is left out.
        label: (F,) bool, whether the task is solved as of that frame.
        episode: (F,) number of each frame's episode.
        max_false_positive_rate: of episodes in which no frame is solved.
        hits: frames in a row.

    Raises:
        UserError: no failing or no solved episode, or the probabilities fall where they should
            rise.
    """
    seen = np.isfinite(prob)
    prob = prob[seen]
    label = label[seen].astype(bool)
    episode = episode[seen]
    solved = metrics.any_per_episode(label, episode)
    if solved.all() or not solved.any():
        raise UserError(
            f"Of {len(solved)} episodes {int(solved.sum())} are solved; calibrating takes both "
            "kinds. Collect with --noise and --keep-failures."
        )
    slope, bias = platt(torch.logit(torch.from_numpy(prob).double(), EPS), label)
    temperature = 1 / slope
    calibrated = Calibration(temperature, bias).apply(torch.from_numpy(prob)).numpy()
    failing = metrics.ending_scores(calibrated, episode, hits)[~solved]
    allowed = math.floor(max_false_positive_rate * len(failing))
    # Just above the best score of the first failing episode that may not be ended.
    floor = np.nextafter(np.sort(failing)[::-1][allowed], 2.0) if allowed < len(failing) else EPS
    if floor > calibrated.max():
        raise UserError(
            f"The reflector is as sure of {allowed + 1} failing episodes (of {len(failing)}) as of "
            f"any solved one, so no threshold ends at most {max_false_positive_rate:.1%} of them. "
            "Train it on more failures."
        )
    candidates = np.unique(np.append(calibrated[calibrated > floor], floor))
    # Thousands of frames give thousands of candidates; a few hundred spread over them do.
    candidates = candidates[np.unique(np.linspace(0, len(candidates) - 1, 400).round().astype(int))]
    scores = [metrics.f1(calibrated >= threshold, label) for threshold in candidates]
    # In the middle of the best ones: the two ends are where the next data set goes wrong.
    best = np.flatnonzero(np.asarray(scores) == max(scores))
    return Calibration(temperature, bias, float(candidates[best[len(best) // 2]]), hits)


def platt(score: Float[Tensor, " f"], label: np.ndarray) -> tuple[float, float]:
    """Slope and bias of the logistic regression of labels on scores, with Platt's smoothed targets (1999).

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
    area = metrics.auroc(score.numpy(), label)
    if area <= 0.5 or slope <= 0:
        raise UserError(
            "The reflector's scores do not rise with success on these episodes (AUROC "
            f"{area:.2f}): they carry nothing to calibrate. Train it on more episodes, or ask "
            "another question."
        )
    return slope, bias
