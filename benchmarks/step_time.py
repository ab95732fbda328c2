"""Milliseconds of a gradient step: critics and actor of SAC-Flow and PA-RL.

    python benchmarks/step_time.py --out benchmarks/step_time.json

At the quickstart's sizes (its preset, 64x64 pictures) and on ManiSkill's PickCube-v1 from state.
Observations, chunks and demonstrations are random numbers of the right shape: a step takes as long.
``wall`` is the shortest of several tries, and ``cpu`` the least CPU time of all threads; ``load`` is
that of the machine before and after. A critic step of SAC-Flow is one of the two between two steps of the
actor, whose next actions are drawn side by side.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.pa_rl import PARL
from embodyrl.build import make_policy
from embodyrl.config import compose
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.registry import load
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.rollouts.seeding import seeded
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.types import EnvSpec, Obs

CHUNKS = 512
FRAMES = 1000
LEARN = ["run.init_checkpoint=", "data.path=none", "run.device=cpu", "algorithm.critic_warmup=0"]
PICKCUBE_SAC_FLOW = [
    "policy.transition=flow_noise",
    "policy.noise_min=0.1",
    "policy.noise_max=0.5",
    "policy.chooser_width=0",
    "algorithm.name=sac_flow",
    "algorithm.batch_size=128",
    "algorithm.entropy=path",
    "algorithm.entropy_backup=false",
    "algorithm.critic_norm=layer",
    "algorithm.bc_coef=1.0",
    "algorithm.random_warmup=false",
]
PICK = EnvSpec("mujoco/pick", 64, 4, 7, "ee_delta_pos", 25.0, 40, {"front": (64, 64)}, 33)
PICKCUBE = EnvSpec("maniskill/PickCube-v1", 64, 4, 42, "pd_ee_delta_pos", 20.0, 40, {}, 42)
CASES: dict[str, tuple[EnvSpec, str, list[str]]] = {
    "quickstart, SAC-Flow": (PICK, "mujoco_pick_sac_flow", ["policy.critic=privileged"]),
    "quickstart, SAC-Flow, critic=found": (PICK, "mujoco_pick_sac_flow", ["policy.critic=found"]),
    "quickstart, PA-RL": (PICK, "mujoco_pick_pa_rl", ["algorithm.mc_steps=0"]),
    "PickCube, SAC-Flow": (PICKCUBE, "maniskill_pickcube_pa_rl", PICKCUBE_SAC_FLOW),
    "PickCube, PA-RL": (
        PICKCUBE,
        "maniskill_pickcube_pa_rl",
        ["algorithm.mc_steps=0", "algorithm.bc_coef=0.1"],
    ),
}
SENTENCE = "pick up the red block"


def observations(spec: EnvSpec, count: int) -> Obs:
    """Random ones."""
    images = {
        name: torch.randint(256, (count, *size, 3), dtype=torch.uint8)
        for name, size in spec.cameras.items()
    }
    state = torch.randn(count, spec.privileged_dim)
    return Obs(images, torch.randn(count, spec.proprio_dim), [SENTENCE] * count, state)


def chunks(spec: EnvSpec, horizon: int) -> Transitions:
    """Episodes of one chunk each, half of them solved."""
    over = torch.ones(CHUNKS, dtype=torch.bool)
    solved = torch.arange(CHUNKS) % 2 == 0
    return Transitions(
        observations(spec, CHUNKS),
        torch.rand(CHUNKS, horizon, spec.action_dim) * 2 - 1,
        torch.rand(CHUNKS, horizon),
        torch.ones(CHUNKS, horizon, dtype=torch.bool),
        over & solved,
        over & ~solved,
        observations(spec, CHUNKS),
        episode=torch.arange(CHUNKS),
        success=solved,
    )


def built(spec: EnvSpec, preset: str, settings: list[str]) -> Any:
    """An algorithm whose buffer is full enough to learn from."""
    warmup = [f"algorithm.warmup_chunks={CHUNKS}", f"algorithm.capacity={CHUNKS}"]
    seeing = ["algorithm.hindsight_steps=1"] if _finds(settings, preset, spec) else []
    config = compose(preset, [*LEARN, *warmup, *seeing, *settings])
    policy = make_policy(config.policy, spec, 0)
    algorithm = load("algorithms", config.algorithm.name)(config.algorithm, policy)
    frames = observations(spec, FRAMES)
    algorithm.add_demos(
        Demonstrations(
            config.policy.horizon,
            {name: image.numpy() for name, image in frames.images.items()},
            frames.proprio,
            torch.rand(FRAMES, spec.action_dim) * 2 - 1,
            torch.arange(FRAMES) // 40,
            torch.zeros(FRAMES, dtype=torch.long),
            [SENTENCE],
        )
    )
    batch = TransitionBatch(chunks(spec, config.policy.horizon))
    algorithm.update(batch, progress=0.0, generator=seeded(0, 0))
    return algorithm


def _finds(settings: list[str], preset: str, spec: EnvSpec) -> bool:
    found = "policy.critic=found" in settings or preset.endswith("pa_rl")
    return bool(spec.cameras) and found


def steps(algorithm: Any) -> dict[str, Callable[[], None]]:
    """A step of the critics (SAC-Flow: as many as are drawn side by side), and one of the actor."""
    generator = seeded(0, 1)
    if isinstance(algorithm, PARL):
        return {
            "critic": lambda: algorithm._update_critics(generator, Means()),
            "actor": lambda: algorithm.actor.step(generator, Means()),
        }
    delay = algorithm.config.policy_delay
    batch = algorithm._batch(generator)

    def critics() -> None:
        algorithm.gradient_steps = -delay  # not above critic_warmup, so the actor waits
        algorithm._gradient_steps(delay, generator, Means())

    return {
        "critic": critics,
        "actor": lambda: algorithm._update_actor(batch.obs, generator, Means(), batch.features),
    }


def fastest(step: Callable[[], None], tries: int, share: int = 1) -> dict[str, float]:
    """Milliseconds of the shortest of several tries, by the wall clock and of the CPU."""
    step()
    found = []
    for _ in range(tries):
        wall = time.perf_counter()
        cpu = time.process_time()
        step()
        found.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall, cpu = (min(times) for times in zip(*found, strict=True))
    return {"wall": 1e3 * wall / share, "cpu": 1e3 * cpu / share}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tries", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    load_before = os.getloadavg()[0]
    times: dict[str, Any] = {}
    for name, (spec, preset, settings) in CASES.items():
        torch.manual_seed(0)
        algorithm = built(spec, preset, settings)
        share = 1 if isinstance(algorithm, PARL) else algorithm.config.policy_delay
        times[name] = {
            what: fastest(step, args.tries, share if what == "critic" else 1)
            for what, step in steps(algorithm).items()
        }
        print(name, json.dumps(times[name]), flush=True)
    out = {
        "ms": times,
        "threads": args.threads,
        "tries": args.tries,
        "load": [load_before, os.getloadavg()[0]],
        "commit": git_commit(),
        "versions": versions(),
        "hardware": hardware(),
    }
    if args.out:
        args.out.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
