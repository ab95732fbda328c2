"""The training loop: rollout or demonstrations -> algorithm -> checkpoint and evaluation.

All randomness of iteration i is drawn from generators seeded by (seed, i) and every rollout starts
from fresh initial states, so parameters, optimiser, the number i and the recent success of the
tasks and initial states are all that an exact resume needs. Off-policy rollouts are shorter than an episode and go on
where the last one stopped, but start afresh after every checkpoint: so it holds for them too.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from embodyrl import starting
from embodyrl.config import Config, to_yaml
from embodyrl.devices import use_device
from embodyrl.interrupt import Interrupt, Interrupted
from embodyrl.policy import num_executed
from embodyrl.rollouts.batches import (
    Episode,
    by_policy,
    drawn_success_rate,
    effective_episodes,
    mean_return,
    success_rate,
)
from embodyrl.rollouts.collect import Player, Rollouts
from embodyrl.rollouts.evaluation import Evaluation, evaluate
from embodyrl.rollouts.seeding import seeded
from embodyrl.rollouts.start_sampling import remembered
from embodyrl.rollouts.task_sampling import task_figures, updated
from embodyrl.storage import checkpoint
from embodyrl.storage.atomic_files import remove_unfinished, write_text
from embodyrl.storage.folder_lock import locked
from embodyrl.storage.loggers import LiveTable, MetricsWriter, require_loggers
from embodyrl.storage.paths import require_writable
from embodyrl.storage.provenance import describe_run, finish_run
from embodyrl.storage.run_files import read_meta
from embodyrl.training.evaluate import (
    executed_text,
    first_inits,
    missed_tasks,
    score_text,
    tasks_text,
)
from embodyrl.training.load_demos import load_demos, require_data_sets
from embodyrl.training.resume_check import check_folder, run_inputs
from embodyrl.training.run import Run, draws, keep_best, resume, save_checkpoint, spared
from embodyrl.training.run_checks import (
    check_draws,
    check_episodes_end,
    check_held,
    check_history,
    check_reward,
    short_rollout,
)
from embodyrl.training.run_folder import (
    close,
    complete,
    drop_evaluations,
    finished,
    reopen,
    save_evaluation,
    stalled,
)
from embodyrl.training.setup import Envs, Ranks, build_algorithm, recorded_spec, starts_elsewhere
from embodyrl.training.shards import local_rollouts
from embodyrl.training.threads import set_threads
from embodyrl.types import EnvSpec


def train(
    config: Config,
    *,
    command: str = "",
    rollouts: Callable[[], Rollouts] | None = None,
    ranks: Ranks | None = None,
    spec: EnvSpec | None = None,
) -> Path:
    """Runs or resumes the run that ``config`` describes, and returns its folder; see ``finished``.

    The folder holds ``config.yaml``, ``meta.json``, ``metrics.jsonl``, ``evals/``, ``videos/`` and
    ``checkpoints/``. Ctrl-C saves and returns within one update of the algorithm (an unfinished
    rollout or evaluation is given up); a second one stops at once. A run may be made longer, also
    after its end (``resume_check.CHANGEABLE``), and go on on another machine.

    Args:
        config: of the run.
        command: that started it, for the record.
        rollouts: starts those who play the training episodes; None lets this process do it.
        ranks: the processes that train together, of which the first one writes; None for this one
            alone.
        spec: of an env that must not be built, such as a robot that others move. Then nothing is
            evaluated, and the algorithm must learn from recorded episodes alone.

    Raises:
        UserError: the folder holds a run with another config, another process is writing into it,
            or checkpoint and env do not fit; nothing was written.
    """
    settings = config.run
    first = ranks is None or ranks.first
    changes: list[str] = []
    check_folder(settings.folder, config, changes.append)
    if complete(config):
        return settings.folder
    if first:
        print(*changes, sep="\n", end="\n" if changes else "")
        require_writable(settings.folder, "run.out=FOLDER")
        require_loggers(settings.loggers)
    # What is missing is said before anything takes time.
    if starts_elsewhere(config):
        checkpoint.find(settings.init_checkpoint)
    if config.data.path:
        require_data_sets(config)
    device = use_device(settings.device)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    spec = spec or recorded_spec(config)
    if rollouts is None and ranks is None and (settings.workers > 1 or settings.max_lag):
        rollouts = partial(local_rollouts, config)
    if ranks is not None:
        envs = Envs(ranks.own, ranks if ranks.plays else None)
    else:
        envs = Envs(config, rollouts() if rollouts else None, spec)
    own = contextlib.nullcontext(settings.folder) if first else tempfile.TemporaryDirectory()
    with contextlib.closing(envs), own as place:
        folder = Path(place)
        run = Run(config, folder, device, envs, build_algorithm(config, envs, device, ranks), ranks)
        prepare(run)
        with locked(folder):
            settle(run)
            if run.over and (run.evaluated("after") or run.envs.given is not None):
                if first and not finished(folder):
                    finish_run(folder / "meta.json", run.algorithm.verdict)
                return settings.folder
            describe_run(
                folder / "meta.json",
                command=command,
                seed=settings.seed,
                device=device,
                threads=choose_threads(run),
                inputs=run_inputs(config),
            )
            with (
                Interrupt() as interrupt,
                MetricsWriter(
                    folder, settings.loggers if first else (), run.at.iteration
                ) as metrics,
                LiveTable(settings.name, settings.iterations, run.at.iteration) as table,
            ):
                loop(run, interrupt, metrics, table)
    return settings.folder


def prepare(run: Run) -> None:
    """Makes ready what it learns from, and goes to where it stopped; writes nothing."""
    config = run.config
    envs = run.envs
    algorithm = run.algorithm
    if algorithm.continues_episodes:
        executed = num_executed(algorithm.policy.config)
        check_episodes_end(config, executed, envs.spec.max_episode_steps)
    check_draws(config, algorithm, envs.spec)
    check_held(config, algorithm, envs.spec)
    check_reward(config, algorithm)
    check_history(config, algorithm)
    with starting.step("reading the demonstrations"):
        first = run.ranks is None or run.ranks.first
        say = print if first else lambda text: None
        run.demos = load_demos(config, algorithm, envs.spec, say=say)
    if algorithm.plays:
        run.rollouts = envs.rollouts or Player(envs.train, config.run.seed, run.device)
        if run.demos is not None:
            algorithm.add_demos(
                run.demos
            )  # before its state comes back, which holds corrections beside them
    run.at = resume(run)


def choose_threads(run: Run) -> int:
    """PyTorch's threads: those of ``run.threads`` or of torchrun, else as before or as measured."""
    if run.config.run.threads or run.ranks is not None or run.device.type != "cpu":
        return torch.get_num_threads()
    meta = run.folder / "meta.json"
    before = read_meta(meta).get("threads") if run.resumed and meta.exists() else None
    return set_threads(run.algorithm, run.envs.spec, before)


