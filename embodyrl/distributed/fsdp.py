"""Training in several processes that torchrun started (FSDP2).

Each process plays its own shard of the envs, and all tell one another what came of it: a rollout is
small beside the model and the time that it took. From there on each computes what a single process
with as many shards would, on the same numbers, except that it takes its share of every minibatch's
rows; FSDP2 (``torch.distributed.fsdp.fully_shard``) adds the gradients up. Advantages, the order of
the minibatches, KL and learning rate are therefore those of one process; what differs is the order
in which gradients are summed.

What is trained is sharded, with gradient and Adam's moments, and whole from a step's forward to its
backward pass only. What is frozen, and the critic, are whole in every process. Checkpoints hold
whole tensors, in the one format.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import safetensors.numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from embodyrl import registry
from embodyrl.algorithm import Algorithm
from embodyrl.config import Config
from embodyrl.devices import use_device
from embodyrl.distributed.wire import know_batch, pack, unpack
from embodyrl.errors import UserError
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.rollouts.start_sampling import Draws
from embodyrl.training.shards import Between, Shard, check_sharing, merge_batches

PATIENCE = timedelta(hours=2)
"""How long a process waits for the others, whose envs may be slower.

torchrun ends all as soon as one fails.
"""


@contextlib.contextmanager
def join_ranks(config: Config) -> Iterator[FsdpRanks]:
    """All processes of a run, for as long as it takes; the first one alone prints.

    Raises:
        UserError: the run cannot be shared; or another process ended.
    """
    with contextlib.ExitStack() as stack:
        if os.environ["RANK"] != "0":
            stack.enter_context(
                contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w")))
            )
        try:
            yield stack.enter_context(contextlib.closing(FsdpRanks(config)))
        except RuntimeError as error:
            if "gloo" not in str(error) and not isinstance(error, dist.DistBackendError):
                raise
            raise UserError(
                "Another process of this run ended (its message is above), so this one did too. "
                "Mend that, and the same command goes on from the last checkpoint."
            ) from error


class FsdpRanks:
    """All processes of a run: its ``Rollouts``, and the ``Peers`` that share its gradients.

    Attributes:
        rank: of this process.
        count: of all.
        config: of the run, with as many ``run.workers`` as there are processes where there are
            rollouts.
        own: the same with this process's share of the envs.
        plays: whether there are rollouts.
        spec: of all envs together.
        restarts: none; torchrun starts all anew with ``--max-restarts``.
    """

    restarts = 0

    def __init__(self, config: Config) -> None:
        """Joins the others.

        Raises:
            UserError: the run cannot be shared.
        """
        self.count = int(os.environ["WORLD_SIZE"])
        self.rank = int(os.environ["RANK"])
        self.config = ranks_config(config, self.count)
        know_batch(config)
        device = use_device(config.run.device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE
        )
        self.mesh = init_device_mesh(device.type, (self.count,))
        envs = dataclasses.replace(config.env, num_envs=max(1, config.env.num_envs // self.count))
        self.own = dataclasses.replace(self.config, env=envs)
        self._shard: Shard | None = None
        self.plays = registry.load("algorithms", config.algorithm.name).plays
        if self.plays:
            self._shard = Shard(self.config, self.rank, device)
            self.spec = dataclasses.replace(self._shard.spec, num_envs=config.env.num_envs)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def shard(self, policy: Any) -> None:
        """Shards what is trained of a policy in place, before an optimiser is made of it."""
        whole = set(policy.parameters()) - set(policy.actor_parameters())
        step = fully_shard(
            _Step(policy), mesh=self.mesh, reshard_after_forward=False, ignored_params=whole
        )
        step.set_gradient_divide_factor(
            1.0
        )  # minibatches are dealt out, so gradients are summed, not averaged
        step.set_force_sum_reduction_for_comms(True)
        policy.register_load_state_dict_pre_hook(_take_share)
        self._step: Any = step
        self._critic = [
            p for p in policy.parameters() if p.requires_grad and p in whole
        ]  # a set has no order

    def attach(self, algorithm: Algorithm) -> None:
        """Lets the algorithm compute its share of every minibatch alone.

        Raises:
            UserError: it does not compute its gradients in pieces.
        """
        shared = algorithm.shared_gradients()
        if not shared:
            raise UserError(
                f"{self.config.algorithm.name} cannot be trained by several processes: sft, ppo, "
                "fpo and grpo can. Start it without torchrun; run.workers shares its rollouts "
                "where it has them."
            )
        for part in shared:
            part.peers = self
        for optimizer in algorithm.optimizers():
            optimizer.register_load_state_dict_post_hook(_take_share_of_moments)

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """See ``Peers``."""
        return self._step(fn, *args)

    def gather(self, rows: Tensor) -> Tensor:
        """See ``Peers``."""
        return torch.cat(self.exchange(rows.detach().cpu())).to(rows.device)

    def collect(
        self,
        algorithm: Algorithm,
        iteration: int,
        *,
        generator: torch.Generator,
        device: torch.device,
        between: Between = lambda: None,
        draws: Draws | None = None,
    ) -> Any:
        """See ``Rollouts``: what all processes played.

        ``between`` is not asked, because no process may leave alone.
        """
        assert self._shard is not None
        # Each process computes the critic. Rounding on a GPU must not make them drift apart.
        for p in self._critic:
            dist.broadcast(p.data, 0)
        self._shard.act_for(algorithm)
        self._shard.draws = draws
        with self.whole(algorithm.policy):
            piece = self._shard.play(iteration)
        pieces = self.exchange({"batch": piece.batch, "generator": piece.generator})
        generator.set_state(pieces[0]["generator"])
        return merge_batches([p["batch"] for p in pieces]).to(device)

    def restart_episodes(self) -> None:
        """See ``Rollouts``; what is played here begins anew in every iteration."""

    def evaluation(
        self, play: Callable[[list[int]], Evaluation], policy: nn.Module, inits: list[int]
    ) -> Evaluation:
        """``play`` of all initial states, each process its share."""
        share = inits[self.rank :: self.count]
        with self.whole(policy):
            own = play(share) if share else Evaluation([], {})
        parts = self.exchange(
            {
                "episodes": own.episodes,
                "frames": own.frames,
                "faults": own.faults,
                "instructions": own.instructions,
            }
        )
        episodes = {e.init: e for part in parts for e in part["episodes"]}
        frames = {k: v for part in parts for k, v in part["frames"].items()}
        return Evaluation(
            [episodes[i] for i in inits],
            frames,
            sum(part["faults"] for part in parts),
            {k: v for part in parts for k, v in part["instructions"].items()},
        )

    def agree(self, minutes: float, stop: bool) -> tuple[float, bool]:
        """The first process's clock, and whether anybody was asked to stop."""
        told = self.exchange([minutes, stop])
        return told[0][0], any(asked for _, asked in told)

    def wait(self) -> None:
        """Until all are here."""
        self.exchange(None)

    @contextlib.contextmanager
    def whole(self, policy: nn.Module) -> Iterator[None]:
        """All weights of a policy as ordinary tensors, for acting: without a word to the others."""
        self._step.reshard()
        sharded = [
            (module, name, p)
            for module in policy.modules()
            for name, p in module.named_parameters(recurse=False)
            if isinstance(p, DTensor)
        ]
        for module, name, p in sharded:
            setattr(module, name, nn.Parameter(_whole(p), requires_grad=False))
        try:
            yield
        finally:
            for module, name, p in sharded:
                setattr(module, name, p)

    def whole_state(self, state: Any) -> Any:
        """A nested state with whole tensors; in the first process alone, None in the others."""
        if isinstance(state, DTensor):
            full = _whole(state)
            return full.cpu() if self.first else None
        if isinstance(state, dict):
            return {k: self.whole_state(v) for k, v in state.items()}
        if isinstance(state, list | tuple):
            return type(state)(self.whole_state(v) for v in state)
        return state

    def exchange(self, value: Any) -> list[Any]:
        """What each process gave; tensors and plain values go as JSON and safetensors."""
        message = pack(value)
        head = json.dumps({k: message[k] for k in ("tree", "bfloat16")}).encode()
        data = b"".join((len(head).to_bytes(8), head, safetensors.numpy.save(message["arrays"])))
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sizes = torch.empty(self.count, dtype=torch.long)
        dist.all_gather_into_tensor(sizes, torch.tensor([len(mine)]))
        padded = nn.functional.pad(mine, (0, int(sizes.max()) - len(mine)))
        out = torch.empty(self.count * len(padded), dtype=torch.uint8)
        dist.all_gather_into_tensor(out, padded)
        rows = zip(out.view(self.count, -1), sizes.tolist(), strict=True)
        return [_read(row[:size].numpy().tobytes()) for row, size in rows]

    def close(self) -> None:
        """Closes the envs, and leaves; a second call does nothing."""
        if self._shard is not None:
            self._shard.envs.close()
        if dist.is_initialized():
            dist.destroy_process_group()


