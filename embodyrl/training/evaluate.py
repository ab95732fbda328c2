"""Scores a checkpoint in its env, and says the result in words."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from embodyrl.build import (
    described_by,
    limit_num_envs,
    load_config,
    load_policy,
    make_env,
)
from embodyrl.config import Config
from embodyrl.devices import use_device
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.functional.by_task import tasks_in_words
from embodyrl.functional.intervals import (
    format_rate,
    format_return,
    mean_interval,
    pass_at_k,
    wilson,
)
from embodyrl.policies.exported.actor import ExportedActor
from embodyrl.policies.guidance import GuidedPolicy
from embodyrl.policy import Policy, num_executed
from embodyrl.rollouts.batches import Episode, by_policy
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.training.films import inits_to_film, write_films
from embodyrl.types import EnvSpec
from embodyrl.world_models.dream_chooser import DreamChooser
from embodyrl.world_models.model import WorldModel

PACE = 10.0
"""Seconds between two words about an evaluation under way."""


@dataclass
class OpenCheckpoint:
    """A checkpoint in its env, ready to be scored.

    Attributes:
        config: of the run, on the split that is scored.
        env: of that split.
        policy: with the checkpoint's weights, on ``device``.
        device: of the policy.
        inits: the initial states; the same in every evaluation, so that two can be compared in
            pairs.
    """

    config: Config
    env: VecEnv
    policy: Any
    device: torch.device
    inits: list[int]


@contextlib.contextmanager
def open_checkpoint(
    path: str,
    overrides: Sequence[str] = (),
    *,
    episodes: int = 0,
    base: str = "",
    guidance: float = 1.0,
    dream: str = "",
    proposals: int = 8,
    margin: float = 0.0,
    exported: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> Iterator[OpenCheckpoint]:
    """Builds env and policy of a checkpoint; the env is closed behind the block.

    The arguments are those of ``evaluate_checkpoint``.
    """
    # The run's own config, on the split that it never trained on.
    config = load_config(path, overrides)
    if not any(o.startswith("env.split=") for o in overrides):
        config = dataclasses.replace(config, env=config.env.for_evaluation(config.run.eval_split))
    device = use_device(config.run.device)
    episodes = episodes or config.run.eval_episodes
    with described_by(path):
        env = make_env(limit_num_envs(config.env, episodes), config.run.device)
    try:
        # The checkpoint's policy, or what was exported of it.
        policy: Any
        if exported:
            policy = ExportedActor(exported, env.spec)
            if policy.run != config.run.name:
                say(f"{exported} was exported from the run {policy.run}, not {config.run.name}")
        else:
            policy = load_policy(path, config.policy, env.spec, config.run.seed, device)
        if base:
            policy = GuidedPolicy(policy, _base_policy(base, env.spec, device), guidance)
        if dream:
            policy = DreamChooser(policy, WorldModel.load(dream, device), proposals, margin)
        inits = first_inits(env.spec, episodes)
        if note := missed_tasks(env.spec, inits):
            say(note)
        yield OpenCheckpoint(config, env, policy, device, inits)
    finally:
        env.close()


def evaluate_checkpoint(
    path: str,
    overrides: Sequence[str] = (),
    *,
    episodes: int = 0,
    seed: int = 0,
    base: str = "",
    guidance: float = 1.0,
    dream: str = "",
    proposals: int = 8,
    margin: float = 0.0,
    exported: str = "",
    attempts: int = 1,
    video: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Scores a checkpoint in the env it was trained for.

    The split is the run's evaluation split, unless ``env.split`` is overridden.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        overrides: of the config that it was trained with.
        episodes: initial states; 0 means as in training.
        seed: of the policy's noise.
        base: a checkpoint whose velocity is mixed in (``policies.guidance``); none by default.
        guidance: 0 acts as ``base``, 1 as the checkpoint itself, more goes further.
        dream: folder of a world model that chooses among the policy's proposals
            (``world_models.dream_chooser``); none by default.
        proposals: so many.
        margin: in probability, by which another one must promise more than the policy's first.
        exported: a file of ``embodyrl export --to``, which acts in place of the checkpoint's own
            policy; none by default.
        attempts: K, how often each initial state is tried, every time with other noise. The other
            figures are of the first attempt.
        video: folder for videos of the first ``run.videos`` episodes; empty films none.
        say: is told every ``PACE`` seconds how many episodes are over.

    Returns:
        ``checkpoint``, ``exported`` (the file that acted, if one did), ``env``, ``split``,
        ``execute`` (H, actions executed of each chunk) of ``horizon`` (C,
        planned), ``reports_success``, ``faults`` (episodes that broke and were played
        again), ``episodes`` (counted), ``not_counted`` (a person acted in them), ``successes``,
        ``success_rate``, ``interval`` (95% Wilson), ``successes_once``, ``success_once_rate`` (at
        any time; the others are at the end), ``return_mean``, ``return_interval`` (95% Student's t,
        None for one episode) and ``tasks``, the same per task; ``results`` lists every episode, and
        its ``video`` where it was filmed. Rates of no counted episode are None. With several
        ``attempts``: ``pass_at``, see ``intervals.pass_at_k``, and ``solved``, how many of them
        solved each initial state.

    Raises:
        UserError: several attempts, where the env reports no success.
    """
    if attempts < 1:
        raise UserError(f"attempts is {attempts}; it must be 1 or more.")
    actor: dict[str, Any] = {"base": base, "guidance": guidance}
    actor |= {"dream": dream, "proposals": proposals, "margin": margin, "exported": exported}
    with open_checkpoint(path, overrides, episodes=episodes, say=say, **actor) as run:
        env, policy, inits, device = run.env, run.policy, run.inits, run.device
        if attempts > 1:
            _require_success(env.spec)
        film = inits_to_film(env.spec, inits, run.config.run.videos) if video else []
        progress = partial(tell_progress, say, len(inits), [time.monotonic()])
        result = evaluate(
            env, policy, inits, seed=seed, film=film, device=device, progress=progress
        )
        solved = {e.init: int(e.success) for e in by_policy(result.episodes)}
        # Further attempts begin in the states that counted, with the noise of the next seed.
        for k in range(1, attempts):
            say(f"attempt {k + 1} of {attempts}")
            again = evaluate(
                env, policy, list(solved), seed=seed + k, device=device, progress=progress
            )
            for e in again.episodes:
                solved[e.init] += int(e.success)
    # Films, and the figures by task.
    films = write_films(result, env.spec, Path(video)) if video else {}
    return {
        "checkpoint": str(path),
        **({"exported": exported} if exported else {}),
        "env": env.spec.name,
        "split": run.config.env.split,
        "execute": num_executed(policy.config),
        "horizon": policy.config.horizon,
        "reports_success": env.spec.reports_success,
        "faults": result.faults,
        **score_summary(result.episodes),
        **_attempts(solved, attempts),
        "tasks": score_tasks(env.spec, result.episodes),
        "results": [
            {**_row(e), **({"video": films[e.init]} if e.init in films else {})}
            for e in result.episodes
        ],
    }


