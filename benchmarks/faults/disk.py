"""A disk that is full: a run whose files may not grow beyond a limit, then the same command again."""

from __future__ import annotations

import contextlib
import io
import os
import random
import resource
import shutil
import signal
import tempfile
from pathlib import Path

import torch

from benchmarks.faults.kills import SECTIONS, equal, outcome
from embodyrl.config import Config, resolve
from embodyrl.errors import UserError
from embodyrl.training.runner import train

LARGEST = 60_000
"""Bytes; the weights of the small run take more."""


def survive(tries: int, seed: int) -> dict[str, int]:
    """Trains with a limit on the size of files, then without one.

    A try survives if the first run ends in words and the second in the state of an undisturbed one,
    bit for bit.
    """
    torch.set_num_threads(1)
    rng = random.Random(seed)
    survived = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        config = resolve(SECTIONS, [f"run.out={Path(folder).resolve()}"])
        with contextlib.redirect_stdout(io.StringIO()):
            train(config)
        expected = outcome(config.run.folder)
        for _ in range(tries):
            shutil.rmtree(config.run.folder)
            said = _in_child(config, int(LARGEST * rng.random() ** 2) + 1)
            refused += said == 1
            again = _in_child(config, 0)
            good = said in (0, 1) and again == 0 and equal(outcome(config.run.folder), expected)
            survived += good
            if not good:
                print(f"status {said} with the limit, then {again}", flush=True)
    return {"tries": tries, "survived": survived, "stopped in words": refused}


def _in_child(config: Config, limit: int) -> int:
    """Trains in a forked process whose files hold at most ``limit`` bytes (0: any number).

    Returns:
        0: it ended. 1: it stopped in words. Anything else is no way to end.
    """
    pid = os.fork()
    if not pid:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if limit:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing then fails as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        try:
            train(config)
            os._exit(0)
        except UserError:
            os._exit(1)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
