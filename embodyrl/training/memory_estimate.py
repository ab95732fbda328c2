"""What a run will need of its device's memory, counted before it starts.

It is counted on PyTorch's meta device, which holds no data.

Parameters are counted. For activations a gradient step and a sampling step are run on tensors
without data, and every tensor is noted when it comes and when it goes: the peak is that of the real
step but for what kernels use inside, what the allocator wastes, and the CUDA context (.5 to 1 GB).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental import _config as fx_config
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from embodyrl import registry
from embodyrl.algorithm import MemoryPlan
from embodyrl.config import Config
from embodyrl.errors import UserError
from embodyrl.policy import num_executed
from embodyrl.rollouts.replay_buffer import whole_memory
from embodyrl.types import DenoisingTrace, EnvSpec, Obs

SENTENCE = "pick up the alphabet soup and place it in the basket"


@dataclass(frozen=True)
class Need:
    """A line of the table: ``what`` takes so many bytes."""

    what: str
    bytes: int


def estimate(config: Config, spec: EnvSpec) -> list[Need]:
    """What the learner holds, item by item; the largest of the steps' peaks counts once.

    Args:
        config: of an algorithm with a ``memory_plan``; of others, weights and optimiser alone are
            counted.
        spec: of the training env.
    """
    policy = on_meta(config, spec)
    trained = list(policy.actor_parameters())
    parameters = list(policy.parameters())
    gradient = _bytes(trained)
    count = sum(p.numel() for p in parameters)
    learned = sum(p.numel() for p in trained)
    needs = [
        Need(
            f"weights: {count:,} parameters, {learned:,} of them trained",
            _bytes(parameters) + _bytes(policy.buffers()),
        ),
        Need("their gradient", gradient),
        Need("Adam's two moments", 2 * gradient),
    ]
    algorithm = registry.load("algorithms", config.algorithm.name)
    plan: MemoryPlan | None = algorithm.memory_plan(config.algorithm, policy, spec)
    if plan is None:
        return needs
    if plan.extra_policies:
        what = "further copies of the policy (what is trained of it)"
        needs.append(Need(f"{plan.extra_policies} {what}", plan.extra_policies * gradient))
    batches = _Batches(policy, spec)

    def learn() -> None:
        plan.loss(policy, batches.obs(plan.rows), batches.trace(plan.rows)).backward()

    if plan.rollout_chunks:
        size = plan.rollout_chunks * _row_bytes(policy, spec)
        needs.append(Need(f"a rollout of {plan.rollout_chunks:,} chunks", size))
    activations = peak_of(learn) - gradient
    what = f"activations of a gradient step, {plan.rows} rows at a time"
    needs.append(Need(what, activations))
    if algorithm.plays:
        num_envs = -(-spec.num_envs // config.run.workers)

        def act() -> None:
            policy.sample(batches.obs(num_envs), generator=torch.Generator(), mode="train")

        what = f"acting in {num_envs} envs at a time (not while learning)"
        needs.append(Need(what, peak_of(act)))
    return needs


def total(needs: list[Need]) -> int:
    """Bytes at the worst moment: learning and acting take turns."""
    acting = [n.bytes for n in needs if n.what.startswith("acting")]
    learning = [n.bytes for n in needs if n.what.startswith("activations")]
    return sum(n.bytes for n in needs) - min(sum(acting), sum(learning))


def check_memory(config: Config, spec: EnvSpec, device: torch.device) -> None:
    """Refuses a run whose learner alone needs more memory than its device has.

    Args:
        config: of the run.
        spec: of the training env.
        device: of the run.

    Raises:
        UserError: naming the largest need.
    """
    needs = estimate(config, spec)
    there = whole_memory(device)
    if total(needs) > there:
        most = max(needs, key=lambda need: need.bytes)
        raise UserError(
            f"The run needs {_size(total(needs))} of memory, and {device} has {_size(there)}. Most "
            f"of it, {_size(most.bytes)}, is for {most.what}. Lower algorithm.microbatch_size, the "
            "rollout (env.num_envs, algorithm.num_chunks) or the policy's size; or share it among "
            "GPUs by torchrun. --dry-run --memory lists all needs of a run that fits."
        )


def table(needs: list[Need]) -> str:
    """The needs and their sum as lines of text."""
    rows = [*needs, Need("at the worst moment", total(needs))]
    return "\n".join(f"{_size(row.bytes):>10}  {row.what}" for row in rows)


def on_meta(config: Config, spec: EnvSpec) -> Any:
    """The policy of a run without its weights; of a pretrained one, only the config is read."""
    with torch.device("meta"):
        policy = registry.load("policies", config.policy.name)(config.policy, spec).to("meta")
    for module in policy.modules():
        if hasattr(module, "tie_weights"):  # transformers leaves it for when there are weights
            with contextlib.suppress(AttributeError):  # an action expert has no words to share
                module.tie_weights()
    if hasattr(policy, "_autocast"):  # PyTorch has none for this device
        policy._autocast = (
            _Bfloat16 if config.policy.precision == "bfloat16" else contextlib.nullcontext
        )
    return policy


def peak_of(step: Callable[[], Any]) -> int:
    """The most bytes of tensors alive at a time that ``step`` made."""
    # Where a model picks by a mask, all are taken, as if nothing were padding.
    whole = fx_config.patch(meta_nonzero_assume_all_nonzero=True)  # pyright: ignore[reportAttributeAccessIssue]
    with _Ledger() as ledger, whole:
        step()
    return ledger.peak


class _Bfloat16(TorchFunctionMode):
    """Autocast to bfloat16 as CUDA has it, for the operations that a transformer is made of."""

    LOWER = (
        "linear",
        "matmul",
        "__matmul__",
        "mm",
        "bmm",
        "addmm",
        "einsum",
        "conv2d",
        "scaled_dot_product_attention",
    )
    HIGHER = ("softmax", "layer_norm")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kwargs = kwargs or {}
        if name in self.LOWER or name in self.HIGHER:
            dtype = torch.bfloat16 if name in self.LOWER else torch.float32
            args, kwargs = tree_map(lambda x: x.to(dtype) if _is_float(x) else x, (args, kwargs))
        return func(*args, **kwargs)


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


class _Ledger(TorchDispatchMode):
    """Notes every storage that an operation makes, until it is freed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What was there before is no part of the step: views and in-place results share its
        # storage.
        for given in tree_leaves((args, kwargs)):
            if isinstance(given, Tensor):
                self._note(given.untyped_storage(), 0)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            return True  # a model asks whether anything is padding
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor):
                self._note(storage := made.untyped_storage(), storage.nbytes())
        return out

    def _note(self, storage: Any, size: int) -> None:
        if storage not in self._known:
            self._known.add(storage)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size


