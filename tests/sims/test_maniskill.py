"""ManiSkill on the CPU: equal to its own step, reproducible, and clear about what is missing."""

import gc
import os
import subprocess
import sys
import time
import warnings
import weakref
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from embodyrl.env import VecEnv
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.functional.rotations import quaternion_matrices, rotation_vectors
from embodyrl.sims.maniskill import base_env, fast_step, tasks
from embodyrl.sims.maniskill.config import ManiSkillConfig
from embodyrl.sims.maniskill.cpu import COLLECT_EVERY
from embodyrl.sims.maniskill.env import make_env
from embodyrl.sims.workers.pool import PooledVecEnv

pytest.importorskip("mani_skill")
warnings.filterwarnings("ignore", module="gymnasium")


def make(**changes):
    settings = {"num_envs": 2, "backend": "cpu", "num_workers": 1} | changes
    return make_env(ManiSkillConfig(**settings))


@pytest.fixture(scope="module")
def pick():
    env = make()
    yield env
    env.close()


def reference(task, seed, actions, **options):
    """States, rewards and successes of plain ``gymnasium.make`` for one episode."""
    base_env._import_mani_skill(renders=False)
    options = {
        "control_mode": "pd_ee_delta_pos",
        "reward_mode": "sparse",
        "render_backend": "none",
    } | options
    env = gymnasium.make(task, obs_mode="state", sim_backend="physx_cpu", **options)
    obs, _ = env.reset(seed=seed)
    states, rewards, successes = [obs[0]], [], []
    for action in actions:
        obs, reward, terminated, _, info = env.step(action)
        states.append(obs[0])
        rewards.append(float(reward))
        successes.append(bool(info["success"]))
        if bool(terminated):
            break
    env.close()
    return torch.stack(states), torch.tensor(rewards), successes


def busy_actions(steps, dim=4, seed=0):
    """Down to the table, then about, with the gripper opening and closing: plenty of contacts."""
    actions = np.random.default_rng(seed).uniform(-1, 1, (steps, dim)).astype(np.float32)
    actions[:8, 2] = -0.5
    return actions


@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1", "StackCube-v1"])
@pytest.mark.parametrize("reward", ["sparse", "normalized_dense"])
def test_equals_gymnasium_bit_by_bit(task, reward):
    env = make(task=task, num_envs=1, reward=reward, max_episode_steps=30)
    for init in (3, 4):
        actions = busy_actions(28, seed=init)
        states, rewards, successes = reference(task, 2 * init, actions, reward_mode=reward)
        obs = env.reset(init=[init])
        assert torch.equal(obs.privileged[0], states[0])
        for t in range(len(rewards)):
            step = env.step(torch.from_numpy(actions[t])[None, None])
            assert torch.equal(step.obs.privileged[0], states[t + 1]), f"control step {t}"
            assert step.reward[0, 0] == rewards[t]
            assert bool(step.success[0]) == successes[t]
    assert env.scenes.engines[0].envs[0]._controller is not None, "the fast controller gave up"
    env.close()


@pytest.mark.parametrize("mode", ["pd_joint_delta_pos", "pd_joint_pos", "pd_ee_delta_pose"])
def test_other_control_modes_equal_gymnasium(mode):
    env = make(num_envs=1, control_mode=mode, max_episode_steps=20)
    actions = busy_actions(12, dim=env.spec.action_dim)
    states, _, _ = reference(
        "PickCube-v1", 0, env.scenes.native[0](torch.from_numpy(actions)).numpy(), control_mode=mode
    )
    env.reset(init=[0])
    step = env.step(torch.from_numpy(actions)[None])
    torch.testing.assert_close(step.obs.privileged[0], states[-1], rtol=0, atol=0)
    env.close()


def test_same_init_gives_the_same_episode_whatever_ran_before(pick):
    actions = torch.from_numpy(np.stack([busy_actions(20, seed=s) for s in (0, 1)]))
    pick.reset(init=[7, 8])
    first = pick.step(actions).obs.privileged
    for _ in range(3):
        pick.reset()
        pick.step(actions.flip(0))
    pick.reset(init=[8, 7])
    again = pick.step(actions.flip(0)).obs.privileged
    assert torch.equal(first, again.flip(0))


