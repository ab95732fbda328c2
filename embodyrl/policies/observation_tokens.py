"""``ObservationTokens``: the small encoders of pictures, instruction and proprioception.

For N observations and tokens of width d:

    images      (N, h, w, 3) --FilmCNN------> tokens (N, hw/256, d) + keypoints (N, 2 * width) --+
    instruction N sentences  --TextEncoder--> tokens (N, L, d)      + mean (N, d) ---------------+
    proprio     (N, P)       --MLP----------> token  (N, 1, d)      + the same (N, d) -----------+
                                                                                                 |
    the policy <-- context: all tokens (N, C, d), and their pooled summary (N, d) <--------------+

``flow_vla`` and ``small_token_vla`` see through it.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.policies.actor_critic import ActorCritic
from embodyrl.policies.efficientnet import EfficientNetEncoder
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.text import TextEncoder
from embodyrl.policies.vision import FilmCNN
from embodyrl.types import EnvSpec, Obs

VISION_ENCODERS = ("film_cnn", "efficientnet_lite0")


class ObservationTokens(ActorCritic):
    """Base of the small policies; a subclass calls ``add_encoders`` in its constructor."""

    def add_encoders(self, config: Any, spec: EnvSpec) -> None:
        """Builds the encoders.

        Args:
            config: has ``width`` (d), ``heads``, ``text_layers``, and of the pictures ``vision``,
                ``vision_frozen`` and ``vision_width``.
            spec: of the env.
        """
        c = config
        d = config.width
        self.normalize_proprio = Normalizer(spec.proprio_dim)
        # Encoders of instruction and proprioception; each gives tokens and a summary of width d.
        self.text = TextEncoder(d, c.text_layers, c.heads)
        self.proprio = nn.Sequential(nn.Linear(spec.proprio_dim, d), nn.SiLU(), nn.Linear(d, d))
        summary_dims = [d, d]
        # One image encoder for all cameras, and learned positions for the tokens of each camera.
        # The summary of an image is its keypoints (row and column of each).
        if spec.cameras:
            self.vision = _image_encoder(c)
            tokens = {name: self.vision.num_tokens(size) for name, size in spec.cameras.items()}
            self.camera = nn.ParameterDict(
                {name: nn.Parameter(torch.randn(n, d) * 0.02) for name, n in tokens.items()}
            )
            summary_dims += [2 * self.vision.num_keypoints] * len(spec.cameras)
        # All summaries are pooled into one. Each is normalised first: otherwise the one with the
        # largest numbers would dominate early in training.
        self.pool_norms = nn.ModuleList(nn.LayerNorm(dim) for dim in summary_dims)
        self.pool = nn.Sequential(
            nn.Linear(sum(summary_dims), 2 * d), nn.SiLU(), nn.Linear(2 * d, d)
        )

    def observe(
        self, obs: Obs
    ) -> tuple[Float[Tensor, "n c d"], Float[Tensor, "n c"], Float[Tensor, "n d"]]:
        """Context tokens of N observations, their mask (1 at real tokens), and one summary."""
        # Instruction: tokens (N, L, d), mask (N, L), mean (N, d). Proprioception: (N, d).
        text_tokens, text_mask, text_mean = self.text(obs.instruction)
        proprio = self.proprio(self.normalize_proprio(obs.proprio))
        tokens = [text_tokens, proprio[:, None]]
        summaries = [text_mean, proprio]
        # Images, modulated by the instruction: tokens (N, hw/256, d), keypoints (N, 2 * width).
        for name in self.spec.cameras:
            image_tokens, keypoints = self.vision(obs.images[name], text_mean)
            tokens.append(image_tokens + self.camera[name])
            summaries.append(keypoints)
        # All tokens in one sequence (N, C, d). Only the instruction has padding.
        x = torch.cat(tokens, dim=1)
        others = text_mask.new_ones(len(x), x.shape[1] - text_mask.shape[1])
        mask = torch.cat([text_mask, others], dim=1)
        # One summary (N, d) of the whole observation.
        normed = [norm(part) for norm, part in zip(self.pool_norms, summaries, strict=True)]
        return x, mask, self.pool(torch.cat(normed, dim=-1))


def _image_encoder(c: Any) -> FilmCNN | EfficientNetEncoder:
    """The image encoder that ``policy.vision`` names."""
    if c.vision == "efficientnet_lite0":
        return EfficientNetEncoder(
            c.vision_width, c.width, text_dim=c.width, frozen=c.vision_frozen
        )
    return FilmCNN(c.vision_width, c.width, text_dim=c.width)
