"""Which algorithm to take inside a dream: one world model, one imitated policy, as many minutes for each.

    python benchmarks/imagination.py --beside --seeds 0 1 2      # first: the world models and the imitated policies
    python benchmarks/dream_algorithms.py --seeds 0 1 2
    python benchmarks/dream_algorithms.py --seeds 0 --algorithms ppo grpo --minutes 5

Every run starts from the imitated policy of ``--worlds``/SEED, in dreams of the world model that
the loop trained there, has one thread, and ends after ``--minutes`` of training. Success is of the
noise-free policy in the simulator, on initial states that neither policy nor world model has seen.
Runs go to ``runs/bench/dream_algorithms``, can be interrupted and resumed; what is finished goes
into ``benchmarks/dream_algorithms.json`` and
``docs/images/dream_algorithms.png``.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass
from pathlib import Path

from figures import draw_json
from shared import HERE, complete, gathered, write

from embodyrl.config import Config, compose
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.storage.loggers import read_metrics
from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/dream_algorithms")


@dataclass(frozen=True)
class Algorithm:
    """A line of the figure: a preset and its overrides; ``every`` iterations there is an evaluation."""

    title: str
    preset: str
    every: int
    overrides: tuple[str, ...] = ()
    demos: bool = False


HIDDEN = "policy.critic=privileged"
"""Critics read the state that the model predicts, as it learned it of the simulator: an upper bound."""
ALGORITHMS = {
    "sac_flow": Algorithm(
        "SAC-Flow, with demonstrations", "dream_sac_flow", 40, (HIDDEN,), demos=True
    ),
    "sac_flow_mixed": Algorithm(
        "the same, 8 of 64 envs real", "dream_sac_flow", 40, (HIDDEN, "env.real_envs=8"), demos=True
    ),
    "ppo": Algorithm("PPO", "dream_ppo", 10, (HIDDEN,)),
    "grpo": Algorithm("GRPO", "dream_grpo", 10),
    "sac_flow_follow": Algorithm(
        "SAC-Flow, dreams that stray have "
        "failed", "dream_sac_flow", 40, (HIDDEN, "env.follow=true"), demos=True
    ),
}  # fmt: skip


def begin(
    a: Algorithm,
    world: Path,
    out: Path,
    name: str,
    seed: int,
    minutes: float,
    more: tuple[str, ...] = (),
) -> Config:
    """The config of one algorithm with one seed, in the last world model of a loop.

    Args:
        a: what is run.
        world: folder of ``imagination.py`` with this seed.
        out: where runs go.
        name: of the algorithm; the run is ``NAME_SEED``.
        seed: of the run.
        minutes: of training.
        more: overrides, the last ones.
    """
    rounds = (world / "loop").glob("round_*")
    newest = max(rounds, key=lambda folder: int(folder.name.split("_")[1]))
    model = newest / "world" / "model"
    data = [f"data.path={world / 'demos'}", f"data.codec={model}"] if a.demos else []
    settings = [
        f"env.model={model}", f"env.seed={seed}", f"run.seed={seed}", f"run.init_checkpoint={world / 'sft'}",
        f"run.out={out}", f"run.name={name}_{seed}", f"run.minutes={minutes}", "run.iterations=100000",
        f"run.eval_every={a.every}", f"run.checkpoint_every={a.every}", "run.keep_checkpoints=1", "run.videos=0",
        "run.threads=1",
    ]  # fmt: skip
    return compose(a.preset, [*a.overrides, *data, *settings, *more])


def summary(
    benchmark: str, known: dict[str, Algorithm], out: Path, settings: dict, where: Path = HERE
) -> dict:
    """JSON and figure of all runs that are finished; what the JSON says of each algorithm."""
    folders = {"/".join(p.name.rsplit("_", 1)): p for p in sorted(out.glob("*_[0-9]*"))}
    runs = gathered(benchmark, settings, folders)
    for key, folder in folders.items():
        if key in runs:
            rows = [
                row for row in read_metrics(folder / "metrics.jsonl") if row.get("train_episodes")
            ][-10:]
            episodes = sum(row["train_episodes"] for row in rows)
            solved = sum(r["train_success"] * r["train_episodes"] for r in rows)
            runs[key]["success_while_dreaming"] = solved / episodes if episodes else None
    algorithms = {}
    for name, algorithm in known.items():
        found = [run for key, run in runs.items() if key.rsplit("/", 1)[0] == name]
        if not found:
            continue
        curves = [run["evaluations"] for run in found]
        dreaming = [run["success_while_dreaming"] for run in found]
        dreaming = [success for success in dreaming if success is not None]
        algorithms[name] = {
            "title": algorithm.title,
            "seeds": len(found),
            "before": bootstrap_iqm([c[0]["success"] for c in curves]),
            "after": bootstrap_iqm([c[-1]["success"] for c in curves]),
            "dreaming": statistics.mean(dreaming) if dreaming else None,
            "env_steps": [c[-1]["env_steps"] for c in curves],
            "minutes": [c[-1]["minutes"] for c in curves],
        }
    write(benchmark, {"settings": settings, "algorithms": algorithms, "runs": runs}, where)
    if algorithms:
        draw_json(where / f"{benchmark}.json", "dreams")
    return algorithms


def main() -> None:
    """Runs what is not finished, then writes JSON and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--worlds",
        type=Path,
        default=Path("runs/imagination/mujoco_pick"),
        help="of imagination.py",
    )
    parser.add_argument(
        "--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS)
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=10.0, help="of training")
    a = parser.parse_args()
    settings = {"minutes": a.minutes}
    for seed in a.seeds:
        for name in a.algorithms:
            if not finished(OUT / f"{name}_{seed}"):
                world = a.worlds / str(seed)
                complete(begin(ALGORITHMS[name], world, OUT, name, seed, a.minutes))
                summary("dream_algorithms", ALGORITHMS, OUT, settings)
    for name, entry in summary("dream_algorithms", ALGORITHMS, OUT, settings).items():
        print(
            name,
            entry["before"],
            entry["after"],
            entry["dreaming"],
            entry["env_steps"],
            entry["minutes"],
        )


if __name__ == "__main__":
    main()
