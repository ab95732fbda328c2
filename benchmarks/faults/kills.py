"""Kills a small run before each of its changes to the disk, and resumes it with the same command.

    python -m benchmarks.faults kills            # PPO; or kills-replay, kills-sft, kills-world

The runs are: PPO; SAC-Flow with its replay buffer and films; imitation of a data set; the training
of a world model.

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodyrl.config import env_config, resolve
from embodyrl.data.collect import collect_dataset
from embodyrl.storage import checkpoint
from embodyrl.storage.config_section import build_section
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.train import train_world

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
TINY_FILM = {"renderer": "warp", "cameras": ["front"], "image_size": 16, "max_episode_steps": 10}
SAC = {
    "name": "sac_flow", "num_chunks": 4, "capacity": 50, "warmup_chunks": 4, "random_warmup": False,
    "batch_size": 4, "policy_delay": 1, "critic_width": 8, "shared_critic": True, "utd": 0.5,
}  # fmt: skip
SFT = {"name": "sft", "steps_per_iteration": 2, "batch_size": 4}
WORLD = {
    "latent_channels": 4, "channels": 8, "width": 16, "layers": 1, "heads": 1, "horizon": 4, "batch_size": 4,
    "codec_steps": 2, "state_steps": 2, "inverse_steps": 2, "steps": 2, "checkpoint_every": 1,
    "max_unroll": 1, "device": "cpu", "threads": 1, "held_out": 0.5, "max_false_positives": 1.0,
}  # fmt: skip
CLOCKS = ("minutes", "rollout_seconds", "env_steps_per_second")
CHANGES = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod")
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


@dataclass(frozen=True)
class Subject:
    """A run that is killed: its folder, what makes it, and what it leaves (without clocks)."""

    folder: Path
    play: Callable[[], Any]
    outcome: Callable[[Path], dict]


def subject(kind: str, root: Path) -> Subject:
    """A run of a kind (``ppo``, ``replay``, ``sft``, ``world``); its data are made first."""
    if kind == "world":
        # Held-out episodes must be of both outcomes: some end long before the task is solved.
        solved = recorded(root / "solved", TINY_FILM | {"max_episode_steps": 40})
        unsolved = recorded(root / "unsolved", TINY_FILM | {"max_episode_steps": 3})
        settings = WORLD | {"data": [solved, unsolved], "out": str(root / "world")}
        world = build_section("world", WorldTrainConfig, settings)
        return Subject(root / "world", lambda: train_world(world), world_outcome)
    sections = SECTIONS
    if kind == "replay":
        sections = SECTIONS | {
            "env": SECTIONS["env"] | TINY_FILM,
            "policy": SECTIONS["policy"] | {"transition": "flow_noise"},
            "algorithm": SAC,
            "run": SECTIONS["run"] | {"videos": 1},
        }
    if kind == "sft":
        sections = SECTIONS | {"algorithm": SFT, "data": {"path": recorded(root / "data", {})}}
    config = resolve(sections, [f"run.out={root}"])
    return Subject(config.run.folder, lambda: train(config), run_outcome)


def recorded(out: Path, changes: dict[str, Any]) -> str:
    """The path of a data set of the scripted expert."""
    settings = [f"env.{k}={v}" for k, v in (SECTIONS["env"] | changes).items() if k != "name"]
    config = env_config("mujoco", settings)
    collect_dataset(config, out, num_episodes=6, keep_failures=True, past_success=5)
    return str(out)


def attempt(run: Subject, kill_at: int = 0) -> tuple[bool, list[str]]:
    """Plays in a forked process; whether it was killed, and the changes it made."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reader)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        watch(run.folder, kill_at, writer)
        try:
            run.play()
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


def run_outcome(folder: Path) -> dict:
    """All that a training run leaves, without its clocks."""
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


def world_outcome(folder: Path) -> dict:
    """All that the training of a world model leaves, without its clocks."""
    assert finished(folder)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {
        "names": [str(path.relative_to(folder)) for path in files],
        "model": {
            str(path.relative_to(folder)): path.read_bytes()
            for path in files
            if path.suffix in (".safetensors", ".json") and path.name != "meta.json"
        },
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


def kill_run(kind: str, root: Path, tries: int) -> dict:
    """Kills a run at about ``tries`` of its changes, evenly spread; 0 is all of them."""
    torch.set_num_threads(1)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run = subject(kind, root)
        run.play()
    expected = run.outcome(run.folder)
    shutil.rmtree(run.folder)
    _, changes = attempt(run)
    assert equal(run.outcome(run.folder), expected)
    stride = max(1, len(changes) // tries) if tries else 1
    made, different = 0, []
    for kill_at in range(1, len(changes) + 1, stride):
        shutil.rmtree(run.folder)
        killed, _ = attempt(run, kill_at)
        assert killed
        attempt(run)
        made += 1
        if not equal(run.outcome(run.folder), expected):
            different.append(f"{kill_at}: {changes[kill_at - 1]}")
    in_place = sorted({change[1:] for change in changes if change.startswith("!")})
    return {"changes": len(changes), "tries": made, "different": different, "in_place": in_place}


def survive(tries: int, seed: int, kinds: Sequence[str] = ("ppo",)) -> dict[str, int]:
    """Kills a run of each kind at about ``tries`` of its changes, evenly spread.

    Returns:
        ``tries``, ``survived`` (the same command ended in the same state, bit for bit), and the
        number of ``changes`` to the disk.
    """
    total = {"tries": 0, "survived": 0, "changes": 0}
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.faults.kills", kind, folder, str(tries)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
        for line in found["different"] + found["in_place"]:
            print(f"{kind}: {line}", flush=True)
        total["tries"] += found["tries"]
        total["survived"] += 0 if found["in_place"] else found["tries"] - len(found["different"])
        total["changes"] += found["changes"]
    return total


if __name__ == "__main__":  # a process of its own: it forks, and an audit hook stays for good
    print(json.dumps(kill_run(sys.argv[1], Path(sys.argv[2]).resolve(), int(sys.argv[3]))))
