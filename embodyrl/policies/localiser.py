"""``Localiser``: where the robot will be when the task is solved, seen in one observation.

    proprio --Painter--> the picture without what matters (robot and background)
    2 * (picture - painted), picture --convolutions, FiLM by the instruction--> keypoints
    keypoints, proprio, instruction --head--> J places (B, J, P)

What matters for a task is where the hand must go. No label says so, but hindsight does: in an
episode that was solved, the robot itself was there. Its later observations tell it for the earlier
ones (as goals are relabelled in arXiv:1707.01495): the last ones where the task ends, those on the
way where it leads first, to a block that is to be pushed. So critics learn where things are from
the data alone, of any env, and no simulator's state is read.

A picture minus what proprioception explains shows the rest: the objects. Without that the keypoints
follow the robot, which explains most of a picture.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.text import TextEncoder
from embodyrl.policies.vision import as_pixels, spatial_softmax
from embodyrl.types import EnvSpec, Obs

TEXT_WIDTH = 64
CHANNELS = 32
KEYPOINTS = 20
HIDDEN = 128
ENDS = 3
"""So many last observations of a solved episode are labels."""
ON_THE_WAY = (0.75, 0.5, 0.25)
"""And those at these shares of the way from an observation to the last one."""
PLACES = ENDS + len(ON_THE_WAY)
"""J."""
SMALL_ERROR = 0.3
"""Errors below, in standard deviations of proprioception, count as squares (Huber)."""

# How it is taught, for critics and for world models.
PAINTER_LR = 5e-3
LOCALISER_LR = 2e-3
PAINTED = 32
"""Pictures in a gradient step of the painters."""
LABELLED = 48
"""Observations with labels in a gradient step of the rest."""
PAIRS = 16
"""Pairs of observations of one episode in it, which must lead to the same place."""
AGREEMENT = 0.3
"""Weight of their disagreement. Failed episodes teach it too."""


def half_size(image: UInt8[Tensor, "b h w 3"]) -> Float[Tensor, "b 3 h2 w2"]:
    """Pictures in [-1, 1], each two by two pixels averaged: finer than the keypoints are."""
    return F.avg_pool2d(as_pixels(image), 2, ceil_mode=True)


class Painter(nn.Module):
    """Paints what proprioception explains of a camera's picture; the rest is the usual picture.

    Args:
        proprio_dim: P.
        size: (height, width) of the picture, which is painted at half size.
    """

    usual: Tensor

    def __init__(self, proprio_dim: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.quarter = (-(-size[0] // 4), -(-size[1] // 4))
        self.hidden = nn.Linear(proprio_dim, HIDDEN)
        self.spread = nn.Linear(HIDDEN, CHANNELS * self.quarter[0] * self.quarter[1])
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.to_half = nn.Conv2d(CHANNELS, 4 * 4, 3, padding=1)
        self.register_buffer("usual", torch.zeros(3, -(-size[0] // 2), -(-size[1] // 2)))

    def forward(self, proprio: Float[Tensor, "b p"]) -> Float[Tensor, "b 3 h2 w2"]:
        """Pictures in [-1, 1], at half size."""
        x = F.silu(self.spread(F.silu(self.hidden(proprio))))
        x = F.silu(self.conv(x.view(-1, CHANNELS, *self.quarter)))
        height, width = self.usual.shape[1:]
        x = F.pixel_shuffle(self.to_half(x), 2)[..., :height, :width]
        # A gate opens where the robot hides the usual picture.
        gate = torch.sigmoid(x[:, 3:] - 2.0)
        return gate * x[:, :3] + (1.0 - gate) * self.usual


class Eye(nn.Module):
    """The keypoints of one camera, in what the painter does not explain."""

    def __init__(self, proprio_dim: int, size: tuple[int, int]) -> None:
        super().__init__()
        self.painter = Painter(proprio_dim, size)
        self.stem = nn.Conv2d(6, CHANNELS, 4, stride=2, padding=1)
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.film = nn.Linear(TEXT_WIDTH, 2 * CHANNELS)
        self.more = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.keypoints = nn.Conv2d(CHANNELS, KEYPOINTS, 1)

    def forward(
        self,
        image: UInt8[Tensor, "b h w 3"],
        proprio: Float[Tensor, "b p"],
        text: Float[Tensor, "b e"],
    ) -> Float[Tensor, "b k2"]:
        """(B, 2 * KEYPOINTS) in [-1, 1]."""
        picture = half_size(image)
        with torch.no_grad():  # the painter has a loss of its own
            rest = picture - self.painter(proprio)
        x = F.relu(self.stem(torch.cat([2.0 * rest, picture], dim=1)))
        scale, shift = self.film(text)[:, :, None, None].chunk(2, dim=1)
        x = F.relu(self.conv(x) * (1.0 + scale) + shift)
        return spatial_softmax(self.keypoints(x + F.relu(self.more(x))))


class Localiser(nn.Module):
    """J places of the robot, in normalised proprioception; see the module.

    Args:
        spec: of an env with cameras.
    """

    def __init__(self, spec: EnvSpec) -> None:
        super().__init__()
        p = spec.proprio_dim
        self.normalize_proprio = Normalizer(p)
        self.text = TextEncoder(TEXT_WIDTH, 0, 1)
        self.eyes = nn.ModuleDict({name: Eye(p, size) for name, size in spec.cameras.items()})
        seen = 2 * KEYPOINTS * len(spec.cameras)
        self.head = nn.Sequential(
            nn.Linear(seen + p + TEXT_WIDTH, HIDDEN), nn.SiLU(), nn.Linear(HIDDEN, PLACES * p)
        )

    def forward(self, obs: Obs) -> Float[Tensor, "b j p"]:
        """The last places first."""
        # The keypoints of all cameras, then one head for all that was seen.
        proprio = self.normalize_proprio(obs.proprio)
        text = self.text(obs.instruction)[2]
        seen = [eye(obs.images[name], proprio, text) for name, eye in self._each()]
        return self.head(torch.cat([*seen, proprio, text], dim=-1)).view(
            len(proprio), PLACES, proprio.shape[-1]
        )

    def hindsight_loss(self, obs: Obs, places: Float[Tensor, "b j p"]) -> Tensor:
        """Huber loss of the places of B observations.

        Args:
            obs: of solved episodes.
            places: proprioception in J later observations of each one's episode, the last first.
        """
        wanted = self.normalize_proprio(places)
        return F.smooth_l1_loss(self(obs), wanted, beta=SMALL_ERROR)

    def difference(self, obs: Obs, later: Obs) -> Tensor:
        """Huber loss between where B observations and B later ones of their episodes say they end."""
        return F.smooth_l1_loss(self(obs)[:, :ENDS], self(later)[:, :ENDS], beta=SMALL_ERROR)

    def painting_loss(self, obs: Obs) -> Tensor:
        """Mean absolute error of the painted pictures, in pixel values of [-1, 1]."""
        proprio = self.normalize_proprio(obs.proprio)
        errors = [
            (eye.painter(proprio) - half_size(obs.images[name])).abs().mean()
            for name, eye in self._each()
        ]
        return torch.stack(errors).mean()

    @torch.no_grad()
    def fit_inputs(self, obs: Obs) -> None:
        """Normalises proprioception, and takes the median of many pictures as the usual one."""
        self.normalize_proprio.fit(obs.proprio)
        for name, eye in self._each():
            eye.painter.usual.copy_(half_size(obs.images[name]).median(0).values)

    def painters(self) -> list[nn.Parameter]:
        """What ``painting_loss`` trains; ``hindsight_loss`` trains the others."""
        return [p for _, eye in self._each() for p in eye.painter.parameters()]

    def each_painter(self) -> list[Painter]:
        """The painter of each camera."""
        return [eye.painter for _, eye in self._each()]

    def parts_but_painters(self) -> list[nn.Module]:
        """The modules that ``hindsight_loss`` trains."""
        eyes = [
            part
            for _, eye in self._each()
            for name, part in eye.named_children()
            if name != "painter"
        ]
        return [self.text, *eyes, self.head]

    def _each(self) -> list[tuple[str, Eye]]:
        """The eye of each camera."""
        return [(name, cast(Eye, eye)) for name, eye in self.eyes.items()]
