"""LIBERO stepped by MuJoCo alone in threads and drawn by mujoco-warp: ``LiberoEnv`` with ``backend="native"``."""

from __future__ import annotations

import dataclasses
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.sims.libero import blueprint, suites
from embodyrl.sims.libero.cache import cache_dir, told_once
from embodyrl.sims.libero.env import LiberoConfig, LiberoEnv
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.libero.pictures import Pictures, View
from embodyrl.sims.libero.scene import PRIVILEGED_DIM, PROPRIO_DIM, Scene, Start
from embodyrl.types import Obs

_SETTLE = np.array([0, 0, 0, 0, 0, 0, -1.0])


class NativeEnv(LiberoEnv):
    """See the module. Every env has a simulation of its own; the envs of one scene share what draws it."""

    def __init__(self, config: LiberoConfig) -> None:
        super().__init__(config)
        n = config.num_envs
        self._threads = config.num_threads or torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads) if min(self._threads, n) > 1 else None
        self._blueprints: dict[int, tuple[blueprint.Blueprint, Any]] = {}
        self._simulations: list[Simulation | None] = [None] * n
        self._spare: dict[int, list[Simulation]] = {}
        self._task = np.full(n, -1)
        self._pictures: OrderedDict[str, Pictures] = OrderedDict()  # by XML, the one used last at the end
        self._samplers: dict[int, Scene] = {}
        self._models: dict[str, Any] = {}
        self._stale = np.zeros(n, dtype=bool)
        self._images = {c: np.zeros((n, *size, 3), np.uint8) for c, size in self.spec.cameras.items()}
        self._proprio = np.zeros((n, PROPRIO_DIM), np.float32)
        self._privileged = np.zeros((n, PRIVILEGED_DIM), np.float32)

    def close(self) -> None:
        """Frees threads, simulations and what draws them."""
        for pictures in self._pictures.values():
            pictures.close()
        self._pictures.clear()
        self._simulations = [None] * self.spec.num_envs
        self._spare, self._samplers, self._models = {}, {}, {}
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def scene(self, k: int) -> Simulation:
        """See ``LiberoEnv.scene``."""
        simulation = self._simulations[k]
        assert simulation is not None
        return simulation

    def _draw(self, task: int, seed: list[int]) -> Start:
        """By LIBERO's samplers, which need robosuite's scene: slow to build, so only where something is drawn."""
        drawing, _ = self._blueprint(task)
        if self.config.split != "train" and not drawing.fixtures:
            return Start(np.zeros(0), np.zeros((0, 7)))
        folder = cache_dir() / blueprint.key(self.tasks[task])
        file = folder / f"start_{'_'.join(map(str, seed))}.npz"
        if file.is_file():
            with np.load(file, allow_pickle=False) as saved:
                return Start(saved["state"], saved["fixtures"])
        start = self._sampler(task).draw(seed)
        if self.config.split != "train":  # the official states are few, the others without end
            blueprint.save_start(file, start)
        return start

    def _sampler(self, task: int) -> Scene:
        if task not in self._samplers:
            self._samplers[task] = Scene(self.tasks[task], self._models)
        return self._samplers[task]

    def _blueprint(self, task: int) -> tuple[blueprint.Blueprint, Any]:
        if task not in self._blueprints:
            self._blueprints[task] = blueprint.load(self.tasks[task], lambda: self._sampler(task))
        return self._blueprints[task]

    def _occupy(self, k: int, task: int) -> Simulation:
        """A simulation of the task for env k; the one that it had goes back to its task's others."""
        old = self._simulations[k]
        if old is not None:
            if self._task[k] == task:
                return old
            self._spare.setdefault(int(self._task[k]), []).append(old)
        spare = self._spare.setdefault(task, [])
        simulation = spare.pop() if spare else Simulation(self.tasks[task], *self._blueprint(task))
        self._simulations[k], self._task[k] = simulation, task
        return simulation

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        fresh = []
        for k, init in zip(env_ids, inits, strict=True):
            task, start = self.start_state(init)
            fresh.append((self._occupy(k, task), start))

        def begin(number: int) -> None:
            simulation, start = fresh[number]
            simulation.start(start)
            for _ in range(self.config.settle_steps):
                simulation.step(_SETTLE)

        with told_once("controller", "up to a minute", ("numba", "mujoco")):
            self._each(begin, range(len(fresh)))
        self._stale[env_ids] = True

    def _each(self, work: Callable[[int], Any], items: Any) -> list[Any]:
        if self._pool is None or len(items) == 1:
            return [work(item) for item in items]
        return list(self._pool.map(work, items))

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        n = self.spec.num_envs
        numbers = actions.double().cpu().numpy()

        def advance(k: int) -> tuple[bool, bool]:
            simulation = self.scene(k)
            simulation.step(numbers[k])
            broken = simulation.broken()
            return not broken and simulation.success(), broken

        rows = active.nonzero().flatten().tolist()
        success, fault = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
        for k, (solved, broken) in zip(rows, self._each(advance, rows), strict=True):
            success[k], fault[k] = solved, broken
        self._stale[rows] = True
        success = success.to(self.device)
        return Tick(success.float(), success, success, fault.to(self.device))

    def _observe(self, env_ids: list[int] | None) -> Obs:
        rows = self._stale.nonzero()[0].tolist()
        for k in rows:
            self._proprio[k], self._privileged[k] = self.scene(k).proprio(), self.scene(k).privileged()
        if self.spec.cameras:
            self._draw_pictures(rows)
        self._stale[:] = False
        return Obs(
            images={name: torch.tensor(pixels, device=self.device) for name, pixels in self._images.items()},
            proprio=torch.tensor(self._proprio, device=self.device),
            instruction=["" if t < 0 else self.tasks[t].instruction for t in self._task],
            privileged=torch.tensor(self._privileged, device=self.device),
        )

    def _draw_pictures(self, rows: list[int]) -> None:
        groups: dict[str, list[int]] = {}
        for k in rows:
            groups.setdefault(self.scene(k).blueprint.xml, []).append(k)
        for members in groups.values():
            scenes = [self.scene(k) for k in members]
            views = [View(s.seen_qpos, s.fixture_poses, s.glowing()) for s in scenes]
            for name, pixels in self._pictures_of(scenes[0]).draw(views).items():
                self._images[name][members] = pixels

    def _pictures_of(self, scene: Simulation) -> Pictures:
        plan = scene.blueprint
        if plan.xml not in self._pictures:
            while len(self._pictures) >= max(1, self.config.max_models):
                self._pictures.popitem(last=False)[1].close()
            self._pictures[plan.xml] = Pictures(
                plan.xml, plan.fixtures, plan.burners, self.config.cameras, self.config.image_size, self._threads
            )
        self._pictures.move_to_end(plan.xml)
        return self._pictures[plan.xml]


def warm_up(config: LiberoConfig | None = None) -> float:
    """Builds a config's scenes and compiles all code into the caches on disk, where they are not there yet.

    Args:
        config: whose tasks; None means the first of LIBERO-Spatial.

    Returns:
        Seconds taken: a minute or two and 20 s for each task the first time, a few s for each scene afterwards.
    """
    started = time.perf_counter()
    config = config or LiberoConfig(task_ids=(0,))
    num_tasks = len(config.task_ids) or len(suites.load_suite(config.suite))
    env = NativeEnv(dataclasses.replace(config, num_envs=num_tasks, num_workers=1, split="eval"))
    env.reset(init=range(num_tasks))
    env.close()
    return time.perf_counter() - started
