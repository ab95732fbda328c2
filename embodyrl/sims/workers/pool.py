"""``PooledVecEnv``: a VecEnv of worker processes, for simulators that run one episode per core.

Each worker hosts a VecEnv of N / num_workers envs, and a chunk is one message to each. A worker
that dies or hangs costs one masked chunk. Its envs come back truncated with nothing valid and
``fault`` set, and a new process starts while the others go on. The caller resets those envs like
any others that ended.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
import time
import weakref
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import EnvConfig, check_actions, env_index, plan_reset
from embodyrl.errors import UserError
from embodyrl.machine import usable_cores
from embodyrl.rollouts.fault_watch import FaultWindow, named, warn
from embodyrl.sims.workers.handle import Worker, WorkerFault, stop_all
from embodyrl.sims.workers.process import map_memory, memory_layout, memory_size
from embodyrl.types import EnvSpec, Obs, Step


class PooledVecEnv:
    """N envs in worker processes; see the module.

    Initial states are drawn in the parent, so they are the same for any number of workers.

    Args:
        name: registry name of the env.
        config: its config for all N envs; each worker gets its share, with the seeds that its envs
            would have had.
        num_workers: processes; at most N are started.
        step_timeout: seconds that a chunk may take before its worker counts as hung.
        reset_timeout: the same for a reset.
        start_timeout: the same for starting a worker and building its env.

    Raises:
        UserError: the env refuses its config, or workers broke too often (``FaultWindow``).
    """

    def __init__(
        self,
        name: str,
        config: EnvConfig,
        *,
        num_workers: int,
        step_timeout: float = 120.0,
        reset_timeout: float = 300.0,
        start_timeout: float = 300.0,
    ) -> None:
        self.config = config
        self.device = config.place()
        self.step_timeout = step_timeout
        self.reset_timeout = reset_timeout
        # Envs k with bounds[w] <= k < bounds[w + 1] belong to worker w.
        bounds = (
            np.linspace(0, config.num_envs, max(1, min(num_workers, config.num_envs)) + 1)
            .astype(int)
            .tolist()
        )
        threads = max(1, usable_cores() // (len(bounds) - 1))
        self._workers = [
            Worker(name, config, low, high, threads, start_timeout)
            for low, high in itertools.pairwise(bounds)
        ]
        # The processes end with this object, also where nobody calls close().
        self._finalizer = weakref.finalize(self, stop_all, self._workers)
        self._rngs = [np.random.default_rng(config.seed + k) for k in range(config.num_envs)]
        self._running = torch.zeros(config.num_envs, dtype=torch.bool)
        self._instruction = [""] * config.num_envs
        self._last_obs: Obs | None = None
        self.init = np.zeros(config.num_envs, dtype=np.int64)
        self._faults = FaultWindow(config.num_envs)
        self.guards_itself = True  # the workers look at what their envs hand over
        # All workers build at the same time; this waits for the slowest.
        try:
            specs = [worker.wait_ready() for worker in self._workers]
        except BaseException as error:
            self.close()
            if isinstance(error, WorkerFault):
                raise RuntimeError(f"A worker of {name} could not start. {error}") from None
            raise
        assert specs[0] is not None
        self.spec: EnvSpec = dataclasses.replace(specs[0], num_envs=config.num_envs)
        self._share_memory(horizon=16)

    def _share_memory(self, horizon: int) -> None:
        """Makes shared memory with room for chunks of up to ``horizon`` actions.

        Workers get it with their next message.
        """
        layout = memory_layout(self.spec, horizon)
        with _anonymous_file() as file:
            file.truncate(memory_size(layout))
            self._arrays = map_memory(file.fileno(), layout)
            self._memory = os.dup(file.fileno())
        weakref.finalize(self._arrays["proprio"], os.close, self._memory)
        self._horizon = horizon
        for worker in self._workers:
            worker.has_memory = False

    def close(self) -> None:
        """Ends all workers; they need not answer. May be called twice."""
        self._finalizer()

    def make_expert(self, noise: float = 0.0, seed: int = 0) -> PooledExpert:
        """The env's own scripted expert, in each worker; see ``PooledExpert``. One at a time."""
        return PooledExpert(self, noise, seed)

    def reset(
        self,
        env_ids: Tensor | Sequence[int] | None = None,
        *,
        seed: int | Sequence[int] | None = None,
        init: Sequence[int] | None = None,
    ) -> Obs:
        """See ``VecEnv.reset``."""
        ids, inits = plan_reset(self.spec, self._rngs, env_ids, seed, init)
        self.init[ids] = inits
        self._faults.begin(len(ids))
        pending = [w for w in self._workers if any(w.low <= k < w.high for k in ids)]
        # A worker that breaks in a reset is tried again, until it has broken too often.
        while pending:
            messages = {}
            for worker in pending:
                # A new process has begun no episode. All its envs get a state, but those that were
                # not asked for stay masked.
                rows = [k for k in range(worker.low, worker.high) if worker.needs_reset or k in ids]
                local = [k - worker.low for k in rows]
                messages[worker] = {
                    "command": "reset",
                    "env_ids": local,
                    "init": self.init[rows].tolist(),
                }
            replies = self._exchange(messages, self.reset_timeout)
            for worker, reply in replies.items():
                if isinstance(reply, WorkerFault):
                    self._running[worker.low : worker.high] = False
                    self._count_fault(worker, reply)
                else:
                    worker.needs_reset = False
                    self._instruction[worker.low : worker.high] = reply["instruction"]
            pending = [w for w in pending if isinstance(replies[w], WorkerFault)]
        reset = torch.zeros(self.spec.num_envs, dtype=torch.bool)
        reset[ids] = True
        self._running |= reset
        self._last_obs = self._observe(reset)
        return self._last_obs

    def step(self, actions: Tensor) -> Step:
        """See ``VecEnv.step``."""
        actions = check_actions(actions.cpu(), self.spec, self._running)
        horizon = actions.shape[1]
        if horizon > self._horizon:
            self._share_memory(2 * horizon)
        self._arrays["actions"][:, :horizon] = actions.numpy()
        return self._step({"command": "step", "horizon": horizon})

    def _step(self, message: dict[str, Any]) -> Step:
        """Sends one message that steps the envs to every worker with a running env."""
        if self._last_obs is None:
            raise RuntimeError("step was called before the first reset.")
        n = self.spec.num_envs
        horizon = message["horizon"]
        # Workers whose envs have all ended are not asked.
        started = self._running.clone()
        workers = [w for w in self._workers if started[w.low : w.high].any()]
        replies = self._exchange({worker: message for worker in workers}, self.step_timeout)
        # ``good``: envs that ran and whose worker answered; the others that ran have a fault.
        good = torch.zeros(n, dtype=torch.bool)
        for worker, reply in replies.items():
            if not isinstance(reply, WorkerFault):
                good[worker.low : worker.high] = True
                self._instruction[worker.low : worker.high] = reply["instruction"]
        good &= started
        lost = started & ~good
        # What the workers wrote into shared memory, masked where a worker is gone.
        names = ("terminated", "truncated", "success", "success_once", "fault")
        flags = {name: self._read(name) & good for name in names}
        flags["truncated"] |= lost
        flags["fault"] |= lost
        reward = torch.where(good[:, None], self._read("reward")[:, :horizon], 0.0)
        valid = self._read("valid")[:, :horizon] & good[:, None]
        self._last_obs = self._observe(good)
        self._running = started & ~(flags["terminated"] | flags["truncated"])
        log = self._merge_logs(replies, good) | {"steps": valid.sum(1)}
        self._running &= ~flags["fault"]
        for worker, reply in replies.items():
            if isinstance(reply, WorkerFault):
                self._count_fault(worker, reply)
            else:
                for envs, why in reply["faults"]:
                    self._count_fault(worker, WorkerFault(why), [worker.low + k for k in envs])
        step = Step(self._last_obs, reward, valid=valid, log=log, **flags)
        return step.to(self.device)

    def _read(self, name: str) -> Tensor:
        return torch.from_numpy(self._arrays[name].copy())

    def _observe(self, new: Tensor) -> Obs:
        """The observation: the envs of ``new`` (N,) from shared memory, the others as they were."""

        def rows(name: str, last: Tensor | None) -> Tensor:
            value = self._read(name).to(self.device)
            if last is None:
                return value
            return torch.where(new.to(self.device).view(-1, *[1] * (value.ndim - 1)), value, last)

        last = self._last_obs
        privileged = (
            rows("privileged", last.privileged if last else None)
            if self.spec.privileged_dim
            else None
        )
        return Obs(
            images={
                c: rows(f"image/{c}", last.images[c] if last else None) for c in self.spec.cameras
            },
            proprio=rows("proprio", last.proprio if last else None),
            instruction=list(self._instruction),
            privileged=privileged,
        )

    def _merge_logs(self, replies: dict[Worker, Any], good: Tensor) -> dict[str, Tensor]:
        """``Step.log`` of all envs from those of the workers; zero where an env is not good."""
        log: dict[str, Tensor] = {}
        for worker, reply in replies.items():
            for key, (dtype, values) in (
                {} if isinstance(reply, WorkerFault) else reply["log"]
            ).items():
                column = log.setdefault(
                    key, torch.zeros(self.spec.num_envs, dtype=getattr(torch, dtype))
                )
                column[worker.low : worker.high] = torch.tensor(values, dtype=column.dtype)
        return {
            key: torch.where(good, column, torch.zeros_like(column)) for key, column in log.items()
        }

    def _exchange(
        self, messages: dict[Worker, dict[str, Any]], timeout: float
    ) -> dict[Worker, Any]:
        """One message to each worker, and each one's reply or fault; all share one deadline."""
        replies: dict[Worker, Any] = {}
        # Send to all before the first answer is waited for, so that they work at the same time.
        for worker, message in messages.items():
            try:
                worker.wait_ready()
                if not worker.has_memory:
                    worker.attach(self.spec, self._horizon, self._memory)
                worker.send(message)
            except WorkerFault as fault:
                replies[worker] = fault
        deadline = time.monotonic() + timeout
        user_error = None
        for worker in messages:
            if worker not in replies:
                try:
                    replies[worker] = worker.receive(deadline)
                except WorkerFault as fault:
                    replies[worker] = fault
                except UserError as error:  # raised below, when the others have answered
                    user_error = error
        if user_error is not None:
            raise user_error
        return replies

    def _count_fault(
        self, worker: Worker, fault: WorkerFault, envs: Sequence[int] | None = None
    ) -> None:
        """Notes that a worker, or some of its envs, broke; stops the run where it is too often."""
        rows = envs if envs is not None else range(worker.low, worker.high)
        states = [f"{self.init[k]}, {self.spec.task_of(int(self.init[k]))}" for k in rows]
        where = named(rows, states)
        if too_many := self._faults.add(len(rows)):
            self.close()
            raise UserError(f"{self.spec.name} {too_many} Last it broke in {where}. {fault}")
        warn(f"{where} of {self.spec.name} broke: {fault}", len(rows))


