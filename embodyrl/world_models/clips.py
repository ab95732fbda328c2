"""``Clips``: recorded episodes in memory, as pairs of a moment and what a chunk of actions made of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.errors import UserError
from embodyrl.storage.checkpoint import spec_from_json
from embodyrl.types import EnvSpec


@dataclass
class Clips:
    """F frames, episode after episode.

    Attributes:
        images: camera -> (F, h, w, 3) uint8 arrays, in memory or mapped from a file; all of one
            size.
        proprio: (F, P).
        actions: (F, A), row t leads from frame t to frame t + 1.
        solved: (F,) bool, the task is solved in this frame.
        start: (F,) number of the first frame of the episode that each belongs to.
        end: (F,) number after its last one.
        sentence: (F,) index into ``sentences``.
        sentences: instructions.
        init: (F,) initial state of the episode, -1 where unknown.
        spec: of the real env, as far as the data says.
        env: that env's config as plain data; empty for a data set of someone else's.
        weight: (F,) how often each frame counts among those that are learned from.
        latents: (F, V, c, y, x) half, once they have been computed.
        privileged: (F, S) the simulator's state; None where a data set does not hold it.
        picture: (F,) the row of ``images`` that each frame is; None where that is its own number.
        colours: (F, 2, 3) gain and offset of its red, green and blue, 1 being their range; None
            leaves them alone.
    """

    images: dict[str, np.ndarray]
    proprio: Tensor
    actions: Tensor
    solved: Tensor
    start: Tensor
    end: Tensor
    sentence: Tensor
    sentences: list[str]
    init: Tensor
    spec: EnvSpec
    env: dict[str, Any]
    weight: Tensor
    latents: Tensor | None = None
    privileged: Tensor | None = None
    picture: Tensor | None = None
    colours: Tensor | None = None

    def __len__(self) -> int:
        return len(self.actions)

    @classmethod
    def load(
        cls, paths: Sequence[str], spec: EnvSpec | None = None, weights: Sequence[int] = ()
    ) -> Clips:
        """Reads LeRobot data sets, failures included.

        Args:
            paths: folders or hub ids; all with the same cameras, dims and control mode.
            spec: what the data must fit, or None.
            weights: how often each of them counts; 1 where none is given.

        Raises:
            UserError: no data, data sets that differ, or cameras of different sizes.
        """
        if not paths:
            raise UserError("A world model learns from recorded episodes: give data=[FOLDER, ...].")
        parts = [Demonstrations.load(path, 1, spec=spec, keep="all") for path in paths]
        first = parts[0]
        for path, part in zip(paths, parts, strict=True):
            for what, mine, theirs in (
                ("cameras", sorted(part.images), sorted(first.images)),
                (
                    "picture sizes",
                    {v.shape[1:] for v in part.images.values()},
                    {v.shape[1:] for v in first.images.values()},
                ),
                ("action dims", part.actions.shape[1], first.actions.shape[1]),
                ("proprio dims", part.proprio.shape[1], first.proprio.shape[1]),
                ("control mode", part.control_mode, first.control_mode),
            ):
                if mine != theirs:
                    raise UserError(
                        f"The data sets differ in their {what}: {path} has {mine}, {paths[0]} has "
                        f"{theirs}."
                    )
        named = [
            (path, _layout(part))
            for path, part in zip(paths, parts, strict=True)
            if part.privileged is not None
        ]
        for path, layout in named:
            if layout != named[0][1]:
                raise UserError(
                    f"{path} and {named[0][0]} name other numbers of the simulator's state as hand "
                    "and objects (EnvSpec.layout): one of them was collected by an older version. "
                    "Collect it anew."
                )
        if not first.images:
            raise UserError(f"{paths[0]} has no camera, and a world model dreams in pictures.")
        if len(sizes := {v.shape[1:3] for v in first.images.values()}) > 1:
            raise UserError(
                f"The cameras of {paths[0]} differ in size ({sizes}); a world model wants them "
                "alike."
            )
        sentences = sorted({s for part in parts for s in part.sentences})
        index = [torch.tensor([sentences.index(s) for s in part.sentences]) for part in parts]
        offsets = np.cumsum([0, *(len(part) for part in parts)])
        end = torch.cat([part.end + int(o) for part, o in zip(parts, offsets, strict=False)])
        begins = torch.cat([torch.zeros(1, dtype=torch.long), end[:-1]])
        number = torch.arange(len(end))
        start = torch.where(number == begins, number, 0).cummax(0).values
        after = torch.cat([part.solved for part in parts])
        solved = torch.zeros_like(after)
        solved[1:] = after[:-1] & (number[1:] != start[1:])
        states = [part.privileged for part in parts if part.privileged is not None]
        return cls(
            {name: _joined([part.images[name] for part in parts]) for name in first.images},
            torch.cat([part.proprio for part in parts]),
            torch.cat([part.actions for part in parts]),
            solved,
            start,
            end,
            torch.cat([i[part.instruction] for i, part in zip(index, parts, strict=True)]),
            sentences,
            torch.cat([part.init for part in parts]),
            spec or _spec(paths[0], first),
            first.origin.get("config", {}),
            torch.cat(
                [
                    torch.full((len(p),), w)
                    for p, w in zip(parts, weights or [1] * len(parts), strict=True)
                ]
            ),
            privileged=torch.cat(states) if len(states) == len(parts) else None,
        )

    @property
    def starts(self) -> Tensor:
        """(E,) numbers of the episodes' first frames."""
        return (self.start == torch.arange(len(self))).nonzero().flatten()

    def held_out(self, share: float) -> Tensor:
        """(F,) bool: frames of the episodes that are kept from training, evenly spread over the data."""
        every = max(2, round(1 / share))
        episode = torch.zeros(len(self), dtype=torch.long)
        episode[self.starts] = 1
        return (episode.cumsum(0) - 1) % every == every - 1

    def frames(self, rows: Tensor) -> UInt8[Tensor, "b v h w 3"]:
        """The frames of ``rows``, the cameras in the order of ``images``."""
        index = (rows if self.picture is None else self.picture[rows]).numpy()
        seen = torch.stack(
            [torch.from_numpy(np.ascontiguousarray(v[index])) for v in self.images.values()], dim=1
        )
        if self.colours is None:
            return seen
        gain, offset = self.colours[rows].view(-1, 2, 1, 1, 1, 3).unbind(1)
        return (seen * gain + 255.0 * offset).round().clamp(0, 255).to(torch.uint8)

    def full_state(self, rows: Tensor) -> Tensor | None:
        """(..., P + S): proprio and the simulator's state, where the data hold it."""
        return (
            None
            if self.privileged is None
            else torch.cat([self.proprio[rows], self.privileged[rows]], dim=-1)
        )

    def chunk(self, rows: Tensor, horizon: int) -> Tensor:
        """(B, H, A): the actions from ``rows`` on; beyond an episode's end the last one is repeated."""
        steps = rows[:, None] + torch.arange(horizon)
        return self.actions[torch.minimum(steps, self.end[rows][:, None] - 1)]


def _spec(path: str, data: Demonstrations) -> EnvSpec:
    """What the data says about the env; of someone else's, what can be seen."""
    if "spec" in data.origin:
        return spec_from_json(data.origin["spec"])
    longest = int(
        torch.diff(torch.unique(data.end), prepend=torch.zeros(1, dtype=torch.long)).max()
    )
    cameras = {name: (int(v.shape[1]), int(v.shape[2])) for name, v in data.images.items()}
    a = data.actions.shape[1]
    p = data.proprio.shape[1]
    return EnvSpec(str(path), 1, a, p, data.control_mode or "unknown", 0.0, longest, cameras)


def _layout(data: Demonstrations) -> tuple[tuple[str, int, int], ...]:
    return spec_from_json(data.origin["spec"]).layout if "spec" in data.origin else ()


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
