"""The start of a command: it says what it does, and Ctrl-C ends it."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from embodyrl import starting


def test_a_step_that_is_over_at_once_says_nothing(capsys) -> None:
    with starting.step("nothing much"):
        pass
    time.sleep(starting.QUIET + 0.1)
    assert capsys.readouterr().err == ""


def test_a_slow_step_says_what_it_does_while_it_does_it(capsys) -> None:
    with starting.step("building 3 envs"):
        time.sleep(starting.QUIET + 0.2)
        assert capsys.readouterr().err == "embodyrl: building 3 envs ...\n"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "stubborn",
    [
        "time.sleep(60)",
        # A library that swallows it, and one that goes on in C.
        "\n    while True:\n        try: time.sleep(60)\n        except BaseException: pass",
        "import hashlib; hashlib.pbkdf2_hmac('sha512', b'word', b'salt', 40_000_000)",
    ],
)
def test_ctrl_c_ends_a_step_whatever_it_does(stubborn: str) -> None:
    script = f"""
import time
from embodyrl import starting
with starting.stoppable(), starting.step("being stubborn"):
    print("begun", flush=True)
    {stubborn}
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(1.0)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(20)
        seconds = time.monotonic() - began
    assert seconds < starting.PATIENCE + 1.0
    assert process.returncode in (130, -signal.SIGINT)


def test_a_command_speaks_before_it_imports_pytorch_and_ctrl_c_ends_it(tmp_path) -> None:
    command = [sys.executable, "-u", "-m", "embodyrl.cli", "train", "mujoco_pick_ppo"]
    with subprocess.Popen(
        [*command, f"run.out={tmp_path}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "embodyrl: loading PyTorch ...\n"
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        rest = process.stderr.read()
        process.wait(20)
        seconds = time.monotonic() - began
    assert process.returncode == 130
    assert rest.strip().endswith("embodyrl: stopped.")
    assert "Traceback" not in rest
    assert seconds < 2.5
    assert list(tmp_path.iterdir()) == []
