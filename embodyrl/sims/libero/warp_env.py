"""``WarpEnv``: LIBERO with ``backend="warp"``, thousands of worlds at once on a GPU.

mujoco-warp steps it. Controller, goals and pictures are computed where the worlds are. Actions and
observations cross as tensors, by DLPack. Tasks whose scenes compile to the same model share one
batch of worlds. Only resets are prepared on the CPU, in the same way as ``NativeEnv``'s, so
episodes begin in the same states in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import Tick
from embodyrl.errors import UserError
from embodyrl.sims.libero import goals_batch, native
from embodyrl.sims.libero.blueprint import Blueprint
from embodyrl.sims.libero.compiled_env import CompiledEnv
from embodyrl.sims.libero.config import LiberoConfig
from embodyrl.sims.libero.pictures_batch import BatchPictures
from embodyrl.sims.libero.scene import PRIVILEGED_DIM, PROPRIO_DIM, Start
from embodyrl.sims.libero.worlds import Worlds, snapshot
from embodyrl.types import Obs

DRAWN_AT_ONCE = 64
"""Worlds in one launch of the renderer on a GPU.

They are enough to fill the GPU, and few enough that drawing the envs of one reset stays cheap.
"""


class _Group:
    """The envs whose tasks share a scene, and the batch of worlds that simulates them.

    Args:
        plan: of a task in this scene.
        model: its physics model.
        worlds: as many as envs, or more.
    """

    def __init__(self, plan: Blueprint, model: Any, worlds: Worlds) -> None:
        self.plan = plan
        self.worlds = worlds
        self.goals = goals_batch.Goals(model.ngeom, worlds.device)
        self.world_of: dict[int, int] = {}  # env -> world
        self._free = list(range(worlds.count))  # worlds of no env
        # The number of each world's task in ``goals``.
        self.task = torch.zeros(worlds.count, dtype=torch.long, device=worlds.device)

    def place(
        self,
        envs: list[int],
        plans: list[Blueprint],
        states: list[dict[str, np.ndarray]],
        limit: int,
    ) -> None:
        """Begins episodes, with more worlds where there are too few.

        Args:
            envs: numbers of the envs.
            plans: of their tasks.
            states: in which they begin; see ``worlds.snapshot``.
            limit: worlds at most.
        """
        # Too few worlds are doubled, so that few resets pay for new memory.
        needed = len(self.world_of.keys() | set(envs))
        before = self.worlds.count
        if needed > before:
            count = min(limit, max(needed, 2 * before))
            self.worlds.resize(count, self.worlds.contacts)
            self._free += range(before, count)
            self.task = torch.cat([self.task, self.task.new_zeros(count - before)])
        # An env keeps the world that it has.
        for env in envs:
            if env not in self.world_of:
                self.world_of[env] = self._free.pop()
        rows = [self.world_of[env] for env in envs]
        self.task[rows] = torch.tensor(
            [self.goals.add(plan) for plan in plans], device=self.worlds.device
        )
        self.worlds.place(rows, states)
        self._refresh()

    def leave(self, env: int) -> None:
        """Frees the env's world."""
        self._free.append(self.world_of.pop(env))
        self._refresh()

    def _refresh(self) -> None:
        """``world_of`` as two tensors: the envs, and the worlds (``rows``) that they have."""
        device = self.worlds.device
        self.envs = torch.tensor(list(self.world_of), dtype=torch.long, device=device)
        self.rows = torch.tensor(list(self.world_of.values()), dtype=torch.long, device=device)


