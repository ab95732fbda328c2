"""World models for ``gpu_all.py``: the embedded default, and Wan 2.1 of 1.3 B parameters from random weights.

How fast both dream, by the number of dreams and of sampling steps, what a step of training takes,
and the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from gpu_vla import seconds

from embodyrl.types import EnvSpec
from embodyrl.world_models.dream import ChunkInputs
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import CONTEXT, ChunkTransformer
from embodyrl.world_models.nets.codec import FrameCodec
from embodyrl.world_models.nets.pretrained.wan import WanBackbone, WanCodec
from embodyrl.world_models.nets.success import SuccessHead
from embodyrl.world_models.open_loop import measure_speed
from embodyrl.world_models.precision import use_bf16
from embodyrl.world_models.training_losses import noisy_change

WAN_1_3B = {
    "num_attention_heads": 12, "attention_head_dim": 128, "in_channels": 16, "out_channels": 16, "text_dim": 4096,
    "freq_dim": 256, "ffn_dim": 8960, "num_layers": 30,
}  # fmt: skip
"""``transformer/config.json`` of Wan-AI/Wan2.1-T2V-1.3B-Diffusers; its VAE is diffusers' default."""
SMALL = WAN_1_3B | {
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "text_dim": 16,
    "ffn_dim": 32,
    "num_layers": 1,
}


@dataclass(frozen=True)
class WorldSize:
    """How much is measured."""

    dreams: tuple[int, ...]
    wan_dreams: tuple[int, ...]
    wan_side: int
    wan: dict[str, Any]
    vae: dict[str, Any]
    batch: int
    seconds: float


WORLD_SIZES = {
    "cuda": WorldSize((1, 16, 64, 256, 1024, 4096), (1, 4, 16), 256, WAN_1_3B, {}, 4, 2.0),
    "cpu": WorldSize((2,), (1,), 64, SMALL, {"base_dim": 8, "z_dim": 16}, 2, 0.05),
}


def world(size: WorldSize, device: torch.device, repeats: int) -> dict[str, Any]:
    """Rows of ``evaluate.speed``, the seconds of a training step's forward and backward pass, and parameters."""
    small = EnvSpec("speed", 1, 4, 7, "ee_delta_pos", 25.0, 40, {"front": (64, 64)})
    side = (size.wan_side, size.wan_side)
    large = EnvSpec("speed", 1, 7, 8, "ee_delta_pose", 20.0, 280, {"front": side, "wrist": side})
    found: dict[str, Any] = {}
    model = WorldModel(FrameCodec(), ChunkTransformer(stochastic=True), SuccessHead(), small)
    found["embedded"] = _measured(model, size.dreams, 64, size.seconds, device, repeats)
    del model
    codec = WanCodec(2, *side, vae_config=size.vae)
    backbone = WanBackbone(2, 7, 8, 8, wan_config=size.wan, stochastic=True)
    head = SuccessHead(num_views=2, latent_channels=codec.latent_shape[0], proprio_dim=8)
    model = WorldModel(codec, backbone, head, large)
    found["wan"] = _measured(model, size.wan_dreams, size.batch, size.seconds, device, repeats)
    return found


def _measured(
    model: WorldModel,
    dreams: tuple[int, ...],
    batch: int,
    duration: float,
    device: torch.device,
    repeats: int,
) -> dict[str, Any]:
    model = model.eval().to(device)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with torch.autocast(device.type, torch.bfloat16, enabled=use_bf16("auto", device)):
        rows = measure_speed(model, dreams, duration)
        step = seconds(lambda: _step(model, batch), repeats, device)
    return {
        "speed": rows, "training_step_s": step, "batch": batch,
        "parameters": sum(p.numel() for p in model.parameters()),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
    }  # fmt: skip


def _step(model: WorldModel, batch: int) -> None:
    """Forward and backward pass of the dynamics, half of the clips on the way from noise."""
    device, spec = model.device, model.spec
    context = torch.randn(
        batch, CONTEXT, len(spec.cameras), *model.codec.latent_shape, device=device
    )
    words = torch.zeros(batch, model.success.config["word_dim"], device=device)
    dream = model.begin(context, torch.zeros(batch, spec.proprio_dim, device=device), words)
    actions = torch.zeros(batch, model.horizon, spec.action_dim, device=device)
    count = torch.full((batch,), model.horizon, device=device)
    change = torch.randn_like(dream.latent)
    sampled = noisy_change(change, torch.Generator().manual_seed(0))
    inputs = ChunkInputs(dream, actions, count, actions.new_zeros(batch), None)
    said, moved = model.predict_change(inputs, *sampled)
    ((said - change).square().mean() + moved.square().mean()).backward()
    model.zero_grad()
