"""LIBERO on mujoco-warp, thousands of worlds at once on a GPU: ``LiberoEnv`` with ``backend="warp"``.

Physics, controller, goals and pictures are computed where the worlds are, and actions and observations cross as tensors
(DLPack). Tasks whose scenes compile to the same model share one batch. Only a reset is prepared on the host: the start
and its settling are ``NativeEnv``'s own, so that episodes begin in the same states in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.errors import UserError
from embodyrl.sims.libero import judge, native
from embodyrl.sims.libero.blueprint import Blueprint
from embodyrl.sims.libero.compiled import CompiledEnv
from embodyrl.sims.libero.env import LiberoConfig
from embodyrl.sims.libero.pictures_batch import BatchPictures
from embodyrl.sims.libero.scene import PRIVILEGED_DIM, PROPRIO_DIM
from embodyrl.sims.libero.worlds import Worlds, snapshot
from embodyrl.types import Obs

DRAWN_AT_ONCE = 64
"""Worlds in one launch of the renderer on a GPU: enough to fill it, few enough for the few that a reset draws."""


class _Group:
    """The envs whose tasks share a scene."""

    def __init__(self, plan: Blueprint, model: Any, worlds: Worlds) -> None:
        self.plan, self.worlds = plan, worlds
        self.judge = judge.Judge(model.ngeom, worlds.device)
        self.occupant = [-1] * worlds.count  # the env of each world
        self.task = torch.zeros(worlds.count, dtype=torch.long, device=worlds.device)  # of each, as the judge has it
        self.rows = self.envs = torch.zeros(0, dtype=torch.long, device=worlds.device)

    def enter(self, env: int) -> int:
        """A world for the env."""
        if env not in self.occupant:
            self.occupant[self.occupant.index(-1)] = env
        return self.occupant.index(env)

    def make_room(self, needed: int, limit: int) -> None:
        """Enough worlds, twice as many each time: the device's memory is laid out anew."""
        if needed > self.worlds.count:
            count = min(limit, max(needed, 2 * self.worlds.count))
            self.worlds.resize(count, self.worlds.contacts)
            more = count - len(self.occupant)
            self.occupant += [-1] * more
            self.task = torch.cat([self.task, self.task.new_zeros(more)])

    def refresh(self) -> None:
        """The worlds in use and their envs, as the device needs them."""
        rows = [row for row, env in enumerate(self.occupant) if env >= 0]
        self.rows = torch.tensor(rows, dtype=torch.long, device=self.worlds.device)
        self.envs = torch.tensor([self.occupant[r] for r in rows], dtype=torch.long, device=self.worlds.device)


