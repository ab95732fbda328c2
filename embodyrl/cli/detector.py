"""``embodyrl detector fit|test``: a failure detector for a policy, and how well it does."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from embodyrl.cli.verbs import CHECKPOINT, JSON, Verb, print_as
from embodyrl.errors import UserError

HELP = """examples:
  embodyrl detector fit runs/sft data/played --out runs/detector --false-alarms 0.05
  embodyrl detector test runs/detector data/played_later
The data are of the policy as it is deployed: embodyrl collect --noise-free --keep-failures.
With a detector, embodyrl deploy and serve ask for a person: --detector runs/detector.
"""
FIT_HELP = """examples:
  embodyrl detector fit runs/sft data/played --out runs/detector
  embodyrl detector fit runs/sft data/played --out runs/stac --kind stac --false-alarms 0.1
  embodyrl detector fit runs/sft data/played --out runs/doubt --kind doubt --dream runs/world/model
It learns from the episodes that succeeded, and needs 19 of them for the threshold at 5%.
"""
TEST_HELP = """examples:
  embodyrl detector test runs/detector data/played_later
  embodyrl detector test runs/detector data/played_later --policy runs/sft --json
"""


def add_detector(verb: Verb, adder: Callable[[Any], Verb]) -> None:
    """Adds ``detector`` to the command line, and its own verbs to it; see ``world.add_world``."""
    text = "Fits and tests a failure detector, which asks for a person before an episode fails."
    parts = verb("detector", None, text, HELP).add_subparsers(
        metavar="COMMAND", dest="detector_command", required=True
    )
    part = adder(parts)
    sub = part("fit", _fit, "Fits a detector to recorded episodes.", FIT_HELP, torch="yes")
    sub.add_argument("policy", help=CHECKPOINT)
    sub.add_argument("data", help="a LeRobotDataset of episodes that this policy played")
    sub.add_argument("--out", required=True, help="the detector's folder")
    text = "what it looks at: float, nearest, stac, clock or doubt (default: %(default)s)"
    sub.add_argument("--kind", default="float", help=text)
    text = "share of successes that may be called failures (default: %(default)s)"
    sub.add_argument("--false-alarms", type=float, default=0.05, metavar="RATE", help=text)
    text = "share of the successes that the threshold comes from (default: %(default)s)"
    sub.add_argument("--held-out", type=float, default=0.5, metavar="SHARE", help=text)
    text = "a world model's folder, for the kind doubt"
    sub.add_argument("--dream", default="", metavar="MODEL", help=text)
    sub.add_argument("--seed", type=int, default=0, help="of the split, and of what is sampled")
    sub.add_argument("--device", default="auto")
    sub.add_argument("--json", action="store_true", help=JSON)
    text = "Counts detected failures and false alarms on other episodes."
    sub = part("test", _test, text, TEST_HELP, torch="yes")
    sub.add_argument("detector", help="the detector's folder")
    sub.add_argument("data", help="a LeRobotDataset that it was not fitted to, with failures")
    text = "the run or checkpoint, where it lies elsewhere than when the detector was fitted"
    sub.add_argument("--policy", default="", metavar="RUN", help=text)
    sub.add_argument("--seed", type=int, default=0, help="of what is sampled")
    sub.add_argument("--device", default="auto")
    sub.add_argument("--json", action="store_true", help=JSON)


def _fit(a: argparse.Namespace) -> int:
    from embodyrl.detectors.evaluate import evaluate_detector
    from embodyrl.detectors.fit import fit_to_checkpoint
    from embodyrl.detectors.folder import save_detector

    detector, episodes, policy = fit_to_checkpoint(
        a.policy, [a.data], a.kind, a.false_alarms,
        held_out=a.held_out, dream=a.dream, seed=a.seed, device=a.device,
    )  # fmt: skip
    save_detector(detector, a.out)
    # No failure was learned from, so those of the same data already say something.
    failures = [episode for episode in episodes if not episode.success]
    spec = policy.spec
    score = evaluate_detector(detector, failures, spec.control_hz, spec.max_episode_steps)
    result = {
        "detector": a.out,
        "kind": a.kind,
        "fitted": detector.fitted,
        "calibrated": detector.calibrated,
        "threshold": detector.threshold,
        "detected": score["detected"],
    }
    print_as(a, result, _print_fit)
    return 0


def _print_fit(result: dict[str, Any]) -> None:
    from embodyrl.functional.intervals import format_rate

    failures = result["detected"]["n"]
    rate = format_rate(result["detected"]["k"], failures)
    found = f"Failures of these data detected: {rate}." if failures else (
        "These data have no failure, so nothing says how many it detects: `embodyrl detector test` "
        "does, on others."
    )  # fmt: skip
    print(
        f"Wrote {result['detector']}: {result['kind']}, fitted to {result['fitted']} successes, "
        f"calibrated on {result['calibrated']} others. {found}"
    )


def _test(a: argparse.Namespace) -> int:
    from embodyrl.detectors.episodes import load_watched
    from embodyrl.detectors.evaluate import evaluate_detector, print_detection
    from embodyrl.detectors.fit import load_watched_policy
    from embodyrl.detectors.folder import check_detector, load_detector
    from embodyrl.devices import use_device

    detector = load_detector(a.detector, use_device(a.device, "--device"))
    run = a.policy or detector.policy
    try:
        policy, device = load_watched_policy(run, a.device)
    except UserError as error:
        if a.policy:
            raise
        raise UserError(f"{error} If it was moved, say where it is: --policy RUN.") from error
    check_detector(detector, a.detector, policy, run)
    episodes = load_watched(a.data, policy, detector.signal, device, a.seed)
    spec = policy.spec
    result = evaluate_detector(detector, episodes, spec.control_hz, spec.max_episode_steps)
    print_as(a, {"detector": a.detector, **result}, print_detection)
    return 0
