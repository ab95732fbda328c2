"""What both engines read from ManiSkill's env: proprio without privileged numbers, and images."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def visual_proprio(base: Any, info: dict[str, Any]) -> Tensor:
    """(N, P) ``visual_state`` as one vector for each env."""
    return _flatten(visual_state(base, info), base.num_envs)


def visual_state(base: Any, info: dict[str, Any]) -> dict[str, Any]:
    """ManiSkill's state without what only the simulator knows.

    A task leaves that out where the observation mode has images, so the mode is changed for a
    moment.
    """
    from mani_skill.envs.utils.observations import parse_obs_mode_to_struct

    kept = base._obs_mode, base.obs_mode_struct
    base._obs_mode = "rgb"
    base.obs_mode_struct = parse_obs_mode_to_struct("rgb")
    try:
        return base._get_obs_state_dict(info)
    finally:
        base._obs_mode, base.obs_mode_struct = kept


def draw(base: Any, cameras: list[str]) -> dict[str, Tensor]:
    """Camera name -> (N, h, w, 3) uint8, without the goal markers that policies must not see."""
    for hidden in base._hidden_objects:
        hidden.hide_visual()
    base.scene.update_render(update_sensors=True, update_human_render_cameras=False)
    out = {}
    for name in cameras:
        sensor = base.scene.sensors[name]
        sensor.capture()
        out[name] = sensor.get_obs(rgb=True, depth=False, position=False, segmentation=False)["rgb"]
    return out


def _flatten(tree: Any, rows: int) -> Tensor:
    """Nested dicts of tensors as one tensor (rows, P)."""
    if isinstance(tree, dict):
        parts = [_flatten(value, rows) for value in tree.values()]
        return torch.cat(parts, dim=1) if parts else torch.zeros(rows, 0)
    return torch.as_tensor(tree).float().reshape(rows, -1)
