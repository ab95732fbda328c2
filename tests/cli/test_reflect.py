"""Labels, scores, folders and the command line."""

import argparse
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from embodyrl.cli import reflect
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.reflectors.folder import load_reflector
from embodyrl.world_models.reflectors.labelled_episodes import LabelledEpisodes, from_demonstrations
from embodyrl.world_models.reflectors.score import score_probabilities
from embodyrl.world_models.reflectors.server import ServerReflector


def demonstrations(reward: list[float], success: list[bool]) -> Demonstrations:
    count = len(reward)
    return Demonstrations(
        1,
        {"front": np.zeros((count, 4, 4, 3), np.uint8)},
        torch.zeros(count, 1),
        torch.zeros(count, 1),
        torch.arange(count) // 4,
        torch.zeros(count, dtype=torch.long),
        ["x"],
        success=torch.tensor(success),
        reward=torch.tensor(reward),
    )


def test_the_frame_after_an_action_carries_its_reward():
    made = from_demonstrations(demonstrations([0, 1, 1, 1, 0, 0, 0, 0], [True] * 4 + [False] * 4))
    assert made.label.tolist() == [False, False, True, True, False, False, False, False]
    assert made.first.tolist() == [0] * 4 + [4] * 4 and made.solved.tolist() == [True, False]
    # The reward of an episode's last action is not the next episode's first frame's.
    cut = demonstrations([0, 0, 0, 1, 0, 0, 0, 0], [True] * 4 + [False] * 4)
    with pytest.raises(UserError, match="terminate_on_success=false"):
        from_demonstrations(cut)
    assert (
        from_demonstrations(cut, tail=2).label.tolist() == [False, False, True, True] + [False] * 4
    )


def test_score_counts_what_happened():
    label = np.array([0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0], dtype=bool)
    prob = np.array(
        [0.1, 0.2, 0.9, 0.9, 0.1, 0.8, 0.9, 0.1, 0.9, 0.9, 0.9, 0.9, 0.1, math.nan, 0.1, 0.9]
    )
    data = LabelledEpisodes(
        {}, np.arange(16), label, np.repeat(np.arange(4), 4), np.zeros(16, dtype=int), ["x"]
    )
    result = score_probabilities(prob, data, Calibration(threshold=0.5, hits=2))
    assert (result["episodes"], result["solved"], result["frames"], result["unjudged"]) == (
        4,
        2,
        16,
        1,
    )
    assert (result["false_terminations"]["k"], result["false_terminations"]["n"]) == (1, 2)
    assert (result["missed"]["k"], result["premature"]["k"]) == (0, 0)
    assert result["f1"]["value"] == pytest.approx(2 * 5 / (2 * 5 + 4))
    early = score_probabilities(prob, data, Calibration(threshold=0.5, hits=1))
    assert early["premature"]["k"] == 1 and early["false_terminations"]["k"] == 2
    json.dumps(result)
    assert result["f1"]["low"] <= result["f1"]["value"] <= result["f1"]["high"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "holds no reflector"),
        ("{", "JSON object"),
        ('["kind"]', "JSON object"),
        ('{"kind": "trainde"}', "'trained'"),
        ('{"kind": "server", "url": "http://127.0.0.1:1/v1"}', "lacks 'model'"),
        (
            '{"kind": "server", "url": "http://127.0.0.1:1/v1", "model": "m", "retrys": 1}',
            "'retries'",
        ),
        ('{"kind": "trained"}', "is damaged"),
        ('{"kind": "goal"}', "cannot be read"),
        ('{"kind": "vlm", "model": "/nowhere"}', "cannot be loaded"),
    ],
)
def test_folders_that_hold_no_reflector_are_named(tmp_path, text, says):
    if text is not None:
        (tmp_path / "reflector.json").write_text(text)
    with pytest.raises(UserError, match=says):
        load_reflector(tmp_path)


