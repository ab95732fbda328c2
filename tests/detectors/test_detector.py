"""Detectors on synthetic episodes: what they find, what they promise, and how they are kept."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.detectors.detector import Band, Detector, fit_detector
from embodyrl.detectors.episodes import Watched
from embodyrl.detectors.evaluate import evaluate_detector
from embodyrl.detectors.features import FloatIndex, NearestFeatures
from embodyrl.detectors.folder import load_detector, save_detector
from embodyrl.detectors.signals import Signal, TimeTaken
from embodyrl.detectors.stac import SAMPLES, Stac
from embodyrl.errors import UserError

H = 5


def episode(readings: torch.Tensor, success: bool = True, task: str = "go") -> Watched:
    steps = [H * k for k in range(len(readings))]
    return Watched(readings, steps, success, H * len(readings), task)


def walks(count: int, seed: int, *, strays: bool = False) -> list[Watched]:
    """Features that go around a quarter of a circle; one that strays turns back half-way."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = 12 if strays else int(rng.integers(6, 10))
        angle = np.linspace(0, np.pi / 2, 8)[np.minimum(np.arange(length), 7)]
        if strays:
            angle[4:] = -angle[4:]
        place = np.stack([np.cos(angle), np.sin(angle), np.zeros(length)], 1)
        noisy = place + 0.05 * rng.standard_normal(place.shape)
        found.append(episode(torch.tensor(noisy, dtype=torch.float32), not strays))
    return found


