"""`embodyrl data verify` on real data sets that were damaged in every way that happens."""

import json
import random
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from embodyrl.cli.main import main
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.recording import Recording
from embodyrl.data.verify import verify_dataset
from embodyrl.errors import UserError
from embodyrl.real_robot.images import to_png
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


def test_videos_of_a_folder_named_from_here_are_named_in_it(copy, monkeypatch):
    table = pq.read_table(copy / DATA)
    pq.write_table(table.slice(0, len(table) - 2), copy / DATA)
    monkeypatch.chdir(copy.parent)
    faults = verify_dataset("set").faults
    assert any(text.startswith(f"{VIDEO} has 18 frames") for text in faults)
    assert not any("cannot be read" in text for text in faults)


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


def moved(folder: Path, name: str, row: int, by: float) -> None:
    values = column(folder / DATA, name)
    values[row] += by
    change(folder / DATA, name, values)


def ragged(folder: Path, name: str, row: int) -> None:
    table = pq.read_table(folder / DATA)
    values = table.column(name).to_pylist()
    values[row] = values[row][:-1]
    place = table.schema.get_field_index(name)
    rows = pa.array(values, pa.list_(pa.float32()))
    pq.write_table(table.set_column(place, name, rows), folder / DATA)


def lost(folder: Path, row: int) -> None:
    table = pq.read_table(folder / DATA)
    pq.write_table(pa.concat_tables([table.slice(0, row), table.slice(row + 1)]), folder / DATA)


def blank(folder: Path, name: str, row: int) -> None:
    values = column(folder / DATA, name)
    values[row] = None
    change(folder / DATA, name, values)


def stats(folder: Path, key: str, name: str, values: list) -> None:
    path = folder / "meta" / "stats.json"
    content = json.loads(path.read_text())
    content[key][name] = values
    path.write_text(json.dumps(content))


def as_text(folder: Path, name: str, values: list[str]) -> None:
    table = pq.read_table(folder / DATA)
    place = table.schema.get_field_index(name)
    pq.write_table(table.set_column(place, name, pa.array(values)), folder / DATA)
    content = json.loads((folder / "meta" / "info.json").read_text())
    content["features"][name]["dtype"] = "string"
    info(folder, **content)


def drop_last_episode(folder: Path) -> None:
    """As somebody does who cuts the tables but not the video."""
    pq.write_table(pq.read_table(folder / DATA).slice(0, 11), folder / DATA)
    pq.write_table(pq.read_table(folder / EPISODES).slice(0, 2), folder / EPISODES)
    info(folder, total_frames=11, total_episodes=2)


