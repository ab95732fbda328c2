"""A world model that also predicts the simulator's state."""

import dataclasses
from pathlib import Path

import pytest
import torch
from squares import NEVER, SETTINGS, SIZE, SPEC, T, hardly_trained, squares

from embodyrl import checks
from embodyrl.errors import UserError
from embodyrl.storage import checkpoint
from embodyrl.types import Obs
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models import train as training
from embodyrl.world_models.calibrate import spread_limit
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.encode import encode
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.init import build_model
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets import state as state_model
from embodyrl.world_models.nets.state import STEADY, StateModel
from embodyrl.world_models.replay import replay, trusted_success
from embodyrl.world_models.state_losses import state_loss
from embodyrl.world_models.train import WorldTrainConfig, train_world
from embodyrl.world_models.trainer import longest_unroll


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Its pictures are hardly trained: what it knows of the square, it knows by its state."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Clips, "load", classmethod(lambda cls, paths, **_: squares(100, 0, state=True))
        )
        return str(
            train_world(WorldTrainConfig(**SETTINGS, out=str(tmp_path_factory.mktemp("w") / "run")))
        )


def test_it_knows_where_the_square_goes_and_when_it_has_arrived(folder) -> None:
    model, clips = WorldModel.load(folder), squares(40, 99, state=True)
    clips.latents = encode(model, clips)
    dreams, _ = replay(model, clips, clips.starts)
    last = clips.starts + T - 1
    assert (model.privileged(dreams[-1]) - clips.privileged[last]).abs().mean() < 0.02 * SIZE
    assert (model.proprio(dreams[-1]) - clips.proprio[last]).abs().mean() < 0.02
    wrong = (model.success_probability(dreams[-1]) > 0.5) != clips.solved[last]
    assert wrong.float().mean() < 0.1 and 0 < clips.solved[last].sum() < 40


def test_the_env_gives_the_state_and_keeps_its_promises(folder) -> None:
    env = WorldModelEnv(WorldModelConfig(model=folder, num_envs=5, precision="f32"))
    assert env.spec.privileged_dim == 1
    for horizon in (1, 3, 7):
        checks.check_env(env, horizon=horizon)
    env.model.calibration = NEVER
    before = env.reset(init=[0, 1, 2, 3, 4])
    right = torch.tensor([0.0, 1.0]).expand(5, 3, 2)
    after = env.step(right).obs
    moved = (before.privileged - after.privileged)[:, 0]
    assert (
        torch.allclose(moved, (after.proprio - before.proprio)[:, 1] * SIZE, atol=1.5)
        and moved.max() > 8
    )
    one = env.reset([1], init=[0]).privileged  # a reset touches no other dream
    assert torch.equal(one[[0, 2, 3, 4]], after.privileged[[0, 2, 3, 4]]) and torch.equal(
        one[1], before.privileged[0]
    )


def test_it_goes_on_from_a_simulator_and_from_nothing_else(folder) -> None:
    env, clips = (
        WorldModelEnv(WorldModelConfig(model=folder, num_envs=2, precision="f32")),
        squares(2, 5, state=True),
    )
    rows = clips.starts
    seen = Obs(
        {"front": torch.from_numpy(clips.images["front"][rows.numpy()])},
        clips.proprio[rows],
        clips.sentences * 2,
        clips.privileged[rows],
    )  # fmt: skip
    assert torch.equal(env.dream_from(seen).privileged, seen.privileged)
    with pytest.raises(UserError, match="also predicts the simulator's state"):
        env.dream_from(dataclasses.replace(seen, privileged=None))


def test_a_model_without_it_learns_it(folder, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: squares(60, 3)))
    plain = hardly_trained(WorldTrainConfig(**SETTINGS, state=False, out=str(tmp_path / "plain")))
    assert WorldModel.load(plain).state is None
    env = WorldModelEnv(WorldModelConfig(model=plain, num_envs=2))
    assert env.spec.privileged_dim == 0 and env.reset().privileged is None
    for given, model in (({"state": True}, "fresh"), ({"init": folder}, "old")):
        with pytest.raises(
            UserError, match="Not all frames of the data hold the simulator's state"
        ):
            train_world(WorldTrainConfig(**SETTINGS, **given, out=str(tmp_path / model)))
    monkeypatch.setattr(
        Clips, "load", classmethod(lambda cls, paths, **_: squares(60, 3, state=True))
    )
    more = WorldModel.load(
        train_world(WorldTrainConfig(**SETTINGS, init=plain, state=True, out=str(tmp_path / "on")))
    )
    assert more.state_dim == 1 and more.spec == SPEC
    with pytest.raises(UserError, match="leave state=false out"):
        train_world(
            WorldTrainConfig(**SETTINGS, init=folder, state=False, out=str(tmp_path / "less"))
        )
    with pytest.raises(UserError, match="leave out state=true"):
        WorldTrainConfig(state=True, wan="folder")


