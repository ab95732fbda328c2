"""Trajectory diffusion: linear data and a Gaussian policy, and MuJoCo's reach task."""

import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch

from embodyrl.build import make_env, make_policy
from embodyrl.cli.main import main
from embodyrl.config import compose
from embodyrl.data.collect import make_expert
from embodyrl.data.demonstrations import Demonstrations, require_whole
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.record import record_episodes
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.config import MujocoConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.types import ActionSample, EnvSpec
from embodyrl.world_models.trajectories import pieces as reading
from embodyrl.world_models.trajectories.pieces import cut_pieces, read_pieces
from embodyrl.world_models.trajectories.policy_pull import PolicyPull
from embodyrl.world_models.trajectories.train_trajectories import (
    TrajectoryTrainConfig,
    fit_trajectories,
)
from embodyrl.world_models.trajectories.trajectory_model import TrajectoryModel
from embodyrl.world_models.trajectories.write_trajectories import (
    as_recording,
    draw_trajectories,
    write_trajectories,
)

LINE = EnvSpec("test/line", 1, 1, 1, "torque", 25.0, 20, {})
BEHAVIOUR, POLICY = (0.0, 0.3), (0.4, 0.2)
"""Mean and std of actions: of the data, and of the policy."""


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def line(episodes=150, rows=8, **settings):
    """s' = .9 s + .5 a + noise; the reward is the state, and nothing is ever solved."""
    noise = torch.randn(episodes, rows, 2, generator=gen())
    actions = BEHAVIOUR[0] + BEHAVIOUR[1] * noise[..., 0]
    states = [noise[:, 0, 1] / 2]
    for t in range(rows - 1):
        states.append(0.9 * states[-1] + 0.5 * actions[:, t] + 0.05 * noise[:, t + 1, 1])
    state = torch.stack(states, 1).flatten()[:, None]
    count = episodes * rows
    given = {
        "reward": state[:, 0],
        "solved": torch.zeros(count, dtype=torch.bool),
        "success": torch.zeros(count, dtype=torch.bool),
    } | settings
    told = torch.zeros(count, dtype=torch.long)
    episode = torch.arange(episodes).repeat_interleave(rows)
    return Demonstrations(1, {}, state, actions.flatten()[:, None], episode, told, ["go"], **given)


class Gaussian:
    """Acts by N(POLICY), whatever it sees."""

    config = SimpleNamespace(horizon=1, name="gaussian")

    def sample(self, obs, *, generator, mode):
        noise = torch.randn(len(obs), 1, 1, generator=generator)
        return ActionSample(POLICY[0] + POLICY[1] * noise)


@pytest.fixture(scope="module")
def model():
    config = TrajectoryTrainConfig(length=4, steps=400, width=32, layers=2, lr=3e-3)
    return fit_trajectories(cut_pieces([line()], 4, LINE), config)[0]


def draw(model, guidance, count=400):
    first = torch.full((count, 1), 0.3)
    told = torch.zeros(count, dtype=torch.long)
    pull = PolicyPull(Gaussian(), model, told, gen(1), proposals=32)
    rows, _ = draw_trajectories(model, first, told, gen(), pull=pull, guidance=guidance)
    return rows[..., 0], rows[..., 1], rows[..., 2]


def test_a_gaussian_policy_shifts_the_actions_of_linear_data_as_the_product_of_both(model):
    states, actions, reward = draw(model, 1.0)
    precision = BEHAVIOUR[1] ** -2 + POLICY[1] ** -2
    wanted = POLICY[0] * POLICY[1] ** -2 / precision
    assert abs(actions.mean() - wanted) < 0.05  # the data have 0, and the policy 0.4
    assert abs(actions.std() - precision**-0.5) < 0.05
    # States and rewards follow.
    wrong = states[:, 1:] - 0.9 * states[:, :-1] - 0.5 * actions[:, :-1]
    assert abs(wrong.mean()) < 0.05
    assert wrong.std() < 0.15
    assert (reward - states).abs().mean() < 0.15
    # Less guidance shifts them less.
    assert 0.02 < draw(model, 0.2)[1].mean() < actions.mean() - 0.05


def test_guidance_0_gives_the_distribution_of_the_data(model):
    states, actions, _ = draw(model, 0.0)
    assert abs(actions.mean()) < 0.06
    assert abs(actions.std() - BEHAVIOUR[1]) < 0.06
    assert (states[:, 0] == 0.3).all()
    assert abs(states[:, 1].mean() - 0.27) < 0.06


def test_the_error_that_guidance_reads_goes_from_the_variance_of_the_data_to_0(model):
    doubt = model.doubt[:, 0]
    assert doubt[0] < 1e-6
    assert (doubt[1:] > doubt[:-1] - 0.05).all()
    assert 0.8 < doubt[-1] < 1.2
    assert model.doubt_at(1 / 64) == pytest.approx(float(doubt[:2].mean()))


