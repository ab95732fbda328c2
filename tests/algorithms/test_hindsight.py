"""Hindsight: labels of how episodes ended, and critics that see where things are in pictures."""

from typing import Any, cast

import pytest
import torch

from embodyrl.algorithms.episode_buffer import later_places
from embodyrl.algorithms.optim import Means
from embodyrl.algorithms.pa_rl import PARL, PARLConfig
from embodyrl.build import make_policy
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.mixture import Mixture
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.policies.localiser import ENDS, PLACES
from embodyrl.rollouts.batches import TransitionBatch, Transitions
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec("test/square", 4, 2, 2, "torque", 25.0, 20, {"front": (32, 32)})
H = 2
CHOOSER: dict[str, Any] = {"chooser_width": 8, "proposals": 3}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(square, hand):
    """A white square at one place and a red one, the robot, at another; both in [-1, 1]."""
    images = torch.full((len(square), 32, 32, 3), 60, dtype=torch.uint8)
    for place, colour in ((hand, (200, 40, 40)), (square, (250, 250, 250))):
        rows = ((place + 1) * 12 + 2).long()
        for image, (row, column) in zip(images, rows.tolist(), strict=True):
            image[row : row + 5, column : column + 5] = torch.tensor(colour, dtype=torch.uint8)
    return images


def episodes(count, solved, seed=0, first=0):
    """Episodes of two chunks, which end at the square if they are solved; rows in their order."""
    generator = gen(seed)
    square = torch.rand(count, 2, generator=generator) * 2 - 1
    hand = [torch.rand(count, 2, generator=generator) * 2 - 1 for _ in range(3)]
    hand[2] = torch.where(solved[:, None], square, hand[2])
    obs = [Obs({"front": pictures(square, h)}, h, ["go to it"] * count) for h in hand]
    chunks = []
    for t in range(2):
        over = torch.full((count,), t == 1)
        chunks.append(
            Transitions(
                obs[t],
                torch.rand(count, H, 2, generator=generator) * 2 - 1,
                torch.zeros(count, H),
                torch.ones(count, H, dtype=torch.bool),
                over & solved,
                over & ~solved,
                obs[t + 1],
                episode=torch.arange(count) + first,
                success=over & solved,
            )
        )
    return chunks, square


def make_small(**settings):
    config = FlowVLAConfig(
        horizon=H, width=16, heads=2, layers=1, action_patch=2, critic="shared", **CHOOSER
    )
    torch.manual_seed(0)
    small: dict[str, Any] = {"warmup_chunks": 64, "critic_warmup": 1, "mc_steps": 0}
    small |= {"batch_size": 8, "actor_batch_size": 4, "capacity": 256, "hindsight_steps": 2}
    return PARL(PARLConfig(**small | settings), cast(Any, make_policy(config, SPEC, 0)))


def update(algorithm, chunks):
    return algorithm.update(TransitionBatch(chunks), progress=0.0, generator=gen())


def demonstrations(lengths, horizon=H, success=None):
    """Frames whose proprioception is their own number."""
    count = sum(lengths)
    number = torch.arange(count).float()
    return Demonstrations(
        horizon,
        {"front": torch.zeros(count, 32, 32, 3, dtype=torch.uint8).numpy()},
        number[:, None].repeat(1, 2),
        torch.zeros(count, 2),
        torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        torch.zeros(count, dtype=torch.long),
        ["go to it"],
        success,
    )


def test_labels_are_the_last_observations_of_the_episode_and_those_on_the_way_there():
    places = later_places(torch.arange(9.0)[:, None])[..., 0]  # eight chunks
    assert places.shape == (8, PLACES)
    assert places[0].tolist() == [8.0, 7.0, 6.0, 6.0, 4.0, 2.0]
    assert places[4].tolist() == [8.0, 7.0, 6.0, 7.0, 6.0, 5.0]
    # The first observation stands for those before it.
    short = later_places(torch.tensor([[7.0], [8.0]]))
    assert short[0, :ENDS].flatten().tolist() == [8.0] + [7.0] * (ENDS - 1)


def test_demonstrations_say_how_their_episodes_ended_a_chunk_apart():
    demos = demonstrations([6, 2], success=torch.tensor([True] * 6 + [False] * 2))
    ends, solved = demos.later_proprio(torch.tensor([0, 5, 6]), 3)
    assert ends[..., 0].tolist() == [[5.0, 3.0, 1.0], [5.0, 3.0, 1.0], [7.0, 6.0, 6.0]]
    assert solved.tolist() == [True, True, False]
    mixed = Mixture([demonstrations([6, 2]), demonstrations([3])])
    way, _ = demos.later_proprio(torch.tensor([0, 1, 6]), 1, (1.0, 0.5))
    assert way[..., 0].tolist() == [[5.0, 5.0, 2.0], [5.0, 5.0, 3.0], [7.0, 7.0, 6.0]]
    both, _ = mixed.later_proprio(torch.tensor([8, 6, 0]), 2)
    assert both[..., 0].tolist() == [[2.0, 0.0], [7.0, 6.0], [5.0, 3.0]]


def test_chunks_of_solved_episodes_are_labelled_and_features_are_those_of_the_encoder():
    algorithm = make_small(refresh_chunks=64)
    solved = torch.arange(32) % 2 == 0
    chunks, square = episodes(32, solved)
    for part in chunks:
        update(algorithm, part)
    data = algorithm.buffer.data
    torch.testing.assert_close(data["places"][:32][solved, 0], square[solved])
    for _ in range(2):  # after the warm-up, and after a refresh
        seen = algorithm.buffer.rows(torch.arange(len(algorithm.buffer)))
        torch.testing.assert_close(
            data["features"][: len(seen)], algorithm.chooser.encoder(seen.obs)
        )
        after = algorithm.chooser.encoder(seen.next_obs)
        torch.testing.assert_close(data["next_features"][: len(seen)], after)
        for part in episodes(32, solved, seed=1, first=100)[0]:
            update(algorithm, part)


def test_critics_learn_to_see_where_the_task_leads():
    """On new pictures the place is right to a seventh of the picture; the robot is no help."""
    algorithm = make_small(capacity=2048, warmup_chunks=10_000)
    for part in episodes(600, torch.ones(600, dtype=torch.bool))[0]:
        update(algorithm, part)
    algorithm.chooser.encoder.fit_inputs(algorithm.buffer.rows(torch.arange(400)).obs)
    algorithm.hindsight.fit_painter(40, gen(), Means())
    algorithm.hindsight.fit(60, gen(1), Means())
    chunks, square = episodes(64, torch.zeros(64, dtype=torch.bool), seed=9)
    localiser = algorithm.chooser.encoder.localiser
    with torch.no_grad():
        places = localiser.normalize_proprio.inverse(localiser(chunks[0].obs))
    error = (places[:, 0] - square).norm(dim=-1)
    assert error.median() < 0.3 < (0.5 * (chunks[0].obs.proprio - square)).norm(dim=-1).median()


@pytest.mark.parametrize("failed_demos", [False, True])
def test_without_any_success_there_is_nothing_to_learn_from(failed_demos):
    algorithm = make_small()
    if failed_demos:
        algorithm.add_demos(demonstrations([6, 4], success=torch.zeros(10, dtype=torch.bool)))
    first, second = episodes(32, torch.zeros(32, dtype=torch.bool))[0]
    update(algorithm, first)
    with pytest.raises(UserError, match=r"nothing says what matters"):
        update(algorithm, second)
