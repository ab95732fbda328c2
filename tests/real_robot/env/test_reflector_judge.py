"""A reflector beside a robot: reward, and the question for a person."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from embodyrl.errors import UserError
from embodyrl.real_robot.control.robot import NotReadyError
from embodyrl.real_robot.env.reflector_judge import OverdueMonitor, ReflectorJudge
from embodyrl.real_robot.env.robot_env import RobotConfig, RobotEnv
from embodyrl.world_models.reflectors.calibration import Calibration


class Brightness:
    """Solved is what is brighter than the first frame."""

    window, cameras = 3, ("front",)

    def __init__(self, hits: int = 1) -> None:
        self.calibration = Calibration(hits=hits)
        self.blind = False

    def judge(
        self, frames: Mapping[str, torch.Tensor], instruction: list[str], new: int = 0
    ) -> torch.Tensor:
        light = frames["front"].float().mean(dim=(2, 3, 4))
        assert light.shape == (1, 3) and instruction == ["go"] and new == 1
        prob = torch.sigmoid(light - light[:, :1] - 5.0)
        return torch.full_like(prob, math.nan) if self.blind else prob


def seen(light: int, **more: Any) -> dict[str, Any]:
    return {"images": {"front": np.full((4, 4, 3), light, np.uint8)}, "prompt": "go", **more}


def test_success_is_the_reward_and_an_episode_begins_with_its_own_first_frame() -> None:
    judge = ReflectorJudge(Brightness(hits=2))
    assert [judge(seen(light)) for light in (10, 12, 30, 31)] == [(0.0, False)] * 3 + [(1.0, True)]
    judge.begin()
    assert [judge(seen(light)) for light in (31, 32)] == [(0.0, False)] * 2
    judge.reflector.blind = True  # type: ignore[attr-defined]
    with pytest.raises(NotReadyError, match="could not judge"):
        judge(seen(40))


def test_a_person_is_asked_once_when_it_takes_long() -> None:
    monitor, chunk = OverdueMonitor(Brightness(), 20, 0.5), np.zeros((5, 4), np.float32)
    said = [monitor(seen(10, step=step), chunk) for step in (0, 5, 10, 15)]
    assert said[:2] == ["", ""] and said[3] == ""
    assert said[2].startswith("after 10 of 20 actions it is not solved") and said[2].endswith(
        "(at best 1%)"
    )
    assert [bool(monitor(seen(10, step=step), chunk)) for step in (0, 10)] == [
        False,
        True,
    ]  # the next episode
    assert [
        monitor(seen(light, step=step), chunk) for light, step in ((10, 0), (60, 12), (60, 15))
    ] == [""] * 3
    with pytest.raises(UserError, match="share of an episode"):
        OverdueMonitor(Brightness(), 20, 0.0)


def test_an_env_begins_its_judge_anew_and_masks_what_it_cannot_judge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reflector = Brightness()
    env = RobotEnv(
        RobotConfig(task="reach", image_size=32, renderer="opengl", max_episode_steps=10),
        ReflectorJudge(reflector),
    )
    monkeypatch.setattr(
        env._connected.robot,
        "observe",
        lambda decoder: seen(env.elapsed * 5, proprio=np.zeros(7, np.float32)),
    )
    for _ in range(2):
        env.reset(init=[0])
        step = env.step(torch.zeros(1, 5, 4))
        assert bool(step.success) and step.reward.sum() == 1.0 and step.valid.sum() == 2
    env.reset(init=[0])
    reflector.blind = True
    assert not env.step(torch.zeros(1, 5, 4)).valid.any()
    env.close()
