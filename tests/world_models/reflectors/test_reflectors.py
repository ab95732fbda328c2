"""Windows, streaks, calibration and metrics against what can be worked out by hand."""

import math

import numpy as np
import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.functional.held_out import auroc
from embodyrl.world_models.reflectors import calibration, metrics
from embodyrl.world_models.reflectors.base import successes, window_rows
from embodyrl.world_models.reflectors.calibration import Calibration


def test_a_window_is_the_first_frame_then_the_last_ones():
    rows = window_rows(torch.tensor([10, 11, 12, 19]), torch.tensor([10, 10, 10, 10]), 4)
    assert rows.tolist() == [[10, 10, 10, 10], [10, 10, 10, 11], [10, 10, 11, 12], [10, 17, 18, 19]]


def test_hits_in_a_row_are_counted_over_calls():
    prob = torch.tensor([[0.9, 0.9, 0.1, 0.9], [0.1, 0.9, math.nan, 0.9], [0.1, 0.1, 0.1, 0.1]])
    calibrated = Calibration(threshold=0.5, hits=2)
    success, streak = successes(prob, calibrated, torch.tensor([0, 0, 5]))
    assert success.tolist() == [[False, True, False, False], [False] * 4, [False] * 4]
    assert streak.tolist() == [1, 1, 0]
    success, streak = successes(prob[:, :1], calibrated, streak)
    assert success.tolist() == [[True], [False], [False]] and streak.tolist() == [2, 0, 0]
    whole, _ = successes(prob, calibrated, torch.zeros(3, dtype=torch.long))
    parts, streak = [], torch.zeros(3, dtype=torch.long)
    for piece in prob.split([1, 2, 1], dim=1):
        out, streak = successes(piece, calibrated, streak)
        parts.append(out)
    assert torch.equal(torch.cat(parts, 1), whole)


def test_calibration_is_platts_formula_and_keeps_nan(tmp_path):
    made = Calibration(temperature=2.0, bias=-1.0, threshold=0.7, hits=3)
    prob = torch.tensor([0.0, 0.2, 0.5, 1.0, math.nan])
    out = made.apply(prob)
    assert out[2] == pytest.approx(1 / (1 + math.exp(1.0)))
    assert out[1] == pytest.approx(1 / (1 + math.exp(1.0 - math.log(0.25) / 2)))
    assert 0 < out[0] < out[1] < out[3] < 1 and out[4].isnan()
    assert torch.allclose(Calibration().apply(prob[1:3]), prob[1:3].double(), atol=1e-7)
    made.save(tmp_path)
    assert Calibration.load(tmp_path) == made
    (tmp_path / "calibration.json").write_text('{"temperature": 1}')
    with pytest.raises(UserError, match="damaged"):
        Calibration.load(tmp_path)
    (tmp_path / "calibration.json").unlink()
    assert Calibration.load(tmp_path) == Calibration()


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0.0},
        {"bias": math.nan},
        {"threshold": 0.0},
        {"threshold": 1.5},
        {"hits": 0},
        {"hits": 1.5},
    ],
)
def test_calibration_that_means_nothing_is_refused(values):
    with pytest.raises(UserError, match="is not valid"):
        Calibration(**values)


def test_metrics_in_closed_form():
    label = np.array([1, 1, 1, 0, 0, 0, 0, 0], dtype=bool)
    predicted = np.array([1, 1, 0, 1, 0, 0, 0, 0], dtype=bool)
    assert metrics.f1(predicted, label) == pytest.approx(2 * 2 / (2 * 2 + 1 + 1))
    assert math.isnan(metrics.f1(np.zeros(3), np.zeros(3)))
    # Pairs: (.9, .5, .5) above (.5, .1): 1 + 1, .5 + 1, .5 + 1 of 6.
    assert auroc(np.array([0.9, 0.5, 0.5, 0.5, 0.1]), np.array([1, 1, 1, 0, 0])) == pytest.approx(
        5 / 6
    )
    assert auroc(np.array([0.1, 0.9]), np.array([1, 0])) == 0.0
    assert math.isnan(auroc(np.array([0.1]), np.array([1])))
    # One bin: mean .5, three quarters positive. Two bins of two: gaps of .1 and .4.
    assert metrics.ece(np.array([0.5] * 4), np.array([1, 1, 1, 0]), bins=10) == pytest.approx(0.25)
    prob = np.array([0.1, 0.1, 0.9, 0.9])
    assert metrics.ece(prob, np.array([0, 0, 0, 1]), bins=2) == pytest.approx(0.5 * 0.1 + 0.5 * 0.4)
    assert metrics.ece(np.array([1.0, 0.0]), np.array([1, 0])) == 0.0


