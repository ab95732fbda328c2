"""The replay buffer of the off-policy algorithms: chunks in preallocated memory, drawn at random.

Everything is allocated at the start, so that a run that would not fit is refused at its start and
not hours later. Pictures stay uint8, and a sentence is stored once. Nothing is pickled:
``state_dict`` is tensors and plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.machine import usable_memory
from embodyrl.rollouts.batches import Transitions
from embodyrl.types import EnvSpec, Obs

ONLINE = 0
DEMO = 1
INTERVENTION = 2
"""Where a chunk came from: the policy, a demonstration, or a human who took over."""
SOURCES = ("online", "demo", "intervention")


class ReplayBuffer:
    """The last ``capacity`` chunks, each with the observations before and after it.

    Both are stored, although the one after a chunk is mostly the one before the next: rows then
    need no neighbours, and any may be overwritten or left out.
    """

    def __init__(
        self,
        capacity: int,
        spec: EnvSpec,
        horizon: int,
        *,
        privileged: bool = True,
        device: torch.device | str = "cpu",
        memory_limit: float = 0.0,
        extra: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None,
    ) -> None:
        """Allocates the memory.

        Args:
            capacity: chunks; when it is full, the oldest are overwritten.
            spec: of the env.
            horizon: H.
            privileged: whether privileged state is stored.
            device: where it lives.
            memory_limit: bytes that it may take; 0 means nine tenths of what is free.
            extra: name -> shape and dtype of further numbers of each chunk. They are 0 in new
                chunks; who asks for them writes them into ``data[name]``.

        Raises:
            UserError: it does not fit; the message says how much a chunk takes.
        """
        if capacity < 1:
            raise UserError(
                f"A replay buffer of {capacity} chunks holds nothing; its capacity must be at "
                "least 1."
            )
        self.capacity = capacity
        self.spec = spec
        self.horizon = horizon
        self.device = torch.device(device)
        self.count = 0
        self.position = 0
        self.sentences: dict[str, int] = {}
        one: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "choice": ((horizon, spec.action_dim), torch.float32),
            "reward": ((horizon,), torch.float32),
            "valid": ((horizon,), torch.bool),
            "terminated": ((), torch.bool),
            "truncated": ((), torch.bool),
            "source": ((), torch.uint8),
        }
        for when in ("obs", "next_obs"):
            for frame in range(spec.history):
                # Earlier observations stand below the present one.
                seen = when + "/previous" * frame
                one |= {
                    f"{seen}/image/{name}": ((*size, 3), torch.uint8)
                    for name, size in spec.cameras.items()
                }
                one[f"{seen}/proprio"] = ((spec.proprio_dim,), torch.float32)
            one[f"{when}/instruction"] = ((), torch.int32)
            if privileged and spec.privileged_dim:
                one[f"{when}/privileged"] = ((spec.privileged_dim,), torch.float32)
        self.extra = dict(extra or {})
        one |= self.extra
        self.bytes_per_chunk = sum(
            torch.Size(shape).numel() * dtype.itemsize for shape, dtype in one.values()
        )
        limit = memory_limit or 0.9 * free_memory(self.device)
        if self.nbytes > limit:
            raise UserError(
                f"The replay buffer would take {self.nbytes / 2**30:.2f} GiB ({capacity} chunks of "
                f"{self.bytes_per_chunk / 2**10:.1f} KiB on {self.device}), but "
                f"{limit / 2**30:.2f} GiB are there for it. Set algorithm.capacity to "
                f"{int(limit / self.bytes_per_chunk)} or less, or use smaller pictures."
            )
        self.weights = torch.ones(capacity, dtype=torch.float64)
        self.data = {
            name: torch.zeros((capacity, *shape), dtype=dtype, device=self.device)
            for name, (shape, dtype) in one.items()
        }

    @property
    def nbytes(self) -> int:
        """Memory that the buffer takes, full or not."""
        return self.capacity * self.bytes_per_chunk

    def __len__(self) -> int:
        return self.count

    def add(self, batch: Transitions, source: int = ONLINE) -> Tensor:
        """Appends chunks, overwriting the oldest; of more than ``capacity``, the last ones stay.

        Returns:
            The places that they took.

        Raises:
            UserError: a number in the batch is not finite, or privileged state is missing.
        """
        if len(batch) > self.capacity:
            batch = batch[slice(len(batch) - self.capacity, None)]
        rows = (self.position + torch.arange(len(batch), device=self.device)) % self.capacity
        for name, values in self._columns(batch).items():
            if values.is_floating_point() and not torch.isfinite(values).all():
                raise UserError(
                    f"{name} of a chunk is not finite, so it was not put into the replay buffer."
                )
            self.data[name][rows] = values.to(self.device)
        self.data["source"][rows] = source
        for name in self.extra:
            self.data[name][rows] = 0
        self.weights[rows.cpu()] = 1.0 if batch.weight is None else batch.weight.double().cpu()
        self.position = (self.position + len(batch)) % self.capacity
        self.count = min(self.capacity, self.count + len(batch))
        return rows

    def _columns(self, batch: Transitions) -> dict[str, Tensor]:
        columns = {
            n: getattr(batch, n) for n in ("choice", "reward", "valid", "terminated", "truncated")
        }
        for when in ("obs", "next_obs"):
            obs: Obs = getattr(batch, when)
            for frame, seen in enumerate(reversed(obs.frames())):
                where = when + "/previous" * frame
                columns |= {f"{where}/image/{name}": x for name, x in seen.images.items()}
                columns[f"{where}/proprio"] = seen.proprio
            ids = [
                self.sentences.setdefault(sentence, len(self.sentences))
                for sentence in obs.instruction
            ]
            columns[f"{when}/instruction"] = torch.tensor(ids, dtype=torch.int32)
            if f"{when}/privileged" in self.data:
                if obs.privileged is None:
                    raise UserError(
                        "The critic reads privileged state, which these chunks do not have "
                        "(demonstrations never do). Set algorithm.shared_critic=true, or "
                        "own_encoder=true."
                    )
                columns[f"{when}/privileged"] = obs.privileged
        return columns

    def sample(self, size: int, generator: torch.Generator) -> tuple[Transitions, Tensor]:
        """``size`` chunks as ``draw`` gives them, and the source (size,) of each."""
        rows = self.draw(size, generator)
        return self.rows(rows), self.data["source"][rows]

    def draw(self, size: int, generator: torch.Generator, among: Tensor | None = None) -> Tensor:
        """The places (size,) of chunks drawn with replacement.

        Chunks are drawn in proportion to the weight that they were added with.

        Args:
            size: how many.
            generator: of the draw.
            among: places (M,) to draw from; None for all.

        Raises:
            UserError: the buffer is empty.
        """
        if not self.count:
            raise UserError("The replay buffer is empty: nothing can be drawn from it.")
        # Equal weights, as of all that was played, need no table.
        weights = self.weights[: self.count] if among is None else self.weights[among.cpu()]
        weights = weights.to(generator.device)
        if (weights == weights[0]).all():
            shape = (size,)
            rows = torch.randint(len(weights), shape, generator=generator, device=generator.device)
        else:
            rows = torch.multinomial(weights, size, replacement=True, generator=generator)
        rows = rows.to(self.device)
        return rows if among is None else among[rows]

    def rows(self, rows: Tensor) -> Transitions:
        """The chunks at those places."""
        sentences = list(self.sentences)

        def obs(when: str) -> Obs:
            privileged = self.data.get(f"{when}/privileged")
            ids = self.data[f"{when}/instruction"][rows].tolist()
            seen = None
            for frame in reversed(range(self.spec.history)):
                where = when + "/previous" * frame
                seen = Obs(
                    {name: self.data[f"{where}/image/{name}"][rows] for name in self.spec.cameras},
                    self.data[f"{where}/proprio"][rows],
                    [sentences[i] for i in ids],
                    None if privileged is None or frame else privileged[rows],
                    seen,
                )
            assert seen is not None
            return seen

        d = self.data
        return Transitions(
            obs("obs"),
            d["choice"][rows],
            d["reward"][rows],
            d["valid"][rows],
            d["terminated"][rows],
            d["truncated"][rows],
            obs("next_obs"),
        )

    def state_dict(self) -> dict[str, Any]:
        """What it holds, the empty part left out."""
        return {
            "data": {name: values[: self.count] for name, values in self.data.items()},
            "sentences": list(self.sentences),
            "position": self.position,
            "weights": self.weights[: self.count],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``, for a buffer of the same capacity.

        Raises:
            UserError: it holds more than fits.
        """
        count = len(state["data"]["reward"])
        if count > self.capacity:
            raise UserError(
                f"The checkpoint holds {count} chunks of replay, more than "
                f"algorithm.capacity={self.capacity}."
            )
        for name, values in self.data.items():
            saved = state["data"][name]
            if saved.shape != values[:count].shape:
                raise ValueError(
                    f"the replay's {name} has the shape {tuple(saved.shape)}, not "
                    f"{tuple(values[:count].shape)}"
                )
            values[:count] = saved.to(self.device)
        self.sentences = {sentence: i for i, sentence in enumerate(state["sentences"])}
        # Checkpoints of earlier versions have no weights.
        self.weights[:count] = state.get("weights", torch.ones(count, dtype=torch.float64))
        self.count = count
        self.position = int(state["position"]) % self.capacity


def free_memory(device: torch.device | str = "cpu") -> float:
    """Bytes that are free on a device; infinity where that is not known."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return usable_memory()[1]


def whole_memory(device: torch.device | str = "cpu") -> float:
    """Bytes that a device has, free or not; infinity where that is not known."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return usable_memory()[0]