class WarpEnv(CompiledEnv):
    """See the module."""

    def __init__(self, config: LiberoConfig) -> None:
        if config.num_workers > 1:
            raise UserError("env.backend=warp steps all its worlds in one process: leave env.num_workers at 1.")
        if config.settle_steps < 1:
            raise UserError(
                "env.backend=warp needs env.settle_steps of at least 1: an episode's first step is the CPU's."
            )
        super().__init__(config)
        n = config.num_envs
        self._groups: dict[str, _Group] = {}
        self._group_of: list[_Group | None] = [None] * n
        self._task = np.full(n, -1)
        self._spare: dict[int, list[native.Simulation]] = {}  # for resets
        self._settled: dict[tuple[int, int], tuple[dict[str, np.ndarray], int]] = {}
        self._readers: dict[int, native.Simulation] = {}

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        settled = self._each(self._settle, inits)
        moves: dict[str, list[int]] = {}
        for i, (k, init) in enumerate(zip(env_ids, inits, strict=True)):
            self._task[k] = init % len(self.tasks)
            plan, _ = self._blueprint(int(self._task[k]))
            old = self._group_of[k]
            if old is not None and old.plan.xml != plan.xml:
                old.occupant[old.occupant.index(k)] = -1
                old.refresh()
            moves.setdefault(plan.xml, []).append(i)
        for xml, members in moves.items():
            envs = [env_ids[i] for i in members]
            group = self._group(xml, envs, max(settled[i][1] for i in members))
            rows = []
            for k in envs:
                rows.append(group.enter(k))
                group.task[rows[-1]] = group.judge.add(self._blueprint(int(self._task[k]))[0])
                self._group_of[k] = group
            group.worlds.place(rows, [settled[i][0] for i in members])
            group.refresh()
        device = next(iter(self._groups.values())).worlds.device
        if not hasattr(self, "_stale"):
            self._make_buffers(device)
        self._stale[env_ids] = True

    def _group(self, xml: str, envs: list[int], contacts: int) -> _Group:
        if xml not in self._groups:
            plan, model = self._blueprint(int(self._task[envs[0]]))
            self._groups[xml] = _Group(plan, model, Worlds(plan, model, len(envs), 64 + 2 * contacts))
        group = self._groups[xml]
        here = {env for env in group.occupant if env >= 0}
        group.make_room(len(here | set(envs)), self.spec.num_envs)
        return group

    def _settle(self, init: int) -> tuple[dict[str, np.ndarray], int]:
        """The state in which an episode begins, and how many contacts it has."""
        task, start = self.start_state(init)
        key = (task, init)
        if key in self._settled:
            return self._settled[key]
        spare = self._spare.setdefault(task, [])
        simulation = spare.pop() if spare else native.Simulation(self.tasks[task], *self._blueprint(task))
        self._begin(simulation, start)
        out = snapshot(simulation), int(simulation.data.ncon)
        spare.append(simulation)
        if self.config.split != "train":  # the official states are few, the others without end
            self._settled[key] = out
        return out

    def _make_buffers(self, device: torch.device) -> None:
        n = self.spec.num_envs
        self._stale = torch.zeros(n, dtype=torch.bool, device=device)
        self._proprio = torch.zeros(n, PROPRIO_DIM, device=device)
        self._privileged = torch.zeros(n, PRIVILEGED_DIM, device=device)
        self._images = {
            name: torch.zeros(n, *size, 3, dtype=torch.uint8, device=device) for name, size in self.spec.cameras.items()
        }

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        device = self._stale.device
        actions, active = actions.to(device), active.to(device)
        success, fault = torch.zeros_like(active), torch.zeros_like(active)
        for group in self._groups.values():
            rows, envs, worlds = group.rows, group.envs, group.worlds
            if len(self._groups) > 1 and not bool(active[envs].any()):
                continue
            moves = torch.zeros(worlds.count, 7, device=device).index_copy_(0, rows, actions[envs].float())
            steps = torch.zeros(worlds.count, dtype=torch.bool, device=device).index_copy_(0, rows, active[envs])
            broken = worlds.step(moves, steps)
            solved = group.judge.success(worlds.poses(), group.task) & steps & ~broken
            success[envs], fault[envs] = solved[rows], broken[rows]
        self._stale |= active
        success, fault = success.to(self.device), fault.to(self.device)
        return Tick(success.float(), success, success, fault)

    def _observe(self, env_ids: list[int] | None) -> Obs:
        for group in self._groups.values():
            new = self._stale[group.envs]
            rows, envs = group.rows[new], group.envs[new]
            if len(rows) == 0:
                continue
            poses, t = group.worlds.poses(), group.worlds.tensors
            self._proprio[envs] = judge.proprio(poses)[rows]
            self._privileged[envs] = group.judge.privileged(poses, group.task)[rows]
            if self.spec.cameras:
                plan = group.plan
                lit = [judge.in_state(t["qpos"], plan.items[name], "turnon", torch.any) for name in plan.burner_items]
                glowing = torch.stack(lit, dim=1) if lit else torch.zeros(len(t["qpos"]), 0, dtype=torch.bool)
                seen = (t[name][rows] for name in ("seen_qpos", "body_pos", "body_quat"))
                drawn = self._pictures_of(plan).draw(*seen, glowing.to(rows.device)[rows])
                for name, pixels in drawn.items():
                    self._images[name][envs] = pixels
        self._stale[:] = False

        def own(value: Tensor) -> Tensor:
            return value.to(self.device, copy=True)

        return Obs(
            images={name: own(pixels) for name, pixels in self._images.items()},
            proprio=own(self._proprio),
            instruction=["" if t < 0 else self.tasks[t].instruction for t in self._task],
            privileged=own(self._privileged),
        )

    def _make_pictures(self, plan: Blueprint) -> BatchPictures:
        device = self._stale.device
        worlds = min(self.spec.num_envs, DRAWN_AT_ONCE) if device.type == "cuda" else 1
        return BatchPictures(plan, self.config.cameras, self.config.image_size, worlds, device)

    def scene(self, k: int) -> native.Simulation:
        """A copy of env k's episode in host memory, for experts and tests; changing it changes nothing."""
        group, task = self._group_of[k], int(self._task[k])
        assert group is not None
        reader = self._readers.get(k)
        if reader is None or reader.task != self.tasks[task]:
            reader = self._readers[k] = native.Simulation(self.tasks[task], *self._blueprint(task))
        row = group.occupant.index(k)
        reader.read({name: value[row].cpu().numpy() for name, value in group.worlds.tensors.items()})
        return reader

    def close(self) -> None:
        """Frees the worlds and what draws them."""
        for group in self._groups.values():
            group.worlds.close()
        self._groups, self._group_of = {}, [None] * self.spec.num_envs
        self._spare, self._readers = {}, {}
        super().close()
