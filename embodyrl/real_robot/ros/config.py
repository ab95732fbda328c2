"""Which topics a robot has, and where it may move: a preset and a YAML file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control.tracking import SafetyConfig

COMMANDS = ("joint_trajectory", "joint_state", "pose")


def _joints(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_joint{k}" for k in range(1, 8))


def _fingers(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_finger_joint{k}" for k in (1, 2))


@dataclass(frozen=True)
class Topics:
    """What a robot's nodes publish and take.

    Attributes:
        joints: names of the seven joints.
        fingers: names of the two finger joints.
        states: ``sensor_msgs/JointState``, of the arm, at least as often as the filter ticks.
        finger_states: the same of the fingers; empty where ``states`` has them.
        wrench: ``geometry_msgs/WrenchStamped``, external force in the base's frame; empty where
            there is none.
        pose: ``geometry_msgs/PoseStamped``, where the robot believes its tool centre point to be;
            empty where it says nothing of it.
        command: what takes the commands.
        command_type: ``joint_trajectory`` (its later points are a stop, so that the arm brakes
            within its limits when nothing comes any more), ``joint_state``, or ``pose``
            (``geometry_msgs/PoseStamped`` of the hand).
        frame: ``frame_id`` of poses.
        gripper: ``std_msgs/Float32``, takes the opening in m when it changes; empty where there is
            no gripper.
        cameras: the policy's name of a camera to its topic, ``sensor_msgs/Image``, or
            ``CompressedImage`` where the topic ends in ``/compressed``.
        max_image_age: s.
        max_clock_jump: s by which the stamps of messages may begin to lead their arrival, or go
            back.
        instruction: ``std_msgs/String``; empty where ``--prompt`` says it.
        success: ``std_msgs/Bool``; empty where a person says it.
        reset: ``std_msgs/Int64``, told -1 and then the number of an initial state; empty where a
            person arranges the scene. A number that is said twice is meant once.
        init: ``std_msgs/Int64``, the number of the initial state that was arranged last; -1 after
            ``reset`` said so.
    """

    joints: tuple[str, ...] = _joints("fr3")
    fingers: tuple[str, ...] = _fingers("fr3")
    states: str = "/joint_states"
    finger_states: str = ""
    wrench: str = ""
    pose: str = ""
    command: str = "/joint_trajectory_controller/joint_trajectory"
    command_type: str = "joint_trajectory"
    frame: str = "base"
    gripper: str = ""
    cameras: dict[str, str] = field(default_factory=dict)
    max_image_age: float = 0.3
    max_clock_jump: float = 0.5
    instruction: str = ""
    success: str = ""
    reset: str = ""
    init: str = ""

    def __post_init__(self) -> None:
        if self.command_type not in COMMANDS:
            raise UserError(
                f"command_type is {self.command_type!r}. "
                f"{did_you_mean(self.command_type, COMMANDS)}"
            )
        if len(self.joints) != 7:
            raise UserError(f"A Franka has seven joints, but {len(self.joints)} names are given.")


# As their projects' documentation names them. Only "twin" is run by the tests.
PRESETS: dict[str, Topics] = {
    "twin": Topics(
        joints=_joints("panda"),
        fingers=_fingers("panda"),
        pose="/current_pose",
        gripper="/gripper/command",
        cameras={"front": "/camera/front/image_raw", "wrist": "/camera/wrist/image_raw"},
        instruction="/task/instruction",
        success="/task/success",
        reset="/task/reset",
        init="/task/init",
    ),
    "franka_ros2": Topics(
        finger_states="/fr3_gripper/joint_states",
        pose="/franka_robot_state_broadcaster/current_pose",
    ),
    "crisp": Topics(command="/target_joint", command_type="joint_state"),
    "serl": Topics(
        joints=_joints("panda"),
        fingers=_fingers("panda"),
        command="/cartesian_impedance_controller/equilibrium_pose",
        command_type="pose",
        frame="panda_link0",
    ),
}
SAFETY: dict[str, dict[str, Any]] = {
    # The workspace of the embedded tasks.
    "twin": {"robot": "panda", "box_low": (0.28, -0.30, 0.012), "box_high": (0.72, 0.30, 0.40)},
    "serl": {"robot": "panda"},
}


def load_robot(file: str) -> tuple[Topics, SafetyConfig]:
    """A robot's topics and safety from a YAML file with the keys ``preset``, ``topics`` and ``safety``.

    Args:
        file: its path; empty means the simulated robot of ``embodyrl twin``.

    Raises:
        UserError: no such file or preset, an unknown key, or no workspace box.
    """
    from omegaconf import OmegaConf

    from embodyrl.config import build_section

    if not file:
        return PRESETS["twin"], SafetyConfig(**SAFETY["twin"])
    path = Path(file)
    if not path.is_file():
        raise UserError(
            f"There is no file {file}. A robot's file names its topics and its workspace; see "
            "docs/robot_ros.md."
        )
    try:
        raw: Any = OmegaConf.to_container(OmegaConf.load(path))
    except Exception as error:
        raise UserError(f"{file} is not valid YAML: {error}") from error
    keys = ("preset", "topics", "safety")
    if not isinstance(raw, dict) or set(raw) - set(keys):
        wrong = next(iter(set(raw) - set(keys)), "") if isinstance(raw, dict) else ""
        raise UserError(f"{file} has no key {str(wrong)!r}. {did_you_mean(str(wrong), keys)}")
    preset = str(raw.get("preset", "franka_ros2"))
    if preset not in PRESETS:
        raise UserError(f"There is no preset {preset!r}. {did_you_mean(preset, PRESETS)}")
    safety = {**SAFETY.get(preset, {}), **(raw.get("safety") or {})}
    if not {"box_low", "box_high"} <= set(safety):
        raise UserError(
            f"{file} must give the workspace, safety.box_low and safety.box_high: x, y, z in m."
        )
    topics = build_section(
        "topics", Topics, {**asdict(PRESETS[preset]), **(raw.get("topics") or {})}
    )
    topics = replace(topics, joints=tuple(topics.joints), fingers=tuple(topics.fingers))
    built = build_section("safety", SafetyConfig, safety)
    return topics, replace(built, box_low=tuple(built.box_low), box_high=tuple(built.box_high))
