"""Codec and backbone with pretrained weights: of a Wan, or of an AnyFlow (a causal Wan)."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# By diffusers' annotations load_config and from_pretrained may return tuples. They do so only with
# other arguments than here.
from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from embodyrl.errors import UserError
from embodyrl.world_models.nets.pretrained.video import VideoBackbone
from embodyrl.world_models.nets.pretrained.wan import (
    AutoencoderKLWan,
    WanBackbone,
    WanCodec,
    WanTransformer3DModel,
)


def load_wan(
    path: str | Path,
    num_views: int,
    size: tuple[int, int],
    *,
    action_dim: int,
    horizon: int,
    proprio_dim: int,
    stochastic: bool = False,
) -> tuple[WanCodec, VideoBackbone]:
    """Codec and backbone with pretrained weights; ``transformer/config.json`` says which backbone.

    Args:
        path: folder or hub id in diffusers' layout, with ``transformer/`` and ``vae/``.
        num_views: V cameras.
        size: (height, width) of a frame.
        action_dim: A.
        horizon: H.
        proprio_dim: P.
        stochastic: see ``WanBackbone``.

    Raises:
        UserError: there is none, the transformer is of another class or does not fit the
            autoencoder, or the picture size does not fit.
    """
    try:
        transformer, backbone_class = _classes(path)
        vae = AutoencoderKLWan.from_pretrained(path, subfolder="vae")
        wan = transformer.from_pretrained(path, subfolder="transformer")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} holds no Wan in diffusers' layout (transformer/ and vae/): {error}"
        ) from error
    if (
        wan.config["in_channels"] != vae.config["z_dim"]
        or wan.config["out_channels"] != vae.config["z_dim"]
    ):
        raise UserError(
            f"The transformer of {path} takes {wan.config['in_channels']} latent channels and "
            f"gives {wan.config['out_channels']}, where its autoencoder has {vae.config['z_dim']}: "
            "take a text-to-video model, not an image-to-video model."
        )
    # The views lie side by side, and the transformer divides them into patches.
    codec = WanCodec(num_views, *size, vae_config=dict(vae.config))
    _, y, x = codec.latent_shape
    _, rows, columns = wan.config.get("compressed_patch_size", wan.config["patch_size"])
    if y % rows or num_views * x % columns:
        raise UserError(
            f"{num_views} picture(s) of {size[0]}x{size[1]} side by side are {y}x{num_views * x} "
            f"latent cells, which the transformer of {path} cannot divide into patches of "
            f"{rows}x{columns}. Use pictures of another size."
        )
    backbone = backbone_class(
        num_views,
        action_dim,
        horizon,
        proprio_dim,
        wan_config=dict(wan.config),
        stochastic=stochastic,
    )
    codec.vae.load_state_dict(vae.state_dict())
    backbone.wan.load_state_dict(wan.state_dict())
    return codec, backbone


def _classes(path: str | Path) -> tuple[Any, Any]:
    """The classes of transformer and backbone, by the name in the transformer's config."""
    name = cast(Any, WanTransformer3DModel.load_config(path, subfolder="transformer")).get(
        "_class_name"
    )
    if name == "WanTransformer3DModel":
        return WanTransformer3DModel, WanBackbone
    if name == "AnyFlowFARTransformer3DModel":
        from embodyrl.world_models.nets.pretrained.anyflow import (
            AnyFlowBackbone,
            AnyFlowFARTransformer3DModel,
        )

        return AnyFlowFARTransformer3DModel, AnyFlowBackbone
    raise UserError(
        f"The transformer of {path} is a {name}, which cannot be a world model's backbone: take a "
        "WanTransformer3DModel or an AnyFlowFARTransformer3DModel."
    )
