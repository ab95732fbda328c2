"""F1, calibration error, and what ends an episode; functions of numpy arrays."""

from __future__ import annotations

import numpy as np


def f1(predicted: np.ndarray, label: np.ndarray) -> float:
    """F1 = 2 TP / (2 TP + FP + FN); NaN without any positive label or prediction."""
    predicted = predicted.astype(bool)
    label = label.astype(bool)
    hit = np.sum(predicted & label)
    wrong = np.sum(predicted ^ label)
    return float(2 * hit / (2 * hit + wrong)) if hit + wrong else float("nan")


def ece(prob: np.ndarray, label: np.ndarray, bins: int = 15) -> float:
    """Expected calibration error.

    It is the mean of |mean probability - share of positives| over equal bins, weighted by the
    number of frames in each bin.
    """
    if not len(prob):
        return float("nan")
    number = np.minimum((prob * bins).astype(int), bins - 1)
    gap = np.bincount(number, weights=prob - label.astype(float), minlength=bins)
    return float(np.abs(gap).sum() / len(prob))


def order_correlation(score: np.ndarray) -> float:
    """Spearman's correlation of scores with their order in time; NaN where they do not differ.

    Of the frames until a task is solved it says whether a judge sees the task coming closer (value
    order correlation, arXiv:2411.04549).
    """
    if len(score) < 2 or (score == score[0]).all():
        return float("nan")
    _, place, count = np.unique(score, return_inverse=True, return_counts=True)
    rank = (np.cumsum(count) - (count - 1) / 2)[place]
    return float(np.corrcoef(rank, np.arange(len(score)))[0, 1])


def any_per_episode(flag: np.ndarray, episode: np.ndarray) -> np.ndarray:
    """(E,) bool, whether any frame of an episode has the flag, in order of episode numbers."""
    _, number = np.unique(episode, return_inverse=True)
    return np.bincount(number, weights=flag.astype(float)) > 0


def windowed_minimum(prob: np.ndarray, episode: np.ndarray, hits: int) -> np.ndarray:
    """(F,) the smallest of the last ``hits`` values of the episode.

    It reaches a threshold where ``hits`` values in a row have reached it. It is -1 where the
    episode has fewer values so far, or one of them is NaN.
    """
    value = np.where(np.isnan(prob), -1.0, prob)
    out = value.copy()
    for back in range(1, hits):
        earlier = np.full_like(value, -1.0)
        same = episode[back:] == episode[:-back]
        earlier[back:] = np.where(same, value[:-back], -1.0)
        out = np.minimum(out, earlier)
    return out


def ending_scores(prob: np.ndarray, episode: np.ndarray, hits: int) -> np.ndarray:
    """(E,) the highest threshold that would end each episode as a success; -1 if none would."""
    _, number = np.unique(episode, return_inverse=True)
    best = np.full(number.max(initial=-1) + 1, -1.0)
    np.maximum.at(best, number, windowed_minimum(prob, episode, hits))
    return best
