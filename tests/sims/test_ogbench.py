"""OGBench's scenes: the env API's promises, OGBench's own numbers, its oracles, and words for mistakes."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch

if importlib.util.find_spec("ogbench") is None:
    pytest.skip("the extra ogbench is not installed", allow_module_level=True)

from embodyrl import registry
from embodyrl.build import make_env
from embodyrl.checks import check_env
from embodyrl.data.collect import collect_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.sims.ogbench.config import OGBenchConfig
from embodyrl.sims.ogbench.env import OGBenchEnv
from embodyrl.sims.ogbench.parts import presses
from embodyrl.sims.ogbench.scenes import SCENES
from embodyrl.sims.ogbench.simulation import scene_class
from embodyrl.sims.ogbench.tasks import list_tasks


@pytest.mark.parametrize("task", ["cube-double", "scene", "puzzle-3x3"])
def test_promises_of_a_vec_env(task):
    check_env(make_env(OGBenchConfig(task=task, num_envs=2, max_episode_steps=8)))


def test_promises_with_pictures_and_workers():
    config = OGBenchConfig(
        num_envs=2, max_episode_steps=4, cameras=("front_pixels",), image_size=16, num_workers=2
    )
    env = make_env(config)
    assert env.spec.proprio_dim == 19 and env.spec.privileged_dim == 31
    check_env(env, chunks=1)
    env.close()


def test_states_rewards_and_successes_are_those_of_ogbench():
    """The same seed, goal and actions in OGBench's env: what differs is its unseeded settling."""
    env = make_env(OGBenchConfig(task="cube-double", num_envs=1, reward="unsolved", split="eval"))
    init = 3 * 5 + 3  # the fourth state of goal 4
    obs = env.reset(init=[init])
    theirs = scene_class("cube")(
        env_type="double",
        permute_blocks=False,
        reward_task_id=4,
        terminate_at_goal=False,
        visualize_info=False,
    )
    state, info = theirs.reset(seed=2 * 3 + 1)
    np.testing.assert_allclose(obs.proprio[0, :18], state[:18], atol=1e-6)
    np.testing.assert_allclose(obs.proprio[0, 19:37], state[19:], atol=1e-6)
    # The goal is where OGBench puts its marks, in the units of its state.
    marks = (theirs.data.mocap_pos - [0.425, 0, 0]) * 10
    np.testing.assert_allclose(obs.proprio[0, 37:], marks.ravel(), atol=1e-6)
    actions = np.random.default_rng(0).uniform(-1, 1, (20, 5))
    step = env.step(torch.from_numpy(actions)[None].float())
    rewards = []
    for action in actions:
        state, reward, _, _, info = theirs.step(action.astype(np.float32))
        rewards.append(reward)
    np.testing.assert_allclose(step.obs.proprio[0, :37], state, atol=2e-3)
    assert step.reward[0].tolist() == rewards
    assert bool(step.success[0]) == bool(info["success"])


