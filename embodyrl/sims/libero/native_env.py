"""``NativeEnv``: LIBERO with ``backend="native"``.

MuJoCo steps it in threads, without robosuite, and mujoco-warp draws it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick, check_actions
from embodyrl.errors import try_each
from embodyrl.sims.libero.blueprint import Blueprint
from embodyrl.sims.libero.cache import announce_first_compile
from embodyrl.sims.libero.compiled_env import CompiledEnv
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.libero.pictures import Pictures, View
from embodyrl.sims.libero.scene import PRIVILEGED_DIM, PROPRIO_DIM
from embodyrl.sims.libero.selection import choose_tasks
from embodyrl.types import Obs, Step


class NativeEnv(CompiledEnv):
    """See the module. Every env has a simulation of its own; envs of one scene share a renderer."""

    def __init__(self, config: LiberoConfig) -> None:
        super().__init__(config)
        n = config.num_envs
        self._simulations: list[Simulation | None] = [None] * n
        self._spare: dict[int, list[Simulation]] = {}  # simulations of each task that no env has
        self._failed: set[int] = set()  # envs that raised: their simulations are not used again
        self._task = np.full(n, -1)
        self._stale = np.zeros(n, dtype=bool)  # which observations are out of date
        self._chunk_ticks: Iterator[Tick] | None = None  # results of a chunk that has been run
        self._images = {
            c: np.zeros((n, *size, 3), np.uint8) for c, size in self.spec.cameras.items()
        }
        self._proprio = np.zeros((n, PROPRIO_DIM), np.float32)
        self._privileged = np.zeros((n, PRIVILEGED_DIM), np.float32)

    def close(self) -> None:
        """Frees threads, simulations and renderers."""
        self._simulations = [None] * self.spec.num_envs
        self._spare = {}
        super().close()

    def scene(self, k: int) -> Simulation:
        """See ``LiberoEnv.scene``."""
        simulation = self._simulations[k]
        assert simulation is not None
        return simulation

    def _occupy(self, k: int, task: int) -> Simulation:
        """A simulation of the task for env k; the one that it had becomes a spare one."""
        old = self._simulations[k]
        if old is not None and k not in self._failed:
            if self._task[k] == task:
                return old
            self._spare.setdefault(int(self._task[k]), []).append(old)
        self._failed.discard(k)
        spare = self._spare.setdefault(task, [])
        simulation = spare.pop() if spare else Simulation(self.tasks[task], *self._blueprint(task))
        self._simulations[k] = simulation
        self._task[k] = task
        return simulation

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        # States are drawn one after the other: LIBERO's samplers share numpy's random stream.
        fresh = []
        for k, init in zip(env_ids, inits, strict=True):
            task, start = self.start_state(init)
            fresh.append((self._occupy(k, task), start))

        # Settling takes several control steps, so it runs in threads.
        def begin(number: int) -> None:
            self._begin(*fresh[number])

        with announce_first_compile("controller", "up to a minute", ("numba", "mujoco")):
            self._each(begin, range(len(fresh)))
        self._stale[env_ids] = True

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``.

        Each env's whole chunk is run at once, so a thread stays with one simulation's memory.
        """
        actions = check_actions(actions.to(self.device), self.spec, self._running)
        # ``_chunk`` then asks ``_step`` for one result after the other.
        steps_left = self._limit - self._elapsed
        self._chunk_ticks = iter(self._run(actions, self._running, steps_left))
        try:
            return self._chunk(actions.shape[1], lambda h: actions[:, h])
        finally:
            self._chunk_ticks = None

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        if self._chunk_ticks is not None:
            return next(self._chunk_ticks)
        # An expert chooses its actions one at a time.
        [tick] = self._run(actions[:, None], active, torch.ones_like(self._elapsed))
        return tick

    def _run(self, actions: Tensor, active: Tensor, steps_left: Tensor) -> list[Tick]:
        """Runs a chunk of control steps in each active env, until its episode ends.

        Args:
            actions: (N, H, A).
            active: (N,) bool.
            steps_left: (N,) control steps until the time is up.

        Returns:
            The results of the H steps.
        """
        horizon = actions.shape[1]
        n = self.spec.num_envs
        numbers = actions.double().cpu().numpy()
        most = steps_left.tolist()
        solved = torch.zeros(horizon, n, dtype=torch.bool)
        broken = torch.zeros(horizon, n, dtype=torch.bool)

        def advance(k: int) -> None:
            simulation = self.scene(k)
            for h in range(min(horizon, most[k])):
                simulation.step(numbers[k, h])
                broken[h, k] = fault = simulation.broken()
                solved[h, k] = success = not fault and simulation.success()
                if fault or (success and not self._ignore_success):
                    break

        rows = active.nonzero().flatten().tolist()
        for failed in self._each(lambda k: try_each([k], advance), rows):
            for k, why in failed.items():
                self.fault_texts[k] = why
                broken[0, k] = True
                self._failed.add(k)
        self._stale[rows] = True
        self._stale[list(self._failed)] = False
        solved = solved.to(self.device)
        broken = broken.to(self.device)
        return [Tick(a.float(), a, a, b) for a, b in zip(solved, broken, strict=True)]

    def _observe(self, env_ids: list[int] | None) -> Obs:
        rows = self._stale.nonzero()[0].tolist()
        for k in rows:
            self._proprio[k] = self.scene(k).proprio()
            self._privileged[k] = self.scene(k).privileged()
        if self.spec.cameras:
            self._draw_pictures(rows)
        self._stale[:] = False
        return Obs(
            images={
                name: torch.tensor(pixels, device=self.device)
                for name, pixels in self._images.items()
            },
            proprio=torch.tensor(self._proprio, device=self.device),
            instruction=["" if t < 0 else self.tasks[t].instruction for t in self._task],
            privileged=torch.tensor(self._privileged, device=self.device),
        )

    def _draw_pictures(self, rows: list[int]) -> None:
        """Draws the envs of ``rows``, those of one scene together."""
        groups: dict[str, list[int]] = {}
        for k in rows:
            groups.setdefault(self.scene(k).blueprint.xml, []).append(k)
        for members in groups.values():
            scenes = [self.scene(k) for k in members]
            views = [View(s.seen_qpos, s.fixture_poses, s.glowing()) for s in scenes]
            for name, pixels in self._pictures_of(scenes[0].blueprint).draw(views).items():
                self._images[name][members] = pixels

    def _make_pictures(self, plan: Blueprint) -> Pictures:
        config = self.config
        return Pictures(
            plan.xml,
            plan.fixtures,
            plan.burners,
            config.cameras,
            config.image_size,
            self._threads,
            self.device,
        )


def warm_up(config: LiberoConfig | None = None) -> float:
    """Builds the scenes of a config and compiles all code, and keeps both in caches on disk.

    Args:
        config: whose tasks; None means the first of LIBERO-Spatial.

    Returns:
        Seconds taken. The first time it is a minute or two, and 20 s for each task; afterwards a
        few seconds for each scene.
    """
    started = time.perf_counter()
    config = config or LiberoConfig(task_ids=(0,))
    num_tasks = len(choose_tasks(config.suites, config.task_ids))
    env = NativeEnv(dataclasses.replace(config, num_envs=num_tasks, num_workers=1, split="eval"))
    env.reset(init=range(num_tasks))
    env.close()
    return time.perf_counter() - started
