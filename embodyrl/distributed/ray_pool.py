"""Shards in Ray's actors, on this machine or on a cluster.

Ray itself starts an actor anew whose process or machine died, and asks it again for what it had not
delivered; since a shard's rollout is a function of weights and iteration, nothing of it shows in
the result. Ray's token authentication is on: whoever may talk to a Ray cluster may run anything on
it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import secrets
import socket
from typing import Any

import torch

from embodyrl.config import Config, resolve, to_dict
from embodyrl.devices import use_device
from embodyrl.distributed.wire import know_batch, pack, unpack
from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.storage.env_spec import spec_from_json, spec_to_json
from embodyrl.training.shards import (
    Between,
    Piece,
    Shard,
    ShardedRollouts,
    State,
    check_sharing,
)

MAX_RESTARTS = 5  # of one worker: as many are a fault of the set-up, not of chance


def ray_rollouts(
    config: Config, *, address: str = "", cpus: float = 1.0, gpus: float = 0.0
) -> ShardedRollouts:
    """Starts ``run.workers`` actors.

    Args:
        config: of the run.
        address: of a cluster (``auto`` finds the one of this machine); empty starts one here, for
            this run.
        cpus: cores that each worker reserves; may be a fraction.
        gpus: the same for GPUs; with 0 everything in a worker runs on the CPU.

    Raises:
        MissingDependencyError: no Ray.
        UserError: the run cannot be shared, the cluster cannot be reached or is too small, or an
            env refuses its config.
    """
    check_sharing(config)
    worker_device(config, gpus)
    if not address:  # said before Ray takes its time to start
        here = {"CPU": float(os.cpu_count() or 1), "GPU": float(torch.cuda.device_count())}
        _check_room(config.run.workers, here, cpus, gpus)
    join_cluster(address)
    try:
        return ShardedRollouts(config, RayPool(config, cpus, gpus))
    except BaseException:
        require_ray().shutdown()
        raise


def worker_device(config: Config, gpus: float) -> Config:
    """The config with the devices of a worker.

    A worker sees the GPUs alone that Ray gave it, and its own is the first of them. So the number
    in ``run.device=cuda:1`` is the learner's.

    Args:
        config: of the run.
        gpus: that each worker reserves.

    Raises:
        UserError: the env is to be on a GPU that Ray does not give, or on one of a number.
    """
    where = config.env.device
    if where.startswith("cuda") and not gpus:
        raise UserError(
            f"env.device is {where!r}, but the workers reserve no GPU. Give each one with "
            "--worker-gpus 1 (a fraction shares a GPU), or use env.device=auto."
        )
    if where.startswith("cuda:"):
        raise UserError(
            f"env.device is {where!r}, but Ray gives every worker its GPU. Use env.device=cuda or "
            "env.device=auto."
        )
    own = config.run.device.partition(":")[0] if gpus else "cpu"
    return dataclasses.replace(config, run=dataclasses.replace(config.run, device=own))


def _check_room(count: int, there: dict[str, float], cpus: float, gpus: float) -> None:
    """Refuses workers that would wait for ever for a place."""
    for what, each in (("CPU", cpus), ("GPU", gpus)):
        if count * each > there.get(what, 0.0):
            raise UserError(
                f"{count} workers with {each:g} {what} each do not fit where there are "
                f"{there.get(what, 0.0):g}. Lower run.workers or --worker-{what.lower()}s, or add "
                "machines."
            )


def require_ray() -> Any:
    """Ray, with its token authentication on.

    Raises:
        MissingDependencyError: it is not installed.
        UserError: the environment switches the authentication off.
    """
    if os.environ.setdefault("RAY_AUTH_MODE", "token") != "token":
        raise UserError(
            "RAY_AUTH_MODE is set to something else than token: anybody who reaches the cluster "
            "could run programs on it. Unset it."
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            "--launcher ray needs Ray: pip install 'embodyrl[scale]'."
        ) from error
    return ray


def join_cluster(address: str) -> None:
    """Joins the cluster at an address; for an empty one, starts a cluster here.

    Raises:
        UserError: it cannot be reached.
    """
    if not address:
        make_token()
    ray = require_ray()
    try:
        _init(ray, address or "local")
    except Exception as error:  # Ray raises plain ones where a part of it does not start in time
        first = str(error).strip().partition("\n")[0]
        where = (
            f"The Ray cluster at {address!r} cannot be reached"
            if address
            else "Ray could not be started here"
        )
        raise UserError(
            f"{where} ({first}). Start one with `ray start --head`, with RAY_AUTH_MODE=token and "
            "the same token on all machines (docs/scale.md), or leave --ray-address out."
        ) from error


def make_token() -> None:
    """A token for a cluster here, which this process and those that it starts know alone.

    It stays for the life of the process, because Ray reads it once.
    """
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def _init(ray: Any, address: str) -> None:
    """``ray.init``, tried again where its parts did not start within 30 s on a busy machine."""
    for last in (False, False, True):
        try:
            ray.init(address, include_dashboard=False, logging_level=logging.ERROR)
            return
        except Exception as error:
            ray.shutdown()
            if last or "timed out" not in str(error).lower():
                raise


class RayWorker:
    """The actor: a shard that is told which weights to play with."""

    def __init__(self, config: dict[str, Any], shard: int) -> None:
        resolved = resolve(config)
        know_batch(resolved)
        if resolved.run.threads:
            torch.set_num_threads(resolved.run.threads)
        self._shard = Shard(resolved, shard, use_device(resolved.run.device))
        self._name = f"process {os.getpid()} on {socket.gethostname()}"

    def spec(self) -> dict[str, Any]:
        """Of its envs, as JSON data."""
        return spec_to_json(self._shard.spec)

    def play(self, frozen: list[Any], weights: State, iteration: int) -> dict[str, Any]:
        """A packed ``Piece``; ``frozen`` holds a reference, which is looked up once."""
        state = unpack(weights)
        if not self._shard.has_weights:
            state |= unpack(require_ray().get(frozen[0]))
        self._shard.load(state)
        piece = self._shard.play(iteration)
        return pack({**vars(piece), "player": self._name})


class RayPool:
    """See the module; a ``Pool``."""

    def __init__(self, config: Config, cpus: float, gpus: float) -> None:
        know_batch(config)
        self._ray = ray = require_ray()
        count = config.run.workers
        _check_room(count, ray.cluster_resources(), cpus, gpus)
        options = {
            "num_cpus": cpus,
            "num_gpus": gpus,
            "max_restarts": MAX_RESTARTS,
            "max_task_retries": MAX_RESTARTS,
        }
        actor = ray.remote(RayWorker).options(**options)
        plain = to_dict(worker_device(config, gpus))
        self._players = [""] * count
        self.restarts = 0
        self._workers = [actor.remote(plain, k) for k in range(count)]
        self._frozen: Any = None
        specs = [self._get(worker.spec.remote()) for worker in self._workers]
        self.spec = spec_from_json({**specs[0], "num_envs": config.env.num_envs})

    def _get(self, ref: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(ref)
        except errors.RayTaskError as error:
            if isinstance(error.cause, UserError):
                raise error.cause from None
            raise
        except errors.RayActorError as error:
            if isinstance(cause := error.__cause__, errors.RayTaskError) and isinstance(
                cause.cause, UserError
            ):
                raise cause.cause from None
            raise UserError(
                f"A worker died {MAX_RESTARTS + 1} times, or could not be started: "
                f"{' '.join(str(error).split())[:600]} Look at its log in "
                "/tmp/ray/session_latest/logs; memory is the usual cause."
            ) from error

    def publish(self, frozen: State, weights: State) -> Any:
        """See ``Pool``; Ray keeps one copy per machine, for as long as somebody needs it."""
        if self._frozen is None:
            self._frozen = self._ray.put(pack(frozen))
        return self._ray.put(pack(weights))

    def submit(self, shard: int, weights: Any, iteration: int) -> Any:
        """See ``Pool``."""
        return shard, self._workers[shard].play.remote([self._frozen], weights, iteration)

    def wait(self, job: Any, between: Between) -> Piece:
        """See ``Pool``."""
        shard, ref = job
        while not self._ray.wait([ref], timeout=0.2)[0]:
            between()
        between()
        piece = Piece(**unpack(self._get(ref)))
        self.restarts += self._players[shard] not in ("", piece.player)
        self._players[shard] = piece.player
        return piece

    def close(self) -> None:
        """Ends the actors, and the cluster where it was started for this run."""
        for worker in self._workers:
            self._ray.kill(worker)
        self._ray.shutdown()
