"""A simulator whose reward a reflector gives: ``env.reflector``."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from embodyrl.build import make_env
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.env import MujocoConfig
from embodyrl.types import Obs, Step
from embodyrl.world_models.judged_env import JudgedEnv
from embodyrl.world_models.reflectors import folder
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.reflectors.trained import TrainedReflector

PICK = MujocoConfig(task="pick", num_envs=3, num_threads=1, image_size=32, seed=5)


class ByList:
    """A reflector whose answers are written down: for the first picture, then after each chunk."""

    cameras = ("front",)
    window = 3

    def __init__(self, *answers: list[float]) -> None:
        self.answers = [torch.tensor(a) for a in answers]
        self.calibration = Calibration(threshold=0.9)
        self.asked: list[int] = []

    def judge(self, frames: dict[str, Tensor], instruction: list[str], new: int = 0) -> Tensor:
        assert frames["front"].shape[:2] == (len(instruction), 3)
        self.asked.append(len(instruction))
        return self.answers.pop(0)[: len(instruction), None].expand(-1, 3)


def judged(
    monkeypatch: pytest.MonkeyPatch, reflector: ByList, config: EnvConfig = PICK, coef: float = 0.0
) -> JudgedEnv:
    monkeypatch.setattr("embodyrl.world_models.judged_env.load_reflector", lambda *_: reflector)
    plain = make_env(dataclasses.replace(config, terminate_on_success=False))
    return JudgedEnv(plain, dataclasses.replace(config, reflector="given", progress_coef=coef))


def still(horizon: int = 4) -> Tensor:
    return torch.zeros(3, horizon, 4)


def test_success_is_what_the_reflector_says_and_ends_the_episode(monkeypatch) -> None:
    env = judged(monkeypatch, ByList([0.1, 0.95, 0.2], [0.95, 0.1]))
    env.reset(init=[1, 2, 3])
    step = env.step(still())
    assert step.success.tolist() == step.terminated.tolist() == [False, True, False]
    assert step.reward[:, :3].sum() == 0 and step.reward[:, 3].tolist() == [0.0, 1.0, 0.0]
    assert not step.log["real_success"].any()  # nothing was moved
    # The second env waits, as it was, and is not asked about.
    after = env.step(still())
    assert not after.valid[1].any() and after.valid[0].all()
    assert torch.equal(after.obs.images["front"][1], step.obs.images["front"][1])
    assert after.success.tolist() == [True, False, False]
    env.close()


def test_progress_telescopes_to_what_was_gained(monkeypatch) -> None:
    answers = ([0.1] * 3, [0.5, 0.1, 0.3], [0.2, 0.4, 0.3], [0.95, 0.8, 0.1])
    env = judged(monkeypatch, ByList(*answers), coef=2.0)
    env.reset(init=[1, 2, 3])
    total = sum((env.step(still()).reward.sum(1) for _ in range(3)), torch.zeros(3))
    apply = ByList().calibration.apply
    gain = 2.0 * (apply(torch.tensor(answers[-1])) - apply(torch.tensor(answers[0]))).float()
    torch.testing.assert_close(total, gain + torch.tensor([1.0, 0.0, 0.0]))
    env.close()


def test_what_cannot_be_judged_counts_as_nothing(monkeypatch) -> None:
    env = judged(monkeypatch, ByList([0.1, float("nan"), 0.2], [0.95, 0.95]))
    first = env.reset(init=[1, 2, 3])
    step = env.step(still())
    assert step.fault.tolist() == [False, True, False]
    assert not step.valid[1].any() and step.truncated[1] and step.reward[1].sum() == 0
    assert torch.equal(step.obs.proprio[1], first.proprio[1])
    assert "could not judge" in env.fault_texts[1]
    env.reset([1], init=[4])
    assert env.fault_texts == {}
    env.close()


def test_episodes_may_go_on_after_success_and_end_with_their_time(monkeypatch) -> None:
    config = dataclasses.replace(PICK, terminate_on_success=False, max_episode_steps=8)
    env = judged(monkeypatch, ByList([0.95] * 3, [0.1] * 3), config)
    env.reset(init=[1, 2, 3])
    step = env.step(still())
    assert step.success.all() and not step.terminated.any() and step.reward.sum() == 3.0
    step = env.step(still())
    assert not step.success.any() and step.truncated.all() and not step.terminated.any()
    env.close()


def test_a_config_names_it(tmp_path: Path) -> None:
    reflector = TrainedReflector({"front": [32, 32]}, 3, width=4, features=8)
    folder.save_reflector(reflector, tmp_path / "judge")
    config = dataclasses.replace(PICK, reflector=str(tmp_path / "judge"), progress_coef=0.5)
    env = make_env(config)
    obs = env.reset(init=[1, 2, 3])
    assert isinstance(obs, Obs)
    step = env.step(still())
    assert isinstance(step, Step) and {"judged", "real_success"} <= step.log.keys()
    env.close()
    # A policy is evaluated, and demonstrations are made, by the simulator's success.
    for real in (config.for_evaluation("eval"), config.for_demonstrations()):
        assert real is not None and not real.reflector and not real.progress_coef


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"progress_coef": 0.5}, "needs a simulator and env.reflector"),
        ({"reflector": "nowhere"}, "nowhere"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make_env(dataclasses.replace(PICK, **changes))


def test_a_camera_that_is_not_there_is_named(tmp_path: Path) -> None:
    reflector = TrainedReflector({"wrist": [32, 32]}, 3, width=4, features=8)
    folder.save_reflector(reflector, tmp_path / "judge")
    with pytest.raises(UserError, match="'wrist'"):
        make_env(dataclasses.replace(PICK, reflector=str(tmp_path / "judge")))
