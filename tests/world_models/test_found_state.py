"""A state found in pictures: a hand must reach a square that no number of the data tells of."""

import copy
import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from reach_square import CHUNK, LIMIT, REACHED, SPEED, ReachSquare, demonstrations, reaches
from squares import SETTINGS

from embodyrl.algorithms.sac_flow import SACFlow, SACFlowConfig
from embodyrl.build import make_policy
from embodyrl.dreams.ranking import rank_proposals, score_ranking, verdict
from embodyrl.dreams.score import evaluate_world
from embodyrl.errors import UserError
from embodyrl.policies.flow_vla import FlowVLAConfig
from embodyrl.policies.localiser import ENDS
from embodyrl.rollouts.collect import Player
from embodyrl.rollouts.seeding import seeded
from embodyrl.types import ActionSample, Obs
from embodyrl.world_models import train as training
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.config import StateNoise, noise_on_states
from embodyrl.world_models.dream_chooser import DreamChooser, promises
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.found_state import find_states, frames_on_the_way
from embodyrl.world_models.judge_scores import score_foresight
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.state import StateModel
from embodyrl.world_models.reencode import reencode
from embodyrl.world_models.train import WorldTrainConfig, train_world

SPEC = ReachSquare(1).spec
QUICK = SETTINGS | {"codec_steps": 2, "steps": 2, "inverse_steps": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> WorldModel:
    """It has hardly seen a codec: what it knows, it knows by what it found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: reaches(120, 0)))
        given = QUICK | {"found_steps": 200, "state_steps": 250}
        config = WorldTrainConfig(**given, out=str(tmp_path_factory.mktemp("w") / "run"))
        with pytest.MonkeyPatch.context() as calm:
            calm.setattr(training, "calibrate_success_head", lambda m, *_: (m.calibration, {}))
            return WorldModel.load(train_world(config))


def towards(obs: Obs, square: torch.Tensor, sign: float = 1.0) -> torch.Tensor:
    """(N, 1, CHUNK, 2) chunks that lead straight to the squares, or away from them."""
    step = (sign * (square - obs.proprio) / SPEED / CHUNK).clamp(-1, 1)
    return step[:, None, None].expand(-1, 1, CHUNK, -1)


class Guesses:
    """Goes anywhere; of its proposals some are good."""

    config = SimpleNamespace(name="guesses", horizon=CHUNK)
    spec = SPEC
    chooser = None

    def propose(self, obs, count, generator):
        aim = torch.rand(len(obs), count, 2, generator=generator) * 2 - 1
        step = ((aim - obs.proprio[:, None]) / SPEED / CHUNK).clamp(-1, 1)
        return step[:, :, None].expand(-1, -1, CHUNK, -1)

    def sample(self, obs, *, generator, mode):
        return ActionSample(self.propose(obs, 1, generator)[:, 0])


def test_it_finds_in_pictures_where_the_task_leads(model) -> None:
    clips = reaches(60, 99)
    found = find_states(model, clips).view(len(clips), ENDS, 2)
    assert model.state_dim == ENDS * 2 and model.finder is not None
    # Half of the episodes go to their square, and there the record says where it was.
    at_end = clips.proprio[clips.end - 1]
    error = (found[:, 0] - at_end).norm(dim=-1)[clips.succeeded]
    blind = (at_end[clips.succeeded] - at_end[clips.succeeded].mean(0)).norm(dim=-1)
    assert error.median() < 0.35 * blind.median()


def test_settings_that_are_left_out_suit_where_the_state_comes_from() -> None:
    config = WorldTrainConfig()
    assert noise_on_states(config, found=True) == StateNoise(unroll=8, start=0.02, judge=0.1)
    assert noise_on_states(config, found=False) == StateNoise(unroll=0, start=0.0, judge=0.0)
    # A zero that is given is zero, wherever the state comes from.
    given = dataclasses.replace(config, state_unroll=0, state_noise=0.0, judge_noise=0.3)
    for found in (True, False):
        assert noise_on_states(given, found=found) == StateNoise(unroll=0, start=0.0, judge=0.3)


def test_what_was_found_rests_in_a_dream_and_a_dream_may_begin_from_pictures_alone(model, tmp_path):
    clips = reaches(8, 98)
    state = torch.cat([clips.proprio, find_states(model, clips)], dim=1)[clips.starts]
    chunk = torch.full((8, CHUNK, 2), 0.5)
    after, _ = model.state.roll(state, chunk, torch.full((8,), CHUNK))
    assert torch.equal(after[:, 2:], state[:, 2:])
    assert (after[:, :2] - (state[:, :2] + SPEED * 0.5 * CHUNK)).abs().max() < 0.1
    model.save(tmp_path / "model")
    dream = WorldModelEnv(WorldModelConfig(model=str(tmp_path / "model"), num_envs=8))
    seen = clips.obs(clips.starts)
    assert seen.privileged is None
    # Critics get no such state, because the real env has none like it.
    assert dream.dream_from(seen).privileged is None and dream.spec.privileged_dim == 0
    assert torch.allclose(dream._dream.full_state, state, atol=1e-4)
    dream.step(chunk)
    assert torch.allclose(dream._dream.full_state[:, 2:], state[:, 2:], atol=1e-4)


def test_critics_in_such_a_dream_see_its_pictures_and_no_state(model, tmp_path) -> None:
    """As with the preset ``dream_sac_flow``: nothing of it comes from a simulator."""
    model.save(tmp_path / "model")
    dream = WorldModelEnv(WorldModelConfig(model=str(tmp_path / "model"), num_envs=4))
    size = {"width": 16, "layers": 1, "heads": 2, "text_layers": 0, "vision_width": 4}
    seeing = FlowVLAConfig(
        **size, horizon=CHUNK, action_patch=CHUNK, transition="flow_noise", critic="found"
    )
    policy = make_policy(seeing, dream.spec, 0)
    sac = SACFlow(
        SACFlowConfig(
            num_chunks=4, capacity=64, warmup_chunks=16, random_warmup=False, batch_size=8,
            bc_coef=1.0, hindsight_steps=2,
        ),
        policy,
    )  # fmt: skip
    sac.add_demos(demonstrations(6, CHUNK))
    batch = Player(dream).collect(sac, 0, generator=seeded(0, 0))
    assert batch.chunks.obs.privileged is None
    row = sac.update(batch, progress=0.0, generator=seeded(0, 1))
    assert row["gradient_steps"] == 16 and row["hindsight_loss"] > 0
    # A critic that reads a state has none to read.
    with pytest.raises(UserError, match=r"gives no privileged state.*policy\.critic=found"):
        make_policy(dataclasses.replace(seeing, critic="privileged"), dream.spec, 0)


def test_a_dream_promises_more_of_a_chunk_that_leads_there(model) -> None:
    env = ReachSquare(64, near=REACHED)
    obs = env.reset(init=list(range(64)))
    far = env.square.norm(dim=-1) > 0.6
    both = torch.cat([towards(obs, env.square, s) for s in (-1.0, 1.0)], dim=1)
    promised = promises(model, obs, both)
    assert (promised[:, 1] > promised[:, 0])[far].float().mean() > 0.9
    # The better one is done; where it is better by no more than the margin, the policy's first is.
    gain = promised[:, 1] - promised[:, 0]
    for margin in (0.0, float(gain.median())):
        chosen = DreamChooser(Guesses(), model, 2, margin).choose(obs, both)
        taken = torch.where(gain > margin, 1, 0)
        assert torch.equal(chosen, both[torch.arange(64), taken])


def test_a_dream_that_is_in_doubt_promises_nothing(model, monkeypatch) -> None:
    obs = ReachSquare(4).reset(init=[0, 1, 2, 3])
    chunks = Guesses().propose(obs, 3, torch.Generator().manual_seed(0))
    roll = StateModel.roll

    def doubtful(self, *args):
        after, spread = roll(self, *args)
        return after, torch.where(torch.arange(len(spread)) % 3 == 1, 2.0, 0.0)

    monkeypatch.setattr(StateModel, "roll", doubtful)
    monkeypatch.setattr(model, "max_spread", 1.0)
    promised = promises(model, obs, chunks)
    assert (promised[:, 1] == 0).all() and (promised[:, [0, 2]] > 0).all()


def test_letting_it_choose_solves_more_and_the_gate_says_so(model) -> None:
    generator = torch.Generator().manual_seed(0)

    def solves(policy) -> int:
        env = ReachSquare(64, near=REACHED)
        obs = env.reset(init=list(range(1000, 1064)))
        solved = torch.zeros(64, dtype=torch.bool)
        for _ in range(LIMIT // CHUNK + 1):
            step = env.step(policy.sample(obs, generator=generator, mode="eval").actions)
            obs, solved = step.obs, solved | step.success
        return int(solved.sum())

    assert solves(DreamChooser(Guesses(), model)) > solves(Guesses()) + 10
    found = rank_proposals(model, Guesses(), ReachSquare(64, near=REACHED), states=60)
    assert found["auroc"] > 0.7 and found["mean"] < found["chosen"] <= found["best"]
    assert found["verdict"].startswith("passes") and found["states"] >= 50


def test_states_whose_episode_is_over_are_left_out_of_a_ranking(model) -> None:
    env = ReachSquare(32, near=REACHED)
    env.spec = dataclasses.replace(env.spec, max_episode_steps=24)  # time to end before
    found = rank_proposals(model, Guesses(), env, states=12, seed=1)
    assert found["states"] >= 12 and found["states"] % 4  # of four at a time some were over
    assert 0 < found["real_steps"] <= 24 * 8 * 40
    few = rank_proposals(model, Guesses(), env, states=100, seed=1, enough=3)
    assert 3 <= few["mixed"] <= few["states"] < 100


def test_a_ranking_by_hand() -> None:
    solved = np.zeros((40, 4), bool)
    solved[:20, 0] = solved[:20, 1] = True  # 20 states of two solved, 20 of none
    good = np.tile([4.0, 3.0, 2.0, 1.0], (40, 1))
    best, worst = score_ranking(good, solved), score_ranking(-good, solved)
    assert (best["mixed"], best["auroc"], worst["auroc"]) == (20, 1.0, 0.0)
    assert (best["mean"], best["chosen"], best["best"]) == (0.25, 0.5, 0.5)
    assert "passes" in best["verdict"] and worst["verdict"].startswith("fails")
    # One pair of four is in the wrong order.
    assert score_ranking(np.tile([4.0, 1.5, 2.0, 1.0], (40, 1)), solved)["auroc"] == 0.75
    # States that are easy or hard as a whole say nothing of the order within them.
    easy = score_ranking(solved[:, :1] + np.zeros((40, 4)), solved)
    assert easy["auroc"] == 0.5 and easy["verdict"].startswith("fails")
    none = score_ranking(good, np.zeros((40, 4), bool))
    assert none["auroc"] is None and none["verdict"].startswith("says nothing")
    luck = {"mixed": 30, "states": 40, "interval": (0.6, 0.8), "chosen": 0.3, "mean": 0.4}
    assert "no more than one at random" in verdict(luck)
    json.dumps(best)


def test_data_that_cannot_carry_it_are_refused(tmp_path, monkeypatch) -> None:
    clips = reaches(40, 1)
    rows = torch.arange(len(clips))
    on_the_way = frames_on_the_way(clips, rows.repeat(2))
    assert len(on_the_way.unique()) == len(on_the_way) and clips.succeeded[on_the_way].all()
    # Of what comes after the success, its first frame alone.
    for start in clips.start[on_the_way].unique().tolist():
        kept = on_the_way[clips.start[on_the_way] == start]
        assert clips.solved[kept].sum() == 1 and clips.solved[kept[-1]]
    few = dataclasses.replace(clips, succeeded=rows < 2 * (LIMIT + 1))
    with pytest.raises(UserError, match=r"2 of the episodes .* are solved"):
        frames_on_the_way(few, rows)
    still = dataclasses.replace(clips, images={"front": np.zeros_like(clips.images["front"])})
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: still))
    with pytest.raises(UserError, match="pictures of the episodes are all the same"):
        train_world(WorldTrainConfig(**QUICK, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="leave out state=true"):
        WorldTrainConfig(state=True, found=True)


def test_what_cannot_choose_is_refused(model, monkeypatch) -> None:
    model = copy.deepcopy(model)  # whose parts are taken away
    policy = Guesses()
    for given, said in (((1,), "2 or more"), ((8, 1.0), "below 1")):
        with pytest.raises(UserError, match=said):
            DreamChooser(policy, model, *given)
    with pytest.raises(UserError, match="guesses makes one"):
        DreamChooser(SimpleNamespace(config=policy.config, spec=SPEC), model)
    with pytest.raises(UserError, match=r"policy\.proposals=1"):
        critics = Guesses()
        critics.chooses = True
        DreamChooser(critics, model)
    with pytest.raises(UserError, match="action dims"):
        other = Guesses()
        other.spec = dataclasses.replace(SPEC, action_dim=3)
        DreamChooser(other, model)
    obs = ReachSquare(1).reset(init=[0])
    with pytest.raises(UserError, match="not in training"):
        DreamChooser(policy, model).sample(obs, generator=torch.Generator(), mode="train")
    monkeypatch.setattr(model, "finder", None)
    with pytest.raises(UserError, match="found=true"):
        promises(model, obs, policy.propose(obs, 2, torch.Generator()))
    monkeypatch.setattr(model.state, "prospects", torch.nn.ModuleList())
    with pytest.raises(UserError, match="trained by an older version"):
        DreamChooser(policy, model)
    monkeypatch.setattr(model, "state", None)
    with pytest.raises(UserError, match="knows pictures alone"):
        DreamChooser(policy, model)


def test_training_that_was_interrupted_goes_on_bit_for_bit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: reaches(40, 2)))
    monkeypatch.setattr(training, "calibrate_success_head", lambda m, *_: (m.calibration, {}))
    given = QUICK | {"found_steps": 4, "state_steps": 4}
    whole = WorldTrainConfig(**given, out=str(tmp_path / "whole"), checkpoint_every=3)
    parts = dataclasses.replace(whole, out=str(tmp_path / "parts"))
    train_world(whole)
    run, calls = training.WorldTrainer._run_stage, []

    def stopped(self, name, *args):
        calls.append(name)
        if name == "state_model" and calls.count(name) == 1:
            raise training.Interrupted
        run(self, name, *args)

    monkeypatch.setattr(training.WorldTrainer, "_run_stage", stopped)
    assert train_world(parts) is None
    first, second = (WorldModel.load(train_world(config)) for config in (whole, parts))
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    more = WorldTrainConfig(
        **given, init=str(tmp_path / "whole" / "model"), out=str(tmp_path / "on")
    )
    assert WorldModel.load(train_world(more)).finder is not None
    with pytest.raises(UserError, match="has a state that it finds in pictures, and that stays so"):
        train_world(dataclasses.replace(more, state=False, out=str(tmp_path / "less")))


def test_a_model_without_frames_ranks_and_does_nothing_else(tmp_path, monkeypatch) -> None:
    clips = reaches(40, 2)
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: clips))
    given: dict[str, Any] = {"data": ("memory",), "horizon": CHUNK, "state_members": 2}
    few = given | {"found_steps": 3, "state_steps": 3}
    config = WorldTrainConfig(**few, frames=False, out=str(tmp_path / "run"))
    folder = train_world(config)
    assert folder is not None and not (folder / "codec").exists()
    model = WorldModel.load(folder)
    assert model.horizon == CHUNK and model.max_spread > 0 and not model.imagines_frames
    obs = ReachSquare(4).reset(init=[0, 1, 2, 3])
    promised = promises(model, obs, Guesses().propose(obs, 3, torch.Generator().manual_seed(0)))
    assert promised.shape == (4, 3) and torch.isfinite(promised).all()
    # Its training goes on, and it stays what it is.
    more = dataclasses.replace(config, frames=None, init=str(folder), out=str(tmp_path / "on"))
    on = train_world(more)
    assert on is not None and not WorldModel.load(on).imagines_frames
    with pytest.raises(UserError, match="has no frames, and that stays so"):
        train_world(dataclasses.replace(more, frames=True, out=str(tmp_path / "with")))
    # Whatever shows or reads pictures of a dream says what is missing.
    demos = SimpleNamespace(images=clips.images)
    for reads in (
        lambda: WorldModelEnv(WorldModelConfig(model=str(folder), num_envs=2)),
        lambda: reencode(demos, str(folder)),
        lambda: evaluate_world(str(folder), ["memory"], ["a", "b", "c"]),
    ):
        with pytest.raises(UserError, match="imagines no pictures"):
            reads()
    # Settings of frames are refused, and data without any state.
    with pytest.raises(UserError, match=r"world\.steps is 5, but a model without frames"):
        WorldTrainConfig(**given, frames=False, steps=5)
    with pytest.raises(UserError, match="leave nothing to imagine"):
        WorldTrainConfig(**given, frames=False, state=False)
    with pytest.raises(UserError, match="leave found=false out"):
        train_world(WorldTrainConfig(**few, frames=False, found=False, out=str(tmp_path / "none")))


def test_how_an_episode_will_end_is_foreseen_better_than_by_chance(model) -> None:
    clips = reaches(60, 99)
    clips.privileged = find_states(model, clips)
    found = score_foresight(model, clips, clips.starts)
    assert found["episodes"] == 60 and 0 < found["solved"] < 60 and found["auroc"] > 0.7
    solved = clips.starts[clips.succeeded[clips.starts]]
    assert score_foresight(model, clips, solved)["auroc"] is None
