"""A small policy that says its actions in tokens: imitation, then PPO, GRPO and PA-RL, by decoding.

    python benchmarks/token_policies.py --seeds 0 1 2                          all runs
    python benchmarks/token_policies.py --decodings parallel --algorithms grpo --seeds 0
    python benchmarks/token_policies.py --tiny                                 whether it runs; no JSON

The task is the quickstart's: pick up the block that a sentence names, from pixels, after 100
demonstrations. All presets are ``mujoco_pick_tokens_*``; no critic reads hidden state. For each
decoding and seed there is one imitation policy, from which each algorithm starts. A masked policy
edits its draft, and is scored without its edits too. Each run has one thread; PPO and GRPO take
200,000 env steps, PA-RL 75,000. Runs go to ``runs/bench/token_policies/DECODING/SEED`` and can be
interrupted and resumed; what is finished goes into ``benchmarks/token_policies.json`` and
``docs/images/token_policies.png``. Success is of the noise-free policy on 256 initial states never
trained on.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import draw_json
from shared import HERE, complete, gathered, scored, write

from embodyrl.config import compose
from embodyrl.data.collect import collect_dataset
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/token_policies")
DECODINGS = {
    "parallel": ("policy.decoding=parallel",),
    "autoregressive": ("policy.decoding=autoregressive",),
    "masked": ("policy.decoding=masked", "policy.draft_steps=3", "policy.edit_steps=1"),
}


@dataclass(frozen=True)
class Algorithm:
    """A line of the figure: its preset, env steps, and roughly how many an iteration takes."""

    title: str
    env_steps: int
    steps: int
    demos: bool = False


ALGORITHMS = {
    "ppo": Algorithm("PPO", 200_000, 4900),
    "grpo": Algorithm("GRPO", 200_000, 4000),
    "pa_rl": Algorithm("PA-RL", 75_000, 1280, demos=True),
}
EDITS = "masked_edits"
"""Run of the table: the same policies with and without their edits."""


@dataclass(frozen=True)
class Size:
    """How much of everything; ``TINY`` only shows that it runs."""

    demos: int = 100
    looks: int = 3  # evaluations of RL
    eval_episodes: int = 256
    more: tuple[str, ...] = ()  # of every run
    of: tuple[tuple[str, tuple[str, ...]], ...] = ()  # of an algorithm's


FULL = Size()
TINY = Size(
    demos=4,
    looks=1,
    eval_episodes=4,
    more=("env.num_envs=4", "policy.width=16", "policy.heads=2", "policy.layers=1"),
    of=(
        ("sft", ("run.iterations=1", "algorithm.steps_per_iteration=2", "algorithm.batch_size=4")),
        ("ppo", ("algorithm.num_chunks=2", "algorithm.warmup_iterations=0")),
        ("grpo", ("algorithm.num_episodes=8", "algorithm.group_size=4", "algorithm.max_rounds=1")),
        (
            "pa_rl",
            (
                "algorithm.warmup_chunks=8",
                "algorithm.capacity=200",
                "algorithm.critic_warmup=2",
                "algorithm.mc_steps=1",
                "algorithm.hindsight_steps=2",
                "algorithm.batch_size=8",
                "algorithm.actor_batch_size=8",
                "algorithm.num_chunks=16",
            ),
        ),
    ),
)


def folder(size: Size) -> Path:
    """Everything."""
    return OUT if size is FULL else OUT.with_name("token_policies_tiny")


def train(decoding: str, algorithm: str, seed: int, size: Size, *given: str) -> Path:
    """One run, or what is left of it; returns its folder."""
    where = folder(size) / decoding / str(seed)
    if not finished(where / algorithm):
        overrides = [f"run.out={where}", f"run.name={algorithm}", f"run.seed={seed}"]
        overrides += [f"env.seed={seed}", "run.device=cpu", "run.threads=1", "run.videos=0"]
        overrides += [f"run.eval_episodes={size.eval_episodes}", "run.keep_checkpoints=1"]
        overrides += [*DECODINGS[decoding], *size.more, *dict(size.of).get(algorithm, ()), *given]
        complete(compose(f"mujoco_pick_tokens_{algorithm}", overrides))
    return where / algorithm


def demonstrations(seed: int, size: Size) -> Path:
    """The demonstrations of a seed, which all decodings share."""
    out = folder(size) / f"demos_{seed}"
    if not out.exists():
        env = compose("mujoco_pick_tokens_sft", [f"env.seed={seed}", *size.more]).env
        collect_dataset(env, out, num_episodes=size.demos, noise=0.15, seed=seed)
    return out


def edits(run: Path, size: Size) -> dict[str, list[float]]:
    """Successes of a masked policy that edits its draft, and of the same without edits."""
    given = ("--episodes", str(size.eval_episodes))
    return {
        "edited": scored(run, run / "edited.json", *given),
        "draft": scored(run, run / "draft.json", *given, "policy.edit_steps=0"),
    }


def summarise(settings: dict[str, Any], size: Size) -> dict[str, Any]:
    """JSON and figure of all runs that are finished."""
    folders = {}
    for path in sorted(folder(size).glob("*/[0-9]*/*/")):
        decoding, seed, name = path.parts[-3:]
        if name in ALGORITHMS:
            folders[f"{decoding}/{name}/{seed}"] = path
    runs = gathered("token_policies", settings, folders)
    tasks: dict[str, Any] = {}
    for decoding in DECODINGS:
        for name, algorithm in ALGORITHMS.items():
            key = f"{decoding}/{name}/"
            curves = [run["evaluations"] for run_key, run in runs.items() if key in run_key]
            if not curves:
                continue
            tasks.setdefault(decoding, {})[name] = {
                "title": algorithm.title,
                "seeds": len(curves),
                "before": bootstrap_iqm([c[0]["success"] for c in curves]),
                "after": bootstrap_iqm([c[-1]["success"] for c in curves]),
                "env_steps": [c[-1]["env_steps"] for c in curves],
                "minutes": [c[-1]["minutes"] for c in curves],
            }
    found: dict[str, Any] = {"settings": settings, "tasks": tasks, "runs": runs}
    for path in sorted(folder(size).glob("masked/[0-9]*/*/draft.json")):
        of = found.setdefault(EDITS, {}).setdefault(path.parent.name, {"seeds": {}})
        of["seeds"][path.parts[-3]] = edits(path.parent, size)
    if size is FULL:
        write("token_policies", found)
        draw_json(HERE / "token_policies.json", "algorithms")
    return found


def main() -> None:
    """Runs what is not finished, then writes JSON and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decodings", nargs="+", default=[*DECODINGS], choices=[*DECODINGS])
    parser.add_argument("--algorithms", nargs="+", default=[*ALGORITHMS], choices=[*ALGORITHMS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tiny", action="store_true", help="whether it runs; writes no JSON")
    a = parser.parse_args()
    size = TINY if a.tiny else FULL
    settings = {"env_steps": {name: of.env_steps for name, of in ALGORITHMS.items()}}
    for seed in a.seeds:  # a first seed of everything, then more
        demos = demonstrations(seed, size)
        for decoding in a.decodings:
            sft = train(decoding, "sft", seed, size, f"data.path={demos}")
            for name in a.algorithms:
                of = ALGORITHMS[name]
                every = 1 if a.tiny else max(1, round(of.env_steps / of.steps / size.looks))
                given = [f"run.init_checkpoint={sft}", f"run.iterations={every * size.looks}"]
                given += [f"run.eval_every={every}", f"run.checkpoint_every={every}"]
                given += [f"data.path={demos}"] if of.demos else []
                run = train(decoding, name, seed, size, *given)
                if decoding == "masked":
                    edits(sft, size)
                    edits(run, size)
                summarise(settings, size)
    for decoding, lines in summarise(settings, size)["tasks"].items():
        for name, entry in lines.items():
            print(decoding, name, entry["before"], entry["after"], entry["env_steps"])


if __name__ == "__main__":
    main()
