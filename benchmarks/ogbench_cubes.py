"""PA-RL, RLPD and FQL on OGBench's cubes from state, offline and then online.

    python benchmarks/ogbench_cubes.py --seeds 0 1 2                            both tasks, all methods
    python benchmarks/ogbench_cubes.py --tasks cube-single --methods fql --seeds 0
    python benchmarks/ogbench_cubes.py --tiny                                   whether it runs; no JSON

The data of a task are 100 episodes of OGBench's feedback oracle with noise on its actions, which nearly
always solves it, and 100 of its play, which moves cubes to random places and hardly ever does. Every
method starts from the same imitation policy of a seed, which imitated all of these data, and has the
same nets (two hidden layers of 256), chunks of five actions, batch size, gradient steps offline, env
steps online, and gradient steps per chunk there. PA-RL without the offline stage, and RLPD, only have
the second stage; RLPD draws half of each batch from the data, FQL draws from both alike. The rest is
each method's own: as its page says, or as in ``benchmarks/algorithms.py``.

Each run has one thread. Runs go to ``runs/bench/ogbench_cubes/TASK/SEED/METHOD`` and can be interrupted
and resumed; what is finished goes into ``benchmarks/ogbench_cubes.json``. Success is of the noise-free
policy on 100 initial states never trained on. The goal of cube-single is OGBench's second, its default:
the cube goes to another place. That of cube-double is its first: one of two cubes does. Of the second,
where both do, the imitation policy solved none of 80 episodes.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared import HERE, complete, evaluations, write

from embodyrl.config import resolve
from embodyrl.data.collect import collect_dataset
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.sims.ogbench.config import OGBenchConfig
from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/ogbench_cubes")
LOOKS = 2
"""Evaluations of the online stage."""


@dataclass(frozen=True)
class Task:
    """OGBench's goal, how many steps an episode may have, and how noisy recorded episodes are."""

    goal: int
    limit: int
    oracle_noise: float
    play_noise: float


TASKS = {"cube-single": Task(2, 120, 0.3, 0.3), "cube-double": Task(1, 120, 0.3, 0.3)}


@dataclass(frozen=True)
class Size:
    """How much of everything; ``TINY`` only shows that it runs."""

    episodes: int = 100  # of each kind
    imitation_steps: int = 3000
    offline_iterations: int = 50
    offline_steps: int = 6000
    critic_warmup: int = 1000  # of these, in which nothing is chosen yet (PA-RL)
    online_iterations: int = 100
    num_envs: int = 10
    num_chunks: int = 3
    warmup_chunks: int = 500
    capacity: int = 30_000
    eval_episodes: int = 100
    limit: int = 0  # of steps; 0 leaves the task's
    noise: float = 1.0  # times the task's


FULL = Size()
TINY = Size(
    episodes=4,
    imitation_steps=10,
    offline_iterations=4,
    offline_steps=12,
    critic_warmup=4,
    online_iterations=8,
    num_envs=2,
    num_chunks=4,
    warmup_chunks=30,
    capacity=2000,
    eval_episodes=4,
    limit=60,
    noise=0.0,
)
HORIZON = 5
NET = {
    "name": "flow_mlp",
    "horizon": HORIZON,
    "num_denoise_steps": 10,
    "velocity": "plain",
    "width": 256,
    "layers": 2,
    "squash": False,
}
COMMON = {"batch_size": 256, "gamma": 0.99}
SAC = {"entropy_backup": False, "entropy": "path", "alpha": 1e-3, "utd": 1.0}


@dataclass(frozen=True)
class Method:
    """One row of the table: its two stages, each None or the settings of an algorithm."""

    title: str
    online: dict[str, Any]
    offline: dict[str, Any] | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    reads_data: bool = False  # online


