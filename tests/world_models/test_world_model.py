"""The world model's parts on a tiny world: a square that moves by its actions."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from squares import SIZE, SPEC, T, squares

from embodyrl import checks
from embodyrl.build import make_env
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.dreams.pictures import EDGE, GAP, MARGIN, draw_dreams
from embodyrl.errors import UserError
from embodyrl.functional.held_out import auroc
from embodyrl.types import Obs
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models import calibrate, precision
from embodyrl.world_models import train as training
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.dream import disagreement
from embodyrl.world_models.dream_metrics import psnr
from embodyrl.world_models.encode import encode
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.judge_scores import score_judges
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.codec import brightness
from embodyrl.world_models.reencode import reencode
from embodyrl.world_models.reflectors.calibration import Calibration, fit_calibration
from embodyrl.world_models.replay import replay, replay_success, solved_after
from embodyrl.world_models.train import WorldTrainConfig, train_world
from embodyrl.world_models.training_losses import BINS, OFF_BACKGROUND, colour_weights, sample_clips


class KnowsTheEdge:
    """A reflector that measures where the red square is."""

    window, cameras, calibration = 3, ("front",), Calibration(threshold=0.5)

    def judge(self, frames, instruction, new=0):
        assert len(instruction) == len(frames["front"]) and frames["front"].shape[1] == self.window
        red = (
            (frames["front"][..., 0].float() - frames["front"][..., 1].float()).clamp_min(0).sum(2)
        )  # n t w
        where = (red * torch.arange(SIZE)).sum(-1) / red.sum(-1).clamp_min(1e-6)
        return ((where - (SIZE - 9.25)) * 2).sigmoid()


NEVER = Calibration(bias=-50.0, threshold=1.0)
SETTINGS = {
    "data": ("memory",),
    "horizon": 3,
    "channels": 32,
    "width": 32,
    "layers": 2,
    "latent_channels": 8,
    "inverse_steps": 100,
    "state": False,
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> WorldModel:
    """Half a minute of training."""
    patch = pytest.MonkeyPatch()
    patch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: squares(200, 0)))
    folder = tmp_path_factory.mktemp("world")
    config = WorldTrainConfig(
        **SETTINGS, out=str(folder / "run"), codec_steps=250, steps=400, codec_lr=3e-3
    )
    model = train_world(config)
    patch.undo()
    assert model is not None
    return WorldModel.load(model)


def test_the_threshold_does_not_make_up_for_what_a_dream_gets_wrong(trained, monkeypatch) -> None:
    clips, share = squares(100, 99), 0.2
    clips.latents = encode(trained, clips)
    furthest = clips.proprio[:, 1].view(-1, T).amax(1)
    solved = clips.solved.view(-1, T)[:, 1:].any(1)
    starts = clips.starts[
        solved | (furthest < 0.55)
    ]  # failures that are far off, so they speak against no threshold
    clips.actions *= (
        0.4  # and dreams that end short of the edge, where the real square has reached it
    )
    prob, lasted = replay_success(trained, clips, starts)
    label = solved_after(clips, starts, trained.horizon, len(prob)) & lasted
    episode = torch.arange(len(starts)).expand_as(prob)
    columns = [x.T[lasted.T].numpy() for x in (prob, label, episode)]

    def really_too_early(calibration: Calibration) -> float:
        monkeypatch.setattr(trained, "calibration", calibration)
        found = score_judges(trained, clips, starts)["head"]["real"]
        return (found["premature"]["k"] + found["false_terminations"]["k"]) / len(starts)

    by_dreams_alone = fit_calibration(*columns, max_false_positive_rate=share, hits=1)
    fitted, report = calibrate.calibrate_success_head(trained, clips, starts, share)
    assert really_too_early(by_dreams_alone) > 1.4 * share and really_too_early(fitted) <= share
    assert fitted.threshold > by_dreams_alone.threshold and report["imagined"] > 0


def test_a_head_that_is_surer_of_what_is_nearly_solved_than_of_any_dreamt_success_is_refused(
    trained,
) -> None:
    clips = squares(100, 99)
    clips.latents = encode(trained, clips)
    where = clips.proprio[:, 1].view(-1, T)
    solved = clips.solved.view(-1, T)[:, 1:].any(1)
    starts = clips.starts[(solved & (where[:, 0] < 0.5)) | (where.amax(1) < 0.3)]
    # dreamt squares hardly move, and the real ones come close to the edge before they reach it
    clips.actions *= 0.1
    with pytest.raises(
        UserError,
        match=r"In more than 2\.0% of the held-out episodes .* real moment before success",
    ):
        calibrate.calibrate_success_head(trained, clips, starts, 0.02)


def test_judges_are_judged_on_real_and_on_imagined_moments(trained) -> None:
    clips = squares(40, 99)
    clips.latents = encode(trained, clips)
    found = score_judges(trained, clips, clips.starts, KnowsTheEdge())
    chunks = (T - 1) // 3
    for kinds in found.values():
        for one in kinds.values():
            assert (
                one["episodes"] == 40
                and one["frames"] == 40 * (chunks + 1)
                and one["unjudged"] == 40
            )
    after = clips.starts[:, None] + 3 * torch.arange(1, chunks + 1)
    assert found["head"]["real"]["solved"] == int(clips.solved[after].any(1).sum())
    assert (
        found["reflector"]["real"]["auroc"]["value"] > 0.99
    )  # it cannot be wrong about what it sees
    assert (
        found["reflector"]["imagined"]["auroc"]["value"]
        < found["reflector"]["real"]["auroc"]["value"]
    )
    assert (
        found["head"]["real"]["auroc"]["value"] > 0.95
        and found["head"]["imagined"]["auroc"]["value"] > 0.8
    )
    # The same episodes, dreamt by actions that were not theirs, come out otherwise: labels go with
    # the right moment.
    mixed = dataclasses.replace(clips, actions=clips.actions.flip(0))
    assert score_judges(trained, mixed, clips.starts)["head"]["imagined"]["auroc"]["value"] < 0.8


def test_it_predicts_where_the_square_goes_and_when_it_has_arrived(trained) -> None:
    clips = squares(40, 99)
    clips.latents = encode(trained, clips)
    starts = clips.starts
    dreams, lasted = replay(trained, clips, starts)
    assert lasted.all() and len(dreams) == (T - 1) // 3
    real = torch.from_numpy(clips.images["front"][(starts + T - 1).numpy()])
    still = torch.from_numpy(clips.images["front"][starts.numpy()])
    shown = trained.frames(dreams[-1])["front"]
    assert psnr(shown, real).mean() > psnr(still, real).mean() + 3
    where = trained.proprio(dreams[-1])
    assert (where - clips.proprio[starts + T - 1]).abs().mean() < 0.1
    truth = torch.stack([clips.solved[a : clips.end[a]].any() for a in starts.tolist()])
    prob, _ = replay_success(trained, clips, starts)
    assert auroc(prob.amax(0).numpy(), truth.numpy()) > 0.85
    # Other episodes' actions lead elsewhere: it follows the actions, and not what usually happens.
    other, _ = replay(trained, clips, starts, starts.roll(1))
    place = clips.proprio[starts] * SIZE
    for t in range(T - 1):
        place = (place + 4 * clips.actions[starts.roll(1) + t]).clamp(4, SIZE - 4)
    imagined = trained.proprio(other[-1]) * SIZE
    assert (imagined - place).abs().mean() < 0.4 * (
        clips.proprio[starts] * SIZE - place
    ).abs().mean()


def test_episodes_are_drawn_beside_their_dreams(trained, tmp_path) -> None:
    clips = squares(12, 98)
    clips.latents = encode(trained, clips)
    draw_dreams(
        trained, clips, clips.starts, tmp_path / "new" / "dreams.png", episodes=4, columns=3
    )
    picture = np.asarray(Image.open(tmp_path / "new" / "dreams.png"))
    scale = -(-EDGE // SIZE)
    cell = SIZE * scale
    assert picture.shape == (20 + 4 * (2 * cell + GAP), MARGIN + 3 * cell, 3)
    solved = [bool(clips.solved[a : clips.end[a]].any()) for a in clips.starts.tolist()]
    shown = [
        clips.starts[[i for i, s in enumerate(solved) if s is kind][:2]] for kind in (True, False)
    ]
    for number, start in enumerate(torch.cat(shown)):
        seen = picture[20 + number * (2 * cell + GAP) :, MARGIN:][:cell:scale, :cell:scale]
        assert (seen == clips.frames(start[None])[0, 0].numpy()).all()
        dreamt = picture[20 + number * (2 * cell + GAP) + cell :, MARGIN:][:cell:scale, :cell:scale]
        assert (
            15 < float(psnr(torch.tensor(dreamt)[None], torch.tensor(seen)[None])) < 100
        )  # through the codec


def test_rare_colours_count_more(trained) -> None:
    clips = squares(40, 97)
    weights = colour_weights(trained, clips, torch.arange(len(clips)))
    frames = clips.frames(torch.arange(len(clips)))
    off = (brightness(frames) - trained.codec.background).abs().amax(2) > OFF_BACKGROUND
    bins = (frames.long() * BINS // 256) @ torch.tensor([BINS**2, BINS, 1])
    assert (
        abs(float(weights[bins[off]].mean()) - 1.0) < 0.05
    )  # of all frames, by weights that saw some of them
    share = torch.bincount(bins[off], minlength=BINS**3)
    common, rare = int(share.argmax()), int(share.where(share > 0, len(off) ** 3).argmin())
    assert weights[rare] >= weights[common] > 0 and weights[share == 0].max() >= weights[rare]


def test_saved_and_loaded_it_is_the_same(trained, tmp_path) -> None:
    trained.save(tmp_path / "a")
    trained.save(tmp_path / "a")  # replaces what is there
    copy = WorldModel.load(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    for name, value in trained.state_dict().items():
        assert torch.equal(value, copy.state_dict()[name]), name
    assert (
        copy.calibration == trained.calibration
        and copy.spec == SPEC
        and copy.sentences == trained.sentences
    )
    with pytest.raises(UserError, match="no world model"):
        WorldModel.load(tmp_path / "b")


def test_weights_that_do_not_fit_are_refused(trained, tmp_path) -> None:
    trained.save(tmp_path / "model")
    path = tmp_path / "model" / "codec" / "diffusion_pytorch_model.safetensors"
    whole = load_file(path)
    for change in (
        {"decoder.0.bias": None},
        {"decoder.0.bias": torch.zeros(5)},
        {"new": torch.zeros(5)},
    ):
        save_file({k: v for k, v in {**whole, **change}.items() if v is not None}, path)
        with pytest.raises(UserError, match="codec is damaged, or of another version"):
            WorldModel.load(tmp_path / "model")


@pytest.fixture
def folder(trained, tmp_path) -> str:
    trained.save(tmp_path / "model")
    return str(tmp_path / "model")


def test_the_env_keeps_its_promises(folder) -> None:
    env = WorldModelEnv(WorldModelConfig(model=folder, num_envs=5, precision="f32"))
    checks.check_env(env, horizon=3)
    checks.check_env(env, horizon=1)
    checks.check_env(env, horizon=7)  # longer than the model's own chunk


def test_a_dream_starts_at_any_moment_and_is_broken_off_and_bootstrapped(folder) -> None:
    env = WorldModelEnv(
        WorldModelConfig(model=folder, num_envs=3, starts="any", length=4, precision="f32")
    )
    assert (
        env.spec.num_init_states
        > WorldModelEnv(WorldModelConfig(model=folder, num_envs=1)).spec.num_init_states
    )
    checks.check_env(env, horizon=3)
    env.model.calibration, age = NEVER, env._keys["age"]
    late, first = int((age == age.max()).nonzero()[0]), int((age == 0).nonzero()[0])
    env.reset(init=[first, late, first])
    context = env._dream.context
    assert torch.equal(context[0, 0], context[0, 2]) and not torch.equal(
        context[1, 0], context[1, 2]
    )
    steps = [env.step(torch.zeros(3, 3, 2)) for _ in range(2)]
    left = min(4, T - 1 - int(age.max()))  # the episode's own time limit holds as well
    assert sum(step.valid.sum(1) for step in steps).tolist() == [4, left, 4]
    assert steps[-1].done.all() or steps[0].done[1]
    for wrong, said in (
        ({"starts": "now"}, r"env\.starts is 'now'"),
        ({"length": -1}, r"env\.length is -1"),
    ):
        with pytest.raises(UserError, match=said):
            make_env(WorldModelConfig(model=folder, **wrong))
    with pytest.raises(UserError, match="nothing to sample"):
        WorldModelEnv(WorldModelConfig(model=folder, sampling_steps=1))


def test_demonstrations_are_shown_as_the_dream_would(trained, folder) -> None:
    clips = squares(20, 5)
    episode, sentence = torch.arange(len(clips)) // 16, torch.zeros(len(clips), dtype=torch.long)
    demos = Demonstrations(
        2, clips.images, clips.proprio, clips.actions, episode, sentence, clips.sentences
    )
    shown = reencode(demos, folder)
    assert (
        torch.equal(shown.actions, demos.actions)
        and shown.images["front"] is not demos.images["front"]
    )
    obs, actions, _ = shown.batch(torch.tensor([300, 2]))
    real, wanted, _ = demos.batch(torch.tensor([300, 2]))
    expected = trained.codec.decode(trained.codec.encode(real.images["front"][:, None]))[:, 0]
    assert (
        torch.equal(actions, wanted)
        and (obs.images["front"].int() - expected.int()).abs().max() <= 1
    )
    other = Demonstrations(2, {"wrist": clips.images["front"]}, *_columns(demos))
    with pytest.raises(
        UserError, match=r"dreams of the cameras \{'front': \(32, 32\)\}.*have \{'wrist'"
    ):
        reencode(other, folder)


def _columns(demos: Demonstrations) -> tuple[Any, ...]:
    return (
        demos.proprio,
        demos.actions,
        torch.arange(len(demos)) // 16,
        demos.instruction,
        demos.sentences,
    )


def test_it_dreams_on_from_what_a_real_env_shows(folder) -> None:
    env = WorldModelEnv(WorldModelConfig(model=folder, num_envs=2, precision="f32"))
    clips = squares(2, 5)
    rows = clips.starts

    def shown(at: torch.Tensor) -> Obs:
        return Obs(
            {"front": torch.from_numpy(clips.images["front"][at.numpy()])},
            clips.proprio[at],
            clips.sentences * 2,
        )

    seen = env.dream_from(shown(rows + 6), first=shown(rows), previous=shown(rows + 3), age=6)
    assert torch.allclose(seen.proprio, clips.proprio[rows + 6], atol=1e-5)
    assert psnr(seen.images["front"], shown(rows + 6).images["front"]).min() > 18
    step = env.step(clips.chunk(rows + 6, 3))
    assert (step.obs.proprio - clips.proprio[rows + 9]).abs().mean() < 0.1
    env.model.calibration = NEVER
    assert sum(int(env.step(torch.zeros(2, 3, 2)).valid[0].sum()) for _ in range(5)) == T - 1 - 9
    wide = Obs(
        {"side": torch.zeros(2, SIZE, SIZE, 3, dtype=torch.uint8)}, torch.zeros(2, 2), ["go"] * 2
    )
    with pytest.raises(UserError, match="with the cameras"):
        env.dream_from(wide)


def test_a_chunk_is_cut_by_the_time_limit(folder) -> None:
    env = WorldModelEnv(
        WorldModelConfig(model=folder, num_envs=4, max_episode_steps=4, precision="f32")
    )
    env.model.calibration = NEVER
    env.reset(init=[0, 1, 2, 3])
    actions = torch.zeros(4, 3, 2)
    assert env.step(actions).valid.all()
    step = env.step(actions)
    assert step.valid.tolist() == [[True, False, False]] * 4
    assert step.truncated.all() and not step.terminated.any() and not step.reward.any()


def test_success_ends_the_episode_and_pays_once(folder) -> None:
    env = WorldModelEnv(WorldModelConfig(model=folder, num_envs=4, precision="f32"))
    env.model.calibration = Calibration(bias=50.0, hits=2)  # everything is solved, seen twice
    env.reset(init=[0, 1, 2, 3])
    first, second, third = (env.step(torch.zeros(4, 3, 2)) for _ in range(3))
    assert not first.terminated.any() and second.terminated.all() and second.success.all()
    assert second.reward.sum(1).tolist() == [1.0] * 4 and second.reward[:, -1].all()
    assert not third.valid.any() and not third.reward.any()


class Judge:
    """A reflector that says how many frames it has been shown, and nothing about the third env."""

    cameras, calibration = ("front",), Calibration(threshold=0.9)

    def __init__(self, window: int) -> None:
        self.window, self.shown = window, []

    def judge(self, frames, instruction, new=0):
        assert new == 1 and frames["front"].shape[:2] == (len(instruction), self.window)
        self.shown.append(frames["front"])
        prob = torch.full((len(instruction), self.window), 0.1 if len(self.shown) < 3 else 0.99)
        if len(self.shown) == 2:
            prob[2] = float("nan")
        return prob


@pytest.mark.parametrize("window", [1, 3])
def test_a_reflector_judges_the_frames_in_place_of_the_head(folder, window) -> None:
    env = WorldModelEnv(WorldModelConfig(model=folder, num_envs=4, precision="f32"))
    env._reflector = judge = Judge(window)
    first = env.reset(init=[0, 1, 2, 3]).images["front"]
    steps = [env.step(torch.ones(4, 3, 2)) for _ in range(3)]
    assert not steps[0].done.any()
    assert steps[1].fault.tolist() == [
        False,
        False,
        True,
        False,
    ]  # what could not be judged does not count
    assert not steps[1].valid[2].any() and steps[1].truncated[2]
    assert steps[2].terminated.tolist() == [True, True, False, True] and len(judge.shown[2]) == 3
    assert torch.equal(judge.shown[0][:, -1], steps[0].obs.images["front"])
    if window == 3:  # the episode's first frame stays in view
        assert torch.equal(judge.shown[1][:, 0], first)
        assert torch.equal(judge.shown[1][:, 1], steps[0].obs.images["front"])


def test_a_dream_that_breaks_is_masked_and_leaves_the_others_alone(folder) -> None:
    env = WorldModelEnv(WorldModelConfig(model=folder, num_envs=3, precision="f32"))
    env.model.calibration = NEVER
    before = env.reset(init=[0, 1, 2])
    env._dream.context = env._dream.context.clone()  # all three frames of a fresh dream are one
    env._dream.context[1] = float("nan")
    step = env.step(torch.zeros(3, 3, 2))
    assert step.fault.tolist() == [False, True, False] and step.truncated.tolist() == [
        False,
        True,
        False,
    ]
    assert step.valid.all(1).tolist() == [True, False, True] and torch.isfinite(step.reward).all()
    assert not torch.equal(step.obs.proprio[0], before.proprio[0])
    assert torch.isfinite(env.reset([1], init=[1]).proprio).all()


def mostly_right(model: WorldModel, clips: Clips, starts: torch.Tensor, actions_of=None):
    """Probabilities of a head that is surest of one failing episode; ten steps teach nothing."""
    prob, lasted = replay_success(model, clips, starts, actions_of)
    solved = solved_after(clips, starts, model.horizon, len(prob)) & lasted
    failing = int((~solved.any(0)).nonzero()[0])
    return (0.3 + 0.4 * solved).index_fill(1, torch.tensor([failing]), 0.9), lasted


def test_training_that_was_interrupted_goes_on_bit_for_bit(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: squares(80, 0)))
    monkeypatch.setattr(calibrate, "replay_success", mostly_right)
    config = WorldTrainConfig(
        **SETTINGS | {"inverse_steps": 6},
        out=str(tmp_path / "whole"),
        codec_steps=6,
        steps=10,
        checkpoint_every=4,
    )
    strict = dataclasses.replace(config, out=str(tmp_path / "strict"), max_false_positives=0.0)
    for _ in range(2):  # it is not taken for a good model later
        with pytest.raises(UserError, match="is trained, but its success head is of no use"):
            train_world(strict)
    useless = WorldModel.load(tmp_path / "strict" / "model")
    assert useless.calibration.threshold == 1.0
    config = dataclasses.replace(config, max_false_positives=1.0)
    assert (
        train_world(dataclasses.replace(strict, max_false_positives=1.0))
        == tmp_path / "strict" / "model"
    )
    lenient = WorldModel.load(
        tmp_path / "strict" / "model"
    )  # the same weights, and another threshold
    assert lenient.calibration.threshold < 1.0
    mine, theirs = useless.backbone.state_dict(), lenient.backbone.state_dict()
    assert all(torch.equal(mine[k], theirs[k]) for k in mine)
    whole = train_world(config)

    def stop_at(step: int):
        calls = 0

        def check(self) -> None:
            nonlocal calls
            calls += 1
            if calls > step:
                raise training.Interrupted

        return check

    for step in (5, 4):
        with monkeypatch.context() as m:
            m.setattr(training.Interrupt, "check", stop_at(step))
            assert train_world(dataclasses.replace(config, out=str(tmp_path / "parts"))) is None
    parts = train_world(dataclasses.replace(config, out=str(tmp_path / "parts")))
    a, b = WorldModel.load(whole).state_dict(), WorldModel.load(parts).state_dict()
    assert all(torch.equal(a[k], b[k]) for k in a)
    rows = [
        json.loads(line)["iteration"]
        for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()
    ]
    assert rows == sorted(set(rows))
    with pytest.raises(UserError, match="steps was 10, now 11"):
        train_world(dataclasses.replace(config, out=str(tmp_path / "parts"), steps=11))


@pytest.mark.parametrize(
    ("amx", "avx", "name", "wanted"),
    [(True, True, "Intel(R) Xeon(R)", True), (False, True, "Intel(R) Xeon(R)", False),
     (False, True, "AMD EPYC 9R14", True), (False, False, "AMD EPYC 7R13", False)],
)  # fmt: skip
def test_bfloat16_is_for_processors_that_are_faster_so(monkeypatch, amx, avx, name, wanted) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx)
    monkeypatch.setattr(precision, "hardware", lambda: {"cpu": name})
    cpu = torch.device("cpu")
    assert precision.use_bf16("auto", cpu) is wanted
    assert precision.use_bf16("bf16", cpu) and not precision.use_bf16("f32", cpu)


@pytest.fixture
def drawn(folder, tmp_path, monkeypatch) -> str:
    """A stochastic model, hardly trained, that starts from the deterministic one's weights."""
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: squares(80, 3)))
    config = WorldTrainConfig(
        **SETTINGS,
        init=folder,
        stochastic=True,
        out=str(tmp_path / "drawn"),
        steps=30,
        muon_lr=1e-4,
        lr=1e-4,
    )
    return str(train_world(config))


