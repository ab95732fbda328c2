"""The settings of an arm by libfranka: its address, its cameras, and where it may move."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.cameras.config import camera_config
from embodyrl.real_robot.control import limits
from embodyrl.real_robot.control.config_checks import require_number
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.grippers.robotiq import MODELS, RobotiqGripper
from embodyrl.real_robot.robot_file import TWIN_SAFETY, build_safety, read_sections


@dataclass(frozen=True)
class Franka:
    """One arm.

    Attributes:
        address: of its control unit, or of ``franka-sim``.
        realtime: whether this computer must have a real-time kernel, as Franka asks for.
        gripper: ``true`` or ``{kind: franka_hand}`` for Franka's hand, ``false`` for none, or
            ``{kind: robotiq, ...}`` with the settings of ``grippers.robotiq.RobotiqGripper``.
        gripper_speed: m/s.
        gripper_force: N, of a grasp.
        home: (7,) rad, posture that the arm goes to before each episode, slowly and whatever is in
            its way; empty for none.
        cameras: the policy's name of each camera -> its ``kind`` with the settings of that kind
            (``cameras.config``); or what OpenCV opens: a number, a device's path, or an address.
        max_image_age: s, oldest image that the policy may see.
        patience: s that the robot's clock may stand still; after that, time goes on without it.
    """

    address: str = "127.0.0.1"
    realtime: bool = True
    gripper: Any = True
    gripper_speed: float = 0.1
    gripper_force: float = 20.0
    home: tuple[float, ...] = ()
    cameras: dict[str, Any] = field(default_factory=dict)
    max_image_age: float = 0.3
    patience: float = 0.1

    def __post_init__(self) -> None:
        if len(self.home) not in (0, 7):
            raise UserError(
                f"libfranka.home has {len(self.home)} angles; a Franka has seven joints."
            )
        speed, force, whose = (1e-3, 0.1), (0.1, 70.0), "Franka's hand"
        if isinstance(self.gripper, RobotiqGripper):
            model = MODELS[self.gripper.model]
            speed, force, whose = model.speed, model.force, f"the Robotiq {self.gripper.model}"
        for key, low, high, why in (
            ("gripper_speed", *speed, f"m/s, and {whose} can do nothing else"),
            ("gripper_force", *force, f"N, and {whose} can do nothing else"),
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
    section = dict(raw.get("libfranka") or {})
    # The kind of a device says which settings it has.
    gripper = _gripper(section.pop("gripper", True))
    cameras = section.pop("cameras", None) or {}
    if not isinstance(cameras, dict):
        raise UserError("libfranka.cameras must be a map: the policy's name of a camera -> camera.")
    given = {
        str(name): camera_config(f"libfranka.cameras.{name}", camera)
        for name, camera in cameras.items()
    }
    # Which speeds and forces there are depends on the gripper, so it comes with them.
    speeds = {k: section.pop(k) for k in ("gripper_speed", "gripper_force") if k in section}
    arm = build_section("libfranka", Franka, section)
    arm = replace(arm, home=tuple(arm.home), cameras=given, gripper=gripper, **speeds)
    safe = limits.limits_of(safety.robot).inside()
    for joint, angle in enumerate(arm.home):
        low, high = float(safe.q_min[joint]), float(safe.q_max[joint])
        why = f"rad, the range of joint {joint + 1}"
        require_number(f"libfranka.home[{joint}]", angle, low, high, why)
    return arm, safety


def _gripper(given: Any) -> bool | RobotiqGripper:
    """The gripper that a robot's file gives.

    Raises:
        UserError: there is no such kind, or it has no such settings.
    """
    from embodyrl.storage.config_section import build_section

    if isinstance(given, bool):
        return given
    kinds = ("franka_hand", "robotiq")
    kind = str(given.get("kind", "")) if isinstance(given, dict) else str(given)
    if not isinstance(given, dict) or kind not in kinds:
        raise UserError(
            f"libfranka.gripper has no kind {kind!r}. {did_you_mean(kind, kinds)} true is Franka's "
            "hand, and false none."
        )
    settings = {key: value for key, value in given.items() if key != "kind"}
    if kind == "franka_hand":
        if settings:
            raise UserError(
                f"Franka's hand has no setting {next(iter(settings))!r}: its speed and its force "
                "are libfranka.gripper_speed and libfranka.gripper_force."
            )
        return True
    return build_section("libfranka.gripper", RobotiqGripper, settings)
