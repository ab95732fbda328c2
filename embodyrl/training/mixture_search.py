"""Which weights of several data sets make the best policy.

A run is trained for each mixture of a design (``functional.mixture_design``), and for the one that
would be used without weights. A surrogate is fitted to their success and proposes a mixture, which is
trained too. Then both are compared in initial states that had no part in the choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.config import Config
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.errors import UserError
from embodyrl.functional.comparison import paired_difference
from embodyrl.functional.intervals import wilson
from embodyrl.functional.mixture_design import best_mixture, fit_surrogate, lattice
from embodyrl.storage.atomic_files import write_json
from embodyrl.storage.plain_data import COUNT, FLAG, read_json
from embodyrl.training.evaluate import evaluate_checkpoint

MOST = 6
"""Data sets of a search. Six take 23 runs for each seed."""
FILE = "mixture.json"
"""In a run's folder: which episodes it solved."""


@dataclass(frozen=True)
class Trial:
    """A run of a search.

    Attributes:
        weights: (q,) of the data sets; they add up to 1.
        seed: of the run.
    """

    weights: tuple[float, ...]
    seed: int

    @property
    def name(self) -> str:
        """Of the run's folder."""
        return f"{'_'.join(f'{w:g}' for w in self.weights)}_seed_{self.seed}"

    def overrides(self, out: str) -> list[str]:
        """Of the preset."""
        weights = ",".join(f"{w:g}" for w in self.weights)
        return [
            f"data.weights=[{weights}]",
            f"run.seed={self.seed}",
            f"run.out={out}",
            f"run.name={self.name}",
        ]


def require_several(config: Config) -> list[str]:
    """The data sets of a config, between which there is something to choose.

    Raises:
        UserError: there are fewer than two or too many, or their weights are given already.
    """
    # All that the run names.
    paths = [path for path in (config.data.path, *config.data.more) if path]
    if not 2 <= len(paths) <= MOST:
        raise UserError(
            f"A mixture is made of 2 to {MOST} data sets, and data.path and data.more name "
            f"{len(paths)}. Give data.path=A and 'data.more=[B,C]'."
        )
    if config.data.weights:
        raise UserError("data.weights is what is looked for here: leave it out.")
    return paths


def frame_shares(paths: Sequence[str]) -> tuple[float, ...]:
    """What a run without weights uses: each data set by its number of frames."""
    frames = np.array([open_dataset(path).info["total_frames"] for path in paths], dtype=float)
    return _rounded(frames / frames.sum())


def _rounded(weights: np.ndarray) -> tuple[float, ...]:
    """To three digits, so that a folder's name says them exactly."""
    return tuple(round(float(w), 3) for w in weights)


def design(default: tuple[float, ...], seeds: Sequence[int]) -> list[Trial]:
    """The runs from which the surrogate learns; those of the default come first."""
    # A default that is in the lattice too is trained once.
    mixtures = [default, *(_rounded(w) for w in lattice(len(default)))]
    return [Trial(w, seed) for w in dict.fromkeys(mixtures) for seed in seeds]


def solved(folder: Path, episodes: int, say: Callable[[str], None]) -> list[bool]:
    """Which of the first held-out episodes a run solves; measured once.

    Raises:
        UserError: its env reports no success.
    """
    # What was measured before is kept.
    path = folder / FILE
    if path.exists():
        known = read_json(
            path, {"episodes": COUNT, "solved": [FLAG]}, "Delete it; it is measured anew."
        )
        if known["episodes"] == episodes:
            return known["solved"]
    # Play the first initial states.
    found = evaluate_checkpoint(str(folder), episodes=episodes, say=say)
    if not found["reports_success"]:
        raise UserError(
            f"{found['env']} reports no success, and mixtures are compared by it. Compare runs of "
            "`embodyrl sweep` by their return."
        )
    result = [bool(row["success"]) for row in found["results"]]
    write_json(path, {"episodes": episodes, "solved": result})
    return result


def propose(rows: dict[Trial, list[bool]], default: tuple[float, ...]) -> dict[str, Any]:
    """The mixture with the highest predicted success.

    Args:
        rows: of each run, which of the first episodes it solved.
        default: mixture.

    Returns:
        What ``best_mixture`` says, and ``spread``, by how much more than by chance runs differ.
    """
    # Runs as the surrogate wants them.
    weights = np.array([trial.weights for trial in rows])
    won = np.array([sum(row) for row in rows.values()], dtype=float)
    played = np.array([len(row) for row in rows.values()], dtype=float)
    surrogate = fit_surrogate(weights, won, played)
    found = best_mixture(surrogate, np.array(default))
    found["weights"] = list(_rounded(np.array(found["weights"])))
    return found | {"spread": surrogate.spread}


def confirm(default: Sequence[list[bool]], chosen: Sequence[list[bool]]) -> dict[str, Any]:
    """Chosen mixture less default, in states that had no part in the choice.

    Args:
        default: of each seed, which episodes were solved.
        chosen: likewise, of the same seeds and episodes.

    Returns:
        What ``paired_difference`` says; with ``verdict``, ``better``, ``worse`` or ``undecided``.
    """
    # Pairs of episodes that begin in the same state.
    before, after = (np.array(rows, dtype=float) for rows in (default, chosen))
    found = paired_difference(before, after)
    low, high = found["interval"]
    verdict = "better" if low > 0 else "worse" if high < 0 else "undecided"
    return found | {"verdict": verdict}


def mixture_table(rows: dict[Trial, list[bool]]) -> list[dict[str, Any]]:
    """A row for each mixture: its episodes over all seeds, with the 95% interval."""
    # Seeds of a mixture are put together.
    mixtures: dict[tuple[float, ...], list[bool]] = {}
    for trial, row in rows.items():
        mixtures.setdefault(trial.weights, []).extend(row)
    return [
        {
            "weights": list(weights),
            "solved": sum(row),
            "episodes": len(row),
            "interval": list(wilson(sum(row), len(row))),
        }
        for weights, row in mixtures.items()
    ]