def settle(run: Run) -> None:
    """Makes the folder one of a run that stands where this one does."""
    for folder in (run.folder, run.folder / "evals", run.folder / "videos"):
        remove_unfinished(folder)
    drop_evaluations(run.folder, run.at.iteration)
    if run.resumed is not None and (run.ranks is None or run.ranks.first):
        checkpoint.delete_old(run.resumed, run.config.run.keep_checkpoints, spared(run))
    write_text(run.folder / "config.yaml", to_yaml(run.config))
    run.stalled = stalled(run.folder, run.config.run.patience)
    if not run.over:
        reopen(run.folder)
    if run.ranks is not None:
        run.ranks.wait()


def loop(run: Run, interrupt: Interrupt, metrics: MetricsWriter, table: LiveTable) -> None:
    """Iterations, checkpoints and evaluations until the run is over or interrupted."""
    at = run.at
    saved = run.at.iteration
    spec = run.envs.spec
    short = short_rollout(run.config, run.algorithm, spec)
    evaluated = first_inits(spec, run.config.run.eval_episodes) if run.envs.given is None else []
    for note in (short, missed_tasks(spec, evaluated) if evaluated else ""):
        if note:
            table.say(note)
    try:
        while True:
            due = run.evaluation_due
            # With run.keep=best the policy before training may turn out to be the best.
            first = due == "before" and run.config.run.keep == "best"
            if first or (
                at.iteration > saved
                and (due or run.over or at.iteration % run.config.run.checkpoint_every == 0)
            ):
                metrics.flush_to_disk()  # the rows up to a checkpoint are not written again
                save_checkpoint(run)
                saved = at.iteration
            if due and not run.evaluated(due):
                result = score(run, due, interrupt, table)
                policy = run.algorithm.result.config
                save_evaluation(run.folder, due, at, result, run.envs.spec, policy)
                text = score_text(result.episodes, run.envs.spec.reports_success, result.faults)
                chunk = executed_text(num_executed(policy), policy.horizon)
                by_task = tasks_text(result.episodes) if run.envs.spec.reports_success else ""
                table.evaluated(f"{text} ({chunk})", by_task)
                if due != "after" and stalled(run.folder, run.config.run.patience):
                    run.stalled = True
                    if run.config.run.keep == "last":
                        close(run.folder, due)
                        due = "after"
            if due == "after" or (run.over and not due):
                break
            if due and run.over:
                table.say(keep_best(run))
                continue
            interrupt.check()
            row = iterate(run, interrupt.check)
            if run.ranks is not None:
                at.minutes, interrupt.asked = run.ranks.agree(at.minutes, interrupt.asked)
            metrics.write(row)
            tasks = run.envs.spec.tasks
            table.update(row, {task: at.tasks[task] for task in tasks if task in at.tasks})
    except Interrupted:
        # What raises it stands before or between the updates, so the weights are those of
        # at.iteration.
        if at.iteration > saved:
            metrics.flush_to_disk()
            save_checkpoint(run)
        table.say(f"Stopped after iteration {at.iteration}; the same command goes on from there.")
        return
    if verdict := run.algorithm.verdict:
        table.say(f"{run.config.run.name}  {verdict}")
    finish_run(run.folder / "meta.json", verdict)


