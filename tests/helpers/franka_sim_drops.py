"""franka-sim's server, which drops commands that come too late, as Franka says its robots do.

franka-sim by itself lets such a command undo what the robot did meanwhile, and so calls the next
one a jump (https://support.franka.de/docs/requirements.html). Runs in franka-sim's own environment.
"""

# pyright: reportMissingImports=false
import sys

from franka_sim.run_server import main
from franka_sim.server.motion_session import MotionSessionMixin

absorb = MotionSessionMixin._absorb_within_motion_limits
MotionSessionMixin._absorb_within_motion_limits = lambda self, command, *, fresh: (
    fresh and absorb(self, command, fresh=fresh)
)
sys.exit(main())
