"""``OracleExpert``: OGBench's own oracles, which made its data sets, solve a task or play."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import env_index
from embodyrl.sims.numpy_stream import private_numpy_stream
from embodyrl.sims.ogbench.config import OGBenchConfig
from embodyrl.sims.ogbench.parts import Move, next_move, random_move
from embodyrl.types import EnvSpec

REST = np.zeros(5)


class ReadableEnv(Protocol):
    """What the expert reads of an ``OGBenchEnv``."""

    spec: EnvSpec
    config: OGBenchConfig
    init: np.ndarray
    simulations: list[Any]
    _running: Tensor


class OracleExpert:
    """One oracle at a time moves one part; ``parts`` says which is next.

    Args:
        env: an ``OGBenchEnv`` in this process, whose config says which oracles.
        noise: standard deviation of Gaussian noise on each action.
        seed: of that noise and of what the oracles draw; env k draws from seed + k.
    """

    def __init__(self, env: ReadableEnv, noise: float = 0.0, seed: int = 0) -> None:
        self.env = env
        self.noise = noise
        self._seed = seed
        n = env.spec.num_envs
        self._noise_rngs = [np.random.default_rng([seed + k, 0]) for k in range(n)]
        self._rngs = [np.random.default_rng(0) for _ in range(n)]
        self._oracles: list[Any] = [None] * n
        self._moves: list[Move | None] = [None] * n

    def reset(self, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Begins anew in those envs; call it after their reset."""
        for k in env_index(env_ids, self.env.spec.num_envs):
            self._oracles[k] = None
            # What is drawn depends on the initial state alone, so an episode repeats.
            self._rngs[k] = np.random.default_rng([self._seed, 1, int(self.env.init[k])])

    def act(self) -> Tensor:
        """The next actions (N, 5) float32 in [-1, 1], zero in envs that have ended."""
        actions = torch.zeros(self.env.spec.num_envs, 5)
        for k in self.env._running.nonzero().flatten().tolist():
            action = self._next_action(k)
            if self.noise:
                action = action + self.noise * self._noise_rngs[k].standard_normal(5)
            actions[k] = torch.from_numpy(action.clip(-1.0, 1.0))
        return actions

    def _next_action(self, k: int) -> np.ndarray:
        # A finished oracle has led the arm away from its part; the next one takes over.
        simulation = self.env.simulations[k]
        info = simulation.compute_ob_info()
        if self._oracles[k] is None or self._oracles[k].done:
            self._begin(k, simulation, info)
        move = self._moves[k]
        if move is None:  # nothing is left to do
            return REST
        return self._oracles[k].select_action(None, info | _told(simulation, move))

    def _begin(self, k: int, simulation: Any, info: dict[str, Any]) -> None:
        """Chooses the next part, and the oracle that moves it."""
        # A player takes any part, a demonstrator the one that the goal needs next.
        play = self.env.config.expert == "play"
        rng = self._rngs[k]
        move = random_move(simulation, rng) if play else next_move(simulation, rng)
        self._moves[k] = move
        if move is None:
            return
        oracle = self._oracles[k] = make_oracle(
            simulation, move.part, planned=self.env.config.expert != "markov"
        )
        # Oracles draw where the arm goes afterwards, and their noise, from numpy's own generator.
        with private_numpy_stream(int(rng.integers(2**31))):
            oracle.reset(None, info | _told(simulation, move))


def make_oracle(simulation: Any, part: str, planned: bool) -> Any:
    """OGBench's oracle for a part of a scene, with OGBench's settings for its data."""
    if planned:
        from ogbench.manipspace.oracles.plan.button_plan import ButtonPlanOracle as Button
        from ogbench.manipspace.oracles.plan.cube_plan import CubePlanOracle as Cube
        from ogbench.manipspace.oracles.plan.drawer_plan import DrawerPlanOracle as Drawer
        from ogbench.manipspace.oracles.plan.window_plan import WindowPlanOracle as Window
    else:
        from ogbench.manipspace.oracles.markov.button_markov import ButtonMarkovOracle as Button
        from ogbench.manipspace.oracles.markov.cube_markov import CubeMarkovOracle as Cube
        from ogbench.manipspace.oracles.markov.drawer_markov import DrawerMarkovOracle as Drawer
        from ogbench.manipspace.oracles.markov.window_markov import WindowMarkovOracle as Window
    if part == "button":
        # In a puzzle the gripper stays closed between presses.
        return Button(gripper_always_closed=hasattr(simulation, "_num_cols"), env=simulation)
    return {"cube": Cube, "drawer": Drawer, "window": Window}[part](env=simulation)


def _told(simulation: Any, move: Move) -> dict[str, Any]:
    """What an oracle reads of its target, under the names of OGBench's data collection."""
    # Positions are in the world, in metres.
    data = simulation.data
    if move.part == "cube":
        return {
            "privileged/target_block": move.number,
            "privileged/target_block_pos": np.array(move.place[:3]),
            "privileged/target_block_yaw": np.array(move.place[3:]),
        }
    if move.part == "button":
        site = simulation._button_site_ids[move.number]
        return {
            "privileged/target_button": move.number,
            "privileged/target_button_state": int(move.place[0]),
            "privileged/target_button_top_pos": data.site_xpos[site].copy(),
        }
    # The handle moves along its joint's axis.
    part = move.part
    joint = data.joint(f"{part}_slide")
    handle = data.site_xpos[getattr(simulation, f"_{part}_site_id")]
    return {
        f"privileged/target_{part}_pos": np.array(move.place),
        f"privileged/target_{part}_handle_pos": handle
        + (move.place[0] - joint.qpos[0]) * joint.xaxis,
    }
