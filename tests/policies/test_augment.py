"""Pictures changed at random in training: by how much, and what stays as it is."""

import colorsys

import pytest
import torch

from embodyrl.algorithms.sft import SFT, SFTConfig
from embodyrl.errors import UserError
from embodyrl.policies.augment import augmented, colour_jitter, random_shift
from embodyrl.policies.flow_mlp import FlowMLP, FlowMLPConfig
from embodyrl.types import EnvSpec, Obs


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_random_shift_is_a_crop_of_the_image_with_its_border_repeated():
    generator, pixels = torch.Generator().manual_seed(0), 2
    images = torch.randint(0, 256, (64, 6, 8, 3), generator=generator, dtype=torch.uint8)
    shifted = random_shift(images, pixels, torch.Generator().manual_seed(1))
    assert torch.equal(shifted, random_shift(images, pixels, torch.Generator().manual_seed(1)))
    assert torch.equal(random_shift(images, 0, generator), images)
    padded = torch.nn.functional.pad(
        images.permute(0, 3, 1, 2).float(), [pixels] * 4, mode="replicate"
    )
    padded = padded.permute(0, 2, 3, 1).to(torch.uint8)
    used = set()
    for image, wide in zip(shifted, padded, strict=True):
        fits = [
            (dy, dx)
            for dy in range(2 * pixels + 1)
            for dx in range(2 * pixels + 1)
            if torch.equal(image, wide[dy : dy + 6, dx : dx + 8])
        ]
        assert len(fits) == 1
        used.add(fits[0])
    assert len(used) > 15  # of 25


def test_jitter_leaves_grey_grey_and_changes_each_image_in_its_own_way():
    grey = torch.full((64, 4, 4, 3), 100, dtype=torch.uint8)
    changed = colour_jitter(grey, 0.2, seeded())
    assert torch.equal(changed, colour_jitter(grey, 0.2, seeded()))
    assert torch.equal(colour_jitter(grey, 0.0, seeded()), grey)
    # The mean is brightness alone: 80 to 120. All of it is grey.
    values = changed[:, 0, 0]
    assert (values.amax(1) - values.amin(1)).max() <= 1
    assert 80 <= values.min() < 85 and 115 < values.max() <= 120
    assert (changed == changed[:, :1, :1]).all()


def test_jitter_turns_hue_by_a_twentieth_and_changes_contrast_and_saturation():
    # A red and a blue half; so the mean of the image stays, and contrast can be seen.
    image = torch.zeros(256, 2, 2, 3)
    image[:, 0], image[:, 1] = torch.tensor([180.0, 60, 60]), torch.tensor([60.0, 60, 180])
    changed = colour_jitter(image.to(torch.uint8), 0.2, seeded()).double() / 255
    red = torch.tensor([colorsys.rgb_to_hsv(*x) for x in changed[:, 0, 0].tolist()])
    turned = torch.minimum(red[:, 0], 1 - red[:, 0])
    assert 0.03 < turned.max() < 0.08  # YIQ's turns are not quite those of HSV
    assert red[:, 1].std() > 0.03 and red[:, 2].std() > 0.05
    # The named colour stays what it was.
    assert (changed[:, 0, 0].argmax(1) == 0).all() and (changed[:, 1, 0].argmax(1) == 2).all()
    # Contrast: halves of different brightness come closer or move apart.
    halves = torch.zeros(256, 2, 2, 3)
    halves[:, 0], halves[:, 1] = 80.0, 160.0
    changed = colour_jitter(halves.to(torch.uint8), 0.2, seeded()).double()
    ratio = (changed[:, 1, 0, 0] - changed[:, 0, 0, 0]) / changed.mean((1, 2, 3)) / (80 / 120)
    assert 0.78 < ratio.min() < 0.85 and 1.15 < ratio.max() < 1.22


def test_each_camera_is_changed_and_nothing_else():
    pictures = torch.randint(0, 256, (8, 6, 6, 3), generator=seeded(), dtype=torch.uint8)
    obs = Obs({"front": pictures, "wrist": pictures.clone()}, torch.ones(8, 2), ["go"] * 8)
    changed = augmented(obs, seeded(), shift=1, jitter=0.2)
    assert torch.equal(changed.proprio, obs.proprio) and changed.instruction == obs.instruction
    assert not torch.equal(changed.images["front"], changed.images["wrist"])
    # Without jitter its draws are those of shifts alone, as in runs from before it was there.
    shifted = augmented(obs, seeded(), shift=1)
    assert torch.equal(shifted.images["front"], random_shift(pictures, 1, seeded()))


def test_jitter_without_pictures_is_refused():
    spec = EnvSpec("test/arm", 4, 3, 5, "ee_delta_pos", 20.0, 40, {})
    policy = FlowMLP(FlowMLPConfig(width=16, layers=1, critic_width=8), spec)
    with pytest.raises(UserError, match=r"algorithm\.jitter is 0\.1, but test/arm has no pictures"):
        SFT(SFTConfig(jitter=0.1), policy)
