"""Several ManiSkill tasks in one env: each is itself, and all show their states in the same columns."""

import warnings

import pytest
import torch

from embodyrl.config import env_config
from embodyrl.errors import UserError
from embodyrl.sims.maniskill.config import ManiSkillConfig
from embodyrl.sims.maniskill.cpu import CpuEngine
from embodyrl.sims.maniskill.env import make_env
from embodyrl.sims.maniskill.gpu import GpuEngine
from embodyrl.sims.maniskill.layout import Entry, SharedColumns
from embodyrl.sims.maniskill.scenes import TaskScenes
from embodyrl.sims.workers.pool import PooledVecEnv

pytest.importorskip("mani_skill")
warnings.filterwarnings("ignore", module="gymnasium")
TASKS = ("PickCube-v1", "StackCube-v1")


def make(**changes):
    settings = {"task": ",".join(TASKS), "num_envs": 2, "backend": "cpu", "num_workers": 1}
    return make_env(ManiSkillConfig(**settings | changes))


@pytest.fixture(scope="module")
def both():
    env = make(num_envs=3)
    yield env
    env.close()


def test_numbers_of_the_same_name_stand_in_the_same_columns():
    joints, cube, goal, other = (
        Entry(name, n) for name, n in (("qpos", 2), ("cube_pose", 7), ("goal", 3), ("b_pose", 7))
    )
    columns = SharedColumns([(joints, cube, goal), (joints, other, goal, Entry("cube_pose", 3))])
    assert columns.size == 2 + 7 + 3 + 7 + 3
    assert columns.of[0].tolist() == list(range(12))
    assert columns.of[1].tolist() == [0, 1, *range(12, 19), 9, 10, 11, 19, 20, 21]
    assert columns.common == [(joints, 0), (goal, 9)]


