"""The settings of an arm by libfranka: its address, its cameras, and where it may move."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from embodyrl.errors import UserError
from embodyrl.real_robot.control import limits
from embodyrl.real_robot.control.config_checks import require_number
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.robot_file import TWIN_SAFETY, build_safety, read_sections


@dataclass(frozen=True)
class Franka:
    """One arm.

    Attributes:
        address: of its control unit, or of ``franka-sim``.
        realtime: whether this computer must have a real-time kernel, as Franka asks for.
        gripper: whether the arm has Franka's hand.
        gripper_speed: m/s.
        gripper_force: N, of a grasp.
        home: (7,) rad, posture that the arm goes to before each episode, slowly and whatever is in
            its way; empty for none.
        cameras: the policy's name of each camera -> what OpenCV opens: a number, a device's path,
            or an address.
        max_image_age: s, oldest image that the policy may see.
        patience: s that the robot's clock may stand still; after that, time goes on without it.
    """

    address: str = "127.0.0.1"
    realtime: bool = True
    gripper: bool = True
    gripper_speed: float = 0.1
    gripper_force: float = 20.0
    home: tuple[float, ...] = ()
    cameras: dict[str, str] = field(default_factory=dict)
    max_image_age: float = 0.3
    patience: float = 0.1

    def __post_init__(self) -> None:
        if len(self.home) not in (0, 7):
            raise UserError(
                f"libfranka.home has {len(self.home)} angles; a Franka has seven joints."
            )
        for key, low, high, why in (
            ("gripper_speed", 1e-3, 0.1, "m/s, and Franka's hand can do no more"),
            ("gripper_force", 0.1, 70.0, "N, and Franka's hand can do no more"),
            ("max_image_age", 1e-3, 10.0, "seconds"),
            ("patience", 1e-3, 10.0, "seconds"),
        ):
            require_number(f"libfranka.{key}", getattr(self, key), low, high, why)


def load_arm(file: str) -> tuple[Franka, SafetyConfig]:
    """An arm's settings and those of its safety filter.

    Args:
        file: path of a YAML file with the keys ``libfranka`` and ``safety`` (and ``leader``,
            see ``operator.leader``); empty means franka-sim
            on this machine, in the workspace of the embedded tasks.

    Raises:
        UserError: no such file, an unknown key, or no workspace.
    """
    from embodyrl.storage.config_section import build_section

    if not file:
        # franka-sim does not promise to run in real time, and has a hand only in the scene. The
        # force that it reports is always zero.
        simulated = Franka(realtime=False, gripper=False, patience=0.5)
        force = {"max_force": 30.0, "max_force_repeat": None}
        return simulated, SafetyConfig(**{**TWIN_SAFETY, "robot": "fr3", **force})
    purpose = "It names the arm and its workspace; see docs/robot_libfranka.md."
    raw = read_sections(file, ("libfranka", "safety", "leader", "teleoperator"), purpose)
    safety = build_safety(file, raw.get("safety") or {})
    arm = build_section("libfranka", Franka, raw.get("libfranka") or {})
    safe = limits.limits_of(safety.robot).inside()
    for joint, angle in enumerate(arm.home):
        low, high = float(safe.q_min[joint]), float(safe.q_max[joint])
        why = f"rad, the range of joint {joint + 1}"
        require_number(f"libfranka.home[{joint}]", angle, low, high, why)
    cameras = {name: str(source) for name, source in arm.cameras.items()}
    return replace(arm, home=tuple(arm.home), cameras=cameras), safety
