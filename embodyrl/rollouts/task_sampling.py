"""Which task the next training episode is of: all alike, or more often those of medium difficulty.

An algorithm learns little from tasks that the policy never or always solves: all episodes have the
same return then, and a group of them has no advantage at all. With ``run.task_sampling=difficulty``
task i is drawn with the probability

    q_i = FLOOR / M + (1 - FLOOR) V_i / sum_j V_j,      V_i = E[p_i (1 - p_i)]

over M tasks, where the success rate p_i has the Beta posterior of its recent training episodes. p
(1 - p) is the variance of success, and is largest for tasks that are solved every other time. It
chooses tasks in
ProCuRL (Tzannetos et al. 2023, arXiv:2304.12877), in SFL (Rutherford et al. 2024, arXiv:2408.15099)
and for language models (Foster et al. 2025, arXiv:2502.12272). ``FLOOR`` starves no task, so one
that was lost or learned meanwhile is noticed. Evaluations are not drawn: they play a fixed list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from embodyrl.rollouts.batches import Episode, by_policy, success_rate

FLOOR = 0.2
"""Share of the episodes that is spread evenly over the tasks."""
MEMORY = 64
"""Episodes of a task after which an older one counts 1/e as much."""

Record = dict[str, tuple[float, float]]
"""Task -> how many of its recent episodes were solved, and how many there were, old ones fading."""


def updated(record: Mapping[str, Sequence[float]], episodes: Iterable[Episode]) -> Record:
    """The record after further episodes; those in which a person acted do not count.

    Of a task's states each counts as often as an even draw would play it (``Episode.weight``).
    """
    new: Record = {task: (solved, played) for task, (solved, played) in record.items()}
    # What is older counts less, by as much as a newer episode counts.
    even = _even_in_each(list(episodes))
    keep = 1.0 - 1.0 / MEMORY
    for episode, weight in even:
        solved, played = new.get(episode.task, (0.0, 0.0))
        fade = keep**weight
        new[episode.task] = fade * solved + weight * episode.success, fade * played + weight
    return new


def _even_in_each(episodes: list[Episode]) -> list[tuple[Episode, float]]:
    """The episodes that count, with weights whose largest is 1 in each task.

    What a task's episodes have in common says how often the task was drawn, not which of its states.
    """
    most: dict[str, float] = {}
    for episode in by_policy(episodes):
        most[episode.task] = max(episode.weight, most.get(episode.task, 0.0))
    return [(e, e.weight / most[e.task]) for e in by_policy(episodes) if most[e.task]]


def expected_variance(solved: float, played: float, mean: float, prior: float) -> float:
    """E[p (1 - p)] of a success rate p with a Beta posterior: a b / ((a + b) (a + b + 1)).

    Args:
        solved: of the episodes.
        played: how many there were.
        mean: of the prior.
        prior: episodes that it is worth.
    """
    a = prior * mean + solved
    b = prior * (1.0 - mean) + played - solved
    return a * b / ((a + b) * (a + b + 1.0))


def difficulty_odds(record: Mapping[str, Sequence[float]], tasks: Sequence[str]) -> list[float]:
    """The probability of each task, as the module says.

    The prior is uniform: so tasks of which little is known count as medium, and are tried.
    """
    known = [record.get(task, (0.0, 0.0)) for task in tasks]
    variances = [expected_variance(solved, played, 0.5, 2.0) for solved, played in known]
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
        if own := [e for e in by_policy(episodes) if e.task == task]:
            figures[f"task_success/{task}"] = success_rate(own)
            figures[f"task_episodes/{task}"] = len(own)
    return figures