def test_a_stochastic_model_starts_as_the_mean_and_draws_around_it(trained, drawn) -> None:
    model, clips = WorldModel.load(drawn), squares(30, 99)
    assert model.stochastic and not trained.stochastic and model.max_disagreement > 0
    clips.latents = encode(model, clips)
    rows, generator = clips.starts, torch.Generator().manual_seed(0)
    context = clips.latents[rows].float()[:, None].expand(-1, 3, -1, -1, -1, -1)
    dream = model.begin(context, clips.proprio[rows], embed_sentences(clips.sentences * len(rows)))
    chunk = (dream, clips.chunk(rows, 3), torch.full((len(rows),), 3))
    truth = clips.latents[rows + 3].float()
    draws = [torch.randn(dream.latent.shape, generator=generator) for _ in range(2)]

    def error(a: torch.Tensor) -> float:
        return float((a - truth).square().mean())

    still = error(dream.latent)
    with torch.no_grad():
        mean, (one, two) = (
            model.imagine(*chunk),
            [model.imagine(*chunk, sample=x, steps=2) for x in draws],
        )
    assert error(mean.latent) < 0.7 * still and error(one.latent) < 0.8 * still
    assert 0 < float(disagreement(one, two).mean()) < still


def test_what_is_held_out_comes_from_every_task():
    clips = squares(40, 0)
    # Four tasks take turns, and every tenth episode is kept: counted over all, it is of tasks 1 and
    # 3 alone.
    task = torch.arange(40) % 4
    sentence = task.repeat_interleave(T)
    clips = dataclasses.replace(clips, sentence=sentence, sentences=["a", "b", "c", "d"])
    kept = clips.held_out(0.1)
    assert kept.view(40, T).float().mean(1).unique().tolist() == [0.0, 1.0]  # whole episodes
    assert task[kept.view(40, T)[:, 0]].tolist().count(0) == 1
    assert sorted(task[kept.view(40, T)[:, 0]].tolist()) == [0, 1, 2, 3]


