"""``CompiledEnv``: what the native and the warp backend share, namely blueprints and threads."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from embodyrl.sims.libero import blueprint
from embodyrl.sims.libero.base import LiberoEnv
from embodyrl.sims.libero.blueprint import Blueprint
from embodyrl.sims.libero.cache import cache_dir
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.native import Simulation
from embodyrl.sims.libero.scene import Scene, Start

SETTLE = np.array([0, 0, 0, 0, 0, 0, -1.0])
"""The action while objects fall into place: no motion, gripper open."""


class CompiledEnv(LiberoEnv):
    """A LIBERO env that is stepped without robosuite.

    robosuite is only needed to build a task's blueprint, once on a machine, and to draw initial
    states. A subclass implements ``_make_pictures``.
    """

    def __init__(self, config: LiberoConfig) -> None:
        super().__init__(config)
        self._threads = config.num_threads or torch.get_num_threads()
        self._pool = (
            ThreadPoolExecutor(self._threads) if min(self._threads, config.num_envs) > 1 else None
        )
        self._blueprints: dict[int, tuple[Blueprint, Any]] = {}
        self._samplers: dict[int, Scene] = {}
        self._models: dict[str, Any] = {}
        # What draws each scene, by the scene's XML; the one used last is at the end.
        self._pictures: OrderedDict[str, Any] = OrderedDict()

    @abstractmethod
    def _make_pictures(self, plan: Blueprint) -> Any:
        """A new renderer of a scene."""

    def _pictures_of(self, plan: Blueprint) -> Any:
        """The renderer of a scene; at most ``max_models`` are kept, the others are closed."""
        if plan.xml not in self._pictures:
            while len(self._pictures) >= max(1, self.config.max_models):
                self._pictures.popitem(last=False)[1].close()
            self._pictures[plan.xml] = self._make_pictures(plan)
        self._pictures.move_to_end(plan.xml)
        return self._pictures[plan.xml]

    def close(self) -> None:
        """Frees threads, samplers and renderers."""
        for pictures in self._pictures.values():
            pictures.close()
        self._pictures.clear()
        self._samplers = {}
        self._models = {}
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _draw(self, task: int, seed: list[int]) -> Start:
        """See ``LiberoEnv``.

        LIBERO's samplers need robosuite's scene, which takes seconds to build. So it is built only
        where something is drawn that is not on disk.
        """
        plan, _ = self._blueprint(task)
        # Of an official initial state only the poses of fixtures are drawn.
        if self.config.split != "train" and not plan.fixtures:
            return Start(np.zeros(0), np.zeros((0, 7)))
        folder = cache_dir() / blueprint.key(self.tasks[task])
        file = folder / f"start_{'_'.join(map(str, seed))}.npz"
        if file.is_file():
            with np.load(file, allow_pickle=False) as saved:
                return Start(saved["state"], saved["fixtures"])
        start = self._sampler(task).draw(seed)
        # The official states are few, those of training without end.
        if self.config.split != "train":
            blueprint.save_start(file, start)
        return start

    def _sampler(self, task: int) -> Scene:
        """Robosuite's scene of a task, built when it is first asked for."""
        if task not in self._samplers:
            self._samplers[task] = Scene(self.tasks[task], self._models)
        return self._samplers[task]

    def _blueprint(self, task: int) -> tuple[Blueprint, Any]:
        """A task's blueprint and its physics model."""
        if task not in self._blueprints:
            self._blueprints[task] = blueprint.load_blueprint(
                self.tasks[task], lambda: self._sampler(task)
            )
        return self._blueprints[task]

    def _begin(self, simulation: Simulation, start: Start) -> None:
        """Begins an episode, and steps it until objects have fallen into place."""
        simulation.start(start)
        for _ in range(self.config.settle_steps):
            simulation.step(SETTLE)

    def _each(self, work: Callable[[Any], Any], items: Any) -> list[Any]:
        """``work(item)`` for all items, in threads where there are several."""
        if self._pool is None or len(items) == 1:
            return [work(item) for item in items]
        return list(self._pool.map(work, items))
