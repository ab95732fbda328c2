"""Data sets of LeRobot's versions 2.0 and 2.1 are read as the same data in v3 are."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.recording import Recording
from embodyrl.data.verify import verify_dataset
from embodyrl.errors import UserError
from embodyrl.types import EnvSpec

SPEC = EnvSpec("test/arm", 1, 2, 3, "ee_delta_pos", 10.0, 8, {"front": (64, 64)})
KEY = "observation.images.front"
DATA = "data/chunk-000/file-000.parquet"
LENGTHS = (5, 6, 7)


def recording(n: int) -> Recording:
    rng = np.random.default_rng(n)
    return Recording(
        images={"front": rng.integers(256, size=(n, 64, 64, 3), dtype=np.uint8)},
        proprio=rng.normal(size=(n, 3)).astype(np.float32),
        actions=rng.uniform(-1, 1, size=(n, 2)).astype(np.float32),
        reward=np.zeros(n, np.float32),
        solved=np.arange(n) == n - 1,
        init=n,
        task="reach",
        instruction=f"reach {n % 2}",
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, Path]:
    """The same episodes in v3 and in v2.1."""
    folder = tmp_path_factory.mktemp("data")
    new = write_dataset(folder / "new", [recording(n) for n in LENGTHS], SPEC)
    old = folder / "old"
    (old / "meta").mkdir(parents=True)
    info = json.loads((new / "meta" / "info.json").read_text())
    info |= {
        "codebase_version": "v2.1",
        "chunks_size": 2,
        "total_videos": 3,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    }
    table = pq.read_table(new / DATA)
    episode = np.array(table["episode_index"])
    (old / "meta" / "info.json").write_text(json.dumps(info))
    rows, tasks = [], ["reach 1", "reach 0"]
    for i, n in enumerate(LENGTHS):
        rows.append({"episode_index": i, "tasks": [f"reach {n % 2}"], "length": n})
        # One file and one video for each episode.
        file = old / f"data/chunk-{i // 2:03d}/episode_{i:06d}.parquet"
        file.parent.mkdir(parents=True, exist_ok=True)
        part = table.filter(pa.array(episode == i))
        index = [tasks.index(f"reach {n % 2}")] * n
        place = part.schema.get_field_index("task_index")
        pq.write_table(part.set_column(place, "task_index", pa.array(index)), file)
        single = write_dataset(folder / f"single_{i}", [recording(n)], SPEC)
        video = old / f"videos/chunk-{i // 2:03d}/{KEY}/episode_{i:06d}.mp4"
        video.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(single / f"videos/{KEY}/chunk-000/file-000.mp4", video)
    lines = {"episodes": rows, "tasks": [{"task_index": i, "task": t} for i, t in enumerate(tasks)]}
    for name, found in lines.items():
        text = "".join(json.dumps(row) + "\n" for row in found)
        (old / "meta" / f"{name}.jsonl").write_text(text)
    return new, old


@pytest.fixture
def copy(both, tmp_path) -> Path:
    return Path(shutil.copytree(both[1], tmp_path / "old"))


def test_it_is_sound_and_the_same_as_v3(both):
    _, old = both
    verdict = verify_dataset(old)
    assert verdict.faults == [] and (verdict.episodes, verdict.frames) == (3, 18)
    expected, found = (load_demonstrations(f, 4, spec=SPEC) for f in both)
    for name in ("proprio", "actions", "end", "init", "success", "solved"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert np.abs(found.images["front"].astype(int) - expected.images["front"]).max() <= 2
    told = [[d.sentences[i] for i in d.instruction.tolist()] for d in (expected, found)]
    assert told[0] == told[1]


def test_damage_is_named_and_the_other_episodes_are_usable(copy):
    file = copy / "data/chunk-001/episode_000002.parquet"
    table = pq.read_table(file)
    rows = table["action"].to_pylist()
    rows[3] = rows[3][:1]
    place = table.schema.get_field_index("action")
    pq.write_table(table.set_column(place, "action", pa.array(rows, pa.list_(pa.float32()))), file)
    with pytest.raises(UserError, match=r"frame 3 of episode 2 .*data\.skip=\[2\]"):
        load_demonstrations(copy, 2)
    (copy / f"videos/chunk-001/{KEY}/episode_000002.mp4").unlink()
    assert load_demonstrations(copy, 2, skip=[2]).num_episodes == 2
    with pytest.raises(UserError, match="Episode 3 shall be left out"):
        load_demonstrations(copy, 2, skip=[2, 3])


def test_a_missing_file_and_broken_lines_are_named(copy):
    (copy / "data/chunk-000/episode_000001.parquet").unlink()
    assert any("Episode 1 has 0 frames" in text for text in verify_dataset(copy).faults)
    for text, words in (
        ('{"episode_index": 0', r"Line 1 of .*episodes.jsonl is damaged"),
        ('\n{"episode_index": 0}', r"Line 2 of .*episodes.jsonl is malformed: .*'length'"),
    ):
        (copy / "meta" / "episodes.jsonl").write_text(text)
        with pytest.raises(UserError, match=words):
            open_dataset(copy)
    (copy / "meta" / "tasks.jsonl").unlink()
    assert verify_dataset(copy).faults
