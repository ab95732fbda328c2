"""``Reflector``: judges camera frames; and how its probabilities become successes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embodyrl.errors import UserError, did_you_mean
from embodyrl.world_models.reflectors.calibration import Calibration


class Reflector(Protocol):
    """Sees camera frames and an instruction, and gives the probability that the task is solved.

    Attributes:
        window: T, how many frames it sees: the first of the episode, then the last T-1 (see
            ``window_rows``).
        cameras: those that it uses.
        calibration: turns its probabilities into successes; ``Calibration()`` until it is fitted.
    """

    window: int
    cameras: tuple[str, ...]
    calibration: Calibration

    def judge(
        self, frames: Mapping[str, Tensor], instruction: list[str], new: int = 0
    ) -> Float[Tensor, "n t"]:
        """The probability that the task is solved as of each frame.

        Args:
            frames: camera -> (N, T, h, w, 3) uint8. Cameras that it does not use are ignored.
            instruction: N sentences.
            new: how many of the last frames are to be judged; the others may be NaN, which saves
                time where each frame costs a question. 0 means all.

        Returns:
            (N, T) float32 in [0, 1] on the CPU, not calibrated; NaN where it could not judge. An
            env truncates and masks such a row, so that a missing answer counts neither as failure
            nor as success. The first column, which the others are compared with, may always be
            NaN.

        Raises:
            UserError: a camera is missing or the shapes do not fit. A server that does not answer
                raises nothing.
        """
        ...


def check_window(
    reflector: Reflector, frames: Mapping[str, Tensor], instruction: list[str], new: int
) -> tuple[int, int, int]:
    """Refuses frames that ``judge`` cannot take.

    Returns:
        N, T and the number of columns to be judged.

    Raises:
        UserError: see ``Reflector.judge``.
    """
    if missing := [name for name in reflector.cameras if name not in frames]:
        raise UserError(
            f"The reflector needs the camera {missing[0]!r}, which these frames lack. "
            f"{did_you_mean(missing[0], frames)}"
        )
    n = len(instruction)
    t = reflector.window
    for name in reflector.cameras:
        shape = tuple(frames[name].shape)
        fits = len(shape) == 5 and shape[:2] == (n, t) and shape[4] == 3
        if not fits or frames[name].dtype != torch.uint8:
            raise UserError(
                f"A reflector with a window of {t} takes frames ({n}, {t}, h, w, 3) of uint8 for "
                f"{n} instructions; camera {name!r} gives {shape} of "
                f"{str(frames[name].dtype).removeprefix('torch.')}."
            )
    if not 0 <= new <= t:
        raise UserError(f"The last {new} frames of a window of {t} were asked for.")
    return n, t, new or t


def window_rows(
    frame: Int[Tensor, " b"], first: Int[Tensor, " b"], window: int
) -> Int[Tensor, "b t"]:
    """The frames that a reflector sees: the first of the episode, then the last T-1.

    Where an episode is shorter, the first frame fills the gap.

    Args:
        frame: (B,) numbers of the newest frames, which are to be judged.
        first: (B,) numbers of the first frames of their episodes.
        window: T.

    Returns:
        (B, T) frame numbers.
    """
    recent = frame[:, None] + torch.arange(2 - window, 1, device=frame.device)
    return torch.cat([first[:, None], torch.maximum(recent, first[:, None])], dim=1)


def successes(
    prob: Float[Tensor, "n t"], calibration: Calibration, streak: Int[Tensor, " n"]
) -> tuple[Bool[Tensor, "n t"], Int[Tensor, " n"]]:
    """Success: the calibrated probability has reached the threshold ``hits`` times in a row.

    Args:
        prob: (N, T) as ``judge`` returns it, of consecutive frames that were not counted yet.
        calibration: of the reflector.
        streak: (N,) int64, hits in a row so far; zero at the start of an episode.

    Returns:
        (N, T) bool, and the streaks afterwards. NaN is no hit, and ends a streak.
    """
    hit = calibration.apply(prob) >= calibration.threshold
    columns = []
    for column in hit.unbind(1):
        streak = torch.where(column, streak + 1, 0)
        columns.append(streak >= calibration.hits)
    return torch.stack(columns, dim=1) if columns else hit, streak