class _Step(nn.Module):
    """What FSDP wraps.

    Its hooks belong to a module's call. Here any function of the policy can be such a call.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, fn: Callable[..., Any], *args: Any) -> Any:
        return fn(*args)


def ranks_config(config: Config, count: int) -> Config:
    """The config of a run that ``count`` processes share.

    Raises:
        UserError: they cannot.
    """
    name = config.algorithm.name
    run = config.run
    algorithm = registry.load("algorithms", name)
    if algorithm.continues_episodes:
        raise UserError(
            f"{name} learns a little after every few steps, which several processes cannot share: "
            "sft, ppo, fpo and grpo can be started by torchrun."
        )
    if run.max_lag:
        raise UserError(
            "run.max_lag is for workers beside a learner; under torchrun every process is both. "
            "Leave it."
        )
    if run.patience:
        raise UserError("run.patience does not go with torchrun yet. Leave it out.")
    if run.keep != "last":
        raise UserError(f"run.keep={run.keep} does not go with torchrun yet. Leave it out.")
    for key in ("bc_coef", "reference_coef"):
        if algorithm.plays and getattr(config.algorithm, key, 0.0):
            raise UserError(f"algorithm.{key} does not go with torchrun yet. Leave it out.")
    if run.compile:
        raise UserError(
            "run.compile does not go with torchrun yet: weights move between steps. Leave one of "
            "them out."
        )
    if not algorithm.plays:
        return config
    if run.workers not in (1, count):
        raise UserError(
            f"run.workers={run.workers}, but torchrun started {count} processes. Leave run.workers "
            "out."
        )
    config = dataclasses.replace(config, run=dataclasses.replace(run, workers=count))
    check_sharing(config)
    return config


def _whole(sharded: DTensor) -> Tensor:
    with torch.no_grad():
        return sharded.full_tensor()


def _share_of(whole: Tensor, like: DTensor) -> DTensor:
    whole = whole.to(like.device, like.dtype)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _take_share(policy: nn.Module, state: dict[str, Any], *_: Any) -> None:
    """Before a policy loads whole weights."""
    for name, p in policy.named_parameters(remove_duplicate=False):
        if (
            isinstance(p, DTensor)
            and isinstance(given := state.get(name), Tensor)
            and not isinstance(given, DTensor)
        ):
            state[name] = _share_of(given, p)


def _take_share_of_moments(optimizer: torch.optim.Optimizer) -> None:
    """After an optimiser loaded whole moments."""
    for p, state in optimizer.state.items():
        if isinstance(p, DTensor):
            whole = {
                k: v
                for k, v in state.items()
                if isinstance(v, Tensor) and v.shape == p.shape and v.ndim
            }
            state.update(
                {k: _share_of(v, p) for k, v in whole.items() if not isinstance(v, DTensor)}
            )


def _read(data: bytes) -> Any:
    end = 8 + int.from_bytes(data[:8])
    return unpack({**json.loads(data[8:end]), "arrays": safetensors.numpy.load(data[end:])})
