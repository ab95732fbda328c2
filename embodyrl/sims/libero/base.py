"""``LiberoEnv``: what the three backends share, namely spec, tasks and initial states."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from embodyrl.env import SteppedVecEnv
from embodyrl.errors import UserError, did_you_mean
from embodyrl.sims.libero import suites
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.experts import ScriptedExpert
from embodyrl.sims.libero.render import CAMERAS
from embodyrl.sims.libero.scene import LAYOUT, PRIVILEGED_DIM, PROPRIO_DIM, Scene, Start
from embodyrl.sims.libero.selection import choose_tasks, unique_names
from embodyrl.types import Conventions, EnvSpec

if TYPE_CHECKING:
    from embodyrl.sims.libero.native import Simulation

# First number of the seeds that initial states are drawn with; the splits never share a seed.
_SEED_OF_SPLIT = {"train": 1, "eval": 2}


CONVENTIONS = Conventions(
    orientation="upright",
    channels="rgb",
    fit="crop",
    state=("hand_position:3", "hand_axis_angle:3", "fingers:2"),
    actions="delta",
    scale=(0.05,) * 3 + (0.5,) * 3,
    gripper=(1.0, -1.0),
)
"""What LIBERO means here: pictures as a person sees the scene, and robosuite's OSC_POSE."""


class LiberoEnv(SteppedVecEnv):
    """LIBERO as a ``VecEnv``: OSC_POSE actions, two cameras, official initial states for "eval".

    A backend implements ``scene`` and ``_draw`` besides what ``SteppedVecEnv`` asks for.

    Raises:
        UserError: a camera, split, suite or task that does not exist.
    """

    Config = LiberoConfig

    def __init__(self, config: LiberoConfig) -> None:
        self.config = config
        if unknown := [name for name in config.cameras if name not in CAMERAS]:
            raise UserError(
                f"LIBERO has no camera {unknown[0]!r}. {did_you_mean(unknown[0], CAMERAS)}"
            )
        if not config.split.startswith("ood_") and config.split not in _SEED_OF_SPLIT:
            raise UserError(
                f"LIBERO has no split {config.split!r}: use train, eval, or ood_ and a suite's "
                "ending."
            )
        self.tasks = choose_tasks(config.suites, config.task_ids)
        self._official = [suites.official_states(task) for task in self.tasks]
        # Every task gets the same number of states, so that numbers alternate between the tasks.
        num_states = len(self.tasks) * min(len(states) for states in self._official)
        limits = tuple(suites.max_episode_steps(task.suite) for task in self.tasks)
        differ = not config.max_episode_steps and len(set(limits)) > 1
        spec = EnvSpec(
            name=f"libero/{','.join(dict.fromkeys(config.suites.values()))}",
            num_envs=config.num_envs,
            action_dim=7,
            proprio_dim=PROPRIO_DIM,
            control_mode="osc_pose",
            control_hz=20.0,
            max_episode_steps=config.max_episode_steps or max(limits),
            cameras=dict.fromkeys(config.cameras, (config.image_size, config.image_size)),
            privileged_dim=PRIVILEGED_DIM,
            tasks=unique_names(self.tasks),
            task_steps=limits if differ else (),
            num_init_states=None if config.split == "train" else num_states,
            layout=LAYOUT,
            conventions=CONVENTIONS,
        )
        super().__init__(spec, config)

    @abstractmethod
    def scene(self, k: int) -> Scene | Simulation:
        """The scene of env k in the state of its episode, for experts and tests."""

    @abstractmethod
    def _draw(self, task: int, seed: list[int]) -> Start:
        """An initial state from the task's own placement samplers."""

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> ScriptedExpert:
        """A scripted pick-and-place expert; see ``experts.ScriptedExpert``."""
        return ScriptedExpert(self, noise, seed)

    def start_state(self, init: int) -> tuple[int, Start]:
        """The task and the initial state of number ``init``; see ``EnvSpec.tasks``.

        Official states hold no poses of cabinets and stoves. As in LIBERO's own reset, the samplers
        draw them.
        """
        task = init % len(self.tasks)
        number = init // len(self.tasks)
        official = self._official[task]
        if self.config.split != "train":
            drawn = self._draw(task, [_SEED_OF_SPLIT["eval"], number])
            return task, Start(official[number], drawn.fixtures)
        # Training draws its own states, and draws again where it hits an official one.
        for attempt in range(100):
            drawn = self._draw(task, [_SEED_OF_SPLIT["train"], number, attempt])
            if not (np.abs(official - drawn.state) < 1e-6).all(axis=1).any():
                return task, drawn
        raise RuntimeError(
            f"{self.tasks[task].name}: 100 draws in a row gave an official initial state, which "
            "are kept for evaluation."
        )
