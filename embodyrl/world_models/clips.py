"""``Clips``: recorded episodes in memory, from which a world model learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.storage.env_spec import spec_from_json
from embodyrl.types import EnvSpec, Obs


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
        end: (F,) number of the frame after its last one.
        sentence: (F,) index into ``sentences``.
        sentences: instructions.
        init: (F,) initial state of the episode, -1 where unknown.
        spec: of the real env, as far as the data say.
        env: that env's config as plain data; empty for data that embodyrl did not record.
        weight: (F,) how often each frame counts in training.
        latents: (F, V, c, y, x) half, once they have been computed.
        privileged: (F, S) the simulator's state; None if a data set does not hold it. Where the
            model finds its state in pictures (``Finder``), the places that it found.
        picture: (F,) the row of ``images`` of each frame; None if that is its own number.
        colours: (F, 2, 3) gain and offset of red, green and blue, in units of their range; None
            leaves the colours unchanged.
        succeeded: (F,) bool, the episode was solved in the end; None takes it from ``solved``.
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
    succeeded: Tensor | None = None

    def __post_init__(self) -> None:
        if self.succeeded is None:
            counts = torch.diff(self.starts, append=torch.tensor([len(self)]))
            ever = [part.any() for part in self.solved.split(counts.tolist())]
            self.succeeded = torch.tensor(ever).repeat_interleave(counts)

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
        parts = [load_demonstrations(path, 1, spec=spec, keep="all") for path in paths]
        _check_alike(paths, parts)
        first = parts[0]
        # Frames are numbered through all data sets: where each episode starts and ends.
        offsets = np.cumsum([0, *(len(part) for part in parts)])
        end = torch.cat([part.end + int(o) for part, o in zip(parts, offsets, strict=False)])
        begins = torch.cat([torch.zeros(1, dtype=torch.long), end[:-1]])
        number = torch.arange(len(end))
        start = torch.where(number == begins, number, 0).cummax(0).values
        # The data say whether an action solved the task; that shows in the frame after it.
        solved_by_action = torch.cat([part.solved for part in parts])
        solved = torch.zeros_like(solved_by_action)
        solved[1:] = solved_by_action[:-1] & (number[1:] != start[1:])
        # One list of instructions for all.
        sentences = sorted({s for part in parts for s in part.sentences})
        index = [torch.tensor([sentences.index(s) for s in part.sentences]) for part in parts]
        counts = weights or [1] * len(parts)
        states = [part.privileged for part in parts if part.privileged is not None]
        return cls(
            images={name: _joined([part.images[name] for part in parts]) for name in first.images},
            proprio=torch.cat([part.proprio for part in parts]),
            actions=torch.cat([part.actions for part in parts]),
            solved=solved,
            start=start,
            end=end,
            sentence=torch.cat([i[part.instruction] for i, part in zip(index, parts, strict=True)]),
            sentences=sentences,
            init=torch.cat([part.init for part in parts]),
            spec=spec or _spec(paths[0], first),
            env=first.origin.get("config", {}),
            weight=torch.cat(
                [torch.full((len(p),), w) for p, w in zip(parts, counts, strict=True)]
            ),
            privileged=torch.cat(states) if len(states) == len(parts) else None,
            succeeded=torch.cat([part.success for part in parts]),
        )

    @property
    def starts(self) -> Tensor:
        """(E,) numbers of the episodes' first frames."""
        return (self.start == torch.arange(len(self))).nonzero().flatten()

    def held_out(self, share: float) -> Tensor:
        """(F,) bool: frames of episodes kept from training, evenly spread over tasks and data.

        Every so many episodes one is kept, where the episodes of a task stand together: tasks that
        take turns in the data do not fall into step with the count.
        """
        every = max(2, round(1 / share))
        starts = self.starts
        order = self.sentence[starts].argsort(stable=True)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        kept = place % every == every - 1  # (E,)
        # From episodes to their frames.
        begins = torch.zeros(len(self), dtype=torch.long)
        begins[starts] = 1
        return kept[begins.cumsum(0) - 1]

    def frames(self, rows: Tensor) -> UInt8[Tensor, "b v h w 3"]:
        """The frames of ``rows``, the cameras in the order of ``images``."""
        index = (rows if self.picture is None else self.picture[rows]).numpy()
        views = [np.ascontiguousarray(images[index]) for images in self.images.values()]
        frames = torch.stack([torch.from_numpy(view) for view in views], dim=1)
        if self.colours is None:
            return frames
        gain, offset = self.colours[rows].view(-1, 2, 1, 1, 1, 3).unbind(1)
        return (frames * gain + 255.0 * offset).round().clamp(0, 255).to(torch.uint8)

    def obs(self, rows: Tensor) -> Obs:
        """What a policy would see in ``rows``, without the simulator's state."""
        frames = self.frames(rows)
        images = {name: frames[:, view] for view, name in enumerate(self.images)}
        sentences = [self.sentences[i] for i in self.sentence[rows].tolist()]
        return Obs(images, self.proprio[rows], sentences)

    def full_state(self, rows: Tensor) -> Tensor | None:
        """(..., P + S): proprio and the simulator's state; None if the data do not hold it."""
        if self.privileged is None:
            return None
        return torch.cat([self.proprio[rows], self.privileged[rows]], dim=-1)

    def chunk(self, rows: Tensor, horizon: int) -> Tensor:
        """(B, H, A): the actions from ``rows`` on; the last one of an episode is repeated."""
        steps = rows[:, None] + torch.arange(horizon)
        return self.actions[torch.minimum(steps, self.end[rows][:, None] - 1)]


