"""A small vision-language-action policy that says its actions in tokens.

It is trained from nothing in minutes on one CPU core. It draws, scores and imitates by the code of
the large token policies (``vla.token_base``); only the network is small:

    observation --ObservationTokens--> context: C tokens (N, C, d), and their summary (N, d)
    context     --TokenDecoder.prompt--> keys and values
    tokens      --TokenDecoder--> logits (N, L, bins) of the tokens of a chunk

A chunk of ``horizon`` actions with A dims is ``horizon`` * A tokens:

    decoding          a token sees                        passes         as in
    parallel          the observation                     1              OpenVLA-OFT
    autoregressive    it, and all tokens before           L              RT-2, OpenVLA
    masked            it, and all revealed tokens         draft_steps    MaskGIT, ReflectDrive-2
                                                          + edit_steps
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.masked_diffusion import MASKED, MaskedSteps
from embodyrl.policies.actor_critic import CRITICS
from embodyrl.policies.chooser import ChooserConfig, check_chooser
from embodyrl.policies.flow_base import check_executed
from embodyrl.policies.observation_tokens import VISION_ENCODERS, ObservationTokens
from embodyrl.policies.token_decoder import TokenDecoder
from embodyrl.policies.vla.action_bins import ActionBins
from embodyrl.policies.vla.token_base import Prompt, TokenPolicy, TokenTransition
from embodyrl.ranges import Choice, Count, CountOrZero, Positive, Range
from embodyrl.types import EnvSpec, Obs

DECODING = ("parallel", "autoregressive", "masked")


@dataclass(frozen=True)
class SmallTokenVLAConfig(ChooserConfig):
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
        draft_steps: of ``masked``: steps in which all tokens are revealed.
        edit_steps: steps after them that draw the least confident tokens again; 0 for none.
        edit_tokens: how many tokens each of these draws again.
        order_temperature: how random the choice of those places is when training; evaluation
            takes the most (or least) confident ones.
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
    decoding: Annotated[str, Choice(*DECODING)] = "autoregressive"
    bins: Annotated[int, Range(2, 65536)] = 64
    smoothing: Annotated[float, Range(0, 100)] = 1.0
    temperature: Positive = 1.0
    draft_steps: Count = 4
    edit_steps: CountOrZero = 0
    edit_tokens: Count = 4
    order_temperature: Positive = 0.5
    width: Count = 128
    layers: Count = 3
    heads: Count = 4
    vision: Annotated[str, Choice(*VISION_ENCODERS)] = "film_cnn"
    vision_frozen: bool = False
    vision_width: Count = 32
    text_layers: CountOrZero = 1
    critic: Annotated[str, Choice(*CRITICS)] = "shared"
    critic_width: Count = 256

    def __post_init__(self) -> None:
        check_chooser(self)
        check_executed(self)
        if self.decoding != "masked":
            names = ("draft_steps", "edit_steps", "edit_tokens", "order_temperature")
            why = f"decoding={self.decoding} reveals no masked tokens"
            refuse_unread(self, "policy", names, why)
        elif not self.edit_steps:
            refuse_unread(self, "policy", ("edit_tokens",), "edit_steps=0 edits nothing")
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
        self.transition = TokenTransition()
        if c.decoding == "masked":
            self.transition = MaskedSteps(
                length, c.draft_steps, c.edit_steps, c.edit_tokens, c.order_temperature
            )
        self.normalize_action = ActionBins(spec.action_dim, c.bins)
        self.add_encoders(c, spec)
        # A learned query for each place, and an embedding of the token that it sees: the one
        # before it, or its own, where the last number stands for a masked one.
        self.query = nn.Parameter(torch.randn(length, d) * 0.02)
        self.word: nn.Embedding | None = None
        if c.decoding != "parallel":
            self.word = nn.Embedding(c.bins + 1, d)
            nn.init.normal_(self.word.weight, std=0.02)
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
        inputs = self.query[: tokens.shape[1]].expand(len(tokens), -1, -1)
        if self.word is None:
            return inputs
        if self.autoregressive:
            # Shifted by one place; the first token has none before it.
            return inputs + F.pad(self.word(tokens)[:, :-1], (0, 0, 1, 0))
        return inputs + self.word(tokens.masked_fill(tokens == MASKED, self.config.bins))

    def _token_loss(
        self, logits: Float[Tensor, "n l bins"], tokens: Int[Tensor, "n l"]
    ) -> Float[Tensor, "n l"]:
        """Cross-entropy of each token, or of a Gaussian around it (HL-Gauss, arXiv:2403.03950)."""
        if not self.config.smoothing:
            return super()._token_loss(logits, tokens)
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
