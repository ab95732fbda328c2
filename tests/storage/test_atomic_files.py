"""Files are complete or not there, and have the rights of any new file."""

import os
import stat

import numpy as np
import pytest
import torch

from embodyrl.storage import checkpoint
from embodyrl.storage.atomic_files import (
    remove_unfinished,
    replacing,
    replacing_folder,
    write_json,
    write_text,
)
from embodyrl.storage.video import write_video


def rights(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_weights_videos_and_texts_have_the_rights_that_the_umask_leaves(umask, tmp_path):
    before = os.umask(umask)
    try:
        path = checkpoint.save(tmp_path / "step_000001", {"policy": {"w": torch.zeros(2)}}, {})
        write_video(np.zeros((2, 16, 16, 3), np.uint8), tmp_path / "a.mp4", 10.0)
        write_json(tmp_path / "a.json", {})
    finally:
        os.umask(before)
    files = [*path.iterdir(), tmp_path / "a.mp4", tmp_path / "a.json"]
    assert {f.name: rights(f) for f in files} == {f.name: 0o666 & ~umask for f in files}
    assert rights(path) == 0o777 & ~umask


def test_a_write_that_fails_leaves_what_was_there(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(RuntimeError), replacing(tmp_path / "a") as unfinished:
        unfinished.write_text("new")
        assert (tmp_path / "a").read_text() == "old"
        raise RuntimeError
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "old").touch()
    with pytest.raises(RuntimeError), replacing_folder(tmp_path / "b") as scratch:
        (scratch / "new").touch()
        raise RuntimeError
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "old"]
    with replacing_folder(tmp_path / "b") as scratch:
        (scratch / "new").touch()
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "b", "new"]


def test_leftovers_go_and_nothing_else(tmp_path):
    for name in (
        ".a.tmp-01234567",
        ".b.old-89abcdef",
        ".held",
        "a",
        ".a.tmp-0123456",
        ".a.bak-01234567",
    ):
        (tmp_path / name).touch()
    remove_unfinished(tmp_path, "a")
    assert (tmp_path / ".b.old-89abcdef").exists() and not (tmp_path / ".a.tmp-01234567").exists()
    remove_unfinished(tmp_path)
    left = [".a.bak-01234567", ".a.tmp-0123456", ".held", "a"]
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    remove_unfinished(tmp_path / "none")
