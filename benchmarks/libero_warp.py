"""LIBERO's warp backend beside its native one: which scenes it takes, its goals, its episodes, its memory.

    taskset -c 1 nice -n 15 python benchmarks/libero_warp.py --out benchmarks/libero_warp.json

``scenes`` loads every scene into mujoco-warp and counts the memory of a world. ``goals`` asks both
backends for all goals of every task in random states. ``episodes`` takes the scripted expert's
actions, chosen in the native one, in both, from an official initial state, and says how far apart
they are after the first chunks and at the end; without a GPU a control step takes seconds, so a few
tasks stand for the others. What the JSON holds is not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import torch

from embodyrl.sims.libero import blueprint, suites
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env
from embodyrl.sims.libero.experts import ScriptedExpert
from embodyrl.sims.libero.goals_batch import Goals, Poses
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.libero.scene import Scene, Start
from embodyrl.sims.libero.worlds import bytes_per_world
from embodyrl.sims.mujoco.optional_imports import import_warp
from embodyrl.storage.provenance import git_commit, hardware, versions

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
CHUNK, CONTACTS, TRIES = 8, 128, 60


def plan_of(task: suites.Task) -> tuple[blueprint.Blueprint, Any]:
    return blueprint.load_blueprint(task, lambda: Scene(task, {}))


def scene(model: Any) -> dict[str, Any]:
    """Whether mujoco-warp takes a scene, what it is made of, and the memory of a world in MiB."""
    mjw, _ = import_warp()
    try:
        there = mjw.put_model(model)
    except NotImplementedError as error:
        return {"refused": str(error)}
    size = bytes_per_world(model, there, CONTACTS)
    moving = (model.geom_contype > 0) | (model.geom_conaffinity > 0)
    kinds = sorted(
        {mujoco.mjtGeom(k).name.removeprefix("mjGEOM_").lower() for k in model.geom_type[moving]}
    )
    return {
        "nv": model.nv,
        "geoms": model.ngeom,
        "kinds": kinds,
        "mib_per_world": round(size / 2**20, 3),
    }


def poses_of(s: Simulation) -> Poses:
    """One world with a simulation's own numbers."""
    d, hand = s.data, s.memory.seen_hand
    numbers = (d.qpos, d.qvel, d.xpos, d.xquat, d.site_xpos, d.site_xmat.reshape(-1, 3, 3), hand)
    contacts = torch.from_numpy(d.contact.geom.reshape(-1, 2).copy())
    one = torch.zeros(len(contacts), dtype=torch.long)
    state = [torch.from_numpy(np.array(x, np.float32))[None] for x in numbers]
    return Poses(*state, contacts, one, torch.tensor([len(contacts)]))


def goals(task: suites.Task) -> dict[str, int]:
    """Agreement of all goals of a task in random states, near the places that they speak of."""
    plan, model = plan_of(task)
    s, batch, rng = (
        Simulation(task, plan, model),
        Goals(model.ngeom, torch.device("cpu")),
        np.random.default_rng(0),
    )
    batch.add(plan)
    fixtures = np.hstack([model.body_pos[plan.fixtures], model.body_quat[plan.fixtures]]).reshape(
        -1, 7
    )
    s.start(Start(suites.official_states(task)[0], fixtures))
    start, held, wrong = s.data.qpos.copy(), 0, 0
    for _ in range(TRIES):
        qpos = start.copy()
        for address in plan.observed_joints:
            low, high = model.jnt_range[list(model.jnt_qposadr).index(address)]
            qpos[address] = rng.choice([low, high, rng.uniform(low, high), start[address]])
        s.data.qpos[:] = qpos
        mujoco.mj_kinematics(s.model, s.data)
        for goal in plan.goals:
            body = s.body(goal[1])
            joint = int(model.body_jntadr[body]) if body >= 0 else -1
            if (
                len(goal) == 3
                and joint >= 0
                and model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE
            ):
                address = int(model.jnt_qposadr[joint])
                if rng.random() < 0.8:
                    qpos[address : address + 3] = s.position(goal[2]) + 0.03 * rng.normal(size=3)
        s.data.qpos[:] = qpos
        mujoco.mj_forward(s.model, s.data)
        poses = poses_of(s)
        for goal in plan.goals:
            answer = s.reached(tuple(goal))
            held += answer
            wrong += bool(batch.holds(poses, plan, goal)) != answer
    return {"asked": TRIES * len(plan.goals), "held": held, "wrong": wrong}