def test_a_pushed_cube_goes_the_same_way_whatever_ran_before():
    """With contacts the last bit grows to centimetres, so nothing may be left of other episodes."""
    env = make(task="PushCube-v1", num_envs=6, max_episode_steps=30)
    expert = env.make_expert(noise=0.5, seed=5)

    def episodes(actions=()):
        env.reset(init=range(6))
        expert.reset()
        states, taken = [], []
        for t in range(29):
            taken.append(actions[t] if len(actions) else expert.act()[:, None])
            states.append(env.step(taken[-1]).obs.privileged)
        return torch.stack(states), taken

    first, actions = episodes()
    assert (first[-1] - first[0])[:, -7:-4].norm(dim=1).max() > 0.05, "no cube was pushed"
    for _ in range(3):
        assert torch.equal(episodes(actions)[0], first)
        env.reset()
        env.step(torch.zeros(6, 5, 4) - 0.3)
    env.close()


def test_a_reset_touches_no_other_env(pick):
    pick.reset(init=[1, 2])
    pick.step(torch.zeros(2, 3, 4))
    before = pick._last_obs.privileged.clone()
    after = pick.reset([1], init=[5]).privileged
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


def test_splits_share_no_state(pick):
    other = make(split="eval", num_envs=1)
    seen = {tuple(pick.reset(init=[i, i + 1]).privileged[0].tolist()) for i in range(6)}
    held_out = {tuple(other.reset(init=[i]).privileged[0].tolist()) for i in range(6)}
    assert len(seen) == len(held_out) == 6
    assert not seen & held_out
    other.close()


def test_is_a_vec_env_and_masks_what_ended(pick):
    assert isinstance(pick, VecEnv)
    pick.reset()
    for _ in range(10):
        step = pick.step(torch.zeros(2, 4, 4))
    assert step.truncated.all() and not step.terminated.any()
    step = pick.step(torch.ones(2, 4, 4))
    assert not step.valid.any()


def test_a_simulation_that_is_not_finite_is_a_fault_and_recovers(pick):
    import sapien

    pick.reset(init=[1, 2])
    good = pick._last_obs.privileged.clone()
    cube = pick.scenes.engines[0].envs[0].base.cube._objs[0]
    cube.pose = sapien.Pose([float("nan")] * 3)
    step = pick.step(torch.zeros(2, 2, 4))
    assert step.fault.tolist() == [True, False]
    assert step.truncated.tolist() == [True, False]
    assert not step.valid[0].any() and step.valid[1].all()
    assert torch.isfinite(step.obs.privileged).all()
    assert torch.equal(pick.reset([0], init=[1]).privileged[0], good[0])


def test_list_of_tasks_needs_no_simulator():
    code = (
        "import sys; from embodyrl.sims.maniskill.tasks import list_tasks; t = list_tasks(); "
        "assert 'sapien' not in sys.modules and 'mani_skill' not in sys.modules; print(len(t))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert int(out.stdout) >= 70
    base_env._import_mani_skill(renders=False)
    from mani_skill.utils.registration import REGISTERED_ENVS

    assert {t.name for t in tasks.list_tasks()} == set(REGISTERED_ENVS)


def test_instructions():
    assert tasks.instruction_for("PickCube-v1") == "pick up the red cube and hold it at the goal"
    assert tasks.instruction_for("MS-CartpoleSwingUp-v1") == "cartpole swing up"
    assert all(t.instruction and t.instruction == t.instruction.strip() for t in tasks.list_tasks())


def test_missing_assets_are_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("MS_ASSET_DIR", str(tmp_path))
    with pytest.raises(MissingDependencyError, match="download_asset ycb"):
        make(task="PickSingleYCB-v1")


def test_no_prompt_on_stdin(tmp_path):
    """ManiSkill asks on stdin for a robot's files; here that is an error, also with a terminal."""
    with pytest.raises(MissingDependencyError, match="download"):
        make(task="PickCube-v1", robot="xarm6_robotiq")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "PickCub-v1"}, "PickCube-v1"),
        ({"obs": "rbg"}, "rgb"),
        ({"reward": "spars"}, "sparse"),
        ({"split": "evaluation"}, "eval"),
        ({"control_mode": "pd_ee_delta_positions"}, "pd_ee_delta_pos"),
        ({"robot": "pandas"}, "panda"),
        ({"task": "MS-CartpoleBalance-v1"}, "control mode"),
        ({"task": "StackPyramid-v1", "reward": "dense"}, "has no reward"),
    ],
)
def test_wrong_values_name_the_right_ones(changes, message):
    with pytest.raises(UserError, match=message):
        make(**changes)


