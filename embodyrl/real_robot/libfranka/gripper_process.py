"""The gripper's process: libfranka's gripper commands block until they are carried out.

That may take a second or more. ``robot.LibfrankaRobot`` starts the process as
``python -m embodyrl.real_robot.libfranka.gripper_process FD ADDRESS SPEED FORCE``. It receives
``["width", w]``. Of those that come during a command only the newest counts.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import socket
import sys
import time

import pylibfranka as franka

from embodyrl.real_robot.libfranka.process_link import Link

TELL_EVERY = 0.05
"""s between two reports of the measured width."""
CLOSED = 0.01
"""m; a smaller width means: grasp whatever is there."""
GRASP_TOLERANCE = 0.08
"""m by which the grasped width may differ: any object will do."""


def main(fd: int, address: str, speed: float, force: float) -> None:
    """Carries out commanded widths and reports the measured one, until the link is closed."""
    link = Link(socket.socket(fileno=fd))
    try:
        gripper = franka.Gripper(address)
        while not link.closed:
            link.say("width", gripper.read_once().width)
            wanted = [width for word, width in link.heard() if word == "width"]
            try:
                if wanted and wanted[-1] < CLOSED:
                    gripper.grasp(0.0, speed, force, GRASP_TOLERANCE, GRASP_TOLERANCE)
                elif wanted:
                    gripper.move(wanted[-1], speed)
            except franka.CommandException as error:  # this command failed; the next may work
                link.say("problem", str(error))
            time.sleep(TELL_EVERY)
    except (RuntimeError, franka.FrankaException) as error:
        link.say("trouble", f"the gripper: {error or type(error).__name__}")
    link.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
