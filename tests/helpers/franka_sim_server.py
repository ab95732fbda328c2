"""franka-sim's server, where a busy computer changes neither the physics nor what the arm was told.

By itself franka-sim advances its physics by a clock of its own. On a busy computer that clock loses
time against the robot's states, so the arm moves faster than it was told, and the arm's measured
velocity raises a reflex. Here every state that is sent advances the physics by its millisecond.

Commands that come too late are dropped, as Franka says its robots do
(https://support.franka.de/docs/requirements.html). By itself franka-sim lets such a command undo
what the robot did meanwhile, and so calls the next one a jump.

Runs in franka-sim's own environment.
"""

# pyright: reportMissingImports=false
import sys
import threading
import time

from franka_sim.mujoco_franka_sim import MujocoFrankaSim
from franka_sim.run_server import main
from franka_sim.server.motion_session import MotionSessionMixin

IDLE = 0.05
"""s without a state sent, after which the physics goes on by itself."""

physics, sent = threading.Lock(), [0.0]


def advance(sim: MujocoFrankaSim) -> None:
    """One millisecond of physics."""
    with physics:
        sim.step()


def run(sim: MujocoFrankaSim) -> None:
    """The physics while no state is sent: a step a millisecond."""
    while sim.running:
        if time.monotonic() - sent[0] > IDLE:
            advance(sim)
        time.sleep(sim.dt)


absorb = MotionSessionMixin._absorb_within_motion_limits
account = MotionSessionMixin._account_for_communication_cycle


def account_and_advance(session: MotionSessionMixin) -> None:
    """What franka-sim does once for each state that it sends, and the physics."""
    account(session)
    sent[0] = time.monotonic()
    advance(session.physics_sim)


MotionSessionMixin._absorb_within_motion_limits = lambda session, command, *, fresh: (
    fresh and absorb(session, command, fresh=fresh)
)
MotionSessionMixin._account_for_communication_cycle = account_and_advance
MujocoFrankaSim.run_simulation = run
sys.exit(main())
