"""``embodyrl world loop``: its settings and its record; the slow test runs a whole loop."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from embodyrl.dreams.loop_config import claim_folder, read_loop
from embodyrl.dreams.loop_record import (
    LoopRecord,
    RealEvaluation,
    best_evaluation,
    real_evaluations,
)
from embodyrl.errors import UserError


def test_what_makes_no_sense_is_refused(tmp_path) -> None:
    for preset, overrides, said in (
        ("mujoco_pik", [], r"no loop 'mujoco_pik'.*'mujoco_pick'"),
        ("mujoco_pick", [], "policy is empty: give policy=RUN"),
        ("mujoco_pick", ["policy=x", "round=2"], "has no key 'round'.*'rounds'"),
        ("mujoco_pick", ["policy=x", "near=1.0"], r"near is 1\.0"),
        ("mujoco_pick", ["policy=x", "rounds=0"], "rounds is 0"),
        ("mujoco_pick", ["policy=x", "dream="], "dream is '' and imitate is '': name one"),
        ("mujoco_pick", ["policy=x"], "demos is empty, but dream_sac_flow imitates"),
    ):
        with pytest.raises(UserError, match=said):
            read_loop(preset, overrides)
    given = ["policy=x", "demos=y", f"out={tmp_path}"]
    config = read_loop("mujoco_pick", given)
    assert config.env == "mujoco_pick_sft" and config.dream == "dream_sac_flow" and config.world
    assert not read_loop("mujoco_pick", ["policy=x", "dream=dream_ppo"]).demos  # which needs none
    claim_folder(tmp_path, config)
    claim_folder(tmp_path, read_loop("mujoco_pick", [*given, "rounds=9"]))  # it may last longer
    with pytest.raises(
        UserError, match=r"holds a loop with other settings \(episodes was 200, now 7"
    ):
        claim_folder(tmp_path, read_loop("mujoco_pick", [*given, "episodes=7"]))


def test_evaluations_are_in_order_and_minutes_add_up(tmp_path) -> None:
    (tmp_path / "dream" / "evals").mkdir(parents=True)
    for name, iteration, solved in (("before", 0, 1), ("after", 20, 2), ("iter_000010", 10, 3)):
        episodes = [
            {"init": k, "task": "pick", "success": k < solved, "length": 4, "return": 0.0}
            for k in range(5)
        ]
        text = json.dumps({"iteration": iteration, "episodes": episodes})
        (tmp_path / "dream" / "evals" / f"{name}.json").write_text(text)
    evaluations = real_evaluations(tmp_path / "dream", "runs/sft")
    assert [(Path(e.checkpoint).name, e.solved) for e in evaluations] == [
        ("sft", 1), ("step_000010", 3), ("step_000020", 2),
    ]  # fmt: skip
    assert evaluations[0] == RealEvaluation("runs/sft", 1, 5, 20)
    for _ in range(2):  # the second one went on from the file
        with pytest.raises(KeyError), LoopRecord(tmp_path).stage("dream"):
            raise KeyError
    record = LoopRecord(tmp_path)
    assert 0 < record.content["minutes"]["dream"] < 1
    record.add_round("round_0", evaluations, [])
    record.add_round("round_0", evaluations, [])
    assert (
        record.finish("x")["eval_steps"] == 60
        and json.loads((tmp_path / "loop.json").read_text())["best"] == "x"
    )


def test_the_latest_of_those_that_cannot_be_told_apart_is_taken() -> None:
    def kept(*solved: int, before: int) -> int | None:
        kept_one = best_evaluation(
            [RealEvaluation(str(at), count, 64, 0) for at, count in enumerate(solved)], before
        )
        return None if kept_one is None else int(kept_one.checkpoint)

    assert kept(14, 40, 50, 47, before=14) == 3  # 47 is within sqrt(64 * .78 * .22) = 3.3 of 50
    assert kept(14, 40, 50, 46, before=14) == 2
    assert (
        kept(14, 50, 20, 48, 10, before=14) == 3
    )  # not the latest: a policy that has collapsed is worse
    assert kept(14, 14, 12, before=14) is None
    assert kept(1, 2, 1, before=1) == 1  # within the error of the best, but no better than before
    assert kept(60, 64, 63, before=60) == 1  # all solved: there is no error


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes, and a machine may be busy with other things
def test_from_nothing_and_beside_the_simulator(tmp_path) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "imagination.py"
    command = [
        sys.executable,
        str(script),
        "--tiny",
        "--seeds",
        "0",
        "--out",
        str(tmp_path / "out"),
    ]
    subprocess.run(command, check=True)
    result = json.loads((tmp_path / "out" / "imagination_mujoco_pick.json").read_text())
    seed = result["seeds"][0]
    assert set(result["iqm"]) == {"imitated", "dream", "same_steps", "same_minutes"}
    assert (
        list(seed["loop"]["rounds"]) == ["round_0", "round_1"]
        and seed["loop"]["real_steps"] > 24 * 5
    )
    assert seed["world"]["as_evaluator"]["policies"][0]["believed"][0]["after"] == 0
    assert (
        seed["deep"]["by_depth"][-1]["steps"] > 64
        and (tmp_path / "out" / "imagination_mujoco_pick_dreams.png").exists()
    )
    minutes = seed["minutes"]
    subprocess.run(command, check=True)  # nothing is done twice
    again = json.loads((tmp_path / "out" / "imagination_mujoco_pick.json").read_text())["seeds"][0]
    assert (
        again["minutes"]["data"] == minutes["data"]
        and again["loop"]["best"] == seed["loop"]["best"]
    )
