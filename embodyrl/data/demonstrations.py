"""``Demonstrations``: a data set in memory, served as observations and action chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.functional.hindsight import later_steps
from embodyrl.rollouts.batches import Transitions
from embodyrl.types import Conventions, EnvSpec, Obs


@dataclass
class Statistics:
    """Statistics per dimension over all frames, each (D,) float32.

    q01 and q99 are the 1% and 99% quantiles.
    """

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor
    q01: Tensor
    q99: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Statistics:
        """Of the rows of x (F, D)."""
        rows = x.double().numpy()
        low, high = np.quantile(rows, [0.01, 0.99], axis=0)
        values = [rows.mean(0), rows.std(0), rows.min(0), rows.max(0), low, high]
        return cls(*(torch.from_numpy(np.asarray(v, dtype=np.float32)) for v in values))


class Demonstrations:
    """Frames of all episodes one after the other; a chunk may start at every frame.

    Attributes:
        horizon: C, actions of the chunks that are imitated.
        execute: H, actions of the chunks that are transitions.
        images: camera -> (F, h, w, 3) uint8, in memory or mapped from a file.
        proprio: (F, P) float32.
        actions: (F, A) float32.
        end: (F,) the frame number after the last one of the episode that each frame belongs to.
        instruction: F indices into ``sentences``.
        sentences: the instructions that occur.
        success: (F,) bool, of the episode; True if the data set does not say.
        reward: (F,) float32 of each action; if the data set has none, 1 for the last action of a
            solved episode.
        solved: (F,) bool, the task is solved after this action; if the data set does not say when,
            after the last action of a solved episode.
        init: (F,) the episode's initial state, or -1 if the data set does not say.
        intervention: (F,) bool, a person had taken over; False if the data set does not say.
        privileged: (F, S) float32, the simulator's state; None if the data set does not hold it.
        intervention_weight: how many times as often as others these frames are drawn.
        history: observations that are seen at once, as ``EnvSpec.history``.
        control_mode: what an action means; empty if the data set does not say.
        origin: what embodyrl noted about the data set when it wrote it; empty for others.
        remarks: sentences on what is taken as it is and may not be what was meant, on what was put
            right, and on what was left out.
        no_instruction: a sentence on episodes without an instruction; empty if each has one.
        conventions: of the data set, before its translation into those of an env.
        rate: actions per second of the data set as it was recorded; 0 if it does not say.
        path: of the data set; empty for frames that were given.
    """

    intervention_weight = 1.0
    history = 1

    def __init__(
        self,
        horizon: int,
        images: dict[str, np.ndarray],
        proprio: Tensor,
        actions: Tensor,
        episode: Tensor,
        instruction: Tensor,
        sentences: list[str],
        success: Tensor | None = None,
        init: Tensor | None = None,
        reward: Tensor | None = None,
        solved: Tensor | None = None,
        intervention: Tensor | None = None,
        privileged: Tensor | None = None,
        execute: int = 0,
    ) -> None:
        """See the class for the arguments; with ``execute`` 0, all of ``horizon`` are executed.

        Raises:
            UserError: no frame, or a horizon below 1.
        """
        if horizon < 1 or len(actions) == 0:
            raise UserError(
                "Demonstrations need at least one frame and a horizon of at least 1, but there "
                f"are {len(actions)} frames and the horizon is {horizon}."
            )
        self.horizon = horizon
        self.execute = execute or horizon
        self.images = images
        self.proprio = proprio
        self.actions = actions
        self.instruction = instruction
        self.sentences = sentences
        self.success = (
            success if success is not None else torch.ones(len(actions), dtype=torch.bool)
        )
        self.init = init if init is not None else torch.full((len(actions),), -1)
        # The frames of an episode are contiguous; ``episode`` (F,) numbers the episodes.
        counts = torch.unique_consecutive(episode, return_counts=True)[1]
        self.num_episodes = len(counts)
        self.end = counts.cumsum(0).repeat_interleave(counts)
        last = self.end == torch.arange(1, len(actions) + 1)
        self.reward = reward if reward is not None else (last & self.success).float()
        self.solved = solved if solved is not None else last & self.success
        self.intervention = (
            intervention
            if intervention is not None
            else torch.zeros(len(actions), dtype=torch.bool)
        )
        self.privileged = privileged
        self.control_mode = ""
        self.origin = {}
        self.remarks: list[str] = []
        self.conventions = Conventions()
        self.rate = 0.0
        self.path = ""
        self.no_instruction = ""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def action_stats(self) -> Statistics:
        """Statistics of the actions."""
        return Statistics.of(self.actions)

    @property
    def proprio_stats(self) -> Statistics:
        """Statistics of the proprioception."""
        return Statistics.of(self.proprio)

    @property
    def frame_weights(self) -> Tensor:
        """(F,) float64, how often each frame is drawn, compared with others."""
        return torch.where(self.intervention, self.intervention_weight, 1.0).double()

    def draw(self, count: int, generator: torch.Generator, *, without_last: int = 0) -> Tensor:
        """Numbers (count,) of frames, with replacement; none of the last ones of an episode.

        Raises:
            UserError: no episode is longer than ``without_last`` frames.
        """
        uniform = self.intervention_weight == 1.0
        if uniform and not without_last:
            return torch.randint(len(self), (count,), generator=generator)
        # Frames at which a chunk may begin.
        frames = torch.arange(len(self))
        frames = frames[frames + without_last < self.end]
        if not len(frames):
            raise UserError(
                f"No episode is longer than {without_last} frames, and chunks do not begin at the "
                f"last {without_last} of an episode (drop_n_last_frames in the checkpoint's "
                "config.json). Give longer demonstrations."
            )
        if uniform:
            return frames[torch.randint(len(frames), (count,), generator=generator)]
        # A person's frames are drawn more often.
        weights = self.frame_weights[frames]
        return frames[torch.multinomial(weights, count, replacement=True, generator=generator)]

    def batch(self, indices: Tensor, *, before: int = 0) -> tuple[Obs, Tensor, Tensor]:
        """Observations and the action chunks that belong to them.

        Args:
            indices: (B,) frame numbers in [0, len(self)).
            before: so many actions before the observation come first in a chunk.

        Returns:
            obs: B observations, without privileged state.
            actions: (B, before + C, A); beyond an end of the episode the action there is repeated.
            mask: (B, before + C) bool, False beyond an end of the episode.
        """
        return self._chunks(indices, self.horizon, before)

    def _chunks(self, indices: Tensor, count: int, before: int = 0) -> tuple[Obs, Tensor, Tensor]:
        """``batch`` with chunks of ``count`` actions, and those ``before`` them."""
        indices = indices.cpu()
        end = self.end[indices][:, None]
        # The first frame of those with the same end.
        first = torch.searchsorted(self.end, end)
        # What was seen before; at the start of an episode its first frame stands for it.
        obs = None
        for earlier in reversed(range(self.history)):
            obs = self._seen((indices - earlier).maximum(first[:, 0]), obs)
        assert obs is not None
        # The frames of every chunk, which lie in its episode.
        steps = indices[:, None] + torch.arange(-before, count)
        rows = torch.minimum(steps.maximum(first), end - 1)
        return obs, self.actions[rows], rows == steps

    def _seen(self, indices: Tensor, previous: Obs | None) -> Obs:
        """What was seen in frames (B,), after ``previous``."""
        rows = indices.numpy()
        return Obs(
            images={name: torch.from_numpy(frames[rows]) for name, frames in self.images.items()},
            proprio=self.proprio[indices],
            instruction=[self.sentences[i] for i in self.instruction[indices].tolist()],
            previous=previous,
        )

    def later_proprio(
        self, indices: Tensor, ends: int, on_the_way: Sequence[float] = ()
    ) -> tuple[Tensor, Tensor]:
        """How the episodes of frames went on: proprioception 0, H, 2H, ... actions before the end.

        Args:
            indices: (B,) frames.
            ends: so many. In a short episode its first frame stands for those before it.
            on_the_way: and at these shares of the way from the frame to the last one.

        Returns:
            (B, J, P), the last first, and whether the episode was solved (B,).
        """
        indices = indices.cpu()
        end = self.end[indices]
        first = torch.searchsorted(self.end, end)  # the first frame of those with the same end
        places = later_steps(
            indices, first, end - 1, ends=ends, apart=self.execute, on_the_way=on_the_way
        )
        return self.proprio[places], self.success[indices]

    def transitions(
        self, size: int = 1024, weights: Tensor | None = None, *, in_turn: bool = False
    ) -> Iterator[Transitions]:
        """Every chunk as a transition for off-policy algorithms, ``size`` at a time.

        Each is drawn as often as its first frame, by ``weights`` (F,), which are ``frame_weights``
        if none are given.

        A chunk may start at each frame before success. A chunk in which the task is solved ends
        there and is terminated, whatever was recorded after it. The observation after the last
        action of an episode is not in the data. So a chunk that reaches the end of a failed episode
        cannot be bootstrapped, and is left out.

        With ``in_turn`` they are as a policy plays them: each chunk begins where the one before
        ended, failed episodes have their last chunk (truncated, and followed by what was seen
        last), and each names its episode.
        """
        weights = self.frame_weights if weights is None else weights
        # The frames from which on the task has been solved.
        frame = torch.arange(len(self))
        solved = self.solved | (self.success & (frame + 1 == self.end))
        so_far = solved.cumsum(0) - solved.long()
        first = torch.ones_like(solved)
        first[1:] = self.end[1:] != self.end[:-1]
        past = so_far > so_far[torch.where(first, frame, 0).cummax(0).values]
        # Where chunks begin.
        begins = ~past
        if in_turn:
            begins &= (frame - torch.searchsorted(self.end, self.end)) % self.execute == 0
        for index in frame[begins].split(size):
            # Which actions of the chunk count, and whether it ends in success.
            steps = index[:, None] + torch.arange(self.execute)
            end = self.end[index]
            rows = torch.minimum(steps, end[:, None] - 1)
            valid = (steps < end[:, None]) & ~past[rows]
            over = (solved[rows] & valid).any(1)
            # Leave out chunks that cannot be bootstrapped.
            keep = over | (index + self.execute < end) | in_turn
            if not keep.any():
                continue
            index, rows, valid, over, end = (x[keep] for x in (index, rows, valid, over, end))
            obs, actions, _ = self._chunks(index, self.execute)
            after, _, _ = self._chunks(torch.minimum(index + self.execute, end - 1), 1)
            reward = torch.where(valid, self.reward[rows], 0.0)
            yield Transitions(
                obs,
                actions,
                reward,
                valid,
                over,
                ~over & (index + self.execute >= end),
                after,
                episode=end if in_turn else None,
                success=over if in_turn else None,
                weight=weights[index].float(),
            )

    def check(self, spec: EnvSpec, name: str = "data") -> None:
        """Checks that a policy for ``spec`` can learn from these data.

        Raises:
            UserError: the dims or the control mode differ, actions are outside of [-1, 1], or
                numbers are not finite.
        """
        check_dims(spec, self.actions, self.proprio, name)
        if self.control_mode and self.control_mode != spec.control_mode:
            raise UserError(
                f"The actions of the data set {name} are {self.control_mode}; {spec.name} takes "
                f"{spec.control_mode}."
            )
        for what, values in (("actions", self.actions), ("proprio", self.proprio)):
            if not torch.isfinite(values).all():
                raise UserError(f"The {what} of the data set {name} hold NaN or infinity.")
        if (largest := float(self.actions.abs().max())) > 1.0 + 1e-4:
            raise UserError(
                f"The actions of the data set {name} reach {largest:.3g}, but {spec.name} takes "
                "actions in [-1, 1]: the units differ. Rescale the actions to those of the env's "
                "control mode."
            )


def require_whole(demos: Any) -> None:
    """Refuses episodes of which some are cut, where what an episode came to is learned from.

    Args:
        demos: ``Demonstrations``, or a ``Mixture`` of them.

    Raises:
        UserError: naming the data set.
    """
    for part in getattr(demos, "parts", [demos]):
        if part.origin.get("synthetic", {}).get("cut"):
            raise UserError(
                f"{part.path} holds synthetic trajectories that are cut before they end, and would "
                "count as failures here. Draw whole ones (`embodyrl world trajectories write --starts "
                "first --length N`, N as long as an episode), or learn by TD (algorithm.name=fql)."
            )


def check_dims(spec: EnvSpec, actions: Any, proprio: Any, name: str) -> None:
    """Raises a ``UserError`` unless actions (F, A) and proprio (F, P) have the dims of an env."""
    for what, values, wanted in (
        ("action dims", actions, spec.action_dim),
        ("proprio dims", proprio, spec.proprio_dim),
    ):
        found = values[:1].size if isinstance(values, np.ndarray) else values.shape[1]
        if found != wanted:
            raise UserError(
                f"The data set {name} has {found} {what}, but {spec.name} has {wanted}."
            )
