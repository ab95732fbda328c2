"""Demonstrations and a reference beside RL: closed forms, every algorithm that has the keys, and refusals."""

import copy

import pytest
import torch
from linear_policy import NEW, OLD, Linear, observed

from embodyrl import registry
from embodyrl.algorithms.anchors import AnchorConfig, Anchors, add_gradient
from embodyrl.algorithms.fpo import FPO, FPOConfig
from embodyrl.algorithms.grpo import GRPO, GRPOConfig
from embodyrl.algorithms.imitation import drawn_imitation, imitation_loss
from embodyrl.algorithms.nft import NFT, NFTConfig
from embodyrl.algorithms.optim import Microbatches
from embodyrl.algorithms.ppo import PPO, PPOConfig
from embodyrl.build import make_policy
from embodyrl.config import resolve
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch, RolloutBatch
from embodyrl.storage import checkpoint
from embodyrl.types import EnvSpec, Obs

H, N = 3, 12
SPEC = EnvSpec("test/arm", 4, 2, 3, "torque", 25.0, 20, {})
PPO_LIKE = {"warmup_iterations": 0, "lr_warmup": 0, "epochs": 3, "minibatch_size": 6, "lr": 1e-3}
MADE = {
    "ppo": (PPO, PPOConfig, PPO_LIKE),
    "fpo": (FPO, FPOConfig, PPO_LIKE | {"num_pairs": 2}),
    "grpo": (GRPO, GRPOConfig, {"lr_warmup": 0, "epochs": 3, "minibatch_size": 6, "group_size": 4}),
    "nft": (NFT, NFTConfig, {"epochs": 3, "minibatch_size": 6, "group_size": 4}),
}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def policy():
    settings = {"width": 8, "layers": 1, "critic_width": 8, "num_denoise_steps": 2, "horizon": H}
    return make_policy(FlowMLPConfig(**settings), SPEC, 0)


def make(name, **settings):
    cls, config, usual = MADE[name]
    torch.manual_seed(0)
    algorithm = cls(config(**{**usual, **settings}), policy())
    if settings.get("bc_coef"):
        algorithm.add_demos(demos())
    return algorithm


def demos():
    """Ten episodes of six frames with one action all through."""
    frames = torch.arange(60)
    zeros = torch.zeros(60, dtype=torch.long)
    actions = torch.tensor([[0.6, -0.4]]).expand(60, 2).clone()
    return Demonstrations(
        H, {}, torch.randn(60, 3, generator=gen(1)), actions, frames // 6, zeros, ["go"]
    )


