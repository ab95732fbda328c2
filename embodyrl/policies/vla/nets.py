"""The networks of SmolVLA, pi0 and pi0.5 as LeRobot builds them, seen as prefix and denoising steps.

All three have LeRobot's time and sign, which are this project's too: t = 1 is noise, x_t = (1-t) a
+ t e, v = e - a. The prefix (images, instruction and, in SmolVLA, proprioception) goes through the
language model once per observation. The action expert then attends to its keys and values in every
denoising step; nothing in the prefix sees the actions.
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
        mask: the tokens that are there; the others are padding.
        state: normalised proprioception, padded to the model's width, for models whose expert sees
            it.
        pooled: a summary for the critic: the mean token, standardised, and normalised
            proprioception.
    """

    cache: Any
    mask: Bool[Tensor, "n p"]
    state: Float[Tensor, "n s"]
    pooled: Float[Tensor, "n f"]


class _Net(nn.Module):
    """Base of the two below. ``lerobot`` is LeRobot's policy, whose parameters and config these are."""

    def __init__(self, lerobot: Any) -> None:
        super().__init__()
        self.lerobot = lerobot

    @property
    def model(self) -> Any:
        """The network inside LeRobot's policy."""
        return self.lerobot.model

    @property
    def width(self) -> int:
        """Of the action expert."""
        return self.model.action_out_proj.in_features

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """(C, D): actions in a chunk, and their padded width."""
        return self.lerobot.config.chunk_size, self.lerobot.config.max_action_dim

    def halve(self) -> None:
        """Weights in bfloat16, but for those that LeRobot keeps in float32 then."""
        raise NotImplementedError

    def velocity(self, features: Float[Tensor, "n k c w"]) -> Float[Tensor, "n k c d"]:
        """Noise - action, from ``features``."""
        return self.model.action_out_proj(features)

    def _suffix(
        self, x: Float[Tensor, "b c d"], t: Tensor, *state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
        """LeRobot's ``embed_suffix`` of chunks at times t (B,), or (B, C): every action's own (arXiv:2512.05964).

        An action's token, and the condition of its norms, depend on nothing but the action and its
        time: so with times of their own each goes in as a chunk of one.
        """
        embedded, mask, blocks, *condition = self.model.embed_suffix(
            *state, x, t if t.ndim == 1 else t[:, 0]
        )
        if t.ndim == 2:
            size = t.shape
            repeated = (s.repeat_interleave(t.shape[1], dim=0) for s in state)
            alone, _, _, *condition = self.model.embed_suffix(
                *repeated, x.flatten(0, 1)[:, None], t.flatten()
            )
            embedded = torch.cat([embedded[:, : -size[1]], alone[:, -1].unflatten(0, size)], dim=1)
            condition = [None if each is None else each.unflatten(0, size) for each in condition]
        return embedded, mask, blocks, condition

    def _prefix(self, hidden: Tensor, cache: Any, mask: Tensor, state: Tensor, dims: int) -> Prefix:
        weight = mask[..., None].to(hidden.dtype)
        mean = (hidden * weight).sum(1) / weight.sum(1)
        summary = nn.functional.layer_norm(mean.float(), mean.shape[-1:])
        return Prefix(cache, mask, state, torch.cat([summary, state[:, :dims]], dim=-1))


class SmolVLANet(_Net):
    """SmolVLA (arXiv:2506.01844): the expert's layers attend to the prefix, and every second one to the actions too."""

    def halve(self) -> None:
        """See ``_Net``."""
        self.model.vlm_with_expert.vlm.to(torch.bfloat16)

    @property
    def pooled_width(self) -> int:
        """Of the language model's tokens."""
        return self.model.vlm_with_expert.config.text_config.hidden_size

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        """Encodes what LeRobot's pre-processor gave."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        images, image_masks = self.lerobot.prepare_images(batch)
        state = self.lerobot.prepare_state(batch)
        tokens, token_mask = _language(batch)
        embedded, mask, blocks = self.model.embed_prefix(
            images, image_masks, tokens, token_mask, state=state
        )
        (hidden, _), cache = self.model.vlm_with_expert.forward(
            attention_mask=make_att_2d_masks(mask, blocks),
            position_ids=mask.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return self._prefix(hidden, cache, mask, state, _state_dims(batch))

    def features(self, prefix: Prefix, x: Float[Tensor, "n k c d"], t: Tensor) -> Tensor:
        """The expert's last hidden states (N, K, C, W) at times t (N, K) or (N, K, C).

        The K noisy chunks of an observation stand one after the other in a single sequence and do
        not see each other, so that they share its keys and values without a copy.
        """
        from lerobot.policies.common.vla_utils import make_att_2d_masks

        n, k, c, _ = x.shape
        embedded, mask, blocks, _ = self._suffix(x.flatten(0, 1), t.flatten(0, 1))
        within = make_att_2d_masks(mask[:1], blocks[:1])[0]
        same = torch.eye(k, dtype=torch.bool, device=x.device)
        own = (same[:, None, :, None] & within[None, :, None, :]).reshape(1, k * c, k * c)
        to_prefix = prefix.mask[:, None, :].expand(n, k * c, -1)
        (_, hidden), _ = self.model.vlm_with_expert.forward(
            attention_mask=torch.cat([to_prefix, own.expand(n, -1, -1)], dim=2),
            position_ids=prefix.mask.sum(1, keepdim=True)
            + torch.arange(c, device=x.device).repeat(k),
            past_key_values=fork(prefix.cache),
            inputs_embeds=[None, embedded.unflatten(0, (n, k)).flatten(1, 2)],
            use_cache=True,
        )
        return hidden.float().unflatten(1, (k, c))


class PiNet(_Net):
    """pi0 (arXiv:2410.24164) and pi0.5 (arXiv:2504.16054): every layer of the expert attends to prefix and actions.

    pi0's expert sees proprioception as a token; pi0.5's sees it as words of the prompt, and time by
    adaptive norms.
    """

    def __init__(self, lerobot: Any) -> None:
        super().__init__(lerobot)
        both = self.model.paligemma_with_expert
        both.paligemma.model.language_model.config._attn_implementation = (
            "eager"  # as LeRobot samples
        )
        both.gemma_expert.model.config._attn_implementation = "eager"
        both.gemma_expert.lm_head.requires_grad_(False)  # nothing reads it
        for norm in both.gemma_expert.modules():
            if getattr(norm, "cond_dim", None):
                norm.__class__ = _for_each_token(type(norm))

    def halve(self) -> None:
        """See ``_Net``."""
        self.model.paligemma_with_expert.to_bfloat16_for_selected_params("bfloat16")

    @property
    def pooled_width(self) -> int:
        """Of the language model's tokens."""
        return self.model.paligemma_with_expert.paligemma.model.language_model.config.hidden_size

    def prefix(self, batch: dict[str, Any]) -> Prefix:
        """Encodes what LeRobot's pre-processor gave."""
        from lerobot.policies.common.vla_utils import (
            make_att_2d_masks,
            pad_vector,
            prepare_attention_masks_4d,
        )

        images, image_masks = self.lerobot._preprocess_images(batch)
        tokens, token_mask = _language(batch)
        state = pad_vector(batch["observation.state"], self.lerobot.config.max_state_dim)
        embedded, mask, blocks = self.model.embed_prefix(images, image_masks, tokens, token_mask)
        (hidden, _), cache = self.model.paligemma_with_expert.forward(
            attention_mask=prepare_attention_masks_4d(make_att_2d_masks(mask, blocks)),
            position_ids=mask.cumsum(1) - 1,
            past_key_values=None,
            inputs_embeds=[embedded, None],
            use_cache=True,
        )
        return self._prefix(hidden, cache, mask, state, _state_dims(batch))

    def features(self, prefix: Prefix, x: Float[Tensor, "n k c d"], t: Tensor) -> Tensor:
        """See ``SmolVLANet.features``; the prefix's keys and values are repeated K times."""
        from lerobot.policies.common.vla_utils import make_att_2d_masks, prepare_attention_masks_4d

        n, k, c, _ = x.shape
        state = (
            [prefix.state.repeat_interleave(k, dim=0)] if hasattr(self.model, "state_proj") else []
        )
        embedded, mask, blocks, (condition,) = self._suffix(
            x.flatten(0, 1), t.flatten(0, 1), *state
        )
        seen = prefix.mask.repeat_interleave(k, dim=0)
        cache = fork(prefix.cache)
        if k > 1:
            cache.batch_repeat_interleave(k)
        to_prefix = seen[:, None, :].expand(-1, mask.shape[1], -1)
        (_, hidden), _ = self.model.paligemma_with_expert.forward(
            attention_mask=prepare_attention_masks_4d(
                torch.cat([to_prefix, make_att_2d_masks(mask, blocks)], dim=2)
            ),
            position_ids=seen.sum(1, keepdim=True) + mask.cumsum(1) - 1,
            past_key_values=cache,
            inputs_embeds=[None, embedded],
            use_cache=False,
            adarms_cond=[None, condition],
        )
        return hidden[:, -c:].float().unflatten(0, (n, k))


@functools.cache
def _for_each_token(norm: Any) -> Any:
    """LeRobot's adaptive norm, which also takes a condition for every token: each is then a sequence of one."""

    class ForEachToken(norm):
        def forward(self, x: Tensor, cond: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
            if cond is None or cond.ndim == 2:
                return super().forward(x, cond)
            out, gate = super().forward(x.flatten(0, 1), cond.flatten(0, 1))
            return out.view_as(x), gate.view_as(x)

    return ForEachToken


NETS = {"smolvla": SmolVLANet, "pi0": PiNet, "pi05": PiNet}


def _language(batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return batch["observation.language.tokens"], batch["observation.language.attention_mask"]


def _state_dims(batch: dict[str, Any]) -> int:
    return batch["observation.state"].shape[-1]


def fork(cache: Any) -> Any:
    """A cache with the same tensors, to which keys and values can be appended without touching the first."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin
