"""How long the first things that people type take: importing the package, ``--help``, a preset that does not exist.

    python benchmarks/startup.py

Each command runs in a fresh process, after one run that fills the file cache; writes
``benchmarks/startup.json``.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from embodyrl.storage.provenance import hardware, versions

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import embodyrl": ["-c", "import embodyrl"],
    "embodyrl --help": ["-m", "embodyrl.cli", "--help"],
    "embodyrl train no_such_preset": ["-m", "embodyrl.cli", "train", "no_such_preset"],
    "embodyrl train mujoco_pick_sft --dry-run": [
        "-m",
        "embodyrl.cli",
        "train",
        "mujoco_pick_sft",
        "--dry-run",
    ],
}
REPEATS = 7


def seconds(arguments: list[str]) -> list[float]:
    """Wall-clock seconds of each run but the first."""
    out = []
    for _ in range(REPEATS + 1):
        began = time.perf_counter()
        subprocess.run([sys.executable, *arguments], capture_output=True, check=False)
        out.append(time.perf_counter() - began)
    return sorted(out[1:])


def main() -> None:
    """Measures all commands."""
    result = {}
    for name, arguments in COMMANDS.items():
        times = seconds(arguments)
        result[name] = {"median_s": statistics.median(times), "min_s": times[0], "max_s": times[-1]}
        print(
            f"{name:45s} {result[name]['median_s']:.2f} s  [{times[0]:.2f}, {times[-1]:.2f}]",
            flush=True,
        )
    payload = {"commands": result, "versions": versions(), "hardware": hardware()}
    Path(__file__).with_suffix(".json").write_text(json.dumps(payload, indent=1))


if __name__ == "__main__":
    main()