def _check_alike(paths: Sequence[str], parts: Sequence[Demonstrations]) -> None:
    """Refuses data sets that one model cannot learn from together."""
    first = _properties(parts[0])
    for path, part in zip(paths, parts, strict=True):
        for what, value in _properties(part).items():
            if value != first[what]:
                raise UserError(
                    f"The data sets differ in their {what}: {path} has {value}, {paths[0]} has "
                    f"{first[what]}."
                )
    layouts = {
        path: _layout(part)
        for path, part in zip(paths, parts, strict=True)
        if part.privileged is not None
    }
    for path, layout in layouts.items():
        other = next(iter(layouts))
        if layout != layouts[other]:
            raise UserError(
                f"{path} and {other} disagree on which numbers of the simulator's state are hand "
                "and objects (EnvSpec.layout): one of them was collected by an older version. "
                "Collect it again."
            )
    if not parts[0].images:
        raise UserError(f"{paths[0]} has no camera, and a world model dreams in pictures.")
    sizes = {images.shape[1:3] for images in parts[0].images.values()}
    if len(sizes) > 1:
        raise UserError(
            f"The cameras of {paths[0]} differ in size ({sizes}); a world model needs cameras of "
            "one size."
        )


def _properties(data: Demonstrations) -> dict[str, Any]:
    """What must be equal in all data sets."""
    return {
        "cameras": sorted(data.images),
        "picture sizes": {images.shape[1:] for images in data.images.values()},
        "action dims": data.actions.shape[1],
        "proprio dims": data.proprio.shape[1],
        "control mode": data.control_mode,
    }


def _spec(path: str, data: Demonstrations) -> EnvSpec:
    """The env's spec as recorded, or what can be inferred from the data."""
    if "spec" in data.origin:
        return spec_from_json(data.origin["spec"])
    lengths = torch.diff(torch.unique(data.end), prepend=torch.zeros(1, dtype=torch.long))
    return EnvSpec(
        name=str(path),
        num_envs=1,
        action_dim=data.actions.shape[1],
        proprio_dim=data.proprio.shape[1],
        control_mode=data.control_mode or "unknown",
        control_hz=0.0,
        max_episode_steps=int(lengths.max()),
        cameras={name: (int(v.shape[1]), int(v.shape[2])) for name, v in data.images.items()},
    )


def _layout(data: Demonstrations) -> tuple[tuple[str, int, int], ...]:
    return spec_from_json(data.origin["spec"]).layout if "spec" in data.origin else ()


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