class _Batches:
    """Observations and traces without data, in the shapes of a policy."""

    def __init__(self, policy: Any, spec: EnvSpec) -> None:
        self.policy = policy
        self.spec = spec
        processors = getattr(policy, "processors", None)
        if (
            processors is not None
        ):  # a tokenizer needs words, and LeRobot's pipelines numbers: of one row
            images = {
                name: torch.zeros(1, *size, 3, dtype=torch.uint8)
                for name, size in spec.cameras.items()
            }
            processors.refused = ""
            one = processors(Obs(images, torch.zeros(1, spec.proprio_dim), [SENTENCE]))
            processors.forward = lambda obs: {k: _repeated(v, len(obs)) for k, v in one.items()}

    def obs(self, n: int) -> Obs:
        """N observations."""
        images = {k: _empty((n, *size, 3), torch.uint8) for k, size in self.spec.cameras.items()}
        privileged = _empty((n, self.spec.privileged_dim)) if self.spec.privileged_dim else None
        obs = Obs(images, _empty((n, self.spec.proprio_dim)), [SENTENCE] * n, privileged)
        return obs.at_start(self.spec.history)

    def trace(self, n: int) -> DenoisingTrace:
        """Of N chunks."""
        steps = self.policy.transition.num_steps
        shape = _trace_shape(self.policy, self.spec)
        trace = DenoisingTrace(_empty((n, steps + 1, *shape)), _empty((n, steps), torch.bool))
        if most := getattr(self.policy.config, "thoughts", 0):
            trace.thoughts = _empty((n, most, self.policy.config.thought_width))
            trace.thought_count = _empty((n,), torch.long)
        return trace


def _trace_shape(policy: Any, spec: EnvSpec) -> tuple[int, int]:
    """Rows and columns of a path: a policy of tokens, or a flow, may have more than its actions."""
    shape = getattr(policy, "trace_shape", None) or getattr(policy, "flow_shape", None)
    return shape or (policy.config.horizon, spec.action_dim)


def _repeated(value: Any, n: int) -> Any:
    if isinstance(value, Tensor):
        return _empty((n, *value.shape[1:]), value.dtype)
    return value * n if isinstance(value, list) else value


def _empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _bytes(tensors: Any) -> int:
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def _row_bytes(policy: Any, spec: EnvSpec) -> int:
    """Of one chunk in a rollout: observation, path, probabilities, values, rewards."""
    pixels = sum(h * w * 3 for h, w in spec.cameras.values())
    height, width = _trace_shape(policy, spec)
    steps = policy.transition.num_steps
    path = 4 * (steps + 1) * height * width + 5 * steps
    if most := getattr(policy.config, "thoughts", 0):
        path += 4 * most * (policy.config.thought_width + 1) + 8
    return (
        pixels
        + 4 * (spec.proprio_dim + spec.privileged_dim)
        + path
        + 5 * num_executed(policy.config)
        + 10
    )


def _size(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"
