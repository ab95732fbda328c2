"""``embodyrl compare``: what it says of evaluations whose truth is known, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from embodyrl.cli.main import main
from embodyrl.errors import UserError
from embodyrl.functional.comparison import mcnemar, paired_interval
from embodyrl.report.compare import compare

RNG = np.random.default_rng(0)


def write_run(folder: Path, values: list[float], name: str = "after", **more: object) -> str:
    """A run's folder with one evaluation: tasks in turn, an episode for each value."""
    tasks = more.pop("tasks", ["pick"])
    seed = more.pop("seed", 0)
    rows = [
        {
            "init": i,
            "task": tasks[i % len(tasks)],  # type: ignore[index, arg-type]
            "success": bool(value == 1),
            "length": 9,
            "return": float(value),
        }
        for i, value in enumerate(values)
    ]
    payload = {"iteration": 5, "execute": 4, "reports_success": True, "episodes": rows} | more
    (folder / "evals").mkdir(parents=True, exist_ok=True)
    (folder / "evals" / f"{name}.json").write_text(json.dumps(payload))
    (folder / "meta.json").write_text(json.dumps({"seed": seed}))
    return str(folder)


def coins(rate: float, n: int = 200) -> list[float]:
    return (RNG.random(n) < rate).astype(float).tolist()


def test_two_policies_in_pairs(tmp_path: Path) -> None:
    a, b = coins(0.4), coins(0.8)
    found = compare([write_run(tmp_path / "a", a), write_run(tmp_path / "b", b)])
    (pair,) = found["pairs"]
    only_a = sum(x > y for x, y in zip(a, b, strict=True))
    only_b = sum(y > x for x, y in zip(a, b, strict=True))
    assert pair["difference"] == pytest.approx(np.mean(b) - np.mean(a))
    assert pair["interval"] == paired_interval(only_a, only_b, 200)
    assert pair["p"] == mcnemar(only_a, only_b) and pair["verdict"] == "b"
    assert pair["tasks"] == {} and pair["training"] is None


def test_before_and_after_of_one_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [0.0] * 30, "before", iteration=0)
    write_run(tmp_path / "a", [1.0] * 30)
    (pair,) = compare([f"{run}:before", run])["pairs"]
    assert pair["difference"] == 1 and pair["verdict"] == "b"
    # A file of the evaluation is the same.
    (again,) = compare([f"{run}/evals/before.json", f"{run}:after"])["pairs"]
    assert again["p"] == pair["p"]


def test_tasks_are_told_apart_and_held_at_once(tmp_path: Path) -> None:
    tasks = [f"t{i}" for i in range(8)]
    a = np.array(coins(0.5, 240)).reshape(-1, 8)
    b = a.copy()
    b[:, 3] = 1.0
    sides = [
        write_run(tmp_path / n, x.ravel().tolist(), tasks=tasks) for n, x in (("a", a), ("b", b))
    ]
    (pair,) = compare(sides)["pairs"]
    better = {task for task, of in pair["tasks"].items() if of["verdict"] == "b"}
    assert better == {"t3"}
    assert pair["tasks"]["t3"]["p"] == pytest.approx(8 * mcnemar(0, int((b > a).sum())))


def test_three_equal_policies_are_not_called_different(tmp_path: Path) -> None:
    called = 0
    for trial in range(60):
        sides = [write_run(tmp_path / f"{trial}{n}", coins(0.5, 100)) for n in "abc"]
        called += any(p["verdict"] != "undecided" for p in compare(sides)["pairs"])
    assert called <= 6


