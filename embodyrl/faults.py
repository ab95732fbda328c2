"""When a simulator breaks too often to be a matter of chance."""

from __future__ import annotations

MAX_FAULTS = 5  # in FAULT_WINDOW episodes: as many are a fault of the set-up, not of chance
FAULT_WINDOW = 100


class FaultWindow:
    """Counts the episodes that began and those that broke, over the last ``FAULT_WINDOW`` of them."""

    def __init__(self) -> None:
        self._episodes = 0
        self._faults: list[int] = []  # the number of episodes begun when each fault happened

    def begin(self, episodes: int) -> None:
        """Notes that so many episodes begin."""
        self._episodes += episodes

    def add(self) -> str | None:
        """Notes a fault; where it is one too many, says so in words that want a subject before them."""
        self._faults = [at for at in self._faults if self._episodes - at < FAULT_WINDOW] + [self._episodes]
        if len(self._faults) < MAX_FAULTS:
            return None
        return f"broke {len(self._faults)} times within {FAULT_WINDOW} episodes, so the run stops."
