"""``embodyrl world reflect train|calibrate|eval``; heavy imports wait until one of them runs."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from embodyrl.errors import UserError

EXAMPLES = """examples:
  embodyrl collect mujoco env.task=pick env.max_blocks=2 env.terminate_on_success=false \\
      --noise 0.5 --keep-failures --episodes 400 --out data/pick_mixed
  embodyrl world reflect train data/pick_mixed --out runs/reflector
  embodyrl world reflect calibrate runs/reflector data/imagined --max-false-positive-rate 0.01
  embodyrl world reflect eval runs/reflector data/pick_new --json
`train` also calibrates and evaluates, on parts of the data that it does not learn from.
A vision-language model needs no training. Write one of these to FOLDER/reflector.json, then
calibrate FOLDER:
  {"kind": "vlm", "model": "Qwen/Qwen3-VL-2B-Instruct"}
  {"kind": "server", "url": "http://127.0.0.1:8000/v1", "model": "NAME"}
"""


def train_reflector(
    data: str,
    out: str,
    *,
    kind: str = "trained",
    cameras: Sequence[str] = (),
    window: int = 3,
    steps: int = 0,
    discount: float = 0.0,
    features: str = "pixels",
    tail: int = 0,
    held_out: float = 0.3,
    max_false_positive_rate: float = 0.02,
    hits: int = 2,
    device: str = "auto",
    seed: int = 0,
) -> dict[str, Any]:
    """Trains, calibrates and evaluates a reflector, each on its own part of the episodes.

    Args:
        data: LeRobotDataset with failures.
        out: the reflector's folder.
        kind: ``"trained"`` or ``"goal"``.
        cameras: names; none means all.
        window: T.
        steps: of training; 0 is the default of ``TrainConfig``.
        discount: see ``TrainConfig``; above 0 the reflector also tells progress.
        features: of a goal reflector.
        tail: see ``from_demonstrations``.
        held_out: share of the episodes that is not trained on; half of them calibrate, half
            evaluate.
        max_false_positive_rate: see ``fit_calibration``.
        hits: see there.
        device: ``"auto"`` is the GPU where there is one.
        seed: of weights, batches and the split.

    Returns:
        See ``reflectors.score.score_probabilities``; on episodes that neither trained nor
        calibrated it.
    """
    import torch

    from embodyrl.devices import keep_random_state, use_device
    from embodyrl.world_models.reflectors.calibration import require_both
    from embodyrl.world_models.reflectors.folder import require_place, save_reflector
    from embodyrl.world_models.reflectors.goal import GoalConfig, fit_goals
    from embodyrl.world_models.reflectors.labelled_episodes import load_episodes
    from embodyrl.world_models.reflectors.train_reflector import TrainConfig, train_on_episodes
    from embodyrl.world_models.reflectors.trained import TrainedReflector

    if kind not in ("trained", "goal"):
        raise UserError(
            f"A reflector of kind {kind!r} is not trained; it must be 'trained' or 'goal'."
        )
    if kind == "goal" and discount:
        raise UserError(
            "A goal reflector measures a distance, so --discount has no use: drop one of the two."
        )
    require_place(out)
    where = use_device(device, "--device")
    episodes = load_episodes(data, cameras, tail)
    learn, rest = episodes.split(held_out, seed)
    tune, test = rest.split(0.5, seed)
    require_both(tune.solved)  # said before the long part
    if kind == "goal":
        reflector: Any = fit_goals(
            learn, GoalConfig(features, tuple(cameras), window, seed=seed), str(where)
        )
    else:
        config = TrainConfig(seed=seed, discount=discount)
        config = replace(config, steps=steps) if steps else config
        with keep_random_state():
            torch.manual_seed(seed)
            sizes = {name: list(frames.shape[1:3]) for name, frames in episodes.frames.items()}
            reflector = TrainedReflector(sizes, window)
        reflector.to(device=where)
        with _bar("training", config.steps) as advance:
            train_on_episodes(learn, config, reflector, progress=lambda _step, _loss: advance(1))
    # One that cannot be calibrated is not kept: as a folder it would give reward all the same.
    _calibrate(reflector, tune, max_false_positive_rate, hits)
    save_reflector(reflector, out)
    return _evaluate(reflector, test)


def calibrate_reflector(
    path: str,
    data: str,
    *,
    max_false_positive_rate: float = 0.02,
    hits: int = 2,
    tail: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """Fits ``calibration.json`` again, on episodes that the reflector was not trained on.

    Args:
        path: the reflector's folder.
        data: LeRobotDataset with failures.
        max_false_positive_rate: see ``fit_calibration``.
        hits: see there.
        tail: see ``from_demonstrations``.
        device: ``"auto"`` is the GPU where there is one.

    Returns:
        See ``reflectors.score.score_probabilities``, on the same episodes.
    """
    reflector, episodes = _open(path, data, tail, device)
    prob = _calibrate(reflector, episodes, max_false_positive_rate, hits)
    reflector.calibration.save(path)
    return _evaluate(reflector, episodes, prob)


def eval_reflector(path: str, data: str, *, tail: int = 0, device: str = "auto") -> dict[str, Any]:
    """Evaluates a reflector with the calibration it has.

    Args:
        path: the reflector's folder.
        data: LeRobotDataset with failures.
        tail: see ``from_demonstrations``.
        device: ``"auto"`` is the GPU where there is one.

    Returns:
        See ``reflectors.score.score_probabilities``.
    """
    reflector, episodes = _open(path, data, tail, device)
    return _evaluate(reflector, episodes)


def _open(path: str, data: str, tail: int, device: str) -> tuple[Any, Any]:
    from embodyrl.devices import use_device
    from embodyrl.world_models.reflectors.folder import load_reflector
    from embodyrl.world_models.reflectors.labelled_episodes import load_episodes

    reflector: Any = load_reflector(path, str(use_device(device, "--device")))
    if hasattr(reflector, "check"):  # a server
        reflector.check()
    return reflector, load_episodes(data, reflector.cameras, tail)


def _judge(reflector: Any, episodes: Any) -> Any:
    from embodyrl.world_models.reflectors.score import judge_episodes

    with _bar("judging", len(episodes)) as advance:
        return judge_episodes(reflector, episodes, progress=advance)


def _calibrate(reflector: Any, episodes: Any, max_false_positive_rate: float, hits: int) -> Any:
    from embodyrl.world_models.reflectors.calibration import fit_calibration

    prob = _judge(reflector, episodes)
    reflector.calibration = fit_calibration(
        prob,
        episodes.label,
        episodes.episode,
        max_false_positive_rate=max_false_positive_rate,
        hits=hits,
    )
    return prob


def _evaluate(reflector: Any, episodes: Any, prob: Any = None) -> dict[str, Any]:
    from embodyrl.world_models.reflectors.score import score_probabilities

    prob = _judge(reflector, episodes) if prob is None else prob
    result = score_probabilities(prob, episodes, reflector.calibration)
    if counts := getattr(reflector, "counts", None):
        result["questions"] = dict(counts)
    return result


@contextmanager
def _bar(what: str, total: int) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    with Progress(
        *Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True)
    ) as bar:
        line = bar.add_task(what, total=total)
        yield lambda count: bar.advance(line, count)


def print_score(result: dict[str, Any]) -> None:
    """A score for people to read."""
    from embodyrl.functional.intervals import format_rate

    unjudged = f"{result['unjudged']} of {result['frames']} frames unjudged"
    print(f"{result['episodes']} episodes, {result['solved']} solved; {unjudged}")
    for name, title in (("f1", "F1"), ("auroc", "AUROC"), ("ece", "calibration error")):
        numbers = result[name]
        shown = (
            "undefined"
            if numbers["value"] is None
            else "{value:.3f} [{low:.3f}, {high:.3f}]".format(**numbers)
        )
        print(f"{title:>34}  {shown}")
    order = "undefined" if result["order"] is None else f"{result['order']:.3f}"
    print(f"{'order in time until solved':>34}  {order}")
    for name, title in (
        ("false_terminations", "failing episodes ended as solved"),
        ("missed", "solved episodes never ended"),
        ("premature", "solved episodes ended too early"),
    ):
        print(f"{title:>34}  {format_rate(result[name]['k'], result[name]['n'])}")


def add_reflect(subparsers: Any) -> None:
    """Adds the command ``reflect`` to the sub-commands of ``embodyrl world``."""
    text = (
        "Trains, calibrates or evaluates a reflector, which judges from frames whether a task is "
        "solved."
    )
    reflect = subparsers.add_parser(
        "reflect",
        help=text,
        description=text,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = reflect.add_subparsers(metavar="COMMAND", dest="reflect", required=True)
    _add_train(verbs)
    sub = _add_verb(
        verbs,
        "calibrate",
        calibrate_reflector,
        "Fits temperature and threshold again, on held-out episodes.",
    )
    _add_calibration_flags(sub)
    _add_verb(
        verbs,
        "eval",
        eval_reflector,
        "Scores a reflector: F1, AUROC, calibration error, false terminations.",
    )


def _add_train(verbs: Any) -> None:
    sub = _add_verb(
        verbs,
        "train",
        train_reflector,
        "Trains, calibrates and evaluates on parts of one data set.",
    )
    _add_calibration_flags(sub)
    sub.add_argument("--out", required=True, help="the reflector's folder")
    sub.add_argument("--kind", choices=["trained", "goal"], default="trained")
    sub.add_argument("--cameras", nargs="+", default=(), help="names (default: all)")
    sub.add_argument(
        "--window", type=int, default=3, help="frames seen at once (default: %(default)s)"
    )
    sub.add_argument("--steps", type=int, default=0, help="of training")
    sub.add_argument(
        "--discount",
        type=float,
        default=0.0,
        help="learn progress too: a frame that is solved K frames later counts DISCOUNT**K "
        "(default: 0, solved or not)",
    )
    sub.add_argument(
        "--features", default="pixels", help="of goals: pixels, or a Hugging Face vision model"
    )
    sub.add_argument("--held-out", type=float, default=0.3, help="share of episodes not trained on")
    sub.add_argument("--seed", type=int, default=0)


def _add_verb(verbs: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    """A verb with the arguments that all three have."""
    sub = verbs.add_parser(name, help=text, description=text)
    if name != "train":
        sub.add_argument("path", help="the reflector's folder")
    sub.add_argument("data", help="a LeRobotDataset with failures, folder or hub id")
    sub.add_argument(
        "--tail",
        type=int,
        default=0,
        help="last frames of solved episodes that count as solved",
    )
    sub.add_argument("--device", default="auto")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.set_defaults(run=lambda a: _run(function, a), parser=sub, torch="yes")
    return sub


def _add_calibration_flags(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--max-false-positive-rate",
        type=float,
        default=0.02,
        help="share of failing episodes that may be ended as solved (default: %(default)s)",
    )
    sub.add_argument(
        "--hits",
        type=int,
        default=2,
        help="frames in a row that end an episode (default: %(default)s)",
    )


def _run(function: Any, a: argparse.Namespace) -> int:
    result = function(**{name: getattr(a, name) for name in inspect.signature(function).parameters})
    if a.json:
        print(json.dumps(result))
    else:
        print_score(result)
    return 0
