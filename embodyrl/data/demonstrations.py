"""``Demonstrations``: a data set in memory, served as observations and action chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.data.camera_names import dataset_cameras
from embodyrl.data.conventions import conventions_of
from embodyrl.data.frames import MEMORY_LIMIT, decode_camera
from embodyrl.data.lerobot_read import DatasetFiles, as_flags, open_dataset
from embodyrl.data.meaning_notes import env_notes
from embodyrl.data.resample import Resampled
from embodyrl.data.table_checks import instruction_fault, left_aside, require_sound_tables
from embodyrl.errors import UserError
from embodyrl.functional.hindsight import later_steps
from embodyrl.rollouts.batches import Transitions
from embodyrl.storage.profiles import profile_named
from embodyrl.storage.translation import Translation, translate, within_reach
from embodyrl.types import Conventions, EnvSpec, Obs

INTERVENTION = ("intervention", "is_intervention", "complementary_info.is_intervention")
"""Possible names of the column that says whether a person had taken over; the last is LeRobot's."""


@dataclass
class Statistics:
    """Statistics per dimension over all frames, each (D,) float32.

    q01 and q99 are the 1% and 99% quantiles.
    """

    mean: Tensor
    std: Tensor
    min: Tensor
    max: Tensor
    q01: Tensor
    q99: Tensor

    @classmethod
    def of(cls, x: Tensor) -> Statistics:
        """Of the rows of x (F, D)."""
        rows = x.double().numpy()
        low, high = np.quantile(rows, [0.01, 0.99], axis=0)
        values = [rows.mean(0), rows.std(0), rows.min(0), rows.max(0), low, high]
        return cls(*(torch.from_numpy(np.asarray(v, dtype=np.float32)) for v in values))


