"""The training loop: rollout or demonstrations -> algorithm -> checkpoint, with an evaluation every so often.

All randomness of iteration i is drawn from generators seeded by (seed, i) and every rollout starts from fresh initial
states, so parameters, optimiser and the number i are all that an exact resume needs. Off-policy rollouts are shorter
than an episode and go on where the last one stopped, but start afresh after every checkpoint: so it holds for them too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from embodyrl import checkpoint
from embodyrl.buffers import mean_return, success_rate
from embodyrl.build import Envs, build_algorithm, pick_device
from embodyrl.config import Config, RunConfig, to_yaml
from embodyrl.draws import draw_inits, initial_states, seeded
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.evaluate import Evaluation, evaluate, first_inits
from embodyrl.interrupt import Interrupt, Interrupted
from embodyrl.loggers import LiveTable, MetricsWriter
from embodyrl.provenance import describe_run, finish_run
from embodyrl.rollout import Player, collect, collect_transitions
from embodyrl.run_folder import (
    Position,
    check_folder,
    drop_evaluations,
    finished,
    reopen,
    save_evaluation,
)

if TYPE_CHECKING:
    from embodyrl.scale.fsdp import Ranks
    from embodyrl.scale.shards import Rollouts


def train(
    config: Config,
    *,
    command: str = "",
    rollouts: Callable[[], Rollouts] | None = None,
    ranks: Ranks | None = None,
) -> Path:
    """Runs or resumes the run that ``config`` describes, and returns its folder; see ``finished``.

    The folder holds ``config.yaml``, ``meta.json``, ``metrics.jsonl``, ``evals/``, ``videos/`` and ``checkpoints/``.
    Ctrl-C saves and returns within one update of the algorithm (an unfinished rollout or evaluation is given up); a
    second one stops at once. A run may be made longer, also after its end (``run_folder.CHANGEABLE``).

    Args:
        config: of the run.
        command: that started it, for the record.
        rollouts: starts those who play the training episodes; None lets this process do it.
        ranks: the processes that train together, of which the first one writes; None for this one alone.

    Raises:
        UserError: the folder holds a run with another config, or checkpoint and env do not fit; nothing was written.
    """
    run = config.run
    folder, first = run.folder, ranks is None or ranks.first
    check_folder(folder, config)
    device = pick_device(run.device)
    if run.threads:
        torch.set_num_threads(run.threads)
    if rollouts is None and ranks is None and (run.workers > 1 or run.max_lag):
        from embodyrl.scale.shards import local_rollouts

        rollouts = partial(local_rollouts, config)
    if ranks is not None:
        envs = Envs(ranks.own, ranks if ranks.plays else None)
    else:
        envs = Envs(config, rollouts() if rollouts else None)
    try:
        algorithm = build_algorithm(config, envs, device, ranks)
        at = resume(config, envs, algorithm, device)
        if algorithm.source == "transitions":
            check_episodes_end(config, envs.spec.max_episode_steps)
        demos = load_demos(config, envs.spec) if wants_demos(config, algorithm) else None
        if demos is not None and algorithm.source != "demos":
            algorithm.add_demos(demos)
        with contextlib.nullcontext(folder) if first else scratch_folder() as own:
            own.mkdir(parents=True, exist_ok=True)
            (own / "config.yaml").write_text(to_yaml(config))
            drop_evaluations(own, at.iteration)
            if not over(run, at):
                reopen(own)
            if ranks is not None:
                ranks.wait()
            if not (over(run, at) and evaluated(config, "after")):
                describe_run(own / "meta.json", command=command, seed=run.seed, device=device)
                with (
                    Interrupt() as interrupt,
                    MetricsWriter(own, run.loggers if first else (), at.iteration) as metrics,
                    LiveTable(run.name, run.iterations, at.iteration) as table,
                ):
                    if note := short_rollout(algorithm, envs.spec.max_episode_steps):
                        table.say(note)
                    _loop(config, envs, algorithm, demos, at, own, device, interrupt, metrics, table, ranks)
            elif first and not finished(folder):
                finish_run(folder / "meta.json")
    finally:
        envs.close()
    return folder


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Where a process writes that is not the first of several."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def evaluated(config: Config, name: str) -> bool:
    """Whether the run has an evaluation of that name."""
    return (config.run.folder / "evals" / f"{name}.json").exists()


def short_rollout(algorithm: Any, max_episode_steps: int) -> str | None:
    """What to say where episodes may outlast a rollout: those that succeed end within it, those that fail may not."""
    if algorithm.source != "rollout":
        return None
    steps = algorithm.config.num_chunks * algorithm.policy.config.horizon
    if steps >= max_episode_steps:
        return None
    return (
        f"A rollout has {steps} actions and an episode up to {max_episode_steps}, so the train success counts early "
        "successes and few failures; the evaluations count all."
    )


def over(run: RunConfig, at: Position) -> bool:
    """Whether no iteration is left, or no time."""
    return at.iteration >= run.iterations or (run.minutes > 0 and at.minutes >= run.minutes)


def evaluation_due(run: RunConfig, at: Position, source: str) -> str | None:
    """The name of the evaluation to make at this point of a run, if any."""
    if over(run, at):
        return "after"
    if at.iteration == 0:
        return "before" if run.eval_before and source != "demos" else None
    return f"iter_{at.iteration:06d}" if run.eval_every and at.iteration % run.eval_every == 0 else None


def _loop(
    config: Config,
    envs: Envs,
    algorithm: Any,
    demos: Any,
    at: Position,
    folder: Path,
    device: torch.device,
    interrupt: Interrupt,
    metrics: MetricsWriter,
    table: LiveTable,
    ranks: Ranks | None,
) -> None:
    run, saved = config.run, at.iteration
    player: Any = (envs.rollouts or Player(envs.train, device)) if algorithm.source == "transitions" else None
    elsewhere = getattr(envs.rollouts, "evaluate", None)  # who has the one robot scores the policy too
    try:
        while True:
            due = evaluation_due(run, at, algorithm.source)
            if at.iteration > saved and (due or at.iteration % run.checkpoint_every == 0):
                save(folder, config, envs.spec, algorithm, at, ranks)
                saved = at.iteration
                if player is not None:
                    player.fresh = True
            if due and not evaluated(config, due):

                def show(done: int, successes: int) -> None:
                    table.evaluating(done, successes)
                    if ranks is None:  # else they stop together
                        interrupt.check()

                film = due in ("before", "after")
                if elsewhere is not None:
                    inits = first_inits(envs.spec, run.eval_episodes)
                    result = elsewhere(algorithm, inits, run.seed, interrupt.check)
                else:
                    result = run_evaluation(config, envs.eval, algorithm.result, device, film, show, ranks)
                save_evaluation(folder, due, at, result, fps=envs.spec.control_hz)
                table.evaluated(result.successes, len(result.episodes))
            if due == "after":
                break
            interrupt.check()
            row = _iterate(config, envs, algorithm, demos, player, at, device, interrupt)
            if ranks is not None:
                at.minutes, interrupt.asked = ranks.agree(at.minutes, interrupt.asked)
            metrics.write(row)
            table.update(row)
    except Interrupted:
        # What raises it stands before or between the updates, so the weights are those of at.iteration.
        if at.iteration > saved:
            save(folder, config, envs.spec, algorithm, at, ranks)
        table.say(f"Stopped after iteration {at.iteration}; the same command goes on from there.")
        return
    finish_run(folder / "meta.json")


def _iterate(
    config: Config,
    envs: Envs,
    algorithm: Any,
    demos: Any,
    player: Any,
    at: Position,
    device: torch.device,
    interrupt: Interrupt,
) -> dict[str, Any]:
    """One iteration; moves ``at`` on and returns its row of metrics."""
    began = time.monotonic()
    run, i = config.run, at.iteration
    generator = seeded(run.seed, i)
    progress = i / run.iterations
    if algorithm.source == "demos":
        row = algorithm.update(demos, progress=progress, generator=generator)
    else:
        options: dict[str, Any] = {"generator": generator, "between": interrupt.check}
        batch: Any
        if envs.rollouts is not None:
            batch = envs.rollouts.collect(algorithm, i, device=device, **options)
        elif algorithm.source == "groups":
            draw = initial_states(envs.train, run.seed, i)
            batch = algorithm.collect(envs.train, draw, device=device, **options)
        else:
            num_chunks = algorithm.config.num_chunks
            options["inits"] = draw_inits(envs.train, num_chunks, run.seed, i)
            if player is not None:
                batch = collect_transitions(player, algorithm.act, num_chunks, **options)
            else:
                batch = collect(envs.train, algorithm.policy, num_chunks, device=device, **options)
        episodes = player.take_episodes() if player is not None else batch.episodes
        rollout_seconds = time.monotonic() - began
        row = algorithm.update(batch, progress=progress, generator=generator)
        at.env_steps += batch.env_steps
        row |= {
            "train_success": success_rate(episodes),
            "train_return": mean_return(episodes),
            "train_episodes": len(episodes),
            "rollout_seconds": rollout_seconds,
            "env_steps_per_second": batch.env_steps / (time.monotonic() - began),
        }
        if envs.rollouts is not None:
            row["worker_restarts"] = envs.rollouts.restarts
    at.iteration = i + 1
    at.minutes += (time.monotonic() - began) / 60
    return {"iteration": at.iteration, "env_steps": at.env_steps, "minutes": at.minutes, **row}


def resume(config: Config, envs: Envs, algorithm: Any, device: torch.device) -> Position:
    """Loads the run's newest valid checkpoint, if it has one."""
    newest = checkpoint.latest(config.run.folder / "checkpoints")
    if newest is None:
        return Position()
    tensors, meta = checkpoint.load(newest, device=device)
    checkpoint.check_compatible(meta["spec"], envs.spec)
    algorithm.result.load_state_dict(tensors["policy"])
    algorithm.load_state_dict(tensors["algorithm"])
    return Position(**meta["position"])


