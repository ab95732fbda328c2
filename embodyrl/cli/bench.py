"""``embodyrl bench``: measures the speed and memory of an environment.

It executes chunks of random actions and resets episodes when they end, as a rollout does.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from embodyrl import registry
from embodyrl.build import make_env
from embodyrl.config import env_config
from embodyrl.env import EnvConfig, VecEnv
from embodyrl.errors import UserError
from embodyrl.storage.provenance import git_commit, hardware, versions


def bench_env(
    config: EnvConfig, *, chunk: int = 5, num_chunks: int = 20, repeats: int = 5
) -> dict[str, Any]:
    """Measures one environment.

    Args:
        config: of the env; ``env.num_envs`` is how many run in parallel.
        chunk: H, actions per chunk. Cameras are rendered once per chunk.
        num_chunks: chunks in one measurement.
        repeats: measurements, after a first one to warm up, which does not count.

    Returns:
        Rates (median, min and max over the repeats), times in s and memory in MiB, with config,
        spec, versions and hardware. Only the control steps of running episodes are counted, not
        the masked ones of ended episodes.

    Raises:
        UserError: a number below 1.
    """
    for name, value in (("--chunk", chunk), ("--chunks", num_chunks), ("--repeats", repeats)):
        if value < 1:
            raise UserError(f"{name} must be 1 or more, not {value}.")
    # Build the env. Its module is imported first, so that time and memory are those of the env.
    registry.load("envs", config.name)
    memory_before = tree_memory_mib()
    started = time.perf_counter()
    env = make_env(config)
    build_s = time.perf_counter() - started
    try:
        # The first measurement warms up caches and compiled kernels.
        generator = torch.Generator().manual_seed(config.seed)
        env.reset(seed=config.seed)
        _measure(env, chunk, num_chunks, generator)
        resets = []
        runs = []
        for _ in range(repeats):
            started = time.perf_counter()
            env.reset()
            _synchronize()
            resets.append(time.perf_counter() - started)
            runs.append(_measure(env, chunk, num_chunks, generator))
        memory = tree_memory_mib()
    finally:
        env.close()
    n = env.spec.num_envs
    memory_per_env = None
    if memory_before is not None and memory is not None:
        memory_per_env = max(0.0, memory - memory_before) / n
    return {
        "env": env.spec.name,
        "num_envs": n,
        "chunk": chunk,
        "chunks": num_chunks,
        "repeats": repeats,
        "env_steps_per_s": _median_and_range([run["steps"] / run["seconds"] for run in runs]),
        "frames_per_s": _median_and_range([run["frames"] / run["seconds"] for run in runs]),
        "reset_all_s": _median_and_range(resets),
        "build_s": build_s,
        "episodes": sum(run["episodes"] for run in runs),
        "faults": sum(run["faults"] for run in runs),
        "memory_mib": memory,
        "memory_per_env_mib": memory_per_env,
        "load": list(os.getloadavg()),
        "config": dataclasses.asdict(config),
        "spec": dataclasses.asdict(env.spec),
        "commit": git_commit(),
        "versions": versions(),
        "hardware": hardware(),
    }


def bench_curve(
    name: str | None, overrides: Sequence[str], num_envs: str, **how: int
) -> list[dict[str, Any]]:
    """``bench_env`` with several numbers of parallel envs, the smallest first.

    Memory that one measurement does not release distorts the next; in this order, the least.

    Args:
        name: of an environment or a preset.
        overrides: of its config.
        num_envs: the numbers, separated by commas.
        how: ``chunk``, ``num_chunks`` and ``repeats`` of ``bench_env``.

    Raises:
        UserError: no environment, or not a list of numbers.
    """
    if not name:
        raise UserError(
            "--num-envs needs an environment, for example: embodyrl bench mujoco --num-envs "
            "1,16,256."
        )
    try:
        numbers = sorted({int(number) for number in num_envs.split(",")})
    except ValueError:
        raise UserError(
            f"--num-envs takes numbers with commas between them, like 1,16,256, not {num_envs!r}."
        ) from None
    return [bench_env(env_config(name, [*overrides, f"env.num_envs={n}"]), **how) for n in numbers]


def bench_all(*, chunk: int = 5, num_chunks: int = 20, repeats: int = 5) -> list[dict[str, Any]]:
    """Measures every registered environment with its default config.

    The result of an environment that cannot run here has the key ``error`` instead.
    """
    results: list[dict[str, Any]] = []
    for name in registry.names("envs"):
        try:
            config = registry.load("envs", name).Config(name=name)
            results.append(bench_env(config, chunk=chunk, num_chunks=num_chunks, repeats=repeats))
        except (UserError, ImportError) as error:
            results.append({"env": name, "error": str(error)})
    return results


def _measure(
    env: VecEnv, chunk: int, num_chunks: int, generator: torch.Generator
) -> dict[str, float]:
    """Executes ``num_chunks`` chunks, and counts steps, frames, episodes, faults and seconds."""
    spec = env.spec
    # Draw all actions before the clock starts: that is not the env's work.
    shape = (num_chunks, spec.num_envs, chunk, spec.action_dim)
    actions = torch.rand(shape, generator=generator) * 2 - 1
    steps = 0
    frames = 0
    episodes = 0
    faults = 0
    _synchronize()
    started = time.perf_counter()
    for k in range(num_chunks):
        step = env.step(actions[k])
        steps += int(step.valid.sum())
        faults += int(step.fault.sum())
        # Observations of running episodes after the chunk, and of new ones after their reset.
        observations = int(step.valid.any(dim=1).sum())
        if ended := int(step.done.sum()):
            env.reset(step.done)
            episodes += ended
            observations += ended
        frames += observations * len(spec.cameras)
    _synchronize()
    seconds = time.perf_counter() - started
    return {
        "steps": steps,
        "frames": frames,
        "episodes": episodes,
        "faults": faults,
        "seconds": seconds,
    }


def _synchronize() -> None:
    """Waits for the GPU, which works on after a call returns; then the time can be taken."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _median_and_range(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def tree_memory_mib() -> float | None:
    """Memory of this process and all its descendants, in MiB; None without /proc.

    It is the proportional set size (PSS): pages that processes share are counted once.
    """
    # The parent of every process. In /proc/PID/stat it is the second field after "(NAME)".
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it has just ended
    if os.getpid() not in parents:
        return None
    # Add the children of processes in the tree until there are no more.
    tree = {os.getpid()}
    while children := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= children
    total = 0.0
    for pid in tree:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1024


