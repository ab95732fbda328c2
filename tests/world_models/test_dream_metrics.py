import math

import pytest
import torch

from embodyrl.world_models.dream_metrics import psnr, ssim


def pictures(seed: int) -> torch.Tensor:
    return torch.randint(256, (3, 32, 32, 3), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )


def test_psnr_of_a_constant_error() -> None:
    a = torch.full((2, 16, 16, 3), 100, dtype=torch.uint8)
    assert psnr(a, a + 5).tolist() == pytest.approx([20 * math.log10(255 / 5)] * 2)
    assert psnr(a, a).tolist() == pytest.approx([100.0] * 2)


def test_ssim_is_one_of_equals_near_zero_of_noise_and_blind_to_order() -> None:
    a, b = pictures(0), pictures(1)
    assert ssim(a, a).tolist() == pytest.approx([1.0] * 3)
    assert ssim(a, b).abs().max() < 0.1
    assert torch.allclose(ssim(a, b), ssim(b, a))


def test_ssim_of_flat_pictures_is_its_luminance_term() -> None:
    a, b = (
        torch.full((1, 16, 16, 3), 100, dtype=torch.uint8),
        torch.full((1, 16, 16, 3), 120, dtype=torch.uint8),
    )
    c = (0.01 * 255) ** 2
    assert float(ssim(a, b)) == pytest.approx((2 * 100 * 120 + c) / (100**2 + 120**2 + c))