class Demonstrations:
    """Frames of all episodes one after the other; a chunk may start at every frame.

    Attributes:
        horizon: C, actions of the chunks that are imitated.
        execute: H, actions of the chunks that are transitions.
        images: camera -> (F, h, w, 3) uint8, in memory or mapped from a file.
        proprio: (F, P) float32.
        actions: (F, A) float32.
        end: (F,) the frame number after the last one of the episode that each frame belongs to.
        instruction: F indices into ``sentences``.
        sentences: the instructions that occur.
        success: (F,) bool, of the episode; True if the data set does not say.
        reward: (F,) float32 of each action; if the data set has none, 1 for the last action of a
            solved episode.
        solved: (F,) bool, the task is solved after this action; if the data set does not say when,
            after the last action of a solved episode.
        init: (F,) the episode's initial state, or -1 if the data set does not say.
        intervention: (F,) bool, a person had taken over; False if the data set does not say.
        privileged: (F, S) float32, the simulator's state; None if the data set does not hold it.
        intervention_weight: how many times as often as others these frames are drawn.
        history: observations that are seen at once, as ``EnvSpec.history``.
        control_mode: what an action means; empty if the data set does not say.
        origin: what embodyrl noted about the data set when it wrote it; empty for others.
        remarks: sentences on what is taken as it is and may not be what was meant, on what was put
            right, and on what was left out.
        no_instruction: a sentence on episodes without an instruction; empty if each has one.
        conventions: of the data set, before its translation into those of an env.
        rate: actions per second of the data set as it was recorded; 0 if it does not say.
        path: of the data set; empty for frames that were given.
    """

    intervention_weight = 1.0
    history = 1

    def __init__(
        self,
        horizon: int,
        images: dict[str, np.ndarray],
        proprio: Tensor,
        actions: Tensor,
        episode: Tensor,
        instruction: Tensor,
        sentences: list[str],
        success: Tensor | None = None,
        init: Tensor | None = None,
        reward: Tensor | None = None,
        solved: Tensor | None = None,
        intervention: Tensor | None = None,
        privileged: Tensor | None = None,
        execute: int = 0,
    ) -> None:
        """See the class for the arguments; with ``execute`` 0, all of ``horizon`` are executed.

        Raises:
            UserError: no frame, or a horizon below 1.
        """
        if horizon < 1 or len(actions) == 0:
            raise UserError(
                "Demonstrations need at least one frame and a horizon of at least 1, but there "
                f"are {len(actions)} frames and the horizon is {horizon}."
            )
        self.horizon = horizon
        self.execute = execute or horizon
        self.images = images
        self.proprio = proprio
        self.actions = actions
        self.instruction = instruction
        self.sentences = sentences
        self.success = (
            success if success is not None else torch.ones(len(actions), dtype=torch.bool)
        )
        self.init = init if init is not None else torch.full((len(actions),), -1)
        # The frames of an episode are contiguous; ``episode`` (F,) numbers the episodes.
        counts = torch.unique_consecutive(episode, return_counts=True)[1]
        self.num_episodes = len(counts)
        self.end = counts.cumsum(0).repeat_interleave(counts)
        last = self.end == torch.arange(1, len(actions) + 1)
        self.reward = reward if reward is not None else (last & self.success).float()
        self.solved = solved if solved is not None else last & self.success
        self.intervention = (
            intervention
            if intervention is not None
            else torch.zeros(len(actions), dtype=torch.bool)
        )
        self.privileged = privileged
        self.control_mode = ""
        self.origin = {}
        self.remarks: list[str] = []
        self.conventions = Conventions()
        self.rate = 0.0
        self.path = ""
        self.no_instruction = ""

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def action_stats(self) -> Statistics:
        """Statistics of the actions."""
        return Statistics.of(self.actions)

    @property
    def proprio_stats(self) -> Statistics:
        """Statistics of the proprioception."""
        return Statistics.of(self.proprio)

    @property
    def frame_weights(self) -> Tensor:
        """(F,) float64, how often each frame is drawn, compared with others."""
        return torch.where(self.intervention, self.intervention_weight, 1.0).double()

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Numbers (count,) of frames, with replacement."""
        if self.intervention_weight == 1.0:
            return torch.randint(len(self), (count,), generator=generator)
        return torch.multinomial(self.frame_weights, count, replacement=True, generator=generator)

    def batch(self, indices: Tensor) -> tuple[Obs, Tensor, Tensor]:
        """Observations and the action chunks that start there.

        Args:
            indices: (B,) frame numbers in [0, len(self)).

        Returns:
            obs: B observations, without privileged state.
            actions: (B, C, A); beyond the episode's end the last action is repeated.
            mask: (B, C) bool, False beyond the episode's end.
        """
        return self._chunks(indices, self.horizon)

    def _chunks(self, indices: Tensor, count: int) -> tuple[Obs, Tensor, Tensor]:
        """``batch`` with chunks of ``count`` actions."""
        indices = indices.cpu()
        # The frames of every chunk, which ends with its episode.
        steps = indices[:, None] + torch.arange(count)
        end = self.end[indices][:, None]
        # What was seen before; at the start of an episode its first frame stands for it.
        first = torch.searchsorted(self.end, end[:, 0])
        obs = None
        for before in reversed(range(self.history)):
            obs = self._seen((indices - before).maximum(first), obs)
        assert obs is not None
        return obs, self.actions[torch.minimum(steps, end - 1)], steps < end

    def _seen(self, indices: Tensor, previous: Obs | None) -> Obs:
        """What was seen in frames (B,), after ``previous``."""
        rows = indices.numpy()
        return Obs(
            images={name: torch.from_numpy(frames[rows]) for name, frames in self.images.items()},
            proprio=self.proprio[indices],
            instruction=[self.sentences[i] for i in self.instruction[indices].tolist()],
            previous=previous,
        )

    def later_proprio(
        self, indices: Tensor, ends: int, on_the_way: Sequence[float] = ()
    ) -> tuple[Tensor, Tensor]:
        """How the episodes of frames went on: proprioception 0, H, 2H, ... actions before the end.

        Args:
            indices: (B,) frames.
            ends: so many. In a short episode its first frame stands for those before it.
            on_the_way: and at these shares of the way from the frame to the last one.

        Returns:
            (B, J, P), the last first, and whether the episode was solved (B,).
        """
        indices = indices.cpu()
        end = self.end[indices]
        first = torch.searchsorted(self.end, end)  # the first frame of those with the same end
        places = later_steps(
            indices, first, end - 1, ends=ends, apart=self.execute, on_the_way=on_the_way
        )
        return self.proprio[places], self.success[indices]

    def transitions(
        self, size: int = 1024, weights: Tensor | None = None, *, in_turn: bool = False
    ) -> Iterator[Transitions]:
        """Every chunk as a transition for off-policy algorithms, ``size`` at a time.

        Each is drawn as often as its first frame, by ``weights`` (F,), which are ``frame_weights``
        if none are given.

        A chunk may start at each frame before success. A chunk in which the task is solved ends
        there and is terminated, whatever was recorded after it. The observation after the last
        action of an episode is not in the data. So a chunk that reaches the end of a failed episode
        cannot be bootstrapped, and is left out.

        With ``in_turn`` they are as a policy plays them: each chunk begins where the one before
        ended, failed episodes have their last chunk (truncated, and followed by what was seen
        last), and each names its episode.
        """
        weights = self.frame_weights if weights is None else weights
        # The frames from which on the task has been solved.
        frame = torch.arange(len(self))
        solved = self.solved | (self.success & (frame + 1 == self.end))
        so_far = solved.cumsum(0) - solved.long()
        first = torch.ones_like(solved)
        first[1:] = self.end[1:] != self.end[:-1]
        past = so_far > so_far[torch.where(first, frame, 0).cummax(0).values]
        # Where chunks begin.
        begins = ~past
        if in_turn:
            begins &= (frame - torch.searchsorted(self.end, self.end)) % self.execute == 0
        for index in frame[begins].split(size):
            # Which actions of the chunk count, and whether it ends in success.
            steps = index[:, None] + torch.arange(self.execute)
            end = self.end[index]
            rows = torch.minimum(steps, end[:, None] - 1)
            valid = (steps < end[:, None]) & ~past[rows]
            over = (solved[rows] & valid).any(1)
            # Leave out chunks that cannot be bootstrapped.
            keep = over | (index + self.execute < end) | in_turn
            if not keep.any():
                continue
            index, rows, valid, over, end = (x[keep] for x in (index, rows, valid, over, end))
            obs, actions, _ = self._chunks(index, self.execute)
            after, _, _ = self._chunks(torch.minimum(index + self.execute, end - 1), 1)
            reward = torch.where(valid, self.reward[rows], 0.0)
            yield Transitions(
                obs,
                actions,
                reward,
                valid,
                over,
                ~over & (index + self.execute >= end),
                after,
                episode=end if in_turn else None,
                success=over if in_turn else None,
                weight=weights[index].float(),
            )

    @classmethod
    def load(
        cls,
        path: str | Path,
        horizon: int,
        *,
        execute: int = 0,
        spec: EnvSpec | None = None,
        skip: Sequence[int] = (),
        episodes: int = 0,
        keep: str = "success",
        cameras: Mapping[str, str] | None = None,
        profile: str = "",
        convention: Mapping[str, Any] | None = None,
        rate: str = "keep",
        state: str = "",
        action: str = "",
        revision: str | None = None,
        memory_limit: int = MEMORY_LIMIT,
        pictures: bool = True,
    ) -> Demonstrations:
        """Reads a LeRobotDataset (v2.0, v2.1 or v3), of embodyrl or of others.

        Args:
            path: folder, or id on the Hugging Face hub.
            horizon: C.
            execute: H; 0 for all of C.
            spec: of the env that the policy is for; the data must fit it, and pictures are resized
                to its cameras.
            skip: episodes that are left out, whatever is wrong with them.
            episodes: use only the first so many of those that are kept; 0 means all.
            keep: ``"success"`` leaves failed episodes out, if the data set says which failed;
                ``"all"`` keeps them.
            cameras: name of the policy's camera -> key in the data set; see ``dataset_cameras``.
            profile: family of the data set (``profiles.PROFILES``).
            convention: fields of ``Conventions`` that are known better than the data set and the
                profile say. With ``spec``, what differs from the env is translated.
            rate: ``"resample"`` brings episodes to the rate of ``spec``; ``"keep"`` takes the
                frames as they are.
            state: key of the proprioception; by default the profile's.
            action: key of the actions; by default the profile's.
            revision: of a hub id.
            memory_limit: see ``decode_camera``.
            pictures: False leaves the pictures undecoded, to see whether the data fit.

        Raises:
            UserError: no such data set or key, or it does not fit ``spec``; the message names what
                is there.
        """
        if keep not in ("success", "all"):
            raise UserError(f"keep is {keep!r}; it must be 'success' or 'all'.")
        if episodes < 0:
            raise UserError(f"episodes is {episodes}; it must be 0 (all) or a number of episodes.")
        # Find the columns, and read them.
        family = profile_named(profile)
        state = state or family.state
        action = action or family.action
        data = open_dataset(path, revision=revision)
        wanted = ("success", "next.success", "next.reward", "init", "privileged", *INTERVENTION)
        optional = [c for c in wanted if c in data.features]
        numeric = [
            k for k, f in data.features.items() if f["dtype"] not in ("video", "image", "string")
        ]
        data = open_dataset(
            path,
            [data.need(state, numeric), data.need(action, numeric), *optional],
            revision=revision,
            skip=skip,
        )
        require_sound_tables(data)
        # Choose cameras and episodes.
        chosen = dataset_cameras(data, spec, cameras, family.cameras)
        success = _episode_success(data)
        rows = _rows(data, success, keep, episodes)
        columns = {name: values[rows] for name, values in data.columns.items()}
        # What they mean, and at which rate.
        meaning = conventions_of(data, family.conventions, convention or {})
        hz = family.rate or _rate(data)
        change = Translation()
        cut: list[str] = []
        if spec is not None:
            _check_dims(spec, columns[action], columns[state], str(path))
            change = translate(meaning, spec, f"the data set {path}")
            columns[action], cut = within_reach(
                change.of_actions(columns[action], columns["episode_index"], columns[state]), change
            )
        if spec is not None and rate == "resample" and hz and hz != spec.control_hz:
            kind = spec.conventions.actions or meaning.actions
            plan = Resampled.plan(columns["episode_index"], hz, spec.control_hz)
            columns = _resampled(columns, plan, (state, action, kind), str(path))
            rows = rows[plan.rows]
        ids = sorted(set(columns["task_index"].tolist()))
        taken_over = [as_flags(columns[c], c) for c in INTERVENTION if c in columns]
        demos = cls(
            horizon,
            images={},
            proprio=_float(columns[state]),
            actions=_float(columns[action]),
            episode=torch.from_numpy(columns["episode_index"].copy()),
            instruction=torch.from_numpy(np.searchsorted(ids, columns["task_index"])),
            sentences=[data.tasks[i] for i in ids],
            success=torch.from_numpy(success[rows].copy()),
            init=torch.from_numpy(columns["init"].astype(np.int64)) if "init" in columns else None,
            reward=_float(columns["next.reward"])[:, 0] if "next.reward" in columns else None,
            solved=torch.from_numpy(as_flags(columns["next.success"], "next.success"))
            if "next.success" in columns
            else None,
            intervention=torch.from_numpy(taken_over[0]) if taken_over else None,
            privileged=_float(columns["privileged"]) if "privileged" in columns else None,
            execute=execute,
        )
        # Check them before the pictures are decoded, which takes time.
        demos.control_mode = data.origin.get("control_mode", "")
        demos.origin = data.origin
        demos.conventions = meaning
        demos.rate = hz
        demos.path = str(path)
        demos.remarks = [*data.corrections, *_left_out(data, success, keep)]
        demos.no_instruction = instruction_fault(data)
        if spec is not None:
            demos.history = spec.history
            demos.check(spec, str(path))
            whole = data.columns
            actions = change.of_actions(whole[action], whole["episode_index"], whole[state])
            seen = dataclasses.replace(data, columns={**data.columns, action: actions})
            unnamed = {} if cameras or profile else chosen
            demos.remarks += env_notes(seen, spec, unnamed, hz, resampled=rate == "resample")
            if words := change.said():
                demos.remarks.append(f"{path} is translated for {spec.name}: {words}.")
            demos.remarks += [f"{path}: {text}" for text in cut]
        for name, key in chosen.items() if pictures else ():
            size = spec.cameras[name] if spec is not None else None
            demos.images[name] = decode_camera(
                data, key, rows, size, change=change, memory_limit=memory_limit
            )
        return demos

    def check(self, spec: EnvSpec, name: str = "data") -> None:
        """Checks that a policy for ``spec`` can learn from these data.

        Raises:
            UserError: the dims or the control mode differ, actions are outside of [-1, 1], or
                numbers are not finite.
        """
        _check_dims(spec, self.actions, self.proprio, name)
        if self.control_mode and self.control_mode != spec.control_mode:
            raise UserError(
                f"The actions of the data set {name} are {self.control_mode}; {spec.name} takes "
                f"{spec.control_mode}."
            )
        for what, values in (("actions", self.actions), ("proprio", self.proprio)):
            if not torch.isfinite(values).all():
                raise UserError(f"The {what} of the data set {name} hold NaN or infinity.")
        if (largest := float(self.actions.abs().max())) > 1.0 + 1e-4:
            raise UserError(
                f"The actions of the data set {name} reach {largest:.3g}, but {spec.name} takes "
                "actions in [-1, 1]: the units differ. Rescale the actions to those of the env's "
                "control mode."
            )


def _rate(data: DatasetFiles) -> float:
    """Actions per second; frames per second are whole numbers, and the env's rate need not be."""
    fps = float(data.info.get("fps") or 0)
    exact = float(data.origin.get("control_hz") or 0)
    return exact if max(1, round(exact)) == fps else fps


