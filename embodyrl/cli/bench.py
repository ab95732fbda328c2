"""How fast an environment is: random actions in chunks, ended episodes reset as they end, as a rollout does it."""

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
        chunk: actions per chunk, H. Cameras are drawn once a chunk.
        num_chunks: chunks in one measurement.
        repeats: measurements, after one that warms up and is not counted.

    Returns:
        Rates (median, min and max over the repeats), times in s and memory in MiB, with config,
        spec, versions and hardware. Steps are control steps of running episodes; those of ended
        ones, which are masked, do not count.
    """
    for name, value in (("--chunk", chunk), ("--chunks", num_chunks), ("--repeats", repeats)):
        if value < 1:
            raise UserError(f"{name} must be 1 or more, not {value}.")
    registry.load("envs", config.name)  # imported before memory and time are taken
    before = tree_memory_mib()
    started = time.perf_counter()
    env = make_env(config)
    build_s = time.perf_counter() - started
    try:
        generator = torch.Generator().manual_seed(config.seed)
        env.reset(seed=config.seed)
        _measure(env, chunk, num_chunks, generator)
        resets = []
        runs = []
        for _ in range(repeats):
            started = time.perf_counter()
            env.reset()
            _wait(env)
            resets.append(time.perf_counter() - started)
            runs.append(_measure(env, chunk, num_chunks, generator))
        after = tree_memory_mib()
    finally:
        env.close()
    n = env.spec.num_envs
    grown = None if before is None or after is None else max(0.0, after - before)
    return {
        "env": env.spec.name,
        "num_envs": n,
        "chunk": chunk,
        "chunks": num_chunks,
        "repeats": repeats,
        "env_steps_per_s": _spread([run["steps"] / run["seconds"] for run in runs]),
        "frames_per_s": _spread([run["frames"] / run["seconds"] for run in runs]),
        "reset_all_s": _spread(resets),
        "build_s": build_s,
        "episodes": sum(run["episodes"] for run in runs),
        "faults": sum(run["faults"] for run in runs),
        "memory_mib": after,
        "memory_per_env_mib": None if grown is None else grown / n,
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
    """``bench_env`` for several numbers of envs, smallest first; memory that one leaves behind counts less in the next.

    Args:
        name: of an environment or a preset.
        overrides: of its config.
        num_envs: the numbers, separated by commas.
        how: see ``bench_env``.
    """
    if not name:
        raise UserError(
            "--num-envs needs the environment that it counts: embodyrl bench mujoco --num-envs "
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
    """Measures every registered environment with its default config; one that cannot run here says why."""
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
    spec = env.spec
    # Drawn before the clock starts: random numbers are not the env's work.
    shape = (num_chunks, spec.num_envs, chunk, spec.action_dim)
    actions = torch.rand(shape, generator=generator) * 2 - 1
    steps = frames = episodes = faults = 0
    _wait(env)
    started = time.perf_counter()
    for k in range(num_chunks):
        step = env.step(actions[k])
        steps += int(step.valid.sum())
        drawn = int(step.valid.any(dim=1).sum())
        faults += int(step.fault.sum())
        if ended := int(step.done.sum()):
            env.reset(step.done)
            episodes = episodes + ended
            drawn = drawn + ended
        frames += drawn * len(spec.cameras)
    _wait(env)
    seconds = time.perf_counter() - started
    return {
        "steps": steps,
        "frames": frames,
        "episodes": episodes,
        "faults": faults,
        "seconds": seconds,
    }


def _wait(env: VecEnv) -> None:
    """A GPU works on after the call returns; a time is taken when it is done."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def tree_memory_mib() -> float | None:
    """Resident memory of this process and all below it in MiB, shared pages counted once (PSS); None without /proc."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue  # it ended while we looked
    if os.getpid() not in parents:
        return None
    tree = {os.getpid()}
    grew = True
    while grew:
        new = {pid for pid, parent in parents.items() if parent in tree} - tree
        tree = tree | new
        grew = bool(new)
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
    for r in rows:
        if "error" in r:
            console.print(Text(f"{r['env']}: {r['error']}"))
        else:
            hw = r["hardware"]
            where = f"{hw['cores']} cores of {hw['cpu']}" + (f", {hw['gpu']}" if hw["gpu"] else "")
            rule = f"chunks of {r['chunk']}, {r['repeats']} x {r['chunks']} chunks, load {r['load'][0]:.1f} on {where}"
            faults = f"; {r['faults']} episodes broke" if r["faults"] else ""
            console.print(Text(f"{r['env']}: {rule}{faults}", style="dim"))
