"""``OGBenchEnv``: OGBench's manipulation scenes (arXiv:2410.20092) as a ``VecEnv``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import SteppedVecEnv, Tick, VecEnv, split_index
from embodyrl.registry import EnvFactory
from embodyrl.sims.ogbench.config import OGBenchConfig, check_config
from embodyrl.sims.ogbench.experts import OracleExpert
from embodyrl.sims.ogbench.scenes import NUM_GOALS, SPLITS, require_scene
from embodyrl.sims.ogbench.simulation import (
    ROBOT_DIM,
    goal_infos,
    goal_numbers,
    make_simulations,
    part_successes,
)
from embodyrl.sims.ogbench.tasks import instruction, task_name
from embodyrl.sims.one_by_one import step_one_by_one
from embodyrl.sims.opengl import Renderer
from embodyrl.sims.workers.pool import PooledVecEnv
from embodyrl.types import Conventions, EnvSpec, Obs


class OGBenchEnv(SteppedVecEnv):
    """N episodes of one scene, in this process; see ``make_env`` for several.

    Success is OGBench's: all parts of the scene are where the goal wants them. An action is a
    displacement of the gripper (5 cm), its yaw (0.3 rad) and its opening.

    Raises:
        UserError: a setting that does not exist.
        MissingDependencyError: OGBench, or OpenGL for cameras, is missing.
    """

    Config = OGBenchConfig

    def __init__(self, config: OGBenchConfig) -> None:
        check_config(config)
        scene = require_scene(config.task)
        self.config = config
        self.goals = config.goals or tuple(range(1, NUM_GOALS + 1))
        infos = goal_infos(scene)
        self._sentences = [instruction(scene, goal, infos[goal - 1]) for goal in self.goals]
        pictures = bool(config.cameras)
        self.simulations = make_simulations(scene, pictures, config.num_envs)
        # The size of the state is known only from a first observation.
        self._states = [self._start(k, 0) for k in range(config.num_envs)]
        state_dim = len(self._states[0])
        super().__init__(
            EnvSpec(
                name=f"ogbench/{config.task}",
                num_envs=config.num_envs,
                action_dim=5,
                proprio_dim=ROBOT_DIM if pictures else state_dim,
                control_mode="ee_delta_pos_yaw",
                control_hz=20.0,
                max_episode_steps=config.max_episode_steps or scene.max_episode_steps,
                cameras=dict.fromkeys(config.cameras, (config.image_size, config.image_size)),
                privileged_dim=state_dim,
                tasks=tuple(task_name(config.task, goal) for goal in self.goals),
                conventions=Conventions(
                    orientation="upright" if pictures else "",
                    channels="rgb" if pictures else "",
                    fit="crop",
                    actions="delta",
                    scale=(0.05, 0.05, 0.05, 0.3),
                    gripper=(1.0, -1.0),
                ),
            ),
            config,
        )
        # One for all envs, whose models are copies of one. Pictures are kept until something moves.
        self._renderer = (
            Renderer(self.simulations[0].model, config.image_size, self.device)
            if pictures
            else None
        )
        self._images = {
            name: np.zeros((config.num_envs, *size, 3), np.uint8)
            for name, size in self.spec.cameras.items()
        }
        self._moved = set(range(config.num_envs))

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> OracleExpert:
        """OGBench's oracles, acting in this env; see ``experts.OracleExpert``."""
        return OracleExpert(self, noise, seed)

    def close(self) -> None:
        """Frees the renderer."""
        if self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def _start(self, k: int, init: int) -> np.ndarray:
        """Puts env k into an initial state, and returns its state."""
        # Numbers alternate between the goals.
        number, task = divmod(init, len(self.goals))
        # Seeds alternate between the splits, so the splits share no state.
        seed = len(SPLITS) * number + split_index(self.config.split, list(SPLITS))
        simulation = self.simulations[k]
        state, _ = simulation.reset(options={"task_id": self.goals[task]}, seed=seed)
        return np.concatenate([state, goal_numbers(simulation)])

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        for k, init in zip(env_ids, inits, strict=True):
            self._states[k] = self._start(k, init)
        self._moved |= set(env_ids)

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        numbers = actions.double().cpu().numpy()
        self._moved |= set(active.nonzero().flatten().tolist())

        def step_one(k: int) -> tuple[float, bool, Any]:
            simulation = self.simulations[k]
            state = simulation.step(numbers[k])[0]
            # OGBench's single tasks are judged before the action; here what it brought about is.
            parts = part_successes(simulation)
            self._states[k][: len(state)] = state
            sparse = self.config.reward == "sparse"
            reward = all(parts) if sparse else sum(parts) - len(parts)
            return float(reward), all(parts), simulation.data

        return step_one_by_one(self, active, step_one)

    def _observe(self, env_ids: list[int] | None) -> Obs:
        self._draw()
        states = torch.from_numpy(np.stack(self._states).astype(np.float32)).to(self.device)
        return Obs(
            images={
                name: torch.from_numpy(image.copy()).to(self.device)
                for name, image in self._images.items()
            },
            proprio=states[:, : self.spec.proprio_dim].clone(),
            instruction=[self._sentences[i % len(self.goals)] for i in self.init.tolist()],
            privileged=states,
        )

    def _draw(self) -> None:
        """Draws the pictures that are out of date."""
        if self._renderer is None:
            return
        for k in self._moved:
            simulation = self.simulations[k]
            for name, image in self._images.items():
                image[k] = self._renderer.draw(simulation.data, name, simulation.model)
        self._moved.clear()


def make_env(config: OGBenchConfig) -> VecEnv:
    """The env that a config describes: in this process, or in ``config.num_workers`` processes.

    Raises:
        UserError: see ``OGBenchEnv``.
        MissingDependencyError: see there.
    """
    # Looked at here, so that a mistake is reported before any process starts.
    check_config(config)
    if config.num_workers > 1:
        return PooledVecEnv("ogbench", config, num_workers=config.num_workers)
    return OGBenchEnv(config)


OGBENCH = EnvFactory(OGBenchConfig, make_env)
"""What the registry loads."""
