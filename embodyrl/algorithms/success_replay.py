"""Successes that stand in for a failure in groups that all fail.

A group without a success has no advantage. ARPO (arXiv:2505.16282) and DART (arXiv:2509.23866) keep
successful episodes and put one into such a group. Here the kept episode began at the group's own
initial state, so the comparison stays one between episodes from one start. It brings the
log-probability of the policy that played it: the ratio is a true importance ratio, and clipped.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from embodyrl.rollouts.batches import Episode, EpisodeBatch
from embodyrl.types import DenoisingTrace, Obs


class SuccessReplay:
    """The newest successful episode of each initial state, of the last ``capacity`` states.

    Args:
        capacity: episodes that are kept, on the CPU.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.episodes: dict[int, EpisodeBatch] = {}

    def store(self, batch: EpisodeBatch) -> None:
        """Keeps the successes of a batch."""
        # A newer success replaces the one from the same state, and stands last.
        for number, episode in enumerate(batch.episodes):
            if episode is not None and episode.success:
                self.episodes.pop(episode.init, None)
                self.episodes[episode.init] = batch.select([number]).to("cpu")
        # The states that were solved longest ago go.
        for init in list(self.episodes)[: max(0, len(self.episodes) - self.capacity)]:
            del self.episodes[init]

    def rescued(self, failed: EpisodeBatch, size: int) -> EpisodeBatch | None:
        """The groups of ``failed`` with a success from their own start in place of the last episode.

        Args:
            failed: groups of ``size`` failures each, one after the other.
            size: of a group.

        Returns:
            As many groups as there is a success for; None for none.
        """
        parts: list[EpisodeBatch] = []
        for first in range(0, len(failed.episodes), size):
            # The success from this group's own initial state, if there is one.
            episode = failed.episodes[first]
            kept = None if episode is None else self.episodes.get(episode.init)
            if kept is not None:
                others = failed.select(list(range(first, first + size - 1)))
                parts += [others, kept.to(failed.logprob.device)]
        return EpisodeBatch.cat(parts) if parts else None

    def state_dict(self) -> dict[str, Any]:
        """All episodes, the oldest first."""
        return {"episodes": [_plain(batch) for batch in self.episodes.values()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""
        self.episodes = {}
        for saved in state["episodes"]:
            episode = Episode(**saved["episodes"][0])
            trace = DenoisingTrace(**saved["trace"])
            numbers: tuple[Tensor, Tensor] = saved["logprob"], saved["episode"]
            self.episodes[episode.init] = EpisodeBatch(
                _obs(saved["obs"]), trace, *numbers, [episode], saved["env_steps"]
            )


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, with the tensors themselves."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _obs(saved: dict[str, Any]) -> Obs:
    previous = saved.get("previous")
    return Obs(**{**saved, "previous": None if previous is None else _obs(previous)})
