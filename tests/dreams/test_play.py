"""A person drives a dream in a real Chromium, beside the simulator; the model is untrained."""

from __future__ import annotations

import dataclasses
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from embodyrl import checks
from embodyrl.build import make_env
from embodyrl.dreams.play import SideBySide, play
from embodyrl.errors import UserError
from embodyrl.sims.mujoco.env import MujocoConfig, MujocoEnv
from embodyrl.world_models.env import WorldModelConfig, WorldModelEnv
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import ChunkTransformer
from embodyrl.world_models.nets.codec import FrameCodec
from embodyrl.world_models.nets.success import SuccessHead
from embodyrl.world_models.reflectors.calibration import Calibration

REAL = MujocoConfig(num_envs=1, task="reach", image_size=64, num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> str:
    env = MujocoEnv(REAL)
    obs, spec = env.reset(init=[0]), env.spec
    env.close()
    torch.manual_seed(0)
    sizes = {"latent_channels": 8, "proprio_dim": spec.proprio_dim}
    codec = FrameCodec(1, 64, 64, 8, 32)
    codec.get_buffer("background").copy_(obs.images["front"].permute(0, 3, 1, 2).float() / 255)
    model = WorldModel(
        codec, ChunkTransformer(width=32, layers=1, **sizes), SuccessHead(**sizes), spec
    )
    model.env, model.calibration = dataclasses.asdict(REAL), Calibration(bias=-50.0, threshold=1.0)
    model.sentences = obs.instruction
    model.keyframes = {
        "context": torch.zeros(1, 3, 1, 8, 8, 8, dtype=torch.half),
        "proprio": obs.proprio,
        "held_out": torch.ones(1, dtype=torch.bool),
        **{name: torch.zeros(1, dtype=torch.long) for name in ("init", "sentence", "age")},
    }
    path = tmp_path_factory.mktemp("play") / "model"
    model.eval().save(path)
    return str(path)


def test_the_same_actions_go_to_both_and_the_dream_wakes_up(folder: str) -> None:
    game = SideBySide(folder, steps=30)
    try:
        assert sorted(game.images) == ["dream front", "real front"] and game.hz == pytest.approx(
            25.0
        )
        for _ in range(8):
            game.act(torch.tensor([0.0, 0.0, 0.7, 1.0]).numpy())
        real, dream = game._obs["real"], game._obs["dream"]
        assert (
            game.steps == 8
            and float(real.proprio[0, 2]) > 0.1
            and not torch.allclose(real.proprio, dream.proprio)
        )
        game.wake()
        assert torch.allclose(game._obs["dream"].proprio, real.proprio, atol=1e-5)
        game.begin(1)
        assert game.init == 1 and game.status["numbers"]["actions"] == "0"
    finally:
        game.close()
    with pytest.raises(UserError, match="hz is -1"):
        play(folder, hz=-1)


def test_some_envs_are_real_and_the_others_dreams(folder: str) -> None:
    config = WorldModelConfig(model=folder, num_envs=5, real_envs=2, precision="f32", split="eval")
    with pytest.raises(UserError, match="dreams only"):
        WorldModelEnv(config)
    env = make_env(config)
    try:
        checks.check_env(env, horizon=3)
        first = env.reset(init=[3, 4, 5, 6, 7])
        step = env.step(torch.zeros(5, 5, 4))
        assert (
            step.log["real"].tolist() == [True, True, False, False, False]
            and first.privileged is None
        )
        alone = MujocoEnv(dataclasses.replace(REAL, num_envs=2))
        alone.reset(init=[3, 4])
        same = alone.step(torch.zeros(2, 5, 4)).obs
        alone.close()
        assert torch.allclose(step.obs.proprio[:2], same.proprio, atol=1e-5)
        assert torch.equal(step.obs.images["front"][:2], same.images["front"])
    finally:
        env.close()
    for wrong in (-1, 5):
        with pytest.raises(UserError, match="real_envs"):
            WorldModelConfig(model=folder, num_envs=5, real_envs=wrong)


def until(tab: Any, holds: Callable[[], bool], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        tab.wait_for_timeout(50)


def test_a_person_plays(folder: str, chromium: Any) -> None:
    said, over, wrong = [], threading.Event(), []
    thread = threading.Thread(target=lambda: play(folder, hz=10, say=said.append, stop=over.is_set))
    thread.start()
    context = chromium.new_context(viewport={"width": 1100, "height": 560})
    context.set_default_timeout(120e3)  # other programs may keep the processor from it
    try:
        end = time.monotonic() + 120
        while not said:
            assert time.monotonic() < end
            time.sleep(0.05)
        address = re.search(r"http://\S+", said[0])
        assert address
        tab = context.new_page()
        tab.on("console", lambda m: wrong.append(m.text))
        tab.on("pageerror", lambda e: wrong.append(str(e)))
        tab.goto(address[0])
        pictures = tab.locator("img")
        until(tab, lambda: pictures.evaluate_all("all => all.map(i => i.naturalWidth)") == [64, 64])
        assert tab.locator("#task").inner_text()
        assert [t.strip() for t in tab.locator("figcaption").all_inner_texts()] == [
            "dream front",
            "real front",
        ]

        def number(name: str) -> int:
            return int(tab.locator(f"tr:has(td:text-is('{name}')) td:last-child").inner_text())

        assert number("actions") == 0  # time stands still
        tab.keyboard.down("w")
        until(tab, lambda: number("actions") > 4)
        assert tab.locator(".held kbd").inner_text() == "w"
        if folder_of_pictures := os.environ.get("EMBODYRL_PICTURES"):
            tab.screenshot(path=f"{folder_of_pictures}/play.png")
        tab.keyboard.up("w")
        tab.keyboard.press("n")
        until(tab, lambda: number("initial state") == 1)
        tab.keyboard.press(" ")
        until(tab, lambda: number("actions") > 0)  # a gripper that closes takes time
        tab.goto("about:blank")
        assert wrong == []
    finally:
        over.set()
        thread.join(timeout=60)
        context.close()
    assert not thread.is_alive()