class PooledExpert:
    """The scripted expert of a pooled env; it runs in the workers, beside the simulators.

    Args:
        env: the pool; its env class must have ``make_expert(noise, seed)``.
        noise: standard deviation of the noise on its actions.
        seed: of that noise; env k draws from seed + k.
    """

    def __init__(self, env: PooledVecEnv, noise: float = 0.0, seed: int = 0) -> None:
        self.env = env
        for worker in env._workers:
            worker.expert = {"noise": noise, "seed": seed + worker.low}
        self._exchange({w: {"command": "make_expert", **(w.expert or {})} for w in env._workers})

    def reset(self, env_ids: Tensor | Sequence[int] | None = None) -> None:
        """Begins anew in those envs; call it after their reset."""
        ids = env_index(env_ids, self.env.spec.num_envs)
        messages = {}
        for worker in self.env._workers:
            local = [k - worker.low for k in ids if worker.low <= k < worker.high]
            if local:
                messages[worker] = {"command": "expert_reset", "env_ids": local}
        self._exchange(messages)

    def rollout(self, horizon: int) -> tuple[Step, Tensor]:
        """The expert acts for ``horizon`` control steps.

        Returns:
            The step, and the actions (N, H, A) that were taken.
        """
        if horizon > self.env._horizon:
            self.env._share_memory(2 * horizon)
        step = self.env._step({"command": "expert_rollout", "horizon": horizon})
        return step, self.env._read("actions")[:, :horizon].to(self.env.device)

    def _exchange(self, messages: dict[Worker, dict[str, Any]]) -> None:
        for worker, reply in self.env._exchange(messages, self.env.reset_timeout).items():
            # Its envs are found broken, and the fault is counted, at the next step.
            if isinstance(reply, WorkerFault):
                worker.kill()


def _anonymous_file() -> IO[bytes]:
    """A file without a name, in memory on Linux and on disk elsewhere."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("embodyrl"), "w+b")
    return tempfile.TemporaryFile()
