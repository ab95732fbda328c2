"""A vision-language model that says its actions in tokens: autoregressively, or all at once.

Each dim of each action is one of ``bins`` words, as in RT-2 (arXiv:2307.15818) and OpenVLA
(arXiv:2406.09246); with ``decoding=parallel`` learned queries take the place of the words before,
and one pass decides the chunk, as in OpenVLA-OFT (arXiv:2502.19645). The likelihood is exact, so
PPO and GRPO need no noise: what a rollout keeps as its trace is one step from nothing to the chunk,
in units of bins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.errors import UserError, did_you_mean
from embodyrl.functional.flow import Generators, randn
from embodyrl.functional.losses import masked_mean
from embodyrl.policies.flow_base import ActorCritic
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.vla import lerobot_io
from embodyrl.policies.vla.nets import fork
from embodyrl.policy import Mode
from embodyrl.types import ActionSample, DenoisingTrace, EnvSpec, Obs, PolicyEval

DECODING = ("parallel", "autoregressive")


@dataclass(frozen=True)
class TokenVLAConfig:
    """What to load, and how actions are said.

    Attributes:
        name: registry name.
        vlm: folder or hub id of a SmolVLM, with its tokenizer.
        random_weights: take its config alone, and train from nothing.
        horizon: H.
        decoding: ``parallel`` or ``autoregressive``.
        bins: words per dim of an action.
        temperature: of sampling when training; evaluation takes the most likely word.
        train_vision: whether the image encoder is trained too.
        critic: what the value head sees: ``shared`` (the prompt's mean token) or ``privileged``.
        critic_width: of its two hidden layers.
    """

    name: str = "token_vla"
    vlm: str = ""
    random_weights: bool = False
    horizon: int = 5
    decoding: str = "parallel"
    bins: int = 256
    temperature: float = 1.0
    train_vision: bool = False
    critic: str = "shared"
    critic_width: int = 256

    def __post_init__(self) -> None:
        for key, valid in (("decoding", DECODING), ("critic", ("shared", "privileged"))):
            if (given := getattr(self, key)) not in valid:
                raise UserError(f"policy.{key} is {given!r}. {did_you_mean(given, valid)}")
        if self.bins < 2 or self.horizon < 1 or self.temperature <= 0:
            raise UserError(
                "policy.bins must be at least 2, policy.horizon at least 1, policy.temperature "
                "above 0."
            )


@dataclass
class Prompt:
    """Pictures, instruction and proprioception of N observations, as the language model has them.

    Attributes:
        cache: keys and values of every layer.
        mask: (N, P) the tokens that are there.
        pooled: (N, W) the mean token.
    """

    cache: Any
    mask: Int[Tensor, "n p"]
    pooled: Float[Tensor, "n w"]


@dataclass(frozen=True)
class Words:
    """What ``ClippedActor`` asks of a transition: one step, whose density is exact."""

    kind: str = "words"
    num_steps: int = 1
    num_noisy: int = 1
    eta: float = 0.0


class Bins(nn.Module):
    """Actions (..., A) as numbers of bins between the 1% and 99% quantiles of the data; [-1, 1] until it is fitted."""

    low: Tensor
    high: Tensor

    def __init__(self, dims: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.register_buffer("low", -torch.ones(dims))
        self.register_buffer("high", torch.ones(dims))

    @torch.no_grad()
    def fit(self, actions: Tensor) -> None:
        """Of actions (B, A); a dim that hardly varies keeps a width of .1."""
        low, high = torch.quantile(
            actions.double(), torch.tensor([0.01, 0.99], dtype=torch.float64), dim=0
        ).float()
        middle = (low + high) / 2
        half = ((high - low) / 2).clamp_min(0.05)
        self.low.copy_(middle - half)
        self.high.copy_(middle + half)

    def forward(self, actions: Tensor) -> Tensor:
        """The nearest bin's number, as a float."""
        share = (actions - self.low) / (self.high - self.low)
        return (share * self.count - 0.5).round().clamp(0, self.count - 1)

    def inverse(self, number: Tensor) -> Tensor:
        """The bin's middle."""
        return self.low + (number + 0.5) / self.count * (self.high - self.low)


class TokenVLA(ActorCritic):
    """See the module's docstring. Weights are the checkpoint's, or depend on torch's global seed."""

    Config = TokenVLAConfig

    def __init__(self, config: TokenVLAConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.transition = Words()
        if not config.vlm or not spec.cameras:
            raise UserError(
                "policy.name=token_vla needs policy.vlm, a SmolVLM (a folder, or an id of the "
                "Hugging Face hub such as HuggingFaceTB/SmolVLM2-500M-Video-Instruct), and an env "
                "with a camera."
            )
        lerobot_io.require()
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        with lerobot_io.explained(config.vlm):
            vlm = AutoConfig.from_pretrained(config.vlm)
            if vlm.model_type != "smolvlm":
                raise UserError(
                    f"{config.vlm} is a {vlm.model_type}, and token_vla knows SmolVLM alone. Give "
                    "such a one."
                )
            self.tokenizer = AutoTokenizer.from_pretrained(config.vlm)
            fresh = config.random_weights
            self.vlm: Any = (
                AutoModel.from_config(vlm) if fresh else AutoModel.from_pretrained(config.vlm)
            )
        width = vlm.text_config.hidden_size
        length = config.horizon * spec.action_dim
        self.image_size = int(vlm.vision_config.image_size)
        self.normalize_action = Bins(spec.action_dim, config.bins)
        self.normalize_proprio = Normalizer(spec.proprio_dim)
        self.proprio = nn.Linear(spec.proprio_dim, width)
        self.query = nn.Parameter(torch.randn(length, width) * 0.02)
        self.word = (
            nn.Embedding(config.bins, width) if config.decoding == "autoregressive" else None
        )
        if self.word is not None:  # as small as the queries, or words would drown what is seen
            nn.init.normal_(self.word.weight, std=0.02)
        self.head = nn.Linear(width, config.bins)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.vlm.vision_model.requires_grad_(config.train_vision)
        self.add_heads(width)
        self.eval()

    def train(self, mode: bool = True) -> TokenVLA:
        """Nothing changes: dropout would make a probability differ from when it was sampled."""
        return super().train(False)

    def actor_parameters(self) -> list[nn.Parameter]:
        """What is trained, without the critic."""
        return [p for p in super().actor_parameters() if p.requires_grad]

    def encode(self, obs: Obs) -> Prompt:
        """One pass of the language model over pictures, instruction and proprioception."""
        device = self.query.device
        said = self.tokenizer(
            list(obs.instruction), padding=True, padding_side="right", return_tensors="pt"
        ).to(device)
        parts = [self._picture(obs.images[name]) for name in self.spec.cameras]
        masks = [said["attention_mask"].new_ones(part.shape[:2]) for part in parts]
        state = self.proprio(self.normalize_proprio(obs.proprio))
        parts += [self.vlm.get_input_embeddings()(said["input_ids"]), state[:, None]]
        masks += [said["attention_mask"], masks[0].new_ones(len(obs), 1)]
        mask = torch.cat(masks, dim=1)
        out = self.vlm.text_model(
            inputs_embeds=torch.cat(parts, dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            use_cache=True,
        )
        mean = (out.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return Prompt(out.past_key_values, mask, mean)

    def _picture(self, image: Tensor) -> Tensor:
        """(N, h, w, 3) uint8 to tokens (N, P, W)."""
        x = F.interpolate(
            image.permute(0, 3, 1, 2).float() / 127.5 - 1.0,
            size=(self.image_size,) * 2,
            mode="bilinear",
        )
        return self.vlm.connector(
            self.vlm.vision_model(pixel_values=x, patch_attention_mask=None).last_hidden_state
        )

    def _go_on(self, mask: Tensor, cache: Any, inputs: Tensor) -> Float[Tensor, "n l bins"]:
        """Logits after further inputs (N, L, W) behind a prompt; ``cache`` grows."""
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

    def _inputs(self, words: Int[Tensor, "n l"]) -> Float[Tensor, "n l w"]:
        """What the model sees where it says each word: a query, and with ``autoregressive`` the word before."""
        inputs = self.query.expand(len(words), -1, -1)
        if self.word is None:
            return inputs
        return inputs + F.pad(self.word(words)[:, :-1], (0, 0, 1, 0))

    def logits(self, context: Prompt, words: Int[Tensor, "n l"]) -> Float[Tensor, "n l bins"]:
        """Of every word, given those before it (which ``parallel`` does not read)."""
        return (
            self._go_on(context.mask, fork(context.cache), self._inputs(words))
            / self.config.temperature
        )

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Policy.sample``."""
        context = self.encode(obs)
        n = len(obs)
        length = len(self.query)
        # One uniform number per word; as randn takes a generator per row, the uniform is the
        # normal's quantile.
        uniform = torch.special.ndtr(randn((n, length), generator, obs.proprio.device))
        words = torch.zeros(n, length, dtype=torch.long, device=uniform.device)
        if self.word is None:
            words = _choose(self.logits(context, words), uniform, mode)
        else:
            cache = fork(context.cache)
            mask = context.mask
            for i in range(length):
                logits = (
                    self._go_on(mask, cache, self._inputs(words)[:, i : i + 1])
                    / self.config.temperature
                )
                words[:, i : i + 1] = _choose(logits, uniform[:, i : i + 1], mode)
                mask = torch.cat([mask, mask.new_ones(n, 1)], dim=1)
        numbers = words.view(n, self.config.horizon, self.spec.action_dim).float()
        actions = self.normalize_action.inverse(numbers).clamp(-1.0, 1.0)
        if mode == "eval":
            return ActionSample(actions)
        trace = DenoisingTrace(
            torch.stack([torch.zeros_like(numbers), numbers], dim=1),
            torch.ones_like(words[:, :1], dtype=torch.bool),
        )
        scored = self._score(context, words)
        return ActionSample(actions, trace, scored[0], self.value(obs, context))

    def evaluate(self, obs: Obs, trace: DenoisingTrace) -> PolicyEval:
        """See ``Policy.evaluate``; all words in one pass."""
        context = self.encode(obs)
        logprob, entropy = self._score(context, trace.x[:, 1].flatten(1).long())
        return PolicyEval(logprob, entropy, self.value(obs, context))

    def _score(self, context: Prompt, words: Int[Tensor, "n l"]) -> tuple[Tensor, Tensor]:
        """(N, 1) log-probability of a chunk, and (N,) mean entropy of its words."""
        log = self.logits(context, words).log_softmax(-1)
        return log.gather(-1, words[..., None])[..., 0].sum(1, keepdim=True), -(
            log.exp() * log
        ).sum(-1).mean(1)

    def imitation_loss(self, obs: Obs, actions: Float[Tensor, "b h a"], mask: Tensor) -> Tensor:
        """Cross-entropy of demonstrated actions, those with ``mask`` (B, H), in nats per word."""
        words = self.normalize_action(actions).long()
        logits = self.logits(self.encode(obs), words.flatten(1)) * self.config.temperature
        loss = F.cross_entropy(logits.flatten(0, 1), words.flatten(), reduction="none").view(
            words.shape
        )
        return masked_mean(loss.mean(-1), mask)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Normalises by the statistics of demonstrations."""
        self.normalize_proprio.fit(proprio)
        self.normalize_action.fit(actions)


def _choose(logits: Tensor, uniform: Tensor, mode: Mode) -> Tensor:
    """Words (N, L): the most likely, or drawn by inverting the distribution function at ``uniform`` (N, L)."""
    if mode == "eval":
        return logits.argmax(-1)
    below = logits.softmax(-1).cumsum(-1) < uniform[..., None]
    return below.sum(-1).clamp_max(logits.shape[-1] - 1)
