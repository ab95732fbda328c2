"""``GroupDraws``: groups of episodes begin as envs become free, and end once they cannot count.

Dynamic sampling (DAPO, arXiv:2503.14476) draws groups until M of them are informative. Round after
round, envs idle until the slowest episode of a round is over. Here the next group begins at once:

- as needed: when a group turns out to say nothing, another one takes its place;
- ahead: whenever an env is free. What is not needed in the end is cut (APRIL, arXiv:2509.18521).

In both, episodes of a group that can no longer be informative are cut too.

What is kept are the first M informative groups **in the order in which they were drawn**, not in
that in which they ended. Success is fast and failure slow, so what ends first is no fair sample. The
order of drawing knows nothing of outcomes: the kept groups are those that one env would find, playing
one group after the other, however many envs there are and however long episodes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from embodyrl.rollouts.batches import Episode
from embodyrl.rollouts.episodes import IDLE, EndedEpisode, EpisodeStream

Results = Sequence[Episode | None]
"""What episodes of a group scored; None where the simulation broke."""


class GroupDraws:
    """See the module's docstring; episode n of the stream belongs to group n // size.

    Args:
        states: initial states, one for each group.
        size: G, episodes of a group.
        wanted: M, informative groups to find.
        most: groups that may begin, at most.
        ahead: whether free envs begin groups that may not be needed.
        informative: whether a whole group is to be kept.
        hopeless: whether some results of a group say that it will not be, whatever the others.

    Attributes:
        verdicts: group -> whether it is informative, of those of which this is known.
    """

    def __init__(
        self,
        states: Iterable[int],
        size: int,
        wanted: int,
        most: int,
        *,
        ahead: bool,
        informative: Callable[[Results], bool],
        hopeless: Callable[[Results], bool],
    ) -> None:
        self.states = states
        self.size = size
        self.wanted = wanted
        self.most = most
        self.ahead = ahead
        self.informative = informative
        self.hopeless = hopeless
        self.verdicts: dict[int, bool] = {}
        self._ended: dict[int, list[Episode | None]] = {}

    def inits(self) -> Iterator[int]:
        """The initial states of the episodes, in their order."""
        for init in self.states:
            yield from [init] * self.size

    @property
    def last(self) -> int:
        """The number of the last group that may count, as far as is known."""
        good = sorted(group for group, keep in self.verdicts.items() if keep)
        return good[self.wanted - 1] if len(good) >= self.wanted else self.most - 1

    @property
    def kept(self) -> list[int]:
        """The informative groups, in order; at most ``wanted``."""
        return [g for g in sorted(self.verdicts) if self.verdicts[g] and g <= self.last]

    def needed(self, number: int) -> bool:
        """Whether an episode can still change which groups are kept."""
        group = number // self.size
        return group not in self.verdicts and group <= self.last

    def room(self, started: int) -> int:
        """How many more episodes may begin, after ``started`` of them."""
        groups = self.last + 1
        if not self.ahead:
            dropped = sum(not keep for keep in self.verdicts.values())
            groups = min(groups, self.wanted + dropped)
        return max(0, groups * self.size - started)

    def note(self, ended: Iterable[EndedEpisode]) -> None:
        """Judges the groups of episodes that came to their end."""
        for one in ended:
            group = one.number // self.size
            results = self._ended.setdefault(group, [])
            results.append(one.result)
            if len(results) == self.size:
                self.verdicts.setdefault(group, self.informative(results))
            elif self.hopeless(results):
                self.verdicts[group] = False

    def refill(self, stream: EpisodeStream) -> list[int]:
        """Cuts the episodes that are not needed, and begins others; returns the envs of these."""
        begun: list[int] = []
        while True:
            playing = stream.playing.tolist()
            stream.abandon([k for k, n in enumerate(playing) if n != IDLE and not self.needed(n)])
            # Among those that begin may be the rest of a group that was dropped meanwhile.
            fresh = stream.fill(self.room(stream.started))
            begun += fresh
            if not fresh:
                return begun
