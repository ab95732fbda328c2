"""What the values of a config may be: every number has a range, and is held to it."""

from __future__ import annotations

import dataclasses
import math
import types
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

import pytest
import yaml

from embodyrl import registry
from embodyrl.build import make_env, make_policy
from embodyrl.config import Config, DataConfig, RunConfig, resolve
from embodyrl.dreams.loop_config import LoopConfig
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.ranges import Choice, DeviceName, Positive, Range, field_types, rules
from embodyrl.storage.config_section import build_section
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.trajectories.train_trajectories import TrajectoryTrainConfig

RAW = {"env": {"name": "mujoco"}, "policy": {"name": "flow_vla"}, "algorithm": {"name": "ppo"}}
CLASSES = [RunConfig, DataConfig, WorldTrainConfig, TrajectoryTrainConfig, LoopConfig, EnvConfig]
CLASSES += [
    registry.load(kind, name).Config for kind, known in registry.BUILT_IN.items() for name in known
]


def numbers(hint: Any, ruled: bool = False) -> list[bool]:
    """Of each number in a type, whether a range stands beside it."""
    if hint in (int, float):
        return [ruled]
    if get_origin(hint) is Annotated:
        return numbers(get_args(hint)[0], any(isinstance(r, Range) for r in rules(hint)))
    if get_origin(hint) in (tuple, dict, Union, types.UnionType):
        return [found for inner in get_args(hint) for found in numbers(inner)]
    return []


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_number_of_every_config_has_a_range(cls: type) -> None:
    without = [key for key, hint in field_types(cls).items() if not all(numbers(hint))]
    assert not without, "declare what these may be (embodyrl.ranges)"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_what_is_out_of_range_is_refused_before_anything_is_built(cls: type) -> None:
    for key, hint in field_types(cls).items():
        many = get_origin(hint) is tuple
        for rule in rules(hint):
            if isinstance(rule, Range):
                wrong = [rule.low - 1, rule.high + 1, math.nan, math.inf, -math.inf]
                if "int" in str(hint):
                    wrong = [int(w) for w in wrong if math.isfinite(w)]
                wrong = [w for w in wrong if w not in rule.also and not rule.holds(w)]
            else:
                wrong = ["nonsense"]
            for value in wrong:
                length = len([a for a in get_args(hint) if a is not ...]) if many else 1
                given = [value] * length if many else value
                with pytest.raises(UserError, match=rf"{key}.*( must be |give a number)"):
                    build_section("x", cls, {key: given})


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.seed=-1", "run.seed is -1, but it must be from 0 to 2,147,483,647."),
        ("env.image_size=0", "env.image_size is 0, but it must be from 8 to 4096."),
        ("algorithm.lr=-1", "algorithm.lr is -1.0, but it must be above 0."),
        ("algorithm.lr=inf", "algorithm.lr is inf, but it must be above 0, and finite."),
        ("run.threads=10000", "run.threads is 10000, but it must be from 0 to 1024."),
        ("env.max_episode_steps=-5", "env.max_episode_steps is -5, but it must be at least 0."),
        ("algorithm.epochs=10000000000", "it must be at most 1,000,000,000."),
        ("run.device=gpu", "it must be auto, cpu, cuda or cuda:N (GPU N, from 0)."),
        ("env.device=gpu", "env.device is 'gpu', but it must be auto, cpu, cuda or cuda:N"),
        ("data.weights=[1,-1]", "data.weights[1] is -1.0, but it must be at least 0."),
        ("algorithm.dual_clip=0.5", "it must be 0, or above 1."),
        ("algorithm.ratio=jont", "it must be joint, per_step or per_dim. Did you mean 'joint'?"),
    ],
)
def test_the_sentence_names_key_value_and_range(override: str, sentence: str) -> None:
    with pytest.raises(UserError) as raised:
        resolve(RAW, [override])
    assert sentence in str(raised.value)


def test_configs_built_in_python_are_held_to_them_too() -> None:
    config = resolve(RAW)
    for wrong in (
        lambda: dataclasses.replace(config, run=RunConfig(seed=-1)),
        lambda: make_env(dataclasses.replace(config.env, num_envs=0)),
        lambda: make_policy(dataclasses.replace(config.policy, width=0), None, 0),  # type: ignore[arg-type]
        lambda: Config(
            config.env, config.policy, config.algorithm, RunConfig(), DataConfig(keep="x")
        ),
    ):
        with pytest.raises(UserError, match="must be"):
            wrong()


@dataclass(frozen=True)
class Base:
    """Declares a range."""

    lr: Positive = 1.0
    free: int = 0


@dataclass(frozen=True)
class Other(Base):
    """Another default, as a plug-in would write it."""

    lr: float = 2.0


def test_a_subclass_keeps_the_range_and_a_field_without_one_takes_any_number() -> None:
    assert build_section("x", Other, {"free": -5}) == Other(free=-5)
    with pytest.raises(UserError, match=r"x\.lr is -1\.0, but it must be above 0"):
        build_section("x", Other, {"lr": -1.0})


def test_devices_and_words() -> None:
    for name in ("auto", "cpu", "cuda", "cuda:1"):
        assert DeviceName().holds(name)
    for name in ("gpu", "CUDA", "cuda:", "cuda:-1", "cpu:x", ""):
        assert not DeviceName().holds(name)
    assert Range().words == "a finite number"
    assert Range(0, 1, open_low=True).words == "above 0 and at most 1"
    assert Range(1, 1).words == "1"
    assert Choice("a").words == "a"


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_choice_is_typed_as_it_is_written(cls: type) -> None:
    # To YAML, "off", "no" and "on" are no words.
    found = [
        (key, word)
        for key, hint in field_types(cls).items()
        for rule in rules(hint)
        if isinstance(rule, Choice)
        for word in rule.valid
        if word and yaml.safe_load(word) != word
    ]
    assert not found
