"""Figures of how the package reads: rooms, circles of imports, long lines, comments, repeated names.

    python scripts/measure_code.py            # this checkout
    python scripts/measure_code.py --ppo      # also which files one PPO update runs through
    python scripts/measure_code.py --root X   # another checkout

Nothing is imported but for --ppo; the rest is read as text.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

WIDTH = 100
WINDOW = 6
"""Lines of a repeated block."""


def files(package: Path) -> dict[str, Path]:
    """Dotted module name -> file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(tree: ast.AST, known: dict[str, Path]) -> Iterator[str]:
    """The package's modules that a module names, also in functions and for the type checker."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                name = full if full in known else node.module
                if name in known:
                    yield name


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            group = stack[at:]
            del stack[at:]
            if len(group) > 1:
                found.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in index:
            visit(node)
    return found


def parallel_assignments(tree: ast.AST) -> int:
    """Statements ``a, b = x, y``."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        for node in ast.walk(tree)
    )


def public_names(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Public functions and classes at the top of a module that stand in several: name -> modules."""
    where = defaultdict(list)
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(module)
    return {name: modules for name, modules in sorted(where.items()) if len(modules) > 1}


def repeated_lines(paths: list[Path]) -> int:
    """Lines of code that stand in a block of ``WINDOW`` equal lines somewhere else too."""
    seen: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path in paths:
        lines = [line.strip() for line in path.read_text().splitlines()]
        code = [
            (i, x) for i, x in enumerate(lines) if len(x) > 3 and not x.startswith(("#", "from "))
        ]
        for k in range(len(code) - WINDOW + 1):
            block = code[k : k + WINDOW]
            seen[tuple(x for _, x in block)].append((path, k))
    repeated = set()
    for places in seen.values():
        if len(places) > 1:
            repeated |= {(path, k + j) for path, k in places for j in range(WINDOW)}
    return len(repeated)


def measure(root: Path) -> dict[str, object]:
    """All figures of a checkout."""
    package = root / "embodyrl"
    known = files(package)
    trees = {name: ast.parse(path.read_text()) for name, path in known.items()}
    lines = [line for path in known.values() for line in path.read_text().splitlines()]
    comments = sum(bool(re.search(r"(^|\s)# ", line)) for line in lines)
    found = circles({name: set(imports(tree, known)) - {name} for name, tree in trees.items()})
    loose = [p.name for p in package.glob("*.py") if p.name != "__init__.py"]
    rooms = [p.name for p in package.iterdir() if p.is_dir() and any(p.rglob("*.py"))]
    return {
        "files": len(known),
        "lines": len(lines),
        "loose modules": len(loose),
        "rooms": len(rooms),
        "circles of imports": len(found),
        "files in circles": sum(map(len, found)),
        f"lines over {WIDTH} columns, %": round(
            100 * sum(len(x) > WIDTH for x in lines) / len(lines), 2
        ),
        "parallel assignments per 1,000 lines": round(
            1000 * sum(map(parallel_assignments, trees.values())) / len(lines), 1
        ),
        "comments per 1,000 lines": round(1000 * comments / len(lines), 1),
        "lines in repeated blocks, %": round(
            100 * repeated_lines(list(known.values())) / len(lines), 2
        ),
        "public names in several modules": len(public_names(trees)),
    }


def files_of_a_ppo_update() -> list[str]:
    """The files of the package that one ``PPO.update`` runs through, but for the network's."""
    import torch

    from embodyrl.algorithms.ppo import PPO, PPOConfig
    from embodyrl.build import make_policy
    from embodyrl.policies.flow_mlp import FlowMLPConfig
    from embodyrl.rollouts.collect import Player
    from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv

    env = MujocoEnv(MujocoConfig(task="reach", renderer="none", num_envs=4, num_threads=1))
    config = PPOConfig(num_chunks=2, minibatch_size=8, epochs=1, critic_epochs=1)
    policy = make_policy(FlowMLPConfig(width=8, critic_width=8), env.spec, 0)
    ppo = PPO(config, policy)
    generator = torch.Generator().manual_seed(0)
    batch = Player(env).collect(ppo, 0, generator=generator)
    ppo.iteration = config.warmup_iterations
    ran = set()

    def note(frame, event, arg):
        ran.add(frame.f_code.co_filename)

    sys.setprofile(note)
    ppo.update(batch, progress=0.0, generator=generator)
    sys.setprofile(None)
    network = ("mlp_velocities", "normalize", "action_expert", "flow_mlp")
    return sorted(
        Path(path).name
        for path in ran
        if "embodyrl" in Path(path).parts and Path(path).stem not in network
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1])
    parser.add_argument(
        "--ppo", action="store_true", help="which files one PPO update runs through"
    )
    parser.add_argument("--names", action="store_true", help="names that stand in several modules")
    args = parser.parse_args()
    print(json.dumps(measure(args.root), indent=2))
    if args.names:
        trees = {n: ast.parse(p.read_text()) for n, p in files(args.root / "embodyrl").items()}
        print(json.dumps(public_names(trees), indent=2))
    if args.ppo:
        print("\n".join(files_of_a_ppo_update()))


if __name__ == "__main__":
    main()
