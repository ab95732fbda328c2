"""A detector for a checkpoint, from recorded episodes of its policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.detectors.detector import Detector, fit_detector
from embodyrl.detectors.episodes import Watched, load_watched, successes_of
from embodyrl.detectors.folder import make_signal
from embodyrl.devices import use_device
from embodyrl.functional.conformal import scores_needed
from embodyrl.policy import num_executed
from embodyrl.storage import checkpoint
from embodyrl.storage.paths import fingerprint


def load_watched_policy(run: str, device: str) -> tuple[Any, Any]:
    """A run's policy, and the device it is on."""
    where = use_device(device, "--device")
    policy: Any = load_policy(run, load_config(run).policy, load_spec(run), 0, where)
    return policy.eval(), where


def fit_to_checkpoint(
    run: str,
    data: Sequence[str],
    kind: str,
    false_alarms: float,
    *,
    held_out: float = 0.5,
    dream: str = "",
    seed: int = 0,
    device: str = "auto",
) -> tuple[Detector, list[Watched], Any]:
    """Fits a detector to what the policy of a checkpoint did; failures are not learned from.

    Args:
        run: a checkpoint, or a run's folder.
        data: data sets of its episodes.
        kind: one of ``folder.KINDS``.
        false_alarms: share of successes that may be called failures.
        held_out: share of the successes that the threshold is calibrated on.
        dream: folder of a world model, for the kind ``doubt``.
        seed: of the split, and of what is sampled.
        device: of the policy.

    Returns:
        The detector, all episodes as it saw them, and the policy.

    Raises:
        UserError: too few successes, or a setting that cannot be.
    """
    # A rate, a policy or a signal that cannot be is told before anything is read.
    scores_needed(false_alarms)
    policy, where = load_watched_policy(run, device)
    signal = make_signal(kind, dream, where)
    signal.check(policy)
    # Read the episodes, fit, and keep which checkpoint it belongs to.
    episodes = [e for path in data for e in load_watched(path, policy, signal, where, seed)]
    successes = successes_of(episodes, ", ".join(data))
    every = num_executed(policy.config)
    detector = fit_detector(signal, successes, false_alarms, every, held_out, seed)
    detector.policy = str(Path(run).absolute())
    detector.fingerprint = fingerprint(checkpoint.find(run)) or ""
    return detector, episodes, policy
