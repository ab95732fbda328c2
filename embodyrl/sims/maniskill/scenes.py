"""``TaskScenes``: the scenes of all tasks of an env, one engine for each task.

An env that begins an episode of another task moves to a scene of that task. On the CPU as many
scenes are built as are needed at once; on the GPU every task has one for each env, and a task
without an episode is not stepped. All tasks show their states in the same columns (``layout.SharedColumns``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.errors import UserError, did_you_mean
from embodyrl.sims.maniskill.actions import NativeActions
from embodyrl.sims.maniskill.config import ManiSkillConfig
from embodyrl.sims.maniskill.engine import Engine
from embodyrl.sims.maniskill.layout import Entry, SharedColumns, named_entries

Ids = NDArray[np.int64]


class TaskScenes:
    """See the module.

    Args:
        config: of the env.
        tasks: their registered ids.
        make_engine: builds the engine of a task.

    Attributes:
        engines: one for each task.
        native: from actions in [-1, 1] to the units of each task's robot.
        cameras: camera name -> (height, width), the same in all tasks.
        state, proprio: where the numbers of each task stand.
        fault_texts: env number -> why it broke in the last step.

    Raises:
        UserError: the tasks' actions, control rates or cameras differ.
    """

    def __init__(
        self,
        config: ManiSkillConfig,
        tasks: Sequence[str],
        make_engine: Callable[[str], Engine],
    ) -> None:
        n = config.num_envs
        self.engines: list[Engine] = []
        try:
            for task in tasks:
                self.engines.append(make_engine(task))
            self.native = [NativeActions(engine.base) for engine in self.engines]
            _check_alike(tasks, self.native, self.engines)
            self._names = _shared_cameras(config, tasks, self.engines)
        except BaseException:
            self.close()
            raise
        # Sizes of observations are known only from a first observation.
        self.cameras: dict[str, tuple[int, int]] = {}
        states: list[tuple[Entry, ...]] = []
        proprios: list[tuple[Entry, ...]] = []
        for engine in self.engines:
            engine.cameras = self._names
            engine.reset([0], [0])
            images = engine.observe()[2]
            self.cameras = {name: (x.shape[1], x.shape[2]) for name, x in images.items()}
            proprio, state = named_entries(engine.base, config.obs == "rgb")
            proprios.append(proprio)
            states.append(state)
        self.state = SharedColumns(states)
        self.proprio = SharedColumns(proprios)
        self.fault_texts: dict[int, str] = {}
        # The task of each env, and its place among the scenes of that task; -1 before a reset.
        self._task = np.full(n, -1)
        self._place = np.full(n, -1)
        self._free = [set(range(engine.size)) for engine in self.engines]

    def members(self, task: int) -> tuple[Ids, Ids]:
        """The envs that are in a task, and the places of their scenes in its engine."""
        envs = (self._task == task).nonzero()[0]
        return envs, self._place[envs]

    def reset(self, env_ids: list[int], tasks: list[int], seeds: list[int]) -> None:
        """Puts those envs into the initial states of those seeds of those tasks."""
        # All envs leave the scenes of other tasks before any takes a new one.
        for k, task in zip(env_ids, tasks, strict=True):
            if self._task[k] not in (-1, task):
                self._free[self._task[k]].add(int(self._place[k]))
                self._task[k] = -1
        for task, engine in enumerate(self.engines):
            rows = [i for i, t in enumerate(tasks) if t == task]
            for i in rows:
                self._enter(env_ids[i], task)
            if rows:
                places = [int(self._place[env_ids[i]]) for i in rows]
                engine.reset(places, [seeds[i] for i in rows])

    def _enter(self, k: int, task: int) -> None:
        """Gives env k a scene of the task: its own, that of its number, or any."""
        if self._task[k] == task:
            return
        free = self._free[task]
        if not free:
            engine = self.engines[task]
            free.add(engine.size)
            engine.grow(1)
        place = k if k in free else min(free)
        free.remove(place)
        self._task[k] = task
        self._place[k] = place

    def step(self, actions: Tensor, active: Tensor) -> Tick:
        """One control step.

        Args:
            actions: (N, A) in [-1, 1].
            active: (N,) bool; the outcome of the other envs means nothing.
        """
        # Scenes of a single task stand in the order of the envs.
        if len(self.engines) == 1:
            tick = self.engines[0].step(self.native[0](actions), active)
            self.fault_texts = self.engines[0].fault_texts
            return tick
        out = Tick(
            torch.zeros(len(active), device=active.device),
            *(torch.zeros_like(active) for _ in range(3)),
        )
        self.fault_texts = {}
        for task, engine in enumerate(self.engines):
            envs, places = self.members(task)
            if not len(envs) or not active[envs].any():
                continue
            moves = torch.zeros(engine.size, actions.shape[1], device=actions.device)
            steps = torch.zeros(engine.size, dtype=torch.bool, device=active.device)
            moves[places] = self.native[task](actions[envs])
            steps[places] = active[envs]
            tick = engine.step(moves, steps)
            for name in ("reward", "terminated", "success", "fault"):
                getattr(out, name)[envs] = getattr(tick, name)[places]
            env_of = dict(zip(places.tolist(), envs.tolist(), strict=True))
            self.fault_texts |= {env_of[place]: why for place, why in engine.fault_texts.items()}
        return out

    def observe(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """State (N, S), proprio (N, P) and images (N, h, w, 3) uint8.

        What a task does not have is 0, and so is all of an env before its first reset.
        """
        if len(self.engines) == 1:
            return self.engines[0].observe()
        n = len(self._task)
        device = self.engines[0].base.device
        state = torch.zeros(n, self.state.size, device=device)
        proprio = torch.zeros(n, self.proprio.size, device=device)
        images = {
            name: torch.zeros(n, *size, 3, dtype=torch.uint8, device=device)
            for name, size in self.cameras.items()
        }
        for task, engine in enumerate(self.engines):
            envs, places = self.members(task)
            if not len(envs):
                continue
            own_state, own_proprio, own_images = engine.observe()
            state[np.ix_(envs, self.state.of[task])] = own_state[places]
            proprio[np.ix_(envs, self.proprio.of[task])] = own_proprio[places]
            for name, pixels in own_images.items():
                images[name][envs] = pixels[places]
        return state, proprio, images

    def close(self) -> None:
        """Frees all scenes."""
        for engine in self.engines:
            engine.close()


def _check_alike(
    tasks: Sequence[str], native: Sequence[NativeActions], engines: Sequence[Engine]
) -> None:
    """Refuses tasks that one policy cannot act in together."""
    facts: list[tuple[Any, ...]] = [
        (f"{actions.dim} action dims", f"control mode {actions.mode}", f"{e.base.control_freq} Hz")
        for actions, e in zip(native, engines, strict=True)
    ]
    for task, own in zip(tasks, facts, strict=True):
        for here, there in zip(own, facts[0], strict=True):
            if here != there:
                raise UserError(
                    f"One policy cannot act in {tasks[0]} and {task}: {tasks[0]} has {there}, and "
                    f"{task} has {here}. Choose env.control_mode or env.robot so that they agree, "
                    "or train a policy for each."
                )


def _shared_cameras(
    config: ManiSkillConfig, tasks: Sequence[str], engines: Sequence[Engine]
) -> list[str]:
    """The cameras that the config asks for; where it names none, those that all tasks have.

    Raises:
        UserError: a task lacks a camera that was asked for, or they have none in common.
    """
    if config.obs != "rgb":
        return []
    sets = [list(engine.base.scene.sensors) for engine in engines]
    for task, known in zip(tasks, sets, strict=True):
        if unknown := [name for name in config.cameras if name not in known]:
            raise UserError(
                f"{task} has no camera {unknown[0]!r}. {did_you_mean(unknown[0], known)}"
            )
    shared = [name for name in sets[0] if all(name in known for known in sets)]
    if not shared:
        raise UserError(
            f"{' and '.join(tasks)} have no camera in common, so one policy cannot see them. Use "
            "env.obs=state, or train a policy for each."
        )
    return list(config.cameras) or shared
