"""Data whose numbers are sound and whose meaning is another one: each kind is named, no other is."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.meaning_notes import correlation
from embodyrl.data.recording import Recording
from embodyrl.data.verify import verify_dataset
from embodyrl.types import EnvSpec

SPEC = EnvSpec("test/arm", 1, 3, 4, "ee_delta_pos", 10.0, 40, {})
STEPS = 30
EPISODES = 4


def arm(seed: int) -> Recording:
    """An arm that moves in a plane as it is commanded, with a gripper that closes half way."""
    rng = np.random.default_rng(seed)
    moves = 0.9 * np.sin(rng.uniform(0, 6, size=2) + np.arange(STEPS)[:, None] * [0.9, 1.3])
    place = np.concatenate([np.zeros((1, 2)), 0.03 * moves.cumsum(axis=0)])[:-1]
    gripper = np.where(np.arange(STEPS) < STEPS // 2, 1.0, -1.0)
    # The state: place, a number that never moves, and how far the gripper is open.
    width = np.concatenate([[1.0], gripper[:-1]])
    state = np.column_stack([place, np.full(STEPS, 0.5), width])
    return Recording(
        images={},
        proprio=state.astype(np.float32),
        actions=np.column_stack([moves, gripper]).astype(np.float32),
        reward=np.zeros(STEPS, np.float32),
        solved=np.arange(STEPS) == STEPS - 1,
        init=seed,
        task="move",
        instruction="move",
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "set"
    return write_dataset(folder, [arm(seed) for seed in range(EPISODES)], SPEC)


@pytest.fixture
def theirs(own: Path, tmp_path: Path) -> Path:
    """A copy that does not say that embodyrl wrote it."""
    copy = Path(shutil.copytree(own, tmp_path / "set"))
    (copy / "meta/embodyrl.json").unlink()
    return copy


def change_actions(folder: Path, change: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    """Replaces the actions by ``change(actions, state)``, of all frames in order."""
    (file,) = (folder / "data").rglob("*.parquet")
    table = pq.read_table(file)
    actions, state = (np.array(table[c].to_pylist()) for c in ("action", "observation.state"))
    place = table.schema.get_field_index("action")
    rows = change(actions, state).astype(np.float32).tolist()
    pq.write_table(
        table.set_column(place, "action", pa.array(rows, table.schema.field("action").type)), file
    )


def against(actions: np.ndarray, state: np.ndarray) -> np.ndarray:
    return actions * [-1, 1, 1]


def late(actions: np.ndarray, state: np.ndarray) -> np.ndarray:
    return np.concatenate([actions[:1], actions[:-1]])


def absolute(actions: np.ndarray, state: np.ndarray) -> np.ndarray:
    return np.column_stack([state[:, :2], actions[:, 2]])


def other_gripper(actions: np.ndarray, state: np.ndarray) -> np.ndarray:
    return np.column_stack([actions[:, :2], (1 - actions[:, 2]) / 2])


def no_gripper(actions: np.ndarray, state: np.ndarray) -> np.ndarray:
    return np.column_stack([actions[:, :2], np.zeros(len(actions))])


Change = Callable[[np.ndarray, np.ndarray], np.ndarray]
KINDS: dict[Change, str] = {
    against: "against each other in action 0 and state 0,",
    late: "in numbers 0, 1: each action seems to stand one frame late",
    absolute: "repeats 'observation.state' in numbers 0, 1, 2:",
    other_gripper: "Number 2 of 'action' lies in 0 to 1",
    no_gripper: "same value in all frames in number 2:",
}
PATTERN = "against each other|one frame late|repeats 'obs|lies in 0 to 1|same value"


def test_nothing_is_said_of_data_that_are_as_they_should_be(own: Path, theirs: Path) -> None:
    assert verify_dataset(own).notes == ["It has no camera images."]
    assert not re.search(PATTERN, " ".join(verify_dataset(theirs).notes))


@pytest.mark.parametrize("change", list(KINDS), ids=lambda change: change.__name__)
def test_each_kind_is_named_by_verify_and_before_training(theirs: Path, change: Change) -> None:
    change_actions(theirs, change)
    verdict = verify_dataset(theirs)
    assert not verdict.faults
    found = [note for note in verdict.notes if re.search(PATTERN, note)]
    assert len(found) == 1 and KINDS[change] in found[0]
    assert load_demonstrations(theirs, 4, spec=SPEC).remarks == [f"{theirs}: {found[0]}"]


def test_actions_of_an_env_that_takes_no_changes_are_not_compared(
    own: Path, tmp_path: Path
) -> None:
    spec = EnvSpec("test/arm", 1, 3, 4, "joint_pos", 10.0, 40, {})
    folder = write_dataset(tmp_path / "set", [arm(0), arm(1)], spec)
    change_actions(folder, absolute)
    assert verify_dataset(folder).notes == ["It has no camera images."]
    assert load_demonstrations(folder, 4, spec=spec).remarks == []


def test_an_env_of_another_rate_or_name_is_named(own: Path) -> None:
    fast = EnvSpec("test/other", 1, 3, 4, "ee_delta_pos", 25.0, 40, {})
    rate, env = load_demonstrations(own, 4, spec=fast).remarks
    assert "10 actions per second, and test/other takes 25" in rate
    assert "recorded in test/arm, and this run is in test/other" in env
    assert load_demonstrations(own, 4, spec=SPEC).remarks == []


def test_correlation_is_pearsons_and_0_for_what_does_not_vary() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 2))
    y = rng.normal(size=(50, 3))
    y[:, 2] = 7.0
    found = correlation(x, y)
    expected = np.corrcoef(x.T, y[:, :2].T)[:2, 2:]
    np.testing.assert_allclose(found[:, :2], expected, atol=1e-12)
    np.testing.assert_array_equal(found[:, 2], 0.0)


@pytest.mark.parametrize("mark", ["is_depth_map", "video.is_depth_map"])
def test_depth_is_left_aside_with_a_word(own: Path, tmp_path: Path, mark: str) -> None:
    episode = arm(0)
    episode.images = {n: np.zeros((STEPS, 64, 64, 3), np.uint8) for n in ("front", "depth")}
    spec = replace(SPEC, cameras={"front": (64, 64), "depth": (64, 64)})
    folder = write_dataset(tmp_path / "set", [episode], spec)
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"]["observation.images.depth"].setdefault("info", {})[mark] = True
    (folder / "meta/info.json").write_text(json.dumps(info))
    verdict = verify_dataset(folder)
    assert list(verdict.cameras) == ["observation.images.front"]
    assert any("'observation.images.depth' is marked as depth" in note for note in verdict.notes)


def test_a_camera_that_nobody_named_is_named(tmp_path: Path) -> None:
    episode = arm(0)
    episode.images = {"top": np.zeros((STEPS, 64, 64, 3), np.uint8)}
    folder = write_dataset(tmp_path / "set", [episode], replace(SPEC, cameras={"top": (64, 64)}))
    spec = replace(SPEC, cameras={"front": (64, 64)})
    (remark,) = load_demonstrations(folder, 4, spec=spec).remarks
    assert "camera 'top' of" in remark and "is taken as 'front' of test/arm" in remark
    given = load_demonstrations(folder, 4, spec=spec, cameras={"front": "top"})
    assert given.remarks == []
