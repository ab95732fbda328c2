"""Kills a small run before each of its changes to the disk, and resumes it with the same command.

    python -m benchmarks.faults kills

The process trains once itself, which imports everything; every try is then forked from it, so it
costs a fraction of a second. Python reports every
file that it opens, renames, deletes or makes to an audit hook, which kills the process. It prints
JSON: the number of changes of the whole run, the tries, those that ended in another state, and the
files that were written in place.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from embodyrl.config import Config, resolve
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train

SECTIONS = {
    "env": {
        "name": "mujoco", "task": "reach", "renderer": "none", "num_envs": 2, "num_threads": 1,
    },
    "policy": {
        "name": "flow_vla", "width": 16, "layers": 1, "heads": 1, "text_layers": 0,
        "critic_width": 8, "num_denoise_steps": 1,
    },
    "algorithm": {"name": "ppo", "num_chunks": 2, "minibatch_size": 4, "epochs": 1, "critic_epochs": 1},
    "run": {
        "iterations": 3, "eval_every": 2, "eval_episodes": 2, "checkpoint_every": 1,
        "keep_checkpoints": 1, "device": "cpu", "threads": 1, "videos": 0,
    },
}  # fmt: skip
CLOCKS = ("minutes", "rollout_seconds", "env_steps_per_second")
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod")
CHANGES_OF_A_RUN = 76
"""About as many does the small run make."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def watch(folder: Path, kill_at: int, report: int) -> None:
    """Kills this process before its change number ``kill_at``; tells each change to ``report``."""
    count = 0

    def hook(event: str, args: tuple) -> None:
        nonlocal count
        is_write = event == "open" and isinstance(args[2], int) and args[2] & WRITES
        if not (is_write or event in CHANGES) or not isinstance(args[0], str | os.PathLike):
            return
        path = Path(args[0])
        if not path.is_relative_to(folder):
            return
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        in_place = is_write and not hidden and not args[2] & os.O_APPEND
        os.write(report, f"{'!' if in_place else ' '}{event} {path.name}\n".encode())

    sys.addaudithook(hook)


def attempt(config: Config, kill_at: int = 0) -> tuple[bool, list[str]]:
    """Runs in a forked process; whether it was killed, and the changes it made."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        watch(config.run.folder, kill_at, writer)
        try:
            train(config)
            os._exit(0)
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
            os._exit(1)
    os.close(writer)
    with os.fdopen(reader) as stream:
        changes = stream.read().splitlines()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        raise SystemExit(f"The run ended with {code} (kill at {kill_at}).")
    return code != 0, changes


def outcome(folder: Path) -> dict:
    """All that a run leaves, without its clocks."""
    assert finished(folder)
    states, meta = checkpoint.load(checkpoint.find(folder))
    meta["position"]["minutes"] = 0.0
    meta["config"]["run"]["out"] = ""
    rows = read_metrics(folder / "metrics.jsonl")
    evals = {p.name: json.loads(p.read_text()) for p in sorted((folder / "evals").iterdir())}
    names = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    return {
        "states": states,
        "meta": meta,
        "rows": [{k: v for k, v in row.items() if k not in CLOCKS} for row in rows],
        "evals": {name: page | {"minutes": 0.0} for name, page in evals.items()},
        "names": names,
    }


def equal(a: object, b: object) -> bool:
    """Whether two nested states are equal bit for bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def kill_run(root: Path, stride: int) -> dict:
    """Kills at every ``stride``-th change; 1 is all of them."""
    torch.set_num_threads(1)
    config = resolve(SECTIONS, [f"run.out={root}"])
    with contextlib.redirect_stdout(io.StringIO()):
        train(config)
    expected = outcome(config.run.folder)
    shutil.rmtree(config.run.folder)
    _, changes = attempt(config)
    assert equal(outcome(config.run.folder), expected)
    tries, different = 0, []
    for kill_at in range(1, len(changes) + 1, stride):
        shutil.rmtree(config.run.folder)
        killed, _ = attempt(config, kill_at)
        assert killed
        attempt(config)
        tries += 1
        if not equal(outcome(config.run.folder), expected):
            different.append(f"{kill_at}: {changes[kill_at - 1]}")
    in_place = sorted({change[1:] for change in changes if change.startswith("!")})
    return {"changes": len(changes), "tries": tries, "different": different, "in_place": in_place}


def survive(tries: int, seed: int) -> dict[str, int]:
    """Kills the run at about ``tries`` of its changes, evenly spread.

    Returns:
        ``tries``, ``survived`` (the same command ended in the same state, bit for bit), and the
        number of ``changes`` to the disk.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.faults.kills", folder, str(tries)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    for line in found["different"] + found["in_place"]:
        print(line, flush=True)
    survived = 0 if found["in_place"] else found["tries"] - len(found["different"])
    return {"tries": found["tries"], "survived": survived, "changes": found["changes"]}


if __name__ == "__main__":  # a process of its own: it forks, and an audit hook stays for good
    print(
        json.dumps(
            kill_run(Path(sys.argv[1]).resolve(), max(1, CHANGES_OF_A_RUN // int(sys.argv[2])))
        )
    )
