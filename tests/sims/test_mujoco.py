"""The MuJoCo env: kinematics against MuJoCo's own, determinism, isolation, faults, splits."""

import itertools

import mujoco
import numpy as np
import pytest
import torch

from embodyrl.checks import check_env
from embodyrl.env import InvalidActionError
from embodyrl.errors import UserError
from embodyrl.sims.mujoco import kinematics, layouts, scene, tasks
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv

ALL_TASKS = ",".join(tasks.TASKS)


def state_env(num_envs: int, **settings) -> MujocoEnv:
    return MujocoEnv(MujocoConfig(num_envs=num_envs, renderer="none", **settings))


def random_actions(num_envs: int, chunks: int, dim: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    actions = torch.rand(chunks, num_envs, 5, dim, generator=generator) * 2 - 1
    actions[..., 2] -= 0.3  # downwards, into the blocks
    return actions.clamp(-1, 1)


def test_forward_kinematics_and_jacobian_agree_with_mujoco():
    model = scene.build_scene(num_blocks=0, drawer=False)
    data, site = mujoco.MjData(model), model.site("ee").id
    q = np.random.default_rng(0).uniform(kinematics.JOINT_LOWER, kinematics.JOINT_UPPER, (32, 7))
    position, rotation, jacobian = kinematics.forward(q)
    for i in range(32):
        data.qpos[:7] = q[i]
        mujoco.mj_forward(model, data)
        linear, angular = np.zeros((3, model.nv)), np.zeros((3, model.nv))
        mujoco.mj_jacSite(model, data, linear, angular, site)
        np.testing.assert_allclose(position[i], data.site_xpos[site], atol=1e-8)
        np.testing.assert_allclose(rotation[i], data.site_xmat[site].reshape(3, 3), atol=1e-8)
        np.testing.assert_allclose(jacobian[i], np.vstack([linear, angular])[:, :7], atol=1e-8)


def test_joint_limits_are_the_models():
    model = scene.build_scene(num_blocks=0, drawer=False)
    np.testing.assert_array_equal(
        model.jnt_range[:7], np.stack([kinematics.JOINT_LOWER, kinematics.JOINT_UPPER], 1)
    )


def test_ik_reaches_the_workspace_within_joint_limits():
    grid = np.array(
        list(itertools.product((0.3, 0.45, 0.65), (-0.25, 0.0, 0.25), (0.01, 0.2, 0.4)))
    )
    down = np.broadcast_to(kinematics.DOWN, (len(grid), 3, 3))
    q = kinematics.solve(grid, down)
    position, rotation, _ = kinematics.forward(q)
    assert np.abs(position - grid).max() < 1e-3
    assert np.abs(rotation - down).max() < 1e-3
    assert (q >= kinematics.JOINT_LOWER).all() and (q <= kinematics.JOINT_UPPER).all()


def test_rotation_error_inverts_the_exponential():
    vector = np.random.default_rng(0).normal(size=(64, 3))
    vector *= np.linspace(1e-9, 3.0, 64)[:, None] / np.linalg.norm(vector, axis=1, keepdims=True)
    eye = np.broadcast_to(np.eye(3), (64, 3, 3))
    np.testing.assert_allclose(
        kinematics.rotation_error(kinematics.exp_rotation(vector), eye), vector, atol=1e-7
    )


def test_the_hand_follows_the_command():
    env = state_env(4)
    env.reset(init=range(4))
    start = env.view().ee
    right = torch.zeros(4, 5, 4)
    right[..., 1] = 1.0
    env.step(right)
    env.step(torch.zeros(4, 5, 4))
    env.step(torch.zeros(4, 5, 4))
    moved = env.view().ee - start
    np.testing.assert_allclose(moved, np.tile([0, 5 * 0.035, 0], (4, 1)), atol=3e-3)


def test_pose_control_turns_the_hand_and_holds_its_place():
    env = state_env(2, control_mode="ee_delta_pose")
    before = env.reset(init=[0, 1]).proprio
    turn = torch.zeros(2, 3, 7)
    turn[..., 5], turn[..., -1] = 1.0, 1.0
    env.step(turn)
    hold = torch.zeros(2, 10, 7)
    hold[..., -1] = 1.0
    after = env.step(hold).obs.proprio
    assert after.shape == (2, env.spec.proprio_dim)
    torch.testing.assert_close(after[:, :3], before[:, :3], atol=2e-3, rtol=0)
    torch.testing.assert_close(
        after[:, 6:9], torch.tensor([[0.0, 0.0, 0.45]] * 2), atol=0.01, rtol=0
    )


def rollout(env: MujocoEnv, inits: list[int], rows: list[int]) -> list[torch.Tensor]:
    """Everything env ``rows`` of the action tape do from ``inits``: a (n, D) tensor per chunk."""
    tape = random_actions(8, 8)
    obs = env.reset(init=inits)
    out = [torch.cat([obs.proprio, obs.privileged], 1)]
    for actions in tape:
        step = env.step(actions[rows])
        out.append(torch.cat([step.obs.proprio, step.obs.privileged, step.reward, step.valid], 1))
    return out


def test_an_episode_is_bit_identical_whatever_runs_beside_it():
    whole = rollout(state_env(8, task=ALL_TASKS), list(range(8)), list(range(8)))
    order = [5, 2, 7]
    some = rollout(state_env(3, task=ALL_TASKS), order, order)
    one = rollout(state_env(1, task=ALL_TASKS, num_threads=1), [6], [6])
    for all_rows, three_rows, one_row in zip(whole, some, one, strict=True):
        assert torch.equal(all_rows[order], three_rows)
        assert torch.equal(all_rows[[6]], one_row)


def test_a_reset_touches_no_other_env():
    env = state_env(4)
    env.reset(init=range(4))
    tape = random_actions(4, 4)
    env.step(tape[0])
    before = env._state.copy()
    env.reset([2], init=[9])
    others = [0, 1, 3]
    np.testing.assert_array_equal(env._state[others], before[others])
    assert not np.array_equal(env._state[2], before[2])


def test_splits_share_no_states_and_repeat_themselves():
    drawn = {}
    for split in tasks.SPLITS:
        env = state_env(16, split=split)
        env.reset(init=range(16))
        drawn[split] = env._state.copy()
        env.reset(init=range(16))
        np.testing.assert_array_equal(env._state, drawn[split])
    for one, other in itertools.combinations(drawn, 2):
        a, b = drawn[one][:, 1:8], drawn[other][:, 1:8]
        assert (np.abs(a[:, None] - b[None]).max(-1) > 1e-6).all(), (
            f"{one} and {other} share an initial state"
        )


def test_out_of_distribution_positions_lie_outside_the_training_region():
    for init in range(50):
        spots = layouts.sample(tasks.TASKS["pick"], "ood_position", init, 3, 2, 3).blocks
        spots = spots[spots[:, 0] > 0, :2]
        assert not ((spots > layouts.USUAL.low) & (spots < layouts.USUAL.high)).all(axis=1).any()


def test_instructions_name_the_target_and_are_paraphrased_out_of_distribution():
    train = layouts.sample(tasks.TASKS["pick"], "train", 3, 3, 2, 3)
    other = layouts.sample(tasks.TASKS["pick"], "ood_language", 3, 3, 2, 3)
    assert train.instruction == f"pick up the {train.colours[0]} block"
    assert other.instruction == f"grasp the {other.colours[0]} cube and raise it"


def test_every_named_colour_is_asked_for():
    env = state_env(64)
    asked = set(env.reset(init=range(64)).instruction)
    assert asked == {f"pick up the {colour} block" for colour in layouts.PALETTE}


@pytest.mark.parametrize("value", [float("nan"), 1e9])
def test_an_exploded_simulation_is_a_masked_fault(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # MuJoCo writes MUJOCO_LOG.TXT where it stands
    env, quiet = state_env(3), state_env(3)
    tape = random_actions(3, 2)
    for e in (env, quiet):
        e.reset(init=[0, 1, 2])
        e.step(tape[0])
    env._state[1, 1 + env.model.nq + 10] = value
    step, normal = env.step(tape[1]), quiet.step(tape[1])
    assert step.fault.tolist() == [False, True, False]
    assert step.truncated.tolist() == [False, True, False]
    assert not step.valid[1].any() and step.reward[1].abs().sum() == 0
    assert torch.isfinite(step.obs.proprio).all() and torch.isfinite(step.obs.privileged).all()
    for row in (0, 2):
        assert torch.equal(step.obs.privileged[row], normal.obs.privileged[row])
    again = env.reset([1], init=[1])
    assert torch.equal(again.privileged[1], state_env(3).reset(init=[0, 1, 2]).privileged[1])


def test_lifting_the_wrong_block_is_no_success():
    at = np.array([[[0.5, 0.1, scene.BLOCK_HALF], [0.5, -0.1, 0.2]]])
    hand = np.array([[0.5, -0.1, 0.2]])
    nothing = np.zeros((1, 3))
    view = tasks.View(
        ee=hand, opening=np.zeros(1), blocks=at, goal=nothing, handle=nothing, drawer=np.zeros(1)
    )
    assert not tasks.TASKS["pick"].success(view)[0]
    view.blocks = at[:, ::-1]
    assert tasks.TASKS["pick"].success(view)[0]


def put_back_view(**changes):
    """A block that lies in its quarter, the far left one, with the hand above it."""
    at = {
        "block": (0.55, 0.1, scene.BLOCK_HALF),
        "other": (0.42, -0.1, scene.BLOCK_HALF),
        "hand": (0.55, 0.1, 0.12),
        "opening": 0.08,
    } | changes
    nothing = np.zeros((1, 3))
    return tasks.View(
        ee=np.array([at["hand"]]),
        opening=np.array([at["opening"]]),
        blocks=np.array([[at["block"], at["other"]]]),
        goal=np.array([[0.5, 0.02, 0.001]]),
        handle=nothing,
        drawer=np.zeros(1),
    )


@pytest.mark.parametrize(
    ("changes", "solved"),
    [
        ({}, True),
        ({"block": (0.46, 0.1, scene.BLOCK_HALF)}, False),  # near, not far
        ({"block": (0.55, -0.1, scene.BLOCK_HALF)}, False),  # right, not left
        ({"block": (0.62, 0.1, scene.BLOCK_HALF)}, False),  # outside the region
        ({"block": (0.55, 0.1, 0.06)}, False),  # in the air
        ({"other": (0.55, 0.04, scene.BLOCK_HALF)}, False),  # no room for the fingers
        ({"hand": (0.55, 0.1, 0.05)}, False),
        ({"opening": 0.048}, False),
    ],
)
def test_a_block_is_back_only_in_its_quarter_and_let_go(changes, solved):
    assert tasks.TASKS["put_back"].success(put_back_view(**changes))[0] == solved


def test_put_back_begins_as_pick_ends_and_names_the_goals_quarter():
    env = state_env(64, task="put_back", split="eval")
    env.reset(init=range(64))
    held = tasks.TASKS["pick"].success(env.view())
    assert 0.6 < held.mean() < 0.9  # the others lie where pick may have lost them
    middle = (scene.REGION_LOW + scene.REGION_HIGH) / 2
    for k in range(64):
        far, left = env.view().goal[k, :2] > middle
        words = f"{'far' if far else 'near'} {'left' if left else 'right'}"
        assert env.instructions[k].endswith(f"back on the {words}")
    # Held blocks stay in the hand while it is told to stay closed.
    still = torch.zeros(64, 10, 4)
    env.step(still)
    assert (tasks.TASKS["pick"].success(env.view()) == held).all()


def test_a_task_that_undoes_another_has_its_code_with_the_other_sign():
    codes = {}
    for task in ("pick", "put_back"):
        env = state_env(1, task=task)
        codes[task] = env.reset(init=[0]).privileged[0, -5:]
    assert codes["pick"].tolist() == [0, 0, 1, 0, 0]
    assert torch.equal(codes["put_back"], -codes["pick"])
    assert tasks.counterpart("pick") == "put_back" and tasks.counterpart("put_back") == "pick"
    assert tasks.counterpart("push") == ""


def test_dense_reward_is_the_change_of_a_potential():
    env = state_env(8, reward="dense", terminate_on_success=False, max_episode_steps=1000)
    env.reset(init=range(8))
    first = env._potential.copy()
    total = np.zeros(8)
    for actions in random_actions(8, 4):
        step = env.step(actions)
        total += step.reward.sum(1).numpy()
    assert not step.success.any()
    np.testing.assert_allclose(total, env._potential - first, atol=1e-5)


@pytest.mark.parametrize("task", ["pick", "push", "open_drawer", "pick,stack,push"])
def test_the_layout_says_where_hands_objects_and_marks_are(task):
    env = state_env(3, task=task)
    env.reset(init=[1, 2, 3])
    obs = env.step(random_actions(3, 4)[0]).obs
    body, view = torch.cat([obs.proprio, obs.privileged], dim=1).numpy(), env.view()
    found = {}
    for kind, start, numbers in env.spec.layout:
        assert numbers == 3
        found.setdefault(kind, []).append(body[:, start : start + 3])
    hand, commanded, again = found["hand"]
    assert (
        np.allclose(hand, view.ee)
        and np.array_equal(hand, again)
        and np.allclose(commanded, env.commanded)
    )
    blocks = {"pick": 2, "push": 1, "open_drawer": 0, "pick,stack,push": 1}[task]
    places = [*view.blocks.swapaxes(0, 1)[:blocks], *[view.handle] * (task == "open_drawer")]
    assert np.allclose([seen + hand for seen in found["relative"]], places, atol=1e-6)
    assert all(np.allclose(seen + hand, view.goal, atol=1e-6) for seen in found.get("mark", []))
    assert ("mark" in found) == (task == "push")
    env.close()


def test_the_privileged_state_does_not_tell_the_time():
    """At the time limit the critic would be asked about a state that it was never trained on."""
    short, long = state_env(1, max_episode_steps=10), state_env(1, max_episode_steps=40)
    for env in (short, long):
        env.reset(init=[0])
    actions = torch.zeros(1, 5, 4)
    assert torch.equal(short.step(actions).obs.privileged, long.step(actions).obs.privileged)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"task": "pck"}, "Did you mean 'pick'"),
        ({"split": "evla"}, "Did you mean 'eval'"),
        ({"cameras": ("frnt",)}, "Did you mean 'front'"),
        ({"renderer": "wrap"}, "Did you mean 'warp'"),
        ({"control_mode": "joint"}, "control mode"),
        ({"renderer": "opengl", "render_batch": 4}, "env.render_batch is 4, but renderer=opengl"),
    ],
)
def test_a_wrong_setting_is_named(settings, words):
    with pytest.raises(UserError, match=words):
        MujocoEnv(MujocoConfig(**({"num_envs": 1} | settings)))


def test_bad_actions_are_refused():
    env = state_env(2)
    env.reset(init=[0, 1])
    bad = torch.zeros(2, 5, 4)
    bad[1, 2, 0] = float("nan")
    with pytest.raises(InvalidActionError, match=r"\[1\]"):
        env.step(bad)


@pytest.mark.parametrize(
    "settings",
    [
        {"task": "pick"},
        {"task": ALL_TASKS, "reward": "dense", "renderer": "none"},
        {
            "task": ALL_TASKS,
            "cameras": ("wrist", "front"),
            "control_mode": "ee_delta_pose",
            "split": "ood_clutter",
        },
    ],
)
def test_it_keeps_the_promises_of_the_api(settings):
    env = MujocoEnv(MujocoConfig(num_envs=6, **settings))
    check_env(env)
    env.close()
    env.close()
