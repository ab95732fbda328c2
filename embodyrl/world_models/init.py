"""A world model before its training: with fresh weights, or one that shall go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.storage import checkpoint
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.config import WorldTrainConfig
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import ChunkTransformer
from embodyrl.world_models.nets.codec import FrameCodec
from embodyrl.world_models.nets.inverse import InverseDynamics
from embodyrl.world_models.nets.state import StateModel
from embodyrl.world_models.nets.success import SuccessHead


def build(config: WorldTrainConfig, clips: Clips, rows: Tensor) -> WorldModel:
    """A model with fresh weights for data like ``clips``; what it normalises by comes from ``rows``."""
    views = len(clips.images)
    (height, width) = next(iter(clips.spec.cameras.values()))
    dims = {
        "action_dim": clips.spec.action_dim,
        "horizon": config.horizon,
        "proprio_dim": clips.spec.proprio_dim,
    }
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        if config.wan:
            from embodyrl.world_models.nets.pretrained.load import load_wan

            codec, backbone = load_wan(
                config.wan, views, (height, width), stochastic=config.stochastic, **dims
            )
            c, y, x = codec.latent_shape
        else:
            codec = FrameCodec(views, height, width, config.latent_channels, config.channels)
            c, y, x = codec.latent_shape
            middle = clips.frames(rows[:: max(1, len(rows) // 500)]).median(dim=0).values
            codec.get_buffer("background").copy_(middle.permute(0, 3, 1, 2).float() / 255.0)
            backbone = ChunkTransformer(
                num_views=views, latent_channels=c, rows=y, columns=x, width=config.width, layers=config.layers,
                heads=config.heads, stochastic=config.stochastic, body_dim=_body_dim(clips) if config.state else 0,
                **dims,
            )  # fmt: skip
        success = SuccessHead(
            num_views=views, latent_channels=c, proprio_dim=clips.spec.proprio_dim
        )
        state = _state_model(config, clips, rows) if config.state else None
        model = WorldModel(codec, backbone, success, clips.spec, state)
        model.inverse = _inverse(model)
    model.env = clips.env
    model.proprio_mean.copy_(clips.proprio[rows].mean(0))
    model.proprio_std.copy_(clips.proprio[rows].std(0).clamp_min(1e-3))
    return model


def go_on(config: WorldTrainConfig, clips: Clips) -> WorldModel:
    """The model of ``config.init``, whose dynamics shall learn from more data, and perhaps something new.

    Raises:
        UserError: the data do not fit it.
    """
    model = WorldModel.load(config.init)
    checkpoint.check_compatible(model.spec, clips.spec)
    if model.state is not None and model.spec.layout != clips.spec.layout:
        raise UserError(
            f"{config.init} and the data name other numbers of the simulator's state as hand and "
            "objects (EnvSpec.layout): one of them is of an older version. Collect the data anew, "
            "or train from nothing."
        )
    more: dict[str, Any] = (
        {"stochastic": True} if config.stochastic and not model.stochastic else {}
    )
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        if config.state and model.state is None:
            frames = torch.arange(len(clips))[~clips.held_out(config.held_out)]
            model.state = _state_model(config, clips, frames)
            more["body_dim"] = _body_dim(clips)
        model.inverse = model.inverse or _inverse(model)
        if more:
            old = model.backbone
            new = cast(Any, type(model.backbone).from_config(model.backbone.config, **more))
            new.load_state_dict(old.state_dict(), strict=False)  # what it lacks begins at zero
            model.backbone = new
    return model.train()


def with_state(config: WorldTrainConfig, clips: Clips) -> bool:
    """Whether the model is to predict the simulator's state.

    Raises:
        UserError: it is, and the data do not hold it; or it is not, and the model to go on from
            does.
    """
    has = bool(config.init) and (Path(config.init) / "state").exists()
    if has and config.state is False:
        raise UserError(
            f"{config.init} predicts the simulator's state: leave state=false out, or train from "
            "nothing."
        )
    asked = (
        not (config.init or config.wan) and clips.privileged is not None
        if config.state is None
        else config.state
    )
    if (has or asked) and clips.privileged is None:
        raise UserError(
            "Not all frames of the data hold the simulator's state, so a world model cannot learn "
            "to predict it. `embodyrl collect` records it in simulators that give one; without "
            "it, train from nothing and state=false."
        )
    return has or asked


def _state_model(config: WorldTrainConfig, clips: Clips, rows: Tensor) -> StateModel:
    rows = rows[rows + 1 < clips.end[rows]]
    body = clips.body(rows)
    after = clips.body(rows + 1)
    assert body is not None and after is not None
    given = {"members": config.state_members, "layout": clips.spec.layout, "judges": config.judges}
    state = StateModel(_body_dim(clips), clips.spec.action_dim, **given)
    state.fit_linear(body, clips.actions[rows], after)
    return state


def _inverse(model: WorldModel) -> InverseDynamics:
    c, y, x = model.codec.latent_shape
    return InverseDynamics(len(model.spec.cameras), c, y, x, model.spec.action_dim)


def _body_dim(clips: Clips) -> int:
    return clips.spec.proprio_dim + (0 if clips.privileged is None else clips.privileged.shape[1])