def test_the_gpu_engine_does_what_the_cpu_engine_does():
    """Its code also runs on one CPU scene: equal states and rewards, and ended envs stay."""
    from embodyrl.sims.maniskill.cpu import CpuEngine
    from embodyrl.sims.maniskill.gpu import GpuEngine

    config = ManiSkillConfig(num_envs=1, backend="cpu", reward="dense")
    one, many = CpuEngine(config, config.task, 1), GpuEngine(config, config.task, "cpu")
    actions = torch.from_numpy(busy_actions(15, seed=1))
    active = torch.ones(1, dtype=torch.bool)
    for seed in (11, 12, 11):
        one.reset([0], [seed])
        many.reset([0], [seed])
        assert torch.equal(one.observe()[0], many.observe()[0])
        for action in actions:
            a, b = (engine.step(action[None], active) for engine in (one, many))
            assert a.reward == b.reward and a.success == b.success and not b.fault
        assert torch.equal(one.observe()[0], many.observe()[0])
        assert np.array_equal(one.tool(), many.tool()) and np.array_equal(
            one.pose("cube"), many.pose("cube")
        )
        last = many.observe()[0]
        many.step(actions[:1], ~active)
        assert torch.equal(many.observe()[0], last)
    one.close()
    many.close()


@pytest.mark.gpu
def test_gpu_back_end():
    env = make(num_envs=16, backend="gpu", max_episode_steps=8)
    first = env.reset(init=list(range(16))).privileged
    actions = torch.from_numpy(busy_actions(16 * 8).reshape(16, 8, 4))
    step = env.step(actions)
    assert step.truncated.all() and torch.isfinite(step.obs.privileged).all()
    again = env.reset([3, 5], init=[5, 3]).privileged
    torch.testing.assert_close(again[[3, 5]], first[[5, 3]], rtol=0, atol=1e-5)
    assert torch.equal(again[0], step.obs.privileged[0])
    env.close()


@pytest.mark.parametrize(
    ("task", "floor"), [("PickCube-v1", 0.95), ("PushCube-v1", 0.95), ("PullCube-v1", 0.95)]
)
def test_experts(task, floor, monkeypatch):
    trusted = fast_step.far_from_success
    answers = []

    def checked(base, name):
        far = trusted(base, name)
        answers.append(far)
        assert not (far and bool(base.evaluate()["success"]))
        return far

    monkeypatch.setattr(fast_step, "far_from_success", checked)
    env = make(task=task, num_envs=4, split="eval")
    expert = env.make_expert()
    successes = 0
    for first in range(0, 20, 4):
        env.reset(init=list(range(first, first + 4)))
        expert.reset()
        running = torch.ones(4, dtype=torch.bool)
        while running.any():
            step, actions = env.rollout(expert.act, 4)
            successes += int(step.success.sum())
            running &= ~step.done
            assert actions.abs().max() <= 1
    assert successes / 20 >= floor
    assert sum(answers) > len(answers) / 2  # it spares most calls, and not all
    assert successes <= len(answers) - sum(answers)
    env.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["StackCube-v1", "PlaceSphere-v1"])
def test_experts_that_release(task, monkeypatch):
    test_experts(task, 0.9, monkeypatch)


def test_a_peg_is_turned_to_its_hole_and_inserted():
    env = make(task="PegInsertionSide-v1", num_envs=8, control_mode="pd_ee_delta_pose")
    expert = env.make_expert()
    env.reset(init=list(range(8)))
    expert.reset()
    solved = torch.zeros(8, dtype=torch.bool)
    for _ in range(25):
        solved |= env.rollout(expert.act, 4)[0].success
    assert solved.sum() >= 7
    env.close()