def _row(episode: Episode) -> dict[str, Any]:
    """An episode without its weight, which those of an evaluation have alike, and its sentence."""
    fields = dataclasses.asdict(episode)
    return {k: v for k, v in fields.items() if k not in ("weight", "instruction")}


def executed_text(execute: int, horizon: int) -> str:
    """How many actions of a chunk are executed, which is a part of every score."""
    return f"executing {execute} of {horizon} actions"


def _require_success(spec: EnvSpec) -> None:
    if not spec.reports_success:
        raise UserError(
            f"{spec.name} reports no success, so no attempt solves it. Leave attempts at 1."
        )


def _attempts(solved: dict[int, int], attempts: int) -> dict[str, Any]:
    if attempts == 1 or not solved:
        return {}
    return {
        "pass_at": pass_at_k(list(solved.values()), attempts),
        "solved": {str(init): count for init, count in solved.items()},
    }


def tell_progress(
    say: Callable[[str], None], total: int, last: list[float], done: int, scored: list[Episode]
) -> None:
    """Says how far an evaluation has come, unless it did so just before (``last``)."""
    if time.monotonic() - last[0] >= PACE:
        last[0] = time.monotonic()
        say(f"{done} of {total} episodes")


def _base_policy(path: str, spec: EnvSpec, device: torch.device) -> Policy:
    config = load_config(path)
    return load_policy(path, config.policy, spec, config.run.seed, device)


def first_inits(spec: EnvSpec, count: int) -> list[int]:
    """The initial states of an evaluation: always the first ``count``, tasks in turn."""
    return list(range(count if spec.num_init_states is None else min(count, spec.num_init_states)))


