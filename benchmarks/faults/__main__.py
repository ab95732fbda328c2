"""Tries faults, piece by piece, and counts what was survived: ``make faults``.

    python -m benchmarks.faults                  # every piece, one after the other
    python -m benchmarks.faults ports --tries 50 # one piece
    python -m benchmarks.faults --list

The counts go into ``benchmarks/faults.json``, next to those of other pieces, and into the table of
``docs/security.md``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from typing import Any

from benchmarks.shared import HERE
from embodyrl.storage.provenance import git_commit, hardware

PIECES = {
    "arm": ("a filter with hostile targets or bad numbers", 1000),
    "learner": ("a bad message from an actor", 500),
    "parsers": ("nonsense for one of fifteen parsers", 20_000),
    "ports": ("a request from nowhere, without a token, or malformed", 4000),
    "files": ("a changed checkpoint or run, signed anew", 1000),
    "worlds": ("a changed world model or reflector", 400),
    "kills": ("a kill before a change to the disk, in a PPO run", 76),
    "kills-replay": ("the same: SAC-Flow with its replay buffer and films", 20),
    "kills-sft": ("the same: imitation of a data set", 20),
    "kills-world": ("the same: the training of a world model", 20),
    "disk": ("a full disk during training", 40),
    "workers-mujoco": ("a worker that is killed, stopped or crashes", 20),
    "workers-gymnasium": ("the same", 20),
    "workers-maniskill": ("the same", 20),
    "workers-libero": ("the same", 20),
    "rows-simulators": ("a row's test: an env or a worker breaks", 20),
    "rows-dreams": ("a row's test: a dream or a judge breaks", 20),
    "rows-saving": ("a row's test: kills while a checkpoint is saved", 20),
    "rows-checkpoints": ("a row's test: a full disk, damage, resuming", 20),
    "rows-runs": ("a row's test: Ctrl-C or a kill in a run", 20),
    "rows-robot": ("a row's test: a robot's faults", 20),
}
"""Name -> what one try is, and how many are made."""


def piece(name: str) -> Any:
    """The function of a piece: (tries, seed) to counts, ``tries`` and ``survived`` among them."""
    module, _, part = name.partition("-")
    module = {"workers": "env"}.get(module, module)
    survive = importlib.import_module(f"benchmarks.faults.{module}").survive
    return (lambda tries, seed: survive(tries, seed, [part])) if part else survive


def run(name: str, tries: int, seed: int) -> dict[str, Any]:
    """The counts of one piece; one that ends early has survived none."""
    began = time.monotonic()
    try:
        counts = piece(name)(tries, seed)
    except Exception:
        traceback.print_exc()
        counts = {"tries": tries, "survived": 0}
    seconds = round(time.monotonic() - began)
    return {"one try": PIECES[name][0], **counts, "seconds": seconds, "seed": seed}


def write(found: dict[str, Any]) -> None:
    """The JSON, and the table of the docs."""
    (HERE / "faults.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = ["<!-- from: benchmarks/faults.json -->", ""]
    lines += ["| Piece | One try | Tries | Survived | Seconds |", "| --- | --- | --- | --- | --- |"]
    for name in (name for name in PIECES if name in found["pieces"]):
        row = found["pieces"][name]
        cells = (name, row["one try"], f"{row['tries']:,}", f"{row['survived']:,}", row["seconds"])
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    page = HERE.parent / "docs" / "security.md"
    begin, end = (f"<!-- measured: {word} -->\n" for word in ("begin", "end"))
    before, _, rest = page.read_text().partition(begin)
    after = rest.partition(end)[2]
    page.write_text(before + begin + "\n".join(lines) + "\n" + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", metavar="PIECE", help="all of them if none is given")
    parser.add_argument("--tries", type=int, help="instead of the piece's own number")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--list", action="store_true", help="say what the pieces are")
    a = parser.parse_args()
    if a.list:
        print("\n".join(f"{name:18} {tries:6} x {what}" for name, (what, tries) in PIECES.items()))
        return
    if unknown := set(a.pieces) - set(PIECES):
        parser.error(f"no piece {', '.join(sorted(unknown))}; see --list")
    path = HERE / "faults.json"
    commit = git_commit()  # before this program's own files change
    lost = 0
    for name in a.pieces or PIECES:
        counts = run(name, a.tries or PIECES[name][1], a.seed)
        lost += counts["tries"] - counts["survived"]
        print(f"{name}: {json.dumps(counts)}", flush=True)
        found = json.loads(path.read_text()) if path.exists() else {"pieces": {}}
        found["pieces"][name] = {**counts, "commit": commit}
        found["hardware"] = hardware()
        write(found)
    sys.exit(1 if lost else 0)


if __name__ == "__main__":
    main()
