"""``MetaWorldEnv``: MetaWorld's fifty tasks (arXiv:1910.10897) as a ``VecEnv``."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick, VecEnv, env_index, split_index
from embodyrl.registry import EnvFactory
from embodyrl.sims.metaworld.config import MetaWorldConfig, check_config
from embodyrl.sims.metaworld.simulation import (
    HAND_DIM,
    STATE_DIM,
    make_scripted_policy,
    make_simulation,
    start,
)
from embodyrl.sims.metaworld.tasks import SENTENCES, SPLITS, chosen_tasks
from embodyrl.sims.one_by_one import step_one_by_one
from embodyrl.sims.opengl import Renderer
from embodyrl.sims.workers.pool import PooledVecEnv
from embodyrl.types import Conventions, EnvSpec, Obs

MAX_EPISODE_STEPS = 500
"""MetaWorld's own time limit."""
TURNED = ("corner", "corner2", "corner3")
"""MetaWorld's cameras that hang upside down; their pictures are turned to stand upright."""


class MetaWorldEnv(SteppedVecEnv):
    """N episodes of several tasks, in this process; see ``make_env`` for several.

    Success is ``info["success"]``. An action moves the hand by up to 1 cm and sets the effort that
    closes it.

    Raises:
        UserError: a setting that does not exist.
        MissingDependencyError: MetaWorld, or OpenGL for cameras, is missing.
    """

    Config = MetaWorldConfig

    def __init__(self, config: MetaWorldConfig) -> None:
        check_config(config)
        self.config = config
        self.tasks = chosen_tasks(config.suite, config.task)
        pictures = bool(config.cameras)
        n = config.num_envs
        super().__init__(
            EnvSpec(
                name=f"metaworld/{self.tasks[0] if len(self.tasks) == 1 else config.suite}",
                num_envs=n,
                action_dim=4,
                proprio_dim=HAND_DIM if pictures else STATE_DIM,
                control_mode="ee_delta_pos",
                control_hz=80.0,
                max_episode_steps=config.max_episode_steps or MAX_EPISODE_STEPS,
                cameras=dict.fromkeys(config.cameras, (config.image_size, config.image_size)),
                privileged_dim=STATE_DIM,
                tasks=self.tasks,
                conventions=Conventions(
                    orientation="upright" if pictures else "",
                    channels="rgb" if pictures else "",
                    fit="crop",
                    actions="delta",
                    scale=(0.01,) * 3,
                    gripper=(1.0, -1.0),
                ),
            ),
            config,
        )
        self.states = np.zeros((n, STATE_DIM))
        self._simulations: list[Any] = [None] * n
        self._task_of = [-1] * n
        # (task, simulation) of those that no env uses; the one used last is at the end.
        self._spare: list[tuple[int, Any]] = [(0, self._build(0))]
        self._renderers: dict[int, Renderer] = {}
        self._images = {
            name: np.zeros((n, *size, 3), np.uint8) for name, size in self.spec.cameras.items()
        }
        self._moved: set[int] = set()

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> ScriptedExpert:
        """MetaWorld's scripted policies, acting in this env."""
        return ScriptedExpert(self, noise, seed)

    def close(self) -> None:
        """Frees renderers and simulations."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers = {}
        self._spare = []

    def task_of(self, k: int) -> str:
        """The task of env k's episode."""
        return self.tasks[self.init[k] % len(self.tasks)]

    def _build(self, task: int) -> Any:
        return make_simulation(self.tasks[task], self.spec.max_episode_steps)

    def _take(self, k: int, task: int) -> Any:
        """A simulation of a task for env k, which gives back its own."""
        # Its own may do, or goes back to the others.
        if self._simulations[k] is not None:
            if self._task_of[k] == task:
                return self._simulations[k]
            self._spare.append((self._task_of[k], self._simulations[k]))
        found = next((entry for entry in reversed(self._spare) if entry[0] == task), None)
        if found is not None:
            self._spare = [entry for entry in self._spare if entry is not found]
        # The oldest are dropped.
        self._spare = self._spare[-self.config.max_models :]
        self._task_of[k] = task
        self._simulations[k] = found[1] if found is not None else self._build(task)
        return self._simulations[k]

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        split = split_index(self.config.split, list(SPLITS))
        for k, init in zip(env_ids, inits, strict=True):
            # Numbers alternate between the tasks.
            number, task = divmod(init, len(self.tasks))
            # Seeds alternate between the splits, so the splits share no state.
            self.states[k] = start(self._take(k, task), len(SPLITS) * number + split)
        self._moved |= set(env_ids)

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        numbers = actions.double().cpu().numpy()
        self._moved |= set(active.nonzero().flatten().tolist())

        def step_one(k: int) -> tuple[float, bool, Any]:
            simulation = self._simulations[k]
            # MetaWorld never terminates; the env API does, at success.
            self.states[k], dense, _, _, info = simulation.step(numbers[k])
            reward = info["success"] if self.config.reward == "sparse" else dense
            return float(reward), bool(info["success"]), simulation.data

        return step_one_by_one(self, active, step_one)

    def _observe(self, env_ids: list[int] | None) -> Obs:
        self._draw()
        states = torch.from_numpy(self.states.astype(np.float32)).to(self.device)
        return Obs(
            images={
                name: torch.from_numpy(image.copy()).to(self.device)
                for name, image in self._images.items()
            },
            proprio=states[:, : self.spec.proprio_dim].clone(),
            instruction=[SENTENCES[self.task_of(k)] for k in range(self.spec.num_envs)],
            privileged=states,
        )

    def _draw(self) -> None:
        """Draws the pictures that are out of date."""
        for k in self._moved if self.spec.cameras else ():
            simulation = self._simulations[k]
            # The models of a task share one renderer: meshes and textures are the same.
            renderer = self._renderers.get(self._task_of[k])
            if renderer is None:
                renderer = Renderer(simulation.model, self.config.image_size, self.device)
                self._renderers[self._task_of[k]] = renderer
            for name, image in self._images.items():
                picture = renderer.draw(simulation.data, name, simulation.model)
                image[k] = picture[::-1, ::-1] if name in TURNED else picture
        self._moved.clear()


