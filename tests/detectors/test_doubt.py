"""The doubt of a world model as a signal, read of a small model in a small env."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from reach_square import ReachSquare, reaches
from squares import SETTINGS

from embodyrl.detectors.detector import Band, Detector
from embodyrl.detectors.doubt import ModelDoubt
from embodyrl.detectors.folder import load_detector, save_detector
from embodyrl.errors import UserError
from embodyrl.types import Obs
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.found_state import find_states
from embodyrl.world_models.init import build_model, fit_linear


def model_in(folder: Path, **settings: object) -> str:
    """An untrained world model with a state that is found in pictures."""
    clips = reaches(6, 0)
    rows = torch.arange(len(clips))
    model = build_model(WorldTrainConfig(**SETTINGS | {"found": True} | settings), clips, rows)
    clips.privileged = find_states(model, clips)
    assert model.state is not None
    fit_linear(model.state, clips, rows)
    # Untrained networks agree: they all predict what the linear part does.
    for net in model.state.members:
        last = [p for p in net.parameters() if p.ndim == 2][-1]
        torch.nn.init.normal_(last, std=0.1)
    model.save(folder)
    return str(folder)


def test_it_reads_the_spread_of_the_ensemble_after_the_executed_actions(tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", state_members=3)
    signal = ModelDoubt(folder)
    images = {"front": torch.randint(0, 255, (4, 32, 32, 3), dtype=torch.uint8)}
    obs = Obs(images, torch.rand(4, 2), ["go to it"] * 4)
    signal.check(SimpleNamespace(spec=ReachSquare(1).spec))
    generator = torch.Generator()
    short = signal.read(None, obs, torch.ones(4, 1, 2), generator)
    long = signal.read(None, obs, torch.ones(4, 6, 2), generator)
    assert short.shape == (4,) and (short > 0).all() and (long > short).all()
    # The score is the largest so far, and never falls.
    assert signal.curve(torch.tensor([0.1, 0.4, 0.2]), [0, 5, 10]) == pytest.approx([0.1, 0.4, 0.4])
    detector = Detector(signal, Band.none(), 0.3, 0.1, 5, 2, 9)
    again = load_detector(save_detector(detector, tmp_path / "d"))
    assert again.deviation(torch.tensor([0.1, 0.4]), [0, 5]) == pytest.approx(0.4)
    assert torch.equal(again.signal.read(None, obs, torch.ones(4, 6, 2), generator), long)


def test_models_that_cannot_doubt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--dream MODEL"):
        ModelDoubt("")
    with pytest.raises(UserError, match="no world model"):
        ModelDoubt(str(tmp_path))
    with pytest.raises(UserError, match="fewer than two networks"):
        ModelDoubt(model_in(tmp_path / "one", state_members=1))
