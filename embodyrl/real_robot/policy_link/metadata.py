"""What a policy server tells about its policy, so that a robot can carry out its actions."""

from __future__ import annotations

from typing import Any

FACTS = ("action_dim", "proprio_dim", "control_mode", "control_hz", "max_episode_steps")
"""Fields that are taken from the environment's spec as they are."""
REQUIRED = ("env", *FACTS, "horizon", "cameras")
"""Fields that a robot needs."""


def policy_facts(spec: Any) -> dict[str, Any]:
    """The metadata that follow from the environment's spec (``types.EnvSpec``)."""
    cameras = {name: list(size) for name, size in spec.cameras.items()}
    return {"env": spec.name, "cameras": cameras, **{name: getattr(spec, name) for name in FACTS}}


def camera_sizes(metadata: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The policy's cameras: name -> (height, width)."""
    return {name: (int(size[0]), int(size[1])) for name, size in metadata["cameras"].items()}