class WarpEnv(CompiledEnv):
    """See the module.

    Raises:
        UserError: ``num_workers`` or ``settle_steps`` are what this backend cannot do, or see
            ``LiberoEnv``.
    """

    def __init__(self, config: LiberoConfig) -> None:
        if config.num_workers > 1:
            raise UserError(
                "env.backend=warp steps all its worlds in one process: leave env.num_workers at 1."
            )
        if config.settle_steps < 1:
            raise UserError(
                "env.backend=warp needs env.settle_steps of at least 1: an episode's first step "
                "is the CPU's."
            )
        super().__init__(config)
        n = config.num_envs
        self._groups: dict[str, _Group] = {}
        self._group_of: list[_Group | None] = [None] * n
        self._task = np.full(n, -1)
        # Simulations on the CPU: for resets by task, and for experts by env.
        self._spare: dict[int, list[native.Simulation]] = {}
        self._readers: dict[int, native.Simulation] = {}
        # Number of an initial state -> the settled state, and how many contacts it has.
        self._settled: dict[int, tuple[dict[str, np.ndarray], int]] = {}
        self._stale = torch.zeros(0, dtype=torch.bool)  # (N,) which observations are out of date

    def _reset(self, env_ids: list[int], inits: list[int]) -> None:
        # Prepare the initial states that are new. They are drawn one after the other, because
        # LIBERO's samplers share numpy's random stream, and settled in threads.
        new = [init for init in dict.fromkeys(inits) if init not in self._settled]
        starts = [self.start_state(init) for init in new]
        self._settled.update(zip(new, self._each(self._settle, starts), strict=True))
        # Sort the envs by their new scene; those that had another one leave it.
        members: dict[str, list[int]] = {}
        for i, (k, init) in enumerate(zip(env_ids, inits, strict=True)):
            self._task[k] = init % len(self.tasks)
            xml = self._plan(k).xml
            old = self._group_of[k]
            if old is not None and old.plan.xml != xml:
                old.leave(k)
            members.setdefault(xml, []).append(i)
        # Put each scene's envs into its worlds, which are made on the scene's first use.
        for xml, positions in members.items():
            envs = [env_ids[i] for i in positions]
            settled = [self._settled[inits[i]] for i in positions]
            if xml not in self._groups:
                plan, model = self._blueprint(int(self._task[envs[0]]))
                contacts = 64 + 2 * max(number for _, number in settled)
                self._groups[xml] = _Group(
                    plan, model, Worlds(plan, model, len(envs), contacts, self.device)
                )
            plans = [self._plan(k) for k in envs]
            states = [state for state, _ in settled]
            self._groups[xml].place(envs, plans, states, self.spec.num_envs)
            for k in envs:
                self._group_of[k] = self._groups[xml]
        # The official states are few and stay; those of training are without end.
        if self.config.split == "train":
            self._settled.clear()
        if len(self._stale) == 0:
            self._make_buffers(next(iter(self._groups.values())).worlds.device)
        self._stale[env_ids] = True

    def _plan(self, k: int) -> Blueprint:
        return self._blueprint(int(self._task[k]))[0]

    def _settle(self, begin: tuple[int, Start]) -> tuple[dict[str, np.ndarray], int]:
        """The state in which an episode of a task begins, and how many contacts it has."""
        task, start = begin
        spare = self._spare.setdefault(task, [])
        simulation = (
            spare.pop() if spare else native.Simulation(self.tasks[task], *self._blueprint(task))
        )
        self._begin(simulation, start)
        state = snapshot(simulation)
        contacts = int(simulation.data.ncon)
        spare.append(simulation)  # another thread's from here on
        return state, contacts

    def _make_buffers(self, device: torch.device) -> None:
        """Observations of all envs, on the device of the worlds."""
        n = self.spec.num_envs
        self._stale = torch.zeros(n, dtype=torch.bool, device=device)
        self._proprio = torch.zeros(n, PROPRIO_DIM, device=device)
        self._privileged = torch.zeros(n, PRIVILEGED_DIM, device=device)
        self._images = {
            name: torch.zeros(n, *size, 3, dtype=torch.uint8, device=device)
            for name, size in self.spec.cameras.items()
        }

    def _step(self, actions: Tensor, active: Tensor) -> Tick:
        device = self._stale.device
        actions = actions.to(device)
        active = active.to(device)
        success = torch.zeros_like(active)
        fault = torch.zeros_like(active)
        for group in self._groups.values():
            rows = group.rows
            envs = group.envs
            worlds = group.worlds
            if len(self._groups) > 1 and not bool(active[envs].any()):
                continue
            # From envs to worlds: worlds of no env, and envs that ended, are not stepped.
            moves = torch.zeros(worlds.count, 7, device=device).index_copy_(
                0, rows, actions[envs].float()
            )
            steps = torch.zeros(worlds.count, dtype=torch.bool, device=device).index_copy_(
                0, rows, active[envs]
            )
            broken = worlds.step(moves, steps)
            solved = group.goals.success(worlds.poses(), group.task) & steps & ~broken
            # And back from worlds to envs.
            success[envs] = solved[rows]
            fault[envs] = broken[rows]
        self._stale |= active
        success = success.to(self.device)
        fault = fault.to(self.device)
        return Tick(success.float(), success, success, fault)

    def _observe(self, env_ids: list[int] | None) -> Obs:
        # Only what has changed is computed and drawn.
        for group in self._groups.values():
            new = self._stale[group.envs]
            rows = group.rows[new]
            envs = group.envs[new]
            if len(rows) == 0:
                continue
            poses = group.worlds.poses()
            t = group.worlds.tensors
            self._proprio[envs] = goals_batch.proprio_of_worlds(poses)[rows]
            self._privileged[envs] = group.goals.privileged(poses, group.task)[rows]
            if self.spec.cameras:
                seen = (t[name][rows] for name in ("seen_qpos", "body_pos", "body_quat"))
                glowing = _glowing(group.plan, t["qpos"])[rows]
                drawn = self._pictures_of(group.plan).draw(*seen, glowing)
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
        """See ``LiberoEnv.scene``; a copy on the CPU, so changing it changes nothing."""
        group = self._group_of[k]
        task = int(self._task[k])
        assert group is not None
        reader = self._readers.get(k)
        if reader is None or reader.task != self.tasks[task]:
            reader = self._readers[k] = native.Simulation(self.tasks[task], *self._blueprint(task))
        row = group.world_of[k]
        reader.read(
            {name: value[row].cpu().numpy() for name, value in group.worlds.tensors.items()}
        )
        return reader

    def close(self) -> None:
        """Frees the worlds and their renderers."""
        for group in self._groups.values():
            group.worlds.close()
        self._groups = {}
        self._group_of = [None] * self.spec.num_envs
        self._spare = {}
        self._readers = {}
        super().close()


def _glowing(plan: Blueprint, qpos: Tensor) -> Tensor:
    """(worlds, burners) bool, on the device of ``qpos`` (worlds, nq)."""
    lit = [
        goals_batch.in_state(qpos, plan.items[name], "turnon", torch.any)
        for name in plan.burner_items
    ]
    if lit:
        return torch.stack(lit, dim=1)
    return torch.zeros(len(qpos), 0, dtype=torch.bool, device=qpos.device)
