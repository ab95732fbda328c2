"""A vision-language model that predicts actions as tokens.

Each dim of each action is one of ``bins`` tokens, so a chunk is L = H * A tokens. They are said one
after the other, all at once, or as a draft that is edited (``vla.decoding``). The likelihood is
exact, so PPO and GRPO need no added noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.policies.actor_critic import CRITICS
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.vla import lerobot_io
from embodyrl.policies.vla.action_bins import ActionBins
from embodyrl.policies.vla.backbones import make_backbone
from embodyrl.policies.vla.decoding import (
    DECODING,
    DecodingConfig,
    check_decoding,
    inputs_at_places,
    make_steps,
    token_embedding,
)
from embodyrl.policies.vla.nets import all_see_all
from embodyrl.policies.vla.token_base import Prompt, TokenPolicy
from embodyrl.ranges import Choice, Count, CountOrZero, Positive, Range
from embodyrl.storage.paths import path_setting
from embodyrl.storage.pretrained import explain_hub_errors
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class TokenVLAConfig(DecodingConfig):
    """What to load, and how actions become tokens.

    Attributes:
        name: registry name.
        vlm: folder or hub id of a SmolVLM or a Qwen3-VL, with its tokenizer.
        image_size: side in pixels to which images are resized. 0 means the fixed size of a SmolVLM,
            or 224; a Qwen3-VL takes any multiple of 32.
        random_weights: use only its config, and train from random weights.
        horizon: C, actions that are planned.
        execute: H, how many of them are executed before the next observation; 0 for all.
        decoding: ``parallel``, ``autoregressive`` or ``masked``.
        bins: tokens per dim of an action.
        temperature: of sampling when training; evaluation takes the most likely token.
        train_vision: whether the image encoder is trained too.
        critic: what the value head sees: ``shared`` (the prompt's mean token), what
            hindsight has ``found`` in pictures, or ``privileged`` simulator state.
        critic_width: of the value head's two hidden layers.
    """

    name: str = "token_vla"
    vlm: str = path_setting()
    image_size: CountOrZero = 0
    random_weights: bool = False
    horizon: Count = 5
    execute: CountOrZero = 0
    decoding: Annotated[str, Choice(*DECODING)] = "parallel"
    bins: Annotated[int, Range(2, 65536)] = 256
    temperature: Positive = 1.0
    train_vision: bool = False
    critic: Annotated[str, Choice(*CRITICS)] = "shared"
    critic_width: Count = 256

    def __post_init__(self) -> None:
        check_decoding(self)


class TokenVLA(TokenPolicy):
    """See the module's docstring.

    Its weights are those of the checkpoint, or random from torch's global generator.
    """

    Config = TokenVLAConfig

    def __init__(self, config: TokenVLAConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.autoregressive = config.decoding == "autoregressive"
        if not config.vlm or not spec.cameras:
            raise UserError(
                "policy.name=token_vla needs policy.vlm, a SmolVLM or a Qwen3-VL (a folder, or an "
                "id of the Hugging Face hub such as HuggingFaceTB/SmolVLM2-500M-Video-Instruct), and "
                "an env with a camera."
            )
        lerobot_io.require_lerobot()
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        # The pretrained vision-language model.
        with explain_hub_errors(config.vlm):
            vlm = AutoConfig.from_pretrained(config.vlm)
            cameras = len(spec.cameras)
            self.backbone = make_backbone(vlm, config.image_size, cameras, config.vlm)
            self.tokenizer = AutoTokenizer.from_pretrained(config.vlm)
            self.vlm: Any
            if config.random_weights:
                self.vlm = AutoModel.from_config(vlm)
            else:
                self.vlm = AutoModel.from_pretrained(config.vlm, dtype=torch.float32)
        width = self.backbone.width
        length = config.horizon * spec.action_dim
        self.transition = make_steps(config, length)
        # Inputs: proprioception is one token of the prompt.
        self.normalize_action = ActionBins(spec.action_dim, config.bins)
        self.normalize_proprio = Normalizer(spec.proprio_dim)
        self.proprio = nn.Linear(spec.proprio_dim, width)
        # The L action tokens: a learned query for each place in the chunk, and an embedding of the
        # token that it sees.
        self.query = nn.Parameter(torch.randn(length, width) * 0.02)
        self.word = token_embedding(config, width)
        # The output starts as a uniform distribution over the bins.
        self.head = nn.Linear(width, config.bins)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.backbone.vision(self.vlm).requires_grad_(config.train_vision)
        self.add_heads(width)
        self.eval()

    def encode(self, obs: Obs) -> Prompt:
        """One pass of the language model over images, instruction and proprioception."""
        device = self.query.device
        text = self.tokenizer(
            list(obs.instruction), padding=True, padding_side="right", return_tensors="pt"
        ).to(device)
        state = self.proprio(self.normalize_proprio(obs.proprio))
        images = [obs.images[name] for name in self.spec.cameras]
        return self.backbone.read(self.vlm, images, text, state)

    def _continue_prompt(
        self, mask: Tensor, cache: Any, inputs: Tensor
    ) -> Float[Tensor, "n l bins"]:
        """Logits of the tokens at further inputs (N, L, W) after a prompt.

        Their keys and values are appended to ``cache``. ``mask`` is that of the prompt.
        """
        real = torch.cat([mask, mask.new_ones(inputs.shape[:2])], dim=1)
        sees = real
        if self.config.decoding == "masked":
            sees = all_see_all(real, inputs.shape[1], inputs.dtype)
        return self.head(self.backbone.go_on(self.vlm, inputs, real, sees, cache)).float()

    def _inputs(self, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n l w"]:
        """See ``TokenPolicy``."""
        masked = self.config.decoding == "masked"
        return inputs_at_places(self.query, self.word, tokens, masked)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations: proprio (B, P) and actions (B, A)."""
        self.normalize_proprio.fit(proprio)
        self.normalize_action.fit(actions)
