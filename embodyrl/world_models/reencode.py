"""Demonstrations as a dream would show them, so that a policy knows the pictures that it will dream in."""

from __future__ import annotations

import copy

import numpy as np
import torch

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.world_models.model import WorldModel


@torch.no_grad()
def seen_in_dreams(demos: Demonstrations, folder: str) -> Demonstrations:
    """The same episodes, their pictures encoded and decoded by a world model's codec.

    Args:
        demos: with the cameras that the model was trained on.
        folder: of the model.

    Raises:
        UserError: there is no world model, or its cameras are others.
    """
    model = WorldModel.load(folder)
    sizes = {name: tuple(images.shape[1:3]) for name, images in demos.images.items()}
    if sizes != (wanted := {name: tuple(size) for name, size in model.spec.cameras.items()}):
        raise UserError(
            f"{folder} dreams of the cameras {wanted}, but the demonstrations have {sizes}."
        )
    shown = {name: np.empty(demos.images[name].shape, np.uint8) for name in wanted}
    for rows in torch.arange(len(demos)).split(256):
        frames = [
            torch.from_numpy(np.ascontiguousarray(demos.images[name][rows.numpy()]))
            for name in wanted
        ]
        pixels = model.codec.decode(model.codec.encode(torch.stack(frames, dim=1)))
        for view, name in enumerate(wanted):
            shown[name][rows.numpy()] = pixels[:, view].numpy()
    other = copy.copy(demos)
    other.images = dict(shown)
    return other
