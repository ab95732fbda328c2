"""Gymnasium envs of other people: spaces, rewards, success and errors of every usual kind."""

import re

import numpy as np
import pytest
import torch
from gymnasium.spaces import (
    Box,
    Dict,
    Discrete,
    Graph,
    MultiBinary,
    MultiDiscrete,
    Sequence,
    Text,
    Tuple,
)
from people_envs import LIMIT  # which registers the envs

from embodyrl.build import make_env
from embodyrl.checks import check_env
from embodyrl.config import resolve
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.sims.gymnasium.bridge import FromGymnasium
from embodyrl.sims.gymnasium.env import GymnasiumConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_from_json, spec_to_json
from embodyrl.training.evaluate import score_text
from embodyrl.training.runner import train
from embodyrl.types import ActionSample

RGB = np.random.default_rng(0).integers(0, 256, (16, 24, 3)).astype(np.uint8)
CHW = np.moveaxis(RGB, -1, 0)
GREY = RGB[..., 0]
GREY3 = np.repeat(GREY[..., None], 3, axis=2)
UNIT = (RGB / 255).astype(np.float32)


def people(name, num_envs=2, **settings):
    return make_env(GymnasiumConfig(id=f"people_envs:{name}-v0", num_envs=num_envs, **settings))


def bridge(name, num_envs=1, **kwargs):
    options = {"disable_env_checker": True, **kwargs}
    return FromGymnasium(f"{name}-v0", EnvConfig(num_envs=num_envs), **options)


class Idle:
    """Does nothing, in chunks of 4."""

    def __init__(self, env):
        self.dim = env.spec.action_dim

    def sample(self, obs, *, generator, mode):
        return ActionSample(torch.zeros(len(obs), 4, self.dim))


# ---- Observations.

PICTURES = {
    "uint8": (Box(0, 255, RGB.shape, np.uint8), RGB, RGB),
    "channels first": (Box(0, 255, CHW.shape, np.uint8), CHW, RGB),
    "grey": (Box(0, 255, GREY.shape, np.uint8), GREY, GREY3),
    "grey with a channel": (Box(0, 255, (16, 24, 1), np.uint8), GREY[..., None], GREY3),
    "grey, channel first": (Box(0, 255, (1, 16, 24), np.uint8), GREY[None], GREY3),
    "floats to 1": (Box(0, 1, RGB.shape, np.float32), UNIT, RGB),
    "floats to 255": (Box(0, 255, RGB.shape, np.float32), RGB.astype(np.float32), RGB),
    "floats, channels first": (Box(0, 1, CHW.shape, np.float64), np.moveaxis(UNIT, -1, 0), RGB),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_are_cameras(kind):
    space, shown, seen = PICTURES[kind]
    env = bridge("Shows", space=space, value=shown)
    assert env.spec.cameras == {"image": (16, 24)} and env.spec.privileged_dim == 0
    for obs in (env.reset(init=[0]), env.step(torch.zeros(1, 2, 1)).obs):
        assert torch.equal(obs.images["image"][0], torch.from_numpy(seen))
        assert obs.proprio.tolist() == [[0.0]] and obs.privileged is None


NUMBERS = {
    "flat": (Box(-1, 1, (2,)), np.array([0.5, -0.5]), [0.5, -0.5]),
    "two axes": (Box(-9, 9, (2, 2)), np.eye(2), [1, 0, 0, 1]),
    "one": (Box(-1, 1, ()), np.float32(0.5), [0.5]),
    "bytes": (Box(0, 255, (3,), np.uint8), np.array([1, 2, 255], np.uint8), [1, 2, 255]),
    "a small board": (Box(0, 1, (3, 3), np.uint8), np.eye(3, dtype=np.uint8), [1, 0, 0, 0, 1, 0, 0, 0, 1]),
    "Discrete": (Discrete(3), 2, [0, 0, 1]),
    "Discrete from 5": (Discrete(3, start=5), np.int64(6), [0, 1, 0]),
    "MultiDiscrete": (MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0]),
    "MultiBinary": (MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1]),
    "Tuple": (Tuple([Discrete(2), Box(-1, 1, (1,))]), (1, np.array([0.5])), [0, 1, 0.5]),
    "tensors": (Box(-1, 1, (2,)), torch.tensor([0.5, -0.5]), [0.5, -0.5]),
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_are_proprioception(kind):
    space, shown, seen = NUMBERS[kind]
    env = bridge("Shows", space=space, value=shown)
    obs = env.reset(init=[0])
    assert obs.proprio.tolist() == [seen] and obs.privileged.tolist() == [seen]
    assert env.spec.proprio_dim == len(seen) and env.spec.cameras == {}


