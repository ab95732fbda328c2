"""LIBERO as a VecEnv: OSC_POSE actions, two cameras, official initial states for ``split="eval"``."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from embodyrl.env import EnvConfig, SteppedVecEnv
from embodyrl.errors import UserError, did_you_mean
from embodyrl.sims.libero import suites
from embodyrl.sims.libero.render import CAMERAS
from embodyrl.sims.libero.scene import LAYOUT, PRIVILEGED_DIM, PROPRIO_DIM, Scene, Start
from embodyrl.sims.workers.pool import PooledVecEnv
from embodyrl.types import EnvSpec

if TYPE_CHECKING:
    from embodyrl.sims.libero.native import Simulation

_STREAMS = {"train": 1, "eval": 2}  # of the random numbers that initial states are drawn with


@dataclass(frozen=True)
class LiberoConfig(EnvConfig):
    """LIBERO's own settings.

    Attributes:
        suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10``, ``libero_90``,
            or one of LIBERO-PRO's. ``split="ood_swap"`` is short for the suite of that ending
            (``_swap``, ``_lan``, ``_task``, ``_object``, ``_with_mug`` ...) with its official
            initial states.
        task_ids: numbers of the suite's tasks; empty means all.
        cameras: any of ``agentview`` and ``wrist``.
        image_size: height and width of the pictures.
        backend: ``native`` steps MuJoCo with a compiled controller and draws with mujoco-warp;
            ``warp`` does all of it with mujoco-warp, thousands of worlds at once on a GPU;
            ``robosuite`` runs robosuite's own controller and OpenGL, the reference.
        num_workers: processes that share the envs; 1 runs them in this one.
        num_threads: of each process of the native backend; 0 means as many as torch uses there.
        max_episode_steps: control steps (of 1/20 s); 0 means what published results use for the
            suite.
        settle_steps: control steps with the gripper open that every episode starts with, while
            objects fall into place.
        max_models: scenes with their visual geometry kept in each process, about .4 GB each and 3 s
            to make; tasks with the same objects (all of LIBERO-Spatial, all of LIBERO-Goal) share
            one.
    """

    name: str = "libero"
    backend: str = "native"
    suite: str = "libero_spatial"
    task_ids: tuple[int, ...] = ()
    cameras: tuple[str, ...] = ("agentview", "wrist")
    image_size: int = 128
    num_workers: int = 1
    num_threads: int = 0
    max_episode_steps: int = 0
    settle_steps: int = 10
    max_models: int = 10


class LiberoEnv(SteppedVecEnv):
    """See the module. With ``num_workers`` > 1, ``LiberoEnv(config)`` is a ``PooledVecEnv`` of such envs."""

    Config = LiberoConfig

    def __new__(cls, config: LiberoConfig) -> LiberoEnv:
        """The backend asked for, or a pool where several processes are."""
        if config.num_workers > 1 and config.backend != "warp":
            return cast(LiberoEnv, PooledVecEnv("libero", config, num_workers=config.num_workers))
        if config.backend == "native":
            from embodyrl.sims.libero.native_env import NativeEnv as Backend
        elif config.backend == "warp":
            from embodyrl.sims.libero.warp_env import WarpEnv as Backend
        elif config.backend == "robosuite":
            from embodyrl.sims.libero.robosuite_env import RobosuiteEnv as Backend
        else:
            names = ("native", "warp", "robosuite")
            raise UserError(
                f"LIBERO has no backend {config.backend!r}. {did_you_mean(config.backend, names)}"
            )
        return super().__new__(cast(Any, Backend))

    def __init__(self, config: LiberoConfig) -> None:
        self.config = config
        if wrong := [name for name in config.cameras if name not in CAMERAS]:
            raise UserError(f"LIBERO has no camera {wrong[0]!r}. {did_you_mean(wrong[0], CAMERAS)}")
        self.suite = config.suite
        if config.split.startswith("ood_"):
            self.suite = f"{config.suite}_{config.split.removeprefix('ood_')}"
        elif config.split not in _STREAMS:
            raise UserError(
                f"LIBERO has no split {config.split!r}: use train, eval, or ood_ and a suite's "
                "ending."
            )
        tasks = suites.load_suite(self.suite)
        if wrong := [i for i in config.task_ids if not 0 <= i < len(tasks)]:
            raise UserError(
                f"{self.suite} has no task {wrong[0]}: it has {len(tasks)}, numbered from 0."
            )
        self.tasks = [tasks[i] for i in config.task_ids] if config.task_ids else tasks
        self._official = [suites.official_states(task) for task in self.tasks]
        num_states = (
            None
            if config.split == "train"
            else len(self.tasks) * min(len(s) for s in self._official)
        )
        spec = EnvSpec(
            name=f"libero/{self.suite}",
            num_envs=config.num_envs,
            action_dim=7,
            proprio_dim=PROPRIO_DIM,
            control_mode="osc_pose",
            control_hz=20.0,
            max_episode_steps=config.max_episode_steps or suites.max_episode_steps(self.suite),
            cameras=dict.fromkeys(config.cameras, (config.image_size, config.image_size)),
            privileged_dim=PRIVILEGED_DIM,
            tasks=tuple(task.name for task in self.tasks),
            num_init_states=num_states,
            layout=LAYOUT,
        )
        super().__init__(spec, config)

    @abstractmethod
    def scene(self, k: int) -> Scene | Simulation:
        """The scene of env k, holding env k's episode: for experts and tests."""

    @abstractmethod
    def _draw(self, task: int, seed: list[int]) -> Start:
        """An initial state from the task's own placement samplers."""

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> Any:
        """A scripted pick-and-place expert that reads the simulation; see ``experts.ScriptedExpert``."""
        from embodyrl.sims.libero.experts import ScriptedExpert

        return ScriptedExpert(self, noise, seed)

    def start_state(self, init: int) -> tuple[int, Start]:
        """The task and initial state of number ``init``; see ``EnvSpec.tasks``.

        Official states hold no poses of cabinets and stoves: like LIBERO's own reset, the samplers
        draw them.
        """
        task = init % len(self.tasks)
        number = init // len(self.tasks)
        official = self._official[task]
        if self.config.split != "train":
            drawn = self._draw(task, [_STREAMS["eval"], number])
            return task, Start(official[number], drawn.fixtures)
        for attempt in range(100):
            drawn = self._draw(task, [_STREAMS["train"], number, attempt])
            if not (np.abs(official - drawn.state) < 1e-6).all(axis=1).any():
                return task, drawn
        raise RuntimeError(f"{self.tasks[task].name}: every state drawn is an official one.")
