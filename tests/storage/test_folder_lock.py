"""Two processes never write into one folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from embodyrl.config import compose
from embodyrl.data.collect import collect_dataset
from embodyrl.dreams.loop import run_loop
from embodyrl.dreams.loop_config import LoopConfig
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.config import MujocoConfig as MujocoConfig
from embodyrl.storage.folder_lock import locked
from embodyrl.training.runner import train

HOLD = """
import sys
from pathlib import Path
from embodyrl.storage.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another(folder: Path) -> Iterator[None]:
    """A process that holds a folder until it is killed."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        try:
            yield
        finally:
            process.kill()


def test_a_folder_is_free_again_when_its_process_was_killed(tmp_path: Path) -> None:
    with another(tmp_path / "a"):
        with (
            pytest.raises(UserError, match=r"process is writing into .*/a,"),
            locked(tmp_path / "a"),
        ):
            pass
        with locked(tmp_path / "b"):
            pass
    with locked(tmp_path / "a"):
        pass


def test_train_leaves_a_folder_alone_that_is_being_written(tmp_path: Path) -> None:
    with another(tmp_path / "x"):
        with pytest.raises(UserError, match="is writing into"):
            train(
                compose(
                    "mujoco_pick_ppo",
                    [f"run.out={tmp_path}", "run.name=x", "run.init_checkpoint=''"],
                )
            )
        assert [path.name for path in (tmp_path / "x").iterdir()] == [".held"]


def test_collect_leaves_a_folder_alone_that_is_being_written(tmp_path: Path) -> None:
    with another(tmp_path / "data.parts"):
        with pytest.raises(UserError, match="is writing into"):
            collect_dataset(MujocoConfig(num_envs=2), tmp_path / "data", num_episodes=2)
        assert [path.name for path in (tmp_path / "data.parts").iterdir()] == [".held"]


def test_a_loop_leaves_a_folder_alone_that_is_being_written(tmp_path: Path) -> None:
    with another(tmp_path):
        with pytest.raises(UserError, match="is writing into"):
            run_loop(LoopConfig(policy="p", env="mujoco_pick_sft", out=str(tmp_path)))
        assert [path.name for path in tmp_path.iterdir()] == [".held"]