def iterate(run: Run, between: Callable[[], None]) -> dict[str, Any]:
    """One iteration: rollout and update; moves ``run.at`` on and returns its row of metrics.

    Args:
        run: at its next iteration.
        between: called before every chunk of a rollout; may raise, to give it up.
    """
    began = time.monotonic()
    algorithm = run.algorithm
    rollouts = run.rollouts
    at = run.at
    generator = seeded(run.config.run.seed, at.iteration)
    options: dict[str, Any] = {
        "progress": at.iteration / run.config.run.iterations,
        "generator": generator,
    }
    if rollouts is None:
        row = algorithm.update(run.demos, **options)
    else:
        batch = rollouts.collect(
            algorithm,
            at.iteration,
            generator=generator,
            device=run.device,
            between=between,
            draws=draws(run),
        )
        episodes = batch.episodes
        rollout_seconds = time.monotonic() - began
        row = algorithm.update(batch, **options)
        at.env_steps += batch.env_steps
        if run.envs.spec.reports_success and len(run.envs.spec.tasks) > 1:
            at.tasks = updated(at.tasks, episodes)
        if run.config.run.start_sampling == "difficulty":
            at.starts = remembered(at.starts, episodes)
        row |= {
            **_success_figures(run, episodes),
            "train_return": mean_return(episodes),
            "train_episodes": effective_episodes(episodes),
            "person_episodes": len(episodes) - len(by_policy(episodes)),
            "rollout_seconds": rollout_seconds,
            "env_steps_per_second": batch.env_steps / (time.monotonic() - began),
        }
        if run.envs.rollouts is not None:
            row["worker_restarts"] = rollouts.restarts
            row |= getattr(rollouts, "figures", dict)()  # of each arm, where there are several
    at.iteration += 1
    at.minutes += (time.monotonic() - began) / 60
    return {"iteration": at.iteration, "env_steps": at.env_steps, "minutes": at.minutes, **row}


def _success_figures(run: Run, episodes: list[Episode]) -> dict[str, float]:
    """Success of an iteration's episodes: at their end and, where that may differ, at any time."""
    figures: dict[str, float] = {}
    if run.envs.spec.reports_success:
        figures["train_success"] = success_rate(episodes)
        settings = run.config.run
        if "difficulty" in (settings.task_sampling, settings.start_sampling):
            figures["drawn_success"] = drawn_success_rate(episodes)
            figures["drawn_episodes"] = len(by_policy(episodes))
        if not run.config.env.terminate_on_success:
            figures["train_success_once"] = success_rate(episodes, once=True)
        figures |= task_figures(run.envs.spec.tasks, episodes)
    return figures


def score(run: Run, name: str, interrupt: Interrupt, table: LiveTable) -> Evaluation:
    """Scores the policy on the first initial states of the evaluation split.

    The episodes are played here, or where the robot is.
    """
    settings = run.config.run
    ranks = run.ranks
    elsewhere = getattr(
        run.rollouts, "evaluate", None
    )  # who has the one robot scores the policy too
    if elsewhere is not None:
        inits = first_inits(run.envs.spec, settings.eval_episodes)
        return elsewhere(run.algorithm, inits, settings.seed, interrupt.check)
    env = run.envs.eval
    policy = run.algorithm.result
    inits = first_inits(env.spec, settings.eval_episodes)
    last = (
        name in ("before", "after") or settings.patience or run.over
    )  # with patience, any may turn out to be the last
    filmed = inits[: settings.videos] if last and env.spec.cameras else []

    def show(done: int, scored: list[Episode]) -> None:
        text = score_text(scored, env.spec.reports_success) if scored else "no score yet"
        table.evaluating(done, text)
        if ranks is None:  # else they stop together
            interrupt.check()

    def play(part: list[int]) -> Evaluation:
        film = [i for i in filmed if i in part]
        return evaluate(
            env, policy, part, seed=settings.seed, film=film, device=run.device, progress=show
        )

    return play(inits) if ranks is None else ranks.evaluation(play, policy, inits)
