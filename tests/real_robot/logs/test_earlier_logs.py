"""Logs of an earlier run are not written over."""

from __future__ import annotations

from pathlib import Path

from embodyrl.real_robot.logs.earlier_logs import next_number, set_aside


def test_numbers_go_on_behind_the_highest(tmp_path: Path) -> None:
    assert next_number(tmp_path / "none", "reset") == 0
    # One was taken out of the folder, one is of another kind, and one has no number.
    for name in ("reset_000002_1", "reset_000002_2", "reset_000011_1", "episode_000099", "reset_x"):
        (tmp_path / f"{name}.mcap").touch()
    assert next_number(tmp_path, "reset") == 12
    assert next_number(tmp_path, "episode") == 100


def test_what_a_run_left_is_set_aside_whole(tmp_path: Path) -> None:
    assert set_aside(tmp_path / "none") is None and set_aside(tmp_path) is None
    (tmp_path / "notes.txt").touch()  # a user's own stays
    assert set_aside(tmp_path) is None
    for number in (0, 1):
        (tmp_path / "resets").mkdir()
        (tmp_path / "resets" / "reset_000000_1.mcap").touch()
        for name in ("episode_0000.mcap", "result.json"):
            (tmp_path / name).write_text(f"run {number}")
        aside = set_aside(tmp_path)
        assert aside == tmp_path / f"earlier_{number}"
        assert (aside / "result.json").read_text() == f"run {number}"
        assert (aside / "resets" / "reset_000000_1.mcap").exists()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["earlier_0", "earlier_1", "notes.txt"]
