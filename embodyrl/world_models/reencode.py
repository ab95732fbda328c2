"""Demonstrations as a dream would show them, so that a policy learns from the dream's pictures."""

from __future__ import annotations

import copy

import numpy as np
import torch

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.world_models.model import WorldModel

BATCH = 256


@torch.no_grad()
def reencode(demos: Demonstrations, folder: str) -> Demonstrations:
    """The same episodes with their pictures encoded and decoded by a world model's codec.

    Args:
        demos: with the cameras that the model was trained on.
        folder: of the model.

    Raises:
        UserError: there is no world model, one without frames, or it has other cameras.
    """
    model = WorldModel.load(folder)
    model.require_frames()
    wanted = {name: tuple(size) for name, size in model.spec.cameras.items()}
    found = {name: tuple(images.shape[1:3]) for name, images in demos.images.items()}
    if found != wanted:
        raise UserError(
            f"{folder} dreams of the cameras {wanted}, but the demonstrations have {found}."
        )
    decoded = {name: np.empty(demos.images[name].shape, np.uint8) for name in wanted}
    for batch in torch.arange(len(demos)).split(BATCH):
        rows = batch.numpy()
        views = [np.ascontiguousarray(demos.images[name][rows]) for name in wanted]
        frames = torch.stack([torch.from_numpy(view) for view in views], dim=1)
        pixels = model.codec.decode(model.codec.encode(frames))
        for view, name in enumerate(wanted):
            decoded[name][rows] = pixels[:, view].numpy()
    result = copy.copy(demos)
    result.images = decoded
    return result
