"""LIBERO's native backend beside robosuite's controller and objects: states, successes, predicates and pictures.

For every task: one episode from an official initial state, with the scripted expert's actions (noise .1) where it knows
the goal and with smooth random ones elsewhere, taken by both backends; and the goal's predicates in states into which
the objects were thrown at random near their places.

Run: python benchmarks/libero_fidelity.py [--suites libero_object ...] [--tasks 10] [--out FILE]; 0 tasks means all.
"""

import argparse
import json
import time
from pathlib import Path

import mujoco
import numpy as np
import torch

from embodyrl.errors import UserError
from embodyrl.provenance import git_commit, versions
from embodyrl.sims.libero import suites
from embodyrl.sims.libero.env import LiberoConfig, LiberoEnv

HORIZON, SIZE, INIT = 40, 128, 3  # long chunks: what costs time is the reference's pictures


def psnr(a, b):
    error = ((a.double() - b.double()) ** 2).mean().item()
    return float("inf") if error == 0 else 10 * np.log10(255**2 / error)


def smooth_actions(rng):
    """A new direction every 8 steps, mostly downwards, the gripper opening and closing."""
    actions = rng.uniform(-1, 1, (1, HORIZON // 8, 7))
    actions[..., 2] -= 0.3
    return torch.from_numpy(np.repeat(actions.clip(-1, 1), 8, axis=1)).float()


def episode(native, reference, pixels):
    a, b = native.reset(init=[INIT]), reference.reset(init=[INIT])
    expert, rng = native.make_expert(noise=0.1), np.random.default_rng(0)
    expert.reset()
    policy, worst, frames, steps, same = "expert", 0.0, [], 0, True
    while native._running.any():
        if policy == "expert":
            try:
                a, actions = native.rollout(expert.act, HORIZON)
            except UserError:
                policy = "random"
        if policy == "random":
            actions = smooth_actions(rng)
            a = native.step(actions)
        b = reference.step(actions)
        steps += int(a.valid.sum())
        mine, other = native.scene(0).data, reference.scene(0).data
        worst = max(worst, float(np.abs(mine.qpos - other.qpos).max()), float(np.abs(mine.qvel - other.qvel).max()))
        for name in ("proprio", "privileged"):
            worst = max(worst, (getattr(a.obs, name) - getattr(b.obs, name)).abs().max().item())
        same &= bool((a.success == b.success).all() and (a.valid == b.valid).all())
        if pixels:
            frames.append([psnr(a.obs.images[c], b.obs.images[c]) for c in native.spec.cameras])
    out = {
        "actions": policy,
        "steps": steps,
        "success": bool(a.success[0]),
        "flags_equal": same,
        "largest_error": worst,
    }
    if pixels:
        out |= {
            f"psnr_{c}": round(float(np.mean(f)), 1)
            for c, f in zip(native.spec.cameras, np.array(frames).T, strict=True)
        }
    return out


def predicates(mine, other, tries=200):
    """Agreement of all goals in random states; ``mine`` and ``other`` are the two scenes of one task."""
    rng, model = np.random.default_rng(0), mine.model
    start = mine.data.qpos.copy()
    free = [int(model.jnt_qposadr[j]) for j in range(model.njnt) if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE]
    joints = mine.blueprint.observed_joints
    held, wrong = 0, 0
    for _ in range(tries):
        qpos = start.copy()
        for joint in joints:
            low, high = model.jnt_range[list(model.jnt_qposadr).index(joint)]
            qpos[joint] = rng.choice([low, high, rng.uniform(low, high), start[joint]])
        mine.data.qpos[:] = qpos
        mujoco.mj_kinematics(model, mine.data)
        for goal in mine.goals():
            if len(goal) == 3:
                item, place = mine.blueprint.items[goal[1]], mine.position(goal[2])
                address = int(model.jnt_qposadr[model.body_jntadr[item.body]]) if model.body_jntnum[item.body] else -1
                if address in free and rng.random() < 0.8:
                    qpos[address : address + 3] = place + rng.normal(size=3) * [0.03, 0.03, 0.03]
        for scene in (mine, other):
            scene.data.qpos[:] = qpos
            mujoco.mj_forward(scene.model, scene.data)
        for goal in mine.goals():
            a, b = mine.reached(goal), other.reached(goal)
            held += b
            wrong += a != b
    return {"predicates_asked": tries * len(mine.goals()), "held": held, "wrong": wrong}


def measure(suite, number, pixels):
    config = {"num_envs": 1, "split": "eval", "suite": suite, "task_ids": (number,), "image_size": SIZE}
    config["cameras"] = ("agentview", "wrist") if pixels else ()
    native, reference = (LiberoEnv(LiberoConfig(**config, backend=b)) for b in ("native", "robosuite"))
    try:
        out = {"suite": suite, "task": native.tasks[0].name} | episode(native, reference, pixels)
        native.reset(init=[INIT])
        reference.reset(init=[INIT])
        return out | predicates(native.scene(0), reference.scene(0))
    finally:
        native.close()
        reference.close()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suites", nargs="+", default=["libero_spatial", "libero_object", "libero_goal", "libero_10"])
    parser.add_argument("--tasks", type=int, default=3, help="of each suite; 0 means all")
    parser.add_argument("--no-pixels", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    rows = []
    sizes = {suite: len(suites.load_suite(suite)) for suite in args.suites}
    most = args.tasks or max(sizes.values())
    for suite, number in ((s, n) for n in range(most) for s in args.suites if n < sizes[s]):
        start = time.perf_counter()
        rows.append(measure(suite, number, not args.no_pixels))
        rows[-1]["seconds"] = round(time.perf_counter() - start, 1)
        print(json.dumps(rows[-1]), flush=True)
        summary = {
            "episodes": len(rows),
            "steps": sum(row["steps"] for row in rows),
            "episodes_equal_bit_for_bit": sum(row["largest_error"] == 0 and row["flags_equal"] for row in rows),
            "episodes_with_equal_flags": sum(row["flags_equal"] for row in rows),
            "successes": sum(row["success"] for row in rows),
            "predicates_asked": sum(row["predicates_asked"] for row in rows),
            "predicates_held": sum(row["held"] for row in rows),
            "predicates_wrong": sum(row["wrong"] for row in rows),
        }
        about = {"commit": git_commit(), "versions": versions()}
        args.out.write_text(json.dumps({"summary": summary, "tasks": rows} | about, indent=1) + "\n")


if __name__ == "__main__":
    main()