def print_bench(results: dict[str, Any] | list[dict[str, Any]]) -> None:
    """Prints a table of one or more results of ``bench_env``."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # A table of the measurements.
    rows = results if isinstance(results, list) else [results]
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("env", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for head in ("envs", "steps/s", "min-max", "frames/s", "reset s", "build s", "MiB/env"):
        table.add_column(head, justify="right", no_wrap=True)
    for r in rows:
        if "error" in r:
            continue
        rate = r["env_steps_per_s"]
        frames = r["frames_per_s"]["median"]
        memory = r["memory_per_env_mib"]
        table.add_row(
            Text(r["env"]),
            str(r["num_envs"]),
            f"{rate['median']:,.0f}",
            f"{rate['min']:,.0f}-{rate['max']:,.0f}",
            f"{frames:,.0f}" if frames else "-",
            f"{r['reset_all_s']['median']:.3f}",
            f"{r['build_s']:.1f}",
            f"{memory:.0f}" if memory is not None else "?",
        )
    if table.row_count:
        console.print(table)
    # Below it, how each was measured, or why it was not.
    for r in rows:
        if "error" in r:
            console.print(Text(f"{r['env']}: {r['error']}"))
            continue
        hardware_used = r["hardware"]
        where = f"{hardware_used['cores']} cores of {hardware_used['cpu']}"
        if hardware_used["gpu"]:
            where += f", {hardware_used['gpu']}"
        text = (
            f"{r['env']}: chunks of {r['chunk']}, {r['repeats']} x {r['chunks']} chunks, load "
            f"{r['load'][0]:.1f} on {where}"
        )
        if r["faults"]:
            text += f"; {r['faults']} episodes broke"
        console.print(Text(text, style="dim"))
