import io
import json
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.storage.loggers import LiveTable, MetricsWriter, clock, read_metrics


def row(i, **more):
    return {"iteration": i, "env_steps": 100 * i, "minutes": 0.1 * i, **more}


def test_rows_survive_a_crash_and_a_resume_has_none_twice(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        for i in range(1, 6):
            writer.write(row(i, loss=1.0 / i))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"iteration": 6, "lo')  # killed in mid-write
    assert [r["iteration"] for r in read_metrics(path)] == [1, 2, 3, 4, 5]
    with MetricsWriter(tmp_path, start_iteration=3) as writer:
        writer.write(row(4, loss=9.0))
    rows = read_metrics(path)
    assert [r["iteration"] for r in rows] == [1, 2, 3, 4] and rows[-1]["loss"] == 9.0
    with MetricsWriter(tmp_path, start_iteration=0):
        pass
    assert read_metrics(path) == []


def test_every_row_is_strict_json_at_once(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(row(1, kl=float("nan"), loss=np.float32(0.5), top=float("inf")))
        text = (tmp_path / "metrics.jsonl").read_text()
    found = json.loads(text, parse_constant=lambda name: pytest.fail(name))
    assert found["kl"] is None and found["top"] is None and found["loss"] == 0.5


def test_damage_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1}\n???\n{"iteration": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_tensorboard_gets_the_scalars(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, ["tensorboard"]) as writer:
        for i in (1, 2):
            writer.write(row(i, loss=float(i), kl=float("nan")))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 1.0), (2, 2.0)]
    assert "kl" not in events.Tags()["scalars"]


def in_a_process(code: str, folder: Path, **env: str) -> str:
    """What the code prints. Both packages start threads, so it runs in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True, text=True, timeout=240, cwd=folder, stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


WRITE = """
import sys
from embodyrl.storage.loggers import MetricsWriter
with MetricsWriter(sys.argv[1], [NAME]) as writer:
    for i in (1, 2):
        writer.write({"iteration": i, "loss": float(i) / 4, "kl": float("nan")})
"""


def test_wandb_writes_its_files_without_a_network(tmp_path):
    folder = tmp_path / "arm"
    folder.mkdir()
    in_a_process(
        WRITE.replace("NAME", "'wandb'"), folder, WANDB_MODE="offline", WANDB_SILENT="true"
    )
    (record,) = (folder / "wandb").glob("offline-run-*/run-*.wandb")
    data = record.read_bytes()
    assert b"embodyrl" in data and b"loss" in data and b"0.5" in data and b"NaN" not in data


def test_trackio_writes_its_database(tmp_path):
    folder = tmp_path / "arm"
    folder.mkdir()
    in_a_process(
        WRITE.replace("NAME", "'trackio'"),
        folder,
        TRACKIO_DIR=str(tmp_path / "db"),
        HF_HUB_OFFLINE="1",
    )
    (path,) = (tmp_path / "db").glob("embodyrl*.db")
    with sqlite3.connect(path) as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY step"
        ).fetchall()
    assert [(name, step, json.loads(text)["loss"]) for name, step, text in rows] == [
        ("arm", 1, 0.25),
        ("arm", 2, 0.5),
    ]


def test_unknown_and_missing_loggers_are_refused_in_words(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"tensorbord.*'tensorboard'"):
        MetricsWriter(tmp_path, ["tensorbord"])
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    with pytest.raises(MissingDependencyError, match="pip install wandb"):
        MetricsWriter(tmp_path, ["wandb"])


def test_plain_lines_without_a_terminal():
    out = io.StringIO()
    with LiveTable("demo", 10, file=out, every_seconds=0.0) as table:
        for i in range(1, 4):
            table.update(
                row(
                    i,
                    train_success=0.25,
                    train_episodes=8,
                    approx_kl=0.0123,
                    env_steps_per_second=3100.0,
                )
            )
        table.evaluating(3, "33% [6, 79] (1/3)")
        table.evaluated("36% [27, 46] (36/100)")
        table.say("stopped [here]")
    text = out.getvalue()
    assert len(text.splitlines()) == 6 and "\x1b" not in text
    assert "demo  evaluating: 3 episodes, 33% [6, 79] (1/3)" in text
    assert (
        "demo  3/10" in text
        and "25% [7, 59] (2/8)" in text
        and "KL 0.0123" in text
        and "3,100/s" in text
    )
    assert "left about 0:42" in text  # 7 iterations of 0.1 minutes
    assert "36% [27, 46] (36/100)" in text and "stopped [here]" in text


def test_the_return_stands_where_success_is_not_known():
    out = io.StringIO()
    with LiveTable("demo", 10, file=out, every_seconds=0.0) as table:
        table.update(row(1, train_return=float("nan"), train_episodes=0))
        table.update(row(2, train_return=-41.27, train_episodes=1))
        table.update(row(3, train_return=2934.4, train_episodes=4))
    first, second, third = out.getvalue().splitlines()
    assert first.endswith("train return -") and "train return -41.3 (1 episode)" in second
    assert "train return 2,934 (4 episodes)" in third and "success" not in out.getvalue()


def test_few_plain_lines_in_a_log():
    out = io.StringIO()
    with LiveTable("demo", 1000, file=out, every_seconds=60.0) as table:
        for i in range(1, 1001):
            table.update(row(i))
    assert len(out.getvalue().splitlines()) == 2  # the first and the last


def test_live_table_on_a_terminal(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = Terminal()
    with LiveTable("demo", 4, file=out) as table:
        table.update(row(1, train_success=float("nan"), train_episodes=0, loss=0.5))
        table.evaluated("25% [5, 70] (1/4)")
        table.update(row(2, train_success=0.5, train_episodes=4, loss=0.25))
        table.evaluated("75% [30, 95] (3/4)")
    text = out.getvalue()
    assert "\x1b[" in text and "2/4" in text and "25% [5, 70] (1/4)  →  75% [30, 95] (3/4)" in text


def test_time_left_counts_from_where_a_run_resumed():
    table = LiveTable("demo", 20, 10, file=io.StringIO(), every_seconds=1e9)
    assert table.seconds_left() is None
    for i in (11, 12, 13):
        table.update(row(i))
    assert table.seconds_left() == pytest.approx(7 * 6.0)


def test_clock():
    assert [clock(s) for s in (0, 65, 3600, 7384)] == ["0:00", "1:05", "1:00:00", "2:03:04"]