def test_a_solved_piece_stands_still_and_is_cut_where_it_was_solved(model):
    solved = torch.tensor([0, 0, 1, 0, 0, 0, 0, 0], dtype=torch.bool).repeat(5)
    pieces = cut_pieces([line(5, solved=solved, success=torch.ones(40).bool())], 4, LINE)
    # A piece begins in each row up to success.
    assert pieces.index[pieces.episode == 0].tolist() == [[0, 1, 2, 2], [1, 2, 2, 2], [2, 2, 2, 2]]
    rows = pieces.batch(torch.tensor([1]))[0]
    assert rows[:, -1].tolist() == [0, 1, 1, 1]
    assert rows[:, -2].tolist()[2:] == [0, 0]
    assert pieces.begins.tolist()[:4] == [True, False, False, True]
    recording = as_recording(model, rows, "go")
    assert len(recording) == 2 and recording.success


def test_longer_trajectories_go_on_where_the_piece_before_ended(model):
    first = torch.zeros(50, 1)
    rows, _ = draw_trajectories(model, first, torch.zeros(50).long(), gen(), length=12)
    assert rows.shape == (50, 12, 4)
    wrong = rows[:, 1:, 0] - 0.9 * rows[:, :-1, 0] - 0.5 * rows[:, :-1, 1]
    assert wrong.std() < 0.15


@pytest.fixture(scope="module")
def reach():
    """Recorded states of the reach task, half of them of a clumsy expert."""
    env = make_env(MujocoConfig(task="reach", cameras=(), renderer="none", num_envs=8))
    try:
        recordings = list(record_episodes(env, make_expert(env, 0.7), 24, keep="all", noise=0.7))
    finally:
        env.close()
    return env.spec, recordings


