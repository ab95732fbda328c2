"""``train --dry-run`` refuses what the run would refuse, and leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from embodyrl.build import make_env, make_policy
from embodyrl.cli.main import main
from embodyrl.config import RunConfig, compose, to_dict
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.real_robot.env.config import RobotConfig
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.storage.loggers import require_loggers
from embodyrl.training.dry_run import try_run
from embodyrl.training.run_checks import check_reward
from embodyrl.world_models.config import WorldModelConfig

PRESET = """# A preset of the tests: states only, so that nothing is drawn.
env: {name: mujoco, task: reach, renderer: none, cameras: [], num_envs: 64, max_episode_steps: 10}
policy: {name: flow_mlp, horizon: 5, width: 16, layers: 1}
algorithm: {name: ppo, num_chunks: 2, epochs: 1, critic_epochs: 1}
run: {name: tiny, iterations: 1, eval_episodes: 2, eval_before: false, videos: 0, device: cpu}
"""


@pytest.fixture
def preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(PRESET)
    return "tiny.yaml"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "set"
    command = ["collect", "mujoco", "env.task=reach", "env.renderer=none", "env.cameras=[]"]
    assert main([*command, "env.max_episode_steps=40", "--episodes", "2", "--out", str(path)]) == 0
    return str(path)


def test_what_is_sound_is_described_and_nothing_is_written(
    preset: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", preset, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "# env: mujoco/reach, 1 task, 4 action dims" in out and "# policy: " in out
    (tmp_path / "copy.yaml").write_text(out)
    assert compose("copy.yaml") == compose(preset)
    assert {p.name for p in tmp_path.iterdir()} == {"tiny.yaml", "copy.yaml"}


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.task=reech"], "no task 'reech'. Did you mean 'reach'"),
        (["env.split=trian"], "no split 'trian'"),
        (["run.eval_split=evla"], "no split 'evla'"),
        (["run.init_checkpoint=nowhere"], "no checkpoint in nowhere"),
        (["run.workers=3"], "cannot share env.num_envs=64 evenly"),
        (["run.max_lag=1"], "behaviour_cap"),
        (["data.weights=[1]"], "reads no demonstrations"),
        (["env.history=2"], "env.history is 2.*flow_mlp sees one observation"),
    ],
)
def test_what_the_run_would_refuse_is_refused(
    preset: str, tmp_path: Path, overrides: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        try_run(compose(preset, overrides))
    assert not (tmp_path / "runs").exists()


def test_a_reward_that_nothing_earns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "env: {name: mujoco, task: reach}\npolicy: {name: flow_vla}\nalgorithm: {name: sft}\n"
    )
    learner, player = (cast(Any, SimpleNamespace(plays=plays)) for plays in (False, True))
    config = compose(str(tmp_path / "sft.yaml"))
    check_reward(config, learner)
    for key, value in (("reflector", "runs/reflector"), ("progress_coef", 0.3)):
        judged = compose(str(tmp_path / "sft.yaml"), [f"env.{key}={value}"])
        with pytest.raises(UserError, match=f"env.{key} is .* sft plays no episodes"):
            check_reward(judged, learner)
        check_reward(judged, player)


def test_a_checkpoint_whose_critic_begins_afresh_is_accepted(preset: str) -> None:
    """In a dry run fresh weights have no values, so they cannot be looked at for NaN."""
    vla = PRESET.replace(
        "flow_mlp, horizon: 5, width: 16, layers: 1", "flow_vla, width: 32, heads: 2"
    )
    Path("vla.yaml").write_text(vla)
    config = compose("vla.yaml", ["policy.critic=privileged"])
    env = make_env(config.env)
    env.close()
    meta = {"config": to_dict(config), "spec": spec_to_json(env.spec)}
    states = {"policy": make_policy(config.policy, env.spec, 0).state_dict()}
    checkpoint.save(Path("runs/old/checkpoints/step_000001"), states, json.loads(json.dumps(meta)))
    overrides = ["policy.critic=shared", "run.init_checkpoint=runs/old"]
    lines, _ = try_run(compose("vla.yaml", overrides))
    assert lines[1].startswith("policy: ")


def test_a_run_that_needs_more_memory_than_the_device_has_is_refused(preset: str) -> None:
    with pytest.raises(UserError, match=r"needs .* GB of memory, and cpu has .* a rollout of"):
        try_run(compose(preset, ["algorithm.num_chunks=1000000000"]))


SFT = """# A preset of the tests.
env: {name: mujoco, task: reach, renderer: none, cameras: [], num_envs: 2}
policy: {name: flow_mlp, horizon: 5, width: 16, layers: 1}
algorithm: {name: sft}
run: {device: cpu}
"""


def test_data_are_read_without_their_pictures_and_must_fit(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sft.yaml").write_text(SFT)
    lines, spec = try_run(compose("sft.yaml", [f"data.path={data}"]))
    assert lines[-1].startswith("data: 2 episodes, ") and spec is not None
    lines, _ = try_run(compose("sft.yaml", [f"data.path={data}", f"data.more=[{data}]"]))
    assert lines[-1].startswith("data: 4 episodes, ")
    for overrides, words in (
        ([], "give data.path=FOLDER"),
        ([f"data.path={data}", "data.weights=[1,1]"], "1 data sets"),
        ([f"data.path={data}", "env.control_mode=ee_delta_pose"], "4 action dims"),
        ([f"data.path={data}", "data.episodes=3"], "3 episodes were asked for"),
    ):
        with pytest.raises(UserError, match=words):
            try_run(compose("sft.yaml", overrides))


def test_an_id_that_gymnasium_does_not_know() -> None:
    with pytest.raises(UserError, match="Hoper"):
        try_run(compose("gymnasium_sac_flow", ["env.id=Hoper-v5"]))


def test_a_replay_buffer_that_would_not_fit_is_refused_without_being_made() -> None:
    with pytest.raises(UserError, match=r"algorithm\.capacity"):
        try_run(compose("gymnasium_sac_flow", ["algorithm.capacity=1000000000"]))


def test_a_robot_is_left_alone_and_the_smallest_env_is_one() -> None:
    assert RobotConfig(robot="ros2").smallest() is None
    twin = RobotConfig(operator=0, log="logs", record=True).smallest()
    assert isinstance(twin, RobotConfig) and (twin.operator, twin.log) == (-1, "")
    mixed = WorldModelConfig(model="m", num_envs=64, real_envs=16).smallest()
    assert (mixed.num_envs, mixed.real_envs) == (2, 1)


def test_loggers_must_be_usable_at_the_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(UserError, match="no key for it here"):
        require_loggers(["wandb"])
    monkeypatch.setenv("WANDB_MODE", "offline")
    require_loggers(["wandb", "tensorboard"])
    monkeypatch.delenv("WANDB_MODE")
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    (tmp_path / "netrc").chmod(0o600)
    require_loggers(["wandb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install tensorboard"):
        require_loggers(["tensorboard"])
    assert RunConfig().loggers == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory"], "give --dry-run too"),
        (["--ray-address", "auto"], "--ray-address is read with --launcher ray alone"),
        (["--token-file", "x", "--launcher", "ray"], "--token-file is read with --launcher robot"),
    ],
)
def test_options_that_nothing_reads_are_refused(
    preset: str, options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", preset, *options]) == 1
    assert words in capsys.readouterr().err
