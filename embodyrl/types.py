"""The data that env, policy, rollout and algorithm exchange, as dataclasses of tensors.

Symbols, the same everywhere:

    N    parallel envs               A    action dims
    B    rows of a batch             P    proprio dims
    H    actions in a chunk          S    dims of the privileged state
    K    denoising steps             T    chunks one after the other

All tensors of one object have the same leading dimension: N, or B once they are in a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import torch
from torch import Tensor


class Movable:
    """Base of dataclasses that hold tensors; moves all of them to another device."""

    def _map(self, fn: Any) -> Self:
        """A copy in which every value (also in dicts and inner objects) is ``fn(value)``."""
        values = {f.name: _map_value(getattr(self, f.name), fn) for f in fields(self)}  # type: ignore[arg-type]
        return replace(self, **values)  # type: ignore[type-var]

    def to(self, device: torch.device | str) -> Self:
        """The same data on another device."""
        return self._map(lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x)


class TensorData(Movable):
    """Base of the dataclasses below: selects and concatenates rows of all tensors together."""

    def __getitem__(self, index: Any) -> Self:
        """The rows that ``index`` (int tensor, bool mask or slice) selects."""
        return self._map(lambda x: _select(x, index))

    @classmethod
    def cat(cls, items: list[Self]) -> Self:
        """All rows of ``items``, one after the other."""
        first = items[0]
        values = {f.name: _cat([getattr(i, f.name) for i in items]) for f in fields(first)}  # type: ignore[arg-type]
        return replace(first, **values)  # type: ignore[type-var]


def _map_value(value: Any, fn: Any) -> Any:
    if isinstance(value, Movable):
        return value._map(fn)
    if isinstance(value, Mapping):
        return {k: _map_value(v, fn) for k, v in value.items()}
    return fn(value)


def _select(value: Any, index: Any) -> Any:
    """The rows of a tensor or list; other values as they are."""
    if isinstance(value, Tensor):
        return value[index]
    if isinstance(value, list):
        # Lists, such as the instructions, do not take tensors as indices.
        if isinstance(index, slice):
            return value[index]
        rows = torch.as_tensor(index)
        rows = rows.nonzero().flatten() if rows.dtype == torch.bool else rows.flatten()
        return [value[i] for i in rows.tolist()]
    return value


def _cat(values: list[Any]) -> Any:
    """Tensors, lists and objects of tensors one after the other; of other values the first."""
    first = values[0]
    if isinstance(first, Tensor):
        return torch.cat(values)
    if isinstance(first, list):
        return [x for value in values for x in value]
    if isinstance(first, TensorData):
        return type(first).cat(values)
    if isinstance(first, Mapping):
        return {k: _cat([v[k] for v in values]) for k in first}
    return first


@dataclass
class Obs(TensorData):
    """What the policy sees at the start of a chunk.

    Attributes:
        images: camera name -> (N, h, w, 3) uint8.
        proprio: (N, P) float32 proprioception, in the env's own units; the policy normalises it.
        instruction: N sentences.
        privileged: (N, S) float32 simulator state, for the critic only; or None.
        previous: what was seen one control step before, where policies see several observations
            (``EnvSpec.history``); otherwise None.
    """

    images: dict[str, Tensor]
    proprio: Tensor
    instruction: list[str]
    privileged: Tensor | None = None
    previous: Obs | None = None

    def __len__(self) -> int:
        return len(self.proprio)

    def at_start(self, history: int) -> Obs:
        """The same at the start of an episode: it stands for the ``history`` - 1 before it, too."""
        seen = None
        for _ in range(history - 1):
            seen = replace(self, privileged=None, previous=seen)
        return replace(self, previous=seen)

    def frames(self) -> list[Obs]:
        """All that is seen, the oldest first and this one last."""
        return [*(self.previous.frames() if self.previous is not None else []), self]


@dataclass
class Step(TensorData):
    """The result of one chunk of actions.

    When an episode ends, its env stays as it is, with ``valid`` False, until ``reset`` is called
    for it. So ``obs`` holds the final observation of the episodes that ended in this chunk, from
    which truncated ones are bootstrapped.

    Attributes:
        obs: after the last valid action of the chunk.
        reward: (N, H) float32, zero where not valid.
        terminated: (N,) bool, the task itself ended (success or failure); never bootstrapped.
        truncated: (N,) bool, the time limit was reached, or the simulation broke; bootstrapped.
        valid: (N, H) bool, the actions that were executed in a running episode.
        success: (N,) bool, the task is solved at the end of the chunk.
        fault: (N,) bool, the simulation broke in this chunk. No action of the chunk is then valid,
            and ``obs`` is the last good one.
        log: further metrics of each env, each (N,).
        human: (N, H) bool, the actions that a person took instead of the policy; None where nobody
            can take over.
        taken: (N, H, A) the actions that were executed, whoever chose them; None with ``human``.
        success_once: (N,) bool, the task was solved after any action of the chunk. None where that
            is ``success``, because a solved task ends the episode.
    """

    obs: Obs
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    valid: Tensor
    success: Tensor
    fault: Tensor
    log: dict[str, Tensor] = field(default_factory=dict)
    human: Tensor | None = None
    taken: Tensor | None = None
    success_once: Tensor | None = None

    @property
    def ever_solved(self) -> Tensor:
        """(N,) bool: ``success_once``, or ``success`` where that says the same."""
        return self.success if self.success_once is None else self.success_once

    @property
    def done(self) -> Tensor:
        """(N,) bool: terminated or truncated."""
        return self.terminated | self.truncated


@dataclass
class DenoisingTrace(TensorData):
    """The path from noise to action that a stochastic sampler took.

    PPO's ratio compares its probability under two policies.

    Attributes:
        x: (N, K+1, H, A), x[:, 0] the noise and x[:, K] the action chunk, both in the policy's
            normalised units. For a pretrained model it may be larger, (N, K+1, C, D): the first H
            rows and A columns are executed.
        stochastic: (N, K) bool, the steps that drew noise and are trained.
        thoughts: (N, J, W) what a policy that thinks first has thought (``policies.thinker``), zero
            after the last thought; None of any other policy.
        thought_count: (N,) how many of J thoughts there are.
    """

    x: Tensor
    stochastic: Tensor
    thoughts: Tensor | None = None
    thought_count: Tensor | None = None


@dataclass
class ActionSample(TensorData):
    """What ``Policy.sample`` returns.

    Attributes:
        actions: (N, H, A) in [-1, 1], for ``VecEnv.step``.
        trace: the path from noise to these actions; None in ``"eval"`` mode.
        logprob: (N, K) log-probability of each step of the trace, zero where not stochastic; then
            J columns for thoughts, where there are some. None without a trace.
        value: (N,) the critic's value of obs, or None.
    """

    actions: Tensor
    trace: DenoisingTrace | None = None
    logprob: Tensor | None = None
    value: Tensor | None = None


@dataclass
class PolicyEval(TensorData):
    """What ``ScoresPaths.evaluate`` returns for a given trace, with gradients.

    Attributes:
        logprob: (N, K) or (N, K+J), as in ``ActionSample``.
        entropy: (N,) mean over the trained steps and the dims of the chunk, in nats.
        value: (N,) the critic's value, or None.
    """

    logprob: Tensor
    entropy: Tensor
    value: Tensor | None


@dataclass(frozen=True)
class Conventions:
    """What pictures, states and actions mean, beyond their names and sizes.

    It stands in the ``EnvSpec`` of an env, a data set and a checkpoint, and is compared where two
    of them meet. An empty field is not known, and is not compared.

    Attributes:
        orientation: of the pictures: ``"upright"``, ``"upside_down"`` (top and bottom exchanged),
            ``"mirrored"`` (left and right exchanged), or ``"turned_180"`` (both).
        channels: ``"rgb"`` or ``"bgr"``.
        fit: how a picture of another shape becomes the camera's: ``"crop"`` cuts the middle out,
            ``"squeeze"`` changes its proportions, ``"pad"`` adds black bars.
        state: the parts of proprio in order, each ``"KIND:DIMS"``, for example
            ``("hand_position:3", "hand_axis_angle:3", "fingers:2")``. Rotations name their
            representation: ``axis_angle``, ``quat_xyzw``, ``quat_wxyz``, ``euler_xyz``, ``6d``.
        actions: ``"delta"``, ``"absolute"`` or ``"velocity"``.
        scale: metres or radians of an action of 1, for all action dims but the gripper's, which
            comes last; negative where an axis points the other way.
        gripper: the actions that close and open it, for example ``(-1.0, 1.0)``.
        lag: by how many frames actions stand late in a data set; 1 if each belongs to the frame
            before it.
    """

    orientation: str = ""
    channels: str = ""
    fit: str = ""
    state: tuple[str, ...] = ()
    actions: str = ""
    scale: tuple[float, ...] = ()
    gripper: tuple[float, ...] = ()
    lag: int = 0


@dataclass(frozen=True)
class EnvSpec:
    """The facts about an env with which a policy, a data set or a checkpoint must agree.

    It is plain data, and is saved with every checkpoint.

    Attributes:
        name: for people, e.g. ``"mujoco/pick"``.
        num_envs: N.
        action_dim: A.
        proprio_dim: P.
        control_mode: the meaning of an action, e.g. ``"ee_delta_pos"``; envs with different modes
            are never combined.
        control_hz: actions per second.
        max_episode_steps: number of actions after which an episode is truncated; where the tasks
            differ in it, the largest.
        cameras: camera name -> (height, width).
        privileged_dim: S, or 0.
        tasks: task names. Initial state i is the (i // len(tasks))-th state of task i % len(tasks).
        task_steps: the time limit of each of ``tasks``; empty where all have ``max_episode_steps``.
        num_init_states: number of initial states in all; None if every non-negative number is one.
        reports_success: whether the env says which episodes are solved. If not, ``Step.success`` is
            always False, and scores are mean returns.
        layout: the meaning of the numbers in proprio followed by privileged, as (kind, first
            number, how many); may be empty. The kinds are:

            - ``"hand"`` and ``"object"``: the first three numbers are a position in the world, m.
            - ``"relative"``: an object, whose first three numbers are its position from the first
              hand, m.
            - ``"mark"``: a goal, or another painted thing that touches nothing.
            - ``"robot"``: numbers of the robot alone, including its hands if no task is about them.
        conventions: what its pictures, states and actions mean.
        history: observations, one control step apart, that a policy sees at once.
    """

    name: str
    num_envs: int
    action_dim: int
    proprio_dim: int
    control_mode: str
    control_hz: float
    max_episode_steps: int
    cameras: dict[str, tuple[int, int]]
    privileged_dim: int = 0
    tasks: tuple[str, ...] = ("task",)
    task_steps: tuple[int, ...] = ()
    num_init_states: int | None = None
    reports_success: bool = True
    layout: tuple[tuple[str, int, int], ...] = ()
    conventions: Conventions = field(default_factory=Conventions)
    history: int = 1

    def task_of(self, init: int) -> str:
        """The task that initial state ``init`` belongs to."""
        return self.tasks[init % len(self.tasks)]

    def steps_of(self, init: int) -> int:
        """The time limit of the episodes of initial state ``init``."""
        if not self.task_steps:
            return self.max_episode_steps
        return self.task_steps[init % len(self.tasks)]
