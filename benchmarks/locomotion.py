"""SAC-Flow on MuJoCo locomotion: the entropy of the action or of the path, the published density, and plain SAC.

    python benchmarks/locomotion.py                       # 4 variants, 2 envs, 3 seeds, 200,000 steps each
    python benchmarks/locomotion.py --jobs 2              # two runs side by side, one thread each
    python benchmarks/locomotion.py --speed               # env steps/s and updates/s of this machine, nothing else

Variants have equal width and settings. ``published`` leaves -log(std) out of the path's density, as
the authors' Flow-T does; it exists here alone. Runs go to ``runs/bench/locomotion`` and can be
interrupted and resumed; what is finished goes into ``benchmarks/locomotion.json`` and
``docs/images/locomotion.png``.
Returns are of the noise-free policy, undiscounted, on resets never trained on.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from figures import draw_json
from shared import HERE, complete, gathered, write

from embodyrl import registry
from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.sac_flow import SACFlow
from embodyrl.build import make_env, make_policy
from embodyrl.config import Config, resolve
from embodyrl.functional.intervals import bootstrap_iqm
from embodyrl.rollouts.collect import Player, collect_transitions
from embodyrl.rollouts.seeding import seeded

OUT = Path("runs/bench/locomotion")
ENVS = ("Hopper-v5", "HalfCheetah-v5")
GAUSSIAN = {"velocity": "gaussian", "num_denoise_steps": 1, "transition": "flow_noise"}
GATED, PATH = {"velocity": "gated"}, {"entropy": "path"}
VARIANTS = {
    "sac_flow": ("SAC-Flow (Flow-G, K = 4)", GATED, {"name": "sac_flow"}),
    "path": ("SAC-Flow, entropy of the path", GATED, {"name": "sac_flow", **PATH}),
    "published": ("SAC-Flow without -log(std)", GATED, {"name": "published_density", **PATH}),
    "sac": ("plain SAC (Gaussian)", GAUSSIAN, {"name": "sac_flow"}),
    "crossq": (
        "SAC-Flow, CrossQ's critics",
        GATED,
        {"name": "sac_flow", "critic_norm": "batch", "policy_delay": 3},
    ),
}
NUM_ENVS, NUM_CHUNKS = 4, 16
ALONE = {"OMP_NUM_THREADS": "1"}


def defect() -> Callable:
    """The published density, from the tests, which show what is wrong with it."""
    found = importlib.util.spec_from_file_location(
        "defects_offpolicy", HERE.parent / "tests/helpers/defects_offpolicy.py"
    )
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module.noise_density


class PublishedDensity(SACFlow):
    """SAC-Flow with the defect of published code."""

    sample_path = staticmethod(defect())


registry.BUILT_IN["algorithms"]["published_density"] = f"{__name__}:PublishedDensity"


def make_config(
    variant: str, env: str, seed: int, steps: int, width: int, batch: int, utd: float
) -> Config:
    """One run; an iteration is 64 env steps."""
    iterations = steps // (NUM_ENVS * NUM_CHUNKS)
    every = max(
        iterations // 10, -(-1000 // NUM_CHUNKS)
    )  # no oftener than an episode is long: they begin anew then
    return resolve(
        {
            "env": {"name": "gymnasium", "id": env, "num_envs": NUM_ENVS, "seed": 1000 * seed},
            "policy": {"name": "flow_mlp", "width": width, **VARIANTS[variant][1]},
            "algorithm": {
                **VARIANTS[variant][2],
                "num_chunks": NUM_CHUNKS,
                "capacity": steps,
                "batch_size": batch,
                "utd": utd,
                "critic_width": width,
            },
            "run": {
                "name": f"{variant}_{env}_{seed}",
                "out": str(OUT),
                "seed": seed,
                "iterations": iterations,
                "eval_every": every,
                "eval_episodes": 8,
                "checkpoint_every": every,
                "keep_checkpoints": 1,
                "device": "cpu",
                "threads": 1,
                "videos": 0,
            },
        }
    )


def speed(width: int, batch: int) -> dict[str, dict[str, float]]:
    """Milliseconds of processor time per env step (acting included) and per gradient step, on HalfCheetah."""
    torch.set_num_threads(1)
    found = {}
    for variant in ("sac_flow", "sac"):
        config = make_config(variant, "HalfCheetah-v5", 0, 6400, width, batch, 1.0)
        env = make_env(config.env)
        algorithm = SACFlow(config.algorithm, make_policy(config.policy, env.spec, 0))
        player, generator = Player(env), seeded(0, 0)

        def roll(player=player, algorithm=algorithm, generator=generator):
            stream = player.ongoing_episodes()
            return collect_transitions(stream, algorithm.act, 100, generator=generator).chunks

        algorithm.collected = 10**9  # acts with the policy
        roll()
        began = time.process_time()
        batch_ = roll()
        acting = (time.process_time() - began) / batch_.env_steps
        for _ in range(300 // len(batch_) + 1):
            algorithm.buffer.add(batch_)
        algorithm.pending_steps = 0.0
        for count in (20, 100):  # the first ones warm up
            began = time.process_time()
            end = algorithm.gradient_steps + count
            while algorithm.gradient_steps < end:
                algorithm._gradient_steps(end - algorithm.gradient_steps, generator, Means())
        found[variant] = {
            "env_step_ms": 1e3 * acting,
            "update_ms": 1e3 * (time.process_time() - began) / 100,
        }
        env.close()
    return found


def summarise(settings: dict) -> None:
    """JSON and figure of all runs that are finished."""
    names = [
        (env, variant, path)
        for env in ENVS
        for variant in VARIANTS
        for path in OUT.glob(f"{variant}_{env}_*")
    ]
    runs = gathered(
        "locomotion",
        settings,
        {f"{e}/{v}/{path.name.rsplit('_', 1)[1]}": path for e, v, path in names},
    )
    curves: dict[str, dict[str, list]] = {}
    for env in ENVS:
        for variant in VARIANTS:
            found = [
                run["evaluations"]
                for key, run in runs.items()
                if key.startswith(f"{env}/{variant}/")
            ]
            # the last regular evaluation is five iterations before the one at the end: a jump in a
            # curve
            if found:
                curves.setdefault(env, {})[variant] = [[*c[:-2], c[-1]] for c in found]
    final = {
        env: {
            variant: {
                "seeds": len(found),
                **dict(
                    zip(
                        ("iqm", "low", "high"),
                        bootstrap_iqm([c[-1]["return"] for c in found]),
                        strict=True,
                    )
                ),
                "minutes": [c[-1]["minutes"] for c in found],
            }
            for variant, found in variants.items()
        }
        for env, variants in curves.items()
    }
    write("locomotion", {"settings": settings, "final_return": final, "runs": runs})
    print(json.dumps(final, indent=1))
    if curves:
        draw_json(HERE / "locomotion.json", "locomotion")


def main() -> None:
    """Runs what is not finished, then writes JSON and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--envs", nargs="+", default=list(ENVS), choices=ENVS)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--steps", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--utd", type=float, default=0.5, help="gradient steps per env step")
    parser.add_argument(
        "--jobs", type=int, default=1, help="runs side by side, each with one thread"
    )
    parser.add_argument("--speed", action="store_true", help="only measure the cost of a step")
    a = parser.parse_args()
    if a.speed:
        print(json.dumps(speed(a.width, a.batch), indent=1))
        return
    todo = [
        (v, e, s) for s in a.seeds for e in a.envs for v in a.variants
    ]  # a first seed of everything, then more
    if a.jobs > 1:
        running: list[subprocess.Popen] = []
        for variant, env, seed in todo:
            while len([p for p in running if p.poll() is None]) >= a.jobs:
                time.sleep(1)
            one = ["--variants", variant, "--envs", env, "--seeds", str(seed)]
            size = [
                "--steps",
                str(a.steps),
                "--width",
                str(a.width),
                "--batch",
                str(a.batch),
                "--utd",
                str(a.utd),
            ]
            running.append(
                subprocess.Popen(
                    [sys.executable, __file__, *one, *size], env={**os.environ, **ALONE}
                )
            )
        if failed := [p.args for p in running if p.wait() != 0]:
            raise SystemExit(f"These runs failed: {failed}")
    else:
        for variant, env, seed in todo:
            complete(make_config(variant, env, seed, a.steps, a.width, a.batch, a.utd))
    if len(todo) > 1:
        summarise({"steps": a.steps, "width": a.width, "batch": a.batch, "utd": a.utd})


if __name__ == "__main__":
    main()