class ScriptedExpert:
    """MetaWorld's own scripted policies; they read the 39 numbers of the state alone.

    Args:
        env: a ``MetaWorldEnv`` in this process.
        noise: standard deviation of Gaussian noise on each action.
        seed: of that noise; env k draws from seed + k.
    """

    def __init__(self, env: MetaWorldEnv, noise: float = 0.0, seed: int = 0) -> None:
        self.env = env
        self.noise = noise
        self._rngs = [np.random.default_rng(seed + k) for k in range(env.spec.num_envs)]
        self._policies = {task: make_scripted_policy(task) for task in env.tasks}

    def reset(self, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Nothing but a check of the numbers: these policies remember nothing."""
        env_index(env_ids, self.env.spec.num_envs)

    def act(self) -> Tensor:
        """The next actions (N, 4) float32 in [-1, 1], zero in envs that have ended."""
        actions = torch.zeros(self.env.spec.num_envs, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that some of their actions exceed 1
            for k in self.env._running.nonzero().flatten().tolist():
                action = self._policies[self.env.task_of(k)].get_action(self.env.states[k])
                action = action + self.noise * self._rngs[k].standard_normal(4)
                actions[k] = torch.from_numpy(np.clip(action, -1.0, 1.0))
        return actions


def make_env(config: MetaWorldConfig) -> VecEnv:
    """The env that a config describes: in this process, or in ``config.num_workers`` processes.

    Raises:
        UserError: see ``MetaWorldEnv``.
        MissingDependencyError: see there.
    """
    # Looked at here, so that a mistake is reported before any process starts.
    check_config(config)
    if config.num_workers > 1:
        return PooledVecEnv("metaworld", config, num_workers=config.num_workers)
    return MetaWorldEnv(config)


METAWORLD = EnvFactory(MetaWorldConfig, make_env)
"""What the registry loads."""
