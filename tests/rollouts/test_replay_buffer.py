"""The replay buffer: what goes in comes out, the oldest goes first, memory is said up front, state is exact."""

import pytest
import torch

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.rollouts.batches import Transitions
from embodyrl.rollouts.replay_buffer import DEMO, INTERVENTION, ReplayBuffer, free_memory
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec, Obs

H = 3
SPEC = EnvSpec("test/arm", 2, 4, 5, "ee_delta_pos", 25.0, 20, {"front": (8, 6)}, privileged_dim=2)


def observation(n, seed):
    g = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (n, 8, 6, 3), generator=g, dtype=torch.uint8)
    sentences = [f"pick {(seed + k) % 3}" for k in range(n)]
    return Obs(
        {"front": image}, torch.randn(n, 5, generator=g), sentences, torch.randn(n, 2, generator=g)
    )


def chunks(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    return Transitions(
        obs=observation(n, seed),
        choice=torch.randn(n, H, 4, generator=g),
        reward=torch.randn(n, H, generator=g),
        valid=torch.rand(n, H, generator=g) > 0.3,
        terminated=torch.rand(n, generator=g) > 0.5,
        truncated=torch.rand(n, generator=g) > 0.5,
        next_obs=observation(n, seed + 100),
    )


def assert_same(a: Transitions, b: Transitions):
    for name in ("choice", "reward", "valid", "terminated", "truncated"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
    for x, y in ((a.obs, b.obs), (a.next_obs, b.next_obs)):
        assert torch.equal(x.proprio, y.proprio) and torch.equal(
            x.images["front"], y.images["front"]
        )
        assert x.instruction == y.instruction and torch.equal(x.privileged, y.privileged)
        assert y.images["front"].dtype == torch.uint8


def test_what_goes_in_comes_out_and_the_oldest_goes_first():
    buffer = ReplayBuffer(7, SPEC, H)
    first, second = chunks(5, 0), chunks(4, 1)
    buffer.add(first)
    assert len(buffer) == 5
    assert_same(buffer.rows(torch.arange(5)), first)
    buffer.add(second)
    assert len(buffer) == 7
    assert_same(buffer.rows(torch.tensor([5, 6, 0, 1])), second)
    assert_same(buffer.rows(torch.tensor([2, 3, 4])), first[torch.tensor([2, 3, 4])])
    many = chunks(20, 2)
    buffer.add(many)
    got = buffer.rows((buffer.position + torch.arange(7)) % 7)
    assert_same(got, many[torch.arange(13, 20)])


def test_sources_and_reproducible_draws():
    buffer = ReplayBuffer(50, SPEC, H)
    buffer.add(chunks(20, 0))
    buffer.add(chunks(20, 1), DEMO)
    buffer.add(chunks(10, 2), INTERVENTION)
    (a, source), (b, _) = (buffer.sample(400, torch.Generator().manual_seed(0)) for _ in range(2))
    assert_same(a, b)
    counts = torch.bincount(source.long(), minlength=3) / 400
    torch.testing.assert_close(counts, torch.tensor([0.4, 0.4, 0.2]), atol=0.08, rtol=0)


def test_memory_is_said_up_front():
    buffer = ReplayBuffer(100, SPEC, H)
    assert buffer.nbytes == sum(x.numel() * x.element_size() for x in buffer.data.values())
    with pytest.raises(
        UserError, match=r"would take .* GiB \(100 chunks .* Set algorithm.capacity to 9 or less"
    ):
        ReplayBuffer(100, SPEC, H, memory_limit=9.5 * buffer.bytes_per_chunk)
    with pytest.raises(UserError, match=r"Set algorithm\.capacity"):
        ReplayBuffer(int(2 * free_memory() // buffer.bytes_per_chunk), SPEC, H)


def test_refusals():
    buffer = ReplayBuffer(10, SPEC, H)
    with pytest.raises(UserError, match="empty"):
        buffer.sample(1, torch.Generator())
    bad = chunks(3)
    bad.reward[1, 0] = float("nan")
    with pytest.raises(UserError, match="reward of a chunk is not finite"):
        buffer.add(bad)
    blind = chunks(3)
    blind.obs.privileged = None
    with pytest.raises(UserError, match=r"algorithm\.shared_critic=true"):
        buffer.add(blind)
    with pytest.raises(UserError, match="at least 1"):
        ReplayBuffer(0, SPEC, H)


@pytest.mark.parametrize("capacity", [7, 12])
def test_state_survives_a_checkpoint_bit_by_bit(capacity, tmp_path):
    buffer = ReplayBuffer(capacity, SPEC, H)
    buffer.add(chunks(5, 0))
    buffer.add(chunks(5, 1), DEMO)
    checkpoint.save(tmp_path / "step_000001", {"replay": buffer.state_dict()}, {})
    states, _ = checkpoint.load(tmp_path / "step_000001")
    again = ReplayBuffer(capacity, SPEC, H)
    again.load_state_dict(states["replay"])
    for b in (buffer, again):
        b.add(chunks(2, 5))
    assert len(again) == len(buffer) and again.position == buffer.position
    assert_same(again.rows(torch.arange(7)), buffer.rows(torch.arange(7)))
    with pytest.raises(UserError, match=r"more than algorithm\.capacity=4"):
        ReplayBuffer(4, SPEC, H).load_state_dict(states["replay"])


def test_demonstrations_become_chunks():
    """Two episodes of 5 and 4 frames, the second one failed."""
    actions = torch.arange(9.0)[:, None].expand(9, 4) / 10
    episode = torch.tensor([0] * 5 + [1] * 4)
    demos = Demonstrations(
        H, {}, torch.arange(9.0)[:, None].expand(9, 5), actions, episode, torch.zeros(9, dtype=torch.long), ["pick"],
        success=episode == 0,
    )  # fmt: skip
    got = Transitions.cat(list(demos.transitions(size=4)))
    # Frames 0..4 of the first episode, and of the second one only frame 5, whose chunk ends before
    # the episode does.
    assert got.obs.proprio[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert got.terminated.tolist() == [False, False, True, True, True, False]
    assert got.valid.sum(1).tolist() == [3, 3, 3, 2, 1, 3]
    assert got.reward.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0]]
    assert got.next_obs.proprio[:, 0].tolist() == [3, 4, 4, 4, 4, 8]
    assert not got.truncated.any()


def test_chunks_of_a_policy_that_plans_further_are_those_that_are_executed():
    actions = torch.arange(9.0)[:, None].expand(9, 4) / 10
    episode = torch.tensor([0] * 5 + [1] * 4)
    given = {}, torch.arange(9.0)[:, None].expand(9, 5), actions, episode, torch.zeros(9).long()
    plain = Demonstrations(H, *given, ["pick"], success=episode == 0)
    planned = Demonstrations(H + 2, *given, ["pick"], success=episode == 0, execute=H)
    for in_turn in (False, True):
        found, expected = (
            Transitions.cat(list(demos.transitions(size=4, in_turn=in_turn)))
            for demos in (planned, plain)
        )
        for name in ("choice", "reward", "valid", "terminated", "truncated", "weight"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        assert torch.equal(found.next_obs.proprio, expected.next_obs.proprio)
    frames = torch.arange(9)
    assert torch.equal(planned.later_proprio(frames, 2)[0], plain.later_proprio(frames, 2)[0])
    # What is imitated is the whole plan.
    _, chunk, mask = planned.batch(torch.tensor([0, 3]))
    assert chunk.shape == (2, H + 2, 4) and mask.sum(1).tolist() == [5, 2]