def save(folder: Path, config: Config, spec: Any, algorithm: Any, at: Position, ranks: Ranks | None = None) -> None:
    """Writes a checkpoint that ``resume`` and ``embodyrl eval`` read."""
    states = {"policy": algorithm.result.state_dict(), "algorithm": algorithm.state_dict()}
    if ranks is not None:
        states = ranks.whole_state(states)
        if not ranks.first:
            return
    meta = {
        "config": dataclasses.asdict(config),
        "spec": checkpoint.spec_to_json(spec),
        "position": dataclasses.asdict(at),
    }
    checkpoint.save(
        folder / "checkpoints" / f"step_{at.iteration:06d}",
        states,
        meta,
        keep_last=config.run.keep_checkpoints,
    )


def run_evaluation(
    config: Config,
    env: VecEnv,
    policy: Any,
    device: torch.device,
    film: bool,
    progress: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> Evaluation:
    """The first ``run.eval_episodes`` initial states of the evaluation split."""
    inits = first_inits(env.spec, config.run.eval_episodes)
    filmed = inits[: config.run.videos] if film and env.spec.cameras else []

    def play(part: list[int]) -> Evaluation:
        reel = [i for i in filmed if i in part]
        return evaluate(env, policy, part, seed=config.run.seed, film=reel, device=device, progress=progress)

    return play(inits) if ranks is None else ranks.evaluation(play, policy, inits)


def check_episodes_end(config: Config, max_episode_steps: int) -> None:
    """Refuses an off-policy run whose episodes, which begin anew after every checkpoint, would never come to an end."""
    every = min(n for n in (config.run.checkpoint_every, config.run.eval_every or config.run.iterations) if n)
    steps = every * config.algorithm.num_chunks * config.policy.horizon
    if steps < max_episode_steps:
        raise UserError(
            f"Episodes begin anew after every checkpoint and evaluation, here after {steps} steps, so no episode of "
            f"{max_episode_steps} steps would ever end. Raise run.checkpoint_every and run.eval_every."
        )


def wants_demos(config: Config, algorithm: Any) -> bool:
    """Whether the algorithm learns from demonstrations.

    Raises:
        UserError: ``data.path`` is given, and nothing would read it.
    """
    wanted = algorithm.source == "demos" or getattr(algorithm, "wants_demos", False)
    if config.data.path and not wanted:
        raise UserError(
            f"data.path is {config.data.path!r}, but {config.algorithm.name} with these settings reads no "
            "demonstrations. Leave it out."
        )
    return wanted


def load_demos(config: Config, spec: Any) -> Any:
    """The data sets of the ``data`` section, as chunks of the policy's horizon."""
    from embodyrl.data.demos import Demonstrations
    from embodyrl.data.mixture import Mixture

    data = config.data
    if not data.path:
        raise UserError(
            "This algorithm learns from demonstrations: give data.path=FOLDER (see `embodyrl collect --help`)."
        )
    if data.intervention_weight <= 0:
        raise UserError(f"data.intervention_weight is {data.intervention_weight}; it must be above 0.")
    parts = []
    for path in (data.path, *data.more):
        part = Demonstrations.load(path, config.policy.horizon, spec=spec, episodes=data.episodes)
        part.intervention_weight = data.intervention_weight
        parts.append(part)
    weights = list(data.weights)
    if data.codec:
        from embodyrl.world_models.seen import seen_in_dreams

        parts, weights = parts + [seen_in_dreams(part, data.codec) for part in parts], weights * 2
    return Mixture(parts, weights or None) if len(parts) > 1 or weights else parts[0]
