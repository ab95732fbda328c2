"""Each convention fault in a good data set is named, and what is advised translates it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.convention_faults import (
    ENV,
    FAULTS,
    change_rows,
    checked,
    edit,
    faulty_copy,
    put,
    remedy,
)
from embodyrl.algorithms.sft import SFT
from embodyrl.build import make_policy
from embodyrl.cli.main import main
from embodyrl.config import Config, compose, env_config
from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.env_check import check_with_env
from embodyrl.data.lerobot_write import write_dataset
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.data.record import record_episodes
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.env import MujocoEnv
from embodyrl.training.load_demos import load_demos
from embodyrl.types import EnvSpec

EPISODES = 4
TRANSLATED = (
    "pictures mirrored",
    "cameras of other names",
    "another rate",
    "actions in metres",
    "absolute targets",
)


@pytest.fixture(scope="module")
def spec_and_good(tmp_path_factory: pytest.TempPathFactory) -> tuple[EnvSpec, Path]:
    env = MujocoEnv(env_config(*ENV))
    recordings = list(record_episodes(env, env.make_expert(), EPISODES))
    env.close()
    return env.spec, write_dataset(tmp_path_factory.mktemp("data") / "good", recordings, env.spec)


@pytest.fixture(scope="module")
def good(spec_and_good: tuple[EnvSpec, Path]) -> Path:
    return spec_and_good[1]


@pytest.mark.parametrize("inits", [True, False])
def test_nothing_is_named_in_a_good_data_set(good: Path, tmp_path: Path, inits: bool) -> None:
    copy = faulty_copy(good, tmp_path / "copy", None, inits=inits)
    assert checked(copy, env_config(*ENV), {})["named"] == []


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_named_and_gone_after_what_is_advised(
    good: Path, tmp_path: Path, name: str
) -> None:
    fault = FAULTS[name]
    copy = faulty_copy(good, tmp_path / "copy", fault)
    found = checked(copy, env_config(*ENV), {})
    assert found["named"] == [fault.named]
    # What a translation leaves is looked at for one fault of each kind.
    if name in TRANSLATED:
        options = remedy(fault, found)
        assert options and checked(copy, env_config(*ENV), options)["named"] == []


@pytest.mark.parametrize(
    "name",
    [
        "pictures turned by 180 degrees",
        "red and blue exchanged",
        "cameras exchanged",
        "gripper the other way round",
        "actions one frame late",
    ],
)
def test_faults_are_named_where_initial_states_are_not_known(
    good: Path, tmp_path: Path, name: str
) -> None:
    copy = faulty_copy(good, tmp_path / "copy", FAULTS[name], inits=False)
    assert FAULTS[name].named in checked(copy, env_config(*ENV), {})["named"]


def test_a_number_of_another_initial_state_is_not_believed(good: Path, tmp_path: Path) -> None:
    copy = faulty_copy(good, tmp_path / "copy", None)
    edit(copy, lambda t: put(t, "init", np.array(t["init"]) % 1000 + 7))
    check = check_with_env(copy, env_config(*ENV), {})
    assert not check.paired and not check.findings
    assert "names no initial states of mujoco/pick" in check.unchecked[0]


def test_what_is_translated_is_what_was_recorded(
    spec_and_good: tuple[EnvSpec, Path], tmp_path: Path
) -> None:
    spec, good = spec_and_good
    ours = load_demonstrations(good, 3, spec=spec)
    copy = faulty_copy(good, tmp_path / "copy", FAULTS["gripper in 1 to 0"])
    FAULTS["pictures turned by 180 degrees"].inject(copy)
    FAULTS["red and blue exchanged"].inject(copy)
    told = {"orientation": "turned_180", "channels": "bgr", "gripper": (1.0, 0.0)}
    theirs = load_demonstrations(copy, 3, spec=spec, convention=told)
    np.testing.assert_allclose(theirs.actions, ours.actions, atol=1e-6)
    for name in ours.images:
        off = np.abs(theirs.images[name].astype(int) - ours.images[name]).mean()
        assert off < 4
    assert "turned by 180 degrees" in theirs.remarks[-1] and "gripper" in theirs.remarks[-1]


def test_absolute_targets_become_the_changes_that_they_were(
    spec_and_good: tuple[EnvSpec, Path], tmp_path: Path
) -> None:
    spec, good = spec_and_good
    ours = load_demonstrations(good, 3, spec=spec)
    copy = faulty_copy(good, tmp_path / "copy", FAULTS["absolute targets"])
    theirs = load_demonstrations(copy, 3, spec=spec, convention={"actions": "absolute"})
    np.testing.assert_allclose(theirs.actions, ours.actions, atol=1e-4)
    assert "absolute targets become changes" in theirs.remarks[-1]
    # A target that an action does not reach is cut; many of them are other units.
    for share, words in ((0.05, "targets are further away than an action reaches"), (0.5, "")):

        def far(actions: np.ndarray, states: np.ndarray, share: float = share) -> np.ndarray:
            rows = np.arange(len(actions)) < share * len(actions)
            return actions + 0.2 * rows[:, None] * [1, 0, 0, 0]

        change_rows("action", far)(copy)
        if words:
            cut = load_demonstrations(copy, 3, spec=spec, convention={"actions": "absolute"})
            assert words in cut.remarks[-1] and cut.actions.abs().max() <= 1
        else:
            with pytest.raises(UserError, match="the units differ"):
                load_demonstrations(copy, 3, spec=spec, convention={"actions": "absolute"})


def config_with(path: Path, *overrides: str) -> Config:
    words = [*ENV[1][:2], f"data.path={path}", *overrides]
    return compose("mujoco_pick_sft", words)


def load(config: Config, spec: EnvSpec) -> tuple[Demonstrations, list[str]]:
    said: list[str] = []
    learner = SFT(config.algorithm, make_policy(config.policy, spec, seed=0))
    return load_demos(config, learner, spec, say=said.append), said


def test_training_refuses_says_what_to_give_and_takes_it(
    spec_and_good: tuple[EnvSpec, Path], tmp_path: Path
) -> None:
    spec, good = spec_and_good
    copy = faulty_copy(good, tmp_path / "copy", FAULTS["pictures turned by 180 degrees"])
    FAULTS["gripper in 1 to 0"].inject(copy)
    with pytest.raises(UserError) as refused:
        load(config_with(copy), spec)
    text = str(refused.value)
    assert '"data.convention={orientation: turned_180}"' in text
    assert '"data.convention={gripper: [1,0]}"' in text and "embodyrl data verify" in text
    # What it says, as it says it.
    told = "data.convention={orientation: turned_180, gripper: [1,0]}"
    demos, said = load(config_with(copy, told), spec)
    assert demos.num_episodes == EPISODES
    assert any("is translated for mujoco/pick: pictures are turned" in text for text in said)


def test_what_the_user_says_is_taken_and_the_finding_is_said(
    spec_and_good: tuple[EnvSpec, Path], tmp_path: Path
) -> None:
    spec, good = spec_and_good
    copy = faulty_copy(good, tmp_path / "copy", FAULTS["red and blue exchanged"])
    _, said = load(config_with(copy, "data.convention={channels: rgb}"), spec)
    assert any("red and blue are exchanged" in text for text in said)
    assert any("taken as data.convention says" in text for text in said)


def test_another_rate_is_refused_resampled_or_kept(
    spec_and_good: tuple[EnvSpec, Path], tmp_path: Path
) -> None:
    spec, good = spec_and_good
    copy = faulty_copy(good, tmp_path / "copy", FAULTS["another rate"])
    with pytest.raises(UserError, match=r"10 actions per second.*data\.rate=resample"):
        load(config_with(copy), spec)
    kept, _ = load(config_with(copy, "data.rate=keep"), spec)
    longer, said = load(config_with(copy, "data.rate=resample"), spec)
    assert abs(len(longer) - 2.5 * len(kept)) <= EPISODES
    assert len(longer.images["front"]) == len(longer)
    assert any("episodes are resampled" in text for text in said)


def test_verify_holds_data_against_an_env_and_draws_both(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = faulty_copy(good, tmp_path / "copy", FAULTS["pictures upside down"])
    picture = tmp_path / "both.png"
    command = ["data", "verify", str(copy), ENV[0], *ENV[1], "--picture", str(picture), "--json"]
    assert main(command) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["sound"] and said["env"] == "mujoco/pick" and said["picture"] == str(picture)
    assert len(said["differs"]) == 1 and "are upside down" in said["differs"][0]
    assert picture.stat().st_size > 1000
    command.insert(-3, "data.convention={orientation: upside_down}")
    assert main(command) == 0