def episode(suite: str, number: int, limit: int) -> dict[str, Any]:
    """One expert's episode in both backends, as long as the native one is unsolved."""
    common: dict[str, Any] = {
        "num_envs": 1,
        "split": "eval",
        "suite": suite,
        "task_ids": (number,),
        "cameras": (),
    }
    native, warp = (
        make_env(LiberoConfig(**common)),
        make_env(LiberoConfig(**common, backend="warp")),
    )
    env: Any = SimpleNamespace(spec=native.spec, _running=torch.ones(1), scene=native.scene)
    expert = ScriptedExpert(env, noise=0.1)
    native.reset(init=[3])
    warp.reset(init=[3])
    rows, flags, solved = [], True, [0, 0]
    began = time.perf_counter()
    for chunk in range(limit // CHUNK):
        a, actions = native.rollout(expert.act, CHUNK)
        b = warp.step(actions)
        flags &= bool(torch.equal(a.success, b.success))
        apart = (a.obs.privileged - b.obs.privileged).abs()[0]  # type: ignore[operator]
        hand = (a.obs.proprio - b.obs.proprio).abs()[0, :3]
        rows.append({"hand_m": float(hand.max()), "largest": float(apart.max())})
        for i, step in enumerate((a, b)):
            solved[i] = solved[i] or (chunk + 1) * CHUNK * bool(step.success)
        print(suite, number, chunk, rows[-1], solved, flush=True)
        if a.done.any() or b.done.any():
            break
    native.close()
    warp.close()
    return {
        "steps": CHUNK * len(rows), "first_chunk": rows[0], "fourth_chunk": rows[min(3, len(rows) - 1)],
        "largest_hand_m": max(row["hand_m"] for row in rows), "last": rows[-1], "success_flags_equal": flags,
        "solved_by_step": solved, "seconds": round(time.perf_counter() - began),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("scenes", "goals", "episodes"), default=["scenes", "goals"]
    )
    parser.add_argument(
        "--episodes", nargs="+", default=["libero_object:0"], metavar="SUITE:NUMBER"
    )
    parser.add_argument("--limit", type=int, default=280, help="control steps of an episode")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    found = json.loads(args.out.read_text()) if args.out.exists() else {}
    found = {part: found.get(part, {}) for part in ("scenes", "goals", "episodes")}

    def keep(part: str, name: str, row: dict[str, Any]) -> None:
        found[part][name] = row
        print(part, name, json.dumps(row), flush=True)
        asked = [r for r in found["goals"].values()]
        summary = {
            "scenes": len(found["scenes"]),
            "scenes_refused": sum("refused" in r for r in found["scenes"].values()),
            "tasks_asked": len(asked),
            **{f"goals_{key}": sum(r[key] for r in asked) for key in ("asked", "held", "wrong")},
        }
        args.out.write_text(json.dumps({"summary": summary} | found | about, indent=1) + "\n")

    seen: set[str] = set()
    for suite in SUITES:
        for number, task in enumerate(suites.load_suite(suite)):
            name = f"{suite}:{number}"
            if "scenes" in args.parts and name not in found["scenes"]:
                plan, model = plan_of(task)
                if plan.xml not in seen:
                    seen.add(plan.xml)
                    keep("scenes", name, scene(model))
            if "goals" in args.parts and name not in found["goals"]:
                keep("goals", name, goals(task))
    if "episodes" in args.parts:
        for name in args.episodes:
            suite, number = name.split(":")
            keep("episodes", name, episode(suite, int(number), args.limit))


if __name__ == "__main__":
    main()
