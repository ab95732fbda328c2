r"""OpenVLA (arXiv:2406.09246): published checkpoints as policies that predict actions as tokens.

    camera --ImageTransform, PrismaticNet.image_tokens--> 256 tokens --+
    "In: What action should the robot take to ...?\nOut:" -------+--Llama--> A tokens --> action (A,)

Every inference predicts one action. Bin b of a dim is the token of id ``vocabulary - 1 - b``, where
the vocabulary is Llama's without padding. Probabilities are those among the bins' tokens: the
checkpoint's other tokens are never drawn. The rest is ``TokenPolicy``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.policies.actor_critic import CRITICS
from embodyrl.policies.chooser import ChooserConfig, check_chooser
from embodyrl.policies.vla import lerobot_io, openvla_io
from embodyrl.policies.vla.action_tokens import ActionTokens
from embodyrl.policies.vla.frozen_weights import SharesFrozenWeights
from embodyrl.policies.vla.lora import PROJECTIONS, inject_adapters, without_adapters
from embodyrl.policies.vla.openvla_prompt import REMEDY, PromptTokenizer
from embodyrl.policies.vla.openvla_write import write_openvla
from embodyrl.policies.vla.prismatic import PrismaticNet
from embodyrl.policies.vla.token_base import Prompt, TokenPolicy, TokenTransition
from embodyrl.ranges import Choice, Count, CountOrZero, Positive, Range
from embodyrl.storage.env_spec import check_export
from embodyrl.storage.paths import path_setting
from embodyrl.storage.pretrained import find_checkpoint
from embodyrl.types import EnvSpec, Obs

TRAINED = ("language", "all")


@dataclass(frozen=True)
class PrismaticConfig:
    """What to load and which parts to train; of OpenVLA and OpenVLA-OFT.

    Attributes:
        pretrained: a published checkpoint, a folder or an id of the Hugging Face hub.
        revision: of a hub id.
        random_weights: use only the JSON files of ``pretrained``, and train from random weights.
        unnorm_key: the data set whose statistics scale actions and proprioception; empty if the
            checkpoint has one only.
        cameras: of the env, in the order in which the model sees them; empty for all of them.
        crop_area: share of a picture's area that is kept, around its middle. 0.9 for a checkpoint
            that was trained with random crops.
        train: ``language`` trains the language model and the projector, ``all`` the image encoders
            as well.
        lora_rank: train low-rank adapters of this rank instead of the language model's weights and
            the projector; 0 trains the weights.
        precision: ``float32``, or ``bfloat16``: everything is computed and frozen weights are
            stored in bfloat16. Trained weights stay float32.
    """

    pretrained: str = path_setting()
    revision: str = ""
    random_weights: bool = False
    unnorm_key: str = ""
    cameras: tuple[str, ...] = ()
    crop_area: Annotated[float, Range(0.1, 1)] = 1.0
    train: Annotated[str, Choice(*TRAINED)] = "language"
    lora_rank: CountOrZero = 0
    precision: Annotated[str, Choice("float32", "bfloat16")] = "float32"


def check_prismatic(config: PrismaticConfig) -> None:
    """Refuses adapters where weights are to be trained.

    Raises:
        UserError: ``lora_rank`` and ``train=all``.
    """
    if config.lora_rank and config.train == "all":
        raise UserError(
            "policy.lora_rank puts no adapters on the image encoders. Use policy.train=language."
        )


@dataclass(frozen=True)
class OpenVLAConfig(PrismaticConfig, ChooserConfig):
    """Settings of OpenVLA.

    Attributes:
        name: registry name.
        temperature: of sampling when training; evaluation takes the most likely token.
        critic: what the value head sees: ``shared`` (the prompt's mean token), what
            hindsight has ``found`` in pictures, or ``privileged`` simulator state.
        critic_width: of the value head's two hidden layers.
    """

    horizon: ClassVar[int] = 1
    """H: an inference predicts one action."""
    name: str = "openvla"
    temperature: Positive = 1.0
    critic: Annotated[str, Choice(*CRITICS)] = "shared"
    critic_width: Count = 256

    def __post_init__(self) -> None:
        check_prismatic(self)
        check_chooser(self)


class PrismaticParts(SharesFrozenWeights):
    """What OpenVLA and OpenVLA-OFT share: a mixin that loads the parts of a checkpoint."""

    config: Any
    spec: EnvSpec
    net: PrismaticNet

    def load_parts(self, config: Any, spec: EnvSpec) -> dict[str, Any]:
        """Builds ``net``, ``pictures``, ``tokenizer`` and ``cameras``, and sets ``config``.

        Returns:
            config.json, and under ``"statistics"`` those of the data set.
        """
        if not config.pretrained:
            raise UserError(
                f"policy.name={config.name} needs policy.pretrained: an OpenVLA checkpoint (a "
                "folder, or an id of the Hugging Face hub such as openvla/openvla-7b)."
            )
        self.cameras = config.cameras or tuple(spec.cameras)
        for camera in self.cameras:
            if camera not in spec.cameras:
                raise UserError(
                    f"policy.cameras names {camera!r}; {spec.name} has "
                    f"{', '.join(spec.cameras) or 'no camera: turn its cameras on'}."
                )
        lerobot_io.require_lerobot()
        # On the meta device tensors have no data. The estimate of memory builds a policy there.
        no_data = torch.get_default_device().type == "meta"
        weights = not (config.random_weights or no_data)
        folder = find_checkpoint(config.pretrained, config.revision, weights=not no_data)
        said = openvla_io.read_openvla_config(folder)
        key, statistics = openvla_io.read_norm_stats(said, folder, config.unnorm_key)
        if (dims := len(statistics["action"]["q01"])) != spec.action_dim:
            raise UserError(
                f"{key} in {folder} has actions of {dims} dims, and {spec.name} has "
                f"{spec.action_dim}. Choose another policy.unnorm_key, or another control mode."
            )
        check_export(folder, spec)
        openvla_io.check_family(key, spec)
        self.folder = folder
        self.pictures = openvla_io.read_pictures(said, folder, config.crop_area)
        self.tokenizer = PromptTokenizer(folder)
        self.pad = said.get("pad_token_id", 32000)
        self.net = openvla_io.build_openvla_net(said, folder, weights)
        self.config = dataclasses.replace(config, unnorm_key=key)
        self._choose_trained()
        return {**said, "statistics": statistics}

    def _choose_trained(self) -> None:
        """Freezes, adds adapters, and stores weights in the configured precision."""
        c = self.config
        self.net.freeze(c.train)
        if c.lora_rank:
            inject_adapters(self.net, c.lora_rank, rf"language_model\..*\.({PROJECTIONS})")
        # In bfloat16 a small step of the optimiser would be rounded away. Buffers, such as the
        # frequencies of the rotary embedding, stay float32 too.
        frozen = torch.bfloat16 if c.precision == "bfloat16" else torch.float32
        for p in self.net.parameters():
            p.data = p.data.to(torch.float32 if p.requires_grad else frozen)
        self.note_frozen(self.net)

    def _autocast(self) -> torch.autocast:
        """The context manager under which the network computes in ``config.precision``."""
        device = next(self.net.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def image_tokens(self, obs: Obs) -> Float[Tensor, "n p w"]:
        """The tokens of all views."""
        pixels = torch.cat([self.pictures(obs.images[name]) for name in self.cameras], dim=1)
        return self.net.image_tokens(pixels)

    def prompt_ids(self, obs: Obs) -> tuple[Int[Tensor, "n l"], Int[Tensor, "n l"]]:
        """The prompts' token ids without the final space, and their mask."""
        ids, mask = self.tokenizer(list(obs.instruction), self.pad)
        return ids.to(obs.proprio.device), mask.to(obs.proprio.device)


class OpenVLA(PrismaticParts, TokenPolicy):
    """See the module's docstring."""

    Config = OpenVLAConfig

    def __init__(self, config: OpenVLAConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.spec = spec
        self.transition = TokenTransition()
        self.autoregressive = True
        said = self.load_parts(config, spec)
        if len(self.cameras) != 1:
            raise UserError(
                f"OpenVLA sees one camera, and {spec.name} has {', '.join(spec.cameras) or 'none'}. "
                "Name the one of the data set's main picture, for example "
                f"policy.cameras=[{next(iter(spec.cameras), 'agentview')}]."
            )
        self.bins = said.get("n_action_bins", 256)
        # Llama's vocabulary without the rows that pad it to a multiple of 64.
        text = self.net.language_model.config
        self.vocabulary = text.vocab_size - said.get("pad_to_multiple_of", 64)
        if not 2 <= self.bins <= self.vocabulary:
            raise UserError(
                f"config.json in {self.folder} has {self.bins} bins and a vocabulary of "
                f"{self.vocabulary}. {REMEDY}"
            )
        self.normalize_action = ActionTokens(said["statistics"]["action"], self.bins)
        self.add_heads(text.hidden_size)
        self.eval()

    def encode(self, obs: Obs) -> Prompt:
        """One pass of the language model over the image and the instruction.

        The space that ends the prompt is not part of it: it is the input of the first token.
        """
        ids, text_mask = self.prompt_ids(obs)
        with self._autocast():
            images = self.image_tokens(obs)
            words = self.net.embed(ids)
            # The image stands behind the first token, which starts every text.
            inputs = torch.cat([words[:, :1], images, words[:, 1:]], dim=1)
            seen = text_mask.new_ones(images.shape[:2])
            mask = torch.cat([text_mask[:, :1], seen, text_mask[:, 1:]], dim=1)
            out = self.net.language_model.model(
                inputs_embeds=inputs,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp_min(0),
                use_cache=True,
            )
        weight = mask[..., None]
        mean = (out.last_hidden_state.float() * weight).sum(1) / weight.sum(1)
        return Prompt(out.past_key_values, mask, mean)

    def _inputs(self, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n l w"]:
        """The embedding of the token before; that of the space before the first."""
        ids = self.vocabulary - 1 - tokens[:, :-1]
        space = ids.new_full((len(ids), 1), self.tokenizer.space)
        return self.net.embed(torch.cat([space, ids], dim=1))

    def _continue_prompt(
        self, mask: Tensor, cache: Any, inputs: Tensor
    ) -> Float[Tensor, "n l bins"]:
        mask = torch.cat([mask, mask.new_ones(inputs.shape[:2])], dim=1)
        with self._autocast():
            out = self.net.language_model(
                inputs_embeds=inputs,
                attention_mask=mask,
                position_ids=mask.cumsum(1)[:, -inputs.shape[1] :] - 1,
                past_key_values=cache,
                use_cache=True,
            )
        # The tokens of the bins, whose ids run backwards.
        first = self.vocabulary - self.bins
        return out.logits[..., first : self.vocabulary].flip(-1).float()

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the quantiles of actions from demonstrations, as OpenVLA's fine-tuning does."""
        self.normalize_action.fit(actions)

    def save_published(self, folder: str | Path) -> Path:
        """Writes a checkpoint as OpenVLA's are published, with merged adapters, in bfloat16."""
        scale = self.normalize_action.scale
        quantiles = {"q01": scale.low, "q99": scale.high, "mask": scale.mask}
        action = {name: value.tolist() for name, value in quantiles.items()}
        statistics = {self.config.unnorm_key: {"action": action}}
        return write_openvla(without_adapters(self.net), self.folder, statistics, folder)
