"""PA-RL on recorded episodes: what is read, what is learned from failures, what goes on, what is refused."""

import copy

import pytest
import torch
from small_offline import gen, make_small, recorded, update

from embodyrl.algorithms.pa_rl import PARL
from embodyrl.data.mixture import Mixture
from embodyrl.errors import UserError


def test_chunks_in_turn_follow_each_other_and_failed_episodes_have_their_end():
    demos = recorded(3, 5, solved=False)
    demos.success[5:10] = True
    demos.solved[9] = True
    chunks = next(demos.transitions(in_turn=True))
    assert chunks.episode.tolist() == [5] * 3 + [10] * 3 + [15] * 3
    assert chunks.truncated.tolist() == [
        False,
        False,
        True,
        False,
        False,
        False,
        False,
        False,
        True,
    ]
    assert chunks.terminated.tolist() == [False] * 5 + [True] + [False] * 3
    assert chunks.success.tolist() == chunks.terminated.tolist()
    assert chunks.valid[2].tolist() == [True, False]
    torch.testing.assert_close(chunks.next_obs.proprio[0], chunks.obs.proprio[1])
    # Two data sets share no episode.
    mixed = Mixture([recorded(3, 5), recorded(2, 5)])
    ids = torch.cat([c.episode for c in mixed.transitions(in_turn=True)])
    assert len(ids.unique()) == 5


def test_the_policy_learns_from_failures_what_to_avoid():
    algorithm = make_small(lr=3e-3, critic_lr=3e-3, actor_share=1.0, success_coef=0.0)
    data = recorded(400)
    obs = data.batch(torch.arange(0, 512, 2))[0]

    def first_action():
        return float(algorithm.policy.propose(obs, 4, gen(9))[..., 0, 0].mean())

    before = first_action()
    for i in range(8):
        row = update(algorithm, data, i)
    assert first_action() > before + 0.2
    assert row["value_chosen"] > row["value_alone"] > row["return_data"] > 0.3


def test_online_training_goes_on_with_critics_that_are_ready():
    algorithm = make_small()
    update(algorithm, recorded())
    online = make_small(PARL)
    assert not online.chooser.ready
    online.policy.load_state_dict(algorithm.result.state_dict())
    assert online.chooser.ready and online.chooser.encoder.normalize_proprio.fitted


def test_a_resumed_run_reads_the_data_again_and_goes_on_bit_for_bit():
    data = recorded()
    first, second = make_small(), make_small()
    update(first, data)
    second.policy.load_state_dict(first.policy.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    # A checkpoint holds no observation, and one that is saved before the next update is whole.
    assert not any(name.startswith("obs/") for name in first.state_dict()["computed"])
    assert second.state_dict()["computed"].keys() == first.state_dict()["computed"].keys()
    assert update(first, data, 1) == update(second, data, 1)
    for a, b in zip(first.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(a, b)
    third = make_small()
    third.load_state_dict(copy.deepcopy(first.state_dict()))
    with pytest.raises(UserError, match=r"has 100 chunks now and had 200"):
        update(third, recorded(100))


@pytest.mark.parametrize(
    ("solved", "words"), [(True, "are solved ones"), (False, "are failed ones")]
)
def test_data_of_one_outcome_are_refused(solved, words):
    with pytest.raises(UserError, match=words):
        update(make_small(), recorded(solved=solved))


def test_synthetic_trajectories_that_are_cut_are_no_failures():
    whole, cut = recorded(), recorded()
    whole.origin = {"synthetic": {"cut": False}}
    update(make_small(), Mixture([recorded(), whole]))
    cut.origin = {"synthetic": {"cut": True}}
    with pytest.raises(UserError, match="cut before they end"):
        update(make_small(), Mixture([recorded(), cut]))


def test_data_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"more than 50 chunks. Raise algorithm\.capacity"):
        update(make_small(capacity=50), recorded(100))
