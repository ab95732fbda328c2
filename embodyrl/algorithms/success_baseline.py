"""A baseline for single episodes: the recent success rate of their instruction.

A group of G episodes from one start is its own baseline, and costs G episodes. A single episode is
compared with a record instead: of each instruction, how many of its recent episodes were solved, with
old ones fading. Under a Beta(1/2, 1/2) prior the expected success rate is

    b = (1/2 + solved) / (1 + played)

and the advantage of the next episode is its success minus b. The record is of earlier iterations
alone, so b does not depend on what the episode did, and the policy gradient stays unbiased. Single
episodes with such a record are SPO (arXiv:2509.13232) and MSSR (arXiv:2512.18215), on language models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from embodyrl.rollouts.batches import Episode, by_policy

MEMORY = 64
"""Episodes of an instruction after which an older one counts 1/e as much."""
PRIOR = 0.5
"""Solved and failed episodes, each, that the prior is worth."""


class SuccessBaseline:
    """The record of each instruction.

    Attributes:
        record: instruction -> how many of its episodes were solved, and were played, old ones fading.
    """

    def __init__(self) -> None:
        self.record: dict[str, tuple[float, float]] = {}

    def of(self, episodes: Sequence[Episode]) -> Tensor:
        """(E,): what was to be expected of each episode."""
        known = [self.record.get(e.instruction, (0.0, 0.0)) for e in episodes]
        rates = [(PRIOR + solved) / (2.0 * PRIOR + played) for solved, played in known]
        return torch.tensor(rates, dtype=torch.float32)

    def note(self, episodes: Sequence[Episode]) -> None:
        """Adds episodes to the record, after they were learned from."""
        keep = 1.0 - 1.0 / MEMORY
        for episode in by_policy(episodes):
            solved, played = self.record.get(episode.instruction, (0.0, 0.0))
            self.record[episode.instruction] = keep * solved + episode.success, keep * played + 1.0

    def state_dict(self) -> dict[str, Any]:
        """The record, instruction by instruction."""
        pairs = list(self.record.values())
        return {"instructions": list(self.record), "record": [list(pair) for pair in pairs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        pairs = [(float(solved), float(played)) for solved, played in state["record"]]
        self.record = dict(zip(state["instructions"], pairs, strict=True))
