"""The evaluations in a run's folder: which is the best, and which the last."""

import json

from embodyrl.training.run_folder import reopen, stalled


def episode(init: int, *, success: bool = False, reward: float = 0.0) -> dict:
    return {"init": init, "task": "reach", "success": success, "length": 4, "return": reward}


def test_the_best_evaluation_has_most_successes_and_among_as_many_the_highest_return(tmp_path):
    (tmp_path / "evals").mkdir()
    assert not stalled(tmp_path, 1)

    def evaluated(iteration: int, success: int, reward: float) -> None:
        rows = [episode(i, success=i < success, reward=reward + i) for i in range(2)]
        text = json.dumps({"iteration": iteration, "episodes": rows})
        (tmp_path / "evals" / f"iter_{iteration:06d}.json").write_text(text)

    for iteration, reward in (
        (0, -300.0),
        (1, -20.0),
        (2, -50.0),
    ):  # as of an env that reports no success
        evaluated(iteration, 0, reward)
    assert stalled(tmp_path, 1) and not stalled(tmp_path, 2)
    evaluated(3, 1, -400.0)
    assert not stalled(tmp_path, 1)


def test_the_last_evaluation_becomes_one_on_the_way(tmp_path):
    (tmp_path / "evals").mkdir()
    (tmp_path / "videos").mkdir()
    rows = [
        episode(i) | {"video": f"videos/after_{i:04d}.mp4" if i < 2 else None} for i in range(3)
    ]
    text = json.dumps({"iteration": 6, "episodes": rows})
    (tmp_path / "evals" / "after.json").write_text(text)
    for i in range(2):
        (tmp_path / "videos" / f"after_{i:04d}.mp4").write_bytes(bytes([i]))
    reopen(tmp_path)
    (tmp_path / "evals" / "after.json").write_text(text)  # as if killed just before its end
    reopen(tmp_path)
    reopen(tmp_path)
    assert [p.name for p in (tmp_path / "evals").iterdir()] == ["iter_000006.json"]
    kept = json.loads((tmp_path / "evals" / "iter_000006.json").read_text())["episodes"]
    assert [row["video"] for row in kept] == [
        "videos/iter_000006_0000.mp4",
        "videos/iter_000006_0001.mp4",
        None,
    ]
    assert [(tmp_path / row["video"]).read_bytes() for row in kept[:2]] == [b"\x00", b"\x01"]
