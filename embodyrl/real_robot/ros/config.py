"""Which topics a robot has and where it may move: presets, and a YAML file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from embodyrl.errors import UserError, did_you_mean
from embodyrl.real_robot.control.config_checks import require_number
from embodyrl.real_robot.control.safety_config import SafetyConfig
from embodyrl.real_robot.robot_file import TWIN_SAFETY, build_safety, read_sections

COMMANDS = ("joint_trajectory", "joint_state", "pose")


def _joints(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_joint{k}" for k in range(1, 8))


def _fingers(prefix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}_finger_joint{k}" for k in (1, 2))


@dataclass(frozen=True)
class Topics:
    """The topics that a robot's nodes publish and subscribe to.

    Attributes:
        joints: names of the seven joints.
        fingers: names of the two finger joints.
        states: ``sensor_msgs/JointState`` of the arm, at least as often as the safety filter ticks.
        finger_states: the same for the fingers; empty where ``states`` has them.
        wrench: ``geometry_msgs/WrenchStamped``, external force in the base's frame. The force stop
            needs it; empty only with ``safety.max_force: null``.
        pose: ``geometry_msgs/PoseStamped``, the tool centre point according to the robot; empty
            where the robot does not report it.
        command: takes the commands.
        command_type: ``joint_trajectory`` (its later points are a stop, so that the arm brakes
            within its limits when no more commands come), ``joint_state``, or ``pose``
            (``geometry_msgs/PoseStamped`` of the hand).
        frame: ``frame_id`` of poses.
        gripper: ``std_msgs/Float32``, takes the opening in m when it changes; empty where there is
            no gripper.
        cameras: the policy's name of each camera -> its topic, ``sensor_msgs/Image``, or
            ``CompressedImage`` where the topic ends in ``/compressed``.
        max_image_age: s, oldest image that the policy may see.
        max_clock_jump: s by which the clock that stamps the messages may jump.
        instruction: ``std_msgs/String``; empty where ``--prompt`` gives it.
        success: ``std_msgs/Bool``; empty where a person labels the episodes.
        scene_ready: ``std_msgs/Bool``, whether the scene is as an episode begins, for a reset
            without a person; empty where nothing tells.
        reset: ``std_msgs/Int64``, takes -1 and then the number of an initial state; empty where a
            person arranges the scene. The same number twice in a row means one reset.
        init: ``std_msgs/Int64``, the number of the initial state that was arranged last; -1 after
            ``reset`` received -1.
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
    scene_ready: str = ""
    reset: str = ""
    init: str = ""

    def __post_init__(self) -> None:
        if self.command_type not in COMMANDS:
            raise UserError(
                f"command_type is {self.command_type!r}. "
                f"{did_you_mean(self.command_type, COMMANDS)}"
            )
        seconds = "seconds"
        require_number("topics.max_image_age", self.max_image_age, 1e-3, 10.0, seconds)
        require_number("topics.max_clock_jump", self.max_clock_jump, 1e-3, 10.0, seconds)
        if len(self.joints) != 7:
            raise UserError(f"A Franka has seven joints, but {len(self.joints)} names are given.")


# Topics as the documentation of each project names them. The tests run only "twin".
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
        wrench="/franka_robot_state_broadcaster/external_wrench_in_base_frame",
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
SAFETY: dict[str, dict[str, Any]] = {"twin": TWIN_SAFETY, "serl": {"robot": "panda"}}
"""Preset -> what it says about the safety filter."""


def load_robot(file: str) -> tuple[Topics, SafetyConfig]:
    """A robot's topics and safety settings.

    Args:
        file: path of a YAML file with the keys ``preset``, ``topics`` and ``safety`` (and
            ``leader``, see ``operator.leader``); empty means the simulated robot of ``embodyrl twin``.

    Raises:
        UserError: no such file or preset, an unknown key, no workspace, or a limit of the force and
            no topic of the wrench.
    """
    from embodyrl.storage.config_section import build_section

    if not file:
        return PRESETS["twin"], SafetyConfig(**SAFETY["twin"])
    purpose = "A robot's file names its topics and its workspace; see docs/robot_ros.md."
    raw = read_sections(file, ("preset", "topics", "safety", "leader", "teleoperator"), purpose)
    preset = str(raw.get("preset", "franka_ros2"))
    if preset not in PRESETS:
        raise UserError(f"There is no preset {preset!r}. {did_you_mean(preset, PRESETS)}")
    # What the file says counts above the preset.
    safety = build_safety(file, {**SAFETY.get(preset, {}), **(raw.get("safety") or {})})
    topics = build_section(
        "topics", Topics, {**asdict(PRESETS[preset]), **(raw.get("topics") or {})}
    )
    if safety.max_force is not None and not topics.wrench:
        raise UserError(
            f"{file} names no topics.wrench, so nothing would notice that the arm pushes with more "
            f"than safety.max_force ({safety.max_force:g} N). Name the topic, or write max_force: "
            "null under safety to go without a force stop."
        )
    return replace(topics, joints=tuple(topics.joints), fingers=tuple(topics.fingers)), safety
