r"""pi0-FAST (arXiv:2501.09747): LeRobot's checkpoints as policies that predict actions as tokens.

    cameras, "Task: ..., State: 127 ...;\n" --Processors, embed_prefix_fast--> prompt --+
    start of text -------------------------------------------------------------+--Gemma--> tokens
    tokens "Action: " ... "|" --FastTokenizer.decode--> plan (C, A) --first H--> actions (H, A)

The network and the pre- and post-processing are LeRobot's, the sampler and its probabilities those
of ``TokenPolicy``. A chunk has as many tokens as it takes, up to the end token "|" or to
``max_decoding_steps``. Every token is drawn from the whole vocabulary, as LeRobot does, so
probabilities are exact. What cannot be decoded is a plan of zeros in normalised units.

LeRobot's two uses of the network differ in a detail, which both are kept:

    use          the start of text                         here
    sampling     is seen by images and words               ``encode``: sample, evaluate
    imitation    is seen by the action's tokens alone      ``imitation_loss``
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.build import described_by
from embodyrl.errors import UserError
from embodyrl.policies.actor_critic import CRITICS
from embodyrl.policies.chooser import ChooserConfig, check_chooser
from embodyrl.policies.flow_checks import check_executed
from embodyrl.policies.vla import lerobot_io, lerobot_parts
from embodyrl.policies.vla.fast_words import FastWords, load_fast_words
from embodyrl.policies.vla.frozen_weights import SharesFrozenWeights
from embodyrl.policies.vla.lora import PROJECTIONS, inject_adapters, without_adapters
from embodyrl.policies.vla.processors import ActionNormalizer
from embodyrl.policies.vla.token_base import NO_TOKEN, Prompt, TokenPolicy, TokenTransition
from embodyrl.ranges import Choice, Count, CountOrZero, Positive
from embodyrl.storage.paths import path_setting
from embodyrl.types import EnvSpec, Obs

TRAINED = ("language", "all")


@dataclass(frozen=True)
class Pi0FastConfig(ChooserConfig):
    """What to load, which parts to train, and how to sample.

    Attributes:
        name: registry name.
        pretrained: a LeRobot checkpoint, a folder or an id of the Hugging Face hub.
        revision: of a hub id.
        random_weights: use only the JSON files of ``pretrained``, and train from random weights.
        vlm: folder or hub id of PaliGemma's tokenizer, used in place of the one that the checkpoint
            names; for machines without a network.
        action_tokenizer: folder or hub id of the FAST tokenizer, likewise.
        cameras: the checkpoint's cameras in the order of the env's; empty if the names are the
            same.
        horizon: C, actions that the model plans; 0 for as many as in the checkpoint. Only random
            weights can have another number.
        execute: H, how many of them are executed before the next observation; 0 for as many as in
            the checkpoint (its ``n_action_steps``), or all if it plans fewer.
        temperature: of sampling when training; evaluation takes the most likely token.
        train: ``language`` trains the language model and the projector, ``all`` the image encoder
            as well.
        lora_rank: train low-rank adapters of this rank instead of the language model's weights and
            the projector; 0 trains the weights.
        precision: ``float32``, or ``bfloat16``: everything is computed and frozen weights are
            stored in bfloat16. Trained weights stay float32.
        critic: what the value head sees: ``shared`` (the prompt's mean token), what
            hindsight has ``found`` in pictures, or ``privileged`` simulator state.
        critic_width: of the value head's two hidden layers.
    """

    name: str = "pi0_fast"
    pretrained: str = path_setting()
    revision: str = ""
    random_weights: bool = False
    vlm: str = path_setting()
    action_tokenizer: str = path_setting()
    cameras: tuple[str, ...] = ()
    horizon: CountOrZero = 0
    execute: CountOrZero = 0
    temperature: Positive = 1.0
    train: Annotated[str, Choice(*TRAINED)] = "language"
    lora_rank: CountOrZero = 0
    precision: Annotated[str, Choice("float32", "bfloat16")] = "float32"
    critic: Annotated[str, Choice(*CRITICS)] = "shared"
    critic_width: Count = 256

    def __post_init__(self) -> None:
        check_chooser(self)
        check_executed(self)
        if self.lora_rank and self.train == "all":
            raise UserError(
                "policy.lora_rank puts no adapters on the image encoder. Use policy.train=language."
            )


class Pi0Fast(SharesFrozenWeights, TokenPolicy):
    """See the module's docstring.

    It is built on the CPU. Its weights are those of the checkpoint, or random from torch's global
    generator.
    """

    Config = Pi0FastConfig

    def __init__(self, config: Pi0FastConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.spec = spec
        self.transition = TokenTransition()
        self.autoregressive = True
        # LeRobot's config and network, without the tokenizers that its constructor would load.
        folder, weights = lerobot_parts.find_folder(config, spec, "lerobot/pi0fast-libero")
        theirs = lerobot_parts.configure(config, spec, folder, weights)
        theirs.dtype = "float32"
        keys = lerobot_io.camera_keys(theirs, spec, config.cameras, folder)
        self.words: FastWords = load_fast_words(config, theirs, spec.action_dim)
        self.net: Any = _build_net(theirs)
        if weights:
            lerobot_io.read_weights(self.net, folder)
        self.words.check_rows(self._lm.get_input_embeddings().num_embeddings)
        self.config = dataclasses.replace(
            config, horizon=theirs.chunk_size, execute=theirs.n_action_steps
        )
        check_executed(self.config)
        _check_whole_plan(self.config)
        self.end = self.words.end
        self._choose_trained()
        # Normalisation, from the checkpoint's own pipelines.
        self.processors = lerobot_parts.load_processors(
            config, theirs, spec, folder, keys, self.words.overrides
        )
        self.words.give_back(self.processors.pre)
        self.normalize_action = ActionNormalizer(self.processors)
        self.add_heads(self._lm.config.hidden_size)
        self.eval()

    @property
    def _paligemma(self) -> Any:
        return self.net.model.paligemma_with_expert

    @property
    def _lm(self) -> Any:
        """Gemma."""
        return self._paligemma.paligemma.model.language_model

    def _choose_trained(self) -> None:
        """Freezes, adds adapters, and stores weights in the configured precision."""
        c = self.config
        # What is trained, then how it is stored.
        if c.train != "all":
            self._paligemma.paligemma.model.vision_tower.requires_grad_(False)
        if c.lora_rank:
            inject_adapters(self.net, c.lora_rank, rf".*\.language_model\..*\.({PROJECTIONS})")
        self.net.config.dtype = c.precision  # in which LeRobot computes an export
        if c.precision == "bfloat16":
            self._paligemma.to_bfloat16_for_selected_params("bfloat16")
        lerobot_parts.keep_trained_in_float32(self.net)
        self.note_frozen(self.net)

    def _autocast(self) -> torch.autocast:
        """The context manager under which the network computes in ``config.precision``."""
        device = next(self.net.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    @property
    def num_places(self) -> int:
        """The most tokens of a chunk, as the checkpoint says."""
        return self.net.config.max_decoding_steps

    def encode(self, obs: Obs) -> Prompt:
        """One pass of the language model over pictures, text, and the start of text.

        The keys and values of the start are left out again: it is the input of the first token, and
        there it is computed anew, with the same result.
        """
        return self._encode(obs, start_is_seen=True)

    def _encode(self, obs: Obs, start_is_seen: bool) -> Prompt:
        """The prompt; see the module's docstring for ``start_is_seen``."""
        batch = self.processors(obs)
        tokens = batch["observation.language.tokens"]
        mask = batch["observation.language.attention_mask"]
        if start_is_seen:
            tokens = F.pad(tokens, (0, 1), value=self.words.start)
            mask = F.pad(mask, (0, 1), value=True)
        # One sequence of pictures, words and perhaps the start, all of which see each other.
        with self._autocast():
            images, image_masks = self.net._preprocess_images(batch)
            embedded, seen, allowed, _, _ = self.net.model.embed_prefix_fast(
                images, image_masks, tokens, mask
            )
            hidden, cache = self._run(embedded, seen.cumsum(1) - 1, allowed, None)
        # The mean of the real tokens is what the value head sees.
        weight = seen[..., None]
        mean = (hidden.float() * weight).sum(1) / weight.sum(1)
        if start_is_seen:
            cache.crop(seen.shape[1] - 1)
            seen = seen[:, :-1]
        return Prompt(cache, seen, mean)

    def _run(
        self, inputs: Tensor, positions: Tensor, allowed: Tensor, cache: Any
    ) -> tuple[Tensor, Any]:
        """Gemma's hidden states (N, L, W), and its keys and values.

        Args:
            inputs: (N, L, W).
            positions: (N, L).
            allowed: (N, L, S) which of S tokens each of them sees.
            cache: keys and values of those before; None for none.
        """
        from lerobot.policies.common.vla_utils import prepare_attention_masks_4d

        attention = prepare_attention_masks_4d(allowed.bool(), dtype=inputs.dtype)
        (hidden, _), cache = self._paligemma.forward(
            attention_mask=attention,
            position_ids=positions,
            past_key_values=cache,
            inputs_embeds=[inputs, None],
            use_cache=True,
        )
        return hidden, cache

    def _inputs(self, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n l w"]:
        """The embedding of the token before; that of the start of text before the first."""
        ids = F.pad(tokens[:, :-1], (1, 0), value=self.words.start)
        return self._paligemma.embed_language_tokens(ids)

    def _continue_prompt(
        self, mask: Tensor, cache: Any, inputs: Tensor
    ) -> Float[Tensor, "n l bins"]:
        n, length = inputs.shape[:2]
        before = mask.bool()
        # A token sees the prompt, and those of the chunk up to itself.
        causal = before.new_ones(length, length).tril()
        allowed = torch.cat(
            [before[:, None].expand(-1, length, -1), causal.expand(n, -1, -1)], dim=2
        )
        positions = before.sum(1, keepdim=True) + torch.arange(length, device=inputs.device)
        with self._autocast():
            hidden, _ = self._run(inputs, positions, allowed, cache)
            return self._paligemma.paligemma.lm_head(hidden).float()

    def actions_of(self, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n h a"]:
        """The first H actions of the plans that tokens stand for, in [-1, 1]."""
        if tokens.is_meta:  # the estimate of memory, which has no numbers
            return tokens.new_zeros(len(tokens), self.config.execute, self.spec.action_dim).float()
        plans = [self.words.decode(row) for row in tokens.cpu().numpy()]
        if any(plan is None for plan in plans):
            warnings.warn(
                "pi0_fast drew tokens that stand for no actions; such a chunk is a plan of zeros in "
                "normalised units. Imitate first, or lower policy.temperature.",
                stacklevel=2,
            )
        blank = np.zeros((self.config.horizon, self.spec.action_dim))
        plan = np.stack([blank if plan is None else plan for plan in plans])
        # The plan's beginning, in the env's units.
        executed = torch.from_numpy(plan[:, : self.config.execute]).float().to(tokens.device)
        return self.normalize_action.inverse(executed).clamp(-1.0, 1.0)

    def imitation_loss(
        self, obs: Obs, actions: Float[Tensor, "b h a"], mask: Tensor, *noise: Tensor
    ) -> Tensor:
        """LeRobot's loss: cross-entropy of demonstrated plans, in nats per token.

        The tokens describe a plan as a whole. Beyond the end of an episode it goes on with the last
        action, as in LeRobot.

        Args:
            obs: B observations.
            actions: (B, C, A).
            mask: (B, C) actions of the episode; a row without any does not count.
            noise: none is drawn.
        """
        if actions.shape[1] != self.config.horizon:
            raise UserError(
                f"pi0_fast imitates plans of {self.config.horizon} actions, and was given "
                f"{actions.shape[1]}: its tokens describe a plan as a whole."
            )
        # Places behind the end, and rows without any action, have no loss.
        tokens = self.words.encode(self.normalize_action(actions)).to(actions.device)
        counts = (tokens != NO_TOKEN) & mask.any(1, keepdim=True)
        tokens = tokens.clamp_min(0)
        # The temperature belongs to sampling: imitation fits the plain distribution.
        context = self._encode(obs, start_is_seen=False)
        logits = self.logits(context, tokens) * self.config.temperature
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
        return (loss.view(tokens.shape) * counts).sum() / counts.sum().clamp_min(1)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations, as LeRobot's fine-tuning does."""
        self.processors.fit(proprio, actions)

    def save_lerobot(self, folder: str | Path) -> Path:
        """Writes a checkpoint that LeRobot's own ``from_pretrained`` loads."""
        return lerobot_io.write_checkpoint(without_adapters(self.net), self.processors, folder)


def _check_whole_plan(c: Pi0FastConfig) -> None:
    """Refuses to imitate a part of a plan, which PA-RL would do.

    Raises:
        UserError: a chooser, and fewer actions are executed than planned.
    """
    if c.chooser_width and c.execute < c.horizon:
        raise UserError(
            f"policy.chooser_width needs policy.execute={c.horizon}: PA-RL imitates the executed "
            f"actions, and the tokens of pi0_fast describe the whole plan of {c.horizon}."
        )


def _build_net(theirs: Any) -> nn.Module:
    """LeRobot's ``PI0FastPolicy`` of a config, with random weights and without its tokenizers.

    Its constructor would run the code that a FAST tokenizer's folder holds.
    """
    from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy, PI0FastPytorch
    from lerobot.policies.pretrained import PreTrainedPolicy

    net = PI0FastPolicy.__new__(PI0FastPolicy)
    PreTrainedPolicy.__init__(net, theirs)
    theirs.validate_features()
    net.config = theirs
    with described_by("config.json of a pi0_fast"):
        net.model = PI0FastPytorch(theirs)
    # LeRobot trains the output layer apart from the embedding, although the config ties them.
    paligemma: Any = net.model.paligemma_with_expert.paligemma
    paligemma.config.tie_word_embeddings = False
    size = paligemma.config.vision_config.image_size
    if tuple(theirs.image_resolution) != (size, size):
        raise UserError(
            f"config.json of a pi0_fast has image_resolution {tuple(theirs.image_resolution)}, and "
            f"its image encoder sees {size} x {size} pixels. Set image_resolution to that."
        )
    return net
