"""`embodyrl data verify` on real data sets that were damaged in every way that happens."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embodyrl.cli.main import main
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.recording import Recording
from embodyrl.data.verify import verify_dataset
from embodyrl.types import EnvSpec

SPEC = EnvSpec("test/arm", 1, 2, 3, "ee_delta_pos", 10.0, 8, {"front": (64, 64)})
DATA, EPISODES, TASKS = (
    "data/chunk-000/file-000.parquet",
    "meta/episodes/chunk-000/file-000.parquet",
    "meta/tasks.parquet",
)
VIDEO = "videos/observation.images.front/chunk-000/file-000.mp4"


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    rng = np.random.default_rng(0)
    recordings = [
        Recording(
            images={"front": rng.integers(256, size=(n, 64, 64, 3), dtype=np.uint8)},
            proprio=rng.normal(size=(n, 3)).astype(np.float32),
            actions=rng.uniform(-1, 1, size=(n, 2)).astype(np.float32),
            reward=np.zeros(n, np.float32),
            solved=np.arange(n) == (n - 1 if n != 6 else -1),
            init=n,
            task="reach",
            instruction="reach it",
        )
        for n in (5, 6, 7)
    ]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", recordings, SPEC)


@pytest.fixture
def copy(sound, tmp_path) -> Path:
    return Path(shutil.copytree(sound, tmp_path / "set"))


def change(file: Path, column: str, values) -> None:
    """Rewrites one column of a parquet file."""
    table = pq.read_table(file)
    place = table.schema.get_field_index(column)
    pq.write_table(
        table.set_column(
            place, table.schema.field(place), pa.array(values, table.schema.types[place])
        ),
        file,
    )


def column(file: Path, name: str) -> list:
    return pq.read_table(file).column(name).to_pylist()


def info(folder: Path, **values) -> None:
    path = folder / "meta" / "info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_a_sound_data_set_is_called_so(sound, capsys):
    verdict = verify_dataset(sound)
    assert verdict.faults == [] and verdict.notes == []
    assert (verdict.episodes, verdict.frames, verdict.fps, len(verdict.cameras)) == (3, 18, 10.0, 1)
    assert main(["data", "verify", str(sound)]) == 0
    assert (
        "3 episodes, 18 frames at 10 Hz, observation.images.front 64x64\nSound."
        in capsys.readouterr().out
    )


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def nan_action(folder: Path) -> None:
    values = column(folder / DATA, "action")
    values[6][1] = float("nan")
    change(folder / DATA, "action", values)


def half_success(folder: Path) -> None:
    values = column(folder / DATA, "success")
    values[0] = [False] if isinstance(values[0], list) else False
    change(folder / DATA, "success", values)


DAMAGE = {
    "no such folder": (lambda f: shutil.rmtree(f), "holds no LeRobot data set"),
    "truncated video": (
        lambda f: cut(f / VIDEO),
        "file-000.mp4 (cannot be decoded|ends after|has no frame)",
    ),
    "missing video": (lambda f: (f / VIDEO).unlink(), "video .*file-000.mp4 is missing"),
    "missing parquet": (lambda f: (f / DATA).unlink(), "data/ holds no parquet file"),
    "truncated parquet": (lambda f: cut(f / DATA), "file-000.parquet cannot be read"),
    "no episode table": (lambda f: (f / EPISODES).unlink(), "meta/episodes/ holds no parquet file"),
    "no task table": (lambda f: (f / TASKS).unlink(), "tasks.parquet cannot be read"),
    "broken info.json": (lambda f: (f / "meta/info.json").write_text("{"), "JSONDecodeError"),
    "NaN": (nan_action, "'action' holds NaN or infinity in 1 frames, first in frame 6, episode 1"),
    "frames lost": (
        lambda f: pq.write_table(pq.read_table(f / DATA).slice(0, 15), f / DATA),
        "15 frames.*says 18",
    ),
    "gap": (
        lambda f: change(f / DATA, "index", [*range(9), *range(10, 19)]),
        "Frame 9 is numbered 10",
    ),
    "another rate": (
        lambda f: info(f, fps=20),
        "times of episode 0 do not fit 20 frames per second",
    ),
    "no rate": (lambda f: info(f, fps=0), "gives 0 frames per second"),
    "success half way": (half_success, "'success' changes within episode 0"),
    "episode length": (
        lambda f: change(f / EPISODES, "length", [5, 7, 6]),
        "Episode 1 has 6 frames, but.*says 7",
    ),
    "unknown task": (
        lambda f: change(f / DATA, "task_index", [0] * 17 + [4]),
        "task 4, which meta/tasks.parquet",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_every_damage_is_named(copy, kind, capsys):
    damage, words = DAMAGE[kind]
    damage(copy)
    verdict = verify_dataset(copy)
    assert any(re.search(words, text) for text in verdict.faults), verdict.faults
    assert not any("Traceback" in text or "\n" in text for text in verdict.faults)


def test_an_empty_instruction_is_a_fault(copy):
    table = pq.read_table(copy / TASKS)
    name = next(n for n in ("task", "__index_level_0__") if n in table.column_names)
    change(copy / TASKS, name, [" "])
    assert verify_dataset(copy).faults == ["Task 0 has an empty instruction."]


def test_what_another_size_is_called(copy):
    text = json.loads((copy / "meta" / "info.json").read_text())
    text["features"]["observation.images.front"]["shape"] = [32, 64, 3]
    text["features"]["action"]["shape"] = [9]
    info(copy, **text)
    faults = verify_dataset(copy).faults
    assert (
        "The column 'action' of data/chunk-000/file-000.parquet has the shape (2,), not (9,)."
        in faults
    )
    assert any(
        "has pictures of (64, 64) (height, width)" in text and "is (32, 64)" in text
        for text in faults
    )


def test_someone_elses_data_set_is_noted_not_refused(copy, capsys):
    (copy / "meta" / "embodyrl.json").unlink()
    change(copy / DATA, "action", [[3.0, 0.0]] * 18)
    assert main(["data", "verify", str(copy), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["sound"] and "reach 3" in said["notes"][0] and "control mode" in said["notes"][1]
    nan_action(copy)
    assert main(["data", "verify", str(copy)]) == 1
    assert "FAULT  'action' holds NaN" in capsys.readouterr().out
