"""LIBERO as a VecEnv: OSC_POSE actions, two cameras, official initial states for ``split="eval"``."""

from __future__ import annotations

import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import EnvConfig, SteppedVecEnv, Tick
from embodyrl.errors import UserError, did_you_mean
from embodyrl.sims.libero import suites
from embodyrl.sims.libero.render import CAMERAS, Renderer
from embodyrl.sims.libero.scene import PRIVILEGED_DIM, PROPRIO_DIM, Scene, Snapshot, Start
from embodyrl.sims.workers import PooledVecEnv
from embodyrl.types import EnvSpec, Obs

_STREAMS = {"train": 1, "eval": 2}  # of the random numbers that initial states are drawn with


@dataclass(frozen=True)
class LiberoConfig(EnvConfig):
    """LIBERO's own settings.

    Attributes:
        suite: ``libero_spatial``, ``libero_object``, ``libero_goal``, ``libero_10``, ``libero_90``, or one of
            LIBERO-PRO's. ``split="ood_swap"`` is short for the suite of that ending (``_swap``, ``_lan``, ``_task``,
            ``_object``, ``_with_mug`` ...) with its official initial states.
        task_ids: numbers of the suite's tasks; empty means all.
        cameras: any of ``agentview`` and ``wrist``.
        image_size: height and width of the pictures.
        num_workers: processes that share the envs; 1 runs them in this one.
        max_episode_steps: control steps (of 1/20 s); 0 means what published results use for the suite.
        settle_steps: control steps with the gripper open that every episode starts with, while objects fall into place.
        max_models: compiled scenes kept in each process, about .4 GB each and 3 s to make; tasks with the same objects
            (all of LIBERO-Spatial, all of LIBERO-Goal) share one.
    """

    name: str = "libero"
    suite: str = "libero_spatial"
    task_ids: tuple[int, ...] = ()
    cameras: tuple[str, ...] = ("agentview", "wrist")
    image_size: int = 128
    num_workers: int = 1
    max_episode_steps: int = 0
    settle_steps: int = 10
    max_models: int = 10


@dataclass
class _Slot:
    """One env: its scene, its episode, and the pictures that were taken of it last."""

    task: int
    snapshot: Snapshot
    images: dict[str, np.ndarray]
    fresh: bool = False


