"""How long a command is silent, and how long it takes until it works: before and after, cold and warm.

    git worktree add /tmp/before COMMIT && (cd /tmp/before && make setup)
    python benchmarks/starts.py --before /tmp/before          writes starts.json, draws starts.png
    python benchmarks/starts.py --repeats 1 --only train      one command, this checkout alone

Both checkouts are measured in turn, in one run. With ``--cold`` they are also measured once with the
machine's page cache emptied before each command (needs root): then every file, of Python, of PyTorch and
of the run, is read from the disk again. Compiled bytecode and kernels lie on that disk in both cases, as
after a reboot. Every command is a new process, and those of a round share one new folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from figures import draw_json

from embodyrl.storage.provenance import git_commit, hardware, versions

ROOT = Path(__file__).parents[1]
SMALL = [
    "run.iterations=1", "run.init_checkpoint=", "run.eval_before=false", "run.eval_episodes=4",
    "run.videos=0", "algorithm.num_chunks=2", "env.num_envs=8", "run.out=OUT",
]  # fmt: skip
PLAYED = r"  1/1  |^writing .*100%|: \d+% \[|http://|^Done"
COMMANDS = {
    "train (mujoco, pictures)": ["train", "mujoco_pick_ppo", *SMALL],
    "train again (finished)": ["train", "mujoco_pick_ppo", *SMALL],
    "eval": ["eval", "OUT/mujoco_pick_ppo"],
    "collect": ["collect", "mujoco", "env.task=reach", "--episodes", "2", "--out", "OUT/data"],
    "train (maniskill, workers)": ["train", "maniskill_pickcube_ppo", *SMALL],
    "world play": ["world", "play", "WORLD"],
}
"""Name -> arguments. OUT is a folder that the commands of one round share."""
WORLD_STEPS = (
    ["collect", "mujoco", "env.task=reach", "env.max_episode_steps=20", "--episodes", "40",
     "--noise", "2", "--keep-failures", "--past-success", "3", "--out", "OUT/hasty"],
    ["world", "train", "data=[OUT/hasty]", "out=OUT/world", "steps=2", "codec_steps=2",
     "inverse_steps=2", "width=32", "layers=1", "heads=2"],
)  # fmt: skip


def measure(checkout: Path, arguments: list[str]) -> dict[str, float]:
    """Seconds until the first line, until the first work is done, and until the end.

    Raises:
        RuntimeError: the command failed before it had worked.
    """
    began = time.monotonic()
    found: dict[str, float] = {}
    said = []
    with subprocess.Popen(
        [str(checkout / ".venv/bin/python"), "-m", "embodyrl.cli", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        bufsize=1,
        cwd=checkout,  # where Python looks first
        env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(checkout)},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            found.setdefault("first_line", time.monotonic() - began)
            if re.search(PLAYED, line):
                found.setdefault("first_work", time.monotonic() - began)
                if "http://" in line:
                    process.terminate()
        process.wait()
    found["end"] = time.monotonic() - began
    if "first_work" not in found:
        raise RuntimeError(f"{checkout} {' '.join(arguments)} failed:\n{''.join(said[-20:])}")
    return {name: round(seconds, 2) for name, seconds in found.items()}


def small_world(folder: str) -> str:
    """A world model of 40 hasty episodes and two training steps; both checkouts play it."""
    for arguments in WORLD_STEPS:
        said = [a.replace("OUT", folder) for a in arguments]
        subprocess.run(
            [ROOT / ".venv/bin/python", "-m", "embodyrl.cli", *said]
        )  # its judge is no good: exit 1
    return f"{folder}/world/model"


def empty_page_cache() -> bool:
    """Whether the machine has now forgotten what it had read from disk."""
    try:
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def rounds(
    checkouts: dict[str, Path], names: list[str], repeats: int, world: str, cold: bool
) -> dict[str, dict[str, dict[str, list[dict[str, float]]]]]:
    """Command -> cold or warm -> checkout -> measurements; the checkouts take turns."""
    result: dict[str, Any] = {name: {} for name in names}
    for state in ("cold", "warm") if cold else ("warm",):
        for number in range(1 if state == "cold" else repeats):
            for which, checkout in checkouts.items():
                out = tempfile.mkdtemp(prefix="starts")
                for name in names:
                    if state == "cold" and not empty_page_cache():
                        continue
                    arguments = [
                        a.replace("OUT", out).replace("WORLD", world) for a in COMMANDS[name]
                    ]
                    row = measure(checkout, arguments)
                    result[name].setdefault(state, {}).setdefault(which, []).append(row)
                    print(f"{state} {number} {which:7s} {name}: {row}", flush=True)
                shutil.rmtree(out)
    return result


def summary(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians of the measurements of one kind."""
    return {key: statistics.median(row[key] for row in rows) for key in rows[0]}


def _commit_of(checkout: str) -> str:
    """The commit of another checkout, in 12 digits."""
    command = ["git", "-C", checkout, "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """Measures, writes the JSON and draws it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", default="", help="another checkout, set up like this one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="also with an empty page cache")
    parser.add_argument("--only", default="", help="a pattern: the commands whose name it fits")
    parser.add_argument("--out", default=str(ROOT / "benchmarks" / "starts.json"))
    a = parser.parse_args()
    checkouts = {"after": ROOT}
    if a.before:
        checkouts = {"before": Path(a.before).resolve(), **checkouts}
    names = [name for name in COMMANDS if re.search(a.only, name)]
    with tempfile.TemporaryDirectory() as folder:
        world = small_world(folder) if "world play" in names else ""
        found = rounds(checkouts, names, a.repeats, world, a.cold)
    for states in found.values():
        for state in states.values():
            for which, rows in state.items():
                state[which] = {"median": summary(rows), "all": rows}  # type: ignore[assignment]
    payload = {
        "commit": git_commit(),
        "before": _commit_of(a.before) if a.before else "",
        "load": list(os.getloadavg()),
        "hardware": hardware(),
        "versions": versions(),
        "bytecode": "forbidden" if os.environ.get("PYTHONDONTWRITEBYTECODE") else "allowed",
        "commands": {name: " ".join(COMMANDS[name]) for name in names},
        "seconds": found,
    }
    Path(a.out).write_text(json.dumps(payload, indent=1) + "\n")
    draw_json(Path(a.out), "starts")


if __name__ == "__main__":
    main()
