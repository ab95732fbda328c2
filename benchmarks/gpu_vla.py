"""SmolVLA and pi0 in their real sizes with random weights: sampling and training beside LeRobot's own code.

Part of ``gpu_all.py`` (``--only vla``). The same weights, precision (bfloat16 by autocast) and
observations for both; ours is ``policy.sample`` and a gradient step of PPO or imitation with Adam,
LeRobot's is ``predict_action_chunk`` (which its ``select_action`` calls once per chunk) and
``forward`` with the same Adam.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from embodyrl.algorithms.imitation import imitation_loss
from embodyrl.algorithms.optim import GuardedAdam
from embodyrl.build import make_policy
from embodyrl.config import resolve
from embodyrl.policies.compile import compile_sampling
from embodyrl.policies.vla.make_small import make_pi0, make_small_smolvla, make_smolvla
from embodyrl.training.memory_estimate import estimate, total
from embodyrl.types import EnvSpec, Obs

SPEC = EnvSpec(
    "bench",
    1,
    7,
    8,
    "ee_delta_pose",
    20.0,
    280,
    {"image": (256, 256), "wrist_image": (256, 256)},
    privileged_dim=16,
)
SENTENCE = "pick up the alphabet soup and place it in the basket"
PEAKS = {"H100": (989e12, 3.35e12), "H200": (989e12, 4.8e12), "A100": (312e12, 2.0e12)}
"""Dense bfloat16 flop/s and bytes/s of memory, from NVIDIA's data sheets (SXM)."""
MAKERS = {
    "smolvla": ("smolvla", make_smolvla),
    "pi0": ("pi0", make_pi0),
    "small": ("smolvla", make_small_smolvla),
}


def vla(
    models: tuple[str, ...],
    batches: tuple[int, ...],
    rows: tuple[int, ...],
    repeats: int,
    device: Any,
    out: str,
) -> Any:
    """Every model; ``batches`` of sampling, ``rows`` of a gradient step."""
    return {
        model: _model(model, batches, rows, repeats, device, Path(out) / model) for model in models
    }


def _model(
    name: str, batches: Any, rows: Any, repeats: int, device: torch.device, folder: Path
) -> dict[str, Any]:
    kind, make = MAKERS[name]
    make(folder, [SENTENCE])
    chunk = 50 if name != "small" else 6
    settings = {
        "name": kind, "pretrained": str(folder), "random_weights": True, "horizon": chunk, "num_denoise_steps": 10,
        "precision": "bfloat16",
    }  # fmt: skip
    config = resolve({"env": {"name": "mujoco"}, "policy": settings, "algorithm": {"name": "ppo"}})
    policy = make_policy(config.policy, SPEC, 0, device)
    trained = sum(p.numel() for p in policy.actor_parameters())
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in policy.parameters()),
        "trained": trained,
    }
    found["train"] = [_train(policy, settings, n, repeats, device) for n in rows]
    found["sample"] = [_sample(policy, n, repeats, device) for n in batches]
    if device.type != "cuda":  # a CPU takes minutes to compile even the small one
        return found
    compile_sampling(policy)
    for row in found["sample"]:
        obs = _observations(row["batch"], device)
        row["ours_compiled_s"] = _said(
            lambda obs=obs: seconds(lambda: _ours(policy, obs), repeats, device)
        )
    return found


def _sample(policy: Any, n: int, repeats: int, device: torch.device) -> dict[str, Any]:
    obs, lerobot = _observations(n, device), policy.net.lerobot

    def theirs() -> None:
        with torch.autocast(device.type, torch.bfloat16), torch.no_grad():
            lerobot.reset()
            lerobot.predict_action_chunk(policy.processors(obs))

    flops = _flops(lambda: _ours(policy, obs))
    expert = sum(p.numel() * p.element_size() for p in policy.actor_parameters())
    everything = sum(p.numel() * p.element_size() for p in policy.parameters())
    moved = (
        everything + (policy.config.num_denoise_steps - 1) * expert
    )  # the weights, each time they are read
    row = {"batch": n, "flops": flops, "weight_bytes": moved, **_floor(flops, moved, device)}
    row["ours_s"] = _said(lambda: seconds(lambda: _ours(policy, obs), repeats, device))
    row["lerobot_s"] = _said(lambda: seconds(theirs, repeats, device))
    return row


def _ours(policy: Any, obs: Obs) -> None:
    policy.sample(obs, generator=torch.Generator().manual_seed(0), mode="eval")


