"""The batched physics against MuJoCo's own: a chunk leads to the same states but for rounding."""

import importlib.util

import numpy as np
import pytest
import torch

from embodyrl.checks import check_env
from embodyrl.errors import UserError
from embodyrl.sims.mujoco import optional_imports, physics, scene
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv

BACKENDS = [
    pytest.param(
        "warp",
        marks=pytest.mark.skipif(
            not importlib.util.find_spec("mujoco_warp"), reason="not installed"
        ),
    ),
    pytest.param(
        "mjx", marks=pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="not installed")
    ),
]


def make_env(backend, task="pick", num_envs=2, **settings):
    return MujocoEnv(
        MujocoConfig(
            num_envs=num_envs,
            task=task,
            renderer="none",
            backend=backend,
            num_threads=1,
            **settings,
        )
    )


@pytest.mark.slow  # compiling takes a minute the first time
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_grasp_is_the_same_but_for_single_precision(backend):
    """The scripted expert goes to a block, grasps it and lifts it, with contacts all the time."""
    native, other = make_env("native"), make_env(backend)
    expert = native.make_expert()
    native.reset(init=[3, 4])
    other.reset(init=[3, 4])
    expert.reset()
    worst, success = 0.0, torch.zeros(2, dtype=torch.bool)
    for _ in range(6):
        step, actions = native.rollout(expert.act, 5)
        again = other.step(actions)
        worst = max(worst, (step.obs.privileged - again.obs.privileged).abs().max().item())
        assert torch.equal(step.valid, again.valid) and torch.equal(step.success, again.success)
        success |= step.success
    assert success.any() and worst < 1e-2  # metres and radians, after a second of contacts
    # Only one row: the other world must stay where it is.
    before = other.reset(init=[5, 6]).privileged[1].clone()
    assert torch.equal(other.reset([0], init=[7]).privileged[1], before)
    check_env(other)
    other.close()


def test_more_worlds_than_memory_holds_are_refused_with_the_number_that_fits():
    with pytest.raises(
        UserError, match=r"env.num_envs=100 worlds need 0.1 GiB, and 0.0 are free: at most 9 fit"
    ):
        physics.check_fits(100, 2**20, 9 * 2**20 + 5)
    physics.check_fits(9, 2**20, 9 * 2**20)


def test_the_memory_of_worlds_is_counted_from_their_arrays():
    pytest.importorskip("mujoco_warp")
    mjw, _ = optional_imports.import_warp()
    model = scene.build_scene(1, False)
    one, two = (
        physics.array_bytes(mjw.make_data(model, nworld=n, nconmax=8, njmax=16)) for n in (1, 2)
    )
    matrices = 4 * (
        3 * 3 * model.nbody + 16 * model.nv
    )  # of bodies' rotations and of the constraints' Jacobian
    assert matrices < two - one < 100 * matrices


def test_what_a_backend_cannot_do_is_a_sentence():
    def put():
        raise NotImplementedError("Sensor plugins not supported.")

    with pytest.raises(
        UserError, match=r"env.backend=mjx cannot simulate this scene: Sensor plugins.*native"
    ):
        physics.supported("mjx", put)
    with pytest.raises(UserError, match=r"no backend 'wrap'.*'warp'"):
        make_env("wrap")


def test_native_physics_is_plain_mujoco():
    import mujoco

    model = scene.build_scene(1, True)
    engine = physics.NativePhysics(model, 3, 8, 1)
    state = np.zeros((2, 1 + model.nq + model.nv))
    state[:, 1 : 1 + model.nq] = model.qpos0
    rng = np.random.default_rng(0)
    control = np.concatenate(
        [rng.uniform(0, 0.04, (2, 8, model.nu)), rng.uniform(0, 1, (2, 1, 9)).repeat(8, 1)], axis=2
    )
    after = engine.advance(np.array([0, 2]), state, control)
    for k in range(2):
        data = mujoco.MjData(model)
        data.qpos[:] = state[k, 1 : 1 + model.nq]
        data.mocap_pos[:] = control[k, 0, model.nu :].reshape(-1, 3)
        for u in control[k]:
            data.ctrl[:] = u[: model.nu]
            mujoco.mj_step(model, data)
        assert np.array_equal(after[k], np.concatenate([[data.time], data.qpos, data.qvel]))
    engine.close()
    engine.close()
