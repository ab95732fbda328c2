"""What an input ablation shows a policy in place of what is there, one case after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from embodyrl.rollouts.ablated_env import Change
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class Case:
    """One change of what the policy sees.

    Attributes:
        about: what is shown instead, in words.
        input: what the policy then lacks, in words.
        change: shows it.
    """

    about: str
    input: str
    change: Change


def ablation_cases(
    spec: EnvSpec, first: Mapping[int, Obs]
) -> tuple[dict[str, Case], dict[str, str]]:
    """The cases of an env, and why others do not apply.

    Args:
        spec: of the env.
        first: initial state -> what is seen at its start, (1, ...), of all that are played.

    Returns:
        Name -> case; and name -> why it says nothing here, in words.
    """
    cases: dict[str, Case] = {}
    left_out: dict[str, str] = {}
    _cameras(spec, first, cases, left_out)
    _instructions(spec, first, cases, left_out)
    # A state of the robot that stands still says only how the episode began.
    if spec.proprio_dim:
        cases["proprio"] = Case(
            "proprioception as at the start of the episode, all along",
            "proprioception after the start",
            partial(_recalled, first, {}, proprio=True),
        )
    else:
        left_out["proprio"] = "the env has no proprioception"
    return cases, left_out


def _cameras(
    spec: EnvSpec, first: Mapping[int, Obs], cases: dict[str, Case], left_out: dict[str, str]
) -> None:
    if not spec.cameras:
        why = "the env has no cameras"
        return left_out.update(dict.fromkeys(("camera", "other picture", "still picture"), why))
    # Black would be stranger to the policy than the mean colour of what it is used to.
    colours = {
        name: _mean_colour([obs.images[name] for obs in first.values()]) for name in spec.cameras
    }
    blank = "one colour, the mean of its first pictures"
    for name, colour in colours.items():
        cases[f"camera {name}"] = Case(
            f"this camera shows {blank}", f"the camera {name}", partial(_blank, {name: colour})
        )
    # Where one camera is enough, none may still be too few.
    if len(colours) > 1:
        cases["all cameras"] = Case(
            f"every camera shows {blank}", "its cameras", partial(_blank, colours)
        )
    else:
        left_out["all cameras"] = "the env has one camera"
    if len(first) > 1:
        other = _partners(first, lambda a, b: spec.task_of(a) == spec.task_of(b))
        cases["other picture"] = Case(
            "the first pictures of another episode, all along",
            "what its pictures show",
            partial(_recalled, first, other, images=True),
        )
    else:
        left_out["other picture"] = "only one initial state is played"
    # Whether the policy looks again after the start.
    cases["still picture"] = Case(
        "the first pictures of its own episode, all along",
        "the pictures after the first",
        partial(_recalled, first, {}, images=True),
    )


def _instructions(
    spec: EnvSpec, first: Mapping[int, Obs], cases: dict[str, Case], left_out: dict[str, str]
) -> None:
    said = {init: obs.instruction[0] for init, obs in first.items()}
    if not any(said.values()):
        why = "the env gives no instructions"
        return left_out.update(dict.fromkeys(("other instruction", "no instruction"), why))
    if len(set(said.values())) > 1:
        # Of another task, where there is one; otherwise another sentence of the same task.
        tasks = len({spec.task_of(init) for init in first}) > 1

        def differs(a: int, b: int) -> bool:
            other_task = spec.task_of(a) != spec.task_of(b) or not tasks
            return said[a] != said[b] and other_task

        other = _partners(first, differs)
        cases["other instruction"] = Case(
            f"the instruction of another {'task' if tasks else 'episode'}",
            "what the instruction says",
            partial(_told, {init: said[other[init]] for init in first}),
        )
    else:
        left_out["other instruction"] = (
            f"every episode has the instruction {next(iter(said.values()))!r}"
        )
    # A sentence that says nothing, rather than another one.
    cases["no instruction"] = Case(
        "an empty instruction", "the instruction", partial(_told, dict.fromkeys(first, ""))
    )


def _partners(first: Mapping[int, Obs], fits: Callable[[int, int], bool]) -> dict[int, int]:
    """Initial state -> the next one after it that fits it, else the next; the last is before the first."""
    order = list(first)
    found = {}
    for i, init in enumerate(order):
        others = order[i + 1 :] + order[:i]
        found[init] = next((other for other in others if fits(init, other)), others[0])
    return found


def _mean_colour(pictures: list[Tensor]) -> Tensor:
    """(3,) uint8, of pictures (1, h, w, 3)."""
    means = torch.stack([picture.float().mean(dim=(0, 1, 2)) for picture in pictures])
    return means.mean(0).round().to(torch.uint8)


# The changes. Each gets the observations of N envs, and the initial state of each.


def _blank(colours: Mapping[str, Tensor], obs: Obs, inits: list[int]) -> Obs:
    def blank(name: str, image: Tensor) -> Tensor:
        return colours[name].to(image.device).expand(image.shape).contiguous()

    blanks = {name: blank(name, obs.images[name]) for name in colours}
    return replace(obs, images={**obs.images, **blanks})


def _recalled(
    first: Mapping[int, Obs],
    other: Mapping[int, int],
    obs: Obs,
    inits: list[int],
    *,
    images: bool = False,
    proprio: bool = False,
) -> Obs:
    """What was seen at the start: of the same episode, or of its partner in ``other``."""
    rows = [first[other.get(init, init)] for init in inits]
    if images:
        recalled = {
            name: torch.cat([row.images[name] for row in rows]).to(image.device)
            for name, image in obs.images.items()
        }
        obs = replace(obs, images=recalled)
    if proprio:
        state = torch.cat([row.proprio for row in rows]).to(obs.proprio.device)
        obs = replace(obs, proprio=state)
    return obs


def _told(sentences: Mapping[int, str], obs: Obs, inits: list[int]) -> Obs:
    return replace(obs, instruction=[sentences[init] for init in inits])
