"""LIBERO's cameras, and pictures of its scenes by OpenGL: ``OffScreenRenderEnv``'s, but upright."""

from __future__ import annotations

from typing import Any

import torch

from embodyrl.sims.opengl import Renderer

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}


def scene_renderer(model: Any, size: int, device: torch.device) -> Renderer:
    """Draws a scene's visual geometry, and not its collision geometry.

    Raises:
        UserError: see ``opengl.make_current``.
    """
    # MuJoCo shows the groups 0, 1 and 2 by default; 0 is robosuite's collision geometry.
    return Renderer(model, size, device, geom_groups=(1, 2))
