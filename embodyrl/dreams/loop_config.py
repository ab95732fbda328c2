"""Settings of ``embodyrl world loop``, from a preset of ``configs/loops`` and overrides."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from embodyrl.config import compose
from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import Count, CountOrZero, NotNegative, Range, Seed, Share
from embodyrl.registry import preset_names
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.config_section import build_section
from embodyrl.storage.inputs import contents_of, listed, sort_changes
from embodyrl.storage.paths import expand_home, path_setting
from embodyrl.storage.plain_data import ANYTHING, TEXT, read_json
from embodyrl.storage.preset_files import apply_overrides, read_preset

LOOP_FILE = {"inputs?": {...: TEXT}, ...: ANYTHING}
"""Structure of ``loop_config.json``."""
MAY_CHANGE = ("out", "rounds", "segments", "patience", "eval_episodes", "max_false_positives")
"""Settings that may differ when a loop continues."""


@dataclass(frozen=True)
class LoopConfig:
    """Settings of ``run_loop``.

    Attributes:
        policy: the run or checkpoint to be improved.
        env: the real env, by name or by a preset that has it.
        env_overrides: of its settings, for example ``env.num_envs=16``.
        data: further data sets that the world model learns from, of an expert or of earlier days;
            recorded with failures, and past success. Their steps count.
        out: folder of everything.
        seed: of everything.
        rounds: at the most.
        first_episodes: real episodes of the first round.
        episodes: real episodes of each later round.
        near: share of them that are replays of the others' successes with a nudge; without a
            success there are none.
        perturb: size of the nudge.
        derail: share of the policy's own episodes that leave its course at random.
        past_success: actions that are recorded past success.
        world: overrides of the first world model's training (``embodyrl world train``).
        refresh: overrides of each later training, in which the newest episodes count ``newest``
            times.
        newest: see ``refresh``.
        max_false_positives: the largest share of failing held-out dreams that may be judged a
            success. The same command may allow more if a loop stopped because of it.
        demos: demonstrations of the policy's task. They are needed if the training in the dream
            imitates demonstrations beside RL; half of them are shown as the world model's codec
            reconstructs them, so that the policy learns from the dream's pictures.
        dream: preset of the training in the dream.
        dream_overrides: of it.
        segment: updates in the dream between two evaluations in the real env.
        segments: the most segments of a round.
        patience: evaluations in a row without a new best, after which a round is over.
        select_episodes: of each evaluation that decides.
        eval_episodes: of the last evaluation, on held-out initial states.
    """

    policy: str = path_setting()
    env: str = ""
    env_overrides: tuple[str, ...] = ()
    data: tuple[str, ...] = path_setting(())
    out: str = "runs/loop"
    seed: Seed = 0
    rounds: Count = 3
    first_episodes: Count = 600
    episodes: Count = 200
    near: Annotated[float, Range(0, 1, open_high=True)] = 0.3
    perturb: NotNegative = 1.0
    derail: Share = 0.3
    past_success: CountOrZero = 5
    world: tuple[str, ...] = ()
    refresh: tuple[str, ...] = ()
    newest: Count = 4
    max_false_positives: Share = 0.05
    demos: str = path_setting()
    dream: str = ""
    dream_overrides: tuple[str, ...] = ()
    segment: Count = 10
    segments: Count = 6
    patience: Count = 2
    select_episodes: Count = 128
    eval_episodes: Count = 256


def read_loop(preset: str, overrides: Sequence[str]) -> LoopConfig:
    """A loop's preset (a name in ``configs/loops`` or a file) with ``key=value`` overrides.

    Raises:
        UserError: no such preset, an unknown key, or a setting is missing that the loop needs.
    """
    known = preset_names("loops")
    path = known.get(preset, Path(expand_home(preset)))
    if not path.is_file():
        raise UserError(
            f"There is no loop {preset!r}, nor a file of that name. {did_you_mean(preset, known)}"
        )
    config = build_section("loop", LoopConfig, apply_overrides(read_preset(str(path)), overrides))
    if not config.policy:
        raise UserError("policy is empty: give policy=RUN.")
    for key in ("env", "dream"):
        if not getattr(config, key):
            raise UserError(f"{key} is empty: the preset must name it.")
    if not config.demos and imitates(config):
        raise UserError(
            f"demos is empty, but {config.dream} imitates demonstrations beside RL: give "
            "demos=DATA, the demonstrations that the policy was trained on, or choose a dream "
            "without imitation (dream=dream_ppo)."
        )
    return config


def imitates(config: LoopConfig) -> bool:
    """Whether the training in the dream imitates demonstrations beside RL."""
    algorithm = compose(config.dream, config.dream_overrides).algorithm
    return getattr(algorithm, "bc_coef", 0.0) > 0


def claim_folder(folder: Path, config: LoopConfig) -> None:
    """Writes the config into a new folder, or checks it against the one that is there.

    Raises:
        UserError: the folder holds a loop with other settings.
    """
    path = folder / "loop_config.json"
    new = json.loads(json.dumps(dataclasses.asdict(config)))
    inputs = contents_of(config)
    if path.exists():
        old = read_json(path, LOOP_FILE, "Bring back a copy of it, or give another out=FOLDER.")
        was = old.pop("inputs", {})
        allowed, refused = sort_changes(
            {key: old.get(key) for key in new}, new, free=MAY_CHANGE, was=was, now=inputs
        )
        if refused:
            raise UserError(
                f"{folder} holds a loop with other settings ({listed(refused)}), and these change "
                "its results. Give the old ones to go on, or give this one its own out=FOLDER."
            )
        if own := [text for text in allowed if not text.startswith("out ")]:
            print(f"{folder} goes on; changed: {listed(own)}.")
        inputs |= was
    write_json(path, new | {"inputs": inputs})