def plans(count: int, seed: int, *, undecided: bool = False) -> list[Watched]:
    """Sampled plans (T, 32, 2 H, 2) that follow one course, or change their mind every time."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        length = 8
        course = np.cumsum(0.1 * rng.standard_normal((H * length + H, 2)), 0)
        chunks = np.stack([course[H * k : H * k + 2 * H] for k in range(length)])
        if undecided:
            chunks = chunks + rng.choice([-1.0, 1.0], (length, 1, 1, 1))[:, 0] * 0.5
        sampled = chunks[:, None] + 0.1 * rng.standard_normal((length, SAMPLES, 2 * H, 2))
        found.append(episode(torch.tensor(sampled, dtype=torch.float32), not undecided))
    return found


def detected(detector: Detector, episodes: list[Watched]) -> float:
    return float(np.mean([detector.alarm(one) is not None for one in episodes]))


def test_float_finds_what_leaves_the_way_of_successes_when_it_leaves_it() -> None:
    detector = fit_detector(FloatIndex(), walks(60, 0), 0.1, H)
    assert detector.fitted == detector.calibrated == 30
    strays = walks(20, 1, strays=True)
    assert detected(detector, strays) == 1.0
    # The first decision that differs is the fifth.
    alarms = [detector.alarm(one) for one in strays]
    assert sum(4 * H <= (at or 0) <= 6 * H for at in alarms) >= 17
    assert detected(detector, walks(60, 2)) <= 0.2


def test_float_of_a_success_that_it_was_fitted_to_is_nothing_unless_it_is_left_aside() -> None:
    signal = FloatIndex()
    known = walks(6, 3)
    signal.fit([one.readings for one in known])
    steps = known[2].steps
    assert signal.score(known[2].readings, steps) < 0.01
    assert signal.score(known[2].readings, steps, without=2) > 0.02
    # All decisions at once are the same as one after the other.
    other = walks(1, 4)[0]
    one_by_one = [signal.score(other.readings[: k + 1], steps, 1) for k in range(len(other.steps))]
    assert signal.curve(other.readings, other.steps, 1) == pytest.approx(one_by_one, abs=1e-6)


def test_the_nearest_features_are_those_of_any_success_at_any_time() -> None:
    signal = NearestFeatures()
    signal.fit([torch.tensor([[0.0], [4.0]]), torch.tensor([[10.0]])])
    std = float(torch.tensor([0.0, 4.0, 10.0]).std())
    seen = torch.tensor([[1.0], [9.0], [4.0]])
    assert signal.curve(seen, [0, 5, 10]) == pytest.approx([1 / std, 1 / std, 0.0], abs=1e-5)
    # An episode is not compared with itself.
    assert signal.score(seen, [0, 5, 10], without=0) == pytest.approx(6 / std, abs=1e-5)
    detector = fit_detector(NearestFeatures(), walks(60, 0), 0.1, H)
    assert detected(detector, walks(20, 1, strays=True)) == 1.0


def test_stac_finds_a_policy_that_changes_its_mind() -> None:
    detector = fit_detector(Stac(), plans(40, 0), 0.1, H)
    assert detected(detector, plans(20, 1, undecided=True)) >= 0.9
    assert detected(detector, plans(20, 2)) <= 0.3
    # One decision alone has nothing to disagree with.
    first = plans(1, 3)[0]
    assert detector.signal.score(first.readings[:1], [0]) == 0.0
    # Asked for earlier, chunks overlap in more actions; too late, they overlap in none.
    assert detector.signal.score(first.readings[:2], [0, 2 * H - 1]) > 0.0
    with pytest.raises(UserError, match="do not overlap"):
        detector.signal.score(first.readings[:2], [0, 2 * H])


def test_the_clock_calls_what_takes_longer_than_successes_do() -> None:
    quick = [episode(torch.zeros(k, 0)) for k in (3, 4, 5, 6, 7) * 8]
    detector = fit_detector(TimeTaken(), quick, 0.1, H)
    assert detector.threshold == 6 * H
    slow = episode(torch.zeros(12, 0), False)
    assert detector.alarm(slow) == 7 * H


class Noise(Signal):
    """A score that nothing can be learned from; of exchangeable episodes."""

    kind = "noise"

    def read(self, policy, obs, chunk, generator):
        raise NotImplementedError

    def score(self, readings: torch.Tensor, steps: list[int], without: int = -1) -> float:
        return float(readings[-1])


@pytest.mark.parametrize("alpha", [0.05, 0.2])
def test_a_whole_success_is_called_a_failure_as_seldom_as_was_asked(alpha: float) -> None:
    rng = np.random.default_rng(0)
    wrong = total = 0
    for trial in range(60):
        scores = torch.tensor(rng.standard_normal((70, 9)).cumsum(1), dtype=torch.float32)
        episodes = [episode(one) for one in scores]
        detector = fit_detector(Noise(), episodes[:50], alpha, H, seed=trial)
        wrong += sum(detector.alarm(one) is not None for one in episodes[50:])
        total += 20
    # Of 25 calibration episodes the rate is at most alpha on average; three standard errors above
    # it, with those of a trial correlated through their threshold.
    assert wrong / total <= alpha + 3 * np.sqrt(alpha * (1 - alpha) / 60 / 10)


def test_a_band_keeps_the_last_score_of_an_episode_that_has_ended() -> None:
    band = Band.of([[0.0, 2.0, 4.0], [0.0, 4.0]])
    assert band.mean.tolist() == [0.0, 3.0, 4.0]
    assert float(band.std[1]) == 1.0 and float(band.std[0]) > 0.0
    assert band.deviation(5.0, 1) == 2.0
    assert band.deviation(4.0, 50) == 0.0


def test_too_few_successes_are_refused_with_how_many_it_takes() -> None:
    with pytest.raises(UserError, match=r"at least 19 .* Of 30 successes 15 .* at least 38"):
        fit_detector(FloatIndex(), walks(30, 0), 0.05, H)
    with pytest.raises(UserError, match="between 0 and 1"):
        fit_detector(FloatIndex(), walks(30, 0), 1.5, H)
    with pytest.raises(UserError, match="--held-out is 1"):
        fit_detector(FloatIndex(), walks(30, 0), 0.5, H, held_out=1.0)


def test_an_evaluation_counts_by_outcome_time_and_task() -> None:
    signal = TimeTaken()
    detector = Detector(signal, Band.none(), 12.0, 0.05, H, 2, 19)
    episodes = [
        episode(torch.zeros(10, 0), False, "red"),  # called at 15 of 50
        episode(torch.zeros(2, 0), False, "blue"),  # over at 10, never called
        episode(torch.zeros(4, 0), True, "red"),  # called at 15
        episode(torch.zeros(3, 0), True, "blue"),
    ]
    result = evaluate_detector(detector, episodes, 10.0, 50)
    assert (result["detected"]["k"], result["detected"]["n"]) == (1, 2)
    assert (result["false_alarms"]["k"], result["false_alarms"]["n"]) == (1, 2)
    assert result["seconds_early"] == [3.5, 3.5, 3.5]
    # It was called after 15 of 50 actions, so by four tenths of the limit.
    assert [row["k"] for row in result["by_time"]] == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert result["tasks"]["red"]["detected"]["k"] == 1
    assert result["tasks"]["blue"]["false_alarms"]["k"] == 0
    json.dumps(result)


@pytest.mark.parametrize(
    ("signal", "episodes"), [(FloatIndex, walks), (NearestFeatures, walks), (Stac, plans)]
)
def test_a_detector_is_read_as_it_was_written(signal, episodes, tmp_path: Path) -> None:
    detector = fit_detector(signal(), episodes(30, 0), 0.2, H)
    detector.policy = "runs/x"
    again = load_detector(save_detector(detector, tmp_path / "d"))
    for one in episodes(5, 9):
        for k in range(1, len(one.steps) + 1):
            args = one.readings[:k], one.steps[:k]
            assert again.deviation(*args) == detector.deviation(*args)
    assert (again.threshold, again.every, again.policy) == (detector.threshold, H, "runs/x")
    # A second one may take its place, but nothing else is overwritten.
    save_detector(detector, tmp_path / "d")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="something other than a detector"):
        save_detector(detector, tmp_path / "other")


def test_a_fit_without_failures_says_what_it_does_not_know(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from embodyrl.cli.detector import _print_fit

    fitted = {"detector": "runs/d", "kind": "float", "fitted": 20, "calibrated": 20}
    _print_fit({**fitted, "detected": {"k": 0, "n": 0}})
    assert "These data have no failure" in capsys.readouterr().out
    _print_fit({**fitted, "detected": {"k": 3, "n": 4}})
    assert "Failures of these data detected: 75%" in capsys.readouterr().out


def test_damaged_and_missing_detectors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no detector"):
        load_detector(tmp_path)
    folder = save_detector(fit_detector(FloatIndex(), walks(30, 0), 0.2, H), tmp_path / "d")
    whole = (folder / "detector.json").read_text()
    for change in ({"every": 0}, {"kind": "flaot"}, {"threshold": "high"}, {"kind": "stac"}):
        (folder / "detector.json").write_text(json.dumps(json.loads(whole) | change))
        with pytest.raises(UserError, match=r"damaged|Did you mean 'float'|malformed"):
            load_detector(folder)
    (folder / "detector.json").write_text(whole)
    (folder / "detector.safetensors").write_bytes(b"no tensors")
    with pytest.raises(UserError, match="damaged"):
        load_detector(folder)
