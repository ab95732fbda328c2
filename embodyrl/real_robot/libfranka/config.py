"""Where an arm is, what sees it, and where it may move: a YAML file with the keys ``libfranka`` and ``safety``."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control.tracking import SafetyConfig
from embodyrl.real_robot.ros.config import SAFETY


@dataclass(frozen=True)
class Franka:
    """One arm.

    Attributes:
        address: of its control unit, or of ``franka-sim``.
        realtime: whether this computer must have a real-time kernel, as Franka asks for.
        gripper: whether there is Franka's hand.
        gripper_speed: m/s.
        gripper_force: N, of a grasp.
        home: (7,) rad, a posture that the arm goes to, slowly and whatever is in its way, before
            each episode; empty for none.
        cameras: the policy's name of a camera to what OpenCV opens: a number, a device's path, an
            address.
        max_image_age: s.
        patience: s that the robot's clock may stand still; after that time goes on without it.
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


def load_arm(file: str) -> tuple[Franka, SafetyConfig]:
    """An arm from its file; without one franka-sim on this machine, in the workspace of the embedded tasks.

    Raises:
        UserError: no such file, an unknown key, or no workspace box.
    """
    from omegaconf import OmegaConf

    from embodyrl.config import build_section

    if not file:
        # The simulator makes no promise to keep the wall's time, and has a hand only in the scene.
        simulated = Franka(realtime=False, gripper=False, patience=0.5)
        return simulated, SafetyConfig(**{**SAFETY["twin"], "robot": "fr3"})
    path = Path(file)
    keys = ("libfranka", "safety")
    if not path.is_file():
        raise UserError(
            f"There is no file {file}. It names the arm and its workspace; see "
            "docs/robot_libfranka.md."
        )
    try:
        raw: Any = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:
        raise UserError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(raw, dict) or set(raw) - set(keys):
        wrong = next(iter(set(raw) - set(keys)), "") if isinstance(raw, dict) else ""
        raise UserError(f"{file} has no key {str(wrong)!r}. {did_you_mean(str(wrong), keys)}")
    safety = raw.get("safety") or {}
    if not {"box_low", "box_high"} <= set(safety):
        raise UserError(
            f"{file} must give the workspace, safety.box_low and safety.box_high: x, y, z in m."
        )
    arm = build_section("libfranka", Franka, raw.get("libfranka") or {})
    limits = build_section("safety", SafetyConfig, safety)
    cameras = {name: str(source) for name, source in arm.cameras.items()}
    arm = replace(arm, home=tuple(arm.home), cameras=cameras)
    return arm, replace(limits, box_low=tuple(limits.box_low), box_high=tuple(limits.box_high))
