"""``ExecutableReflector``: another reflector, silent about frames that show what the robot does not do.

A video model may show a hand that jumps, and a reflector a success after it. Inverse dynamics
infers the actions from the frames alone; where they are larger or more abrupt than those of real
episodes look, nothing can be judged: NaN, for which an env truncates and masks the dream. EVA
rewards a video model by the like of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.world_models.model import NO_INVERSE, WorldModel
from embodyrl.world_models.reflectors.base import Reflector, check_window


@dataclass(frozen=True)
class ExecutableConfig:
    """Settings in ``reflector.json``."""

    model: str
    """Folder of the world model whose codec and inverse dynamics look at the frames."""
    reflector: str
    """Folder of the reflector that judges success."""
    actions: int = 0
    """Between two frames; 0 means a chunk of the model, as in its dreams."""


class ExecutableReflector:
    """See the module; ``Reflector`` for the interface.

    Args:
        config: see there.
        judge: what ``config.reflector`` names.
        device: where the nets run.

    Raises:
        UserError: the model has no inverse dynamics, or the reflector sees too few frames to tell
            moves.
    """

    def __init__(self, config: ExecutableConfig, judge: Reflector, device: str = "cpu") -> None:
        self.model = model = WorldModel.load(config.model, device)
        if model.inverse is None:
            raise UserError(NO_INVERSE)
        if judge.window < 3:
            raise UserError(
                f"A move takes two frames after the first, and {config.reflector} sees "
                f"{judge.window - 1}."
            )
        self._judge = judge
        self._views = tuple(model.spec.cameras)
        self.window = judge.window
        self.calibration = judge.calibration
        self.cameras = tuple(dict.fromkeys((*judge.cameras, *self._views)))
        self._share = (config.actions or model.horizon) / model.horizon

    @torch.no_grad()
    def judge(
        self, frames: Mapping[str, Tensor], instruction: list[str], new: int = 0
    ) -> Float[Tensor, "n t"]:
        """See ``Reflector``."""
        n, t, _ = check_window(self, frames, instruction, new)
        prob = self._judge.judge(frames, instruction, new).clone()
        seen = torch.stack([frames[name][:, 1:] for name in self._views], dim=2).flatten(0, 1)
        latents = (
            self.model.codec.encode(seen.to(self.model.device)).float().unflatten(0, (n, t - 1))
        )
        before = latents[:, :-1]
        after = latents[:, 1:]
        assert self.model.inverse is not None
        share = torch.full((n * (t - 2),), self._share, device=self.model.device)
        moves = (
            self.model.inverse(before.flatten(0, 1), after.flatten(0, 1), share)
            .float()
            .unflatten(0, (n, t - 2))
        )
        moving = (
            (before != after).flatten(2).any(-1)
        )  # a window that begins before its episode repeats the first frame
        sound = self.model.inverse.executable(moves, moving) | ~moving
        prob[:, 2:][~sound.cpu()] = torch.nan
        return prob