def test_pictures_are_ogbenchs_own():
    env = make_env(OGBenchConfig(num_envs=1, cameras=("front_pixels",), goals=(2,)))
    obs = env.reset(init=[0])
    # In a process of its own, whose MuJoCo draws by EGL.
    code = """
import sys
from ogbench.manipspace.envs.cube_env import CubeEnv
env = CubeEnv(env_type="single", permute_blocks=False, ob_type="pixels", width=64, height=64, visualize_info=False)
picture, _ = env.reset(options={"task_id": 2}, seed=0)
sys.stdout.buffer.write(picture.tobytes())
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={"MUJOCO_GL": "egl", "PYTHONPATH": ":".join(sys.path), "PATH": ""},
        capture_output=True,
    )
    assert len(done.stdout) == 64 * 64 * 3, done.stderr.decode()[-500:]
    theirs = np.frombuffer(done.stdout, np.uint8).reshape(64, 64, 3).astype(int)
    ours = obs.images["front_pixels"][0].numpy().astype(int)
    assert np.abs(ours - theirs).max() <= 2
    assert ours.std() > 5


def test_goals_are_told_apart():
    for name in SCENES:
        rows = [row for row in list_tasks() if row.group == name]
        assert len(rows) == 5
        # Two goals of puzzle-4x4 and -4x5 are the same end from another beginning.
        assert len({row.instruction for row in rows}) >= 4
    one = make_env(OGBenchConfig(goals=(4,), num_envs=1))
    assert one.spec.tasks == ("cube-single-task4",)
    assert one.reset(init=[7]).instruction == ["put the red cube at the near right"]


def test_fewest_presses_of_lights_out():
    """Against all combinations of presses of three by three buttons."""
    turns = np.zeros((9, 9), int)
    for k in range(9):
        for r, c in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            y, x = k // 3 + r, k % 3 + c
            if 0 <= y < 3 and 0 <= x < 3:
                turns[k, 3 * y + x] = 1
    wanted = np.array([1, 0, 0, 1, 1, 0, 1, 0, 1])
    every = [np.array(list(np.binary_repr(i, 9)), int) for i in range(512)]
    best = min(p.sum() for p in every if ((p @ turns) % 2 == wanted).all())
    found = presses(np.zeros(9, int), wanted, 3)
    assert len(found) == best
    assert (turns[found].sum(0) % 2 == wanted).all()
    assert presses(wanted, wanted, 3) == []


@pytest.mark.parametrize(
    ("task", "expert"),
    [
        ("cube-single", "plan"),
        ("cube-double", "markov"),
        ("scene", "markov"),
        ("puzzle-3x3", "markov"),
    ],
)
def test_oracles_solve_every_goal(task, expert):
    env = make_env(OGBenchConfig(task=task, expert=expert, num_envs=5, split="eval"))
    oracle = env.make_expert()
    env.reset(init=range(5))
    oracle.reset()
    solved = torch.zeros(5, dtype=torch.bool)
    for _ in range(env.spec.max_episode_steps // 10):
        solved |= env.rollout(oracle.act, 10)[0].success
        if solved.all():
            break
    assert solved.all(), dict(zip(env.spec.tasks, solved.tolist(), strict=True))


def test_demonstrations_and_play_become_data_sets(tmp_path):
    config = OGBenchConfig(num_envs=2, goals=(1, 2))
    collect_dataset(config, tmp_path / "solved", num_episodes=2, noise=0.1)
    data = load_demonstrations(tmp_path / "solved", 5, spec=make_env(config).spec)
    assert data.num_episodes == 2 and data.success.all() and data.reward.sum() == 2
    # Play has failures; its reward is that of the task, however it came about.
    play = OGBenchConfig(
        num_envs=2, expert="play", reward="unsolved", max_episode_steps=40, goals=(1,)
    )
    collect_dataset(play, tmp_path / "played", num_episodes=2, keep_failures=True)
    data = load_demonstrations(tmp_path / "played", 5, keep="all", spec=make_env(play).spec)
    assert len(data) == 80 and not data.success.any()
    assert data.reward.tolist() == [-1.0] * 80
    assert data.proprio[:, 19:22].std() > 0.01  # the cube was moved


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "cube-singel"}, "OGBench has no task 'cube-singel'. Did you mean 'cube-single'"),
        ({"task": "ant"}, "Valid names: cube-double, cube-octuple"),
        ({"cameras": ("front_pixel",)}, "no camera 'front_pixel'. Did you mean 'front_pixels'"),
        ({"expert": "markow"}, "no expert='markow'. Did you mean 'markov'"),
        ({"reward": "dense"}, "no reward='dense'. Valid names: sparse, unsolved"),
        ({"split": "test"}, "no split='test'"),
    ],
)
def test_mistakes_are_sentences(settings, said):
    with pytest.raises(UserError) as caught:
        make_env(OGBenchConfig(num_envs=1, **settings))
    assert said in str(caught.value)


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ogbench.manipspace.envs.cube_env", None)
    scene_class.cache_clear()
    with pytest.raises(UserError, match=r"pip install 'embodyrl\[ogbench\]'"):
        OGBenchEnv(OGBenchConfig(num_envs=1))


def test_the_registry_knows_it():
    assert registry.load("envs", "ogbench").Config is OGBenchConfig
    assert len(registry.tasks_module("ogbench").list_tasks()) == 5 * len(SCENES)
