"""``TrainedReflector``: a small network trained for the task; the default.

It is the best reflector if there are data. A convolutional encoder sees each frame stacked on the
episode's first frame, so that what has moved is easy to see. The instruction modulates the encoder
(FiLM, arXiv:1709.07871). A recurrent head reads the frames of the window in order. The instruction
is given as frozen word embeddings, so that a word unknown from training is near words that are
known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from embodyrl.errors import UserError
from embodyrl.word_embeddings import load_word_embeddings
from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments
from embodyrl.world_models.reflectors.base import check_window
from embodyrl.world_models.reflectors.calibration import Calibration

WORD_DIM = 256
MAX_WORDS = 32
MAX_WINDOW = 1000
BATCH = 128
"""Windows judged in one forward pass, which bounds the memory."""


class TrainedReflector(SavedNetwork):
    """See ``Reflector`` for the interface and ``train_on_episodes`` for its training.

    Args:
        cameras: name -> (height, width) of its frames.
        window: T.
        width: channels of the first convolution; the last ones have four times as many.
        features: size of a frame's feature vector.
    """

    @record_arguments
    def __init__(
        self,
        cameras: Mapping[str, Sequence[int]],
        window: int = 3,
        width: int = 16,
        features: int = 128,
    ) -> None:
        super().__init__()
        if type(window) is not int or not 2 <= window <= MAX_WINDOW or not cameras:
            raise UserError(
                f"A reflector needs a camera and a window of 2 to {MAX_WINDOW} frames, not "
                f"{str(window)[:30]}."
            )
        self.cameras = tuple(cameras)
        self.window = window
        self.calibration = Calibration()
        self._sizes = {name: tuple(size) for name, size in cameras.items()}
        self.sentence = nn.GRU(WORD_DIM, features, batch_first=True)
        self.encoders = nn.ModuleDict(
            {name: _Encoder(width, features, features) for name in cameras}
        )
        self.head = nn.GRU(features, features, batch_first=True)
        self.out = nn.Linear(features, 1)

    def forward(self, frames: Mapping[str, Tensor], instruction: list[str]) -> Float[Tensor, "b t"]:
        """Logits (B, T-1) of being solved as of each frame but the first.

        The logit of a frame depends on that frame and those before it.

        Args:
            frames: camera -> (B, T, h, w, 3), from 0 to 255, of any dtype.
            instruction: B sentences.
        """
        text = self._encode_text(instruction)
        total = torch.zeros((), device=self.device)
        for name in self.cameras:
            pixels = frames[name].permute(0, 1, 4, 2, 3).to(self.device, self.dtype) / 127.5 - 1
            b = len(pixels)
            t = self.window - 1
            # Each frame with the episode's first frame below it.
            first = pixels[:, :1].expand(-1, t, -1, -1, -1)
            pairs = torch.cat([pixels[:, 1:], first], dim=2).flatten(0, 1)
            features = self.encoders[name](pairs, text.repeat_interleave(t, 0))
            total = total + features.unflatten(0, (b, t))
        return self.out(self.head(F.silu(total))[0])[..., 0]

    @torch.no_grad()
    def judge(
        self, frames: Mapping[str, Tensor], instruction: list[str], new: int = 0
    ) -> Float[Tensor, "n t"]:
        """See ``Reflector``; the first column is NaN.

        Raises:
            UserError: also for frames of another size than in training.
        """
        check_window(self, frames, instruction, new)
        for name, size in self._sizes.items():
            if (found := tuple(frames[name].shape[2:4])) != size:
                raise UserError(
                    f"The reflector was trained on frames {size} of camera {name!r}; these are "
                    f"{found}."
                )
        parts = [slice(i, i + BATCH) for i in range(0, len(instruction), BATCH)]
        logits = [
            self({name: frames[name][p] for name in self.cameras}, instruction[p]) for p in parts
        ]
        if not logits:
            return torch.zeros(0, self.window)
        prob = torch.sigmoid(torch.cat(logits)).float().cpu()
        return F.pad(prob, (1, 0), value=math.nan)

    def _encode_text(self, instruction: list[str]) -> Float[Tensor, "b d"]:
        """The last state of a recurrent network over the words; each sentence is encoded once."""
        unique = list(dict.fromkeys(instruction))
        words = [_embed(sentence) for sentence in unique]
        padded = nn.utils.rnn.pad_sequence(words, batch_first=True).to(self.device, self.dtype)
        states = self.sentence(padded)[0]
        last = torch.tensor([len(w) - 1 for w in words], device=self.device)
        index = torch.tensor([unique.index(s) for s in instruction], device=self.device)
        return states[torch.arange(len(unique), device=self.device), last][index]


class _Encoder(nn.Module):
    """Frames to feature vectors: four convolutions, each scaled and shifted by the instruction."""

    def __init__(self, width: int, features: int, text: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width, 4 * width)
        # Input channels: the colours of both frames, and the pixel's coordinates.
        sources = (8, *widths[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, 3, stride, 1)
            for i, o, stride in zip(sources, widths, (2, 2, 2, 1), strict=True)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(4, o) for o in widths)
        self.films = nn.ModuleList(nn.Linear(text, 2 * o) for o in widths)
        self.project = nn.Linear(2 * widths[-1], features)

    def forward(
        self, pixels: Float[Tensor, "b 6 h w"], text: Float[Tensor, "b d"]
    ) -> Float[Tensor, "b f"]:
        """Features of frames.

        The mean over the picture keeps the scene, and the maximum the one thing that matters.
        """
        h, w = pixels.shape[2:]
        rows = torch.linspace(-1, 1, h, device=pixels.device, dtype=pixels.dtype)
        columns = torch.linspace(-1, 1, w, device=pixels.device, dtype=pixels.dtype)
        coordinates = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
        x = torch.cat([pixels, coordinates.expand(len(pixels), 2, h, w)], dim=1)
        for conv, norm, film in zip(self.convs, self.norms, self.films, strict=True):
            scale, shift = film(text)[..., None, None].chunk(2, dim=1)
            x = F.silu(norm(conv(x)) * (1 + scale) + shift)
        return self.project(torch.cat([x.mean((2, 3)), x.amax((2, 3))], dim=1))


@cache
def _embed(sentence: str) -> Float[Tensor, "l 256"]:
    """Word embeddings of a sentence, each scaled to a length of sqrt(256)."""
    table, tokenizer = load_word_embeddings()
    ids = tokenizer.encode(sentence, add_special_tokens=False).ids[:MAX_WORDS] or [0]
    return F.normalize(table[torch.tensor(ids)].float(), dim=-1) * math.sqrt(WORD_DIM)
