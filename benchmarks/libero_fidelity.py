"""LIBERO's native backend beside robosuite's own ``env.step``, task by task: states, sensors, successes and predicates.

    taskset -c 1 nice -n 15 python benchmarks/libero_fidelity.py

For every task, from an official initial state, both take the same actions: a first chunk of random
ones, then the scripted expert's (noise .1) where it knows the goal until the task is solved, and
elsewhere smooth random ones drawn towards what the goal names, so that something is touched. Then
the goal's predicates are asked in states into which the objects were thrown at random near their
places. The JSON is written after every task; what it holds already, measured with the same
versions, is not measured again. Pictures are compared by ``libero_pictures.py``.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
import torch

from embodyrl.sims.libero import blueprint, suites
from embodyrl.sims.libero.experts import ScriptedExpert
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.libero.scene import Scene, Start, axis_angle
from embodyrl.storage.provenance import git_commit, hardware, versions

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
INIT, CHUNK, RANDOM_STEPS = 3, 8, 96
SETTLE = np.array([0, 0, 0, 0, 0, 0, -1.0])


class Pair:
    """One task in both: ``Simulation``, and robosuite's env with its own controller, sensors and success."""

    def __init__(self, task: suites.Task) -> None:
        self.scene = Scene(task, {})
        del self.scene._nominal.update  # the faster update that Scene put in its place
        plan, model = blueprint.load_blueprint(task, lambda: self.scene)
        self.native = Simulation(task, plan, model)
        self.start = Start(suites.official_states(task)[INIT], self.scene.fixture_poses())
        self.reset()

    def reset(self) -> None:
        """Both at the same initial state, after one step with the gripper open."""
        self.native.start(self.start)
        self.scene.start(self.start)
        env = self.scene.env
        for sensor in env._observables.values():
            sensor.reset()
        for _ in range(
            2
            # at the end of robosuite's reset, and of LIBERO's set_init_state: both move its clock
            # on
        ):
            env._update_observables(force=True)
        self.error, self.flags_equal, self.steps, self.success = 0.0, True, 0, False
        self.step(SETTLE)

    def step(self, action: np.ndarray) -> None:
        """The same control step in both, and how far they are apart then."""
        action = action.clip(-1.0, 1.0).astype(np.float32).astype(np.float64)
        self.native.step(action)
        raw, _, done, _ = self.scene.env.step(action)
        self.success = self.native.success()
        self.flags_equal &= self.success == bool(done)
        self.steps += 1
        hand = np.concatenate(
            [
                raw["robot0_eef_pos"],
                axis_angle(raw["robot0_eef_quat"][[3, 0, 1, 2]]),
                raw["robot0_gripper_qpos"],
            ]
        )
        mine, other = self.native.data, self.scene.data
        for a, b in (
            (mine.qpos, other.qpos),
            (mine.qvel, other.qvel),
            (self.native.proprio(), hand.astype(np.float32)),
        ):
            self.error = max(self.error, float(np.abs(a - b).max()))
        self.error = max(
            self.error, float(np.abs(self.native.privileged() - self.scene.privileged()).max())
        )


def expert_episode(pair: Pair, limit: int) -> None:
    env: Any = SimpleNamespace(
        spec=SimpleNamespace(num_envs=1), _running=torch.ones(1), scene=lambda _: pair.native
    )
    expert = ScriptedExpert(env, noise=0.1)
    while not pair.success and pair.steps < limit:
        pair.step(expert.act()[0].double().numpy())


def random_episode(pair: Pair, rng: np.random.Generator) -> None:
    """A new direction every 8 steps, half of it towards what the goals name; the gripper opens and closes."""
    names = [goal[1] for goal in pair.native.goals()]
    for t in range(RANDOM_STEPS):
        if t % 8 == 0:
            noise, grip, name = (
                rng.uniform(-1, 1, 6),
                rng.choice([-1.0, 1.0]),
                str(rng.choice(names)),
            )
        hand = pair.native.data.site_xpos[pair.native.robot.site]
        towards = ((pair.native.position(name) - hand) / 0.05).clip(-1, 1)
        pair.step(np.concatenate([0.6 * noise[:3] + 0.6 * towards, 0.5 * noise[3:], [grip]]))