def test_data_that_name_no_objects_are_told_and_go_with_their_own_models(
    folder, tmp_path, monkeypatch, capsys
) -> None:
    data, quick = (
        squares(60, 3, state=True),
        SETTINGS | {"steps": 2, "state_steps": 2, "inverse_steps": 2},
    )
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: data))
    hardly_trained(WorldTrainConfig(**quick, out=str(tmp_path / "plain")))
    assert "collect the data again" in capsys.readouterr().out
    data.spec = dataclasses.replace(data.spec, layout=(("hand", 0, 2),))
    hardly_trained(WorldTrainConfig(**quick, out=str(tmp_path / "named")))
    assert "collect the data again" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"disagree on which numbers .*EnvSpec\.layout"):
        train_world(WorldTrainConfig(**quick, init=folder, out=str(tmp_path / "more")))


def test_an_ensemble_doubts_what_no_data_say(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        Clips, "load", classmethod(lambda cls, paths, **_: squares(100, 0, state=True))
    )
    path = hardly_trained(WorldTrainConfig(**SETTINGS, state_members=3, out=str(tmp_path / "run")))
    model, clips = WorldModel.load(path), squares(40, 99, state=True)
    assert len(model.state.members) == 3 and model.max_spread > 0
    clips.latents = encode(model, clips)
    dreams, lasted = replay(model, clips, clips.starts)
    spread = torch.stack([dream.spread for dream in dreams])
    # It was fitted to the few held-out successes of few episodes, so some chunks of others are
    # above.
    assert (spread[lasted] > model.max_spread).float().mean() < 0.3
    peaks = []
    for i, start in enumerate(
        clips.starts.tolist()
    ):  # a success is judged up to its first solved frame
        frames = range(start + 3, start + T - 1 + 3, 3)
        hits = [k for k, row in enumerate(frames) if clips.solved[min(row, start + T - 1)]]
        peaks += [float(spread[: hits[0] + 1, i].max())] if hits else []
    assert 0 < len(peaks) < 40
    limit = spread_limit(model, clips, clips.starts)
    assert abs(limit - float(torch.tensor(peaks).quantile(0.9))) < 1e-6
    model.max_spread = limit
    doubted = [
        bool((spread[: k + 1, i] > limit).any()) for k in range(len(spread)) for i in range(40)
    ]
    assert torch.equal(
        trusted_success(model, dreams).isnan(), torch.tensor(doubted).view(-1, 40)
    ) and any(doubted)
    env = WorldModelEnv(WorldModelConfig(model=path, num_envs=4, precision="f32"))
    env.model.calibration = NEVER
    env.model.max_spread = 1.5 * float(spread[lasted].max())  # above whatever is near the data
    env.reset(init=[0, 1, 2, 3])
    right = torch.tensor([0.0, 1.0]).expand(4, 3, 2)
    assert not env.step(right).log["doubt"].any()
    env._dream.full_state[:2, -1] += 40 * SIZE  # where no square has ever been
    step = env.step(right)
    assert step.log["doubt"].tolist() == [True, True, False, False]
    assert (
        step.terminated.tolist() == [True, True, False, False]
        and step.valid.all()
        and not step.success.any()
    )
    assert not step.fault.any() and len(WorldModel.load(path).state.members) == 3


def test_trained_with_noise_it_leads_a_dream_back(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        Clips, "load", classmethod(lambda cls, paths, **_: squares(100, 0, state=True))
    )
    monkeypatch.setattr(
        state_model, "STEADY", 0.0
    )  # the linear model does the same, and does it well here
    runs = {
        noise: WorldTrainConfig(**SETTINGS, state_noise=noise, out=str(tmp_path / f"{noise}"))
        for noise in (0.0, 0.5)
    }
    clips = squares(40, 99, state=True)
    rows = clips.starts
    full_state, after = clips.full_state(rows), clips.full_state(rows + 1)
    off = []
    for run in runs.values():
        model = WorldModel.load(hardly_trained(run)).state
        near = full_state + 0.25 * model.std * torch.randn(
            full_state.shape, generator=torch.Generator().manual_seed(0)
        )
        error = (
            model.roll(near, clips.actions[rows][:, None], torch.ones_like(rows))[0] - after
        ) / model.std
        off.append(float(error.detach().square().mean().sqrt()))
    assert off[1] < 0.85 * off[0] and off[0] > 0.2