def batch_for(algorithm, solved=(True, False) * (N // 2)):
    """N chunks, each an episode of its own."""
    obs = Obs({}, torch.randn(N, 3, generator=gen(2)), ["go"] * N)
    sample = algorithm.policy.sample(obs, generator=gen(3), mode="train")
    episodes = [Episode(0, "arm", won, float(won), H) for won in solved]
    if isinstance(algorithm, PPO):
        reward = torch.zeros(1, N, H)
        reward[0, :, -1] = torch.tensor(solved).float()
        value = algorithm.policy.value(obs)[None].detach()
        done = torch.ones(1, N, dtype=torch.bool)
        valid = torch.ones(1, N, H, dtype=torch.bool)
        return RolloutBatch(
            obs,
            sample.trace,
            sample.logprob,
            value,
            value,
            reward,
            valid,
            done,
            ~done,
            episodes,
            36,
        )
    kept = EpisodeBatch(obs, sample.trace, sample.logprob, torch.arange(N), list(episodes), 36)
    return GroupBatch(kept, episodes, 36, 1)


def update(algorithm, **batch):
    return algorithm.update(batch_for(algorithm, **batch), progress=0.0, generator=gen(4))


# The weight of imitation.


def test_the_weight_is_the_coefficient_or_falls_with_success():
    constant = Anchors(AnchorConfig(bc_coef=0.5), policy())
    follows = Anchors(AnchorConfig(bc_coef=0.5, bc_schedule="success"), policy())
    assert constant.weight == follows.weight == 0.5  # nothing is known yet
    won, lost = (Episode(0, "arm", success, 0.0, 1) for success in (True, False))
    for anchors in (constant, follows):
        anchors.note([won, lost, won, won])
    keep = 63 / 64
    p = (keep**3 + keep + 1) / (keep**3 + keep**2 + keep + 1)
    assert constant.weight == 0.5
    assert follows.weight == pytest.approx(0.5 * (1 - p))
    follows.note(
        [
            Episode(0, "arm", False, 0.0, 1, person=True),
            Episode(0, "arm", False, 0.0, 1, weight=0.0),
        ]
    )
    assert follows.weight == pytest.approx(0.5 * (1 - p))
    follows.note([won] * 1000)
    assert follows.weight < 1e-6


def test_pieces_add_up_to_the_weighted_loss_of_imitation():
    anchors = Anchors(AnchorConfig(bc_coef=0.3), policy())
    anchors.demos = demos()
    rows, share = anchors.imitation(10, gen(5))
    whole, figures = share(rows)
    # The same draws by the loss of SAC-Flow's bc_coef.
    again = gen(5)
    obs, actions, mask = anchors.demos.batch(anchors.demos.draw(10, again))
    loss, given, mask, noise = drawn_imitation(anchors.policy, actions, mask, again)
    assert whole.item() == pytest.approx(0.3 * loss(obs, *given, mask, *noise).item())
    assert figures["bc_loss"].item() == pytest.approx(whole.item() / 0.3)
    parts = sum(share(part)[0].item() for part in rows.split(4))
    assert parts == pytest.approx(whole.item(), rel=1e-5)
    direct = imitation_loss(anchors.policy, obs, actions, mask, gen(6)).item()
    assert 0.3 < direct / loss(obs, *given, mask, *noise).item() < 3


def test_the_gradient_is_the_sum_of_both():
    anchors = Anchors(AnchorConfig(bc_coef=0.3), policy())
    anchors.demos = demos()
    parameters = list(anchors.policy.actor_parameters())
    gradient, figures = anchors.imitation_gradient(10, Microbatches(4, parameters), gen(5))
    assert figures["bc_weight"] == 0.3
    other = [torch.ones_like(p) for p in parameters]
    for p, value in zip(parameters, other, strict=True):
        p.grad = value.clone()
    add_gradient(parameters, gradient)
    rows, share = anchors.imitation(10, gen(5))
    loss, _ = share(rows)
    expected = torch.autograd.grad(loss, parameters, allow_unused=True)
    for p, value, more in zip(parameters, other, expected, strict=True):
        torch.testing.assert_close(p.grad, value if more is None else value + more)


# Imitation of what RL never solves.


def two_tasks():
    """The actions of "hard" are the opposite of those of "easy"; one frame in three is "hard"."""
    hard = torch.arange(60) < 20
    actions = torch.tensor([0.6, -0.4]) * torch.where(hard, 1.0, -1.0)[:, None]
    states = torch.randn(60, 3, generator=gen(1))
    episode = torch.arange(60) // 5
    return Demonstrations(H, {}, states, actions, episode, (~hard).long(), ["hard", "easy"])


def played(instruction, *solved, **settings):
    return [Episode(0, "arm", won, 0.0, 1, instruction=instruction, **settings) for won in solved]


def unsolved(*failing):
    anchors = Anchors(AnchorConfig(bc_coef=0.3, bc_schedule="unsolved"), policy())
    anchors.demos = two_tasks()
    for instruction in failing:
        anchors.note(played(instruction, *[False] * 8))
    return anchors


def test_an_instruction_is_imitated_after_eight_failures_and_until_it_is_solved():
    anchors = unsolved()
    assert anchors.weight == 0.3

    def rows():
        found = anchors.imitation(40, gen(5))[0]
        return len(found)

    assert rows() == 0  # nothing is known yet
    anchors.note(played("easy", *[False] * 7, True) + played("hard", *[False] * 7))
    anchors.note(played("hard", False, person=True))
    assert rows() == 0
    anchors.note(played("hard", False))
    drawn = two_tasks().draw(40, gen(5))
    expected = (drawn < 20).sum()
    assert rows() == expected > 0
    anchors.note(played("hard", *[False] * 1000))
    anchors.note(played("hard", True))
    assert rows() == 0
    # A success counts as one, whatever else an even draw would have played.
    anchors.note(played("easy", *[False] * 8) + played("easy", True, weight=0.0))
    assert rows() == 0


def test_each_chunk_has_the_weight_of_its_instruction():
    def loss(anchors):
        rows, share = anchors.imitation(40, gen(5))
        return share(rows)[0].item()

    # Both parts together are the loss of all demonstrations, drawn and weighted as ever.
    every = Anchors(AnchorConfig(bc_coef=0.3), policy())
    every.demos = two_tasks()
    hard, easy, both = (loss(unsolved(*names)) for names in (["hard"], ["easy"], ["hard", "easy"]))
    assert both == pytest.approx(loss(every), rel=1e-5)
    assert hard + easy == pytest.approx(both, rel=1e-5)
    assert 0 < hard < both

    # bc_weight is that of a mean over what is imitated.
    anchors = unsolved("hard")
    gradient, figures = anchors.imitation_gradient(
        40, Microbatches(7, list(anchors.policy.actor_parameters())), gen(5)
    )
    assert hard == pytest.approx(figures["bc_weight"] * figures["bc_loss"].item(), rel=0.05)
    assert any(g is not None for g in gradient)
    nothing, figures = unsolved().imitation_gradient(
        40, Microbatches(7, list(anchors.policy.actor_parameters())), gen(5)
    )
    assert figures == {"bc_weight": 0.0} and set(nothing) == {None}


@pytest.mark.parametrize("name", MADE)
def test_what_rl_never_solves_is_learned_from_demonstrations(name):
    algorithm = make(name, bc_coef=1.0, bc_schedule="unsolved", epochs=60, lr=1e-2)
    algorithm.add_demos(two_tasks())
    anchors = (algorithm if name == "nft" else algorithm.actor).anchors
    batch = batch_for(algorithm, solved=(False,) * N)
    batch.episodes = played("hard", *[False] * N) + played("easy", *[True] * N)
    if name == "grpo":
        batch.kept.episodes = []
    figures = algorithm.update(batch, progress=0.0, generator=gen(4))
    assert figures["bc_weight"] == pytest.approx(1 / 3, abs=0.1)
    obs = Obs({}, torch.randn(32, 3, generator=gen(9)), ["hard"] * 32)
    actions = algorithm.result.sample(obs, generator=gen(10), mode="eval").actions
    assert (actions * torch.tensor([1.0, -1.0])).mean() > 0.25
    # Once it is solved nothing is imitated.
    anchors.note(played("hard", True))
    before = copy.deepcopy(list(algorithm.result.actor_parameters()))
    batch.episodes = []
    figures = algorithm.update(batch, progress=0.0, generator=gen(4))
    assert figures["bc_weight"] == 0.0 and "bc_loss" not in figures
    if name in ("grpo", "nft"):  # which have no group to learn from either
        for a, b in zip(algorithm.result.actor_parameters(), before, strict=True):
            assert torch.equal(a, b)


# The reference.


def test_the_distance_is_zero_at_the_start_and_then_that_of_the_velocities():
    line = Linear(OLD)
    anchors = Anchors(AnchorConfig(reference_coef=1.0), line)
    obs = observed(64)
    chunks = torch.randn(64, 1, 2, generator=gen(7))
    rows = torch.arange(0, 64, 2)
    pieces = Microbatches(0, list(line.parameters()))
    points = anchors.reference_points(obs, chunks, rows, pieces, 10, gen(8))
    assert points.velocity[1::2].isnan().all()
    start = anchors.distance(obs, points, rows)
    assert start.item() == 0.0
    assert torch.autograd.grad(start, line.weight)[0].abs().max() == 0.0
    # v + delta t: the mean of (delta t)^2 over the points.
    line.drift = 0.7
    expected = (0.7 * points.t[rows]).square().mean()
    torch.testing.assert_close(anchors.distance(obs, points, rows), expected)
    # Another matrix, of which one dim is executed.
    line.drift = 0.0
    with torch.no_grad():
        line.weight.copy_(NEW)
    expected = ((points.noisy[rows].flatten(1) @ (NEW - OLD).T)[:, :1]).square().mean()
    torch.testing.assert_close(anchors.distance(obs, points, rows), expected)
    assert torch.equal(anchors.reference.weight, OLD)


# In the algorithms.


@pytest.mark.parametrize("name", MADE)
def test_every_algorithm_that_has_the_keys_reads_them(name):
    plain = make(name)
    figures = update(plain)
    assert not {"bc_loss", "reference_distance"} & figures.keys()
    assert not plain.wants_demos and make(name, bc_coef=1.0).wants_demos
    held = make(name, bc_coef=1.0, bc_schedule="success", reference_coef=5.0)
    figures = update(held)
    assert figures["bc_loss"] > 0 and figures["reference_distance"] > 0
    # Half of the episodes were solved.
    assert figures["bc_weight"] == pytest.approx(0.5, abs=0.02)

    # A strong reference holds the policy: it goes less far, by its own measure and by its weights.
    def moved(coef):
        algorithm = make(name, reference_coef=coef, lr=3e-3, epochs=20)
        before = [p.detach().clone() for p in algorithm.result.actor_parameters()]
        row = update(algorithm)
        after = algorithm.result.actor_parameters()
        way = sum((a - b).square().sum().item() for a, b in zip(after, before, strict=True))
        return row["reference_distance"], way

    loose, tight = moved(1e-6), moved(1e3)
    assert tight[0] < 0.3 * loose[0]


@pytest.mark.parametrize("name", MADE)
def test_where_no_group_is_informative_imitation_goes_on_alone(name):
    algorithm = make(name, bc_coef=1.0, epochs=60, lr=1e-2)
    batch = batch_for(algorithm, solved=(False,) * N)
    if isinstance(batch, GroupBatch):
        batch.kept.episodes = batch.kept.episodes if name == "nft" else []
    figures = algorithm.update(batch, progress=0.0, generator=gen(4))
    assert figures["bc_weight"] == 1.0
    obs = Obs({}, torch.randn(32, 3, generator=gen(9)), ["go"] * 32)
    actions = algorithm.result.sample(obs, generator=gen(10), mode="eval").actions
    error = (actions - torch.tensor([0.6, -0.4])).abs().mean()
    fresh = make(name).result.sample(obs, generator=gen(10), mode="eval").actions
    assert error < 0.6 * (fresh - torch.tensor([0.6, -0.4])).abs().mean()
    # Without imitation nothing is learned of it, but by PPO's critic.
    alone = make(name)
    before = copy.deepcopy(list(alone.result.actor_parameters()))
    batch = batch_for(alone, solved=(False,) * N)
    if name == "grpo":
        batch.kept.episodes = []
    if isinstance(batch, GroupBatch):
        alone.update(batch, progress=0.0, generator=gen(4))
        for a, b in zip(alone.result.actor_parameters(), before, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("schedule", ["success", "unsolved"])
@pytest.mark.parametrize("name", MADE)
def test_reference_and_success_survive_a_checkpoint(name, schedule, tmp_path):
    settings = {"bc_coef": 0.5, "bc_schedule": schedule, "reference_coef": 1.0}
    a = make(name, **settings)
    (a if name == "nft" else a.actor).anchors.note(played("go", *[False] * 8))
    update(a)
    states = {"policy": a.result.state_dict(), "algorithm": a.state_dict()}
    checkpoint.save(tmp_path / "step_000001", states, {})
    saved, _ = checkpoint.load(tmp_path / "step_000001")
    b = make(name, **settings)
    with torch.no_grad():  # a run that goes on is built with other weights
        for p in b.result.parameters():
            p.add_(1.0)
    b.result.load_state_dict(saved["policy"])
    b.load_state_dict(saved["algorithm"])
    assert update(a) == update(b)
    # Without the keys the state is what it was before there were any.
    plain = make(name).state_dict()
    assert "anchors" not in str(plain.keys()) + str(plain.get("actor", {}).keys())


@pytest.mark.parametrize("name", sorted(set(registry.BUILT_IN["algorithms"]) - set(MADE)))
def test_algorithms_without_them_refuse_the_keys(name):
    raw = {"env": {"name": "mujoco"}, "policy": {"name": "flow_vla"}, "algorithm": {"name": name}}
    for key in ("bc_schedule=success", "reference_coef=1"):
        with pytest.raises(UserError, match=key.partition("=")[0]):
            resolve(raw, [f"algorithm.{key}"])


def test_a_policy_without_a_flow_has_no_distance():
    class Other:
        config = None

    with pytest.raises(UserError, match=r"reference_coef is 1.0, but Other has no flow"):
        Anchors(AnchorConfig(reference_coef=1.0), Other())
    with pytest.raises(UserError, match=r"bc_coef is 1.0, but Other has neither"):
        Anchors(AnchorConfig(bc_coef=1.0), Other())
    with pytest.raises(UserError, match="bc_coef=0 imitates nothing"):
        AnchorConfig(bc_schedule="success")


def test_workers_carry_no_reference():
    for cls, config, usual in MADE.values():
        settings = config(**usual, reference_coef=1.0)
        if hasattr(settings, "num_episodes"):
            settings = config(**usual, reference_coef=1.0, num_episodes=64)
        assert cls.worker_config(settings, 2).reference_coef == 0.0