@pytest.fixture(scope="module")
def recorded(reach, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reach") / "data"
    return str(write_dataset(folder, reach[1], reach[0]))


def test_transitions_of_reach_are_finite_in_range_and_follow_the_dynamics(recorded):
    pieces = read_pieces([recorded], 6)
    config = TrajectoryTrainConfig(length=6, steps=300, width=64, layers=2, lr=3e-3)
    model, _ = fit_trajectories(pieces, config)
    chosen = torch.randint(len(model.starts), (128,), generator=gen())
    rows, _ = draw_trajectories(model, model.starts[chosen], model.told[chosen], gen())
    assert rows.isfinite().all()
    assert (rows >= model.low - 1e-5).all() and (rows <= model.high + 1e-5).all()
    # The hand goes where it is sent: by the data's own rule, fitted by least squares.
    hand = slice(0, 3)
    before, after, _ = transitions(pieces.rows[pieces.index], pieces.over)
    rule = torch.linalg.pinv(before.double(), rtol=1e-5).float() @ after[:, hand]
    before, after, solved = transitions(rows, rows[..., -1].cumsum(1) > 0)
    error = (before @ rule - after[:, hand]).square().mean()
    shuffled = after[torch.randperm(len(after), generator=gen())]
    assert error < 0.25 * (before @ rule - shuffled[:, hand]).square().mean()
    # What stays where it is, as the goal does, stays.
    assert (before[:, :40] - after).abs().mean() < 0.7 * (before[:, :40] - shuffled).abs().mean()
    assert solved


def transitions(rows, over):
    """State, action and 1, the state after it, and whether anything is solved."""
    state = rows[..., :40]
    before = torch.cat([rows[..., :44], torch.ones_like(rows[..., :1])], -1)
    keep = ~over[:, 1:]
    return before[:, :-1][keep], state[:, 1:][keep], bool(rows[..., -1].any())


def save_policy(folder, spec, horizon):
    """A small policy that has learned nothing; its checkpoint's folder."""
    preset = folder / "preset.yaml"
    preset.write_text(
        "# Small.\nenv: {name: mujoco, task: reach, cameras: [], renderer: none}\n"
        f"policy: {{name: flow_mlp, horizon: {horizon}, width: 16, layers: 1}}\n"
        "algorithm: {name: sft}\n"
    )
    config = compose(str(preset), [])
    policy = make_policy(config.policy, spec, 0)
    meta = {"config": json.loads(json.dumps(asdict(config))), "spec": spec_to_json(spec)}
    states = {"policy": policy.state_dict()}
    return str(checkpoint.save(folder / f"run{horizon}" / "step_000001", states, meta))


def test_it_writes_what_an_off_policy_learner_reads(reach, recorded, tmp_path, capsys):
    spec = replace(reach[0], num_envs=1)
    policy = save_policy(tmp_path, spec, horizon=2)
    words = ["world", "trajectories"]
    small = ["--length", "5", "--steps", "3", "--width", "16", "--layers", "1", "--heads", "2"]
    assert main([*words, "train", recorded, *small, "--out", str(tmp_path / "model")]) == 0
    given = ["--policy", policy, "--episodes", "3", "--steps", "3"]
    out = tmp_path / "guided"
    assert main([*words, "write", str(tmp_path / "model"), *given, "--out", str(out)]) == 0
    assert "standard deviations from what the policy does" in capsys.readouterr().out
    demos = load_demonstrations(out, 2, spec=spec, keep="all")
    demos.check(spec)
    assert demos.num_episodes == 3
    # A learner reads it beside what was recorded.
    assert all(chunk.obs.proprio.shape[1] == 40 for chunk in demos.transitions())
    # What is cut is no failure; a whole episode that is not solved is one.
    synthetic = demos.origin["synthetic"]
    assert synthetic["cut"] and synthetic["guidance"] == 1.0 and synthetic["distance"] > 0
    with pytest.raises(UserError, match="cut before they end"):
        require_whole(demos)
    whole = tmp_path / "whole"
    given = {"guidance": 0.0, "episodes": 2, "starts": "first", "length": 25, "steps": 2}
    write_trajectories(str(tmp_path / "model"), str(whole), **given)
    demos = load_demonstrations(whole, 2, spec=spec, keep="all")
    require_whole(demos)
    assert demos.num_episodes == 2
    # The model that was saved is the one that draws.
    model = TrajectoryModel.load(tmp_path / "model")
    assert model.spec.name == "mujoco/reach" and model.sparse


def test_what_cannot_be_drawn_is_refused_in_words(reach, recorded, tmp_path):
    spec = replace(reach[0], num_envs=1)
    pieces = read_pieces([recorded], 5)
    small = TrajectoryTrainConfig(length=5, steps=1, width=16, layers=1, heads=2)
    fit_trajectories(pieces, small)[0].save(tmp_path / "model")
    model, out = str(tmp_path / "model"), str(tmp_path / "out")
    for words, given in {
        "needs a policy that guides": {},
        "must not be negative": {"guidance": -1.0},
        "leave --policy out": {"guidance": 0.0, "policy": "runs/sft"},
        "any or first": {"guidance": 0.0, "starts": "last"},
        "--episodes is 0": {"guidance": 0.0, "episodes": 0},
        "--proposals is 1": {"guidance": 0.0, "proposals": 1},
        "no transition would fit": {"policy": save_policy(tmp_path, spec, horizon=5)},
        "does not fit": {
            "policy": save_policy(tmp_path, replace(spec, proprio_dim=39, name="x"), horizon=3)
        },
    }.items():
        with pytest.raises(UserError, match=words):
            write_trajectories(model, out, **given)
    with pytest.raises(UserError, match="holds no trajectory model"):
        write_trajectories(str(tmp_path), out, guidance=0.0)
    # A part that does not fit the rest.
    file = tmp_path / "model" / "trajectories.json"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps(meta | {"sentences": ["a", "b", "c"]}))
    with pytest.raises(UserError, match="sentences does not fit the rest"):
        TrajectoryModel.load(model)


def test_data_of_which_nothing_can_be_learned_are_refused_in_words(recorded, monkeypatch):
    nothing = torch.zeros(1200)
    with pytest.raises(UserError, match="None of the episodes is solved"):
        cut_pieces([line(reward=nothing)], 4, LINE)
    with pytest.raises(UserError, match="0 of 150 episodes hold a piece of 9 rows"):
        cut_pieces([line()], 9, LINE)
    with pytest.raises(UserError, match="name at least one data set"):
        read_pieces([], 4)
    with pytest.raises(UserError, match="multiple of twice"):
        TrajectoryTrainConfig(width=100, heads=8)
    # Cameras, a history, another env, or nothing known of the env.
    demos = load_demonstrations(recorded, 1, keep="all")
    for words, spec in {
        "has cameras": {"cameras": {"front": [64, 64]}},
        "env.history=2": {"history": 2},
        "does not say which env": None,
    }.items():
        said = demos.origin["spec"]
        origin = {} if spec is None else {"spec": said | spec}
        changed = load_demonstrations(recorded, 1, keep="all")
        changed.origin = origin
        monkeypatch.setattr(reading, "load_demonstrations", lambda *_, d=changed, **__: d)
        with pytest.raises(UserError, match=words):
            read_pieces([recorded], 4)
    other = load_demonstrations(recorded, 1, keep="all")
    other.origin = {"spec": demos.origin["spec"] | {"control_hz": 10.0}}
    both = iter([demos, other])
    monkeypatch.setattr(reading, "load_demonstrations", lambda *_, **__: next(both))
    with pytest.raises(UserError, match="are of different envs"):
        read_pieces([recorded, "other"], 4)