def test_it_learns_from_where_it_comes_by_itself(monkeypatch) -> None:
    clips = squares(20, 0, state=True)
    rows = torch.arange(len(clips))[torch.arange(len(clips)) + 1 < clips.end]
    model = build_model(WorldTrainConfig(**SETTINGS, state=True, state_members=2), clips, rows)
    given = []
    loss = StateModel.loss
    monkeypatch.setattr(
        StateModel, "loss", lambda self, *told: given.append(told) or loss(self, *told)
    )
    words, backs = embed_sentences(clips.sentences), set()
    for seed in range(20):
        state_loss(model, clips, words, rows, 3, 0.0, 0.0, torch.Generator().manual_seed(seed))
        seen, full_state, actions, after = given[-1]
        assert torch.equal(full_state, clips.full_state(rows)) and torch.equal(
            after, clips.full_state(rows + 1)
        )
        assert torch.equal(actions, clips.actions[rows]) and not seen.requires_grad
        ways = []
        for back in range(4):
            first = torch.maximum(
                rows - back, clips.start[rows]
            )  # an episode has nothing before its first frame
            full_states = clips.full_state(first).expand(2, -1, -1).clone()
            for step in range(back):
                going = first + step < rows
                full_states[:, going] = model.state(
                    full_states[:, going], clips.actions[first + step][going]
                ).detach()
            ways.append(full_states.mean(0))
        fits = [back for back in range(4) if torch.allclose(seen, ways[back], atol=1e-5)]
        assert len(fits) == 1
        backs |= set(fits)
    assert backs == {0, 1, 2, 3}


LAYOUT = (("hand", 0, 3), ("object", 3, 3), ("mark", 6, 3))
BODY, REACH = 9, 0.04