CHOOSER = {"chooser_width": 256}
PA_RL = {"name": "pa_rl", "critic_utd": 1.0, "actor_utd": 0.2}
METHODS = {
    "pa_rl": Method("PA-RL, online alone", PA_RL, policy=CHOOSER),
    "pa_rl_offline": Method(
        "PA-RL, offline, then online",
        PA_RL,
        {"name": "pa_rl_offline", "actor_share": 0.2},
        CHOOSER,
    ),
    "rlpd": Method(
        "RLPD, which imitates the data too",
        {"name": "rlpd", **SAC, "critic_warmup": 300, "lr": 1e-4, "bc_coef": 1.0},
        policy={"noise_min": 0.1, "noise_max": 0.5},
        reads_data=True,
    ),
    "rlpd_free": Method(
        "RLPD without imitation",
        {"name": "rlpd", **SAC, "critic_warmup": 1000, "lr": 5e-5, "bc_coef": 0.0},
        policy={"noise_min": 0.1, "noise_max": 0.5},
        reads_data=True,
    ),
    "fql": Method(
        "FQL of chunks (QC-FQL)",
        {"name": "fql", "utd": 1.0, "alpha": 1.0, "normalize_q": True},
        {},  # one run has both stages
        {"one_step_width": 256},
        reads_data=True,
    ),
}


def folder(task: str, seed: int, size: Size) -> Path:
    """Everything of a task and a seed."""
    return (OUT if size is FULL else OUT.with_name("ogbench_cubes_tiny")) / task / str(seed)


def env_of(task: str, size: Size, **more: Any) -> dict[str, Any]:
    """The env's section of a config."""
    limit = size.limit or TASKS[task].limit
    env = {"name": "ogbench", "task": task, "goals": [TASKS[task].goal], "num_envs": size.num_envs}
    return env | {"max_episode_steps": limit} | more


def record(task: str, size: Size) -> list[Path]:
    """The data sets of a task, which all seeds share."""
    found = []
    kinds = {"markov": TASKS[task].oracle_noise, "play": TASKS[task].play_noise}
    episodes = size.episodes
    for expert, noise in kinds.items():
        out = folder(task, 0, size).parent / f"data_{expert}"
        found.append(out)
        if out.exists():
            continue
        settings = env_of(task, size, expert=expert, goals=(TASKS[task].goal,))
        config = OGBenchConfig(**settings)
        noise *= size.noise
        collect_dataset(config, out, num_episodes=episodes, noise=noise, keep_failures=True)
    return found


def train(task: str, seed: int, name: str, size: Size, **sections: dict[str, Any]) -> None:
    """One run, or what is left of it."""
    where = folder(task, seed, size)
    if finished(where / name):
        return
    run = {
        "name": name,
        "out": str(where),
        "seed": seed,
        "eval_before": False,
        "eval_episodes": size.eval_episodes,
        "keep_checkpoints": 1,
        "device": "cpu",
        "threads": 1,
    }
    run |= sections.pop("run")
    run["checkpoint_every"] = run["eval_every"] or run["iterations"]
    complete(resolve({"env": env_of(task, size, seed=seed), "run": run, **sections}))


def data_of(task: str, size: Size) -> dict[str, Any]:
    """The data section: all episodes of both kinds."""
    first, *more = map(str, record(task, size))
    return {"path": first, "more": more, "keep": "all"}


def imitate(task: str, seed: int, size: Size) -> Path:
    """The policy that all methods start from."""
    iterations = 10
    steps = size.imitation_steps // iterations
    train(
        task,
        seed,
        "imitation",
        size,
        policy=NET,
        algorithm={"name": "sft", "steps_per_iteration": steps},
        data=data_of(task, size),
        run={"iterations": iterations, "eval_every": 0},
    )
    return folder(task, seed, size) / "imitation"


def online_algorithm(method: Method, size: Size) -> dict[str, Any]:
    """The settings of the online stage."""
    shared = ("num_chunks", "warmup_chunks", "capacity")
    return {**COMMON, **{key: getattr(size, key) for key in shared}, **method.online}


