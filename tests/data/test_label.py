"""``embodyrl data label``: actions are told from pictures or states, and a policy can imitate them."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from embodyrl.cli.main import main
from embodyrl.data.inverse_dynamics import ActionNamer, Footage, explained, fit_namer
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.recording import Recording
from embodyrl.types import EnvSpec

SPEC = EnvSpec("test/dot", 1, 2, 2, "delta", 10.0, 40, {"front": (32, 32)})


def recording(seed: int) -> Recording:
    """A dot that goes where the actions say; its place is the state, and is seen."""
    rng = np.random.default_rng(seed)
    steps = 30
    actions = np.zeros((steps, 2), np.float32)
    places = np.zeros((steps, 2), np.float32)
    for t in range(steps):
        if t % 3 == 0:
            wish = rng.normal(0, 0.6, 2) - 0.8 * places[t]
        actions[t] = np.clip(wish, -1, 1)
        if t + 1 < steps:
            places[t + 1] = np.clip(places[t] + 0.3 * actions[t], -1, 1)
    # A soft dot, whose picture tells its place to less than a pixel.
    grid = np.arange(32)
    rows, columns = (
        np.exp(-(((grid - 15.5 - 12 * places[:, k : k + 1]) / 2) ** 2)) for k in (0, 1)
    )
    frames = np.round(255 * rows[:, :, None] * columns[:, None, :]).astype(np.uint8)
    frames = np.repeat(frames[..., None], 3, axis=3)
    zeros = np.zeros(steps, np.float32)
    solved = np.arange(steps) == steps - 1
    return Recording({"front": frames}, places, actions, zeros, solved, seed, "dot", "follow")


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("label")
    return write_dataset(folder / "own", [recording(i) for i in range(16)], SPEC)


def without(path: Path, out: Path, *names: str) -> Path:
    """A copy of a data set without some columns, as an action-free one has none."""
    import pyarrow.parquet as pq

    shutil.copytree(path, out)
    for file in out.glob("data/*/*.parquet"):
        table = pq.read_table(file).drop_columns(list(names))
        pq.write_table(table.replace_schema_metadata({}), file)
    info = json.loads((out / "meta" / "info.json").read_text())
    for name in names:
        del info["features"][name]
    (out / "meta" / "info.json").write_text(json.dumps(info))
    return out


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    whole = write_dataset(folder / "whole", [recording(100 + i) for i in range(4)], SPEC)
    without(whole, folder / "no_actions", "action")
    without(whole, folder / "videos", "action", "observation.state")
    return folder


def true_actions() -> np.ndarray:
    return np.concatenate([recording(100 + i).actions for i in range(4)])


def moving(actions: np.ndarray) -> np.ndarray:
    """Where the wall did not stop the dot, so that a place tells the action."""
    places = np.concatenate([recording(100 + i).proprio for i in range(4)])
    after = np.concatenate([places[1:], places[-1:]])
    return (np.abs(after).max(1) < 0.99) & (np.arange(len(actions)) % 30 < 28)


def test_actions_are_told_from_states_and_the_rest_is_as_it_was(
    labelled: Path, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["data", "label", str(bare / "no_actions"), "--like", str(labelled), "--out", str(out)]
    assert main([*words, "--steps", "200", "--least", "0.3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["episodes"] == 4 and said["frames"] == 120
    data = open_dataset(out, ["action", "action_doubt", "observation.state"])
    named = data.columns["action"]
    free = moving(named)
    assert (
        min(explained(torch.from_numpy(named[free]), torch.from_numpy(true_actions()[free]))) > 0.8
    )
    assert (data.columns["action_doubt"] > 0).all()
    whole = open_dataset(bare / "whole", ["observation.state"])
    states = [of.columns["observation.state"] for of in (data, whole)]
    assert (states[0] == states[1]).all()
    # Whoever imitates reads it like any other data set.
    demos = load_demonstrations(out, 3, spec=SPEC)
    assert demos.num_episodes == 4 and demos.actions.shape == (120, 2)
    assert main(["data", "verify", str(out)]) == 0


def test_videos_alone_get_states_too(labelled: Path, bare: Path, tmp_path: Path) -> None:
    from embodyrl.data.label import label_dataset

    found = label_dataset(
        str(bare / "videos"), str(labelled), str(tmp_path / "out"), steps=200, least=0.3,
        say=lambda text: None,
    )  # fmt: skip
    assert min(found["states"]) > 0.7
    data = open_dataset(tmp_path / "out", ["action", "observation.state"])
    places = np.concatenate([recording(100 + i).proprio for i in range(4)])
    error = np.abs(data.columns["observation.state"] - places).mean()
    assert error < 0.15
    free = moving(data.columns["action"])
    score = explained(
        torch.from_numpy(data.columns["action"][free]), torch.from_numpy(true_actions()[free])
    )
    assert min(score) > 0.5


def test_the_net_sees_no_frame_of_another_episode() -> None:
    film = Footage({}, torch.arange(6.0)[:, None], torch.tensor([0, 0, 0, 1, 1, 1]))
    _, states = film.seen(torch.arange(6))
    # The state at an action, and how the ones before and after it differ from it.
    assert states.tolist() == [
        [0, 0, 1, 2], [1, -1, 1, 1], [2, -1, 0, 0], [3, 0, 1, 2], [4, -1, 1, 1], [5, -1, 0, 0],
    ]  # fmt: skip


def test_its_standard_deviation_is_that_of_the_noise() -> None:
    """Targets are 3 x the state, with noise of .5 where the state is positive and .1 elsewhere."""
    torch.manual_seed(0)
    n = 4000
    state = torch.rand(n, 1) * 2 - 1
    noise = torch.where(state > 0, 0.5, 0.1)
    target = 3 * state + noise * torch.randn(n, 1)
    film = Footage({}, state, torch.arange(n))
    net = fit_namer(film, target, torch.arange(n), steps=600)
    assert isinstance(net, ActionNamer)
    rows = torch.arange(500)
    mean, std = net.name(film, rows)
    assert (mean - 3 * state[rows]).abs().mean() < 0.1
    for positive, true in ((True, 0.5), (False, 0.1)):
        found = std[(state[rows] > 0)[:, 0] == positive].median()
        assert float(found) == pytest.approx(true, rel=0.3)


def test_explained_is_r_squared() -> None:
    true = torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]])
    named = torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 1.0]])
    assert explained(named, true) == pytest.approx([1 - 2 / 8, 1.0])
    assert explained(true.mean(0).expand(3, 2), true)[0] == pytest.approx(0.0)


def test_what_does_not_fit_is_refused(
    labelled: Path, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refusal(path: Path, like: Path, *more: str) -> str:
        out = str(tmp_path / "out")
        assert main(["data", "label", str(path), "--like", str(like), "--out", out, *more]) == 1
        assert not Path(out).exists()
        return capsys.readouterr().err

    assert "has actions already" in refusal(labelled, labelled)
    assert "has no 'action'" in refusal(bare / "videos", bare / "no_actions")
    assert "has 3 episodes with actions; at least 4" in refusal(
        bare / "no_actions", write_dataset(tmp_path / "few", [recording(i) for i in range(3)], SPEC)
    )
    slow = dataclasses.replace(SPEC, control_hz=5.0)
    whole = write_dataset(tmp_path / "slow", [recording(50)], slow)
    assert "5 frames a second" in refusal(without(whole, tmp_path / "other", "action"), labelled)
    # Actions that cannot be told are not written.
    text = refusal(bare / "videos", labelled, "--steps", "2", "--least", "0.99")
    assert "cannot be told well enough" in text and "--least asks for 0.99" in text
    assert (
        "needs --like" in (main(["data", "label", "x", "--out", "y"]), capsys.readouterr().err)[1]
    )