def _train(
    policy: Any, settings: Any, n: int, repeats: int, device: torch.device
) -> dict[str, Any]:
    obs, lerobot = _observations(n, device), policy.net.lerobot
    horizon, dims = policy.config.horizon, SPEC.action_dim
    actions, mask = (
        torch.zeros(n, horizon, dims, device=device),
        torch.ones(n, horizon, device=device) > 0,
    )
    trace = policy.sample(obs, generator=torch.Generator().manual_seed(0), mode="train").trace

    def ppo() -> torch.Tensor:
        return policy.evaluate(obs, trace).logprob.mean()

    def imitation() -> torch.Tensor:
        return imitation_loss(policy, obs, actions, mask, torch.Generator().manual_seed(0))

    def theirs() -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return lerobot.forward({**policy.processors(obs), "action": actions})[0]

    row: dict[str, Any] = {"rows": n}
    for name, loss in (("ppo", ppo), ("imitation", imitation), ("lerobot_forward", theirs)):
        optimizer = GuardedAdam(policy.actor_parameters(), 0.0, 1.0, "bench")
        with _memory(row, f"{name}_peak_bytes", device):
            step = lambda loss=loss, o=optimizer: o.step(loss())  # noqa: E731
            row[f"{name}_s"] = _said(lambda step=step: seconds(step, repeats, device))
            row[f"{name}_flops"] = _said(lambda step=step: _flops(step))
        policy.zero_grad()
        if (peak := _peak(device)) and isinstance(row[f"{name}_s"], float):
            row[f"{name}_mfu"] = row[f"{name}_flops"] / row[f"{name}_s"] / peak[0]
    said = {"name": "ppo", "minibatch_size": n, "num_chunks": 1}
    config = resolve(
        {"env": {"name": "mujoco", "num_envs": 1}, "policy": settings, "algorithm": said}
    )
    row["estimated_peak_bytes"] = total(estimate(config, SPEC))
    return row


def counted(models: tuple[str, ...], out: str) -> Any:
    """The estimate for a minibatch of 32, without a weight: what can be had of the real sizes without a GPU."""
    found = {}
    for name in models:
        kind, make = MAKERS[name]
        folder = make(Path(out) / f"{name}_counted", [SENTENCE])
        policy = {"name": kind, "pretrained": str(folder), "random_weights": True, "horizon": 50}
        policy |= {"precision": "bfloat16", "num_denoise_steps": 10}
        algorithm = {"name": "ppo", "minibatch_size": 32}
        config = resolve(
            {"env": {"name": "mujoco", "num_envs": 16}, "policy": policy, "algorithm": algorithm}
        )
        found[name] = [vars(need) for need in estimate(config, SPEC)]
    return found


def _observations(n: int, device: torch.device) -> Obs:
    g = torch.Generator().manual_seed(0)
    images = {
        k: torch.randint(256, (n, *s, 3), dtype=torch.uint8, generator=g)
        for k, s in SPEC.cameras.items()
    }
    privileged = torch.randn(n, SPEC.privileged_dim, generator=g)
    return Obs(
        images, torch.randn(n, SPEC.proprio_dim, generator=g), [SENTENCE] * n, privileged
    ).to(device)


def seconds(fn: Callable[[], None], repeats: int, device: torch.device) -> float:
    """The median of some calls, after one that warms up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        fn()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times[1:])[len(times[1:]) // 2]


def _said(fn: Callable[[], Any]) -> Any:
    """What ``fn`` gives, or why it gave nothing: the other figures are still worth having."""
    try:
        return fn()
    except Exception as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return f"{type(error).__name__}: {str(error)[:200]}"


def _flops(fn: Callable[[], Any]) -> int:
    """Of matrix products, convolutions and attention, as PyTorch counts them."""
    with FlopCounterMode(display=False) as counter:
        fn()
    return counter.get_total_flops()


def _peak(device: torch.device) -> tuple[float, float] | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name()
    return next((peak for key, peak in PEAKS.items() if key in name), None)


def _floor(flops: int, moved: int, device: torch.device) -> dict[str, float]:
    """The seconds that no program on this device could beat."""
    if (peak := _peak(device)) is None:
        return {}
    return {"flop_floor_s": flops / peak[0], "byte_floor_s": moved / peak[1]}


@contextlib.contextmanager
def _memory(row: dict[str, Any], key: str, device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    yield
    if device.type == "cuda":
        row[key] = torch.cuda.max_memory_allocated()