def test_a_dream_whose_two_draws_differ_too_much_has_failed(drawn) -> None:
    def env(**settings) -> WorldModelEnv:
        env = WorldModelEnv(WorldModelConfig(model=drawn, num_envs=3, precision="f32", **settings))
        env.model.calibration = NEVER
        return env

    sure, doubtful, actions = env(sampling_steps=2), env(sampling_steps=2), torch.zeros(3, 3, 2)
    checks.check_env(sure, horizon=3)
    sure.model.max_disagreement, doubtful.model.max_disagreement = 1e9, 0.0
    first, second = (sure.reset(init=[0, 1, 2]) and sure.step(actions) for _ in range(2))
    assert not first.done.any() and torch.equal(
        first.obs.images["front"], second.obs.images["front"]
    )
    alone = WorldModelEnv(
        WorldModelConfig(model=drawn, num_envs=1, precision="f32", sampling_steps=2)
    )
    alone.model.max_disagreement = 1e9
    alone.reset(init=[2])  # its noise is its own, whatever runs beside it
    assert torch.allclose(alone.step(actions[:1]).obs.proprio[0], first.obs.proprio[2], atol=1e-4)
    doubtful.reset(init=[0, 1, 2])
    step = doubtful.step(actions)
    assert step.log["doubt"].all() and step.terminated.all() and step.valid.all()
    assert not step.success.any() and not step.truncated.any() and not step.reward.any()
    assert not step.fault.any()  # it is no broken simulator, which would stop a run