def test_every_episode_is_that_of_its_task_alone(both):
    actions = torch.rand(3, 6, 4, generator=torch.Generator().manual_seed(0)) * 2 - 1
    obs = both.reset(init=[4, 5, 7])  # states 2 of the first task, 2 and 3 of the second
    step = both.step(actions)
    assert [text.split()[0] for text in obs.instruction] == ["pick", "put", "put"]
    for task, name in enumerate(TASKS):
        alone = make(task=name, num_envs=1)
        own = both.scenes.state.of[task]
        for k, init in enumerate((4, 5, 7)):
            if init % 2 != task:
                continue
            before = alone.reset(init=[init // 2]).privileged[0]
            after = alone.step(actions[k : k + 1])
            assert torch.equal(obs.privileged[k, own], before)
            assert torch.equal(step.obs.privileged[k, own], after.obs.privileged[0])
            assert torch.equal(step.reward[k], after.reward[0])
            # What the other task alone has is 0.
            rest = torch.ones(both.spec.privileged_dim, dtype=torch.bool)
            rest[own] = False
            assert rest.any() and not step.obs.privileged[k, rest].any()
        alone.close()


def test_an_env_that_changes_its_task_leaves_nothing_behind(both):
    actions = torch.zeros(3, 4, 4) - 0.3
    both.reset(init=[0, 1, 2])
    first = both.step(actions).obs.privileged.clone()
    both.reset(init=[1, 2, 3])
    both.step(actions)
    both.reset([0, 2], init=[3, 5])
    both.reset(init=[0, 1, 2])
    assert torch.equal(both.step(actions).obs.privileged, first)
    # Scenes are shared: no task has more than were needed at once.
    assert all(engine.size <= 3 for engine in both.scenes.engines)


def test_each_task_has_its_own_time_limit_and_success(both):
    assert both.spec.tasks == TASKS and both.spec.task_steps == (40, 50)
    assert both.spec.max_episode_steps == 50
    both.reset(init=[0, 1, 3])
    idle = torch.zeros(3, 60, 4)
    idle[..., 3] = 1.0
    step = both.step(idle)
    assert step.valid.sum(1).tolist() == [40, 50, 50]
    assert step.truncated.all() and not step.success.any()
    # Each task's own expert solves it, and ``success`` is the task's own.
    expert = both.make_expert()
    both.reset(init=[0, 1, 3])
    expert.reset()
    solved = torch.zeros(3, dtype=torch.bool)
    while both._running.any():
        step, _ = both.rollout(expert.act, 5)
        solved |= step.success
    assert solved.all()
    fixed = make(max_episode_steps=7)
    assert fixed.spec.task_steps == () and fixed.spec.max_episode_steps == 7
    fixed.close()


def test_pictures_are_of_the_cameras_that_all_tasks_have():
    env = make(obs="rgb", image_size=16)
    assert list(env.spec.cameras) == ["base_camera"]
    obs = env.reset(init=[0, 1])
    pictures = obs.images["base_camera"].float()
    assert pictures.shape == (2, 16, 16, 3) and pictures.std() > 10
    again = env.reset(init=[1, 0])
    assert torch.equal(again.images["base_camera"].flip(0), obs.images["base_camera"])
    # Without what only the simulator knows, they agree in more of their numbers.
    assert env.spec.proprio_dim < env.spec.privileged_dim
    kinds = {kind for kind, _, _ in env.spec.layout}
    assert kinds == {"hand"}, "only what both have: a goal is no part of StackCube"
    env.close()
    with pytest.raises(UserError, match="PickCube-v1 has no camera 'hand_camera'"):
        make(obs="rgb", image_size=16, cameras=("hand_camera",))


def test_workers_play_the_same_episodes():
    pool, one = make(num_envs=4, num_workers=2), make(num_envs=4)
    assert isinstance(pool, PooledVecEnv) and pool.spec == one.spec
    actions = torch.rand(4, 5, 4, generator=torch.Generator().manual_seed(1)) * 2 - 1
    for inits in ([0, 1, 2, 3], [5, 4, 9, 7]):
        a, b = pool.reset(init=inits), one.reset(init=inits)
        assert torch.equal(a.privileged, b.privileged) and a.instruction == b.instruction
        assert torch.equal(pool.step(actions).obs.privileged, one.step(actions).obs.privileged)
    pool.close()
    one.close()


def test_the_gpu_engines_of_several_tasks_do_what_the_cpu_engines_do():
    """Their code also runs on one CPU scene each."""
    config = ManiSkillConfig(num_envs=1, backend="cpu", task=",".join(TASKS))
    gpu = TaskScenes(config, TASKS, lambda task: GpuEngine(config, task, "cpu"))
    cpu = TaskScenes(config, TASKS, lambda task: CpuEngine(config, task, 1))
    active = torch.ones(1, dtype=torch.bool)
    for task, seed in ((0, 4), (1, 4), (0, 6)):
        for scenes in (gpu, cpu):
            scenes.reset([0], [task], [seed])
        for action in torch.rand(5, 1, 4, generator=torch.Generator().manual_seed(seed)) * 2 - 1:
            a, b = (scenes.step(action, active) for scenes in (gpu, cpu))
            assert a.reward == b.reward and a.success == b.success and not a.fault
            assert all(
                torch.equal(x, y) for x, y in zip(gpu.observe()[:2], cpu.observe()[:2], strict=True)
            )
    gpu.close()
    cpu.close()


def test_tasks_may_be_a_list_and_must_fit_together():
    config = env_config("maniskill", [f"env.task=[{','.join(TASKS)}]"])
    assert config.task == ",".join(TASKS) and config.tasks == TASKS
    with pytest.raises(UserError, match="Did you mean 'StackCube-v1'"):
        make(task="PickCube-v1,StackCub-v1")
    with pytest.raises(UserError, match="names PickCube-v1 twice"):
        make(task="PickCube-v1,PickCube-v1")
    with pytest.raises(UserError, match=r"PickCube-v1 has 4 action dims, and Two.* has 8"):
        make(task="PickCube-v1,TwoRobotPickCube-v1")
    env = make(task="PickCube-v1,RollBall-v1")
    with pytest.raises(UserError, match="no scripted expert for RollBall-v1"):
        env.make_expert()
    env.close()
