"""RLDS: episodes in TFRecord files, as TensorFlow Datasets writes them (Open X-Embodiment, DROID).

An episode is one record. Each list holds a value for every step:

    steps/action                      A numbers a step
    steps/observation/NAME            numbers, or encoded pictures (PNG, JPEG)
    steps/language_instruction        the instruction
    steps/reward, steps/is_first      one number a step

RLDS says neither the rate nor what an action means: give the first (``--hz``), and look at the second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.data.importers.tfrecord import Feature, read_examples
from embodyrl.data.importers.write import (
    Facts,
    Say,
    UnusableEpisodeError,
    rate_of,
    write_imported,
)
from embodyrl.data.recording import Recording
from embodyrl.errors import UserError
from embodyrl.storage.paths import files_of

OBSERVATION = "steps/observation/"
STATE = ("state",)
INSTRUCTION = ("steps/language_instruction", f"{OBSERVATION}natural_language_instruction")
PICTURE = (b"\x89PNG", b"\xff\xd8\xff")
"""How encoded pictures begin."""


def import_rlds(
    path: str | Path,
    out: str | Path,
    *,
    instruction: str = "",
    hz: float = 0.0,
    state: Sequence[str] = (),
    say: Say = print,
) -> dict[str, Any]:
    """Writes a LeRobotDataset of the RLDS data set in a folder.

    Args:
        path: the folder with its ``*.tfrecord*`` files, such as ``bridge/1.0.0``.
        out: the data set's folder.
        instruction: what the policy is told, where the episodes do not say it.
        hz: actions per second.
        state: keys of the observation that make the state; ``state`` by default.
        say: is told what is left out.

    Returns:
        See ``write_imported``.

    Raises:
        UserError: no such files, or something that they do not say.
    """
    if not str(out):
        raise UserError("Say where the data set goes: --out FOLDER.")
    path = Path(path)
    files = [path] if path.is_file() else files_of(path, "*.tfrecord*")
    if not files:
        raise UserError(f"There are no TFRecord files (*.tfrecord*) in {path}.")
    # "toy_set-train.tfrecord-00000-of-00002" is of toy_set.
    name = files[0].name.split(".")[0].rpartition("-")[0] or files[0].name.split(".")[0]
    facts = Facts(f"rlds/{name}", "", rate_of(None, hz, str(path)), max_episode_steps=1)
    reader = _Reader(tuple(state) or STATE, instruction, say)
    return write_imported(out, reader.episodes(files), facts, say)


class _Reader:
    """Reads episodes; what the first of them leaves aside is said."""

    def __init__(self, state: tuple[str, ...], instruction: str, say: Say) -> None:
        self.state = state
        self.instruction = instruction
        self.say = say
        self.said = False

    def episodes(self, files: list[Path]) -> Iterator[tuple[str, Callable[[], Recording]]]:
        for file in files:
            for number, example in enumerate(read_examples(file)):
                self._require(file, example)
                yield f"{file.name}, episode {number}", partial(self._read, example)

    def _require(self, file: Path, example: dict[str, Feature]) -> None:
        """Refuses data that lack what every episode must have."""
        known = [key.removeprefix(OBSERVATION) for key in example if key.startswith(OBSERVATION)]
        if missing := [key for key in self.state if key not in known]:
            raise UserError(
                f"{file} has no {missing[0]!r} among its observations. Name the keys that make the "
                f"state: --state KEY,KEY. There are {', '.join(known) or 'none'}."
            )
        if "steps/action" not in example:
            parts = [key for key in example if key.startswith("steps/action")]
            raise UserError(
                f"{file} has no array steps/action, but {', '.join(parts) or 'no action'}: only "
                "actions in one array are read."
            )

    def _read(self, example: dict[str, Feature]) -> Recording:
        steps = self._steps(example)
        cameras, aside = self._cameras(example)
        if not self.said and aside:
            self.say(f"Left aside are {', '.join(aside)}.")
        self.said = True
        # Numbers of all steps stand in one list.
        actions = _numbers(example["steps/action"], steps, "the action")
        proprio = [_numbers(example[OBSERVATION + key], steps, key) for key in self.state]
        reward = example.get("steps/reward")
        # Without a reward, the last step counts as success.
        last = np.arange(steps) == steps - 1
        rewards = last.astype(np.float32)
        if reward is not None:
            rewards = _numbers(reward, steps, "the reward")[:, 0]
        return Recording(
            images={name: _pictures(example[OBSERVATION + name], name) for name in cameras},
            proprio=np.concatenate(proprio, axis=1),
            actions=actions,
            reward=rewards,
            solved=last if reward is None else rewards > 0,
            init=-1,
            task="",
            instruction=self._instruction(example),
        )

    @staticmethod
    def _steps(example: dict[str, Feature]) -> int:
        """The number of steps: every step has one such value."""
        for key in ("steps/is_first", "steps/is_last", "steps/reward", *INSTRUCTION):
            if len(values := example.get(key, ())):
                return len(values)
        raise UnusableEpisodeError("it does not say how many steps it has")

    def _cameras(self, example: dict[str, Feature]) -> tuple[list[str], list[str]]:
        """The colour pictures, and the other observations that are not taken."""
        cameras: list[str] = []
        aside: list[str] = []
        for key, values in example.items():
            name = key.removeprefix(OBSERVATION)
            if name == key or name in self.state or key in INSTRUCTION:
                continue
            # Pictures are encoded; those of depth have one channel.
            encoded = isinstance(values, list) and len(values) and values[0].startswith(PICTURE)
            (cameras if encoded and _is_colour(values[0]) else aside).append(name)
        return sorted(cameras), sorted(aside)

    def _instruction(self, example: dict[str, Feature]) -> str:
        for key in INSTRUCTION:
            values = example.get(key)
            if isinstance(values, list) and values and values[0].strip():
                return values[0].decode("utf-8", "replace")
        return self.instruction


def _numbers(values: Feature, steps: int, what: str) -> np.ndarray:
    """(T, D) float32 of a list."""
    if isinstance(values, list):
        raise UnusableEpisodeError(f"{what} is no list of numbers")
    if not len(values) or len(values) % steps:
        raise UnusableEpisodeError(f"{what} has {len(values)} numbers in {steps} steps")
    return values.reshape(steps, -1).astype(np.float32)


def _is_colour(encoded: bytes) -> bool:
    from PIL import Image

    try:
        return Image.open(BytesIO(encoded)).mode in ("RGB", "RGBA")
    except OSError:
        return True  # damaged: the episode is then left out with a word


def _pictures(values: Feature, name: str) -> np.ndarray:
    """(T, h, w, 3) uint8."""
    from PIL import Image

    try:
        frames = [np.asarray(Image.open(BytesIO(value)).convert("RGB")) for value in values]
    except OSError as error:
        raise UnusableEpisodeError(f"a picture of {name} cannot be decoded") from error
    if len({frame.shape for frame in frames}) > 1:
        raise UnusableEpisodeError(f"the pictures of {name} have several sizes")
    return np.stack(frames)
