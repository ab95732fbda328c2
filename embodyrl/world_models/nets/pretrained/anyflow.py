"""AnyFlow's causal video transformer as backbone: it needs few sampling steps.

diffusers' ``AnyFlowFARTransformer3DModel`` (AnyFlow, arXiv:2605.13724, on FAR, arXiv:2503.19325) is
a Wan with two changes:

- Causal attention: a frame sees itself and the frames before it. So keys and values of the context
  do not change while the next frame is denoised, and are computed once.
- A flow map: from two times t and r it predicts the mean velocity u between them, so that
  x_r = x_t - (t - r) u(x_t, t, r) also holds for long steps. With r = t it is an ordinary flow.

The flow map is learned from the model's own half steps (shortcut models, Frans et al.,
arXiv:2410.12557).
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# By diffusers' annotations from_config may return tuples. It does so only with other arguments.
from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.functional.shortcut import shortcut_target
from embodyrl.world_models.nets.backbone import CONTEXT, attention
from embodyrl.world_models.nets.pretrained.video import TIMESTEPS, VideoBackbone, per_row
from embodyrl.world_models.nets.saved_network import record_arguments

try:
    from diffusers.models.transformers.transformer_anyflow_far import (
        AnyFlowFARTransformer3DModel,
        apply_rotary_emb,
    )
except ImportError as error:
    raise MissingDependencyError(
        "AnyFlow's networks come from diffusers, which is not installed here or too old. Install it: "
        "pip install -U 'embodyrl[wm]'."
    ) from error

CHUNKS = (1,) * (CONTEXT + 1)
"""How many latent frames are denoised together, chunk by chunk; "chunk" is AnyFlow's term."""
GRIDS = (1, 2, 3, 4, 6, 8)
"""Numbers of sampling steps whose time grids the flow map is learned on.

Half a step of one grid is a step of another one, or so short that the ordinary flow will do.
"""
FLOW_MAP_SHARE = 0.5
"""Share of the denoising rows that learn the flow map: a quarter of all, as in shortcut models."""


