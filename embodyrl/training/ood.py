"""Scores a checkpoint on every split out of the training distribution."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from embodyrl.build import load_config
from embodyrl.errors import UserError
from embodyrl.functional.intervals import format_rate, format_return
from embodyrl.training.evaluate import evaluate_checkpoint, executed_text


def evaluate_ood(
    path: str,
    overrides: Sequence[str] = (),
    *,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Scores a checkpoint on the run's evaluation split, and on every split out of distribution.

    Args:
        path: as in ``evaluate_checkpoint``.
        overrides: likewise, without ``env.split``.
        say: likewise.
        options: the others of ``evaluate_checkpoint``.

    Returns:
        Split -> what ``evaluate_checkpoint`` returns, with ``about``, how it differs, in words.

    Raises:
        UserError: the env has no such splits, or ``env.split`` is overridden.
    """
    if given := [o for o in overrides if o.startswith("env.split=")]:
        raise UserError(f"All splits are scored, so {given[0]} has no effect. Leave it out.")
    config = load_config(path, overrides)
    env = config.env.for_evaluation(config.run.eval_split)
    if not (shifted := env.ood_splits()):
        raise UserError(
            f"{env.name} has no splits out of the training distribution: only train and eval."
        )
    # One split after the other, each as `eval` would score it alone.
    found = {}
    for split, about in {config.run.eval_split: "as in training, other states", **shifted}.items():
        say(f"scoring {split}")
        given = [*overrides, f"env.split={split}"]
        found[split] = {"about": about, **evaluate_checkpoint(path, given, say=say, **options)}
    return found


def print_ood(found: dict[str, Any]) -> None:
    """The figures of ``evaluate_ood`` as a table."""
    width = max(map(len, found))
    for split, result in found.items():
        score = (
            format_rate(result["successes"], result["episodes"])
            if result["reports_success"]
            else f"return {format_return([row['reward'] for row in result['results']])}"
        )
        print(f"{split:<{width}}  {score:<26}  {result['about']}")
    print(executed_text(*(next(iter(found.values()))[key] for key in ("execute", "horizon"))))