def test_auroc_is_the_share_of_ordered_pairs():
    rng = np.random.default_rng(0)
    score, label = rng.integers(0, 20, 300) / 20, rng.random(300) < 0.3
    pairs = score[label][:, None] - score[~label]
    assert auroc(score, label) == pytest.approx(((pairs > 0) + 0.5 * (pairs == 0)).mean())


def test_streaks_stay_within_their_episodes():
    prob = np.array([0.9, 0.2, 0.8, 0.7, 0.9, 0.9, math.nan, 0.6])
    episode = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert metrics.windowed_minimum(prob, episode, 1).tolist() == [
        0.9,
        0.2,
        0.8,
        0.7,
        0.9,
        0.9,
        -1,
        0.6,
    ]
    assert metrics.windowed_minimum(prob, episode, 2).tolist() == [
        -1,
        0.2,
        0.2,
        0.7,
        -1,
        0.9,
        -1,
        -1,
    ]
    assert metrics.ending_scores(prob, episode, 2).tolist() == [0.7, 0.9]
    assert metrics.ending_scores(prob, episode, 3).tolist() == [0.2, -1.0]
    assert metrics.any_per_episode(prob > 0.85, episode).tolist() == [True, True]
    # Thresholded, it is what ``successes`` counts.
    calibrated = Calibration(threshold=0.65, hits=2)
    success, _ = successes(
        torch.tensor(prob.reshape(2, 4)), calibrated, torch.zeros(2, dtype=torch.long)
    )
    assert (
        success.flatten().tolist() == (metrics.windowed_minimum(prob, episode, 2) >= 0.65).tolist()
    )


def test_fit_finds_the_temperature_that_was_put_in():
    rng = np.random.default_rng(0)
    episode = np.repeat(np.arange(1000), 10)
    logit = rng.normal(-2.0, 2.0, len(episode))
    label = rng.random(len(logit)) < 1 / (1 + np.exp(-logit))
    reported = 1 / (1 + np.exp(-(logit - 0.7) * 3.0))  # over-confident and shifted
    fitted = calibration.fit_calibration(
        reported, label, episode, max_false_positive_rate=0.05, hits=1
    )
    assert fitted.temperature == pytest.approx(3.0, rel=0.1) and fitted.bias == pytest.approx(
        0.7, abs=0.1
    )
    prob = fitted.apply(torch.from_numpy(reported)).numpy()
    assert metrics.ece(prob, label) < 0.015 < metrics.ece(reported, label)


@pytest.mark.parametrize("hits", [1, 2, 3])
@pytest.mark.parametrize("cap", [0.0, 0.02, 0.2])
def test_threshold_keeps_false_terminations_below_the_cap(cap, hits):
    rng = np.random.default_rng(1)
    episode, solved = np.repeat(np.arange(300), 12), np.repeat(np.arange(300) % 2 == 0, 12)
    label = solved & (np.tile(np.arange(12), 300) > 6)
    prob = 1 / (1 + np.exp(-rng.normal(np.where(label, 2.0, -2.0), 1.3)))
    prob[rng.random(len(prob)) < 0.01] = np.nan
    fitted = calibration.fit_calibration(
        prob, label, episode, max_false_positive_rate=cap, hits=hits
    )
    scores = metrics.ending_scores(fitted.apply(torch.from_numpy(prob)).numpy(), episode, hits)
    ended = scores >= fitted.threshold
    assert ended[1::2].mean() <= cap
    assert hits == 1 or ended[::2].mean() > 0.8
    assert fitted.hits == hits


def test_separable_labels_give_a_finite_calibration():
    label = np.tile([False] * 5 + [True] * 5 + [False] * 10, 20)
    episode = np.repeat(np.arange(40), 10)
    fitted = calibration.fit_calibration(np.where(label, 0.999, 0.001), label, episode)
    assert 0.1 < fitted.temperature < 10 and 0.001 < fitted.threshold < 0.999


@pytest.mark.parametrize(
    ("prob", "label", "says"),
    [
        (np.full(40, 0.5), np.ones(40), "needs solved and failing"),
        (np.full(40, 0.5), np.zeros(40), "needs solved and failing"),
        (
            np.tile([0.9, 0.1], 20),
            np.repeat([False, True], 20) & np.tile([False, True], 20),
            "do not rise",
        ),
        (np.ones(40), np.repeat([False, True], 20), "do not rise"),
    ],
)
def test_answers_without_information_are_refused(prob, label, says):
    with pytest.raises(UserError, match=says):
        calibration.fit_calibration(prob, label.astype(bool), np.repeat(np.arange(8), 5))


def test_failures_that_look_certain_are_refused():
    prob, label = np.tile([0.0, 1.0], 40), np.tile([False, True], 40)
    label[60:] = False  # a quarter of the episodes fail and look solved
    with pytest.raises(UserError, match="no threshold"):
        calibration.fit_calibration(prob, label, np.repeat(np.arange(40), 2), hits=1)
