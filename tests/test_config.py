"""Configs: defaults, presets, overrides and what is refused."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from embodyrl import registry
from embodyrl.config import Config, RunConfig, compose, env_config, resolve, to_dict, to_yaml
from embodyrl.dreams.loop_config import read_loop
from embodyrl.errors import UserError
from embodyrl.storage.config_section import build_section
from embodyrl.storage.preset_files import apply_overrides
from embodyrl.world_models.config import WorldTrainConfig

RAW = {"env": {"name": "mujoco"}, "policy": {"name": "flow_vla"}, "algorithm": {"name": "ppo"}}


@pytest.mark.parametrize("name", sorted(registry.preset_names()))
def test_presets_compose_and_come_back_the_same(name: str, tmp_path: Path) -> None:
    config = compose(name)
    assert isinstance(config.env, registry.load("envs", config.env.name).Config)
    copy = tmp_path / "copy.yaml"
    copy.write_text(to_yaml(config))
    assert compose(str(copy)) == config
    assert resolve(to_dict(config)) == config
    first = registry.preset_names()[name].read_text().split("\n")[0]
    assert first.startswith("# ") and first.endswith("."), "a preset's first line says what it is"


@pytest.mark.parametrize("name", sorted(registry.preset_names()))
def test_no_preset_reads_privileged_state(name: str, tmp_path: Path) -> None:
    """Nor does it where the policy that it starts from was trained with a critic that did."""
    policy = compose(name).policy
    if not hasattr(policy, "critic"):
        # Has no critic, or one that always shares what the policy sees.
        assert policy.name in ("openvla_oft", "flow_mlp")
        return
    assert policy.critic in ("shared", "found")
    # A run without its initial checkpoint is asked for the policy instead.
    (tmp_path / "run").mkdir()
    before = {"policy": {"name": policy.name, "critic": "privileged", "critic_width": 77}}
    (tmp_path / "run" / "config.yaml").write_text(json.dumps(before))
    again = compose(
        name, [f"run.out={tmp_path}", "run.name=run", "run.init_checkpoint=runs/not_there"]
    ).policy
    assert (again.critic, again.critic_width) == (policy.critic, 77)


@pytest.mark.parametrize("name", sorted(registry.preset_names("loops")))
def test_no_loop_reads_privileged_state(name: str) -> None:
    loop = read_loop(name, ["policy=runs/sft", "demos=data/demos"])
    learns = (
        (loop.dream, loop.dream_overrides) if loop.dream else (loop.imitate, loop.imitate_overrides)
    )
    assert compose(*learns).policy.critic in ("shared", "found")
    # What its model learns of a simulator is what its data hold: it runs on data without as well.
    for overrides in (loop.world, loop.refresh):
        assert (
            build_section("world", WorldTrainConfig, apply_overrides({}, overrides)).state is None
        )


@pytest.mark.parametrize("name", sorted(registry.names("policies")))
def test_no_critic_reads_privileged_state_by_default(name: str) -> None:
    fields = {f.name: f.default for f in dataclasses.fields(registry.load("policies", name).Config)}
    assert fields.get("critic", "shared") == "shared"


def test_another_policy_takes_those_keys_of_a_preset_that_it_has() -> None:
    preset = ("mujoco_pick_sac_flow", ["policy.name=flow_mlp"])
    policy = compose(*preset).policy  # it has no policy.critic, and learns its noise too
    assert (policy.name, policy.noise_max) == ("flow_mlp", 0.5)
    with pytest.raises(UserError, match=r"policy has no key 'critic'"):
        compose(preset[0], [*preset[1], "policy.critic=found"])
    with pytest.raises(UserError, match=r"There is no policy 'flow_vl'.*'flow_vla'"):
        compose(preset[0], ["policy.name=flow_vl"])


def test_sections_left_out_are_defaults() -> None:
    config = resolve(RAW)
    assert config.run == RunConfig()
    assert config.algorithm == registry.load("algorithms", "ppo").Config(name="ppo")


def test_overrides_win_and_keep_types() -> None:
    config = resolve(
        {**RAW, "run": {"seed": 1}},
        [
            "run.seed=2",
            "run.minutes=3",
            "run.eval_before=false",
            "run.loggers=[tensorboard,wandb]",
            "run.name=5",
            "env.cameras=[front,wrist]",
            "algorithm.lr=1e-5",
        ],
    )
    assert config.run.seed == 2
    assert config.run.minutes == 3.0 and isinstance(config.run.minutes, float)
    assert config.run.eval_before is False
    assert config.run.loggers == ("tensorboard", "wandb")
    assert config.run.name == "5"
    assert config.env.cameras == ("front", "wrist")  # type: ignore[attr-defined]
    assert config.algorithm.lr == 1e-5
    assert hash(config.run) is not None


def test_a_name_that_yaml_takes_for_a_number_stays_as_it_was_written() -> None:
    config = resolve(RAW, ["run.name=0_20", "run.out=1e3", "run.seed=1_0", "run.minutes=1e3"])
    assert (config.run.name, config.run.out, config.run.seed, config.run.minutes) == (
        "0_20",
        "1e3",
        10,
        1000.0,
    )


def test_a_name_override_chooses_another_class() -> None:
    config = resolve(RAW, ["algorithm.name=sft"])
    assert isinstance(config.algorithm, registry.load("algorithms", "sft").Config)
    with pytest.raises(UserError, match="algorithm has no key"):
        resolve({**RAW, "algorithm": {"name": "ppo", "gae_lambda": 0.9}}, ["algorithm.name=sft"])


def test_configs_are_frozen() -> None:
    config = resolve(RAW)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.run.seed = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.env = config.env  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "pattern"),
    [
        ("polcy.name=x", "no section 'polcy'.*'policy'"),
        ("run.sed=1", "run has no key 'sed'.*'seed'"),
        ("run.seed.deep=1", "run.seed"),
        ("env.nam_envs=1", "env has no key 'nam_envs'.*'num_envs'"),
        ("algorithm.leraning_rate=1", "algorithm has no key 'leraning_rate'"),
        ("run.seed=1.5", r"run\.seed.*1\.5"),
        ("run.seed=fast", r"run\.seed.*'fast'"),
        ("run.eval_before=perhaps", r"run\.eval_before.*'perhaps'"),
        (
            "run.loggers=tensorboard",
            r"it takes a list, not 'tensorboard': write run\.loggers=\[tensorboard\]",
        ),
        ("run.seed=null", r"run\.seed"),
        ("run=5", "section 'run' must hold keys, not 5"),
        ("env.name=mujco", "no env 'mujco'.*'mujoco'"),
        ("seed", "'seed' is not an override"),
        ("run.checkpoint_every=0", r"run\.checkpoint_every is 0.*at least 1"),
        ("run.minutes=-1", r"run\.minutes is -1.*at least 0"),
        ("run.seed=[1", r"'run\.seed=\[1' cannot be read"),
        ("run.seed=${nothing}", r"nothing\}.*nothing is replaced"),
    ],
)
def test_mistakes_name_the_key_and_the_nearest(override: str, pattern: str) -> None:
    with pytest.raises(UserError, match=pattern):
        resolve(RAW, [override])


def test_a_section_without_a_name_is_told_the_names() -> None:
    with pytest.raises(UserError, match=r"section 'algorithm' has no name.*ppo"):
        resolve({**RAW, "algorithm": {}})


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("env: [unclosed", "not valid YAML"),
        ("- a\n- b\n", "must hold sections"),
        (
            "env: mujoco\npolicy: {name: flow_vla}\nalgorithm: {name: ppo}",
            "section 'env' must hold keys",
        ),
        ("enviroment: {name: mujoco}", "no section 'enviroment'"),
        ("", "has no name"),
    ],
)
def test_broken_files(text: str, pattern: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=pattern):
        compose(str(path))


def test_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"no preset 'mujoco_pick_pp0'.*'mujoco_pick_ppo'"):
        compose("mujoco_pick_pp0")


def test_env_config_from_a_name_or_a_preset(tmp_path: Path) -> None:
    mujoco = registry.load("envs", "mujoco").Config
    assert env_config("mujoco") == mujoco(name="mujoco")
    assert env_config("mujoco", ["env.num_envs=3"]).num_envs == 3
    assert env_config("mujoco_pick_ppo") == compose("mujoco_pick_ppo").env
    with pytest.raises(UserError, match=r"no env or preset 'mujocco'.*'mujoco'"):
        env_config("mujocco")
    with pytest.raises(UserError, match=r"write env.key=value"):
        env_config("mujoco", ["num_envs=3"])
    with pytest.raises(UserError, match="not an override"):
        env_config("mujoco", ["num_envs"])
    empty = tmp_path / "no_env.yaml"
    empty.write_text("run: {seed: 1}\n")
    with pytest.raises(UserError, match=r"no env section"):
        env_config(str(empty))


@dataclass(frozen=True)
class Nested:
    """For the tests below: tuples in tuples."""

    sizes: tuple[int, ...] = (1, 2)
    pairs: tuple[tuple[float, float], ...] = ()
    note: str | None = None


def test_tuples_and_optional_values() -> None:
    assert build_section("x", Nested, {}) == Nested()
    given = build_section(
        "x", Nested, {"sizes": [3], "pairs": [[1.0, 2.0], [3.0, 4.0]], "note": "a"}
    )
    assert given == Nested((3,), ((1.0, 2.0), (3.0, 4.0)), "a")
    assert hash(given)
    assert build_section("x", Nested, dataclasses.asdict(given)) == given
    with pytest.raises(UserError, match=r"x\.sizes"):
        build_section("x", Nested, {"sizes": ["a"]})


def test_config_has_the_sections_that_the_documentation_names() -> None:
    assert [f.name for f in dataclasses.fields(Config)] == [
        "env",
        "policy",
        "algorithm",
        "run",
        "data",
    ]
