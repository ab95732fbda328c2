"""A vision-language model that predicts actions as tokens, one after the other or all at once.

Each dim of each action is one of ``bins`` tokens, so a chunk is L = H * A tokens.

    decoding          a token sees                        passes   as in
    autoregressive    the prompt and all tokens before    L        RT-2, OpenVLA
    parallel          the prompt and learned queries      1        OpenVLA-OFT

(RT-2 is arXiv:2307.15818, OpenVLA 2406.09246, OpenVLA-OFT 2502.19645.) The likelihood is exact, so
PPO and GRPO need no added noise. The trace of a rollout has a single step, from zeros to the chunk
in units of bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.policies.actor_critic import CRITICS
from embodyrl.policies.chooser import ChooserConfig, check_chooser
from embodyrl.policies.flow_checks import check_executed
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.vla import lerobot_io
from embodyrl.policies.vla.token_base import Prompt, TokenPolicy, TokenTransition
from embodyrl.ranges import Choice, Count, CountOrZero, Positive, Range
from embodyrl.storage.paths import path_setting
from embodyrl.storage.pretrained import explain_hub_errors
from embodyrl.types import EnvSpec, Obs

DECODING = ("parallel", "autoregressive")


@dataclass(frozen=True)
class TokenVLAConfig(ChooserConfig):
    """What to load, and how actions become tokens.

    Attributes:
        name: registry name.
        vlm: folder or hub id of a SmolVLM, with its tokenizer.
        random_weights: use only its config, and train from random weights.
        horizon: C, actions that are planned.
        execute: H, how many of them are executed before the next observation; 0 for all.
        decoding: ``parallel`` or ``autoregressive``.
        bins: tokens per dim of an action.
        temperature: of sampling when training; evaluation takes the most likely token.
        train_vision: whether the image encoder is trained too.
        critic: what the value head sees: ``shared`` (the prompt's mean token), what
            hindsight has ``found`` in pictures, or ``privileged`` simulator state.
        critic_width: of the value head's two hidden layers.
    """

    name: str = "token_vla"
    vlm: str = path_setting()
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
        check_chooser(self)
        check_executed(self)


class ActionBins(nn.Module):
    """Maps actions (..., A) to bin numbers, and back.

    The bins divide the range between the 1% and the 99% quantile of the data; before ``fit``, the
    range [-1, 1].

    Args:
        dims: A.
        count: bins per dim.
    """

    low: Tensor
    high: Tensor

    def __init__(self, dims: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("low", -torch.ones(dims))
        self.register_buffer("high", torch.ones(dims))

    @torch.no_grad()
    def fit(self, actions: Tensor) -> None:
        """Sets the range from actions (B, A); it is at least .1 wide in every dim."""
        quantiles = torch.tensor([0.01, 0.99], dtype=torch.float64)
        low, high = torch.quantile(actions.double(), quantiles, dim=0).float()
        middle = (low + high) / 2
        half_width = ((high - low) / 2).clamp_min(0.05)
        self.low.copy_(middle - half_width)
        self.high.copy_(middle + half_width)

    def forward(self, actions: Tensor) -> Tensor:
        """The number of the bin whose middle is nearest, as a float."""
        fraction = (actions - self.low) / (self.high - self.low)
        return (fraction * self.count - 0.5).round().clamp(0, self.count - 1)

    def inverse(self, number: Tensor) -> Tensor:
        """The middle of the bin."""
        return self.low + (number + 0.5) / self.count * (self.high - self.low)


class TokenVLA(TokenPolicy):
    """See the module's docstring.

    Its weights are those of the checkpoint, or random from torch's global generator.
    """

    Config = TokenVLAConfig

    def __init__(self, config: TokenVLAConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.transition = TokenTransition()
        self.autoregressive = config.decoding == "autoregressive"
        if not config.vlm or not spec.cameras:
            raise UserError(
                "policy.name=token_vla needs policy.vlm, a SmolVLM (a folder, or an id of the "
                "Hugging Face hub such as HuggingFaceTB/SmolVLM2-500M-Video-Instruct), and an env "
                "with a camera."
            )
        lerobot_io.require_lerobot()
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        # The pretrained vision-language model.
        with explain_hub_errors(config.vlm):
            vlm = AutoConfig.from_pretrained(config.vlm)
            if vlm.model_type != "smolvlm":
                raise UserError(
                    f"{config.vlm} is a {vlm.model_type}, and token_vla supports SmolVLM only. "
                    "Give a SmolVLM."
                )
            self.tokenizer = AutoTokenizer.from_pretrained(config.vlm)
            self.vlm: Any
            if config.random_weights:
                self.vlm = AutoModel.from_config(vlm)
            else:
                self.vlm = AutoModel.from_pretrained(config.vlm)
        width = vlm.text_config.hidden_size
        length = config.horizon * spec.action_dim
        self.image_size = int(vlm.vision_config.image_size)
        # Inputs: proprioception is one token of the prompt.
        self.normalize_action = ActionBins(spec.action_dim, config.bins)
        self.normalize_proprio = Normalizer(spec.proprio_dim)
        self.proprio = nn.Linear(spec.proprio_dim, width)
        # The L action tokens: a learned query for each place in the chunk and, if autoregressive,
        # an embedding of the token before. It starts as small as the queries, so that it does not
        # hide the observation.
        self.query = nn.Parameter(torch.randn(length, width) * 0.02)
        self.word = None
        if self.autoregressive:
            self.word = nn.Embedding(config.bins, width)
            nn.init.normal_(self.word.weight, std=0.02)
        # The output starts as a uniform distribution over the bins.
        self.head = nn.Linear(width, config.bins)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.vlm.vision_model.requires_grad_(config.train_vision)
        self.add_heads(width)
        self.eval()

    def encode(self, obs: Obs) -> Prompt:
        """One pass of the language model over images, instruction and proprioception."""
        device = self.query.device
        text = self.tokenizer(
            list(obs.instruction), padding=True, padding_side="right", return_tensors="pt"
        ).to(device)
        # The prompt: tokens of all images, of the instruction, and one of proprioception. Only the
        # instruction has padding.
        tokens = [self._image_tokens(obs.images[name]) for name in self.spec.cameras]
        masks = [text["attention_mask"].new_ones(part.shape[:2]) for part in tokens]
        state = self.proprio(self.normalize_proprio(obs.proprio))
        tokens += [self.vlm.get_input_embeddings()(text["input_ids"]), state[:, None]]
        masks += [text["attention_mask"], masks[0].new_ones(len(obs), 1)]
        mask = torch.cat(masks, dim=1)
        # Positions count the real tokens.
        out = self.vlm.text_model(
            inputs_embeds=torch.cat(tokens, dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            use_cache=True,
        )
        mean = (out.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return Prompt(out.past_key_values, mask, mean)

    def _image_tokens(self, image: Tensor) -> Tensor:
        """(N, h, w, 3) uint8 to tokens (N, P, W)."""
        x = F.interpolate(
            image.permute(0, 3, 1, 2).float() / 127.5 - 1.0,
            size=(self.image_size,) * 2,
            mode="bilinear",
        )
        encoded = self.vlm.vision_model(pixel_values=x, patch_attention_mask=None)
        return self.vlm.connector(encoded.last_hidden_state)

    def _continue_prompt(
        self, mask: Tensor, cache: Any, inputs: Tensor
    ) -> Float[Tensor, "n l bins"]:
        """Logits of the tokens at further inputs (N, L, W) after a prompt.

        Their keys and values are appended to ``cache``. ``mask`` is that of the prompt.
        """
        mask = torch.cat([mask, mask.new_ones(inputs.shape[:2])], dim=1)
        positions = mask.cumsum(1)[:, -inputs.shape[1] :] - 1
        out = self.vlm.text_model(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
        )
        return self.head(out.last_hidden_state).float()

    def _inputs(self, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n l w"]:
        """The model's input at the place of each token.

        It is a learned query; with ``autoregressive``, the embedding of the token before is added.
        """
        inputs = self.query[: tokens.shape[1]].expand(len(tokens), -1, -1)
        if self.word is None:
            return inputs
        # Shifted by one place; the first token has none before it.
        return inputs + F.pad(self.word(tokens)[:, :-1], (0, 0, 1, 0))

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations: proprio (B, P) and actions (B, A)."""
        self.normalize_proprio.fit(proprio)
        self.normalize_action.fit(actions)