class AnyFlowBackbone(VideoBackbone):
    """An AnyFlow transformer that denoises the next frame, given first, previous and current ones.

    See ``ChunkTransformer`` for the interface and ``WanBackbone`` for the conditioning. It is also
    a ``FlowMap``: ``denoise`` samples, and ``shortcut_targets`` makes the flow map's targets.

    Args:
        num_views: V cameras.
        action_dim: A.
        horizon: H.
        proprio_dim: P.
        wan_config: of the ``AnyFlowFARTransformer3DModel``.
        stochastic: whether it is trained to denoise as well, or to give the mean alone.

    Raises:
        UserError: the transformer sees only the newest frame in full resolution.
    """

    @record_arguments
    def __init__(
        self,
        num_views: int,
        action_dim: int,
        horizon: int,
        proprio_dim: int,
        wan_config: dict[str, Any],
        stochastic: bool = False,
    ) -> None:
        super().__init__()
        self._attach(
            AnyFlowFARTransformer3DModel.from_config(wan_config), action_dim, horizon, proprio_dim
        )
        if self.wan.config["full_chunk_limit"] < 2:
            raise UserError(
                "An AnyFlow must see two frames in full resolution or more, but its "
                "full_chunk_limit is 1."
            )
        for block in self.wan.blocks:
            block.attn1.set_processor(CausalAttention())

    def forward(
        self,
        context: Float[Tensor, "b 3 v c y x"],
        proprio: Float[Tensor, "b p"],
        actions: Float[Tensor, "b h a"],
        count: Int[Tensor, " b"],
        noise: Float[Tensor, " b"],
        sample: Float[Tensor, "b v c y x"] | None = None,
        time: Float[Tensor, " b"] | None = None,
        until: Float[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b v c y x"], Float[Tensor, "b p"]]:
        """Changes of latent and proprio; see ``ChunkTransformer.forward``.

        With ``until`` (the time r) the change is where the mean velocity from ``time`` to r would
        lead by time 0. Context and next frame go through in one pass, which can be trained.
        """
        current = context[:, -1]
        time = torch.zeros_like(noise) if time is None else time
        sample = torch.zeros_like(current) if sample is None else sample
        # A row whose time is 0 asks for the mean, which is the best prediction at full noise.
        mean = time <= 0
        level = torch.where(mean, 1.0, time)
        until = level if until is None else torch.where(mean, 1.0, until)
        tokens, taken = self.tokens(actions, count, proprio)
        frames = torch.cat([context, (per_row(1.0 - level) * current + sample)[:, None]], dim=1)
        # Two times for every frame; those of the context are its noise level.
        context_level = noise[:, None].expand(-1, CONTEXT)
        times = [torch.cat([context_level, x[:, None]], dim=1) for x in (level, until)]
        velocity = self._wan(frames, *times, tokens)[:, -1] + current
        change = sample - per_row(level) * velocity
        return change, self.moved(change, taken, proprio)

    def denoise(
        self,
        context: Float[Tensor, "b 3 v c y x"],
        proprio: Float[Tensor, "b p"],
        actions: Float[Tensor, "b h a"],
        count: Int[Tensor, " b"],
        noise: Float[Tensor, " b"],
        sample: Float[Tensor, "b v c y x"],
        steps: int,
    ) -> tuple[Float[Tensor, "b v c y x"], Float[Tensor, "b p"]]:
        """The changes that the noise ``sample`` flows to, in ``steps`` steps of the flow map."""
        tokens, taken = self.tokens(actions, count, proprio)
        cache = self._cache_context(context, noise, tokens)
        current = context[:, -1]
        one = torch.ones_like(noise)
        for left in range(steps, 0, -1):
            velocity = self._velocity(
                cache, current, tokens, sample, one * left / steps, one * (left - 1) / steps
            )
            sample = sample - velocity.float() / steps
        return sample, self.moved(sample, taken, proprio)

    @torch.no_grad()
    def shortcut_targets(
        self,
        context: Float[Tensor, "b 3 v c y x"],
        proprio: Float[Tensor, "b p"],
        actions: Float[Tensor, "b h a"],
        count: Int[Tensor, " b"],
        noise: Float[Tensor, " b"],
        change: Float[Tensor, "b v c y x"],
        sample: Float[Tensor, "b v c y x"],
        time: Float[Tensor, " b"],
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Turns some denoising rows into rows that learn the flow map from t to r.

        Their times lie on the grid of one of ``GRIDS``, as in sampling. One step is to predict what
        two half steps predict together (``functional.shortcut``).

        Args:
            context: see ``forward``, and the next four as well.
            proprio: see there.
            actions: see there.
            count: see there.
            noise: see there.
            change: the real change of the latent.
            sample: noisy changes.
            time: of ``sample``; rows with 0 learn the mean and stay as they are.
            generator: of the choice.

        Returns:
            ``sample`` and ``time`` with these rows replaced, ``until``, and the target changes of
            ``forward``.
        """
        # Choose the rows.
        draws = torch.rand(3, len(time), generator=generator).to(time.device)
        fresh = torch.randn(change.shape, generator=generator).to(change.device)
        rows = ((time > 0) & (draws[0] < FLOW_MAP_SHARE)).nonzero().flatten()
        sample, time, until, goal = sample.clone(), time.clone(), time.clone(), change.clone()
        if not len(rows):
            return sample, time, until, goal
        # A step of a random grid, from t to r; the shortest ones use the ordinary flow.
        grids = torch.tensor(GRIDS, device=time.device)
        steps = grids[(draws[1, rows] * len(grids)).long()]
        t = ((draws[2, rows] * steps).floor() + 1) / steps
        r = t - 1 / steps
        short = 2 * steps > max(GRIDS)
        # Two half steps, with the context cached.
        x_t = per_row(1 - t) * change[rows] + per_row(t) * fresh[rows]
        context = context[rows]
        tokens = self.tokens(actions[rows], count[rows], proprio[rows])[0]
        cache = self._cache_context(context, noise[rows], tokens)
        current = context[:, -1]
        velocity = shortcut_target(
            lambda x, t, d: self._velocity(cache, current, tokens, x, t, t - d).float(),
            x_t,
            t,
            1 / steps,
            short,
        )
        # The target of the whole step.
        sample[rows] = x_t
        time[rows] = t
        until[rows] = r
        goal[rows] = x_t - per_row(t) * velocity
        return sample, time, until, goal

    def _cache_context(
        self, context: Tensor, noise: Tensor, tokens: Tensor
    ) -> list[dict[str, Tensor]]:
        """Keys and values of the context, for every block."""
        cache: list[dict[str, Tensor]] = [{} for _ in self.wan.blocks]
        level = noise[:, None].expand(-1, CONTEXT)
        self._wan(
            context, level, level, tokens, kv_cache=cache, kv_cache_flag={"is_cache_step": True}
        )
        return cache

    def _velocity(
        self,
        cache: list[dict[str, Tensor]],
        current: Tensor,
        tokens: Tensor,
        sample: Tensor,
        time: Tensor,
        r: Tensor,
    ) -> Tensor:
        """Mean velocity (noise - change) of a noisy change from ``time`` to ``r``.

        The context comes from ``_cache_context``.
        """
        frame = (per_row(1.0 - time) * current + sample)[:, None]
        flags = {"is_cache_step": False, "num_cached_chunks": CONTEXT}
        return (
            self._wan(
                frame, time[:, None], r[:, None], tokens, kv_cache=cache, kv_cache_flag=flags
            )[:, 0]
            + current
        )

    def _wan(
        self, frames: Tensor, time: Tensor, until: Tensor, tokens: Tensor, **cache: Any
    ) -> Any:
        """Calls the transformer.

        Returns:
            Velocities (B, frames in full resolution, V, c, y, x); None where it fills the cache.
        """
        config = self.wan.config
        views = frames.shape[2]
        video = frames.permute(0, 1, 3, 4, 2, 5).flatten(4, 5)  # b f c y (v x)
        y, x = video.shape[3:]
        small, full = (
            (y // h) * (x // w)
            for _, h, w in (config["compressed_patch_size"], config["patch_size"])
        )
        compressed = max(0, len(CHUNKS) - config["full_chunk_limit"])
        lengths = [small if i < compressed else full for i in range(frames.shape[1])]
        filling = cache.get("kv_cache_flag", {}).get("is_cache_step", False)
        given = (
            video,
            time * TIMESTEPS,
            until * TIMESTEPS,
            tokens,
            CHUNKS[:CONTEXT] if filling else CHUNKS,
        )
        velocity = self.wan(*given, attention_mask=lengths, return_dict=False, **cache)[0]
        return None if filling else velocity.unflatten(4, (views, -1)).permute(0, 1, 4, 2, 3, 5)


class CausalAttention:
    """Self-attention of AnyFlow's blocks in which a frame sees itself and the frames before it.

    It replaces that of diffusers for two reasons. That one uses flex_attention, which has no
    backward pass on a CPU. And beside a cache it pads the keys with zeros and attends to them, so
    that results with and without the cache differ. Here no mask is needed: the queries of each
    frame meet only the keys that it may see.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Float[Tensor, "b n d"],
        attention_mask: list[int] | None = None,
        rotary_emb: dict[str, Tensor] | None = None,
        kv_cache: dict[str, Tensor] | None = None,
        kv_cache_flag: dict[str, Any] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """Called by diffusers' attention module.

        Args:
            attn: that module.
            hidden_states: of all frames, or of the newest one if the others are in the cache.
            attention_mask: number of tokens of each frame; None, as in a step with a cache, means
                that everything is seen.
            rotary_emb: its ``query`` has the rotations of ``hidden_states``.
            kv_cache: keys (rotated) and values of the context.
            kv_cache_flag: whether this step writes the cache or reads it.
        """
        assert rotary_emb is not None
        dtype = hidden_states.dtype
        q = attn.norm_q(attn.to_q(hidden_states))
        k = attn.norm_k(attn.to_k(hidden_states))
        q, k, v = (
            z.unflatten(2, (attn.heads, -1)).transpose(1, 2)
            for z in (q, k, attn.to_v(hidden_states))
        )
        q, k = (apply_rotary_emb(z.to(dtype), rotary_emb["query"]).to(v.dtype) for z in (q, k))
        # Write the context into the cache, or put it before the newest frame.
        if kv_cache is not None and kv_cache_flag is not None:
            if kv_cache_flag["is_cache_step"]:
                kv_cache["key"] = k
                kv_cache["value"] = v
            else:
                k = torch.cat([kv_cache["key"], k], dim=2)
                v = torch.cat([kv_cache["value"], v], dim=2)
        # Frame by frame, with the keys up to and including its own.
        seen = k.shape[2] - q.shape[2]
        parts = []
        for queries in q.split(attention_mask or q.shape[2], dim=2):
            seen += queries.shape[2]
            parts.append(attention(queries, k[:, :, :seen], v[:, :, :seen]))
        out = torch.cat(parts, dim=2).transpose(1, 2).flatten(2)
        return attn.to_out[1](attn.to_out[0](out.to(dtype)))