def pushed(count: int, seed: int, shift: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A hand near a block, an action in cm, and both after it: a block at the hand moves along."""
    draw = torch.Generator().manual_seed(seed)
    block = torch.cat(
        [0.1 * torch.randn(count, 2, generator=draw) + shift, torch.full((count, 1), 0.02)], dim=1
    )
    hand = block + torch.randn(count, 3, generator=draw) * torch.tensor([0.08, 0.08, 0.01])
    action = torch.rand(count, 3, generator=draw) * 2 - 1
    full_state = torch.cat([hand, block, block + torch.tensor([0.2, 0.0, 0.0])], dim=1)
    after = full_state.clone()
    after[:, :3] += 0.01 * action
    held = (hand - block).norm(dim=1) < REACH
    after[held, 3:5] += 0.01 * action[held, :2]
    return full_state, action, after


def test_an_object_rests_until_it_is_touched_wherever_that_is() -> None:
    full_state, action, after = pushed(6000, 0, 0.0)
    missed, ghosts = [], []
    for layout in (LAYOUT, ()):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = StateModel(BODY, 3, word_dim=1, width=64, layers=2, layout=layout)
        model.fit_linear(full_state, action, after)
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        for step in range(400):
            rows = torch.randint(
                len(full_state), (256,), generator=torch.Generator().manual_seed(step)
            )
            adam.zero_grad()
            model.loss(full_state[rows], full_state[rows], action[rows], after[rows]).backward()
            adam.step()
        elsewhere, moves, there = pushed(
            2000, 1, 0.5
        )  # five standard deviations from where it ever was
        with torch.no_grad():
            said = model(elsewhere[None], moves)[0]
        wrong = (said - there)[:, 3:6].abs().amax(1)
        touched = (there - elsewhere)[:, 3:6].abs().amax(1) > 1e-4
        missed.append(float((wrong[touched] > 3e-3).float().mean()))
        ghosts.append(float((wrong[~touched] > 1e-6).float().mean()))
    assert missed[0] < 0.15 and ghosts[0] < 0.05
    assert missed[1] > 0.5 and ghosts[1] > 0.9


def test_what_is_given_as_seen_from_the_hand_rests_in_the_room() -> None:
    full_state, action, after = pushed(300, 0, 0.0)
    seen = torch.eye(BODY)
    seen[[0, 1, 2], [3, 4, 5]] = -1.0  # the block minus the hand
    given = [("relative", *rest) if kind == "object" else (kind, *rest) for kind, *rest in LAYOUT]
    models = [
        StateModel(BODY, 3, word_dim=1, width=32, layers=2, members=2, layout=x)
        for x in (LAYOUT, given)
    ]
    said = []
    for model, view in zip(models, (torch.eye(BODY), seen), strict=True):
        model.fit_linear(full_state @ view, action, after @ view)
        draw = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3, generator=draw)
        rows, chunk, count = (
            full_state[:50] @ view,
            action[:50, None].expand(-1, 4, -1),
            torch.arange(50) % 5,
        )
        said.append(
            (model.roll(rows, chunk, count), model.loss(rows, rows, action[:50], after[:50] @ view))
        )
    ((mean, spread), loss), ((other, differ), as_seen) = said
    assert torch.allclose(mean @ seen, other, atol=1e-5) and torch.allclose(
        spread, differ, atol=1e-6
    )
    assert torch.allclose(loss, as_seen, rtol=1e-4) and spread[1:].max() > 0
    rests = ((mean - full_state[:50])[:, 3:6] == 0).all(1) & (count > 0)
    assert rests.any() and ((other - full_state[:50] @ seen)[rests, 3:6].abs() > 1e-4).any()


def test_the_linear_model_is_that_of_noisy_bodies() -> None:
    draw = torch.Generator().manual_seed(0)
    hand = torch.randn(500, 2, generator=draw)
    full_state = torch.cat(
        [hand, hand + 1e-3 * torch.randn(500, 2, generator=draw)], 1
    )  # the same place, seen twice
    action = torch.randn(500, 2, generator=draw)
    after = full_state + 0.1 * action.repeat(1, 2) + 0.01 * torch.randn(500, 4, generator=draw)
    model = StateModel(4, 2, word_dim=1, width=8, layers=1)
    model.fit_linear(full_state, action, after)
    noise = STEADY * torch.randn(200, 500, 4, generator=draw)
    x = torch.cat(
        [
            (full_state - model.mean) / model.std + noise,
            action.expand(200, -1, -1),
            torch.ones(200, 500, 1),
        ],
        -1,
    )
    wanted = (after - full_state) / model.std - noise
    fitted = torch.linalg.lstsq(x.flatten(0, 1), wanted.flatten(0, 1)).solution
    assert torch.allclose(model.linear, fitted, atol=0.02)


def test_what_an_object_does_depends_on_no_mark_and_no_place_in_the_room(tmp_path: Path) -> None:
    full_state, action, after = pushed(300, 0, 0.0)
    model = StateModel(BODY, 3, word_dim=1, width=32, layers=2, members=2, layout=LAYOUT)
    model.fit_linear(full_state, action, after)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.movers.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    model.save_pretrained(tmp_path)
    model = StateModel.from_pretrained(tmp_path)
    aside = full_state + torch.tensor([0.03, -0.02, 0.0] * 3)
    goal = full_state.clone()
    goal[:, 6:] += 0.1
    moved = [(model(x.expand(2, -1, -1), action) - x)[..., 3:6] for x in (full_state, aside, goal)]
    assert torch.allclose(moved[0], moved[1], atol=1e-5) and torch.equal(moved[0], moved[2])
    assert 0 < (moved[0] != 0).any(-1).float().mean() < 1 and not torch.equal(
        moved[0][0], moved[0][1]
    )


def test_nets_differ_by_metres_about_the_object_they_know_least() -> None:
    full_state, action, after = pushed(50, 0, 0.0)
    full_state, after = (torch.cat([x, x[:, 3:6] + 1.0], dim=1) for x in (full_state, after))
    layout = (*LAYOUT, ("object", BODY, 3))
    model = StateModel(BODY + 3, 3, word_dim=1, width=16, layers=1, members=2, layout=layout)
    model.fit_linear(full_state, action, after)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.movers.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=draw)
    mean, spread = model.roll(full_state, action[:, None].expand(-1, 4, -1), torch.arange(50) % 5)
    ways = full_state.expand(2, -1, -1)
    for step in range(4):
        ways = torch.where((step < torch.arange(50) % 5)[:, None], model(ways, action), ways)
    apart = (ways[0] - ways[1]).norm(dim=-1) / 2  # of two, each is half of the way from their mean
    objects = [
        (ways[0] - ways[1])[:, part].norm(dim=-1) / 2 for part in (slice(3, 6), slice(9, 12))
    ]
    assert torch.allclose(mean, ways.mean(0)) and (spread[::5] == 0).all()
    assert torch.allclose(spread, torch.stack(objects).amax(0), atol=1e-6)
    assert (
        (objects[0] > objects[1]).any()
        and (objects[1] > objects[0]).any()
        and (spread < apart).any()
    )


def test_judges_do_not_see_the_robot_and_the_least_sure_of_them_counts(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    block = torch.rand(2000, 3, generator=draw)
    full_state = torch.cat(
        [block + 0.02 * torch.randn(2000, 3, generator=draw), block], dim=1
    )  # the hand is at the block
    solved, words = (block[:, 0] > 0.8).float(), torch.zeros(2000, 1)
    away = torch.cat(
        [full_state[:, :3].flip(0), block], dim=1
    )  # and now it is where it was with another block
    fooled = []
    for robot in ((), (("robot", 0, 3),)):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = StateModel(
                6, 2, word_dim=1, width=8, layers=1, layout=(*robot, ("hand", 0, 3)), judges=3
            )
        model.fit_linear(full_state, torch.zeros(2000, 2), full_state)
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        for _ in range(200):
            adam.zero_grad()
            logits = model.verdicts(full_state, words)
            torch.nn.functional.binary_cross_entropy_with_logits(
                logits, solved.expand_as(logits)
            ).backward()
            adam.step()
        model.save_pretrained(tmp_path)
        model = StateModel.from_pretrained(tmp_path)
        said = model.verdicts(away, words)
        assert said.shape == (3, 2000) and torch.equal(model.logit(away, words), said.amin(0))
        assert not torch.equal(said[0], said[1])
        right = ((model.logit(full_state, words) > 0) == solved.bool()).float().mean()
        assert right > 0.97
        fooled.append(float(((model.logit(away, words) > 0) != solved.bool()).float().mean()))
    assert fooled[0] > 0.08 and fooled[1] < 0.03


def test_judges_that_learned_with_noise_are_sure_of_less() -> None:
    """Of two numbers that go together in the data either would do; with noise a net asks both."""
    clips = squares(100, 0, state=True)
    rows = torch.arange(len(clips))[torch.arange(len(clips)) + 1 < clips.end]
    assert clips.privileged is not None
    sure = []
    for noise in (0.0, 1.0):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = build_model(WorldTrainConfig(**SETTINGS, state=True, judges=2), clips, rows)
        adam = torch.optim.Adam(model.parameters(), lr=3e-3)
        embedded = embed_sentences(clips.sentences)
        for step in range(150):
            generator = torch.Generator().manual_seed(step)
            some = rows[torch.randint(len(rows), (128,), generator=generator)]
            adam.zero_grad()
            loss, figures = state_loss(model, clips, embedded, some, 0, 0.0, noise, generator)
            loss.backward()
            adam.step()
            assert set(figures) == {"state", "state_success", "prospect"}
        words = embedded[clips.sentence[rows]]
        sure.append(float(model.state.logit(clips.full_state(rows), words).detach().abs().mean()))
    assert 0 < sure[1] < 0.6 * sure[0]


def test_the_longest_dream_in_training_grows() -> None:
    config = WorldTrainConfig(steps=100, pushforward_from=0.6, max_unroll=4, unroll_growth=0.5)
    grown = [longest_unroll(config, step) for step in range(60, 100)]
    assert (
        grown == sorted(grown)
        and grown[0] == 1
        and set(grown) == {1, 2, 3, 4}
        and grown.count(4) == 25
    )
    fixed = dataclasses.replace(config, unroll_growth=0.0)
    assert {longest_unroll(fixed, step) for step in range(60, 100)} == {4}


def test_training_that_was_interrupted_goes_on_bit_for_bit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        Clips, "load", classmethod(lambda cls, paths, **_: squares(60, 0, state=True))
    )
    settings = SETTINGS | {"codec_steps": 4, "state_steps": 6, "steps": 4}
    config = WorldTrainConfig(**settings, out=str(tmp_path / "whole"), checkpoint_every=4)
    whole, calls = hardly_trained(config), 0

    def check(self) -> None:
        nonlocal calls
        calls += 1
        if calls == 8:  # within the state model's stage
            raise training.Interrupted

    parts = dataclasses.replace(config, out=str(tmp_path / "parts"))
    with monkeypatch.context() as m:
        m.setattr(training.Interrupt, "check", check)
        assert train_world(parts) is None
    newest = checkpoint.latest(tmp_path / "parts" / "checkpoints")
    states, meta = checkpoint.load(newest)
    checkpoint.save(
        newest, {name: state for name, state in states.items() if name != "inverse"}, meta
    )
    with pytest.raises(UserError, match="another version of embodyrl"):
        train_world(parts)
    checkpoint.save(newest, states, meta)
    a, b = (WorldModel.load(path).state_dict() for path in (whole, hardly_trained(parts)))
    assert all(torch.equal(a[k], b[k]) for k in a)