def predicates(pair: Pair, tries: int = 60) -> dict[str, int]:
    """Agreement of all goals in random states."""
    mine, other = pair.native, pair.scene
    rng, model, plan = np.random.default_rng(0), mine.model, mine.blueprint
    start = mine.data.qpos.copy()
    held = wrong = 0
    for _ in range(tries):
        qpos = start.copy()
        for address in plan.observed_joints:
            low, high = model.jnt_range[list(model.jnt_qposadr).index(address)]
            qpos[address] = rng.choice([low, high, rng.uniform(low, high), start[address]])
        mine.data.qpos[:] = qpos
        mujoco.mj_kinematics(model, mine.data)
        for goal in mine.goals():
            body = mine.body(goal[1])
            joint = int(model.body_jntadr[body]) if body >= 0 else -1
            if (
                len(goal) == 3
                and joint >= 0
                and model.jnt_type[joint] == mujoco.mjtJoint.mjJNT_FREE
            ):
                address = int(model.jnt_qposadr[joint])
                if rng.random() < 0.8:
                    qpos[address : address + 3] = mine.position(goal[2]) + 0.03 * rng.normal(size=3)
        for scene in (mine, other):
            scene.data.qpos[:] = qpos
            mujoco.mj_forward(scene.model, scene.data)
        for goal in mine.goals():
            answer = other.reached(goal)
            held += answer
            wrong += mine.reached(goal) != answer
    return {"predicates_asked": tries * len(mine.goals()), "held": held, "wrong": wrong}


def measure(suite: str, number: int) -> dict[str, Any]:
    began = time.perf_counter()
    task = suites.load_suite(suite)[number]
    rng = np.random.default_rng(number)
    with suites.quiet():
        pair = Pair(task)
        for _ in range(CHUNK):
            pair.step(rng.uniform(-1, 1, 7))
        first, flags = pair.error, pair.flags_equal
        pair.reset()
        known = all(goal[0] in ("on", "in") and len(goal) == 3 for goal in pair.native.goals())
        if known:
            expert_episode(pair, suites.max_episode_steps(suite))
        else:
            random_episode(pair, rng)
        row = {
            "suite": suite, "number": number, "task": task.name, "actions": "expert" if known else "random",
            "steps": pair.steps, "success": pair.success, "flags_equal": flags and pair.flags_equal,
            "largest_error_first_chunk": first, "largest_error": pair.error,
        }  # fmt: skip
        row |= predicates(pair)
    return row | {"seconds": round(time.perf_counter() - began, 1)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    good = [row for row in rows if "error" not in row]
    experts = [row for row in good if row["actions"] == "expert"]
    return {
        "tasks": len(rows),
        "tasks_that_failed": len(rows) - len(good),
        "steps": sum(row["steps"] for row in good),
        "equal_bit_for_bit": sum(row["largest_error"] == 0 for row in good),
        "largest_error_first_chunk": max(row["largest_error_first_chunk"] for row in good)
        if good
        else None,
        "largest_error": max(row["largest_error"] for row in good) if good else None,
        "tasks_with_equal_flags": sum(row["flags_equal"] for row in good),
        "expert_episodes": len(experts),
        "expert_successes": sum(row["success"] for row in experts),
        "predicates_asked": sum(row["predicates_asked"] for row in good),
        "predicates_held": sum(row["held"] for row in good),
        "predicates_wrong": sum(row["wrong"] for row in good),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suites", nargs="+", default=SUITES)
    parser.add_argument("--tasks", type=int, default=0, help="of each suite; 0 means all")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    about = {"commit": git_commit(), "versions": versions(), "hardware": hardware()}
    rows: list[dict[str, Any]] = []
    if args.out.exists():
        before = json.loads(args.out.read_text())
        if before.get("versions") == about["versions"]:
            rows = before["tasks"]
    sizes = {suite: len(suites.load_suite(suite)) for suite in args.suites}
    done = {(row["suite"], row["number"]) for row in rows}
    for number in range(args.tasks or max(sizes.values())):
        for suite in args.suites:
            if number >= sizes[suite] or (suite, number) in done:
                continue
            try:
                row = measure(suite, number)
            except Exception as error:  # the other tasks are still worth having
                row = {
                    "suite": suite,
                    "number": number,
                    "error": f"{type(error).__name__}: {error}",
                }
            gc.collect()  # robosuite's objects know one another in circles, and hold .3 GB each
            rows.append(row)
            print(json.dumps(row), flush=True)
            result = {"summary": summary(rows), "tasks": rows} | about
            half = args.out.with_suffix(".half")
            half.write_text(json.dumps(result, indent=1) + "\n")
            half.replace(args.out)


if __name__ == "__main__":
    main()
