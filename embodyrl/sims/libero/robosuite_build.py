"""Builds and resets robosuite's own env of a LIBERO task."""

# pyright: reportAttributeAccessIssue=false
# MuJoCo's module is native and its wheel describes it only in part to a type checker.
from __future__ import annotations

import functools
import sys
import types
from typing import Any

import mujoco

from embodyrl.sims.egl import has_egl
from embodyrl.sims.libero.suites import Task

_EGL_CONTEXT = "robosuite.renderers.context.egl_context"


@functools.cache
def import_robosuite() -> Any:
    """The package, which writes no log file, and needs no OpenGL.

    By default it opens ``/tmp/robosuite.log``, and cannot be imported where another user made that.
    Nor can it be imported where EGL is missing, though nothing here is drawn by it.
    """
    # Its import warns by that log if a user has no settings of his own; these are none.
    sys.modules.setdefault("robosuite.macros_private", types.ModuleType("robosuite.macros_private"))
    if not has_egl():
        sys.modules.setdefault(_EGL_CONTEXT, types.ModuleType(_EGL_CONTEXT))
        vars(sys.modules[_EGL_CONTEXT]).setdefault("EGLGLContext", None)
    import robosuite
    from robosuite import macros

    macros.FILE_LOGGING_LEVEL = None
    return robosuite


def build(task: Task, models: dict[str, Any]) -> Any:
    """The env that LIBERO's ``OffScreenRenderEnv`` wraps, without a renderer.

    Args:
        task: which.
        models: compiled MuJoCo models by their XML, to which this scene's is added.
    """
    robosuite = import_robosuite()
    from libero.libero.envs import bddl_utils
    from libero.libero.envs.bddl_base_domain import TASK_MAPPING
    from robosuite.utils.binding_utils import MjSim

    problem = bddl_utils.get_problem_info(str(task.bddl_file))["problem_name"]
    base = TASK_MAPPING[problem]

    # robosuite compiles a model for every env; here scenes with equal XML share one.
    def initialize_sim(self: Any, xml_string: str | None = None) -> None:
        self.scene_xml = xml = xml_string or self.model.get_xml()
        if xml not in models:
            models[xml] = mujoco.MjModel.from_xml_string(xml)
        self.sim = MjSim(models[xml])
        self.sim.forward()
        self.initialize_time(self.control_freq)

    # LIBERO checks the class's name, so the subclass keeps it.
    env = type(base.__name__, (base,), {"_initialize_sim": initialize_sim})(
        bddl_file_name=str(task.bddl_file),
        robots=["Panda"],
        controller_configs=robosuite.load_controller_config(default_controller="OSC_POSE"),
        initialization_noise=None,
        use_camera_obs=False,
        has_renderer=False,
        has_offscreen_renderer=False,
        control_freq=20,
        horizon=1000,
        ignore_done=True,
        hard_reset=False,
        camera_names=["agentview", "robot0_eye_in_hand"],
        camera_heights=128,
        camera_widths=128,
    )
    place_anew(env)
    env.sim.forward()
    env.visualize(vis_settings={name: False for name in env._visualizations})
    return env


def place_anew(env: Any) -> None:
    """Draws all placements and sets them; a forward pass is left to the caller.

    Where the samplers find no placement, they draw again.

    Raises:
        RuntimeError: they find none in 1000 tries.
    """
    from robosuite.utils.errors import RandomizationError

    for _ in range(1000):
        try:
            env.sim.reset()
            env._reset_internal()
            break
        except RandomizationError:
            continue
    else:
        raise RuntimeError(
            f"LIBERO's samplers found no placement for {env.bddl_file_name} in 1000 tries."
        )


def joint_limits(owner: Any) -> dict[str, tuple[float, float]]:
    """``blueprint.Item.limits`` of an articulated object; empty for any other.

    LIBERO's classes hold the ranges as data, but the direction only as code. So the code is tried
    at both ends of a range.
    """
    articulation = getattr(owner, "object_properties", {}).get("articulation", {})
    out = {}
    for what, key, method in (
        ("open", "default_open_ranges", "is_open"),
        ("close", "default_close_ranges", "is_close"),
        ("turnon", "default_turnon_ranges", "turn_on"),
        ("turnoff", "default_turnoff_ranges", "turn_off"),
    ):
        if not articulation.get(key) or not hasattr(owner, method):
            continue
        ask = getattr(owner, method)
        direction = 1.0 if ask(1e6) else -1.0
        low = min(articulation[key])
        high = max(articulation[key])
        # The threshold is the end at which the answer changes.
        thresholds = [end for end in (low, high) if ask(end - 1e-9) != ask(end + 1e-9)]
        out[what] = (direction, float(thresholds[0]))
    return out
