"""What a policy server tells about its policy, so that a robot can carry out its actions."""

from __future__ import annotations

from typing import Any

from embodyrl.real_robot.parsing import MessageError, number, text, whole

FACTS = ("action_dim", "proprio_dim", "control_mode", "control_hz", "max_episode_steps")
"""Fields that are taken from the environment's spec as they are."""
REQUIRED = ("env", *FACTS, "horizon", "execute", "cameras")
"""Fields that a robot needs."""


def policy_facts(spec: Any) -> dict[str, Any]:
    """The metadata that follow from the environment's spec (``types.EnvSpec``)."""
    cameras = {name: list(size) for name, size in spec.cameras.items()}
    facts = {name: getattr(spec, name) for name in FACTS}
    return {
        "env": spec.name,
        "cameras": cameras,
        **facts,
        "conventions": known_conventions(spec.conventions),
    }


def known_conventions(conventions: Any) -> dict[str, Any]:
    """The fields of ``types.Conventions`` that are known, as plain data."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(conventions).items()
        if value
    }


def check_metadata(metadata: dict[str, Any]) -> None:
    """Checks what another machine's server says, before an arm is moved by it.

    Raises:
        MessageError: a field that a robot needs is missing, or has no such value.
    """
    if missing := [name for name in REQUIRED if name not in metadata]:
        raise MessageError(f"it does not say its {missing[0]}")
    for name in ("env", "control_mode"):
        text(metadata[name], name)
    for name in ("action_dim", "proprio_dim", "max_episode_steps", "horizon"):
        whole(metadata[name], 1, 10**6, name)
    whole(metadata["execute"], 1, metadata["horizon"], "execute")
    whole(metadata.get("max_prefix", 0), 0, metadata["horizon"], "max_prefix")
    number(metadata["control_hz"], 1e-3, 1e4, "control_hz")
    meaning = metadata.get("conventions", {})
    if not isinstance(meaning, dict) or len(meaning) > 16:
        raise MessageError("conventions must be a map of at most 16")
    cameras = metadata["cameras"]
    if not isinstance(cameras, dict) or len(cameras) > 16:
        raise MessageError("cameras must be a map of at most 16")
    for name, size in cameras.items():
        text(name, "a camera's name")
        if not isinstance(size, list) or len(size) != 2:
            raise MessageError("the size of a camera must be its height and width")
        for side in size:
            whole(side, 1, 4096, "the side of a camera")


def camera_sizes(metadata: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The policy's cameras: name -> (height, width)."""
    return {name: (int(size[0]), int(size[1])) for name, size in metadata["cameras"].items()}
