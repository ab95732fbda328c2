"""The latents of recorded frames, computed once before the dynamics are trained."""

from __future__ import annotations

import torch
from torch import Tensor

from embodyrl.world_models.clips import Clips
from embodyrl.world_models.model import WorldModel

BATCH = 256


@torch.no_grad()
def encode(model: WorldModel, clips: Clips) -> Tensor:
    """(F, V, c, y, x) half: the latent of every frame, which is empty without frames."""
    if not model.imagines_frames:
        shape = (len(clips), len(clips.images), *model.latent_shape)
        return torch.zeros(shape, dtype=torch.half)
    batches = torch.arange(len(clips)).split(BATCH)
    return torch.cat(
        [model.codec.encode(clips.frames(rows).to(model.device)).half().cpu() for rows in batches]
    )


@torch.no_grad()
def set_latent_scale(model: WorldModel, clips: Clips, rows: Tensor) -> None:
    """Normalises every latent channel to mean 0 and variance 1 over about 1,000 frames."""
    some = rows[:: max(1, len(rows) // 1000)]
    codec = model.codec
    shift = codec.get_buffer("shift")
    scale = codec.get_buffer("scale")
    # An interrupted run may have set them before.
    shift.zero_()
    scale.fill_(1.0)
    frames = (clips.frames(part).to(model.device) for part in some.split(BATCH))
    latent = torch.cat([codec.encode(batch) for batch in frames])
    shift.copy_(latent.mean((0, 1, 3, 4))[:, None, None])
    scale.copy_(latent.std((0, 1, 3, 4)).clamp_min(1e-3)[:, None, None])
