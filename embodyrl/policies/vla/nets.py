"""The networks of SmolVLA, pi0 and pi0.5, as a prefix and denoising steps.

The networks are LeRobot's. Their convention of time and sign is the one of this project: t = 1 is
noise, x_t = (1-t) a + t e, v = e - a. All three have two parts:

    prefix      images, instruction and, in SmolVLA, proprioception: P tokens. The language model
                encodes them once per observation. Its keys and values are kept (``Prefix``).
    features    the action expert, in each denoising step: it attends to the keys and values of the
                prefix, and to the noisy chunk. The prefix does not see the actions.

Shapes: N observations, K denoising steps, chunks of C actions padded to D dims, W the width of the
action expert.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn


@dataclass
class Prefix:
    """What the denoising steps need of N observations.

    Attributes:
        cache: keys and values of every layer (transformers' ``DynamicCache``).
        mask: (N, P) True at real tokens, False at padding.
        state: (N, S) normalised proprioception, padded to the model's width; read by models whose
            expert sees it.
        pooled: (N, F) a summary for the critic: the mean token after a layer norm, and the
            normalised proprioception.
    """

    cache: Any
    mask: Bool[Tensor, "n p"]
    state: Float[Tensor, "n s"]
    pooled: Float[Tensor, "n f"]


class _LeRobotNet(nn.Module):
    """Base of the two networks below.

    Args:
        lerobot: LeRobot's policy, with its parameters and config.
    """

    def __init__(self, lerobot: Any) -> None:
        super().__init__()
        self.lerobot = lerobot

    @property
    def model(self) -> Any:
        """The network inside LeRobot's policy."""
        return self.lerobot.model

    @property
    def width(self) -> int:
        """W, of the action expert."""
        return self.model.action_out_proj.in_features

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """(C, D): actions in a chunk, and their padded width."""
        return self.lerobot.config.chunk_size, self.lerobot.config.max_action_dim

    def to_bfloat16(self) -> None:
        """Stores weights in bfloat16, except those that LeRobot keeps in float32."""
        raise NotImplementedError

    def velocity(self, features: Float[Tensor, "n k c w"]) -> Float[Tensor, "n k c d"]:
        """Noise - action, from the expert's last hidden states (see ``features``)."""
        return self.model.action_out_proj(features)

    def _suffix(
        self, x: Float[Tensor, "b c d"], t: Tensor, *state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
        """The action expert's input tokens: LeRobot's ``embed_suffix``.

        Args:
            x: (B, C, D) noisy chunks.
            t: (B,) their times; or (B, C), a time for each action (arXiv:2512.05964), which LeRobot
                does not offer.
            state: proprioception, for models whose expert sees it.

        Returns:
            Tokens, their mask, attention blocks, and what the adaptive norms are conditioned on.
        """
        embedded, mask, blocks, *condition = self.model.embed_suffix(
            *state, x, t if t.ndim == 1 else t[:, 0]
        )
        if t.ndim == 2:
            # The token of an action, and its condition, depend on this action and its time alone.
            # So every action is embedded again as a chunk of one, with its own time, and replaces
            # the last C tokens (those before them are the state's).
            size = t.shape
            repeated = (s.repeat_interleave(t.shape[1], dim=0) for s in state)
            single, _, _, *condition = self.model.embed_suffix(
                *repeated, x.flatten(0, 1)[:, None], t.flatten()
            )
            embedded = torch.cat([embedded[:, : -size[1]], single[:, -1].unflatten(0, size)], dim=1)
            condition = [None if each is None else each.unflatten(0, size) for each in condition]
        return embedded, mask, blocks, condition

    def _prefix(self, hidden: Tensor, cache: Any, mask: Tensor, state: Tensor, dims: int) -> Prefix:
        """A ``Prefix`` with its summary, from the language model's hidden states (N, P, width).

        Only the first ``dims`` entries of the padded ``state`` are proprioception.
        """
        weight = mask[..., None].to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        summary = nn.functional.layer_norm(mean.float(), mean.shape[-1:])
        return Prefix(cache, mask, state, torch.cat([summary, state[:, :dims]], dim=-1))


class SmolVLANet(_LeRobotNet):
    """SmolVLA (arXiv:2506.01844).

    All layers of the expert attend to the prefix; every second one attends to the actions too.
    """

    def to_bfloat16(self) -> None:
        """See ``_LeRobotNet``."""
        self.model.vlm_with_expert.vlm.to(torch.bfloat16)

    @property
    def pooled_width(self) -> int:
        """Width of the language model's tokens."""
        return self.model.vlm_with_expert.config.text_config.hidden_size

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        """Encodes a batch of LeRobot's pre-processor."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        # Embed images, instruction and proprioception as one sequence of tokens.
        images, image_masks = self.lerobot.prepare_images(batch)
        state = self.lerobot.prepare_state(batch)
        tokens, token_mask = _language(batch)
        embedded, mask, blocks = self.model.embed_prefix(
            images, image_masks, tokens, token_mask, state=state
        )
        # Run the language model without the expert, and keep its keys and values.
        (hidden, _), cache = self.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(mask, blocks),
            position_ids=mask.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return self._prefix(hidden, cache, mask, state, _state_dims(batch))

    def features(self, prefix: Prefix, x: Float[Tensor, "n k c d"], t: Tensor) -> Tensor:
        """The expert's last hidden states (N, K, C, W).

        The K noisy chunks of an observation stand one after the other in a single sequence and do
        not see each other. So they share the keys and values of the prefix without a copy.

        Args:
            prefix: of N observations.
            x: (N, K, C, D) noisy chunks.
            t: (N, K) their times, or (N, K, C), a time for each action.
        """
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        n, k, c, _ = x.shape
        embedded, mask, blocks, _ = self._suffix(x.flatten(0, 1), t.flatten(0, 1))
        # The attention mask among the K * C action tokens: LeRobot's mask of one chunk, repeated
        # along the diagonal.
        within_chunk = make_att_2d_masks(mask[:1], blocks[:1])[0]
        same_chunk = torch.eye(k, dtype=torch.bool, device=x.device)
        among_actions = same_chunk[:, None, :, None] & within_chunk[None, :, None, :]
        among_actions = among_actions.reshape(1, k * c, k * c).expand(n, -1, -1)
        to_prefix = prefix.mask[:, None, :].expand(n, k * c, -1)
        # Every chunk has the positions directly behind the prefix.
        prefix_length = prefix.mask.sum(1, keepdim=True)
        positions = prefix_length + torch.arange(c, device=x.device).repeat(k)
        (_, hidden), _ = self.model.vlm_with_expert.forward(
            attention_mask=torch.cat([to_prefix, among_actions], dim=2),
            position_ids=positions,
            past_key_values=copy_cache(prefix.cache),
            inputs_embeds=[None, embedded.unflatten(0, (n, k)).flatten(1, 2)],
            use_cache=True,
        )
        return hidden.float().unflatten(1, (k, c))


class PiNet(_LeRobotNet):
    """pi0 (arXiv:2410.24164) and pi0.5 (arXiv:2504.16054).

    All layers of the expert attend to the prefix and to the actions. They differ in two inputs:

            proprioception            time
    pi0     a token of the expert     part of the action tokens
    pi0.5   text in the prompt        a condition of the expert's adaptive norms
    """

    def __init__(self, lerobot: Any) -> None:
        super().__init__(lerobot)
        transformers = self.model.paligemma_with_expert
        # LeRobot samples with eager attention.
        language_model = transformers.paligemma.model.language_model
        language_model.config._attn_implementation = "eager"
        transformers.gemma_expert.model.config._attn_implementation = "eager"
        # The expert predicts no words: its output layer is not used.
        transformers.gemma_expert.lm_head.requires_grad_(False)
        for norm in transformers.gemma_expert.modules():
            if getattr(norm, "cond_dim", None):
                norm.__class__ = _conditioned_per_token(type(norm))

    def to_bfloat16(self) -> None:
        """See ``_LeRobotNet``."""
        self.model.paligemma_with_expert.to_bfloat16_for_selected_params("bfloat16")

    @property
    def pooled_width(self) -> int:
        """Width of the language model's tokens."""
        return self.model.paligemma_with_expert.paligemma.model.language_model.config.hidden_size

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        """Encodes a batch of LeRobot's pre-processor."""
        from lerobot.policies.common.vla_utils import (
            make_att_2d_masks,
            pad_vector,
            prepare_attention_masks_4d,
        )

        # Embed images and instruction as one sequence of tokens. The state goes to the expert.
        images, image_masks = self.lerobot._preprocess_images(batch)
        tokens, token_mask = _language(batch)
        state = pad_vector(batch["observation.state"], self.lerobot.config.max_state_dim)
        embedded, mask, blocks = self.model.embed_prefix(images, image_masks, tokens, token_mask)
        # Run the language model without the expert, and keep its keys and values.
        (hidden, _), cache = self.model.paligemma_with_expert.forward(
            attention_mask=prepare_attention_masks_4d(make_att_2d_masks(mask, blocks)),
            position_ids=mask.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return self._prefix(hidden, cache, mask, state, _state_dims(batch))

    def features(self, prefix: Prefix, x: Float[Tensor, "n k c d"], t: Tensor) -> Tensor:
        """See ``SmolVLANet.features``.

        Here each of the K chunks is a row of its own, and the prefix's keys and values are repeated
        K times.
        """
        from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d

        # The expert's tokens of N * K rows; pi0 has a token of the state before those of the
        # actions.
        n, k, c, _ = x.shape
        state = []
        if hasattr(self.model, "state_proj"):
            state = [prefix.state.repeat_interleave(k, dim=0)]
        embedded, mask, blocks, (condition,) = self._suffix(
            x.flatten(0, 1), t.flatten(0, 1), *state
        )
        # The prefix, once for each row.
        prefix_mask = prefix.mask.repeat_interleave(k, dim=0)
        cache = copy_cache(prefix.cache)
        if k > 1:
            cache.batch_repeat_interleave(k)
        # The tokens attend to the prefix and to their own row, at the positions behind the prefix.
        to_prefix = prefix_mask[:, None, :].expand(-1, mask.shape[1], -1)
        attention = torch.cat([to_prefix, make_att_2d_masks(mask, blocks)], dim=2)
        (_, hidden), _ = self.model.paligemma_with_expert.forward(
            attention_mask=prepare_attention_masks_4d(attention),
            position_ids=prefix_mask.sum(1, keepdim=True) + mask.cumsum(1) - 1,
            past_key_values=cache,
            inputs_embeds=[None, embedded],
            use_cache=False,
            adarms_cond=[None, condition],
        )
        return hidden[:, -c:].float().unflatten(0, (n, k))


@functools.cache
def _conditioned_per_token(norm: Any) -> Any:
    """A subclass of LeRobot's adaptive norm that also takes a condition for each token.

    LeRobot's takes one condition per sequence, (B, cond_dim). With (B, C, cond_dim), every token is
    passed on as a sequence of its own.
    """

    class ConditionedPerToken(norm):
        def forward(self, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            if cond is None or cond.ndim == 2:
                return super().forward(x, cond)
            out, gate = super().forward(x.flatten(0, 1), cond.flatten(0, 1))
            return out.view_as(x), gate.view_as(x)

    return ConditionedPerToken


NETS = {"smolvla": SmolVLANet, "pi0": PiNet, "pi05": PiNet}


def _language(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The instruction's token ids and their mask, each (N, L)."""
    return batch["observation.language.tokens"], batch["observation.language.attention_mask"]


def _state_dims(batch: dict[str, Any]) -> int:
    """Proprio dims, before padding."""
    return batch["observation.state"].shape[-1]


def all_see_all(mask: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """What is added to the attention's logits, (N, 1, count, S), so that nothing is causal.

    Args:
        mask: (N, S) of real tokens.
        count: of them, the last ones, that attend.
        dtype: of the network.
    """
    allowed = mask[:, None, None, :].bool().expand(-1, 1, count, -1)
    refused = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=mask.device)
    return torch.where(allowed, torch.zeros_like(refused), refused)


def copy_cache(cache: Any) -> Any:
    """A shallow copy of a key-value cache: the same tensors, but appending leaves ``cache`` as is.

    Transformers appends the new keys and values to the cache that it is given.
    """
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied
