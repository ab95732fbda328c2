"""``embodyrl world loop``: policy -> real episodes -> world model -> policy, as far as the real env says it helps.

A policy that is trained in a dream finds where the dream errs. So each round records what the
newest policy really does, and replays of its successes with a nudge
(``embodyrl.data.perturbed_replay``), goes on training the world model with it, and then trains the
best policy so far in the dream anew. Every few updates the real env is asked, and a round is over
when it sees no progress (``run.patience``). A policy that has never seen the codec's pictures
solves less in them, whatever the dynamics: an algorithm that imitates demonstrations beside RL gets
half of them as the codec shows them.

The initial states that decide what is kept are of the training split; the last evaluation alone is
on held-out ones. Every stage leaves its result under ``out`` and is not repeated: the same command
goes on where the last one stopped.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodyrl.build import limit_num_envs, make_env
from embodyrl.config import apply_overrides, build_section, compose, env_config, read_preset
from embodyrl.data.collect import collect_dataset
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.dreams.score import score_policy
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, did_you_mean
from embodyrl.functional.intervals import format_rate, wilson
from embodyrl.registry import preset_names
from embodyrl.storage.folder_lock import locked
from embodyrl.training.run_folder import finished
from embodyrl.training.runner import train
from embodyrl.world_models.train import WorldTrainConfig, train_world


@dataclass(frozen=True)
class LoopConfig:
    """Settings of ``loop``.

    Attributes:
        policy: a run or checkpoint that shall become better.
        env: the real env, by name or by a preset that has it.
        env_overrides: of its settings, ``env.key=value``.
        data: further data sets, of an expert or of earlier days, that the world model learns from;
            with failures, and past success. Their steps count.
        out: folder of everything.
        seed: of everything.
        rounds: at the most.
        first_episodes: real episodes of the first round.
        episodes: of each later one.
        near: share of them that are replays of the others' successes with a nudge; without a
            success there are none.
        perturb: size of the nudge.
        derail: share of the policy's own episodes that go astray.
        past_success: actions that are recorded past success.
        world: overrides of the first world model's training (``embodyrl world train``).
        refresh: of each later one's, in which the newest episodes count ``newest`` times.
        newest: see there.
        max_false_positives: the most failing held-out dreams, as a share, that may be judged a
            success. More may be allowed, by the same command, of a loop whose world model was
            refused for it.
        demos: demonstrations of the policy's task, where ``dream`` imitates, which gets used to its
            pictures so.
        dream: preset of the training in the dream.
        dream_overrides: of it.
        segment: its updates between two evaluations in the real env.
        segments: of them in a round, at the most.
        patience: evaluations in a row without a new best, after which a round is over.
        select_episodes: of each evaluation that decides.
        eval_episodes: of the last one, on held-out initial states.
    """

    policy: str = ""
    env: str = ""
    env_overrides: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    out: str = "runs/loop"
    seed: int = 0
    rounds: int = 3
    first_episodes: int = 600
    episodes: int = 200
    near: float = 0.3
    perturb: float = 1.0
    derail: float = 0.3
    past_success: int = 5
    world: tuple[str, ...] = ()
    refresh: tuple[str, ...] = ()
    newest: int = 4
    max_false_positives: float = 0.05
    demos: str = ""
    dream: str = ""
    dream_overrides: tuple[str, ...] = ()
    segment: int = 10
    segments: int = 6
    patience: int = 2
    select_episodes: int = 128
    eval_episodes: int = 256

    def __post_init__(self) -> None:
        if not 0 <= self.near < 1:
            raise UserError(f"near is {self.near}; it must lie in [0, 1).")
        for key in (
            "rounds",
            "first_episodes",
            "episodes",
            "segment",
            "segments",
            "patience",
            "newest",
        ):
            if getattr(self, key) < 1:
                raise UserError(f"{key} is {getattr(self, key)}; it must be at least 1.")


def read(preset: str, overrides: Sequence[str]) -> LoopConfig:
    """A loop's preset (a name in ``configs/loops`` or a file) with ``key=value`` overrides.

    Raises:
        UserError: no such preset, an unknown key, or no policy, env or dream is named.
    """
    known = preset_names("loops")
    path = known.get(preset, Path(preset))
    if not path.is_file():
        raise UserError(
            f"There is no loop {preset!r}, nor a file of that name. {did_you_mean(preset, known)}"
        )
    config = build_section("loop", LoopConfig, apply_overrides(read_preset(str(path)), overrides))
    for key in ("policy", "env", "dream"):
        if not getattr(config, key):
            raise UserError(
                f"{key} is empty: "
                f"{'give policy=RUN' if key == 'policy' else 'the preset must name it'}."
            )
    if not config.demos and imitates(config):
        raise UserError(
            f"demos is empty, but {config.dream} imitates: give demos=DATA, the demonstrations "
            "that the policy was trained on, or a dream that does without."
        )
    return config


def imitates(config: LoopConfig) -> bool:
    """Whether the training in the dream imitates demonstrations beside RL."""
    return getattr(compose(config.dream, config.dream_overrides).algorithm, "bc_coef", 0.0) > 0


def loop(config: LoopConfig, *, command: str = "") -> dict[str, Any] | None:
    """Runs or goes on.

    Returns:
        What ``loop.json`` then holds: ``rounds``, ``real_steps``, ``eval_steps``, ``minutes`` by
            stage, the ``best``
        checkpoint, and ``before`` and ``after`` on held-out states. None when it was interrupted.

    Raises:
        UserError: see ``collect_dataset``, ``train_world`` and ``training.runner.train``; or
            ``out`` holds another loop, or one that another process is at.
    """
    folder = Path(config.out)
    with locked(folder):
        _claim(folder, config)
        return _rounds(folder, config, command)


def _rounds(folder: Path, config: LoopConfig, command: str) -> dict[str, Any] | None:
    real = env_config(config.env, config.env_overrides)
    book = Book(folder)
    best = config.policy
    best_solved = 0
    newest = config.policy
    data = list(config.data)
    model = ""
    for number in range(config.rounds):
        where = folder / f"round_{number}"
        with book.stage("real episodes"):
            added = _record(config, real, newest, where, number)
        data += added
        with book.stage("world model"):
            weights = [1] * (len(data) - len(added)) + [config.newest if model else 1] * len(added)
            trained = _train_world(config, data, weights, model, where / "world", command)
        if trained is None:
            return None
        model = trained
        with book.stage("dream"):
            looks = _dream(config, where, model, best, command, known=number > 0)
        if looks is None:
            return None
        book.note(f"round_{number}", looks, data)
        print(
            f"Round {number}: "
            + ", ".join(format_rate(look.solved, look.episodes) for look in looks)
        )
        best_solved = best_solved if number else looks[0].solved
        newest = looks[-1].checkpoint
        if kept := chosen(looks, best_solved):
            best = kept.checkpoint
            best_solved = kept.solved
    with book.stage("last evaluation"):
        for when, path in (("before", config.policy), ("after", best)):
            book.score(when, path, config, real)
    return book.finish(best)


def _record(
    config: LoopConfig, real: EnvConfig, policy: str, where: Path, number: int
) -> list[str]:
    """The round's real episodes: the policy's, and replays with a nudge."""
    total = config.episodes if number else config.first_episodes
    near = round(config.near * total)
    seed = config.seed + 1000 * (number + 1)
    common: dict[str, Any] = {
        "keep_failures": True,
        "past_success": config.past_success,
        "seed": seed,
    }
    tried = where / "tried"
    replayed = where / "near"
    if not tried.exists():
        collect_dataset(
            real, tried, num_episodes=total - near, policy=policy, derail=config.derail, **common
        )
    if not near or not open_dataset(tried, ["next.success"]).columns["next.success"].any():
        return [str(tried)]
    if not replayed.exists():
        collect_dataset(
            real, replayed, num_episodes=near, replay=str(tried), perturb=config.perturb, **common
        )
    return [str(tried), str(replayed)]


def _train_world(
    config: LoopConfig, data: list[str], weights: list[int], previous: str, out: Path, command: str
) -> str | None:
    ours = {
        "data": data, "weights": weights, "init": previous, "out": str(out), "seed": config.seed,
        "max_false_positives": config.max_false_positives,
    }  # fmt: skip
    given = apply_overrides(ours, config.refresh if previous else config.world)
    path = train_world(build_section("world", WorldTrainConfig, given), command=command)
    return None if path is None else str(path)


@dataclass(frozen=True)
class Look:
    """An evaluation in the real env: of which checkpoint, how many episodes it solved, and the real steps that took."""

    checkpoint: str
    solved: int
    episodes: int
    steps: int


def _dream(
    config: LoopConfig, where: Path, model: str, policy: str, command: str, *, known: bool
) -> list[Look] | None:
    """Trains in the dream until the real env sees no progress; None when it was interrupted.

    It looks at the policy as it came, too, unless how that does is ``known``.
    """
    run = [
        f"env.model={model}", f"run.init_checkpoint={policy}", f"run.out={where}", "run.name=dream",
        f"run.seed={config.seed}", f"run.iterations={config.segment * config.segments}",
        f"run.eval_every={config.segment}", f"run.patience={config.patience}", "run.videos=0",
        f"run.eval_episodes={config.select_episodes}", "run.eval_split=train",
        f"run.eval_before={'false' if known else 'true'}", f"run.checkpoint_every={config.segment}",
        "run.keep_checkpoints=1000",
    ]  # fmt: skip
    if imitates(config):
        run += [f"data.path={config.demos}", f"data.codec={model}"]
    folder = where / "dream"
    if not finished(folder):
        train(compose(config.dream, [*config.dream_overrides, *run]), command=command)
    return _looks(folder, policy) if finished(folder) else None


def _looks(folder: Path, policy: str) -> list[Look]:
    """The evaluations of a run, in order."""
    found = sorted(
        (json.loads(p.read_text()) for p in (folder / "evals").glob("*.json")),
        key=lambda e: e["iteration"],
    )
    looks = []
    for look in found:
        path = (
            str(folder / "checkpoints" / f"step_{look['iteration']:06d}")
            if look["iteration"]
            else policy
        )
        solved = sum(e["success"] for e in look["episodes"])
        looks.append(
            Look(path, solved, len(look["episodes"]), sum(e["length"] for e in look["episodes"]))
        )
    return looks


def chosen(looks: Sequence[Look], before: int) -> Look | None:
    """The look whose policy is kept: None where none solved more than ``before``.

    Of those that did it is the latest within one standard error of the best (Breiman et al. 1984,
    section 3.4.3): so few episodes do not tell them apart, and the best of many looks owes more to
    luck than the last one.
    """
    better = [look for look in looks if look.solved > before]
    if not better:
        return None
    best = max(better, key=lambda look: look.solved)
    error = math.sqrt(best.solved * (1 - best.solved / best.episodes))
    return [look for look in better if look.solved >= best.solved - error][-1]


class Book:
    """``loop.json``: what it took and what it gave."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "loop.json"
        self.page: dict[str, Any] = (
            json.loads(self._path.read_text()) if self._path.exists() else {"minutes": {}}
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the minutes that it takes, also where it is interrupted."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.page["minutes"][name] = (
                self.page["minutes"].get(name, 0.0) + (time.monotonic() - began) / 60
            )
            self._write()

    def note(self, name: str, looks: list[Look], data: list[str]) -> None:
        """A round's looks at the real env, and the steps in it up to now."""
        rounds = self.page.setdefault("rounds", {})
        rounds[name] = [dataclasses.asdict(look) for look in looks]
        self.page["real_steps"] = sum(
            len(open_dataset(path).columns["episode_index"]) for path in data
        )
        self.page["eval_steps"] = sum(look["steps"] for some in rounds.values() for look in some)
        self._write()

    def score(self, when: str, path: str, config: LoopConfig, real: EnvConfig) -> None:
        """A policy on held-out initial states, unless that is known."""
        if self.page.get(when, {}).get("checkpoint") == path:
            return
        env = make_env(
            limit_num_envs(dataclasses.replace(real, split="eval"), config.eval_episodes)
        )
        try:
            result = score_policy(env, path, config.eval_episodes, config.seed)
        finally:
            env.close()
        solved = result.successes
        count = len(result.episodes)
        self.page[when] = {
            "checkpoint": path,
            "solved": solved,
            "episodes": count,
            "interval": wilson(solved, count),
        }
        self._write()

    def finish(self, best: str) -> dict[str, Any]:
        """The page with the best checkpoint."""
        self.page["best"] = best
        self._write()
        return self.page

    def _write(self) -> None:
        partial = self._path.with_suffix(".tmp")
        partial.write_text(json.dumps(self.page, indent=1))
        os.replace(partial, self._path)


def _claim(folder: Path, config: LoopConfig) -> None:
    """Refuses a folder that holds a loop with other settings."""
    path = folder / "loop_config.json"
    mine = json.loads(json.dumps(dataclasses.asdict(config)))
    if path.exists():
        theirs = json.loads(path.read_text())
        free = ("out", "rounds", "segments", "patience", "eval_episodes", "max_false_positives")
        if wrong := [k for k in mine if k not in free and theirs.get(k) != mine[k]]:
            raise UserError(
                f"{folder} holds a loop with other settings ({wrong[0]} was "
                f"{theirs.get(wrong[0])!r}, now {mine[wrong[0]]!r}). Give this one its own "
                "out=FOLDER."
            )
    path.write_text(json.dumps(mine, indent=1))