def _check_dims(spec: EnvSpec, actions: Any, proprio: Any, name: str) -> None:
    """Raises a ``UserError`` unless actions (F, A) and proprio (F, P) have the dims of an env."""
    for what, values, wanted in (
        ("action dims", actions, spec.action_dim),
        ("proprio dims", proprio, spec.proprio_dim),
    ):
        found = values[:1].size if isinstance(values, np.ndarray) else values.shape[1]
        if found != wanted:
            raise UserError(
                f"The data set {name} has {found} {what}, but {spec.name} has {wanted}."
            )


def _resampled(
    columns: dict[str, np.ndarray], plan: Resampled, names: tuple[str, str, str], path: str
) -> dict[str, np.ndarray]:
    """All columns at another rate; ``names`` are the state, the action and the action's kind."""
    state, action, kind = names
    flags = [name for name in ("next.success", "next.done") if name in columns]
    changed = {
        state: plan.of_state(columns[state]),
        action: plan.of_actions(columns[action], kind, path),
        **{name: plan.of_flags(as_flags(columns[name], name)) for name in flags},
    }
    if "next.reward" in columns:
        changed["next.reward"] = plan.of_rewards(columns["next.reward"])
    return {name: values[plan.rows] for name, values in columns.items()} | changed


def _float(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values.reshape(len(values), -1).astype(np.float32))


