"""Which task the next training episode is of: all alike, or more often those of medium difficulty.

An algorithm learns little from tasks that the policy never or always solves: all episodes have the
same return then, and a group of them has no advantage at all. With ``run.task_sampling=difficulty``
task i is drawn with the probability

    q_i = FLOOR / M + (1 - FLOOR) p_i (1 - p_i) / sum_j p_j (1 - p_j)

over M tasks, where p_i is the success rate of its recent training episodes. p (1 - p) is the
variance of success, and is largest for tasks that are solved every other time. It chooses tasks in
ProCuRL (Tzannetos et al. 2023, arXiv:2304.12877), in SFL (Rutherford et al. 2024, arXiv:2408.15099)
and for language models (Foster et al. 2025, arXiv:2502.12272). ``FLOOR`` starves no task, so one
that was lost or learned meanwhile is noticed. Evaluations are not drawn: they play a fixed list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from embodyrl.rollouts.batches import Episode, by_policy

FLOOR = 0.2
"""Share of the episodes that is spread evenly over the tasks."""
MEMORY = 64
"""Episodes of a task after which an older one counts 1/e as much."""

Record = dict[str, tuple[float, float]]
"""Task -> how many of its recent episodes were solved, and how many there were, old ones fading."""


def updated(record: Mapping[str, Sequence[float]], episodes: Iterable[Episode]) -> Record:
    """The record after further episodes; those in which a person acted do not count."""
    new: Record = {task: (solved, played) for task, (solved, played) in record.items()}
    keep = 1.0 - 1.0 / MEMORY
    for episode in by_policy(list(episodes)):
        solved, played = new.get(episode.task, (0.0, 0.0))
        new[episode.task] = keep * solved + episode.success, keep * played + 1.0
    return new


def difficulty_odds(record: Mapping[str, Sequence[float]], tasks: Sequence[str]) -> list[float]:
    """The probability of each task, as the module says.

    p_i is estimated by Laplace's rule, (solved + 1) / (played + 2). So tasks of which little is
    known count as medium, and are tried.
    """
    variances = []
    for task in tasks:
        solved, played = record.get(task, (0.0, 0.0))
        p = (solved + 1.0) / (played + 2.0)
        variances.append(p * (1.0 - p))
    total = sum(variances)
    return [FLOOR / len(tasks) + (1.0 - FLOOR) * v / total for v in variances]


def task_figures(tasks: Sequence[str], episodes: Sequence[Episode]) -> dict[str, float]:
    """Metrics of the episodes of an iteration by task, of those tasks that were played.

    Args:
        tasks: of the env; a single one has none.
        episodes: those in which a person acted do not count.

    Returns:
        ``task_success/TASK``, a rate, and ``task_episodes/TASK``, over how many episodes.
    """
    figures: dict[str, float] = {}
    for task in tasks if len(tasks) > 1 else ():
        if own := [e.success for e in by_policy(episodes) if e.task == task]:
            figures[f"task_success/{task}"] = sum(own) / len(own)
            figures[f"task_episodes/{task}"] = len(own)
    return figures
