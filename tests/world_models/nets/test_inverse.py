"""Inverse dynamics: actions from pictures, dreams that show others, and impossible moves."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from squares import NEVER, SETTINGS, SIZE, hardly_trained, squares

from embodyrl.errors import UserError
from embodyrl.ranges import check_config
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.encode import encode
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.inverse import InverseDynamics, mean_action
from embodyrl.world_models.open_loop import action_following
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.reflectors.folder import load_reflector, save_reflector
from embodyrl.world_models.reflectors.trained import TrainedReflector
from embodyrl.world_models.replay import actions_from
from embodyrl.world_models.train import WorldTrainConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """Its dynamics are hardly trained, so its pictures do not follow; its inverse dynamics are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: squares(150, 0)))
        given = SETTINGS | {"codec_steps": 60, "steps": 3, "inverse_steps": 300, "state": False}
        return hardly_trained(
            WorldTrainConfig(**given, out=str(tmp_path_factory.mktemp("w") / "run"))
        )


def test_the_mean_is_of_what_was_executed() -> None:
    actions = torch.arange(12.0).view(2, 3, 2)
    assert torch.equal(
        mean_action(actions, torch.tensor([1, 3])), torch.tensor([[0.0, 1.0], [8.0, 9.0]])
    )


def test_it_sees_what_real_pictures_show(folder) -> None:
    model, clips = WorldModel.load(folder), squares(60, 99)
    clips.latents = encode(model, clips)
    rows = clips.starts + 4
    actions, count = actions_from(model, clips, rows, clips.end[rows])
    before, after = (clips.latents[at].float() for at in (rows, rows + count))
    right = model.inverse.error(before, after, actions, count)
    wrong = model.inverse.error(before, after, actions.roll(1, 0), count)
    assert right.square().mean().sqrt() < 1.5 and wrong.median() > 2 * right.median()
    said = model.inverse(before, after, count / model.horizon)
    moved = (clips.proprio[rows + count] - clips.proprio[rows]) * SIZE / 4 / count[:, None]
    free = (moved - mean_action(actions, count)).abs().amax(1) < 0.01  # of walls
    assert free.sum() > 10 and (said - moved)[free].abs().mean() < 0.15


def test_pictures_that_stand_still_are_told_from_real_ones(folder) -> None:
    model, clips = WorldModel.load(folder), squares(40, 99)
    clips.latents = encode(model, clips)
    found = action_following(model, clips, clips.starts)
    assert found["own"] > 1.5  # hardly trained as it is, it shows nothing of what is done
    assert model.max_action_error > 1.0
    config = WorldModelConfig(model=folder, num_envs=4, precision="f32")
    still, right = torch.zeros(4, 3, 2), torch.tensor([0.0, 1.0]).expand(4, 3, 2)
    for follow, limit in ((True, 1.5), (True, 1e9), (False, 0.0)):
        env = WorldModelEnv(WorldModelConfig(**vars(config) | {"follow": follow}))
        env.model.calibration, env.model.max_action_error = NEVER, limit
        env.reset(init=[0, 1, 2, 3])
        calm, step = env.step(still), env.step(right)
        assert calm.terminated.sum() <= 1 or not follow
        doubted = follow and limit < 1e9
        assert bool(step.log["doubt"].any()) == doubted and step.terminated.sum() >= 3 * doubted
        assert not step.success.any() and not step.reward.any()


def test_a_model_of_before_there_was_any(folder, tmp_path, monkeypatch) -> None:
    old = tmp_path / "old"
    shutil.copytree(folder, old)
    shutil.rmtree(old / "inverse")
    assert WorldModel.load(old).inverse is None
    with pytest.raises(UserError, match="cannot tell which actions its pictures show"):
        WorldModelEnv(WorldModelConfig(model=str(old), follow=True))
    WorldModelEnv(WorldModelConfig(model=str(old), num_envs=2)).reset()
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: squares(60, 3)))
    given = SETTINGS | {"steps": 3, "inverse_steps": 3, "init": str(old)}
    more = WorldModel.load(hardly_trained(WorldTrainConfig(**given, out=str(tmp_path / "on"))))
    assert isinstance(more.inverse, InverseDynamics) and more.max_action_error > 0
    with pytest.raises(UserError, match="inverse_steps is 0"):
        check_config("world", WorldTrainConfig(inverse_steps=0))


def test_frames_that_no_robot_could_make_are_not_judged(folder, tmp_path) -> None:
    judge, kept = tmp_path / "judge", Calibration(threshold=0.7)
    reflector = TrainedReflector({"front": [SIZE, SIZE]}, 5, width=8, features=16)
    reflector.calibration = kept
    save_reflector(reflector, judge)

    def told(name: str, **settings: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "reflector.json").write_text(
            json.dumps({"kind": "executable", **settings})
        )
        return tmp_path / name

    asked = load_reflector(told("whole", model=folder, reflector=str(judge)))
    assert asked.calibration == kept and asked.window == 5 and asked.cameras == ("front",)
    clips, horizon = squares(40, 7), 3
    rows = clips.starts[:, None] + torch.tensor([0, 3, 6, 9, 12])
    film = clips.frames(rows.flatten())[:, 0].unflatten(0, rows.shape)
    words = ["push the square to the right"] * len(rows)
    plain, seen = (one.judge({"front": film}, words) for one in (load_reflector(judge), asked))
    assert WorldModel.load(folder).horizon == horizon
    assert seen[:, 2:].isnan().float().mean() < 0.1
    same = ~seen.isnan()
    assert torch.equal(seen[same], plain[same])
    teleported = film.clone()
    teleported[:, 3] = film.roll(1, 0)[
        :, 3
    ]  # the square is where it is in another episode, and back again
    far = (clips.proprio[rows[:, 3]] - clips.proprio[rows[:, 3]].roll(1, 0)).abs().amax(
        1
    ) * SIZE > 16
    assert far.sum() > 5
    caught = asked.judge({"front": teleported}, words)[far][:, 3:].isnan().any(1)
    assert caught.float().mean() > 0.7
    repeated = film[:, :1].expand(-1, 5, -1, -1, -1)  # a window that begins before its episode
    assert torch.equal(asked.judge({"front": repeated}, words).isnan(), plain.isnan())
    reflector = TrainedReflector({"front": [SIZE, SIZE]}, 2, width=8, features=16)
    save_reflector(reflector, tmp_path / "short")
    with pytest.raises(UserError, match="sees 1"):
        load_reflector(told("two", model=folder, reflector=str(tmp_path / "short")))
    with pytest.raises(UserError, match="lacks 'reflector'"):
        load_reflector(told("none", model=folder))