def test_a_server_is_a_folder_too(tmp_path):
    told = {
        "kind": "server",
        "url": "http://127.0.0.1:1/v1",
        "model": "m",
        "cameras": ["front", "wrist"],
        "window": 3,
    }
    (tmp_path / "reflector.json").write_text(json.dumps(told))
    Calibration(hits=4).save(tmp_path)
    reflector = load_reflector(tmp_path)
    assert isinstance(reflector, ServerReflector) and reflector.cameras == ("front", "wrist")
    assert reflector.calibration.hits == 4


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    reflect.add_reflect(made.add_subparsers())
    return made


def test_parsing_imports_nothing_heavy():
    code = (
        "import argparse, sys; from embodyrl.cli import reflect; p = "
        "argparse.ArgumentParser();reflect.add_reflect(p.add_subparsers()); "
        "p.parse_args(['reflect', 'eval', 'a', 'b', '--json']);sys.exit(any(m in sys.modules for "
        "m in ('torch', 'numpy', 'diffusers', 'transformers')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    given = parser().parse_args(
        ["reflect", "train", "data", "--out", "out", "--cameras", "front", "wrist", "--hits", "3"]
    )
    assert (given.data, given.out, given.cameras, given.hits, given.window) == (
        "data",
        "out",
        ["front", "wrist"],
        3,
        3,
    )


def labelled(solved: list[int], count: int = 20) -> LabelledEpisodes:
    """Episodes of four small frames; the last two frames of those in ``solved`` are white."""
    episode = np.repeat(np.arange(count), 4)
    label = np.isin(episode, solved) & (np.arange(4 * count) % 4 >= 2)
    frames = np.where(label[:, None, None, None], 255, 0).astype(np.uint8)
    return LabelledEpisodes(
        {"front": np.broadcast_to(frames, (4 * count, 8, 8, 3)).copy()},
        np.arange(4 * count),
        label,
        episode,
        np.zeros(4 * count, dtype=int),
        ["x"],
    )


def test_a_reflector_that_cannot_be_calibrated_is_refused_before_training(tmp_path, monkeypatch):
    """A folder without a fitted calibration would give reward all the same."""
    where = "embodyrl.world_models.reflectors.labelled_episodes.load_episodes"
    out = tmp_path / "reflector"
    monkeypatch.setattr(where, lambda *_: labelled(list(range(20))))
    with pytest.raises(UserError, match="Of 3 episodes 3 are solved"):
        reflect.train_reflector("data", str(out), steps=10**9, device="cpu")
    assert not out.exists()
    # Another kind of folder is refused as early.
    monkeypatch.setattr(where, lambda *_: labelled([k for k in range(20) if k % 4]))
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.png").touch()
    with pytest.raises(UserError, match="something other than a reflector"):
        reflect.train_reflector("data", str(tmp_path / "photos"), steps=10**9, device="cpu")
    # What can be calibrated is kept with its calibration.
    reflect.train_reflector("data", str(out), kind="goal", device="cpu", hits=1)
    fitted = load_reflector(out).calibration
    assert fitted != Calibration() and fitted.hits == 1


@pytest.mark.slow
def test_the_pick_task_of_the_simulator(tmp_path, capsys):
    """Real frames, two minutes of one core. F1 under so low a cap is not tested; see the log."""
    from embodyrl.data.collect import collect_dataset
    from embodyrl.sims.mujoco.env import MujocoConfig

    config = MujocoConfig(
        num_envs=32, task="pick", max_blocks=2, image_size=64, terminate_on_success=False
    )
    collect_dataset(config, tmp_path / "data", num_episodes=500, noise=1.0, keep_failures=True)
    capsys.readouterr()  # what the collection said
    data, out = str(tmp_path / "data"), str(tmp_path / "reflector")
    given = parser().parse_args(
        ["reflect", "train", data, "--out", out, "--json", "--device", "cpu"]
    )
    assert given.run(given) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["auroc"]["value"] >= 0.95 and result["false_terminations"]["rate"] <= 0.1, result
    given = parser().parse_args(["reflect", "calibrate", out, data, "--hits", "1"])
    assert given.run(given) == 0 and load_reflector(out).calibration.hits == 1
    given = parser().parse_args(["reflect", "eval", out, data])
    assert given.run(given) == 0 and "AUROC" in capsys.readouterr().out
