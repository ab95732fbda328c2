"""What a signal reads of recorded episodes: at which frames, up to where, and of which episodes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.detectors.episodes import successes_of, watch
from embodyrl.detectors.features import FloatIndex
from embodyrl.detectors.signals import Signal
from embodyrl.detectors.stac import SAMPLES, Stac
from embodyrl.errors import UserError

H = 4


class Place(Signal):
    """Reads the proprioception and the first action that answered it."""

    kind = "place"

    def read(self, policy, obs, chunk, generator):
        assert chunk.shape[1:] == (H, 2)
        return torch.cat([obs.proprio, chunk[:, 0]], 1)


def recorded() -> Demonstrations:
    """Three episodes of 10, 7 and 9 frames; the first is solved by its 6th action."""
    lengths = [10, 7, 9]
    number = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)])
    place = torch.arange(sum(lengths)).float()[:, None]
    solved = torch.zeros(len(number), dtype=torch.bool)
    solved[5:10] = True
    helped = torch.zeros(len(number), dtype=torch.bool)
    helped[20] = True  # in the third episode
    return Demonstrations(
        H, {}, place, torch.cat([place, -place], 1), number, (number == 1).long(),
        ["red", "blue"], success=number != 1, solved=solved, intervention=helped,
    )  # fmt: skip


def test_every_chunk_is_read_until_the_task_is_solved() -> None:
    first, second = watch(recorded(), None, Place(), H)
    assert (first.steps, first.success, first.length, first.task) == ([0, 4], True, 6, "red")
    assert first.readings.tolist() == [[0, 0, 0], [4, 4, -4]]
    assert (second.steps, second.success, second.length, second.task) == ([0, 4], False, 7, "blue")
    assert second.readings[:, 0].tolist() == [10, 14]


def test_where_nothing_succeeded_there_is_nothing_to_learn_from() -> None:
    episodes = watch(recorded(), None, Place(), H)
    assert len(successes_of(episodes, "data/x")) == 1
    with pytest.raises(UserError, match="None of the 1 episodes of data/x"):
        successes_of(episodes[1:], "data/x")


def test_policies_that_cannot_be_read_of_are_refused() -> None:
    def policy(horizon: int, execute: int, **more: object) -> SimpleNamespace:
        config = SimpleNamespace(name="mine", horizon=horizon, execute=execute)
        return SimpleNamespace(config=config, **more)

    with pytest.raises(UserError, match="mine has no features"):
        FloatIndex().check(policy(8, 4))
    with pytest.raises(UserError, match="mine cannot propose"):
        Stac().check(policy(8, 4))
    able = {"propose": None, "chooser": None}
    with pytest.raises(UserError, match="executes all 8 actions"):
        Stac().check(policy(8, 0, **able))
    Stac().check(policy(8, 4, **able))
    assert SAMPLES > 1
