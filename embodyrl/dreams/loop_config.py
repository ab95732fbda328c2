"""Settings of ``embodyrl world loop``, from a preset of ``configs/loops`` and overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from embodyrl.config import compose
from embodyrl.errors import UserError, did_you_mean, refuse_unread
from embodyrl.ranges import Choice, Count, CountOrZero, NotNegative, Range, Seed, Share
from embodyrl.registry import preset_names
from embodyrl.storage.config_section import build_section
from embodyrl.storage.inputs import claim
from embodyrl.storage.paths import expand_home, path_setting
from embodyrl.storage.preset_files import apply_overrides, read_preset
from embodyrl.world_models.config import WorldTrainConfig

MAY_CHANGE = (
    *("out", "rounds", "segments", "patience", "eval_episodes", "max_false_positives"),
    *("gate", "gate_states"),
)
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
        gate: what happens to a round whose model fails to rank the policy's proposals
            (``dreams.gate``): ``refuse`` learns nothing in it, ``warn`` says so and goes on.
        gate_states: the most real states in which proposals are ranked; it stops earlier when
            enough of them have proposals that differ in their outcome.
        proposals: chunks that are ranked in a state. With ``imitate``, 1 lets the policy act alone,
            without a world model or a gate: what the dream's choice is to be compared with.
        demos: demonstrations of the policy's task. They are needed if the training in the dream
            imitates demonstrations beside RL; half of them are shown as the world model's codec
            reconstructs them, so that the policy learns from the dream's pictures. With ``imitate``
            they are imitated beside what was solved.
        dream: preset of the training in the dream; empty with ``imitate``.
        dream_overrides: of it.
        imitate: preset of imitation, in place of ``dream``: the dream chooses among the policy's
            proposals in the real env, and the policy imitates what was solved
            (``dreams.choose``). It needs no simulator's state.
        imitate_overrides: of it.
        chosen: real episodes of a round in which the dream chooses.
        margin: by which another proposal must promise more than the policy's first, in
            probability.
        segment: updates between two evaluations in the real env.
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
    gate: Annotated[str, Choice("refuse", "warn")] = "refuse"
    gate_states: Count = 256
    proposals: Count = 8
    demos: str = path_setting()
    dream: str = ""
    dream_overrides: tuple[str, ...] = ()
    imitate: str = ""
    imitate_overrides: tuple[str, ...] = ()
    chosen: Count = 200
    margin: Annotated[float, Range(0, 1, open_high=True)] = 0.0
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
    if not config.env:
        raise UserError("env is empty: the preset must name it.")
    if bool(config.dream) == bool(config.imitate):
        raise UserError(
            f"dream is {config.dream!r} and imitate is {config.imitate!r}: name one of them. "
            "dream=PRESET trains in dreams by RL; imitate=PRESET imitates what was solved when the "
            "dream chose."
        )
    _check_learning(config)
    if config.dream and not config.demos and imitates(config):
        raise UserError(
            f"demos is empty, but {config.dream} imitates demonstrations beside RL: give "
            "demos=DATA, the demonstrations that the policy was trained on, or choose a dream "
            "without imitation (dream=dream_ppo)."
        )
    return config


def _check_learning(config: LoopConfig) -> None:
    """Refuses settings of the way of learning that is not taken, and models that cannot serve it."""
    if config.imitate:
        refuse_unread(
            config, "loop", ("dream_overrides",), "with imitate= nothing is trained in dreams"
        )
        return
    unread = ("imitate_overrides", "chosen", "margin")
    refuse_unread(config, "loop", unread, "with dream= nothing is imitated after a choice")
    if config.proposals < 2:
        raise UserError(f"proposals is {config.proposals}; the gate ranks 2 or more.")
    world = build_section("world", WorldTrainConfig, apply_overrides({}, config.world))
    if world.frames is False:
        raise UserError(
            "world has frames=false, and a policy cannot be trained in dreams without pictures: "
            "leave it out, or imitate what was solved (dream= imitate=PRESET)."
        )


def imitates(config: LoopConfig) -> bool:
    """Whether the training in the dream imitates demonstrations beside RL."""
    algorithm = compose(config.dream, config.dream_overrides).algorithm
    return getattr(algorithm, "bc_coef", 0.0) > 0


def claim_folder(folder: Path, config: LoopConfig) -> None:
    """See ``storage.inputs.claim``."""
    claim(folder / "loop_config.json", config, LoopConfig(), MAY_CHANGE, "a loop")
