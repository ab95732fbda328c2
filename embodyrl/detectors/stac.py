"""``Stac``: whether the policy still means to do what it meant one chunk ago (arXiv:2410.04640)."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embodyrl.detectors.signals import Signal
from embodyrl.errors import UserError
from embodyrl.functional.transport import mean_discrepancy
from embodyrl.policy import Chooses, has_ability, num_executed
from embodyrl.types import Obs

SAMPLES = 32
"""Chunks that are sampled at every decision."""


class Stac(Signal):
    """Statistical temporal action consistency: STAC of "Unpacking failure modes".

    A plan of C actions, of which H are executed, overlaps with the next one in C - H. Of each
    decision 32 plans are sampled. The score sums up the maximum mean discrepancy between what the
    plans of successive decisions say of the same actions.
    """

    kind = "stac"

    def __init__(self) -> None:
        self.bandwidth = torch.ones(())

    def check(self, policy: Any) -> None:
        """See ``Signal``."""
        executed = num_executed(policy.config)
        if not has_ability(policy, Chooses):
            raise UserError(
                f"{policy.config.name} cannot propose several chunks, which a detector of the kind "
                "stac compares. Take --kind float."
            )
        if executed >= policy.config.horizon:
            raise UserError(
                f"The policy executes all {executed} actions of a chunk, so successive chunks do "
                "not overlap and --kind stac has nothing to compare. Train it with policy.execute "
                "below policy.horizon, or take --kind float."
            )

    @torch.no_grad()
    def read(self, policy: Any, obs: Obs, chunk: Tensor, generator: torch.Generator) -> Tensor:
        """Sampled plans (B, 32, C, A)."""
        # The whole plan, also what will not be executed. The copy shares the weights.
        planner = copy.copy(policy)
        planner.config = dataclasses.replace(policy.config, execute=policy.config.horizon)
        return planner.propose(obs, SAMPLES, generator).float().cpu()

    def fit(self, episodes: Sequence[Tensor]) -> None:
        """Sets the kernel's bandwidth: the median distance between the plans of a decision."""
        # Every pair of the plans that were sampled at a decision, once.
        plans = torch.cat(list(episodes)).flatten(2)
        pairs = torch.triu_indices(SAMPLES, SAMPLES, offset=1)
        apart = torch.cdist(plans, plans)[:, pairs[0], pairs[1]]
        self.bandwidth = apart.median().clamp_min(1e-3)

    def score(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> float:
        """See ``Signal``.

        Raises:
            UserError: two decisions lie too far apart to overlap.
        """
        return self.curve(readings, steps)[-1]

    def curve(self, readings: Tensor, steps: Sequence[int], without: int = -1) -> list[float]:
        """See ``Signal``."""
        horizon = readings.shape[2]
        total = 0.0
        found = [0.0]
        for k in range(1, len(readings)):
            taken = steps[k] - steps[k - 1]
            if taken >= horizon:
                raise UserError(
                    f"{taken} actions were taken between two chunks of {horizon}, so they do not "
                    "overlap, and a detector of the kind stac cannot compare them. Ask for the "
                    "next chunk earlier (--execute)."
                )
            # The rest of the earlier plans, and the beginning of the later ones.
            before = readings[k - 1][:, taken:].flatten(1)
            now = readings[k][:, : horizon - taken].flatten(1)
            total += float(mean_discrepancy(before, now, float(self.bandwidth)))
            found.append(total)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """See ``Signal``."""
        return {"bandwidth": self.bandwidth}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """See ``Signal``."""
        self.bandwidth = tensors["bandwidth"]
        if self.bandwidth.shape:
            raise ValueError(f"the bandwidth has the shape {tuple(self.bandwidth.shape)}")