def _episode_success(data: DatasetFiles) -> np.ndarray:
    """(F,) bool, whether each frame's episode was solved; True if the data set does not say."""
    columns = data.columns
    episode = data.columns["episode_index"]
    name = next((n for n in ("success", "next.success") if n in columns), None)
    if name is None:
        return np.ones(len(episode), dtype=bool)
    # An episode is solved if one of its frames says so.
    _, number = np.unique(episode, return_inverse=True)
    solved = np.zeros(number.max() + 1, dtype=bool)
    np.logical_or.at(solved, number, as_flags(columns[name], name))
    return solved[number]


def _left_out(data: DatasetFiles, success: np.ndarray, keep: str) -> Iterator[str]:
    """Sentences on what of a data set is not used."""
    if data.skip:
        listed = ", ".join(map(str, sorted(data.skip)))
        yield f"Left out of {data.path}: the episodes {listed} (data.skip)."
    failed = np.setdiff1d(data.columns["episode_index"][~success], list(data.skip))
    if keep == "success" and len(failed):
        yield (
            f"Left out of {data.path}: {len(failed)} of {len(data.episodes)} episodes, which failed "
            "(data.keep=success)."
        )
    yield from left_aside(data)


def _rows(data: DatasetFiles, success: np.ndarray, keep: str, episodes: int) -> np.ndarray:
    """Numbers of the frames of the episodes that are used."""
    episode = data.columns["episode_index"]
    mask = success if keep == "success" else np.ones(len(episode), dtype=bool)
    mask = mask & ~np.isin(episode, list(data.skip))
    kept = np.unique(episode[mask])
    if len(kept) == 0 and len(data.skip) == len(data.episodes):
        raise UserError(f"data.skip leaves out all {len(data.skip)} episodes of {data.path}.")
    if len(kept) == 0:
        raise UserError(
            f"None of the {len(np.unique(episode))} episodes of {data.path} is marked as a "
            "success. To imitate failed ones too, or those of a task without a success flag, set "
            "data.keep=all."
        )
    if episodes > len(kept):
        raise UserError(
            f"{episodes} episodes were asked for, but {data.path} has only {len(kept)} of that "
            "kind."
        )
    if episodes:
        mask = mask & np.isin(episode, kept[:episodes])
    return np.flatnonzero(mask)
