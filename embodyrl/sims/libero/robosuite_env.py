"""``RobosuiteEnv``: LIBERO with ``backend="robosuite"``, the reference for the native backend.

robosuite's own objects step it, and OpenGL draws it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.errors import try_each
from embodyrl.sims.libero.base import LiberoEnv
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.render import CAMERAS, scene_renderer
from embodyrl.sims.libero.scene import PRIVILEGED_DIM, PROPRIO_DIM, Scene, Snapshot, Start
from embodyrl.sims.opengl import Renderer
from embodyrl.types import Obs


@dataclass
class _Slot:
    """One env.

    Attributes:
        task: its number.
        snapshot: its episode as it is now.
        images: the pictures that were drawn last, by camera.
        drawn: whether these show the snapshot.
    """

    task: int
    snapshot: Snapshot
    images: dict[str, np.ndarray]
    drawn: bool = False


class RobosuiteEnv(LiberoEnv):
    """See the module. The envs of a task share one scene, by saving and loading their episodes."""

    def __init__(self, config: LiberoConfig) -> None:
        super().__init__(config)
        # XML -> compiled model; the one used last is at the end.
        self._models: OrderedDict[str, Any] = OrderedDict()
        self._scenes: dict[int, Scene] = {}
        self._renderers: dict[int, Renderer] = {}
        self._slots: list[_Slot | None] = [None] * config.num_envs
        # Identity of a model -> the env whose episode is in it and in its scene's simulation. The
        # model counts, too: the poses of fixtures are part of it.
        self._loaded: dict[int, int] = {}

    def close(self) -> None:
        """Frees models and renderers."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers = {}
        self._scenes = {}
        self._loaded = {}
        self._models.clear()

    def scene(self, k: int) -> Scene:
        """See ``LiberoEnv.scene``; loads env k's episode where another one is in the scene."""
        slot = self._slots[k]
        assert slot is not None
        scene = self._scene_of(slot.task)
        if self._loaded.get(id(scene.model)) != k:
            scene.load(slot.snapshot)
            self._loaded[id(scene.model)] = k
        return scene

    def _scene_of(self, task: int) -> Scene:
        """The scene of a task, built where it is missing; drops the models used least recently."""
        if task not in self._scenes:
            scene = self._scenes[task] = Scene(self.tasks[task], self._models)
            while len({id(model) for model in self._models.values()}) > max(
                1, self.config.max_models
            ):
                xml = next(xml for xml, model in self._models.items() if model is not scene.model)
                self._forget(self._models.pop(xml))
        scene = self._scenes[task]
        self._models.move_to_end(
            next(xml for xml, model in self._models.items() if model is scene.model)
        )
        return scene

    def _forget(self, model: Any) -> None:
        """Drops a model with all its scenes; the episodes in them live on in their snapshots."""
        for task in [task for task, scene in self._scenes.items() if scene.model is model]:
            del self._scenes[task]
        self._loaded.pop(id(model), None)
        renderer = self._renderers.pop(id(model), None)
        if renderer is not None:
            renderer.close()

    def _draw(self, task: int, seed: list[int]) -> Start:
        scene = self._scene_of(task)
        self._loaded.pop(id(scene.model), None)
        return scene.draw(seed)

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
        success = torch.zeros(n, dtype=torch.bool)
        fault = torch.zeros(n, dtype=torch.bool)
        numbers = actions.double().cpu().numpy()

        def step_one(k: int) -> None:
            scene = self.scene(k)
            success[k] = scene.step(numbers[k])
            fault[k] = scene.broken()
            self._slots[k].snapshot = scene.save()  # pyright: ignore[reportOptionalMemberAccess] - active

        for k in active.nonzero().flatten().tolist():
            slot = self._slots[k]
            assert slot is not None
            failed = try_each([k], step_one)
            self.fault_texts |= failed
            fault[k] |= k in failed
            # A scene that broke is built anew.
            if fault[k]:
                scene = self._scenes.pop(slot.task, None)
                self._loaded.pop(id(scene.model) if scene else 0, None)
            slot.drawn = False
        success = success.to(self.device) & ~fault.to(self.device)
        return Tick(success.float(), success, success, fault.to(self.device))

    def _observe(self, env_ids: list[int] | None) -> Obs:
        slots = self._slots
        if self.spec.cameras:
            for k in range(len(slots)) if env_ids is None else env_ids:
                self._draw_pictures(slots[k])

        # Envs before their first reset have zeros.
        def stack(get: Callable[[_Slot], np.ndarray], shape: tuple[int, ...], dtype: Any) -> Tensor:
            empty = np.zeros(shape, dtype)
            return torch.from_numpy(np.stack([empty if s is None else get(s) for s in slots])).to(
                self.device
            )

        return Obs(
            images={
                name: stack(lambda s, name=name: s.images[name], (*size, 3), np.uint8)
                for name, size in self.spec.cameras.items()
            },
            proprio=stack(lambda s: s.snapshot.proprio, (PROPRIO_DIM,), np.float32),
            instruction=["" if s is None else self.tasks[s.task].instruction for s in slots],
            privileged=stack(lambda s: s.snapshot.privileged, (PRIVILEGED_DIM,), np.float32),
        )

    def _draw_pictures(self, slot: _Slot | None) -> None:
        """Draws an env's cameras where its pictures are out of date."""
        if slot is None or slot.drawn:
            return
        scene = self._scene_of(slot.task)
        renderer = self._renderers.get(id(scene.model))
        if renderer is None:
            renderer = self._renderers[id(scene.model)] = scene_renderer(
                scene.model, self.config.image_size, self.device
            )
        scene.pose_for_drawing(slot.snapshot)
        self._loaded.pop(id(scene.model), None)
        slot.images = {name: renderer.draw(scene.data, CAMERAS[name]) for name in self.spec.cameras}
        slot.drawn = True
