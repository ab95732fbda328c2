"""Codec and backbone with the weights of a pretrained Wan, or of an AnyFlow, which is a Wan with a causal attention."""

# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
# diffusers says of load_config and from_pretrained that they may also give tuples, which only other
# arguments make.
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
        UserError: it is not there, the transformer is another one or takes other latents than the
            autoencoder gives, or the pictures' size does not fit it.
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
            "take a text-to-video model, not one that also takes a picture's channels."
        )
    codec = WanCodec(num_views, *size, vae_config=dict(vae.config))
    _, y, x = codec.latent_shape
    _, rows, columns = wan.config.get("compressed_patch_size", wan.config["patch_size"])
    if y % rows or num_views * x % columns:
        raise UserError(
            f"{num_views} picture(s) of {size[0]}x{size[1]} side by side are {y}x{num_views * x} "
            f"latent cells, which the transformer of {path} cannot divide into patches of "
            f"{rows}x{columns}. Take pictures of another size."
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
    """The transformer's class and the backbone's, by the name in the transformer's config."""
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
        f"The transformer of {path} is a {name}, which is no backbone of a world model: take a "
        "WanTransformer3DModel or an AnyFlowFARTransformer3DModel."
    )