def test_it_goes_on_with_new_data_and_the_codec_it_has(
    trained, folder, tmp_path, monkeypatch
) -> None:
    clips = squares(80, 3)
    clips.weight[len(clips) // 2 :] = 3
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: clips))
    config = WorldTrainConfig(
        **SETTINGS, init=folder, out=str(tmp_path / "on"), steps=10, codec_steps=5
    )
    model = WorldModel.load(train_world(config))
    for name, value in trained.codec.state_dict().items():
        assert torch.equal(value, model.codec.state_dict()[name]), name
    assert any(
        not torch.equal(v, model.backbone.state_dict()[k])
        for k, v in trained.backbone.state_dict().items()
    )
    rows = [json.loads(row) for row in (tmp_path / "on" / "metrics.jsonl").read_text().splitlines()]
    assert all("picture" in row or "inverse" in row for row in rows)  # nothing of the codec's stage
    with pytest.raises(UserError, match="one number, 1 or more, for each"):
        WorldTrainConfig(data=("a", "b"), weights=(1,))


def test_clips_stay_within_their_episode() -> None:
    clips = squares(10, 0)
    allowed = torch.arange(len(clips))[(torch.arange(len(clips)) // T) % 2 == 0]
    rows, count, back = sample_clips(clips, allowed, 200, 3, 4, torch.Generator().manual_seed(0))
    assert (rows + 4 * count < clips.end[rows]).all() and torch.isin(rows, allowed).all()
    assert count.min() == 1 and count.max() == 3 and back.min() >= 1


def test_bad_settings_are_told(tmp_path, monkeypatch) -> None:
    with pytest.raises(UserError, match="held_out"):
        train_world(WorldTrainConfig(held_out=0.9))
    failures = squares(20, 0)
    failures.solved[:] = False
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: failures))
    with pytest.raises(UserError, match="2 held-out episodes 0 are solved"):  # before any training
        train_world(WorldTrainConfig(**SETTINGS, out=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
    monkeypatch.undo()
    with pytest.raises(UserError, match="data="):
        Clips.load([])
    with pytest.raises(UserError, match=r"env\.model is empty"):
        WorldModelEnv(WorldModelConfig())
