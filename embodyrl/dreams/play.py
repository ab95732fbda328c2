"""``embodyrl world play``: a person drives a dream by keyboard, and the real env beside it.

Both get the same actions. Look at whether the dream's blocks stay where they are, whether its hand
lifts what it did not hold, and when it calls the task solved. While no key is down, time stands
still in both. The page is the operator's server with another HTML file (``play.html``).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from embodyrl.build import make_env
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.real_robot.control.clocks import RealClock
from embodyrl.real_robot.operator import OperatorPage
from embodyrl.types import Obs, Step
from embodyrl.world_models.config import WorldModelConfig
from embodyrl.world_models.dream_metrics import psnr
from embodyrl.world_models.env import WorldModelEnv
from embodyrl.world_models.model import WorldModel

REQUESTS = ("next", "again", "wake")
"""The page's buttons: next episode, same episode again, dream from the real env's state."""
HTML = Path(__file__).with_name("play.html")
KEY_SPEED = 0.7
"""The step of a key, as a share of the largest one."""
SETTLE = 6
"""Control steps after the last key: a gripper needs some to close."""


class SideBySide:
    """A dream and the real episode that it began as, given the same actions.

    Attributes:
        dream: one imagined env.
        real: the env that it imagines; None where the model does not say which, because its data
            set comes from elsewhere.
        hz: actions a second.
    """

    def __init__(self, model: str, *, reflector: str = "", steps: int = 400) -> None:
        """Loads the model and builds the real env.

        Args:
            model: its folder.
            reflector: folder of one that judges the dream; empty for the model's own head.
            steps: of an episode; a real env with a fixed limit keeps its own.
        """
        config = WorldModelConfig(
            model=model,
            reflector=reflector,
            num_envs=1,
            split="eval",
            max_episode_steps=steps,
            device="cpu",
        )
        self.dream = WorldModelEnv(config)
        self.real: VecEnv | None = None
        if WorldModel.read_meta(model)["env"]:
            self.real = make_env(
                dataclasses.replace(
                    config.for_evaluation("eval").with_time_limit(steps), num_envs=1
                )
            )
        self.hz = self.dream.spec.control_hz or 10.0
        self.begin(0)

    def begin(self, init: int) -> None:
        """A new episode in both.

        Args:
            init: initial state of the real env; without a real env, the number of a keyframe.
        """
        limit = (self.real or self.dream).spec.num_init_states
        self.init = init % limit if limit else init
        self.steps = 0
        self._over: dict[str, str] = {"dream": "", "real": ""}
        self._probability = 0.0
        if self.real is None:
            self._obs: dict[str, Obs] = {"dream": self.dream.reset(init=[self.init])}
        else:
            obs = self.real.reset(init=[self.init])
            self._obs = {"dream": self.dream.dream_from(obs), "real": obs}

    def wake(self) -> None:
        """Starts the dream again from what the real env shows now."""
        if self.real is not None:
            self._obs["dream"] = self.dream.dream_from(self._obs["real"])
            self._over["dream"] = ""

    def act(self, action: NDArray[np.float32]) -> None:
        """One action (A,) in both; an episode that is over does not move."""
        chunk = torch.from_numpy(action)[None, None]
        step = self.dream.step(chunk)
        self._probability = float(step.log["judged"][0])
        self._show("dream", step)
        if self.real is not None:
            self._show("real", self.real.step(chunk))
        self.steps += 1

    def _show(self, side: str, step: Step) -> None:
        self._obs[side] = step.obs
        if bool(step.success[0]):
            self._over[side] = "solved"
        elif bool(step.done[0]) and not self._over[side]:
            doubt = step.log.get("doubt")
            self._over[side] = "time is up"
            if doubt is not None and bool(doubt[0]):
                self._over[side] = "in doubt"
            if bool(step.fault[0]):
                self._over[side] = "broke"

    @property
    def images(self) -> dict[str, NDArray[np.uint8]]:
        """``SIDE CAMERA`` -> (h, w, 3); the side is ``dream`` or ``real``."""
        return {
            f"{side} {name}": v[0].cpu().numpy()
            for side, obs in self._obs.items()
            for name, v in obs.images.items()
        }

    @property
    def status(self) -> dict[str, Any]:
        """What the page shows beside the pictures: the task, what has ended, and numbers."""
        dream = self._obs["dream"]
        real = self._obs.get("real")
        numbers = {"initial state": str(self.init), "actions": str(self.steps)}
        numbers["P(solved) in the dream"] = f"{self._probability:.2f}"
        if real is not None:
            for name, image in dream.images.items():
                numbers[f"PSNR {name}"] = f"{float(psnr(image, real.images[name])):.1f} dB"
            distance = (dream.proprio - real.proprio).norm()
            numbers["proprio distance"] = f"{float(distance):.3f}"
        return {"task": dream.instruction[0], "over": self._over, "numbers": numbers}

    def close(self) -> None:
        """Closes both."""
        self.dream.close()
        if self.real is not None:
            self.real.close()


def play(
    model: str,
    *,
    reflector: str = "",
    port: int = 0,
    hz: float = 0.0,
    steps: int = 400,
    say: Callable[[str], None] = print,
    stop: Callable[[], bool] = lambda: False,
) -> None:
    """Serves the page until Ctrl-C, or until ``stop`` returns True.

    Args:
        model: folder of a world model.
        reflector: see ``SideBySide``.
        port: of the page on this machine; 0 takes a free one.
        hz: actions a second; 0 takes the env's own.
        steps: of an episode.
        say: gets the page's address.
        stop: asked at every control step.
    """
    if hz < 0 or steps < 1:
        raise UserError(
            f"hz is {hz} and steps {steps}; the first must not be negative, the second at least 1."
        )
    game = SideBySide(model, reflector=reflector, steps=steps)
    page = OperatorPage(RealClock(), port, HTML, REQUESTS)
    say(f"Open {page.address} in a browser. Ctrl-C ends it.")
    grip = 1.0
    left = 0
    period = 1.0 / (hz or game.hz)
    try:
        while not stop():
            due = time.monotonic() + period
            for request in page.wishes():
                _serve(game, request)
            # Time goes on while a key is down or the gripper was switched, and a little longer.
            action = page.action(game.dream.spec.action_dim, KEY_SPEED)
            if page.alive(time.monotonic()) and (action[:-1].any() or action[-1] != grip):
                left = SETTLE
                grip = float(action[-1])
            if left > 0:
                game.act(action)
                left -= 1
            page.show(game.status, game.images)
            time.sleep(max(0.0, due - time.monotonic()))
    except KeyboardInterrupt:
        pass
    finally:
        page.close()
        game.close()


def _serve(game: SideBySide, request: str) -> None:
    if request == "wake":
        game.wake()
    elif request == "next":
        game.begin(game.init + 1)
    else:
        game.begin(game.init)
