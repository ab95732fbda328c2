"""``Run``: a run under way, what its checkpoints hold, and how it goes on from one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from embodyrl.algorithm import Algorithm
from embodyrl.build import described_by
from embodyrl.config import Config
from embodyrl.rollouts.collect import Rollouts
from embodyrl.rollouts.start_sampling import Draws, grown_length, start_draws
from embodyrl.rollouts.task_sampling import difficulty_odds
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import check_compatible, spec_to_json
from embodyrl.storage.run_files import read_evaluations
from embodyrl.training.run_folder import Position, best_look, close
from embodyrl.training.setup import Envs, Ranks


@dataclass
class Run:
    """A run under way, in this process.

    Attributes:
        config: of the run.
        folder: where this process writes: the run's, or one that nobody reads if it is not the
            first of ``ranks``.
        device: of the algorithm.
        envs: of training and evaluation.
        algorithm: policy and optimiser.
        ranks: the processes that train together; None for this one alone.
        at: how far it has come.
        rollouts: who plays the training episodes; None for an algorithm that learns from ``demos``
            alone.
        demos: the demonstrations; None where the algorithm reads none.
        stalled: whether ``run.patience`` is used up.
        kept: whether the policy is that of the best evaluation (``run.keep=best``).
        resumed: the checkpoint that it goes on from; None for a new run.
    """

    config: Config
    folder: Path
    device: torch.device
    envs: Envs
    algorithm: Algorithm
    ranks: Ranks | None
    at: Position = field(default_factory=Position)
    rollouts: Rollouts | None = None
    demos: Any = None
    stalled: bool = False
    kept: bool = False
    resumed: Path | None = None

    @property
    def over(self) -> bool:
        """Whether no iteration is left, or no time, or no patience."""
        run = self.config.run
        at = self.at
        return (
            self.stalled
            or at.iteration >= run.iterations
            or (run.minutes > 0 and at.minutes >= run.minutes)
        )

    @property
    def evaluation_due(self) -> str:
        """The name of the evaluation to make at this point, if any."""
        run = self.config.run
        i = self.at.iteration
        look = f"iter_{i:06d}"
        if self.envs.given is not None:
            return ""
        if self.over:
            # The best of all looks is known once the last one is made.
            return look if run.keep == "best" and not self.kept else "after"
        if i == 0:
            return "before" if run.eval_before and self.algorithm.plays else ""
        return look if run.eval_every and i % run.eval_every == 0 else ""

    def evaluated(self, name: str) -> bool:
        """Whether there is an evaluation of that name."""
        return (self.config.run.folder / "evals" / f"{name}.json").exists()


def draws(run: Run) -> Draws | None:
    """How the next iteration draws its initial states; None where all are drawn alike."""
    settings = run.config.run
    at = run.at
    tasks: tuple[float, ...] = ()
    if settings.task_sampling == "difficulty":
        tasks = tuple(difficulty_odds(at.tasks, run.envs.spec.tasks))
    starts, odds = start_draws(at.starts) if at.starts else ((), ())
    # And how long the episodes are by now.
    length = grown_length(settings.first_length, at.iteration / settings.iterations)
    found = Draws(tasks, starts, odds, length)
    return None if found == Draws() else found


def keep_best(run: Run) -> str:
    """Goes back to the policy of the best evaluation; returns what was kept, in words.

    The updates after it are undone, in the algorithm's own state too: a longer run goes on from
    there.
    """
    # Which evaluation, of all that were made.
    best = best_look(run.folder)
    run.kept = True
    if best == run.at.iteration:
        close(run.folder, f"iter_{best:06d}")
        return (
            "The last evaluation is the best one, or within a standard error of it: its policy "
            "is kept (run.keep=best)."
        )
    # Policy and algorithm as they were then, in a checkpoint that is the newest.
    load_states(run, run.folder / "checkpoints" / f"step_{best:06d}")
    save_checkpoint(run)
    return f"The policy of iteration {best} is kept, whose evaluation is the best (run.keep=best)."


def resume(run: Run) -> Position:
    """Loads the run's newest valid checkpoint, if it has one; returns how far it had come."""
    newest = checkpoint.latest(run.config.run.folder / "checkpoints")
    if newest is None:
        return Position()
    run.resumed = newest
    meta = load_states(run, newest)
    known = [f.name for f in dataclasses.fields(Position)]  # an older version wrote fewer
    return Position(**{name: value for name, value in meta["position"].items() if name in known})


def load_states(run: Run, path: Path) -> dict[str, Any]:
    """Loads policy and algorithm of one of the run's checkpoints; returns its meta."""
    states, meta = checkpoint.load_run(path, "position", device=run.device)
    check_compatible(meta["spec"], run.envs.spec)
    with described_by(path):
        run.algorithm.result.load_state_dict(states["policy"])
        run.algorithm.load_state_dict(states["algorithm"])
    return meta


def save_checkpoint(run: Run) -> None:
    """Writes a checkpoint that ``resume`` and ``embodyrl eval`` read.

    Episodes begin anew after it, as they do in a run that resumes from it.
    """
    if run.rollouts is not None:
        run.rollouts.restart_episodes()
    states = {"policy": run.algorithm.result.state_dict(), "algorithm": run.algorithm.state_dict()}
    if run.ranks is not None:
        states = run.ranks.whole_state(states)
        if not run.ranks.first:
            return
    meta = {
        "config": dataclasses.asdict(run.config),
        "spec": spec_to_json(run.envs.spec),
        "position": dataclasses.asdict(run.at),
    }
    path = run.folder / "checkpoints" / f"step_{run.at.iteration:06d}"
    settings = run.config.run
    checkpoint.save(path, states, meta, keep_last=settings.keep_checkpoints, also=spared(run))


def spared(run: Run) -> set[str]:
    """Names of old checkpoints that stay: that of the best evaluation so far (``run.keep=best``)."""
    if run.config.run.keep == "last" or not read_evaluations(run.folder):
        return set()
    return {f"step_{best_look(run.folder):06d}"}