def test_runs_of_the_same_seeds_are_paired(tmp_path: Path) -> None:
    def runs(name: str, rates: tuple[float, ...], seeds: tuple[int, ...]) -> str:
        return ",".join(
            write_run(tmp_path / f"{name}{seed}", coins(rate, 400), seed=seed)
            for rate, seed in zip(rates, seeds, strict=True)
        )

    a = runs("a", (0.2, 0.4, 0.6), (0, 1, 2))
    b = runs("b", (0.4, 0.6, 0.8), (0, 1, 2))
    (pair,) = compare([a, b], groups=3)["pairs"]
    training = pair["training"]
    assert training["paired_by_seed"] and training["verdict"] == "b"
    assert training["interval"][0] < 0.2 < training["interval"][1]
    assert training["adastop"] == {
        "groups": 3,
        "stops_after": 3,
        "shown": False,
        "could_show": False,
    }
    # Unpaired, the spread of the seeds hides it.
    other = runs("c", (0.4, 0.6, 0.8), (3, 4, 5))
    (pair,) = compare([a, other])["pairs"]
    assert not pair["training"]["paired_by_seed"] and pair["training"]["verdict"] == "undecided"
    # A folder of runs is several runs.
    sweep = tmp_path / "sweep"
    for seed in (0, 1, 2):
        write_run(sweep / f"seed-{seed}", coins(0.9, 400), seed=seed)
    assert compare([a, str(sweep)])["sides"][str(sweep)]["runs"] == 3


def test_returns_are_compared_where_there_is_no_success(tmp_path: Path) -> None:
    values = RNG.normal(0, 1, 50)
    sides = [
        write_run(tmp_path / "a", values.tolist(), reports_success=False),
        write_run(tmp_path / "b", (values + 0.1).tolist(), reports_success=False),
    ]
    found = compare(sides)
    assert found["kind"] == "return" and found["pairs"][0]["verdict"] == "b"
    assert found["pairs"][0]["difference"] == pytest.approx(0.1)


def test_what_eval_printed_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, value in (("a", 0), ("b", 1)):
        row = {"task": "pick", "success": bool(value), "length": 5, "reward": float(value)}
        rows = [{"init": i, **row} for i in range(12)]
        found = {"env": "mujoco/pick", "split": "eval", "reports_success": True, "execute": 5}
        (tmp_path / name).write_text(json.dumps(found | {"results": rows}))
        files.append(str(tmp_path / name))
    assert main(["compare", *files]) == 0
    said = capsys.readouterr().out
    assert "A  0.0% (12 episodes)" in said and "+100.0 points" in said and "B is better" in said
    assert main(["compare", *files, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"][0]["verdict"] == "b"


def test_a_small_difference_says_how_many_episodes_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = [1.0] * 10 + [0.0] * 10
    b = [1.0] * 9 + [0.0] * 8 + [1.0] * 3
    main(["compare", write_run(tmp_path / "a", a), write_run(tmp_path / "b", b)])
    said = capsys.readouterr().out
    assert "no difference is shown" in said and "takes about" in said
    assert "Of training anew this says nothing" in said


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: [write_run(t / "a", [1.0])], "at least two sides"),
        (lambda t: [write_run(t / "a", [1.0]), str(t / "nowhere")], "no run with evaluations"),
        (lambda t: [write_run(t / "a", [1.0]), f"{t / 'a'}:befor"], "no evaluation 'befor'"),
        (
            lambda t: [write_run(t / "a", [1.0]), write_run(t / "b", [1.0], execute=8)],
            "number of executed actions",
        ),
        (
            lambda t: [write_run(t / "a", [1.0]), write_run(t / "b", [1.0], reports_success=False)],
            "kind of score",
        ),
        (
            lambda t: [write_run(t / "a", [1.0]), write_run(t / "b", [1.0], tasks=["push"])],
            "have 0 initial states of the same task in common",
        ),
        (lambda t: [write_run(t / "a", []), write_run(t / "b", [1.0])], "have 0 initial states"),
        (lambda t: [write_run(t / "a", [1.0]), write_run(t / "b", [1.0])], "takes 2 to compare"),
        (lambda t: ["", write_run(t / "b", [1.0])], "nothing to compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, change: Callable[[Path], list[str]], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        compare(change(tmp_path))


@pytest.mark.parametrize(
    "option", [("--confidence", "1"), ("--confidence", "95"), ("--groups", "-1")]
)
def test_wrong_options_are_refused(
    tmp_path: Path, option: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    sides = [write_run(tmp_path / n, [1.0, 0.0]) for n in "ab"]
    assert main(["compare", *sides, *option]) == 1
    assert option[0] in capsys.readouterr().err
