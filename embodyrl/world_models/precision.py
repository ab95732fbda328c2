"""Whether a world model computes in bfloat16 or in float32."""

from __future__ import annotations

import torch

from embodyrl.storage.provenance import hardware


def use_bf16(precision: str, device: torch.device) -> bool:
    """Whether matrix products are computed in bfloat16.

    ``auto`` takes bfloat16 where it is faster than float32: on GPUs that support it, on CPUs with
    AMX, and on AMD's CPUs with AVX512-BF16 (1.7 times as fast). Intel's CPUs with AVX512-BF16 but
    without AMX are slower in bfloat16 (docs/notebook/2026-11.md, 2026-11-25).

    Args:
        precision: ``bf16``, ``f32`` or ``auto``.
        device: where the model runs.
    """
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    amd = torch.cpu._is_avx512_bf16_supported() and "AMD" in hardware()["cpu"]
    return torch.cpu._is_amx_tile_supported() or amd
