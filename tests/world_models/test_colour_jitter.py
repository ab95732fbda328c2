"""LabelledEpisodes in other lights."""

import pytest
import torch
from squares import squares

from embodyrl.errors import UserError
from embodyrl.ranges import check_config
from embodyrl.world_models import train as training
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.colour_jitter import jitter_colours
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.train import WorldTrainConfig, train_world


def test_copies_are_the_same_episodes_in_a_light_of_their_own() -> None:
    clips = squares(5, 0, state=True)
    n, more = len(clips), jitter_colours(clips, 2, seed=3)
    assert len(more) == 3 * n and len(more.starts) == 15 and int(more.end[-1]) == 3 * n
    every = torch.arange(n)
    assert torch.equal(more.frames(every), clips.frames(every))
    for copy in (1, 2):
        rows = every + copy * n
        assert torch.equal(more.chunk(rows, 4), clips.chunk(every, 4))
        assert torch.equal(more.full_state(rows), clips.full_state(every)) and torch.equal(
            more.solved[rows], clips.solved
        )
        gain, offset = more.colours[rows].unbind(1)
        wanted = (
            clips.frames(every).float() * gain[:, None, None, None]
            + 255 * offset[:, None, None, None]
        )
        assert (more.frames(rows) - wanted.clamp(0, 255)).abs().max() <= 0.5 + 1e-3
        per_episode = more.colours[rows].view(5, -1, 6)
        assert (per_episode == per_episode[:, :1]).all()  # a light lasts as long as its episode
        assert len(per_episode[:, 0].unique(dim=0)) == 5
    assert torch.equal(jitter_colours(clips, 2, seed=3).colours, more.colours)
    assert not torch.equal(jitter_colours(clips, 2, seed=4).colours, more.colours)


def test_a_model_that_saw_them_knows_its_way_in_another_light(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(Clips, "load", classmethod(lambda cls, paths, **_: squares(60, 0)))
    settings = {
        "data": ("memory",), "horizon": 3, "channels": 16, "width": 32, "layers": 1,
        "latent_channels": 4,
        "codec_steps": 150, "steps": 2, "inverse_steps": 2, "max_false_positives": 1.0,
        "found_steps": 2, "state_steps": 2,
    }  # fmt: skip
    other = jitter_colours(squares(20, 99), 1, seed=77)
    rows = torch.arange(len(other))[len(other) // 2 :]
    errors = []
    for styles in (0, 2):
        config = WorldTrainConfig(**settings, styles=styles, out=str(tmp_path / str(styles)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                training, "calibrate_success_head", lambda *_: (training.Calibration(), {})
            )
            model = WorldModel.load(train_world(config))
        frames = other.frames(rows)
        with torch.no_grad():
            errors.append(
                float(
                    (model.codec.decode(model.codec.encode(frames)).float() - frames)
                    .square()
                    .mean()
                )
            )
        assert (
            model.keyframes["age"] == 0
        ).sum() == 60  # copies are learned from, dreams begin in the real light
    assert errors[1] < 0.5 * errors[0]
    with pytest.raises(UserError, match="styles is -1"):
        check_config("world", WorldTrainConfig(styles=-1))
