"""Deploy a policy on a simulated Franka, through the safety filter, and read the log of the run.

You learn: what stands between a policy and an arm. A pre-flight check comes first. Then an executor
asks the policy for chunks while the arm moves. At every tick, 100 times a second, a filter keeps
position, velocity, acceleration and jerk within the arm's limits. All of it is logged, as MCAP with
ROS 2 messages.

Costs: 15 s. Needs: demonstrate_and_imitate.py; pip install 'embodyrl[robot]'.
Writes: runs/examples/deploy. Prints: the check, the outcome, and what the log says.
"""

from pathlib import Path

import numpy as np

from embodyrl.real_robot.commands import deploy_checkpoint
from embodyrl.real_robot.logs.mcap_log import read

OUT = Path("runs/examples")


def main() -> None:
    # The simulated arm's clock stands still while the policy thinks; 50 ms are charged for it.
    result = deploy_checkpoint(
        str(OUT / "imitation"), robot="twin", latency=0.05, out=str(OUT / "deploy")
    )
    episode = result["results"][0]
    print(f"\nThe episode ended with {episode['reason']!r} after {episode['seconds']:.1f} s.")
    print("Largest value of each quantity, as a share of its limit:")
    for name, share in episode["peak"].items():
        print(f"  {name:14} {share:.2f}")

    # The log: one list of messages for each topic, each with its time stamp.
    log = read(episode["log"])
    commands = log["/command"]
    seconds = commands[-1]["stamp"] - commands[0]["stamp"]
    moved = np.ptp([command["q"] for command in commands], axis=0)
    print(f"{len(commands)} commands in {seconds:.1f} s, {len(log['/action'])} actions")
    print("joints moved by (rad)", np.round(moved, 2))
    for event in log["/event"]:
        print(f"event at {event['stamp'] - commands[0]['stamp']:5.2f} s: {event['text']}")


if __name__ == "__main__":
    main()
