"""A world model before its training: with fresh weights, or one whose training continues."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from embodyrl.devices import keep_random_state
from embodyrl.errors import UserError, refuse_unread
from embodyrl.policies.found_features import MEDIAN_OF
from embodyrl.storage.env_spec import check_compatible
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.config import OF_FRAMES, WorldTrainConfig
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.backbone import ChunkTransformer
from embodyrl.world_models.nets.codec import FrameCodec
from embodyrl.world_models.nets.discriminator import Discriminator
from embodyrl.world_models.nets.finder import PLACES, Finder
from embodyrl.world_models.nets.inverse import InverseDynamics
from embodyrl.world_models.nets.state import StateModel
from embodyrl.world_models.nets.success import SuccessHead

if TYPE_CHECKING:
    from embodyrl.world_models.model import Backbone, Codec


def build_model(config: WorldTrainConfig, clips: Clips, rows: Tensor) -> WorldModel:
    """A model with fresh weights for data like ``clips``.

    Args:
        config: the settings; ``state`` and ``found`` must be decided (``what_state``).
        clips: the data.
        rows: frames whose statistics normalise proprio and give the codec's background.
    """
    with keep_random_state():
        torch.manual_seed(config.seed)
        # What draws pictures, and judges them.
        codec = backbone = success = None
        if config.frames is not False:
            codec, backbone = _codec_and_backbone(config, clips, rows)
            success = SuccessHead(
                num_views=len(clips.images),
                latent_channels=codec.latent_shape[0],
                proprio_dim=clips.spec.proprio_dim,
            )
        # What predicts the state, and what finds it.
        state = _state_model(config, clips, rows) if config.state or config.found else None
        model = WorldModel(codec, backbone, success, clips.spec, state, horizon=config.horizon)
        if config.found:
            model.finder = new_finder(clips, rows)
        if model.imagines_frames:
            model.inverse = _inverse_dynamics(model)
        add_discriminator(config, model)
    model.env = clips.env
    model.proprio_mean.copy_(clips.proprio[rows].mean(0))
    model.proprio_std.copy_(clips.proprio[rows].std(0).clamp_min(1e-3))
    return model


def _codec_and_backbone(
    config: WorldTrainConfig, clips: Clips, rows: Tensor
) -> tuple[Codec, Backbone]:
    """The small networks with fresh weights, or the pretrained ones of ``config.wan``."""
    views = len(clips.images)
    height, width = next(iter(clips.spec.cameras.values()))
    dims = {
        "action_dim": clips.spec.action_dim,
        "horizon": config.horizon,
        "proprio_dim": clips.spec.proprio_dim,
    }
    if config.wan:
        from embodyrl.world_models.nets.pretrained.load import load_wan

        size = (height, width)
        return load_wan(config.wan, views, size, stochastic=config.stochastic, **dims)
    codec = FrameCodec(views, height, width, config.latent_channels, config.channels)
    median = clips.frames(rows[:: max(1, len(rows) // 500)]).median(dim=0).values
    codec.get_buffer("background").copy_(median.permute(0, 3, 1, 2).float() / 255.0)
    latent_channels, latent_rows, latent_columns = codec.latent_shape
    backbone = ChunkTransformer(
        num_views=views,
        latent_channels=latent_channels,
        rows=latent_rows,
        columns=latent_columns,
        width=config.width,
        layers=config.layers,
        heads=config.heads,
        stochastic=config.stochastic,
        body_dim=_full_state_dim(clips, config) if config.state or config.found else 0,
        **dims,
    )
    return codec, backbone


def continue_model(config: WorldTrainConfig, clips: Clips) -> WorldModel:
    """The model of ``config.init``, to learn from more data, and perhaps with new parts.

    New parts start so that the model predicts at first what it predicted before.

    Raises:
        UserError: the data do not fit it.
    """
    model = WorldModel.load(config.init)
    check_compatible(model.spec, clips.spec)
    # Whether it imagines frames cannot change.
    if config.frames is not None and config.frames != model.imagines_frames:
        raise UserError(
            f"{config.init} has {'' if model.imagines_frames else 'no '}frames, and that stays so: "
            "leave frames out, or train without init."
        )
    if not model.imagines_frames:
        why = f"{config.init} has no frames (it was trained with frames=false)"
        refuse_unread(config, "world", OF_FRAMES, why)
    read = model.state is not None and model.finder is None
    if read and model.spec.layout != clips.spec.layout:
        raise UserError(
            f"{config.init} and the data disagree on which numbers of the simulator's state are "
            "hand and objects (EnvSpec.layout): one of them is of an older version. Collect the "
            "data again, or train without init."
        )
    new_settings: dict[str, Any] = {}
    if config.stochastic and not model.stochastic:
        new_settings["stochastic"] = True
    with keep_random_state():
        torch.manual_seed(config.seed)
        if config.state and model.state is None:
            frames = torch.arange(len(clips))[~clips.held_out(config.held_out)]
            model.state = _state_model(config, clips, frames)
            new_settings["body_dim"] = _full_state_dim(clips, config)
        if model.imagines_frames:
            model.inverse = model.inverse or _inverse_dynamics(model)
        add_discriminator(config, model)
        if new_settings:
            old = model.backbone
            new = type(old)(**{**old.config, **new_settings})
            new.load_state_dict(old.state_dict(), strict=False)  # what it lacks begins at zero
            model.backbone = new
    return model.train()


def what_state(config: WorldTrainConfig, clips: Clips) -> tuple[bool, bool]:
    """Whether the model is to predict the simulator's state, and whether one that it finds.

    Raises:
        UserError: it is to predict the simulator's, but the data do not hold it; or the model of
            ``init`` has another kind of state.
    """
    if config.init:
        return _state_of_init(config, clips)
    # The simulator's, where the data hold it; otherwise one is found.
    read = config.state
    if read is None:
        read = not (config.wan or config.found) and clips.privileged is not None
    if read and clips.privileged is None:
        raise UserError(NO_STATE)
    found = config.found
    if found is None:
        found = not read and not config.wan and config.state is not False
    return read, found


NO_STATE = (
    "Not all frames of the data hold the simulator's state, so a world model cannot learn to "
    "predict it. `embodyrl collect` records it in simulators that give one. Without it, train a "
    "new model that finds one in the pictures (leave state out), or one with none (state=false)."
)


def _state_of_init(config: WorldTrainConfig, clips: Clips) -> tuple[bool, bool]:
    """``what_state`` of a model whose training continues."""
    has_found = (Path(config.init) / "finder").exists()
    has_read = (Path(config.init) / "state").exists() and not has_found
    # What kind of state it has cannot change.
    if has_read and config.state is False:
        raise UserError(
            f"{config.init} predicts the simulator's state: leave state=false out, or train "
            "without init."
        )
    if (has_found and (config.state is not None or config.found is False)) or (
        config.found and not has_found
    ):
        kind = "a state that it finds in pictures" if has_found else "no state found in pictures"
        raise UserError(
            f"{config.init} has {kind}, and that stays so: leave state and found out, or train "
            "without init."
        )
    read = has_read or bool(config.state)
    if read and clips.privileged is None:
        raise UserError(NO_STATE)
    return read, has_found


def new_finder(clips: Clips, rows: Tensor) -> Finder:
    """A finder with fresh weights, which knows what is usual in proprioception and pictures."""
    finder = Finder(clips.spec.proprio_dim, clips.spec.cameras)
    finder.localiser.fit_inputs(clips.obs(rows[:: max(1, len(rows) // MEDIAN_OF)]))
    return finder


def _state_model(config: WorldTrainConfig, clips: Clips, rows: Tensor) -> StateModel:
    """A fresh state model; where the state is yet to be found, its linear part is fitted later."""
    state = StateModel(
        _full_state_dim(clips, config),
        clips.spec.action_dim,
        members=config.state_members,
        layout=() if config.found else clips.spec.layout,
        judges=config.judges,
        found=PLACES if config.found else 0,
        prospects=config.prospects,
    )
    if not config.found:
        fit_linear(state, clips, rows)
    return state


def fit_linear(state: StateModel, clips: Clips, rows: Tensor) -> None:
    """Fits normalisation and linear part of a state model to those of ``rows`` with a next one."""
    rows = rows[rows + 1 < clips.end[rows]]
    before = clips.full_state(rows)
    after = clips.full_state(rows + 1)
    assert before is not None and after is not None
    device = state.mean.device
    state.fit_linear(before.to(device), clips.actions[rows].to(device), after.to(device))


def add_discriminator(config: WorldTrainConfig, model: WorldModel) -> None:
    """Gives a model what ``faithful_steps`` train, if it does not have it; or refuses to.

    A model whose discriminator is not trained on loses it: it knows the networks of before.

    Raises:
        UserError: there are not several networks to tell from the truth.
    """
    if not config.faithful_steps:
        model.discriminator = None
        return
    if model.state is None or len(model.state.members) < 2:
        raise UserError(
            f"faithful_steps is {config.faithful_steps}, but the model has no several networks of "
            "the state to choose among. Set state_members=5, without state=false and without init "
            "of such a model, or leave faithful_steps out."
        )
    if model.discriminator is None:
        body = model.state.config["body_dim"]
        model.discriminator = Discriminator(body, model.spec.action_dim)


def _inverse_dynamics(model: WorldModel) -> InverseDynamics:
    channels, rows, columns = model.codec.latent_shape
    views = len(model.spec.cameras)
    return InverseDynamics(views, channels, rows, columns, model.spec.action_dim)


def _full_state_dim(clips: Clips, config: WorldTrainConfig) -> int:
    if config.found:
        return clips.spec.proprio_dim * (1 + PLACES)
    state_dim = 0 if clips.privileged is None else clips.privileged.shape[1]
    return clips.spec.proprio_dim + state_dim
