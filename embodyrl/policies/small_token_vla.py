"""A small vision-language-action policy that says its actions in tokens.

It is trained from nothing in minutes on one CPU core. It draws, scores and imitates by the code of
the large token policies (``vla.token_base``); only the network is small:

    observation --ObservationTokens--> context: C tokens (N, C, d), and their summary (N, d)
    context     --TokenDecoder.prompt--> keys and values
    tokens      --TokenDecoder--> logits (N, L, bins) of the tokens of a chunk

A chunk of ``horizon`` actions with A dims is ``horizon`` * A tokens, said in one of the ways of
``vla.decoding``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.policies.actor_critic import CRITICS
from embodyrl.policies.observation_tokens import VISION_ENCODERS, ObservationTokens
from embodyrl.policies.token_decoder import TokenDecoder
from embodyrl.policies.vla.action_bins import ActionBins
from embodyrl.policies.vla.decoding import (
    DECODING,
    DecodingConfig,
    check_decoding,
    inputs_at_places,
    make_steps,
    token_embedding,
)
from embodyrl.policies.vla.token_base import Prompt, TokenPolicy
from embodyrl.ranges import Choice, Count, CountOrZero, Positive, Range
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class SmallTokenVLAConfig(DecodingConfig):
    """Size of a ``SmallTokenVLA``, and how actions become tokens.

    Attributes:
        name: registry name.
        horizon: C, actions that are planned.
        execute: H, how many of them are executed before the next observation; 0 for all.
        decoding: ``parallel``, ``autoregressive`` or ``masked``.
        bins: tokens per dim of an action.
        smoothing: imitation also takes the bins beside the demonstrated one, by a Gaussian with a
            standard deviation of so many bins; 0 for that one alone.
        temperature: of sampling when training; evaluation takes the most likely token.
        width: d, of the transformers; a multiple of ``heads``.
        layers: of the decoder.
        heads: attention heads.
        vision: the image encoder: ``film_cnn``, trained from random weights, or
            ``efficientnet_lite0``, with ImageNet weights.
        vision_frozen: do not train the pretrained layers of ``efficientnet_lite0``.
        vision_width: channels of the image encoder, and keypoints per camera.
        text_layers: of the instruction encoder.
        critic: what the value head sees: ``shared`` features of the actor (no gradient into them),
            what hindsight has ``found`` in pictures beside proprioception and instruction, or
            ``privileged`` simulator state, which no robot has.
        critic_width: of the value head's two hidden layers.
    """

    name: str = "small_token_vla"
    horizon: Count = 5
    execute: CountOrZero = 0
    decoding: Annotated[str, Choice(*DECODING)] = "parallel"
    bins: Annotated[int, Range(2, 65536)] = 32
    smoothing: Annotated[float, Range(0, 100)] = 1.0
    temperature: Positive = 1.0
    width: Count = 96
    layers: Count = 2
    heads: Count = 4
    vision: Annotated[str, Choice(*VISION_ENCODERS)] = "film_cnn"
    vision_frozen: bool = False
    vision_width: Count = 32
    text_layers: CountOrZero = 1
    critic: Annotated[str, Choice(*CRITICS)] = "shared"
    critic_width: Count = 256

    def __post_init__(self) -> None:
        check_decoding(self)
        if self.vision == "film_cnn":
            refuse_unread(
                self, "policy", ("vision_frozen",), "vision=film_cnn has no pretrained layers"
            )
        if self.width % self.heads:
            raise UserError(
                f"policy.width {self.width} is not a multiple of policy.heads {self.heads}."
            )


class SmallTokenVLA(ObservationTokens, TokenPolicy):
    """See the module's docstring. Its weights are random from torch's global generator."""

    Config = SmallTokenVLAConfig

    def __init__(self, config: SmallTokenVLAConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        c = config
        d = config.width
        length = c.horizon * spec.action_dim
        self.autoregressive = c.decoding == "autoregressive"
        self.transition = make_steps(c, length)
        # Actions to bins; then the encoders of what is observed.
        self.normalize_action = ActionBins(spec.action_dim, c.bins)
        self.add_encoders(c, spec)
        # A learned query for each place, and an embedding of the token that it sees.
        self.query = nn.Parameter(torch.randn(length, d) * 0.02)
        self.word = token_embedding(c, d)
        self.decoder = TokenDecoder(d, c.layers, c.heads)
        # The output starts as a uniform distribution over the bins.
        self.head = nn.Linear(d, c.bins)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.add_heads(d)
        self.eval()

    def encode(self, obs: Obs) -> Prompt:
        """One pass of the encoders over pictures, instruction and proprioception."""
        tokens, mask, pooled = self.observe(obs)
        return Prompt(self.decoder.prompt(tokens, pooled), mask, pooled)

    def _continue_prompt(
        self, mask: Tensor, cache: Any, inputs: Float[Tensor, "n l d"]
    ) -> Float[Tensor, "n l bins"]:
        """See ``TokenPolicy``."""
        causal = self.config.decoding != "masked"
        return self.head(self.decoder(cache, mask, inputs, causal)).float()

    def _inputs(self, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n l d"]:
        """See ``TokenPolicy``."""
        masked = self.config.decoding == "masked"
        return inputs_at_places(self.query, self.word, tokens, masked)

    def _token_loss(
        self, logits: Float[Tensor, "n l bins"], tokens: Int[Tensor, "n l"]
    ) -> Float[Tensor, "n l"]:
        """Cross-entropy of each token, or of a Gaussian around it (HL-Gauss, arXiv:2403.03950)."""
        if not self.config.smoothing:
            return super()._token_loss(logits, tokens)
        # A Gaussian over the bins, whose weights sum to one also at the edge of the range.
        bins = torch.arange(self.config.bins, device=tokens.device)
        distance = (bins - tokens[..., None]) / self.config.smoothing
        target = (-0.5 * distance**2).softmax(-1)
        return -(target * logits.log_softmax(-1)).sum(-1)

    def imitation_loss_of(
        self, context: Prompt, actions: Float[Tensor, "b h a"], mask: Tensor, *noise: Tensor
    ) -> Tensor:
        """See ``ImitatesFromContext``."""
        return self._bins_loss(context, actions, mask, *noise)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations: proprio (B, P) and actions (B, A)."""
        self.normalize_proprio.fit(proprio)
        self.normalize_action.fit(actions)
