"""Several simulated arms with one person, beside one arm with one person.

    python benchmarks/robot_arms.py --init runs/sft --detector runs/detector --minutes 60 --seeds 0 1 2
    python benchmarks/robot_arms.py --init runs/long_pick runs/bench/robot_improve/pick/0/start

Every arm is the twin behind its safety filter and plays a checkpoint, as ``embodyrl deploy`` does. All arms
share one simulated time: the one that is furthest behind acts next, so two cores suffice for any
number. A row is one run of so many minutes. ``--init`` names policies; ``{seed}`` in a name stands for the seed:

    who      nobody, the policies are alone; overdue, an arm asks after a share of its episode;
             detector, it also asks when its failure detector sees it fail
    arms     1, or --arms

An arm that asks holds still until the person comes, the one that waits longest first. They need
``--reaction`` s to look and to take over, and then end the episode as the task's expert would, with noise of
``--noise`` (their skill) and ``--person-actions`` at most. With ``--reset`` s they also arrange every scene,
and an arm waits for that as well. Person-seconds are those in which they react, move or arrange.

ARMADA (arXiv:2510.02298) reports on real arms that one person with several arms that ask reaches more
than four times the success rate, with less than half of the interventions. Here the policy does not
learn meanwhile: what is measured is one round of it. Draws nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.functional.intervals import wilson
from embodyrl.real_robot.connect_robot import simulated_robot
from embodyrl.real_robot.control.actions import DeltaDecoder, action_space
from embodyrl.real_robot.control.safety import SafetyFilter
from embodyrl.real_robot.control.step_driver import StepDriver
from embodyrl.real_robot.policy_link.checkpoint_policy import CheckpointPolicy
from embodyrl.real_robot.twin.config import twin_config
from embodyrl.sims.mujoco.experts import ScriptedExpert
from embodyrl.storage.provenance import git_commit, hardware, versions

SPEED = 0.25
"""Share of the trained control rate, as in ``embodyrl deploy``."""


@dataclass
class Person:
    """One person, who serves one arm at a time.

    Attributes:
        serves: number of the arm; None while they are free.
        seconds: that they reacted, moved an arm or arranged a scene.
    """

    serves: int | None = None
    seconds: float = 0.0


@dataclass
class Counts:
    """What happened on all arms of a run."""

    episodes: int = 0
    solved: int = 0
    alone: int = 0  # solved without a person
    interventions: int = 0
    asks: dict[str, int] = field(default_factory=dict)
    waits: list[float] = field(default_factory=list)


class Arm:
    """One simulated arm: what it does next, and when, in the time that all arms share.

    Args:
        number: of the arm.
        init: its policy.
        a: the command line's arguments.
        who: ``"nobody"``, ``"overdue"`` or ``"detector"``.
        inits: gives the next initial state of all arms.
        seed: of the policy's and the person's noise.
        person: whom it asks.
        counts: of all arms.
    """

    def __init__(
        self, number: int, init: str, a: argparse.Namespace, who: str, inits: Any, seed: int,
        person: Person, counts: Counts,
    ) -> None:  # fmt: skip
        detectors = [a.detector] if who == "detector" else []
        self.policy = CheckpointPolicy(init, "cpu", seed * 100 + number, detectors=detectors)
        self.context = simulated_robot(twin_config(init, ()))
        self.connected = self.context.__enter__()
        self.expert = ScriptedExpert(self.connected.robot, a.noise, seed * 100 + number)  # type: ignore[arg-type]
        self.number = number
        self.a = a
        self.who = who
        self.inits = inits
        self.person = person
        self.counts = counts
        self.time = 0.0
        self.begin()

    def begin(self) -> None:
        """Begins the next episode, which may wait for the person to arrange it."""
        facts = self.policy.metadata
        safety = self.connected.safety
        self.connected.begin(next(self.inits))
        self.decoder = DeltaDecoder(
            action_space(facts), facts["control_hz"] * SPEED, safety.box_low, safety.box_high
        )
        self.driver = StepDriver(
            self.connected.robot,
            self.connected.clock,
            SafetyFilter(replace(safety, resume="fresh_target")),
            self.decoder,
            False,
        )
        self.driver.start()
        self.plan: deque[np.ndarray] = deque()
        self.taken = 0
        self.by_person = 0
        self.state = "policy"
        self.asked = False
        self.ready_at = 0.0
        if self.a.reset and self.who != "nobody":
            self.ask("reset")

    def ask(self, why: str) -> None:
        """Holds still until the person comes."""
        self.driver.hold(why)
        self.why = why
        self.state = "waiting"
        self.since = self.time
        self.counts.asks[why] = self.counts.asks.get(why, 0) + 1

    def served(self) -> None:
        """The person turns to this arm."""
        self.person.serves = self.number
        self.state = "served"
        self.counts.waits.append(self.time - self.since)
        busy = self.a.reset if self.why == "reset" else self.a.reaction
        self.ready_at = self.time + busy

    def advance(self) -> None:
        """One control step."""
        before = self.connected.clock.now()
        if self.state == "policy":
            self.act_alone()
        elif self.state == "served" and self.time >= self.ready_at:
            self.act_by_person()
        else:
            self.driver.wait_until(before + self.decoder.period)
        # Resets take no time here, unless a person makes them.
        passed = self.connected.clock.now() - before
        self.time += passed
        if self.person.serves == self.number:
            self.person.seconds += passed
        if self.state == "over":
            self.driver.stop()
            self.begin()

    def act_alone(self) -> None:
        """The policy's next action, and whether the arm asks after it."""
        if not self.plan:
            seen = self.connected.robot.observe(self.decoder)
            answer = self.policy.infer({**seen, "step": self.taken})
            self.plan.extend(answer["actions"][: self.policy.metadata["execute"]])
            if answer.get("ask") and not self.asked:
                self.asked = True
                self.plan.clear()
                self.ask("detector")
                return
        self.driver.wait_until(self.driver.act(self.plan.popleft()))
        self.taken += 1
        limit = self.policy.metadata["max_episode_steps"]
        if self.finished() or self.driver.broken or self.taken >= limit:
            self.end(self.finished())
        elif self.who != "nobody" and not self.asked and self.taken >= self.a.overdue * limit:
            self.asked = True
            self.ask("overdue")

    def act_by_person(self) -> None:
        """The person's next action, or the end of their arranging."""
        if self.why == "reset":
            self.person.serves = None
            self.state = "policy"
            self.driver.hand_over(False)
            return
        if not self.by_person:
            self.expert.reset()
            self.driver.hand_over(True)
            self.counts.interventions += 1
        self.connected.robot.observe(self.decoder)
        self.driver.wait_until(self.driver.act(self.expert.act()[0].cpu().numpy()))
        self.by_person += 1
        if self.finished() or self.driver.broken or self.by_person >= self.a.person_actions:
            self.end(self.finished())
            self.person.serves = None

    def finished(self) -> bool:
        """Whether the task is solved."""
        return self.connected.robot.solved()

    def end(self, solved: bool) -> None:
        """Ends the episode, also where the arm was driven against something."""
        self.counts.episodes += 1
        self.counts.solved += solved
        self.counts.alone += solved and not self.by_person
        self.state = "over"

    def close(self) -> None:
        """Frees the simulator."""
        self.context.__exit__(None, None, None)


