"""OGBench's manipulation scenes, and what an env of them may be set to."""

from __future__ import annotations

from dataclasses import dataclass

from embodyrl.errors import UserError, did_you_mean

SPLITS = {"train": "resets with even seeds", "eval": "resets with odd seeds"}
EXPERTS = ("markov", "plan", "play")
NUM_GOALS = 5
"""Evaluation goals of every scene."""
CUBE_SIZE = 0.04
"""Edge of a cube, in metres."""


@dataclass(frozen=True)
class SceneInfo:
    """A scene.

    Attributes:
        kind: ``"cube"``, ``"scene"`` or ``"puzzle"``: which of OGBench's classes.
        env_type: its variant.
        max_episode_steps: OGBench's time limit, in control steps.
    """

    kind: str
    env_type: str
    max_episode_steps: int


SCENES = {
    "cube-single": SceneInfo("cube", "single", 200),
    "cube-double": SceneInfo("cube", "double", 500),
    "cube-triple": SceneInfo("cube", "triple", 1000),
    "cube-quadruple": SceneInfo("cube", "quadruple", 1000),
    "cube-octuple": SceneInfo("cube", "octuple", 1500),
    "scene": SceneInfo("scene", "scene", 750),
    "puzzle-3x3": SceneInfo("puzzle", "3x3", 500),
    "puzzle-4x4": SceneInfo("puzzle", "4x4", 500),
    "puzzle-4x5": SceneInfo("puzzle", "4x5", 1000),
    "puzzle-4x6": SceneInfo("puzzle", "4x6", 1000),
}
"""Name -> scene, with the time limits of OGBench 1.2."""


def require_scene(name: str) -> SceneInfo:
    """The scene of a name.

    Raises:
        UserError: there is none.
    """
    if name not in SCENES:
        raise UserError(f"OGBench has no task {name!r}. {did_you_mean(name, SCENES)}")
    return SCENES[name]
