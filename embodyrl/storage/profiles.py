"""What the public families of data sets and checkpoints mean, by name: ``data.profile``."""

from __future__ import annotations

from dataclasses import dataclass, field

from embodyrl.errors import UserError, did_you_mean
from embodyrl.types import Conventions

OSC = (0.05,) * 3 + (0.5,) * 3
"""Metres and radians of an action of 1 of robosuite's OSC_POSE controller."""
HAND = ("hand_position:3", "hand_axis_angle:3", "fingers:2")


@dataclass(frozen=True)
class Profile:
    """A family.

    Attributes:
        about: what belongs to it.
        source: the public code that says so.
        cameras: an env's camera -> possible keys in the data sets; the first that is there is taken.
        state: key of the proprioception.
        action: key of the actions.
        rate: actions per second; 0 means what the data set says.
        conventions: what pictures, states and actions mean.
    """

    about: str
    source: str
    cameras: dict[str, tuple[str, ...]] = field(default_factory=dict)
    state: str = "observation.state"
    action: str = "action"
    rate: float = 0.0
    conventions: Conventions = field(default_factory=Conventions)


PROFILES = {
    "libero_hdf5": Profile(
        "LIBERO's own HDF5 files, whose pictures are stored as OpenGL draws them",
        "robosuite/environments/robot_env.py, macros.IMAGE_CONVENTION",
        {"agentview": ("agentview_rgb",), "wrist": ("eye_in_hand_rgb",)},
        rate=20.0,
        conventions=Conventions("upside_down", "rgb", "", HAND, "delta", OSC, (1.0, -1.0)),
    ),
    # These turn OpenGL's upside-down pictures by 180 degrees, which leaves them mirrored.
    "libero_lerobot": Profile(
        "LeRobot's LIBERO data sets, and policies trained on them (SmolVLA, pi0, pi0.5, pi0-FAST)",
        "huggingface/lerobot: processor/env_processor.py, envs/libero.py",
        {
            "agentview": ("observation.images.image",),
            "wrist": ("observation.images.image2", "observation.images.wrist_image"),
        },
        rate=20.0,
        conventions=Conventions("mirrored", "rgb", "", HAND, "delta", OSC, (1.0, -1.0)),
    ),
    "libero_openpi": Profile(
        "openpi's physical-intelligence/libero, and its pi0 and pi0.5 checkpoints",
        "Physical-Intelligence/openpi: examples/libero/",
        {"agentview": ("image",), "wrist": ("wrist_image",)},
        state="state",
        action="actions",
        rate=20.0,
        conventions=Conventions("mirrored", "rgb", "pad", HAND, "delta", OSC, (1.0, -1.0)),
    ),
    "libero_rlds": Profile(
        "LIBERO's RLDS files that OpenVLA and Octo are trained on, as the files hold it",
        "moojink/rlds_dataset_builder; openvla/openvla: experiments/robot/libero/",
        {"agentview": ("image",), "wrist": ("wrist_image",)},
        rate=20.0,
        conventions=Conventions("mirrored", "rgb", "", HAND, "delta", OSC, (1.0, -1.0)),
    ),
    "libero_openvla": Profile(
        "OpenVLA's and OpenVLA-OFT's LIBERO: the RLDS data as their loader hands them on",
        "openvla/openvla: experiments/robot/, prismatic/vla/datasets/rlds/oxe/transforms.py",
        {"agentview": ("image",), "wrist": ("wrist_image",)},
        state="state",
        rate=20.0,
        conventions=Conventions("mirrored", "rgb", "squeeze", HAND, "delta", OSC, (0.0, 1.0)),
    ),
    "droid": Profile(
        "DROID as openpi converts it, and its pi0-DROID checkpoints",
        "Physical-Intelligence/openpi: examples/droid/, policies/droid_policy.py",
        {"front": ("exterior_image_1_left",), "wrist": ("wrist_image_left",)},
        state="joint_position",
        action="actions",
        rate=15.0,
        conventions=Conventions(
            "upright", "rgb", "pad", ("joint_position:7",), "velocity", gripper=(1.0, 0.0)
        ),
    ),
    "maniskill": Profile(
        "ManiSkill's demonstrations of a Panda with pd_ee_delta_pos",
        "haosulab/ManiSkill: agents/robots/panda/panda.py",
        {"base_camera": ("base_camera",), "hand_camera": ("hand_camera",)},
        rate=20.0,
        conventions=Conventions(
            "upright", "rgb", "", (), "delta", (0.1,) * 3, (-1.0, 1.0)
        ),
    ),
    "robomimic": Profile(
        "robomimic's image data sets of robosuite, which turns pictures upright",
        "ARISE-Initiative/robomimic: robomimic/envs/env_robosuite.py",
        {"agentview": ("agentview_image",), "wrist": ("robot0_eye_in_hand_image",)},
        rate=20.0,
        conventions=Conventions("upright", "rgb", "", (), "delta", OSC, (1.0, -1.0)),
    ),
}  # fmt: skip
"""Name -> profile. ``docs/conventions.md`` shows them as a table."""


def profile_named(name: str) -> Profile:
    """The profile of a name; one that says nothing for an empty name.

    Raises:
        UserError: there is no such profile.
    """
    if name and name not in PROFILES:
        raise UserError(f"There is no profile {name!r}. {did_you_mean(name, PROFILES)}")
    return PROFILES[name] if name else Profile("", "")
