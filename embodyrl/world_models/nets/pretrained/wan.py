"""Wan's video networks as codec and backbone of a world model.

``WanCodec`` wraps an ``AutoencoderKLWan`` and ``WanBackbone`` a ``WanTransformer3DModel``. They
have the interfaces of ``FrameCodec`` and ``ChunkTransformer``, so training, the env and the
measures are the same code. Pretrained weights come from a local folder or the hub in diffusers'
layout (``load.py``); new layers beside them (``VideoBackbone``) start at zero or at random.
"""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# By diffusers' annotations from_config and from_pretrained may return tuples. They do so only with
# other arguments than here.
from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.world_models.nets.backbone import CONTEXT
from embodyrl.world_models.nets.pretrained.video import TIMESTEPS, VideoBackbone, per_row
from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments

try:
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
except ImportError as error:
    raise MissingDependencyError(
        "Wan's networks come from diffusers, which is not installed here or too old. Install it: "
        "pip install -U 'embodyrl[wm]'."
    ) from error


class WanCodec(SavedNetwork):
    """Single frames through Wan's video autoencoder; see ``FrameCodec`` for the shapes.

    Args:
        num_views: V cameras.
        height: of a frame in pixels.
        width: of a frame in pixels.
        vae_config: of the ``AutoencoderKLWan``.
    """

    shift: Tensor
    scale: Tensor

    @record_arguments
    def __init__(self, num_views: int, height: int, width: int, vae_config: dict[str, Any]) -> None:
        super().__init__()
        self.vae = AutoencoderKLWan.from_config(vae_config)
        factor = self.vae.config["scale_factor_spatial"]
        if height % factor or width % factor:
            raise UserError(
                f"Wan's autoencoder takes edges that are multiples of {factor}, not "
                f"{height}x{width}."
            )
        mean, std = (torch.tensor(self.vae.config[f"latents_{k}"]) for k in ("mean", "std"))
        self.register_buffer("shift", mean[:, None, None])
        self.register_buffer("scale", std[:, None, None])

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(c, rows, columns) of one view's latent."""
        c = self.config
        factor = self.vae.config["scale_factor_spatial"]
        return self.vae.config["z_dim"], c["height"] // factor, c["width"] // factor

    def encode(self, frames: UInt8[Tensor, "b v h w 3"]) -> Float[Tensor, "b v c y x"]:
        """Latents of B frames of every view: the mode, normalised with Wan's own statistics."""
        pixels = frames.flatten(0, 1).permute(0, 3, 1, 2).to(self.vae.dtype) / 127.5 - 1.0
        z = self.vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
        return ((z - self.shift) / self.scale).unflatten(0, frames.shape[:2])

    def decode(self, latents: Float[Tensor, "b v c y x"]) -> UInt8[Tensor, "b v h w 3"]:
        """The frames of latents."""
        z = latents.flatten(0, 1).to(self.vae.dtype) * self.scale + self.shift
        pixels = self.vae.decode(z[:, :, None]).sample[:, :, 0].float()
        frames = ((pixels + 1.0) * 127.5).round().clamp(0, 255).to(torch.uint8)
        return frames.permute(0, 2, 3, 1).unflatten(0, latents.shape[:2])


class WanBackbone(VideoBackbone):
    """A Wan transformer that denoises the next frame, given the first, previous and current ones.

    Every frame has its own noise level (Wan 2.2's timestep per token): ``noise`` for the context,
    ``time`` for the next frame. See ``ChunkTransformer`` for the interface. To predict the mean,
    the next frame is at full noise, and that noise is zero.

    Args:
        num_views: V cameras.
        action_dim: A.
        horizon: H.
        proprio_dim: P.
        wan_config: of the ``WanTransformer3DModel``.
        stochastic: whether it is trained to denoise as well, or to give the mean alone.
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
            WanTransformer3DModel.from_config(wan_config), action_dim, horizon, proprio_dim
        )

    def forward(
        self,
        context: Float[Tensor, "b 3 v c y x"],
        proprio: Float[Tensor, "b p"],
        actions: Float[Tensor, "b h a"],
        count: Int[Tensor, " b"],
        noise: Float[Tensor, " b"],
        sample: Float[Tensor, "b v c y x"] | None = None,
        time: Float[Tensor, " b"] | None = None,
    ) -> tuple[Float[Tensor, "b v c y x"], Float[Tensor, "b p"]]:
        """Changes of latent and proprio; see ``ChunkTransformer.forward``."""
        current = context[:, -1]
        time = torch.zeros_like(noise) if time is None else time
        sample = torch.zeros_like(current) if sample is None else sample
        # The noise level of the next frame. A row whose time is 0 asks for the mean, which is the
        # best prediction at full noise.
        level = torch.where(time > 0, time, 1.0)
        # The video: the context and the noisy next frame, the views side by side.
        next_frame = per_row(1.0 - level) * current + sample
        frames = torch.cat([context, next_frame[:, None]], dim=1)  # b 4 v c y x
        video = frames.permute(0, 3, 1, 4, 2, 5).flatten(4, 5)  # b c 4 y (v x)
        # A noise level for every token.
        _, p_h, p_w = self.wan.config["patch_size"]
        cells = (video.shape[3] // p_h) * (video.shape[4] // p_w)
        levels = torch.cat([noise[:, None].expand(-1, CONTEXT), level[:, None]], dim=1) * TIMESTEPS
        # The transformer's velocity, which is noise - data, as everywhere here and in Wan.
        tokens, taken = self.tokens(actions, count, proprio)
        velocity = self.wan(
            video, levels.repeat_interleave(cells, dim=1), tokens, return_dict=False
        )[0]
        velocity = velocity[:, :, -1].unflatten(3, (current.shape[1], -1)).permute(0, 3, 1, 2, 4)
        change = frames[:, -1] - per_row(level) * velocity - current
        return change, self.moved(change, taken, proprio)
