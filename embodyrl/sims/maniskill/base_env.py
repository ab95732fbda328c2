"""Builds ManiSkill's own env objects, and says in words what is missing: package, driver or assets.

SAPIEN and ManiSkill are imported for the first time here, and only when an env is built.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from embodyrl.devices import keep_random_state
from embodyrl.errors import MissingDependencyError, UserError, did_you_mean
from embodyrl.sims.maniskill.tasks import data_folder

REWARDS = ("sparse", "dense", "normalized_dense")


def make_base_env(
    task: str, *, control_mode: str, reward: str, image_size: int, robot: str, **backend: Any
) -> Any:
    """ManiSkill's env object without any gymnasium wrapper.

    Args:
        task: registered id whose assets are at hand.
        control_mode: one of the robot's; empty for its default.
        reward: one of ``REWARDS``.
        image_size: side of the square camera images in pixels, 0 for no images.
        robot: robot id; empty for the task's own.
        backend: ``num_envs``, ``sim_backend`` and ``render_backend``, as ``gymnasium.make`` takes
            them.

    Raises:
        UserError: the task has no such control mode, reward or robot.
        MissingDependencyError: a driver or an asset is missing.
    """
    registered, agents = _import_mani_skill(renders=image_size > 0)
    # Only what the config names; the rest is left to the task's own defaults.
    options: dict[str, Any] = {"obs_mode": "state", "reward_mode": reward, **backend}
    if control_mode:
        options["control_mode"] = control_mode
    if robot:
        if robot not in agents:
            raise UserError(f"ManiSkill has no robot {robot!r}. {did_you_mean(robot, agents)}")
        options["robot_uids"] = robot
    if image_size:
        options["sensor_configs"] = {"width": image_size, "height": image_size}
    # ManiSkill reports a wrong setting or a missing file by errors of many kinds.
    try:
        env = registered[task].make(**options)
    except SystemExit:
        raise MissingDependencyError(
            f"ManiSkill stopped while building {task}: files of its robot or scene are missing "
            f"from {data_folder()}. `python -m mani_skill.utils.download_asset --help` lists what "
            "can be downloaded."
        ) from None
    except ImportError as error:
        raise MissingDependencyError(
            f"ManiSkill's {task} needs a package of its own. {error}"
        ) from error
    except AssertionError as error:
        if "not in supported modes" not in str(error):
            raise
        modes = re.findall(r"'(\w+)'", str(error).split("supported modes")[1])
        raise UserError(
            f"The robot of {task} has no control mode {control_mode!r}. "
            f"{did_you_mean(control_mode, modes)}"
        ) from None
    except NotImplementedError as error:
        if "reward mode" not in str(error):
            raise
        modes = [m for m in registered[task].cls.SUPPORTED_REWARD_MODES if m in REWARDS]
        raise UserError(
            f"{task} has no reward {reward!r}. It has {' and '.join(modes) or 'none at all'}."
        ) from None
    except RuntimeError as error:
        if backend["render_backend"] != "none" and re.search(
            r"rendering device|vk::|[Vv]ulkan", str(error)
        ):
            raise MissingDependencyError(NO_DRIVER) from error
        raise
    if image_size:
        _keep_shaders(env._render_device)
    return env


_RENDERERS: dict[tuple[str, int], Any] = {}
"""By name and CUDA number of their devices; kept for the rest of the process."""


def _keep_shaders(device: Any) -> None:
    """Holds a renderer, because the last one that closes takes all compiled shaders with it."""
    key = (device.name, device.cuda_id)
    if key not in _RENDERERS:
        import sapien

        _RENDERERS[key] = sapien.render.RenderSystem(device)


NO_DRIVER = (
    "ManiSkill cannot draw camera images here: there is no Vulkan driver that SAPIEN can use. "
    "Without a GPU it takes Mesa 24.3 or newer with lavapipe: run scripts/install_vulkan.sh as "
    "root (Debian, Ubuntu) or install your system's package. With an NVIDIA GPU in a container "
    "set NVIDIA_DRIVER_CAPABILITIES=all. With obs=state nearly all tasks run without a driver."
)


@functools.cache
def _import_mani_skill(renders: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        import sapien  # ManiSkill's __init__ is light, but everything below it needs SAPIEN
        from mani_skill.utils import download_asset
    except ImportError as error:
        raise MissingDependencyError(
            f"ManiSkill cannot be imported ({error}). Install it with `pip install "
            "'embodyrl[maniskill]'`."
        ) from error
    import mani_skill.envs
    from mani_skill.agents import REGISTERED_AGENTS
    from mani_skill.envs import sapien_env
    from mani_skill.utils.registration import REGISTERED_ENVS

    mani_skill.logger.setLevel(logging.ERROR)  # otherwise each of N envs repeats the same advice
    # ManiSkill asks before it downloads; nothing here may wait for an answer.
    download_asset.prompt_yes_no = _refuse_to_prompt
    # Each of its resets would open every GPU of the machine, also from a worker on the CPU.
    sapien_env.torch = _Torch(keep_random_state)
    if not renders:
        _no_materials(sapien)
    return REGISTERED_ENVS, REGISTERED_AGENTS


class _Torch:
    """PyTorch as ManiSkill sees it, with another ``torch.random.fork_rng``."""

    def __init__(self, fork_rng: Callable[[], Any]) -> None:
        self.random = SimpleNamespace(fork_rng=fork_rng)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def _refuse_to_prompt(message: str) -> bool:
    """Replaces ManiSkill's question on stdin, which would block a training run for ever."""
    raise MissingDependencyError(
        f"ManiSkill wants to download: {message.split(' Would you')[0].strip()} Nothing is "
        "downloaded unasked: `python -m mani_skill.utils.download_asset NAME` (into "
        f"{data_folder()}; set MS_ASSET_DIR for another place)."
    )


class _NoMaterial:
    """Replaces a material of SAPIEN's, which cannot be made without a renderer."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


def _no_materials(sapien: Any) -> None:
    """Lets state envs be built without Vulkan; where a driver works, materials stay as they are."""
    try:
        sapien.render.RenderMaterial()
    except RuntimeError:
        sapien.render.RenderMaterial = sapien.pysapien.render.RenderMaterial = _NoMaterial