class LiberoEnv(SteppedVecEnv):
    """See the module. With ``num_workers`` > 1, ``LiberoEnv(config)`` is a ``PooledVecEnv`` of such envs."""

    Config = LiberoConfig

    def __new__(cls, config: LiberoConfig) -> LiberoEnv:
        """A pool where several processes are asked for."""
        if config.num_workers > 1:
            return cast(LiberoEnv, PooledVecEnv("libero", config, num_workers=config.num_workers))
        return super().__new__(cls)

    def __init__(self, config: LiberoConfig) -> None:
        self.config = config
        if wrong := [name for name in config.cameras if name not in CAMERAS]:
            raise UserError(f"LIBERO has no camera {wrong[0]!r}. {did_you_mean(wrong[0], CAMERAS)}")
        self.suite = config.suite
        if config.split.startswith("ood_"):
            self.suite = f"{config.suite}_{config.split.removeprefix('ood_')}"
        elif config.split not in _STREAMS:
            raise UserError(f"LIBERO has no split {config.split!r}: use train, eval, or ood_ and a suite's ending.")
        tasks = suites.load_suite(self.suite)
        if wrong := [i for i in config.task_ids if not 0 <= i < len(tasks)]:
            raise UserError(f"{self.suite} has no task {wrong[0]}: it has {len(tasks)}, numbered from 0.")
        self.tasks = [tasks[i] for i in config.task_ids] if config.task_ids else tasks
        self._official = [suites.official_states(task) for task in self.tasks]
        num_states = None if config.split == "train" else len(self.tasks) * min(len(s) for s in self._official)
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
        )
        super().__init__(spec, config)
        self._models: OrderedDict[str, Any] = OrderedDict()  # XML -> compiled model, the one used last at the end
        self._scenes: dict[int, Scene] = {}
        self._renderers: dict[int, Renderer] = {}
        self._slots: list[_Slot | None] = [None] * config.num_envs
        # id of a model -> the env whose episode it holds, fixtures' poses included, with its scene's simulation.
        self._loaded: dict[int, int] = {}

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> Any:
        """A scripted pick-and-place expert that reads the simulation; see ``experts.ScriptedExpert``."""
        from embodyrl.sims.libero.experts import ScriptedExpert

        return ScriptedExpert(self, noise, seed)

    def close(self) -> None:
        """Frees models and pictures' memory."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers, self._scenes, self._loaded = {}, {}, {}
        self._models.clear()

    def scene(self, k: int) -> Scene:
        """The scene of env k, holding env k's episode: for experts and tests."""
        slot = self._slots[k]
        assert slot is not None
        scene = self._scene_of(slot.task)
        if self._loaded.get(id(scene.model)) != k:
            scene.load(slot.snapshot)
            self._loaded[id(scene.model)] = k
        return scene

    def _scene_of(self, task: int) -> Scene:
        if task not in self._scenes:
            scene = self._scenes[task] = Scene(self.tasks[task], self._models)
            while len({id(model) for model in self._models.values()}) > max(1, self.config.max_models):
                xml = next(xml for xml, model in self._models.items() if model is not scene.model)
                self._forget(self._models.pop(xml))
        scene = self._scenes[task]
        self._models.move_to_end(next(xml for xml, model in self._models.items() if model is scene.model))
        return scene

    def _forget(self, model: Any) -> None:
        """Drops a model with all its scenes; the episodes in them live on in their snapshots."""
        for task in [task for task, scene in self._scenes.items() if scene.model is model]:
            del self._scenes[task]
        self._loaded.pop(id(model), None)
        renderer = self._renderers.pop(id(model), None)
        if renderer is not None:
            renderer.close()

    def start_state(self, init: int) -> tuple[int, Start]:
        """The task and initial state of number ``init``; see ``EnvSpec.tasks``.

        Official states hold no poses of cabinets and stoves: like LIBERO's own reset, the samplers draw them.
        """
        task, number = init % len(self.tasks), init // len(self.tasks)
        scene, official = self._scene_of(task), self._official[task]
        self._loaded.pop(id(scene.model), None)
        if self.config.split != "train":
            drawn = scene.draw([_STREAMS["eval"], number])
            return task, Start(official[number], drawn.fixtures)
        for attempt in range(100):
            drawn = scene.draw([_STREAMS["train"], number, attempt])
            if not (np.abs(official - drawn.state) < 1e-6).all(axis=1).any():
                return task, drawn
        raise RuntimeError(f"{self.tasks[task].name}: every state drawn is an official one.")

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        settle = np.array([0, 0, 0, 0, 0, 0, -1.0])
        for k, init in zip(env_ids, inits, strict=True):
            task, start = self.start_state(init)
            scene = self._scene_of(task)
            scene.start(start)
            for _ in range(self.config.settle_steps):
                scene.step(settle)
            self._slots[k] = _Slot(task, scene.save(), {})
            self._loaded[id(scene.model)] = k

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        n = self.spec.num_envs
        success, fault = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
        numbers = actions.double().cpu().numpy()
        for k in active.nonzero().flatten().tolist():
            slot = self._slots[k]
            assert slot is not None
            try:
                scene = self.scene(k)
                success[k] = scene.step(numbers[k])
                fault[k] = scene.broken()
                slot.snapshot = scene.save()
            except Exception:  # only this env is lost; its scene is built anew
                warnings.warn(f"{self.tasks[slot.task].name} broke:\n{traceback.format_exc()}", stacklevel=2)
                fault[k] = True
            if fault[k]:
                scene = self._scenes.pop(slot.task, None)
                self._loaded.pop(id(scene.model) if scene else 0, None)
            slot.fresh = False
        success = success.to(self.device) & ~fault.to(self.device)
        return Tick(success.float(), success, success, fault.to(self.device))

    def _observe(self, env_ids: list[int] | None) -> Obs:
        slots = self._slots
        if self.spec.cameras:
            for k in range(len(slots)) if env_ids is None else env_ids:
                self._draw(slots[k])

        def stack(get: Callable[[_Slot], np.ndarray], shape: tuple[int, ...], dtype: Any) -> Tensor:
            empty = np.zeros(shape, dtype)
            return torch.from_numpy(np.stack([empty if s is None else get(s) for s in slots])).to(self.device)

        return Obs(
            images={
                name: stack(lambda s, name=name: s.images[name], (*size, 3), np.uint8)
                for name, size in self.spec.cameras.items()
            },
            proprio=stack(lambda s: s.snapshot.proprio, (PROPRIO_DIM,), np.float32),
            instruction=["" if s is None else self.tasks[s.task].instruction for s in slots],
            privileged=stack(lambda s: s.snapshot.privileged, (PRIVILEGED_DIM,), np.float32),
        )

    def _draw(self, slot: _Slot | None) -> None:
        if slot is None or slot.fresh:
            return
        scene = self._scene_of(slot.task)
        renderer = self._renderers.get(id(scene.model))
        if renderer is None:
            renderer = self._renderers[id(scene.model)] = Renderer(scene.model, self.config.image_size)
        scene.pose_for_drawing(slot.snapshot)
        self._loaded.pop(id(scene.model), None)
        slot.images = {name: renderer.draw(scene.data, name) for name in self.spec.cameras}
        slot.fresh = True
