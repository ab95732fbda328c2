"""What a machine with a GPU does with all this, in one call and one JSON file.

    python benchmarks/gpu_all.py                                     writes benchmarks/gpu_all.json
    python benchmarks/gpu_all.py --device cpu --out /tmp/gpu_all.json     the same parts, tiny: shows that they run

ManiSkill (promises checked, steps per second by number of envs), LIBERO-Spatial's ten tasks in one
batch and the MuJoCo pick task by backend and number of envs with and without pictures, beside it
MuJoCo Playground's Panda (with ``--playground DIR``), PPO on the pick task with a fresh policy, the
evaluation of what came of it, the policy's throughput, SmolVLA and pi0 in their real sizes beside
LeRobot's own code (``gpu_vla.py``), world models, Wan's 1.3 B parameters among them
(``gpu_world.py``), an iteration of every algorithm (``gpu_algorithms.py``). Before all of it, where
things are (``gpu_placement.py``). A part that fails says so in the file, and the exit status is
then 1. Where a command may take some minutes only, ``--only`` names parts; they are added to what
the file has.

    pip install --target DIR playground brax flax ml_collections mediapy lxml orbax-checkpoint
    git clone https://github.com/google-deepmind/mujoco_menagerie
    DIR/mujoco_playground/external_deps/mujoco_menagerie
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gpu_vla
import torch
from gpu_algorithms import ALGORITHM_SIZES, algorithms
from gpu_placement import placement
from gpu_vla import seconds
from gpu_world import WORLD_SIZES, world

from embodyrl.build import make_env, make_policy
from embodyrl.checks import check_env
from embodyrl.cli.bench import bench_env
from embodyrl.config import compose, env_config
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.training.evaluate import evaluate_checkpoint
from embodyrl.training.runner import train
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    maniskill: tuple[str, ...]  # overrides of every ManiSkill env
    maniskill_envs: tuple[int, ...]
    mujoco: tuple[str, ...]  # backends
    mujoco_envs: tuple[int, ...]
    libero: tuple[str, ...]  # overrides
    libero_envs: dict[str, tuple[int, ...]]  # by backend
    playground_envs: tuple[int, ...]
    chunks: int
    training: tuple[str, ...]
    episodes: int
    batches: tuple[int, ...]
    repeats: int
    vla: tuple[str, ...]
    vla_batches: tuple[int, ...]
    vla_rows: tuple[int, ...]
    vla_counted: tuple[str, ...]


SIZES = {
    "cuda": Size(
        maniskill=("env.backend=gpu", "env.device=cuda"),
        maniskill_envs=(256, 1024, 4096),
        mujoco=("native", "warp", "mjx"),
        mujoco_envs=(1, 64, 1024, 4096),
        libero=("env.device=cuda",),
        libero_envs={"native": (16, 64, 256), "warp": (1, 64, 256, 1024, 4096)},
        playground_envs=(1, 64, 1024, 4096),
        chunks=20,
        training=(
            "env.num_envs=256",
            "run.iterations=20",
            "run.eval_episodes=256",
            "run.device=cuda",
        ),
        episodes=256,
        batches=(1, 64, 1024, 4096),
        repeats=10,
        vla=("smolvla", "pi0"),
        vla_batches=(1, 8, 64),
        vla_rows=(8, 32),
        vla_counted=(),
    ),
    "cpu": Size(
        maniskill=("env.backend=cpu", "env.num_workers=1"),
        maniskill_envs=(2,),
        mujoco=("native",),
        mujoco_envs=(2,),
        libero=("env.num_threads=1",),
        libero_envs={"warp": (2,)},
        playground_envs=(2,),
        chunks=1,
        training=(
            *(
                "env.num_envs=2",
                "env.max_episode_steps=5",
                "algorithm.num_chunks=1",
                "algorithm.critic_epochs=1",
            ),
            *(
                "run.iterations=1",
                "run.eval_episodes=1",
                "run.eval_before=false",
                "run.device=cpu",
                "run.videos=0",
            ),
        ),
        episodes=1,
        batches=(2,),
        repeats=1,
        vla=("small",),
        vla_batches=(2,),
        vla_rows=(2,),
        vla_counted=("smolvla", "pi0"),
    ),
}


def maniskill(size: Size) -> Any:
    env = make_env(env_config("maniskill", [*size.maniskill, "env.num_envs=4"]))
    try:
        check_env(env)
    finally:
        env.close()
    return {
        "checked": True,
        "speed": [speed("maniskill", size, size.maniskill, n) for n in size.maniskill_envs],
    }


def mujoco(size: Size, backend: str) -> Any:
    """The pick task, with and without pictures."""
    rows = []
    for renderer, num_envs in itertools.product(("none", "warp"), size.mujoco_envs):
        settings = (f"env.backend={backend}", f"env.renderer={renderer}", "env.task=pick")
        row = {"renderer": renderer, "num_envs": num_envs}
        rows.append(row | tried("mujoco", size, settings, num_envs))
    return rows


def libero(size: Size, backend: str) -> Any:
    """All of LIBERO-Spatial from official states: ten tasks, one scene, so that one batch holds them all."""
    rows = []
    for cameras, num_envs in itertools.product(
        ("[]", "[agentview,wrist]"), size.libero_envs[backend]
    ):
        settings = (
            f"env.backend={backend}",
            f"env.cameras={cameras}",
            "env.split=eval",
            *size.libero,
        )
        row = {"cameras": cameras, "num_envs": num_envs}
        rows.append(
            row | tried("libero", size, settings, num_envs, chunk=8, num_chunks=min(4, size.chunks))
        )
    return rows


def tried(name: str, size: Size, settings: tuple[str, ...], num_envs: int, **what: int) -> Any:
    """``speed``, or why there is none (memory, at the largest): the other rows are still worth having."""
    try:
        row = speed(name, size, settings, num_envs, **what)
    except (UserError, RuntimeError, ImportError) as error:
        row = {"error": str(error)}
    print(json.dumps({"settings": settings, "num_envs": num_envs} | row), flush=True)
    return row


def playground(size: Size, folder: Path) -> Any:
    """MuJoCo Playground's PandaPickCube: control steps of 20 ms with 4 physics steps, states only, reset never."""
    sys.path.append(str(folder))  # behind everything else, so that no package of ours is replaced
    import jax  # pyright: ignore[reportMissingImports]
    from mujoco_playground import registry  # pyright: ignore[reportMissingImports]

    rows = []
    on_gpu = jax.default_backend() == "gpu"
    env = registry.load("PandaPickCube", config_overrides={"impl": "warp" if on_gpu else "jax"})
    for num_envs in size.playground_envs:
        state = jax.jit(jax.vmap(env.reset))(jax.random.split(jax.random.PRNGKey(0), num_envs))
        actions = jax.random.uniform(
            jax.random.PRNGKey(1), (num_envs, env.action_size), minval=-1.0, maxval=1.0
        )
        steps = 4 * size.chunks

        @jax.jit
        def run(state: Any, actions: Any = actions, steps: int = steps) -> Any:
            return jax.lax.scan(
                lambda s, _: (jax.vmap(env.step)(s, actions), None), state, length=steps
            )[0]

        times = []
        for _ in range(min(3, size.repeats) + 1):
            started = time.perf_counter()
            state = jax.block_until_ready(run(state))
            times.append(time.perf_counter() - started)
        median = sorted(times[1:])[len(times[1:]) // 2]
        rows.append(
            {
                "num_envs": num_envs,
                "env_steps_per_s": steps * num_envs / median,
                "compile_s": times[0],
            }
        )
    return rows


def speed(
    name: str,
    size: Size,
    settings: tuple[str, ...],
    num_envs: int,
    chunk: int = 4,
    num_chunks: int = 0,
) -> dict[str, Any]:
    config = env_config(name, [*settings, f"env.num_envs={num_envs}"])
    row = bench_env(
        config, chunk=chunk, num_chunks=num_chunks or size.chunks, repeats=min(3, size.repeats)
    )
    keys = (
        "num_envs",
        "env_steps_per_s",
        "frames_per_s",
        "reset_all_s",
        "build_s",
        "memory_mib",
        "faults",
    )
    return {k: row[k] for k in keys}


def training(size: Size, out: str) -> Any:
    config = compose(
        "mujoco_pick_ppo",
        [f"run.out={out}", "run.init_checkpoint=", "run.eval_every=0", *size.training],
    )
    folder = train(config, command=" ".join(sys.argv))
    last = read_metrics(folder / "metrics.jsonl")[-1]
    started = time.perf_counter()
    result = evaluate_checkpoint(
        str(folder), [f"run.device={config.run.device}"], episodes=size.episodes
    )
    seconds = time.perf_counter() - started
    scored = {k: result[k] for k in ("episodes", "successes", "interval")}
    return {
        "last_iteration": last,
        "evaluation": {**scored, "seconds": seconds},
        "env": asdict(config.env),
    }


def vla(size: Size, device: torch.device, out: str) -> Any:
    counted = gpu_vla.counted(size.vla_counted, out)
    return {
        "counted": counted,
        **gpu_vla.vla(size.vla, size.vla_batches, size.vla_rows, size.repeats, device, out),
    }


def throughput(size: Size, device: torch.device) -> Any:
    rows = []
    for vision, side in (
        ("film_cnn", 64),
        ("film_cnn", 224),
        ("efficientnet_lite0", 64),
        ("efficientnet_lite0", 224),
    ):
        spec = EnvSpec(
            "bench", 1, 7, 9, "ee_delta_pose", 20.0, 100, {"front": (side, side)}, privileged_dim=16
        )
        policy = make_policy(FlowVLAConfig(vision=vision), spec, 0, device)
        for n in size.batches:
            generator = torch.Generator().manual_seed(0)
            image = torch.randint(256, (n, side, side, 3), dtype=torch.uint8, generator=generator)
            obs = Obs(
                {"front": image},
                torch.randn(n, 9),
                ["pick up the red block"] * n,
                torch.randn(n, 16),
            ).to(device)
            trace = policy.sample(obs, generator=generator, mode="train").trace

            def score(policy: Any = policy, obs: Obs = obs, trace: Any = trace) -> None:
                policy.zero_grad()
                policy.evaluate(obs, trace).logprob.sum().backward()

            def sample(policy: Any = policy, obs: Obs = obs, generator: Any = generator) -> None:
                policy.sample(obs, generator=generator, mode="eval")

            rates = {
                name: n / seconds(fn, size.repeats, device)
                for name, fn in (("sample", sample), ("score", score))
            }
            rows.append(
                {"vision": vision, "image": side, "batch": n}
                | {f"{k}_per_s": v for k, v in rates.items()}
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=sorted(SIZES), default="cuda")
    parser.add_argument("--out", default=str(Path(__file__).with_suffix(".json")))
    parts = (
        "placement",
        "throughput",
        "maniskill",
        *(f"mujoco_{backend}" for backend in SIZES["cuda"].mujoco),
        *(f"libero_{backend}" for backend in SIZES["cuda"].libero_envs),
        "playground",
        "training",
        "algorithms",
        "vla",
        "world",
    )
    parser.add_argument("--only", nargs="*", choices=parts, default=[])
    parser.add_argument("--env", nargs="*", default=[], help="settings of the part `algorithms`")
    parser.add_argument("--playground", type=Path, help="folder of MuJoCo Playground, see above")
    a = parser.parse_args()
    size, device = SIZES[a.device], torch.device(a.device)
    before = json.loads(Path(a.out).read_text()) if a.only and Path(a.out).exists() else {}
    result: dict[str, Any] = {part: before[part] for part in parts if part in before} | {
        "device": a.device,
        "commit": git_commit(),
        "versions": versions(),
        "hardware": hardware(),
    }
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "placement": lambda: placement(a.device, folder),
            "throughput": lambda: throughput(size, device),
            "maniskill": lambda: maniskill(size),
            **{f"mujoco_{b}": lambda b=b: mujoco(size, b) for b in size.mujoco},
            **{f"libero_{b}": lambda b=b: libero(size, b) for b in size.libero_envs},
            "playground": lambda: playground(size, a.playground),
            "training": lambda: training(size, folder),
            "algorithms": lambda: algorithms(
                ALGORITHM_SIZES[a.device], a.device, folder, tuple(a.env)
            ),
            "vla": lambda: vla(size, device, folder),
            "world": lambda: world(WORLD_SIZES[a.device], device, size.repeats),
        }
        for name, part in work.items():
            if (a.only and name not in a.only) or (name == "playground" and not a.playground):
                continue
            started = time.perf_counter()
            try:
                found = part()
            except Exception as error:  # the other parts are still worth having
                traceback.print_exc()
                found, failed = {"error": f"{type(error).__name__}: {error}"}, failed + 1
            result[name] = {"seconds": time.perf_counter() - started, "result": found}
            Path(a.out).write_text(
                json.dumps(result, indent=1)
            )  # after every part: a later one may be killed
            print(f"{name}: {result[name]['seconds']:.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
