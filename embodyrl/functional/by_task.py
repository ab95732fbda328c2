"""Success rates of many tasks in one line of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

FEW = 4
"""Tasks that are all named."""
LOWEST = 3
"""Tasks that are named where there are more."""
LONGEST = 40
"""Letters of a name that are shown."""


def tasks_in_words(scores: Mapping[str, Sequence[float]]) -> str:
    """``"pick 75%, push 20%"``; of more tasks how many are never, at times and always solved.

    Args:
        scores: task -> how many episodes were solved, and how many there were (not 0).

    Returns:
        Empty for fewer than two tasks.
    """
    rates = {task: solved / played for task, (solved, played) in scores.items()}
    if len(rates) < 2:
        return ""
    order = sorted(rates, key=lambda task: rates[task])
    if len(rates) <= FEW:
        return ", ".join(f"{short(task)} {rates[task]:.0%}" for task in rates)
    never = sum(rate <= 0 for rate in rates.values())
    always = sum(rate >= 1 for rate in rates.values())
    named = ", ".join(f"{short(task)} {rates[task]:.0%}" for task in order[:LOWEST])
    between = len(rates) - never - always
    return (
        f"of {len(rates)} tasks {never} never solved, {between} at times, {always} always; "
        f"lowest: {named}"
    )


def short(task: str) -> str:
    """A task's name, its middle left out where it is long."""
    if len(task) <= LONGEST:
        return task
    half = (LONGEST - 3) // 2
    return f"{task[:half]}...{task[-half:]}"