def run(a: argparse.Namespace, init: str, who: str, count: int, seed: int) -> dict[str, Any]:
    """So many minutes of ``count`` arms with one person, in simulated time."""
    began = time.process_time()
    person = Person()
    counts = Counts()
    # All arms draw from one list, so that any number of them meets the same states.
    inits = iter(range(seed * 100_000, (seed + 1) * 100_000))
    arms = [Arm(k, init, a, who, inits, seed, person, counts) for k in range(count)]
    end = a.minutes * 60.0
    while (arm := min(arms, key=lambda one: one.time)).time < end:
        waiting = [one for one in arms if one.state == "waiting" and one.time <= arm.time + 1e-9]
        if person.serves is None and waiting:
            min(waiting, key=lambda one: one.since).served()
        arm.advance()
    for one in arms:
        one.close()
    hours = end / 3600
    row = {
        "who": who, "arms": count, "seed": seed, "episodes": counts.episodes,
        "solved": counts.solved, "solved_alone": counts.alone,
        "interval": wilson(counts.solved, counts.episodes) if counts.episodes else None,
        "successes_per_hour": round(counts.solved / hours, 1),
        "interventions_per_hour": round(counts.interventions / hours, 1),
        "person_share": round(person.seconds / end, 3),
        "asks": counts.asks,
        "mean_wait_s": round(float(np.mean(counts.waits)), 2) if counts.waits else 0.0,
    }  # fmt: skip
    if counts.solved:
        row["interventions_per_success"] = round(counts.interventions / counts.solved, 3)
        row["person_seconds_per_success"] = round(person.seconds / counts.solved, 2)
    return row | {"cpu_s": round(time.process_time() - began, 1)}


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Successes an hour of several arms, as multiples of one arm's: same policy, person and seed."""
    found = []
    for row in rows:
        same = [o for o in rows if all(o[k] == row[k] for k in ("policy", "who", "seed"))]
        one = next(o for o in same if o["arms"] == 1)["successes_per_hour"]
        if row["arms"] > 1 and one:
            kept = {k: row[k] for k in ("policy", "who", "arms", "seed")}
            found.append(kept | {"ratio": round(row["successes_per_hour"] / one, 2)})
    return found


def main() -> None:
    """Runs every row, and writes the JSON after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--init", nargs="+", required=True, help="checkpoints of an embedded MuJoCo task"
    )
    parser.add_argument(
        "--detector", default="", help="its failure detector; without one no such row"
    )
    parser.add_argument("--arms", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0, help="simulated, of each row")
    parser.add_argument("--overdue", type=float, default=0.7, help="share of an episode")
    parser.add_argument("--reaction", type=float, default=3.0, help="s until the person acts")
    parser.add_argument(
        "--noise", type=float, default=0.1, help="of the person's actions: their skill"
    )
    parser.add_argument("--person-actions", type=int, default=80, help="then they give up")
    parser.add_argument(
        "--reset", type=float, default=0.0, help="s to arrange a scene; 0: by itself"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    load = os.getloadavg()[0]
    rows: list[dict[str, Any]] = []
    about = {"settings": {k: v for k, v in vars(a).items() if k not in ("out", "detector")}}
    about |= {"commit": git_commit(), "hardware": hardware(), "versions": versions()}
    helps = ("nobody", "overdue", *(("detector",) if a.detector else ()))
    for init, seed in product(a.init, a.seeds):
        for who in helps:
            for count in (1, a.arms):
                rows.append({"policy": init, **run(a, init.format(seed=seed), who, count, seed)})
                print(json.dumps(rows[-1]), flush=True)
                if a.out:
                    result = {**about, "rows": rows, "ratios": ratios(rows)}
                    result |= {"load": [load, os.getloadavg()[0]]}
                    a.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
