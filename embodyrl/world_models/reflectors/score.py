"""Judges the frames of whole episodes as an env would, and scores the judgements."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from embodyrl.errors import UserError
from embodyrl.functional.held_out import auroc
from embodyrl.functional.intervals import wilson
from embodyrl.world_models.reflectors import metrics
from embodyrl.world_models.reflectors.base import Reflector
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.reflectors.labelled_episodes import LabelledEpisodes

RESAMPLES = 200


def judge_episodes(
    reflector: Reflector,
    episodes: LabelledEpisodes,
    *,
    chunk: int = 0,
    batch_size: int = 64,
    progress: Callable[[int], None] | None = None,
) -> np.ndarray:
    """The probability for every frame, as in an env whose chunks have ``chunk`` frames.

    Args:
        reflector: the judge.
        episodes: F frames.
        chunk: new frames in a window; 0 means as many as fit.
        batch_size: windows per call.
        progress: called with the number of frames just judged.

    Returns:
        (F,) float64, not calibrated; NaN where it could not judge.

    Raises:
        UserError: the chunk does not fit into the window, or a camera is missing.
    """
    chunk = chunk or reflector.window - 1
    if not 0 < chunk < reflector.window:
        raise UserError(
            f"Chunks of {chunk} frames do not fit into a window of {reflector.window} beside the "
            "first frame."
        )
    prob = np.full(len(episodes), np.nan)
    for new, newest in _newest_frames(episodes, chunk).items():
        for batch in np.split(newest, range(batch_size, len(newest), batch_size)):
            frames = {
                name: episodes.window(name, batch, reflector.window) for name in reflector.cameras
            }
            sentences = [episodes.sentences[i] for i in episodes.sentence[batch]]
            judged = reflector.judge(frames, sentences, new)[:, -new:]
            prob[batch[:, None] + np.arange(1 - new, 1)] = judged.double().numpy()
            if progress is not None:
                progress(new * len(batch))
    return prob


def _newest_frames(episodes: LabelledEpisodes, chunk: int) -> dict[int, np.ndarray]:
    """Number of new frames in a window -> the newest frames of the windows with that number."""
    starts = episodes.first_frames
    newest = defaultdict(list)
    for start, end in zip(starts, [*starts[1:], len(episodes)], strict=True):
        newest[chunk] += range(start + chunk - 1, end, chunk)
        if rest := (end - start) % chunk:
            newest[rest].append(end - 1)
    return {new: np.array(frames, dtype=np.int64) for new, frames in newest.items()}


def score_probabilities(
    prob: np.ndarray, episodes: LabelledEpisodes, calibration: Calibration, seed: int = 0
) -> dict[str, Any]:
    """How well probabilities separate solved from unsolved.

    F1, AUROC and calibration error are over frames. Their 95% intervals resample episodes, because
    the frames of an episode are alike. Rates of ended episodes have Wilson intervals.

    Args:
        prob: (F,) as ``judge_episodes`` returns it.
        episodes: with the labels.
        calibration: its threshold and hits define a success.
        seed: of the resampling.

    Returns:
        Plain data:

        - ``episodes``, ``solved``, ``frames`` and ``unjudged``: counts.
        - ``f1``, ``auroc`` and ``ece``: each with ``value``, ``low`` and ``high``.
        - ``order``: the mean over solved episodes of ``metrics.order_correlation`` until they are
          solved, or None.
        - ``false_terminations`` (failing episodes ended as a success), ``missed`` (solved episodes
          never ended) and ``premature`` (solved episodes ended before their first solved frame):
          each with ``rate``, ``k``, ``n``, ``low`` and ``high``.
        - ``calibration``: as given.
    """
    # When each episode would be ended, and when it is first solved.
    calibrated = calibration.apply(torch.from_numpy(prob)).numpy()
    ended = (
        metrics.windowed_minimum(calibrated, episodes.episode, calibration.hits)
        >= calibration.threshold
    )
    solved = episodes.solved
    end = _first(ended, episodes)
    first_solved = _first(episodes.label, episodes)
    never = end == len(episodes)
    # The frames that were judged, and resamples of whole episodes.
    seen = np.isfinite(calibrated)
    value = calibrated[seen]
    label = episodes.label[seen]
    own = [np.flatnonzero(episodes.episode[seen] == number) for number in episodes.numbers]
    rng = np.random.default_rng(seed)
    picks = [
        np.concatenate([own[i] for i in rng.integers(len(own), size=len(own))])
        for _ in range(RESAMPLES)
    ]

    # Does the probability rise on the way to success?
    ways = [
        calibrated[start : stop + 1]
        for start, stop in zip(episodes.first_frames[solved], first_solved[solved], strict=True)
    ]
    rises = [metrics.order_correlation(way[np.isfinite(way)]) for way in ways]
    rises = [rise for rise in rises if np.isfinite(rise)]

    def frames(metric: Callable[[np.ndarray, np.ndarray], float]) -> dict[str, float | None]:
        resampled = np.array([metric(value[pick], label[pick]) for pick in picks])
        low, high = (
            np.nanquantile(resampled, [0.025, 0.975])
            if np.isfinite(resampled).any()
            else (np.nan, np.nan)
        )
        numbers = {"value": metric(value, label), "low": float(low), "high": float(high)}
        return {name: x if np.isfinite(x) else None for name, x in numbers.items()}

    return {
        "episodes": len(solved),
        "solved": int(solved.sum()),
        "frames": len(episodes),
        "unjudged": int((~seen).sum()),
        "f1": frames(lambda p, y: metrics.f1(p >= calibration.threshold, y)),
        "auroc": frames(auroc),
        "ece": frames(metrics.ece),
        "order": float(np.mean(rises)) if rises else None,
        "false_terminations": _share(~never[~solved]),
        "missed": _share(never[solved]),
        "premature": _share((end < first_solved)[solved]),
        "calibration": asdict(calibration),
    }


def _first(flag: np.ndarray, episodes: LabelledEpisodes) -> np.ndarray:
    """(E,) the first frame of each episode with the flag; the number of all frames if none has."""
    numbers = np.where(flag, np.arange(len(flag)), len(flag))
    return np.minimum.reduceat(numbers, episodes.first_frames)


def _share(flag: np.ndarray) -> dict[str, float | int | None]:
    k = int(flag.sum())
    n = len(flag)
    low, high = wilson(k, n)
    return {"rate": k / n if n else None, "k": k, "n": n, "low": low, "high": high}