def measure(task: str, name: str, seed: int, size: Size) -> None:
    """One method with one seed: its stages, as far as they are not done."""
    method = METHODS[name]
    start = imitate(task, seed, size)
    policy = NET | method.policy
    data = {"data": data_of(task, size)} if method.reads_data else {}
    online = online_algorithm(method, size)
    looks = size.online_iterations // LOOKS
    iterations = size.online_iterations
    if name == "fql":
        # Both stages in one run, which looks between them too.
        steps = size.offline_steps // size.offline_iterations
        online |= {"offline_steps": size.offline_steps, "steps_per_iteration": steps}
        iterations += size.offline_iterations
    elif method.offline is not None:
        steps = (size.offline_steps - size.critic_warmup) // size.offline_iterations
        offline = {**COMMON, **method.offline, "steps_per_iteration": steps}
        offline |= {"critic_warmup": size.critic_warmup, "capacity": size.capacity}
        train(
            task,
            seed,
            f"{name}_first",
            size,
            policy=policy,
            algorithm=offline,
            data=data_of(task, size),
            run={
                "iterations": size.offline_iterations,
                "eval_every": 0,
                "init_checkpoint": str(start),
            },
        )
        start = folder(task, seed, size) / f"{name}_first"
    train(
        task,
        seed,
        name,
        size,
        policy=policy,
        algorithm=online,
        run={"iterations": iterations, "eval_every": looks, "init_checkpoint": str(start)},
        **data,
    )


def looks_of(task: str, name: str, seed: int, size: Size) -> list[dict[str, Any]]:
    """The evaluations of a method, from the imitation policy on; minutes are the method's own."""
    where = folder(task, seed, size)
    before = evaluations(where / "imitation")[-1] | {"stage": "imitation", "minutes": 0.0}
    first = evaluations(where / f"{name}_first")[-1:]
    spent = first[0]["minutes"] if first else 0.0
    online = [row | {"minutes": row["minutes"] + spent} for row in evaluations(where / name)]
    # What has taken no env step is offline.
    rows = [row | {"stage": "online" if row["env_steps"] else "offline"} for row in first + online]
    return [before, *rows]


def summarise(size: Size) -> dict[str, Any]:
    """What all runs that are finished came to, after those that the JSON has from elsewhere."""
    settings = {
        "tasks": {name: vars(task) for name, task in TASKS.items()},
        "size": vars(size),
        "policy": NET,
        "methods": {name: vars(method) | COMMON for name, method in METHODS.items()},
    }
    settings = json.loads(json.dumps(settings))
    path = HERE / "ogbench_cubes.json"
    earlier = json.loads(path.read_text()) if path.exists() and size is FULL else {}
    runs = dict(earlier.get("runs", {})) if earlier.get("settings") == settings else {}
    for task in TASKS:
        for where in sorted(folder(task, 0, size).parent.glob("[0-9]*")):
            for name in METHODS:
                if finished(where / name):
                    commit = json.loads((where / name / "meta.json").read_text())["commit"]
                    looks = looks_of(task, name, int(where.name), size)
                    runs[f"{task}/{name}/{where.name}"] = {"commit": commit, "evaluations": looks}
    tasks: dict[str, Any] = {}
    for task in TASKS:
        for name, method in METHODS.items():
            mine = [runs[key] for key in sorted(runs) if key.startswith(f"{task}/{name}/")]
            if mine:
                tasks.setdefault(task, {})[name] = {
                    "title": method.title,
                    "seeds": len(mine),
                    "iqm": summary([run["evaluations"] for run in mine]),
                    "minutes": [run["evaluations"][-1]["minutes"] for run in mine],
                }
    return {"settings": settings, "tasks": tasks, "runs": runs}


def summary(curves: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Interquartile means over seeds with bootstrap intervals: where it began, and each stage's end."""
    found = {}
    for stage in ("imitation", "offline", "online"):
        last = [[row["success"] for row in curve if row["stage"] == stage] for curve in curves]
        if all(last):
            found[stage] = bootstrap_iqm([values[-1] for values in last])
    return found


def main() -> None:
    """Runs what is not finished, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=[*TASKS], choices=[*TASKS])
    parser.add_argument("--methods", nargs="+", default=[*METHODS], choices=[*METHODS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tiny", action="store_true", help="a few steps of each, and no JSON")
    a = parser.parse_args()
    size = TINY if a.tiny else FULL
    for seed in a.seeds:  # a first seed of everything, then more
        for task in a.tasks:
            for name in a.methods:
                measure(task, name, seed, size)
                found = summarise(size)
                if size is FULL:
                    write("ogbench_cubes", found)
                print(task, name, seed, found["tasks"][task][name]["iqm"], flush=True)


if __name__ == "__main__":
    main()