def test_a_dict_is_read_entry_by_entry_and_by_name():
    space = Dict(
        pixels=Dict({"front": Box(0, 255, RGB.shape, np.uint8), "wrist/rgb": Box(0, 1, CHW.shape)}),
        agent=Dict(qpos=Box(-1, 1, (2,)), gripper=Discrete(2)),
        instruction=Text(99),
    )
    value = {
        "pixels": {"front": RGB, "wrist/rgb": np.moveaxis(UNIT, -1, 0)},
        "agent": {"qpos": np.array([0.1, 0.2], np.float32), "gripper": 1},
        "instruction": "open the drawer",
    }
    env = bridge("Shows", space=space, value=value)
    assert env.spec.cameras == {"pixels_front": (16, 24), "pixels_wrist_rgb": (16, 24)}
    assert spec_from_json(spec_to_json(env.spec)) == env.spec
    obs = env.reset(init=[0])
    assert obs.instruction == ["open the drawer"]
    assert env.reader.numbers == {"agent_qpos": (0, 2), "agent_gripper": (2, 2)}
    assert obs.proprio.tolist() == [pytest.approx([0.1, 0.2, 0, 1])]
    for name in env.spec.cameras:
        assert torch.equal(obs.images[name][0], torch.from_numpy(RGB))


def test_goals_are_numbers_with_a_name():
    env = people("Goal")
    where = env.reader.numbers
    assert where == {"observation": (0, 3), "achieved_goal": (3, 2), "desired_goal": (5, 2)}
    row = env.reset(init=[0, 1]).proprio[1]
    achieved = env._envs[1].unwrapped.start.tolist()
    assert row.tolist() == pytest.approx([0.1, 0.1, 0.1, *achieved, 0.3, 0.3])


REFUSED = {
    "Graph": (Graph(Box(-1, 1, (2,)), None), "whose size changes"),
    "Sequence": (
        Dict(a=Box(-1, 1, (2,)), points=Sequence(Box(-1, 1, (3,)))),
        "'points' of Shows-v0 is Sequence",
    ),
    "stacked frames": (Box(0, 255, (4, 84, 84), np.uint8), r"looks like pictures.*\(4, 84, 84\)"),
    "RGBA": (Box(0, 255, (64, 64, 4), np.uint8), "RGBA"),
    "stack of RGB": (
        Dict(view=Box(0, 255, (2, 64, 64, 3), np.uint8)),
        "'view' of Shows-v0 looks like pictures.*Stacked frames",
    ),
    "depth": (Box(0, np.inf, (128, 128, 1)), "no picture"),
    "too many values": (Discrete(10**6), "1000000 values"),
    "only words": (Text(9), "shows nothing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_spaces_are_refused_in_words(kind):
    space, said = REFUSED[kind]
    with pytest.raises(UserError, match=f"(?s){said}"):
        bridge("Shows", space=space, value=None)


def test_what_is_shown_must_be_what_the_space_says():
    for shown in (np.zeros(3), None, {"a": 1}):
        with pytest.raises(UserError, match="Shows-v0 cannot take a first step"):
            bridge("Shows", space=Box(-1, 1, (2,)), value=shown)


# ---- Actions.


@pytest.mark.parametrize(
    "space",
    [Discrete(4), MultiDiscrete([2, 2]), MultiBinary(3), Dict(a=Box(-1, 1, (2,))), Tuple([Discrete(2)])],
)  # fmt: skip
def test_actions_that_are_no_box_are_refused_in_words(space):
    with pytest.raises(UserError, match=r"actions of Acts-v0 are (\w+).*Wrap the env"):
        bridge("Acts", space=space)


def test_whole_numbers_are_rounded_and_shapes_kept():
    env = bridge("Acts", space=Box(0, 10, (2, 2), np.int64))
    env.reset(init=[0])
    env.step(torch.tensor([[[-1.0, 1.0, 0.0, 0.24]]]))
    taken = env._envs[0].unwrapped.taken
    assert taken.dtype == np.int64 and taken.tolist() == [[0, 10], [5, 6]]


# ---- Rewards, ends and success.

YES, NO = np.array([True]), np.array([False])


def arrays(obs, t):
    return obs, np.array([1.0]), YES if t == 3 else NO, NO, {"is_success": YES if t == 3 else NO}


def tensors(obs, t):
    solved = torch.tensor([t == 3])
    return torch.from_numpy(obs), torch.ones(1), solved, torch.tensor([False]), {"success": solved}


OVER = {
    "success": lambda obs, t: (obs, 1.0, t == 3, False, {"success": t == 3}),
    "arrays": arrays,
    "tensors": tensors,
    "a number": lambda obs, t: (obs, 1, t == 3, False, {"success": float(t == 3)}),
    "inside episode": lambda obs, t: (obs, 1.0, t == 3, False, {"episode": {"success": t == 3}}),
    "in final_info": lambda obs, t: (obs, 1.0, t == 3, False, {"final_info": [{"solved": t == 3}]}),
    "as Adroit": lambda obs, t: (obs, 1.0, t == 3, False, {"goal_achieved": t == 3}),
    "done": lambda obs, t: (obs, 1.0, t == 3, {"is_success": t == 3}),
    "never ends": lambda obs, t: (obs, 1.0, False, False, {"success": t == 3}),
}  # fmt: skip


@pytest.mark.parametrize("kind", OVER)
def test_reward_end_and_success_are_read_in_any_of_the_usual_places(kind):
    env = bridge("Says", step=OVER[kind])
    assert env.spec.reports_success
    env.reset(init=[0])
    step = env.step(torch.zeros(1, 5, 1))
    assert step.reward.tolist() == [[1.0, 1.0, 1.0, 0.0, 0.0]]
    assert step.success.all() and step.terminated.all() and not step.truncated.any()


def test_old_envs_say_done_and_reset_to_an_observation():
    late = {"TimeLimit.truncated": True, "success": False}
    env = bridge("Says", step=lambda obs, t: (obs, 0.0, t == 3, late), reset_info=False)
    env.reset(init=[0])
    step = env.step(torch.zeros(1, 5, 1))
    assert step.truncated.all() and not step.terminated.any() and step.valid.sum() == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda obs, t: (obs, 0.0, False), "3 values"),
        (lambda obs, t: (obs, np.zeros(3), False, False, {}), r"array of shape \(3,\)"),
        (lambda obs, t: obs, "its step gave ndarray"),
    ],
)
def test_other_answers_are_refused_in_words(answer, said):
    with pytest.raises(UserError, match=f"Says-v0 cannot take a first step.*{said}"):
        bridge("Says", step=answer)


