"""``Reflector``: what judges imagined (or real) camera frames, and how its probabilities become successes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embodyrl.errors import UserError, did_you_mean
from embodyrl.world_models.reflectors.calibration import Calibration


class Reflector(Protocol):
    """Looks at camera frames and an instruction and says how probable it is that the task is solved.

    Attributes:
        window: T, how many frames it wants: the first of the episode, then the last T-1 (see
            ``window_rows``).
        cameras: those it looks at.
        calibration: what turns its probabilities into successes; ``Calibration()`` until it was
            fitted.
    """

    window: int
    cameras: tuple[str, ...]
    calibration: Calibration

    def judge(
        self, frames: Mapping[str, Tensor], instruction: list[str], new: int = 0
    ) -> Float[Tensor, "n t"]:
        """How probable it is that the task is solved as of each frame.

        Args:
            frames: camera -> (N, T, h, w, 3) uint8. Cameras it does not look at are ignored.
            instruction: N sentences.
            new: only the last that many frames are wanted; the others may be left NaN, which saves
                time where each frame costs a question. 0 wants all.

        Returns:
            (N, T) float32 in [0, 1] on the CPU, not calibrated; NaN where it could not judge. An
            env truncates and
            masks such a row: an answer that is missing is never taken for a failure, nor for a
                success. The first
            column, which the others are compared with, may be NaN always.

        Raises:
            UserError: a camera is missing or the shapes do not fit; never for a server that does
                not answer.
        """
        ...


def check_window(
    reflector: Reflector, frames: Mapping[str, Tensor], instruction: list[str], new: int
) -> tuple[int, int, int]:
    """Refuses frames that ``judge`` cannot take.

    Returns:
        N, T and how many columns are wanted.

    Raises:
        UserError: see ``Reflector.judge``.
    """
    if missing := [name for name in reflector.cameras if name not in frames]:
        raise UserError(
            f"The reflector looks at the camera {missing[0]!r}, which these frames lack. "
            f"{did_you_mean(missing[0], frames)}"
        )
    n = len(instruction)
    t = reflector.window
    for name in reflector.cameras:
        shape = tuple(frames[name].shape)
        if (
            len(shape) != 5
            or shape[:2] != (n, t)
            or shape[4] != 3
            or frames[name].dtype != torch.uint8
        ):
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
    """Which frames a reflector sees that judges ``frame``: the first, then the last ones, padded with the first.

    Args:
        frame: (B,) numbers of the newest frames.
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
    """Counts a success where the calibrated probability has reached the threshold ``hits`` times in a row.

    Args:
        prob: (N, T) of frames that follow one another and were not counted yet, as ``judge`` gave
            them.
        calibration: of the reflector.
        streak: (N,) int64, hits in a row so far; zero at an episode's start.

    Returns:
        (N, T) bool, and the streaks afterwards. NaN is no hit and ends a streak.
    """
    hit = calibration.apply(prob) >= calibration.threshold
    columns = []
    for column in hit.unbind(1):
        streak = torch.where(column, streak + 1, 0)
        columns.append(streak >= calibration.hits)
    return torch.stack(columns, dim=1) if columns else hit, streak
