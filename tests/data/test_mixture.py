"""Several data sets as one: drawn by weight, in the requested order, interventions more often."""

import pytest
import torch

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.mixture import Mixture
from embodyrl.errors import UserError


def demos(
    first: int, count: int, sentence: str, intervention: torch.Tensor | None = None
) -> Demonstrations:
    """Episodes of five frames whose proprioception is the frame's number, from ``first`` on."""
    number = torch.arange(first, first + count)
    images = {"front": number[:, None, None, None].expand(-1, 2, 2, 3).to(torch.uint8).numpy()}
    actions = torch.stack([number / 1000, -number / 1000], dim=1)
    zeros = torch.zeros(count, dtype=torch.long)
    episode = torch.arange(count) // 5
    return Demonstrations(
        3,
        images,
        number[:, None].float(),
        actions,
        episode,
        zeros,
        [sentence],
        intervention=intervention,
    )


def test_frames_come_as_asked_for_whatever_data_set_they_are_of():
    a, b = demos(0, 10, "a"), demos(100, 20, "b")
    both = Mixture([a, b])
    assert len(both) == 30 and both.actions.shape == (30, 2)
    obs, actions, mask = both.batch(torch.tensor([12, 0, 29, 9, 10]))
    assert (
        obs.proprio[:, 0].tolist()
        == [102, 0, 119, 9, 100]
        == obs.images["front"][:, 0, 0, 0].tolist()
    )
    assert obs.instruction == ["b", "a", "b", "a", "b"]
    assert mask.sum(1).tolist() == [3, 3, 1, 1, 3]
    alone = b.batch(torch.tensor([2]))
    assert torch.equal(actions[0], alone[1][0]) and torch.equal(mask[0], alone[2][0])
    assert sum(len(t) for t in both.transitions()) == sum(
        len(t) for part in (a, b) for t in part.transitions()
    )


def test_weights_say_how_often_each_is_drawn():
    parts, g = [demos(0, 10, "a"), demos(100, 90, "b")], torch.Generator().manual_seed(0)
    by_frames = Mixture(parts).draw(4000, g)
    assert (by_frames < 10).float().mean() == pytest.approx(0.1, abs=0.03)
    weighted = Mixture(parts, [3.0, 1.0]).draw(4000, g)
    assert (weighted < 10).float().mean() == pytest.approx(0.75, abs=0.03)
    assert len(weighted.unique()) == 100
    assert Mixture(parts, [0.0, 1.0]).draw(500, g).min() >= 10
    for wrong in ([1.0], [1.0, -1.0], [0.0, 0.0]):
        with pytest.raises(UserError, match=r"data\.weights"):
            Mixture(parts, wrong)


def test_a_small_data_set_may_be_left_out_of_a_batch():
    corrected, plain = demos(0, 10, "a", torch.ones(10, dtype=torch.bool)), demos(100, 5, "b")
    for part in (corrected, plain):
        part.intervention_weight = 2.0
    drawn = Mixture([corrected, plain], [1.0, 1e-9]).draw(8, torch.Generator().manual_seed(0))
    assert drawn.max() < 10


def test_interventions_are_drawn_more_often():
    taken_over = torch.arange(100) < 20
    one, g = demos(0, 100, "a", taken_over), torch.Generator().manual_seed(0)
    assert torch.equal(
        one.draw(50, torch.Generator().manual_seed(1)),
        torch.randint(100, (50,), generator=g.manual_seed(1)),
    )
    one.intervention_weight = 4.0
    assert taken_over[one.draw(4000, g)].float().mean() == pytest.approx(
        0.5, abs=0.03
    )  # 20 * 4 to 80