def test_success_ends_an_episode_or_is_told_once_and_at_the_end():
    ends = people("Flicker")
    result = evaluate(ends, Idle(ends), range(4))
    assert all(e.success and e.success_once and e.length == 5 for e in result.episodes)
    goes_on = people("Flicker", terminate_on_success=False)
    result = evaluate(goes_on, Idle(goes_on), range(4))
    assert all(not e.success and e.success_once and e.length == LIMIT for e in result.episodes)
    said = score_text(result.episodes, True)
    assert (
        said.startswith("0% ")
        and "(0/4) at the end, 100% " in said
        and said.endswith("at any time")
    )


def test_an_env_that_ends_at_success_ends_though_it_was_asked_to_go_on():
    ends = OVER["success"]
    env = FromGymnasium(
        "Says-v0",
        EnvConfig(num_envs=1, terminate_on_success=False),
        step=ends,
        disable_env_checker=True,
    )
    env.reset(init=[0])
    step = env.step(torch.zeros(1, 5, 1))
    assert step.terminated.all() and step.valid.sum() == 3
    with pytest.raises(UserError, match="reports no success"):
        FromGymnasium("Pendulum-v1", EnvConfig(num_envs=1, terminate_on_success=False))


# ---- Errors and early ends, in one process as in many.


@pytest.mark.parametrize("workers", [1, 2])
def test_an_env_that_raises_costs_its_episode_and_names_itself(workers, capfd):
    env = people("Breaks", num_workers=workers, reports_success=True)
    try:
        result = evaluate(env, Idle(env), range(12))
        assert len(result.episodes) == 12 and all(e.success for e in result.episodes)
        assert result.faults == 2  # each env once: a reset mends it
    finally:
        env.close()
    said = capfd.readouterr().err
    # One line for each error, whether it cost one env or all that are stepped together.
    lines = re.findall(r"WARNING: envs? ([\d, ]+) \(.*Breaks-v0 broke:.*is unstable", said)
    assert sorted(", ".join(lines).split(", ")) == ["0", "1"], said
    assert "Traceback" not in said


@pytest.mark.parametrize("workers", [1, 2])
def test_an_env_that_truncates_early_has_shorter_episodes(workers):
    env = people("Early", num_workers=workers)
    try:
        result = evaluate(env, Idle(env), range(4))
        assert [e.length for e in result.episodes] == [3] * 4 and result.faults == 0
    finally:
        env.close()


@pytest.mark.parametrize("name", ["Flicker", "Early", "Pixels", "Goal"])
def test_they_keep_the_promises_of_a_vec_env(name):
    check_env(people(name), horizon=5)


TRAIN = {
    "env": {"name": "gymnasium", "num_envs": 2},
    "policy": {
        "name": "flow_vla", "transition": "flow_noise", "width": 16, "layers": 1, "text_layers": 0, "critic_width": 8,
    },
    "algorithm": {
        "name": "sac_flow", "num_chunks": 10, "capacity": 64, "warmup_chunks": 8, "batch_size": 4,
        "critic_width": 8, "utd": 0.2,
    },
    "run": {
        "name": "people", "iterations": 2, "eval_every": 2, "eval_episodes": 2, "videos": 1,
        "checkpoint_every": 2, "device": "cpu", "threads": 1, "eval_before": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["Pixels", "Goal", "Breaks"])
def test_a_run_trains_in_them(name, tmp_path, capsys):
    overrides = [f"env.id=people_envs:{name}-v0", f"run.out={tmp_path}"]
    overrides += ["policy.critic=shared"] if name == "Pixels" else []
    folder = train(resolve(TRAIN, overrides))
    _, meta = checkpoint.load(checkpoint.find(folder))
    assert spec_from_json(meta["spec"]).reports_success
    assert "(2/2)" in capsys.readouterr().out