def test_turns_have_the_sign_and_size_that_the_conventions_say():
    env = make(num_envs=1, control_mode="pd_ee_delta_pose")
    env.reset(init=[0])
    before = quaternion_matrices(env.scenes.engines[0].tool()[:, 3:])
    actions = torch.zeros(1, 10, 7)
    actions[:, :, 5] = 0.5
    env.step(actions)
    turn = rotation_vectors(
        quaternion_matrices(env.scenes.engines[0].tool()[:, 3:]) @ before.swapaxes(1, 2)
    )
    asked = 10 * 0.5 * env.spec.conventions.scale[5]
    # The arm lags, so it has not made all of the turn.
    assert 0.3 < turn[0, 2] / asked < 1.01 and np.abs(turn[0, :2]).max() < 0.1 * abs(asked)
    env.close()


def test_scenes_that_are_built_anew_do_not_pile_up():
    env = make(task="PegInsertionSide-v1", num_envs=1, control_mode="pd_ee_delta_pose")
    kept = []
    for _ in range(3 * COLLECT_EVERY):
        env.reset()
        kept.append(weakref.ref(env.scenes.engines[0].base.scene))
    assert len({id(scene()) for scene in kept if scene() is not None}) <= COLLECT_EVERY + 1
    env.close()


def test_an_episode_does_not_depend_on_a_grasp_before_it():
    env = make(num_envs=1)
    expert = env.make_expert()

    def episode(init, steps):
        start = env.reset(init=[init]).privileged
        expert.reset()
        return [start] + [env.rollout(expert.act, 2)[0].obs.privileged for _ in range(steps)]

    first = episode(3, 6)
    episode(4, 6)
    assert (
        env.scenes.engines[0].envs[0].base.get_info()["is_grasped"].item()
    )  # it ends with a cube between the fingers
    assert all(torch.equal(a, b) for a, b in zip(first, episode(3, 6), strict=True))
    env.close()


def test_contacts_of_the_last_episode_are_forgotten():
    """Touch sensors are part of this task's state, and its episodes begin in the hand."""
    env = make(task="RotateSingleObjectInHandLevel0-v1", control_mode="", num_envs=1)

    def episode(init):
        return env.reset(init=[init]).privileged, env.step(
            torch.zeros(1, 3, env.spec.action_dim)
        ).obs.privileged

    first = episode(1)
    episode(2)
    again = episode(1)
    assert torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])
    env.close()


@pytest.mark.parametrize(
    "task, rgb", [("PushCube-v1", True), ("PickCube-v1", False), ("StackCube-v1", True)]
)
def test_the_layout_says_where_hand_and_objects_are(task, rgb):
    env = make(task=task, num_workers=1, **({"obs": "rgb", "image_size": 16} if rgb else {}))
    obs = env.reset(init=[2, 5])
    body = torch.cat([obs.proprio, obs.privileged], dim=1)
    found = {}
    for kind, start, numbers in env.spec.layout:
        assert numbers == (7 if kind in ("hand", "object") else 3)
        found.setdefault(kind, []).append(body[:, start : start + 3].numpy())
    tool = env.scenes.engines[0].tool()[:, :3]
    assert all(np.allclose(hand, tool, atol=1e-6) for hand in found["hand"])
    names = {"PushCube-v1": ["obj"], "PickCube-v1": ["cube"], "StackCube-v1": ["cubeA", "cubeB"]}[
        task
    ]
    objects = found["object"][: len(names)]
    assert all(
        np.array_equal(p, env.scenes.engines[0].pose(n)[:, :3])
        for p, n in zip(objects, names, strict=True)
    )
    assert len(found["hand"]) == 2 and len(found["object"]) == (
        len(names) if rgb else 2 * len(names)
    )
    assert ("mark" in found) == (task != "StackCube-v1")
    env.close()


def test_no_expert_is_a_sentence():
    env = make(task="RollBall-v1", num_envs=1)
    with pytest.raises(UserError, match="no scripted expert"):
        env.make_expert()
    env.close()
    env = make(control_mode="pd_joint_delta_pos", num_envs=1)
    with pytest.raises(UserError, match="pd_ee_delta_pos"):
        env.make_expert()
    env.close()