FROM = "videos/observation.images.front/from_timestamp"
TO = "videos/observation.images.front/to_timestamp"
PICTURES = ("truncated video", "missing video", "frames too many")
"""What is seen only by decoding, so that loading finds it elsewhere or not."""
STATISTICS = ("statistics", "statistics of an episode")
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
    "NaN": (
        nan_action,
        "'action' holds NaN or infinity in 1 frames of episode 1, first in frame 6",
    ),
    "frames lost": (
        lambda f: pq.write_table(pq.read_table(f / DATA).slice(0, 15), f / DATA),
        r"Episode 2 has 4 frames, but meta/episodes says 7.*data\.skip=\[2\]",
    ),
    "gap": (
        lambda f: lost(f, 8),
        r"Frame 8 is numbered 9 .*episode 1, frame 8\): frames of this episode are missing",
    ),
    "index begins anew, and frames are lost": (
        lambda f: (change(f / DATA, "index", [*range(5), *range(6), *range(7)]), lost(f, 8)),
        "Frame 3 is numbered 4 .*frames of this episode are missing",
    ),
    "frame_index": (
        lambda f: change(f / DATA, "frame_index", [*range(5), *range(6), 0, 1, 2, 4, 3, 5, 6]),
        "'frame_index' is 4, not 3 .*file-000.parquet, episode 2, frame 14; 2 in all",
    ),
    "one late frame": (
        lambda f: moved(f, "timestamp", 7, 0.06),
        "times of episode 1 .*0.2600 s, not 0.2000 s .*episode 1, frame 7; 1 in all.*"
        r"lerobot-edit-dataset .*delete_episodes.*\[1\]",
    ),
    "time is NaN": (lambda f: moved(f, "timestamp", 7, np.nan), "times of episode 1.*nan s"),
    "a shorter row": (
        lambda f: ragged(f, "action", 9),
        r"'action' has 1 numbers, where others have 2 in frame 4 of episode 1 .*data\.skip=\[1\]",
    ),
    "an empty row": (
        lambda f: blank(f, "observation.state", 12),
        "'observation.state' is empty in frame 1 of episode 2",
    ),
    "column missing": (
        lambda f: pq.write_table(pq.read_table(f / DATA).drop_columns(["action"]), f / DATA),
        "lacks the column 'action'",
    ),
    "episodes exchanged": (
        lambda f: change(f / DATA, "episode_index", [0] * 5 + [2] * 6 + [1] * 7),
        "Episode 1 has 7 frames, but meta/episodes says 6",
    ),
    "episode not together": (
        lambda f: change(f / DATA, "episode_index", [0, 1, 0, 0, 0, 0] + [1] * 5 + [2] * 7),
        "do not stand together",
    ),
    "an episode left out": (
        lambda f: change(f / DATA, "episode_index", [0] * 5 + [1] * 6 + [3] * 7),
        "Episode 2 is missing: the next one is numbered 3",
    ),
    "episode row twice": (
        lambda f: change(f / EPISODES, "episode_index", [0, 1, 1]),
        "meta/episodes has 2 rows for episode 1",
    ),
    "place of an episode": (
        lambda f: change(f / EPISODES, "dataset_from_index", [0, 6, 11]),
        "Episode 1 is at the frames 5 to 10",
    ),
    "file of an episode": (
        lambda f: change(f / EPISODES, "data/file_index", [0, 7, 0]),
        "file-007.parquet, which meta/episodes names, is missing",
    ),
    "task twice": (
        lambda f: pq.write_table(pa.concat_tables([pq.read_table(f / TASKS)] * 2), f / TASKS),
        "Row 1 of meta/tasks.parquet repeats the task_index 0",
    ),
    "task of an episode": (
        lambda f: change(f / EPISODES, "tasks", [["reach it"], ["push it"], ["reach it"]]),
        "row of episode 1 in meta/episodes names the task 'push it'",
    ),
    "pictures mixed up": (
        lambda f: change(f / EPISODES, FROM, [0.0, 0.2, 1.1]),
        "episode 1 .*is 0.200 s, but episode 0 lasts until 0.500 s",
    ),
    "pictures of another length": (
        lambda f: change(f / EPISODES, TO, [0.5, 1.1, 2.4]),
        "video of episode 2 lasts 1.300 s .*7 rows 0.700 s",
    ),
    "no video times": (
        lambda f: change(f / EPISODES, FROM, [0.0, None, 1.1]),
        "does not say where the videos .*from_timestamp",
    ),
    "frames too many": (
        lambda f: drop_last_episode(f),
        "has 18 frames, but its episodes .episodes 0 to 1. have 11 rows",
    ),
    "statistics": (
        lambda f: stats(f, "action", "std", [float("nan"), 1.0]),
        "meta/stats.json: 'std' of 'action' holds NaN.*recompute_stats",
    ),
    "statistics of an episode": (
        lambda f: change(
            f / EPISODES, "stats/action/max", [[1.0, 1.0], [1.0, float("inf")], [1.0, 1.0]]
        ),
        r"row 1 .episode 1.: 'stats/action/max' holds",
    ),
    "success as other words": (
        lambda f: as_text(f, "success", ["maybe"] * 18),
        "'success' holds 'maybe', which is neither true nor false",
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


@pytest.mark.parametrize("kind", [k for k in DAMAGE if k not in (*PICTURES, *STATISTICS)])
def test_training_refuses_it_in_words(copy, kind):
    DAMAGE[kind][0](copy)
    with pytest.raises(UserError):
        load_demonstrations(copy, 2, keep="all")


def test_success_as_text_is_read_as_what_it_says(copy):
    as_text(copy, "success", ["True"] * 5 + ["False"] * 6 + ["True"] * 7)
    assert verify_dataset(copy).faults == []
    assert load_demonstrations(copy, 2).num_episodes == 2


def test_random_changes_of_the_tables_never_end_in_a_traceback(sound, tmp_path):
    """Any single number of any table is changed; what is said is a sentence, or it is sound."""
    rng = random.Random(0)
    tables = {name: pq.read_table(sound / name) for name in (DATA, EPISODES, TASKS)}
    folder = Path(shutil.copytree(sound, tmp_path / "set"))
    named = 0
    tries = 60
    for _ in range(tries):
        name = rng.choice(list(tables))
        table = tables[name]
        numeric = [
            c for c in table.column_names
            if pa.types.is_primitive(table.schema.field(c).type)
            and not pa.types.is_boolean(table.schema.field(c).type)
        ]  # fmt: skip
        key = rng.choice(numeric)
        row = rng.randrange(len(table))
        values = table.column(key).to_pylist()
        whole = pa.types.is_integer(table.schema.field(key).type)
        values[row] = rng.choice([-1, 99, 10**6] if whole else [-1.0, 99.0, np.nan, np.inf])
        pq.write_table(table, folder / name)
        change(folder / name, key, values)
        try:
            load_demonstrations(folder, 2, keep="all")
        except UserError as error:
            named += 1
            assert len(str(error)) < 2000
        else:
            # What training does not read, or puts right, it need not refuse.
            unread = ("index", "init", "noise", "next.reward")
            assert key in unread or key.startswith(("stats/", "meta/"))
        pq.write_table(table, folder / name)
    assert named > tries // 2


def test_an_empty_instruction_is_said(copy):
    table = pq.read_table(copy / TASKS)
    name = next(n for n in ("task", "__index_level_0__") if n in table.column_names)
    change(copy / TASKS, name, [" "])
    verdict = verify_dataset(copy)
    (note,) = verdict.notes
    assert not verdict.faults and "lerobot-edit-dataset" in note
    assert note.startswith(f"{copy} has no instruction in 3 of its 3 episodes, the first of")
    assert load_demonstrations(copy, 2).no_instruction == note


@pytest.mark.parametrize("numbers", ["anew", "of a part"])
def test_numbers_that_do_not_count_all_frames_are_put_right(sound, copy, numbers):
    """Merged data sets begin ``index`` anew, and parts keep the numbers of the whole."""
    kept = [*range(5), *range(6), *range(7)]
    values = kept if numbers == "anew" else [*range(10, 15), *range(40, 46), *range(90, 97)]
    change(copy / DATA, "index", values)
    for name, rows in (("dataset_from_index", [0, 0, 0]), ("dataset_to_index", [5, 6, 7])):
        change(copy / EPISODES, name, rows)
    verdict = verify_dataset(copy)
    assert verdict.faults == [] and "'index'" in verdict.notes[0]
    expected, found = (load_demonstrations(f, 2, keep="all") for f in (sound, copy))
    assert found.num_episodes == 3 and "'episode_index' and 'frame_index'" in found.remarks[0]
    for name in ("proprio", "actions", "end", "init"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert np.array_equal(found.images["front"], expected.images["front"])


SKIPPED = {
    "NaN": 1,
    "frames lost": 2,
    "gap": 1,
    "frame_index": 2,
    "one late frame": 1,
    "time is NaN": 1,
    "a shorter row": 1,
    "an empty row": 2,
    "success half way": 0,
    "pictures of another length": 2,
}
"""Damage of one episode."""


@pytest.mark.parametrize("kind", SKIPPED)
def test_the_other_episodes_are_usable(sound, copy, kind):
    """What is wrong with an episode says how to go on without it, and then no more is said."""
    DAMAGE[kind][0](copy)
    with pytest.raises(UserError, match=rf"data\.skip=\[{SKIPPED[kind]}\]"):
        load_demonstrations(copy, 2, keep="all")
    found = load_demonstrations(copy, 2, keep="all", skip=[SKIPPED[kind]])
    expected = load_demonstrations(sound, 2, keep="all", skip=[SKIPPED[kind]])
    assert found.num_episodes == 2
    assert found.remarks == [f"Left out of {copy}: the episodes {SKIPPED[kind]} (data.skip)."]
    for name in ("proprio", "actions", "end", "init", "solved"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert np.array_equal(found.images["front"], expected.images["front"])


def test_what_is_left_out_must_be_there_and_something_must_remain(sound):
    with pytest.raises(UserError, match=r"Episode 7 shall be left out .* It has 3"):
        load_demonstrations(sound, 2, skip=[1, 7])
    with pytest.raises(UserError, match=r"data\.skip leaves out all 3 episodes"):
        load_demonstrations(sound, 2, skip=[0, 1, 2])
    # Failed episodes are left out too, and that is said.
    demos = load_demonstrations(sound, 2, skip=[0])
    assert demos.num_episodes == 1 and len(demos.remarks) == 2
    assert "1 of 3 episodes, which failed (data.keep=success)" in demos.remarks[1]


def test_pictures_in_tables_go_with_their_frames_in_any_order(tmp_path, monkeypatch):
    """The order of the rows in the files need not be that of the frames."""
    rng = np.random.default_rng(1)
    recording = Recording(
        images={"front": rng.integers(256, size=(4, 64, 64, 3), dtype=np.uint8)},
        proprio=np.arange(12, dtype=np.float32).reshape(4, 3),
        actions=np.zeros((4, 2), np.float32),
        reward=np.zeros(4, np.float32),
        solved=np.arange(4) == 3,
        init=0,
        task="reach",
        instruction="reach it",
    )
    folder = write_dataset(tmp_path / "set", [recording], SPEC)
    # As LeRobot stores pictures without videos: PNG in the table.
    table = pq.read_table(folder / DATA)
    cells = [{"bytes": to_png(frame), "path": ""} for frame in recording.images["front"]]
    table = table.append_column("observation.images.front", pa.array(cells))
    pq.write_table(table.take([2, 0, 3, 1]), folder / DATA)
    content = json.loads((folder / "meta" / "info.json").read_text())
    content["features"]["observation.images.front"]["dtype"] = "image"
    info(folder, **content)
    demos = load_demonstrations(folder, 2)
    assert np.array_equal(demos.images["front"], recording.images["front"])
    assert verify_dataset(folder).faults == []


@pytest.mark.parametrize(
    "feature",
    [
        {"info": {"is_depth_map": True}},
        {"info": {"video.is_depth_map": True, "is_depth_map": False}},
        {"video_info": {"video.is_depth_map": True}},
        {"shape": [64, 64, 1]},
    ],
)
def test_depth_is_left_aside_with_a_word(copy, feature):
    content = json.loads((copy / "meta" / "info.json").read_text())
    content["features"]["observation.images.front"] |= feature
    info(copy, **content)
    assert verify_dataset(copy).cameras == {}
    demos = load_demonstrations(copy, 2, keep="all")
    assert demos.images == {} and "left aside" in demos.remarks[0]


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
