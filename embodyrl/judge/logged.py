"""``Logged``: recorded episodes as chunks, with what critics see of them, and how they ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embodyrl.algorithms.episode_buffer import EpisodeBuffer
from embodyrl.algorithms.hindsight import Hindsight
from embodyrl.algorithms.optim import Means
from embodyrl.data.demonstrations import Demonstrations, require_whole
from embodyrl.data.env_check import other_rate
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.mixture import Mixture
from embodyrl.devices import keep_random_state
from embodyrl.errors import UserError
from embodyrl.policies.found_features import FoundFeatures
from embodyrl.policy import num_executed
from embodyrl.types import EnvSpec, Obs

FEWEST = 10
"""Episodes of each outcome, below which nothing is said."""
HINDSIGHT_STEPS = 450
"""Gradient steps in which critics learn where things are in pictures."""
AT_ONCE = 256
"""Observations that a policy sees at once."""


@dataclass(frozen=True)
class Logged:
    """B chunks of E episodes, in the order in which they were played.

    Attributes:
        buffer: holds the observations.
        features: what critics see before each chunk, and the share of the time limit that is over.
        choice: what was done.
        valid: the actions that were carried out.
        episode: of each chunk, from 0 on.
        following: the chunk that follows each in its episode; -1 where it is the last one.
        solved: whether the task was solved in the chunk.
        success: of each episode.
    """

    buffer: EpisodeBuffer
    features: Float[Tensor, "b f"]
    choice: Float[Tensor, "b h a"]
    valid: Bool[Tensor, "b h"]
    episode: Int[Tensor, " b"]
    following: Int[Tensor, " b"]
    solved: Bool[Tensor, " b"]
    success: Bool[Tensor, " e"]

    @property
    def first(self) -> Int[Tensor, " e"]:
        """The first chunk of each episode."""
        begins = torch.ones_like(self.solved)
        begins[1:] = self.episode[1:] != self.episode[:-1]
        return begins.nonzero().flatten()

    def observations(self) -> Iterator[Obs]:
        """What was seen before each chunk, many at a time."""
        for rows in torch.arange(len(self.episode), device=self.features.device).split(AT_ONCE):
            yield self.buffer.rows(rows).obs


def read_logged(
    data: Sequence[str], policy: Any, device: torch.device | str = "cpu", seed: int = 0
) -> tuple[Logged, list[str]]:
    """Reads data sets, with their failures, as a policy would have seen them.

    Args:
        data: LeRobotDatasets, folders or hub ids.
        policy: whose observations, actions and chunks they must fit.
        device: of the critics.
        seed: of what critics learn of pictures.

    Returns:
        The chunks, and remarks on what is taken as it is and may not be what was meant.

    Raises:
        UserError: no such data set; other cameras, dims, control mode, rate or conventions than the
            policy's; or too few episodes of one outcome.
    """
    parts = [_read(path, policy) for path in data]
    remarks = [text for part in parts for text in part.remarks]
    return as_chunks(
        Mixture(parts), policy.spec, num_executed(policy.config), device, seed
    ), remarks


def _read(path: str, policy: Any) -> Demonstrations:
    """A data set, if the policy can be judged by it."""
    spec = policy.spec
    part = load_demonstrations(path, num_executed(policy.config), spec=spec, keep="all")
    if other_rate(part.rate, spec, path):
        raise UserError(
            f"{path} has {part.rate:g} actions per second, and the policy, which was made for "
            f"{spec.name}, takes {spec.control_hz:g}: what it would do there cannot be compared with "
            "what was done. Give data of the policy's rate."
        )
    if part.no_instruction and getattr(policy, "reads_instructions", True):
        raise UserError(f"{part.no_instruction} The policy reads instructions.")
    return part


def as_chunks(
    demos: Demonstrations | Mixture,
    spec: EnvSpec,
    horizon: int,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> Logged:
    """The same of data in memory.

    Args:
        demos: all episodes.
        spec: of the env.
        horizon: H, actions of a chunk.
        device: of the critics.
        seed: of what critics learn of pictures.
    """
    require_whole(demos)
    _require_both(demos)
    with keep_random_state():
        torch.manual_seed(seed)
        encoder = FoundFeatures(spec).to(device)
    # All chunks, each where the one before it ended.
    capacity = len(demos) // horizon + demos.num_episodes
    where = torch.device(device)
    buffer = EpisodeBuffer(capacity, spec, horizon, encoder, 1.0, where)
    for chunks in demos.transitions(in_turn=True):
        buffer.store(chunks.to(where))
    # What critics see of them: where things are in pictures is learned from the successes.
    generator = torch.Generator().manual_seed(seed)
    Hindsight(encoder, buffer, HINDSIGHT_STEPS, 0).begin(generator, Means())
    # How the episodes went on.
    column = {name: values[: len(buffer)] for name, values in buffer.data.items()}
    _, episode = torch.unique_consecutive(column["episode"], return_inverse=True)
    rows = torch.arange(len(episode), device=where)
    first = torch.ones_like(column["terminated"])
    first[1:] = episode[1:] != episode[:-1]
    last = first.roll(-1)
    # The share of the time limit that is over before each chunk.
    lasted = column["valid"].sum(1)
    before = lasted.cumsum(0) - lasted
    elapsed = before - before[first][episode]
    time = elapsed / max(1, spec.max_episode_steps)
    return Logged(
        buffer,
        torch.cat([column["features"], time[:, None]], dim=1),
        column["choice"],
        column["valid"],
        episode,
        torch.where(last, -1, rows + 1),
        column["terminated"],
        column["solved"][first],
    )


def _require_both(demos: Demonstrations | Mixture) -> None:
    """Refuses data from which nothing can be told.

    Raises:
        UserError: too few solved or failed episodes.
    """
    parts = demos.parts if isinstance(demos, Mixture) else [demos]
    solved = sum(int(part.success[part.end.unique() - 1].sum()) for part in parts)
    failed = demos.num_episodes - solved
    if min(solved, failed) >= FEWEST:
        return
    text = (
        f"The data have {solved} solved and {failed} failed episodes, and to judge policies from them "
        f"takes {FEWEST} of each. "
    )
    if not failed:
        text += (
            "Episodes of a data set that does not say which failed count as solved. Record failures, "
            "too (`embodyrl collect --policy RUN --keep-failures`, `embodyrl data from-logs "
            "--keep-failures`)."
        )
    elif not solved:
        text += "Add episodes that were solved, such as demonstrations (another --data)."
    else:
        text += "Record more, or add another data set (--data A B)."
    raise UserError(text)