def make_rgb(**changes):
    """An env with images; a machine that cannot draw tests the message that says so."""
    try:
        return make(obs="rgb", image_size=64, **changes)
    except MissingDependencyError as error:
        assert "install_vulkan.sh" in str(error)
        pytest.skip("no Vulkan driver here; the sentence about it was checked")


@pytest.mark.parametrize("task", ["PickCube-v1", "PushCube-v1"])
def test_images_and_proprio_equal_gymnasium(task):
    env = make_rgb(task=task, num_envs=1)
    plain = gymnasium.make(
        task, obs_mode="rgb", control_mode="pd_ee_delta_pos",
        sim_backend="physx_cpu", render_backend="cpu",
        sensor_configs={"width": 64, "height": 64},
    )  # fmt: skip
    expected, _ = plain.reset(seed=6)
    obs = env.reset(init=[3])
    actions = busy_actions(6)
    for h in range(7):
        image = obs.images["base_camera"]
        assert (
            image.shape == (1, 64, 64, 3)
            and image.dtype == torch.uint8
            and image.float().std() > 10
        )
        assert torch.equal(image, expected["sensor_data"]["base_camera"]["rgb"])
        leaves = [*expected["agent"].values(), *expected["extra"].values()]
        assert torch.equal(
            obs.proprio, torch.cat([leaf.float().reshape(1, -1) for leaf in leaves], dim=1)
        )
        assert obs.privileged.shape[1] > obs.proprio.shape[1]
        if h < 6:
            obs = env.step(torch.from_numpy(actions[h])[None, None]).obs
            expected, *_ = plain.step(actions[h])
    env.close()
    plain.close()


def test_a_second_env_does_not_compile_its_shaders_anew():
    """That takes some 12 s of one core."""
    make_rgb(num_envs=1).close()
    gc.collect()
    began = time.process_time()
    make_rgb(num_envs=1).close()
    assert time.process_time() - began < 5.0


def test_cameras_are_chosen_by_name():
    env = make_rgb(robot="panda_wristcam", cameras=("hand_camera",), num_envs=1)
    assert env.spec.cameras == {"hand_camera": (64, 64)}
    env.close()
    with pytest.raises(UserError, match="hand_camera"):
        make_rgb(robot="panda_wristcam", cameras=("hand_cam",), num_envs=1)


def test_without_a_driver_state_works_and_images_are_a_sentence():
    code = (
        "from embodyrl.sims.maniskill.config import ManiSkillConfig as C\n"
        "from embodyrl.sims.maniskill.env import make_env as E\n"
        "from embodyrl.errors import MissingDependencyError\n"
        "assert E(C(num_envs=1, backend='cpu')).reset().proprio.isfinite().all()\n"
        "try: E(C(num_envs=1, backend='cpu', obs='rgb'))\n"
        "except MissingDependencyError as error: print(error)\n"
    )
    nowhere = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **nowhere},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "install_vulkan.sh" in done.stdout, done.stderr[-2000:]


def test_the_install_script_says_how_things_stand():
    script = Path(__file__).parents[2] / "scripts" / "install_vulkan.sh"
    done = subprocess.run(
        ["sh", str(script), "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (0, 3) and done.stdout.startswith("vulkan: ")
    assert (
        subprocess.run(["sh", str(script), "--help"], capture_output=True, timeout=60).returncode
        == 2
    )


def test_in_a_pool_of_workers():
    pool = make(num_envs=4, split="eval", num_workers=2)
    assert isinstance(pool, PooledVecEnv)
    single = make(num_envs=4, split="eval")
    assert pool.spec == single.spec
    obs = pool.reset(init=[0, 1, 2, 3])
    assert torch.equal(obs.privileged, single.reset(init=[0, 1, 2, 3]).privileged)
    expert, alone = pool.make_expert(noise=0.1, seed=5), single.make_expert(noise=0.1, seed=5)
    expert.reset()
    alone.reset()
    for _ in range(5):
        step, actions = expert.rollout(4)
        expected, same = single.rollout(alone.act, 4)
        assert torch.equal(actions[step.valid], same[expected.valid])
        assert torch.equal(step.obs.privileged, expected.obs.privileged)
    pool.close()
    single.close()