def score_text(episodes: Sequence[Episode], reports_success: bool, faults: int = 0) -> str:
    """The success rate of some episodes as text, or their mean return without successes.

    Args:
        episodes: those with a person's actions do not count, which the text says.
        reports_success: of the env.
        faults: episodes that a fault ended, which were played again.
    """
    counted = by_policy(episodes)
    if not counted:
        text = "no episodes"
    elif reports_success:
        text = format_rate(sum(e.success for e in counted), len(counted))
        once = sum(e.success_once for e in counted)
        if any(e.success_once != e.success for e in counted):
            text += f" at the end, {format_rate(once, len(counted))} at any time"
    else:
        text = f"return {format_return([e.reward for e in counted])}"
    return text + not_counted(len(episodes), len(episodes) - len(counted), faults)


def not_counted(total: int, person: int, faults: int) -> str:
    """What is said beside a score of the episodes that it leaves out; mostly nothing."""
    said = ""
    if person:
        said += f"; a person acted in {person} of {total} episodes, which are not counted"
    if faults:
        said += f"; {faults} more ended by a fault and were played again"
    return said


def score_tasks(spec: EnvSpec, episodes: Sequence[Episode]) -> dict[str, dict[str, Any]]:
    """Task -> the score of its episodes, as ``evaluate_checkpoint`` gives it; of those played."""
    parts = {name: [e for e in episodes if e.task == name] for name in spec.tasks}
    return {name: score_summary(part) for name, part in parts.items() if part}


def tasks_text(episodes: Sequence[Episode]) -> str:
    """The success rates of the tasks in a few words; empty for a single one."""
    counted = by_policy(episodes)
    return tasks_in_words(
        {
            task: (sum(e.success for e in counted if e.task == task), played)
            for task, played in Counter(e.task for e in counted).items()
        }
    )


def missed_tasks(spec: EnvSpec, inits: Sequence[int]) -> str:
    """What to say where an evaluation leaves tasks out; mostly nothing."""
    played = {spec.task_of(init) for init in inits}
    if len(played) == len(spec.tasks):
        return ""
    return (
        f"{len(inits)} evaluation episodes play {len(played)} of the {len(spec.tasks)} tasks, and "
        f"say nothing of the others. {len(spec.tasks)} or more play them all."
    )


def score_summary(episodes: list[Episode]) -> dict[str, Any]:
    """The scores of some episodes, as ``evaluate_checkpoint`` gives them."""
    counted = by_policy(episodes)
    n = len(counted)
    solved = sum(e.success for e in counted)
    once = sum(e.success_once for e in counted)
    mean, low, high = mean_interval([e.reward for e in counted]) if counted else (None,) * 3
    return {
        "episodes": n,
        "not_counted": len(episodes) - n,
        "successes": solved,
        "success_rate": solved / n if n else None,
        "interval": wilson(solved, n),
        "successes_once": once,
        "success_once_rate": once / n if n else None,
        "return_mean": mean,
        "return_interval": (low, high) if n > 1 else None,
    }


def print_evaluation(result: dict[str, Any]) -> None:
    """The figures of ``evaluate_checkpoint`` as text."""
    # All of it, then the tasks, then what else was asked for.
    rows = result["results"]
    episodes = [Episode(**{k: v for k, v in row.items() if k != "video"}) for row in rows]
    reports = result["reports_success"]
    text = score_text(episodes, reports, result["faults"])
    chunk = executed_text(result["execute"], result["horizon"])
    actor = f", by {result['exported']}" if "exported" in result else ""
    print(f"{result['env']}, split {result['split']}{actor}: {text} ({chunk})")
    if len(result["tasks"]) > 1:
        width = max(map(len, result["tasks"]))
        for name in result["tasks"]:
            own = score_text([e for e in episodes if e.task == name], reports)
            print(f"  {name:<{width}}  {own}")
    for k, (share, low, high) in enumerate(result.get("pass_at", ()), start=1):
        print(
            f"  solved at least once in {k} attempt{'s' * (k > 1)}: {share:.0%} "
            f"[{100 * low:.0f}, {100 * high:.0f}]"
        )
    if films := [Path(row["video"]) for row in rows if "video" in row]:
        what = "1 video" if len(films) == 1 else f"{len(films)} videos"
        print(f"Wrote {what} to {films[0].parent}: {films[0].name}, ...")
