"""``ExecutableReflector``: wraps a reflector, and does not judge moves that no robot can make.

A video model may show a hand that jumps, and a reflector may see a success after it. Inverse
dynamics infers the actions from the frames. If they are larger or more abrupt than in real
episodes, the answer is NaN, and an env truncates and masks the dream. EVA rewards a video model in
a similar way.
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
    """Folder of the world model whose codec and inverse dynamics check the frames."""
    reflector: str
    """Folder of the reflector that judges success."""
    actions: int = 0
    """Actions between two frames; 0 means a chunk of the model, as in its dreams."""


class ExecutableReflector:
    """See the module; ``Reflector`` for the interface.

    Args:
        config: see there.
        judge: the reflector of ``config.reflector``.
        device: where the networks run.

    Raises:
        UserError: the model has no inverse dynamics, or the reflector's window is too short to
            show moves.
    """

    def __init__(self, config: ExecutableConfig, judge: Reflector, device: str = "cpu") -> None:
        self.model = model = WorldModel.load(config.model, device)
        model.require_frames()
        if model.inverse is None:
            raise UserError(NO_INVERSE)
        if judge.window < 3:
            raise UserError(
                f"A move needs two frames after the first, but {config.reflector} sees "
                f"{judge.window - 1}. Take a reflector with a window of at least 3."
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
        # Encode all frames but the episode's first.
        views = torch.stack([frames[name][:, 1:] for name in self._views], dim=2).flatten(0, 1)
        latents = self.model.codec.encode(views.to(self.model.device)).float()
        latents = latents.unflatten(0, (n, t - 1))
        # Infer the moves between them.
        before = latents[:, :-1]
        after = latents[:, 1:]
        assert self.model.inverse is not None
        share = torch.full((n * (t - 2),), self._share, device=self.model.device)
        moves = self.model.inverse(before.flatten(0, 1), after.flatten(0, 1), share)
        moves = moves.float().unflatten(0, (n, t - 2))
        # A short episode repeats its first frame, which is no move.
        moving = (before != after).flatten(2).any(-1)
        # Frames after an impossible move are not judged.
        possible = self.model.inverse.executable(moves, moving) | ~moving
        prob[:, 2:][~possible.cpu()] = torch.nan
        return prob
