"""What three rounds of a dream's choice, imitated, are worth from pictures alone; and without a dream.

    python benchmarks/dream_rounds.py --seeds 0 1 2
    python benchmarks/dream_rounds.py --seeds 0 --parts dream                 # without the controls
    python benchmarks/dream_rounds.py --tiny --out /tmp/tried                 # minutes, for nothing

Each seed: demonstrations and imitation (as in the quickstart); ``embodyrl world loop
mujoco_pick_seen``, whose world models find their state in pictures; and, from the same policy, two
controls in which the policy acts alone and imitates what it solves: ``same_imitation`` with as many
episodes as the dream chose in, ``same_episodes`` with as many as the loop recorded in all. On 256
held-out states the policy of every round is scored, alone and with the choice of that round's model.
Nothing privileged is in model, critic or policy. Every piece is kept in ``OUT/SEED``, so the same
command goes on. The result is ``benchmarks/dream_rounds.json``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dream_chooser import collect, frames, score
from imagination import embodyrl
from shared import HERE, write

from embodyrl.dreams.gate import GateClosed
from embodyrl.dreams.loop_config import read_loop
from embodyrl.functional.intervals import bootstrap_iqm, format_rate

PARTS = ("dream", "same_imitation", "same_episodes")
FULL = {"demos": 100, "episodes": 256, "env": "pick", "sft": [], "loop": []}
TINY = {
    "demos": 30, "episodes": 16, "env": "reach",
    "sft": ["run.iterations=1", "run.eval_episodes=8", "algorithm.steps_per_iteration=400",
            "algorithm.batch_size=128"],
    "loop": [
        "rounds=2", "first_episodes=20", "episodes=16", "chosen=12", "select_episodes=8",
        "eval_episodes=16", "segment=1", "segments=1", "gate=warn", "gate_states=16",
        "world=[found=true,frames=false,found_steps=20,state_steps=40,held_out=0.3]",
        "refresh=[found_steps=5,state_steps=10,held_out=0.3]",
        "imitate_overrides=[algorithm.steps_per_iteration=5,algorithm.batch_size=16]",
        "env_overrides=[env.task=reach,env.num_envs=8]",
    ],
}  # fmt: skip


def loop(folder: Path, name: str, seed: int, size: dict[str, Any]) -> dict[str, Any]:
    """A loop's record; ``closed`` says that none of its models passed the gate."""
    demos, sft, out = folder / "demos", folder / "sft", folder / name
    given = [f"policy={sft}", f"demos={demos}", f"data=[{demos}]", f"out={out}", f"seed={seed}"]
    given += size["loop"]
    config = read_loop("mujoco_pick_seen", given)
    later = (config.rounds - 1) * config.episodes
    every = config.first_episodes + later + config.rounds * config.chosen
    alone = {"same_imitation": config.chosen, "same_episodes": every // config.rounds}
    if name in alone:
        given += ["proposals=1", f"chosen={alone[name]}"]
    command = ["world", "loop", "mujoco_pick_seen", *given]
    minutes = time.monotonic()
    status = subprocess.run(
        [sys.executable, "-m", "embodyrl.cli", *command], check=False
    ).returncode
    if status not in (0, GateClosed.status):
        raise SystemExit(f"{folder}: stopped at {name}, see above. The same command goes on.")
    print(f"{folder} {name}: {(time.monotonic() - minutes) / 60:.1f} minutes", flush=True)
    book = json.loads((out / "loop.json").read_text())
    return book | {"closed": status != 0}


def rounds(folder: Path, name: str, book: dict[str, Any], episodes: int) -> list[dict[str, Any]]:
    """Before every round, and after the last: the policy, alone and with that round's choice."""
    chosen = list(book.get("chosen", {}).values())
    if not chosen:
        return []
    last = {"checkpoint": book["best"], "model": chosen[-1]["model"]}
    found: list[dict[str, Any]] = []
    for number, one in enumerate([*chosen, last]):
        row = {"alone": evaluated(folder, f"{name}_{number}", one["checkpoint"], episodes)}
        if one["model"]:
            key = f"{name}_{number}_choice"
            given = ("--dream", one["model"])
            row["choice"] = evaluated(folder, key, one["checkpoint"], episodes, *given)
        found.append(row)
    return found


def evaluated(
    folder: Path, key: str, checkpoint: str, episodes: int, *given: str
) -> dict[str, Any]:
    """A checkpoint's score on held-out states, kept with what was scored."""
    path = folder / "scores" / f"{key}.json"
    path.parent.mkdir(exist_ok=True)
    asked = [checkpoint, *given]
    if path.exists() and (known := json.loads(path.read_text()))["asked"] == asked:
        return known["score"]
    command = ("eval", *asked, "--episodes", str(episodes), "--json")
    result = score(json.loads(embodyrl(folder, "scores_seen", *command, capture=True)))
    path.write_text(json.dumps({"asked": asked, "score": result}))
    return result


def run(folder: Path, seed: int, size: dict[str, Any], parts: list[str]) -> dict[str, Any]:
    """One seed, or what is left of it."""
    folder.mkdir(parents=True, exist_ok=True)
    careful = ("--noise", "0.15", "--seed", str(seed), f"env.task={size['env']}")
    demos = collect(folder, "demos", size["demos"], *careful)
    common = [f"run.out={folder}", f"run.seed={seed}", f"env.seed={seed}", "run.name=sft"]
    common += [f"env.task={size['env']}", "policy.critic=shared", f"data.path={demos}"]
    embodyrl(folder, "sft", "train", "mujoco_pick_sft", *common, *size["sft"])
    result: dict[str, Any] = {"seed": seed, "demonstrated_steps": frames(demos), "parts": {}}
    for name in parts:
        book = loop(folder, name, seed, size)
        keys = ("closed", "minutes", "gates", "chosen", "real_steps", "eval_steps", "gate_steps")
        result["parts"][name] = {key: book[key] for key in keys if key in book} | {
            "looks": book.get("rounds", {}),
            "rounds": rounds(folder, name, book, size["episodes"]),
        }
    return result


def iqm(seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """Part -> round -> alone or choice -> interquartile mean over seeds and its bootstrap interval."""
    found: dict[str, Any] = {}
    for part in PARTS:
        rows = [seed["parts"][part]["rounds"] for seed in seeds if part in seed["parts"]]
        rows = [row for row in rows if row]
        for number in range(min(map(len, rows), default=0)):
            for kind in ("alone", "choice"):
                scores = [row[number][kind] for row in rows if kind in row[number]]
                if scores:
                    rates = [s["successes"] / s["episodes"] for s in scores]
                    found.setdefault(part, {}).setdefault(str(number), {})[kind] = bootstrap_iqm(
                        rates
                    )
    return found


def main() -> None:
    """Runs seeds, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("runs/dream_rounds"))
    text = "so small that it means nothing; the result stays in --out"
    parser.add_argument("--tiny", action="store_true", help=text)
    a = parser.parse_args()
    where = (a.out if a.tiny else HERE) / "dream_rounds.json"
    for seed in a.seeds:
        done = run(a.out / str(seed), seed, TINY if a.tiny else FULL, a.parts)
        # Other seeds and parts may have been written meanwhile.
        rows = json.loads(where.read_text())["seeds"] if where.exists() else []
        known = {row["seed"]: row for row in rows}
        earlier = known.get(seed, {}).get("parts", {})
        known[seed] = done | {"parts": earlier | done["parts"]}
        for name, part in done["parts"].items():
            for number, row in enumerate(part["rounds"]):
                said = (f"{k} {format_rate(s['successes'], s['episodes'])}" for k, s in row.items())
                print(f"seed {seed}, {name}, after {number} rounds: {', '.join(said)}")
        seeds = [known[k] for k in sorted(known)]
        result = {"seeds": seeds, "iqm": iqm(seeds)}
        if a.tiny:
            where.write_text(json.dumps(result, indent=1))
        else:
            write("dream_rounds", result)


if __name__ == "__main__":
    main()
