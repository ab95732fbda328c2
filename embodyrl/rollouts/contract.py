"""What an env hands over, held against its ``EnvSpec``: names, shapes, types, finite numbers.

``fault_watch`` asks this at every reset and step, so it is cheap: shapes are compared as
tuples, and one sum says whether all numbers of a batch are finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from embodyrl.types import EnvSpec, Obs, Step


def obs_defect(obs: Obs, spec: EnvSpec) -> str:
    """The first field of an observation with a wrong name, shape or type, in words; or nothing."""
    if not isinstance(obs, Obs):
        return f"the observation is a {type(obs).__name__}, not an Obs"
    n = spec.num_envs
    if obs.images.keys() != spec.cameras.keys():
        return f"the cameras are {sorted(obs.images)}, but its spec says {sorted(spec.cameras)}"
    for name, (height, width) in spec.cameras.items():
        if defect := _defect(
            f"image {name!r}", obs.images[name], (n, height, width, 3), torch.uint8
        ):
            return defect
    if defect := _defect("proprio", obs.proprio, (n, spec.proprio_dim), torch.float32):
        return defect
    if obs.privileged is not None or spec.privileged_dim:
        shape = (n, spec.privileged_dim)
        if defect := _defect("privileged", obs.privileged, shape, torch.float32):
            return defect
    if len(obs.instruction) != n:
        return f"there are {len(obs.instruction)} instructions for {n} envs"
    return ""


def step_defect(step: Step, spec: EnvSpec, horizon: int) -> str:
    """The first field of a step with a wrong name, shape or type, in words; or nothing.

    Args:
        step: the result of a chunk.
        spec: of the env.
        horizon: H, actions of the chunk.
    """
    if not isinstance(step, Step):
        return f"the result is a {type(step).__name__}, not a Step"
    n = spec.num_envs
    fields: list[tuple[str, Tensor | None, tuple[int, ...], torch.dtype]] = [
        ("reward", step.reward, (n, horizon), torch.float32),
        ("valid", step.valid, (n, horizon), torch.bool),
        ("terminated", step.terminated, (n,), torch.bool),
        ("truncated", step.truncated, (n,), torch.bool),
        ("success", step.success, (n,), torch.bool),
        ("fault", step.fault, (n,), torch.bool),
    ]
    if step.success_once is not None:
        fields.append(("success_once", step.success_once, (n,), torch.bool))
    if step.human is not None or step.taken is not None:
        fields.append(("human", step.human, (n, horizon), torch.bool))
        fields.append(("taken", step.taken, (n, horizon, spec.action_dim), torch.float32))
    for name, value, shape, dtype in fields:
        if defect := _defect(name, value, shape, dtype):
            return defect
    return obs_defect(step.obs, spec)


def not_finite(obs: Obs, step: Step | None = None) -> dict[int, str]:
    """The envs that hold NaN or infinity, each with the first such number in words.

    Args:
        obs: an observation without a defect.
        step: the step that it came with, if any.
    """
    numbers = {"proprio": obs.proprio, "privileged": obs.privileged}
    if step is not None:
        numbers |= {"reward": step.reward, "taken": step.taken}
    present = {name: value for name, value in numbers.items() if value is not None}
    # A sum is finite only if all its terms are. It may overflow, so the terms are looked at then.
    # On the CPU numpy is faster for so few numbers; on a GPU one answer is waited for.
    if obs.proprio.device.type == "cpu":
        if all(math.isfinite(value.numpy().sum()) for value in present.values()):
            return {}
    elif bool(torch.isfinite(torch.stack([value.sum() for value in present.values()]).sum())):
        return {}
    found: dict[int, str] = {}
    for name, value in present.items():
        for place in (~torch.isfinite(value)).nonzero().tolist():
            where = ", ".join(str(i) for i in place[1:])
            found.setdefault(place[0], f"{name}[{where}] is {float(value[tuple(place)])}")
    return found


def _defect(name: str, value: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    if isinstance(value, Tensor) and tuple(value.shape) == shape and value.dtype == dtype:
        return ""
    kind = str(dtype).removeprefix("torch.")
    if not isinstance(value, Tensor):
        given = "missing" if value is None else f"a {type(value).__name__}"
        return f"{name} is {given}, not a torch tensor {shape} of {kind}"
    given = str(value.dtype).removeprefix("torch.")
    return f"{name} is {tuple(value.shape)} of {given}, not {shape} of {kind}"
