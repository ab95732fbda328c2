"""The same checkpoint on the simulated arm in one process, and over each transport in the wall clock's time.

    python benchmarks/robot_transports.py runs/ppo --episodes 32 --out
    benchmarks/robot_transports.json

``.venv-ros/bin/python`` (``make test-robot``) has what ROS 2 and libfranka need; a roscore and
franka-sim are started here. For each transport: the rate of joint states and pictures and their way
from stamp to callback over ten seconds, then the episodes; in one process those at several shares
of the trained rate. ``evaluation`` is the same initial states in the env that the policy was
trained in, without filter and transport. The limits of age are wide, because a machine that does
other work too would stop the arm for being late; ``late`` counts the ticks that came more than half
a tick late, ``load`` is what the machine was doing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.real_robot.commands import deploy_checkpoint
from embodyrl.real_robot.ros import fields
from embodyrl.real_robot.ros.config import PRESETS
from embodyrl.real_robot.ros.connect_bus import connect
from embodyrl.real_robot.twin.mujoco_twin import BOX
from embodyrl.storage.provenance import git_commit, hardware, versions
from embodyrl.training.evaluate import evaluate_checkpoint

SAFETY = {**BOX, "robot": "panda", "max_gap": 0.2, "max_state_age": 0.2, "max_target_age": 0.4}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--mode", default="rtc")
    parser.add_argument(
        "--robots", nargs="+", default=["twin", "rosbridge", "ros2", "ros1", "libfranka"]
    )
    parser.add_argument("--speed", type=float, default=0.25)
    parser.add_argument(
        "--speeds", type=float, nargs="+", default=[1.0, 0.5, 0.25, 0.125], help="in one process"
    )
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    rows, load = [], os.getloadavg()[0]
    evaluation = evaluate_checkpoint(a.checkpoint, episodes=a.episodes)
    evaluation = {k: evaluation[k] for k in ("successes", "episodes", "success_rate", "interval")}
    print(json.dumps({"evaluation": evaluation}), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "twin.yaml"
        file.write_text(json.dumps({"preset": "twin", "safety": SAFETY}))
        for robot in a.robots:
            options = {
                "mode": a.mode,
                "episodes": a.episodes,
                "speed": a.speed,
                "out": f"{folder}/{robot}",
            }
            if robot == "twin":
                for options["speed"] in a.speeds:
                    rows.append(summed_up(deploy_checkpoint(a.checkpoint, latency=0.0, **options)))
                    print(json.dumps(rows[-1]), flush=True)
                continue
            if robot == "libfranka":
                with franka_sim():
                    row: dict[str, Any] = deploy_checkpoint(a.checkpoint, robot=robot, **options)
            else:
                with (
                    roscore() if robot == "ros1" else nullcontext(),
                    twin(a.checkpoint, robot) as address,
                ):
                    stream = listen(robot, address)
                    options |= {"robot": robot, "address": address, "robot_file": str(file)}
                    row = deploy_checkpoint(a.checkpoint, **options) | {"stream": stream}
            rows.append(summed_up(row))
            print(json.dumps(rows[-1]), flush=True)
    result = {
        "checkpoint": str(a.checkpoint),
        "safety": SAFETY,
        "evaluation": evaluation,
        "rows": rows,
        "load": [load, os.getloadavg()[0]],
        "commit": git_commit(),
        "hardware": hardware(),
        "versions": versions(),
    }
    if a.out:
        a.out.write_text(json.dumps(result, indent=1) + "\n")


def summed_up(result: dict[str, Any]) -> dict[str, Any]:
    episodes = result.pop("results")
    ticks = sum(e["seconds"] for e in episodes) / 0.01
    return {k: v for k, v in result.items() if k != "checkpoint"} | {
        "seconds": round(sum(e["seconds"] for e in episodes), 1),
        "late": round(sum(e["late"] for e in episodes) / ticks, 4),
        "delay_actions": round(
            float(np.mean([d for e in episodes for d in e["delays"]] or [0])), 2
        ),
        "peak": {k: round(max(e["peak"][k] for e in episodes), 4) for k in episodes[0]["peak"]},
        "reasons": {
            r: sum(e["reason"] == r for e in episodes)
            for r in sorted({e["reason"] for e in episodes})
        },
    }


@contextmanager
def roscore() -> Iterator[None]:
    """A master at a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"ROS_MASTER_URI": f"http://127.0.0.1:{port}", "ROS_IP": "127.0.0.1"}
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = ["rosmaster", "--core", "-p", str(port)]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=clean
    )
    time.sleep(3.0)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


@contextmanager
def franka_sim() -> Iterator[None]:
    """franka-sim with all its reflexes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
    from franka_arm import start_sim

    process = start_sim()
    try:
        yield
    finally:
        process.kill()
        process.wait()


@contextmanager
def twin(checkpoint: str, transport: str) -> Any:
    """``embodyrl twin`` in a process of its own; gives the address of its rosbridge server, or nothing."""
    command = [
        sys.executable,
        "-u",
        "-m",
        "embodyrl.cli",
        "twin",
        checkpoint,
        "--transport",
        transport,
        "--port",
        "0",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = process.stdout.readline()
        found = re.search(r"ws://(\S+)\.", said)
        if "Ctrl-C" not in said:
            raise RuntimeError(f"the twin did not start: {said}")
        yield found[1] if found else ""
    finally:
        process.terminate()
        process.wait()


def listen(robot: str, address: str, seconds: float = 10.0) -> dict[str, Any]:
    """Rates (Hz), and ms from stamp to callback."""
    ages: dict[str, list[float]] = {"states": [], "pictures": []}
    bus, topics = connect(robot, address, "listener"), PRESETS["twin"]

    def hear(what: str) -> Any:
        return lambda m: ages[what].append(time.time() - fields.seconds(m["header"]["stamp"]))

    bus.subscribe(topics.states, "sensor_msgs/JointState", hear("states"))
    bus.subscribe(topics.cameras["front"], "sensor_msgs/Image", hear("pictures"))
    time.sleep(3.0)  # discovery
    for each in ages.values():
        each.clear()
    time.sleep(seconds)
    bus.close()
    out: dict[str, Any] = {}
    for what, each in ages.items():
        out[what] = {"hz": round(len(each) / seconds, 1)}
        out[what] |= {f"p{p}_ms": round(float(np.percentile(each, p)) * 1e3, 2) for p in (50, 99)}
    return out


if __name__ == "__main__":
    main()
