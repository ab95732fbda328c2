"""A failure detector from recorded episodes to the simulated arm, as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from untrained import untrained

from embodyrl.cli.main import main
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.errors import UserError
from embodyrl.real_robot.logs.mcap_log import read
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.real_robot.twin.mujoco_twin import MujocoTwin
from embodyrl.storage import checkpoint

ASKS = "the policy's side asks for a person: after"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained policy that plans ten actions, executes five, and sees one small picture."""
    folder = tmp_path_factory.mktemp("watched")
    return untrained(
        folder,
        "env: {name: mujoco, task: reach, image_size: 32, renderer: opengl, num_envs: 1, "
        "max_episode_steps: 20}\n"
        "policy: {name: flow_vla, width: 32, heads: 2, horizon: 10, execute: 5, critic: shared}\n"
        "algorithm: {name: ppo}\n",
    )


def deploy(saved: Path, out: Path, *more: str, episodes: int = 3) -> dict[str, Any]:
    """What the command wrote; the policy's side decides alone how long inference takes."""
    words = ["deploy", str(saved), "--episodes", str(episodes), "--latency", "0.01"]
    assert main([*words, "--speed", "1", "--out", str(out), *more]) == 0
    return json.loads((out / "result.json").read_text())


def soon(twin: MujocoTwin) -> bool:
    """An untrained policy solves nothing, so what it usually does counts as a success here."""
    return twin._now >= 18 / twin.spec.control_hz


@pytest.fixture(scope="module")
def played(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Episodes of the policy on the arm, which stand for those that succeed."""
    folder = tmp_path_factory.mktemp("played")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MujocoTwin, "solved", soon)
        deploy(saved, folder / "logs", "--record", episodes=12)
    assert main(["data", "from-logs", str(folder / "logs"), "--out", str(folder / "data")]) == 0
    yield folder / "data"


@pytest.fixture(scope="module")
def detector(saved: Path, played: Path) -> Path:
    """Calibrated for one false alarm in five."""
    folder = played.parent / "detector"
    words = [str(saved), str(played), "--out", str(folder), "--false-alarms", "0.2"]
    assert main(["detector", "fit", *words]) == 0
    return folder


def test_it_asks_where_the_arm_sees_something_else_and_the_arm_holds(
    saved: Path, detector: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = ("--detector", str(detector))
    # Under another light the policy's features are unlike those of any success.
    dark = deploy(saved, tmp_path / "dark", *watched, "env.split=ood_lighting")
    assert dark["detectors"] == [str(detector)]
    asked = [row["reason"].startswith(ASKS) for row in dark["results"]]
    assert all(asked), [row["reason"] for row in dark["results"]]
    # It counts as a failure of the policy, and is no fault.
    assert dark["episodes"] == 3 and dark["successes"] == 0 and not dark["stopped_by"]
    # The arm is at rest when the episode ends.
    told = read(tmp_path / "dark" / "episode_0000.mcap")
    assert np.abs(told["/command"][-1]["dq"]).max() < 1e-3
    # In the scenes that it knows it asks seldom, for as long as it knows them, and until then the
    # commands are those without a detector.
    monkeypatch.setattr(MujocoTwin, "solved", soon)
    same = deploy(saved, tmp_path / "same", *watched, "--seed", "1", episodes=6)
    reasons = [row["reason"] for row in same["results"]]
    assert sum(r.startswith(ASKS) for r in reasons) <= 2, reasons
    deploy(saved, tmp_path / "alone", "--seed", "1", episodes=1)
    told = [read(tmp_path / n / "episode_0000.mcap")["/command"] for n in ("same", "alone")]
    early = [[command["q"] for command in commands[:20]] for commands in told]
    assert len(early[0]) == 20 and np.array_equal(*early)


def test_a_test_counts_what_it_was_told(
    saved: Path, detector: Path, played: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detector", "test", str(detector), str(played), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["episodes"] == len(open_dataset(played).episodes) == 12
    assert result["false_alarms"]["n"] == 12 and result["detected"]["n"] == 0
    # A part of these episodes calibrated it, so the rate is near what was asked.
    assert result["false_alarms"]["k"] <= 5
    assert main(["detector", "test", str(detector), str(played)]) == 0
    assert "false alarms (asked: 20%)" in capsys.readouterr().out


def test_what_cannot_be_is_told_in_a_sentence(
    saved: Path, detector: Path, played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit = ["detector", "fit", str(saved), str(played), "--out", str(tmp_path / "d")]
    other = checkpoint.save(tmp_path / "step_000002", *_parts(saved))
    for words, said in (
        ([*fit], "takes at least 19 successful episodes"),
        ([*fit, "--kind", "flaot"], "Did you mean 'float'"),
        ([*fit, "--false-alarms", "1.5"], "between 0 and 1"),
        ([*fit, "--kind", "doubt"], "--dream MODEL"),
        ([*fit, "--dream", "runs/world"], "Leave --dream out"),
        (["detector", "test", str(tmp_path), str(played)], "holds no detector"),
        (["detector", "test", str(detector), str(played), "--policy", str(other)], "another"),
        (["deploy", str(other), "--detector", str(detector)], "another checkpoint"),
        (["deploy", "ws://127.0.0.1:1", "--robot", "ros2", "--detector", "d"], "give --detector"),
    ):
        more = ["--out", str(tmp_path / "out")] if words[0] == "deploy" else []
        assert main([*words, *more]) == 1
        assert said in " ".join(capsys.readouterr().err.split()), words


def _parts(saved: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Other weights of the same policy, and what stands beside them."""
    states, meta = checkpoint.load_run(saved)
    states["policy"] = {name: x + 0 * x for name, x in states["policy"].items()}
    first = next(name for name, x in states["policy"].items() if x.is_floating_point())
    states["policy"][first] = states["policy"][first] + 1.0
    return states, meta


def test_a_request_without_a_step_is_refused_and_an_episode_is_asked_about_once(
    saved: Path, detector: Path
) -> None:
    policy = CheckpointPolicy(str(saved), "cpu", detectors=[str(detector)])
    picture = np.full((32, 32, 3), 255, np.uint8)
    hand = np.full(policy.spec.proprio_dim, 3.0, np.float32)
    seen = {"images": {"front": picture}, "proprio": hand, "prompt": "go"}
    with pytest.raises(UserError, match="no `step`"):
        policy.infer(seen)
    # Nothing that the policy has seen looks like this.
    asked = [bool(policy.infer(seen | {"step": step}).get("ask")) for step in (0, 5, 10, 15)]
    assert sum(asked) == 1
    # The next episode begins with a step that is not later.
    assert any(policy.infer(seen | {"step": step}).get("ask") for step in (0, 5, 10))


def test_it_looks_no_more_often_than_it_was_fitted_to(saved: Path, detector: Path) -> None:
    policy = CheckpointPolicy(str(saved), "cpu", detectors=[str(detector)])
    [monitor] = policy.monitors
    picture = np.zeros((32, 32, 3), np.uint8)
    hand = np.zeros(policy.spec.proprio_dim, np.float32)
    for step in (0, 2, 4, 6, 9, 13, 14):
        policy.infer({"images": {"front": picture}, "proprio": hand, "prompt": "go", "step": step})
    looked = monitor._steps  # type: ignore[attr-defined]
    assert looked == [0, 6, 13][: len(looked)] and looked
