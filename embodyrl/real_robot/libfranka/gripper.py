"""The gripper's process: libfranka's gripper commands block until they are carried out, a second or more.

``robot.LibfrankaRobot`` starts it as
``python -m embodyrl.real_robot.libfranka.gripper FD ADDRESS SPEED FORCE``. It is told
``["width", w]``; of those that come meanwhile only the newest counts.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import socket
import sys
import time

import pylibfranka as franka

from embodyrl.real_robot.libfranka.link import Link

TELL_EVERY = 0.05
CLOSED = 0.01
"""m; a smaller width than this is a grasp of whatever is there."""


def main(fd: int, address: str, speed: float, force: float) -> None:
    """Carries out widths and tells the measured one, until the link is closed."""
    link = Link(socket.socket(fileno=fd))
    try:
        gripper = franka.Gripper(address)
        while not link.closed:
            link.say("width", gripper.read_once().width)
            wanted = [width for word, width in link.heard() if word == "width"]
            try:
                if wanted and wanted[-1] < CLOSED:
                    gripper.grasp(0.0, speed, force, 0.08, 0.08)
                elif wanted:
                    gripper.move(wanted[-1], speed)
            except franka.CommandException as error:  # what was to be done cannot be; the next may
                link.say("problem", str(error))
            time.sleep(TELL_EVERY)
    except (RuntimeError, franka.FrankaException) as error:
        link.say("trouble", f"the gripper: {error}")
    link.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
