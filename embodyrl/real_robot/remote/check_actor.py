"""Checks what an actor sends to a learner, so that no message of it can end or poison a run.

Every field has a known shape, type and range. They follow from the env's spec, the policy's
horizon, ``env.max_reward`` and the algorithm's ``max_choice``. The errors name the field and the
value.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from embodyrl.real_robot.control.actions import SPACES, proprio_dim
from embodyrl.real_robot.env.config import RobotConfig, robot_spec
from embodyrl.real_robot.parsing import MessageError, number, shown, text, whole
from embodyrl.rollouts.batches import Episode, TransitionBatch, Transitions
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.sims.mujoco import privileged
from embodyrl.storage.env_spec import check_compatible, spec_from_json
from embodyrl.types import EnvSpec, Obs

MAX_PROPRIO = 1e4
"""Largest size of a number of proprio or privileged state: they are in rad, m and s."""
MAX_CAMERAS = 8
MAX_SIDE = 2048
"""Largest height and width of a camera in pixels."""


@dataclass(frozen=True)
class Bounds:
    """What a message must keep to.

    Attributes:
        spec: of the actor's env.
        horizon: H.
        max_reward: largest size of an action's reward (``env.max_reward``).
        max_choice: largest size of a number that the algorithm chooses (``Algorithm.max_choice``).
    """

    spec: EnvSpec
    horizon: int
    max_reward: float
    max_choice: float


def need(holds: bool, what: str) -> None:
    """Raises a ``MessageError`` with the text ``what`` unless ``holds``."""
    if not holds:
        raise MessageError(what)


def check_spec(message: Any) -> EnvSpec:
    """The env spec that an actor begins with.

    Raises:
        UserError: it is none, or its numbers are no robot's.
    """
    need(isinstance(message, dict) and set(message) == {"spec"}, "the first message is no spec")
    data = message["spec"]
    need(isinstance(data, dict), "the spec is no map")
    for key in data:
        text(key, "a key of the spec", 64)
    need(isinstance(data.get("cameras"), dict), "spec.cameras is no map")
    try:
        spec = spec_from_json(data)
    except (AttributeError, LookupError, ArithmeticError, TypeError, ValueError) as error:
        raise MessageError(f"the spec cannot be read ({type(error).__name__})") from error
    text(spec.name, "spec.name")
    text(spec.control_mode, "spec.control_mode")
    whole(spec.num_envs, 1, 64, "spec.num_envs")
    for name in ("action_dim", "proprio_dim"):
        whole(getattr(spec, name), 1, 1000, f"spec.{name}")
    whole(spec.privileged_dim, 0, 10_000, "spec.privileged_dim")
    whole(spec.max_episode_steps, 1, 10**6, "spec.max_episode_steps")
    number(spec.control_hz, 1e-3, 1e4, "spec.control_hz")
    if spec.num_init_states is not None:
        whole(spec.num_init_states, 1, 2**31, "spec.num_init_states")
    need(type(spec.reports_success) is bool, "spec.reports_success is not true or false")
    need(1 <= len(spec.tasks) <= 1000, "spec.tasks must be 1 to 1000 names")
    for task in spec.tasks:
        text(task, "spec.tasks")
    for steps in spec.task_steps:
        whole(steps, 1, spec.max_episode_steps, "spec.task_steps")
    meaning = spec.conventions
    need(max(len(meaning.state), len(meaning.scale)) <= 1000, "spec.conventions has a long list")
    for part in meaning.state:
        text(part, "spec.conventions.state")
    need(len(spec.cameras) <= MAX_CAMERAS, f"spec.cameras has more than {MAX_CAMERAS}")
    for name, size in spec.cameras.items():
        text(name, "spec.cameras")
        for side in size:
            whole(side, 1, MAX_SIDE, "spec.cameras")
    return spec


def check_configured(config: RobotConfig, actor: EnvSpec) -> None:
    """Checks that a new run's first actor has the env that the learner's config describes.

    An actor cannot choose it: what it brings would be the run's env from then on.

    Raises:
        UserError: the message names what differs.
    """
    configured = robot_spec(config, actor.proprio_dim)
    for name in EnvSpec.__dataclass_fields__:
        ours = getattr(configured, name)
        theirs = getattr(actor, name)
        need(
            name == "name" or ours == theirs,
            f"spec.{name} is {str(theirs)[:80]!a}, but the learner's config gives "
            f"{str(ours)[:80]!a}: set it at the learner, not at the actor",
        )
    known = proprio_dim(SPACES["robot", config.control_mode])
    # A simulated arm without a camera tells where the task's objects are, too.
    may = (known, known + privileged.DIM)
    need(
        actor.proprio_dim in may,
        f"spec.proprio_dim is {actor.proprio_dim}, but with env.control_mode="
        f"{config.control_mode} it must be {may[0]} or {may[1]}",
    )


def check_same_env(run: EnvSpec, actor: EnvSpec) -> None:
    """Checks that an actor's env is the one that the run learns in; only its name may differ.

    Raises:
        UserError: the message names what differs.
    """
    check_compatible(run, actor)
    for name in EnvSpec.__dataclass_fields__:
        ours = getattr(run, name)
        theirs = getattr(actor, name)
        if name != "name" and ours != theirs:
            raise MessageError(
                f"spec.{name} is {str(theirs)[:80]!a}, but the run has {str(ours)[:80]!a}"
            )


def check_played(message: Any, bounds: Bounds) -> TransitionBatch:
    """The chunks that an actor played, at most one of each env, and the episodes that ended.

    Returns:
        The batch. ``human`` is always given: an actor without a person has none that acted.

    Raises:
        MessageError: a field is not as it must be.
    """
    need(isinstance(message, dict) and set(message) == {"played"}, "it is no chunk")
    batch = message["played"]
    need(isinstance(batch, TransitionBatch), f"played is {shown(batch)}, not a TransitionBatch")
    chunks = batch.chunks
    need(isinstance(chunks, Transitions), f"chunks is {shown(chunks)}, not Transitions")
    spec = bounds.spec
    need(isinstance(chunks.reward, Tensor) and chunks.reward.ndim == 2, "reward is no (B, H) array")
    rows = len(chunks.reward)
    need(rows <= spec.num_envs, f"there are {rows} chunks; at most {spec.num_envs} are expected")
    per_action = (rows, bounds.horizon)
    choice = (*per_action, spec.action_dim)
    _array(chunks.choice, "choice", choice, torch.float32, bounds.max_choice)
    _array(chunks.reward, "reward", per_action, torch.float32, bounds.max_reward)
    _array(chunks.valid, "valid", per_action, torch.bool)
    for name in ("terminated", "truncated"):
        _array(getattr(chunks, name), name, (rows,), torch.bool)
    if chunks.human is not None:
        _array(chunks.human, "human", (rows,), torch.bool)
    if chunks.episode is not None:
        _array(chunks.episode, "episode", (rows,), torch.int64)
    if chunks.success is not None:
        _array(chunks.success, "success", (rows,), torch.bool)
    for name in ("weight", "features", "next_features"):
        need(getattr(chunks, name) is None, f"{name} is given, but it is the learner's to find")
    need(bool(chunks.valid.any(1).all()), "valid has a chunk without an action")
    need(not chunks.reward[~chunks.valid].any(), "reward is not zero where valid is false")
    _check_obs(chunks.obs, "obs", rows, spec)
    _check_obs(chunks.next_obs, "next_obs", rows, spec)
    need(isinstance(batch.episodes, list), f"episodes is {shown(batch.episodes)}, not a list")
    need(len(batch.episodes) <= spec.num_envs, "episodes has more than there are envs")
    for episode in batch.episodes:
        _check_episode(episode, bounds)
    if chunks.human is None:
        chunks = replace(chunks, human=torch.zeros(rows, dtype=torch.bool))
    return TransitionBatch(chunks, list(batch.episodes))


def check_evaluation(message: Any, bounds: Bounds, inits: list[int]) -> Evaluation:
    """The episodes of an evaluation.

    Args:
        message: of the actor.
        bounds: of its episodes.
        inits: the initial states that it was asked to play.

    Raises:
        MessageError: a field is not as it must be, or other states were played.
    """
    need(
        isinstance(message, dict) and set(message) == {"evaluation", "faults"},
        "it is no evaluation, which was asked for",
    )
    episodes = message["evaluation"]
    need(isinstance(episodes, list), f"evaluation is {shown(episodes)}, not a list")
    for episode in episodes:
        _check_episode(episode, bounds)
    need([e.init for e in episodes] == inits, "evaluation has other initial states than asked for")
    return Evaluation(episodes, {}, whole(message["faults"], 0, 10**6, "faults"))


def _check_episode(episode: Any, bounds: Bounds) -> None:
    spec = bounds.spec
    need(isinstance(episode, Episode), f"an episode is {shown(episode)}")
    whole(episode.init, 0, (spec.num_init_states or 2**62) - 1, "episode.init")
    need(episode.task in spec.tasks, f"episode.task is {shown(episode.task)}, which the env lacks")
    for name in ("success", "success_once", "person"):
        value = getattr(episode, name)
        need(type(value) is bool, f"episode.{name} is {shown(value)}")
    length = whole(episode.length, 0, spec.max_episode_steps, "episode.length")
    most = bounds.max_reward * length * (1 + 1e-4)  # summed in float32
    number(episode.reward, -most, most, "episode.reward")
    number(episode.weight, 1.0, 1.0, "episode.weight")
    text(episode.instruction, "episode.instruction")


def _check_obs(obs: Any, name: str, rows: int, spec: EnvSpec) -> None:
    need(isinstance(obs, Obs), f"{name} is {shown(obs)}, not an Obs")
    need(
        isinstance(obs.images, dict) and set(obs.images) == set(spec.cameras),
        f"{name}.images must have the cameras {', '.join(spec.cameras) or 'none'}",
    )
    for camera, size in spec.cameras.items():
        _array(obs.images[camera], f"{name}.images[{camera}]", (rows, *size, 3), torch.uint8)
    need(obs.previous is None, f"{name}.previous is given, but the env shows one observation")
    states = [("proprio", spec.proprio_dim)]
    if spec.privileged_dim:
        states.append(("privileged", spec.privileged_dim))
    else:
        need(obs.privileged is None, f"{name}.privileged is given, but the spec has none")
    for field, dims in states:
        _array(getattr(obs, field), f"{name}.{field}", (rows, dims), torch.float32, MAX_PROPRIO)
    said = obs.instruction
    need(isinstance(said, list) and len(said) == rows, f"{name}.instruction must be {rows} texts")
    for sentence in said:
        text(sentence, f"{name}.instruction")


def _array(
    value: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, most: float = 0.0
) -> None:
    """Checks an array; floats must be finite and of size ``most`` at most."""
    what = f"{name} must be {shape} {str(dtype).removeprefix('torch.')}"
    need(isinstance(value, Tensor), f"{what}, not {shown(value)}")
    need(
        tuple(value.shape) == shape and value.dtype == dtype,
        f"{what}, not {tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}",
    )
    if not dtype.is_floating_point:
        return
    # Written so that NaN is found too. The small share is for rounding.
    bad = ~(value.abs() <= most * (1 + 1e-5))
    if bad.any():
        place = bad.nonzero()[0].tolist()
        raise MessageError(
            f"{name}{place} is {float(value[tuple(place)]):g}; it must be a number from {-most:g} "
            f"to {most:g}"
        )


def in_words(error: Exception) -> str:
    """An error as one line of ASCII, without the stop at its end: it may quote the actor."""
    return (
        " ".join(str(error).split()).encode("ascii", "backslashreplace").decode().rstrip(".")[:400]
    )
