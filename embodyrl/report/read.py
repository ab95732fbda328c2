"""Reads a run's folder as plain data for the page."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodyrl.errors import UserError
from embodyrl.functional.intervals import mean_interval, wilson
from embodyrl.storage.loggers import read_metrics
from embodyrl.storage.plain_data import inside, read_yaml
from embodyrl.storage.run_files import read_evaluations, read_meta

MAX_POINTS = 1000
"""The most points of a curve; more would not be visible."""
RECENT = 50
"""Newest training episodes of a task over which its training success is shown."""
SLICES = 24
"""Parts of a training whose success by task is drawn side by side."""
BY_TASK = ("task_success/", "task_episodes/")
"""Beginnings of the names of metrics that the runner writes for each task."""
VIDEO_ORDER = {
    "fixed": 0,
    "better": 0,
    "broken": 1,
    "worse": 1,
    "failed": 2,
    "scored": 2,
    "solved": 3,
}
"""Which groups of episodes keep their videos first if not all fit: those that training changed."""


def read_run(folder: Path) -> dict[str, Any]:
    """Everything that the page shows about one run; videos are paths.

    Raises:
        UserError: no run there, or a damaged file.
    """
    if not (folder / "config.yaml").is_file() and not (folder / "metrics.jsonl").is_file():
        raise UserError(
            f"{folder} is no run's folder: it holds neither config.yaml nor metrics.jsonl."
        )
    # Curves of training, and evaluations with their scores.
    rows = read_metrics(folder / "metrics.jsonl")
    curves = _curves(rows)
    evals = _read_evals(folder)
    # Whether the env reports success. The newest evaluation says it; without one the curves do.
    if evals:
        reports = evals[-1]["reports_success"]
    else:
        reports = "train_success" in curves or "train_return" not in curves
    evals = [{**e, **score_episodes(e["episodes"], reports)} for e in evals]
    before, after = _ends(evals)
    return {
        "name": folder.resolve().name,
        "meta": finite(read_meta(folder / "meta.json")) if (folder / "meta.json").exists() else {},
        "config": _read_config(folder / "config.yaml"),
        "curves": curves,
        "reports_success": reports,
        "evals": [{key: value for key, value in e.items() if key != "episodes"} for e in evals],
        "before": before and before["name"],
        "after": after and after["name"],
        "tasks": _tasks(before, after, reports, rows),
        "episodes": _pairs(before, after, reports),
    }


def same_but_seeds(runs: Sequence[dict[str, Any]]) -> bool:
    """Whether these are several runs that differ only in what seeds of one experiment differ in."""
    own = ("run.seed", "run.name", "run.out", "run.init_checkpoint", "data.path", "env.seed")
    configs = [[pair for pair in run["config"] if pair[0] not in own] for run in runs]
    return len(runs) > 1 and all(config == configs[0] for config in configs)


def score_episodes(episodes: list[dict[str, Any]], reports_success: bool) -> dict[str, Any]:
    """The score of some episodes, with a 95% interval from ``lo`` to ``hi``.

    ``value`` is the success rate (``k`` of ``n``) at the end of the episodes with Wilson's interval,
    or without reports of success the mean return with Student's t interval. ``once`` is the same
    for success at any time, where the two differ. Episodes with a person's actions are
    ``not_counted``.
    """
    counted = [e for e in episodes if not e.get("person")]
    n = len(counted)
    left_out = {"not_counted": len(episodes) - n} if n < len(episodes) else {}
    if reports_success:
        at_end = [bool(e["success"]) for e in counted]
        once = [bool(e["success"] or e.get("success_once")) for e in counted]
        differ = {"once": _rate(once)} if once != at_end else {}
        return {**_rate(at_end), **differ, **left_out}
    value, low, high = mean_interval([_return(e) for e in counted]) if counted else (math.nan,) * 3
    return {"n": n, "value": value, "lo": low, "hi": high, **left_out}


def _rate(solved: list[bool]) -> dict[str, Any]:
    """A success rate with its interval; NaN for no episodes."""
    k = sum(solved)
    n = len(solved)
    low, high = wilson(k, n)
    return {"k": k, "n": n, "value": k / n if n else math.nan, "lo": low, "hi": high}


def _return(episode: dict[str, Any]) -> float:
    """The return of an episode; reading has turned NaN and infinity into None."""
    return math.nan if episode["return"] is None else float(episode["return"])


def embed_videos(folder: Path, run: dict[str, Any], budget: int) -> int:
    """Replaces the paths of a run's videos by their bytes in base64.

    Of a pair (before and after) both are embedded or none.

    Args:
        folder: of the run.
        run: what ``read_run`` returned; changed in place.
        budget: bytes that may be used; pairs beyond it lose their videos, and so does an episode
            whose file is missing.

    Returns:
        The bytes used.
    """
    used = 0
    left_out = 0
    for pair in sorted(run["episodes"], key=lambda p: VIDEO_ORDER[p["group"]]):
        # Both videos of a pair are embedded, if they fit.
        sides = [pair[side] for side in ("before", "after") if pair[side] and pair[side]["video"]]
        files = [inside(folder, side["video"]) for side in sides]
        size = sum(f.stat().st_size for f in files if f.is_file())
        fits = used + size <= budget
        left_out += bool(files) and not fits
        for side, file in zip(sides, files, strict=True):
            embed = fits and file.is_file()
            side["video"] = base64.b64encode(file.read_bytes()).decode() if embed else None
        used += size if fits else 0
    run["videos_left_out"] = left_out
    return used


def finite(value: Any) -> Any:
    """The same plain data with None for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list) else value


def _read_config(path: Path) -> list[list[str]]:
    """Flat ``[key, value]`` pairs of the resolved config."""
    if not path.is_file():
        return []
    tree = read_yaml(path)
    return [[key, "" if value is None else str(value)] for key, value in _flat(tree, "")]


def _flat(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [
            pair
            for k, v in value.items()
            for pair in _flat(v, f"{prefix}.{k}" if prefix else str(k))
        ]
    return [(prefix, ", ".join(map(str, value)) if isinstance(value, list) else value)]


def _read_evals(folder: Path) -> list[dict[str, Any]]:
    """All evaluations, in the order of training."""
    evals = []
    for name, raw in read_evaluations(folder).items():
        missing = {"env_steps": 0, "minutes": 0.0, "reports_success": True}
        evals.append({**missing, **finite(raw), "name": name})
    # At the same number of steps, ``before`` comes first and ``after`` last.
    rank = {"before": 0, "after": 2}
    return sorted(
        evals, key=lambda e: (e["env_steps"], e["minutes"], rank.get(e["name"], 1), e["name"])
    )


def _ends(evals: list[dict[str, Any]]) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
    """The evaluations before and after training.

    Of an unfinished run they are the first and the newest one.
    """
    named = {e["name"]: e for e in evals}
    after = named.get("after") or (evals[-1] if evals else None)
    before = named.get("before") or (evals[0] if len(evals) > 1 else None)
    return (before if before is not after else None), after


def _tasks(
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    reports_success: bool,
    rows: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """One row per task: its scores before and after training, and its success in training."""

    def scored(evaluation: dict[str, Any] | None, task: str) -> dict[str, Any] | None:
        if evaluation is None:
            return None
        episodes = [e for e in evaluation["episodes"] if e["task"] == task]
        return score_episodes(episodes, reports_success) if episodes else None

    names = dict.fromkeys(e["task"] for part in (before, after) if part for e in part["episodes"])
    trained = _by_task(rows)
    # A run of one task has no metrics by task: its episodes are all of that task.
    if len(names) == 1 and not trained:
        counts = [(row.get("train_success"), row.get("train_episodes")) for row in rows]
        trained = {next(iter(names)): counts}
    return [
        {
            "task": name,
            "before": scored(before, name),
            "after": scored(after, name),
            "training": training_success(trained.get(name, [])),
        }
        for name in {**names, **dict.fromkeys(trained)}
    ]


Played = tuple[float | None, float | None]
"""Success rate and number of a task's episodes in one iteration."""


def _by_task(rows: list[dict[str, Any]]) -> dict[str, list[Played]]:
    """Task -> its episodes in each iteration, from the metrics that have both."""
    success, episodes = BY_TASK
    names = {
        key.removeprefix(success): None for row in rows for key in row if key.startswith(success)
    }
    return {
        name: [(row.get(success + name), row.get(episodes + name)) for row in rows]
        for name in names
    }


def training_success(played: list[Played]) -> dict[str, Any] | None:
    """The success of a task in training; None if none of its episodes was scored.

    Args:
        played: in each iteration.

    Returns:
        ``k`` of ``n`` with Wilson's interval over the newest iterations that have ``RECENT``
        episodes together; ``all``, how many there were in the whole training; and ``slices``, the
        rates in equally long parts of it, None for one without an episode.
    """
    counts = [(round((rate or 0.0) * (n or 0)), int(n or 0)) for rate, n in played]
    total = sum(n for _, n in counts)
    if not total:
        return None
    k = n = 0
    for solved, episodes in reversed(counts):
        if n >= RECENT:
            break
        k += solved
        n += episodes
    width = -(-len(counts) // SLICES)
    parts = [counts[i : i + width] for i in range(0, len(counts), width)]
    sums = [(sum(s for s, _ in part), sum(e for _, e in part)) for part in parts]
    low, high = wilson(k, n)
    return {
        "k": k,
        "n": n,
        "value": k / n,
        "lo": low,
        "hi": high,
        "all": total,
        "slices": [s / e if e else None for s, e in sums],
    }


def _pairs(
    before: dict[str, Any] | None, after: dict[str, Any] | None, reports_success: bool
) -> list[dict[str, Any]]:
    """One row per initial state, with the episodes there before and after training."""
    # Pair the episodes that began at the same initial state.
    sides = [
        {e["init"]: e for e in (part or {"episodes": []})["episodes"]} for part in (before, after)
    ]
    group_of = _group if reports_success else _group_by_return
    keys = ("success", "length", "return", "video")
    rows = []
    for init in sorted(set(sides[0]) | set(sides[1])):
        old, new = (side.get(init) for side in sides)
        rows.append(
            {
                "init": init,
                "task": (new or old or {})["task"],
                "instruction": (new or old or {}).get("instruction", ""),
                "group": group_of(old, new),
                "before": old and {k: old.get(k) for k in keys},
                "after": new and {k: new.get(k) for k in keys},
            }
        )
    return rows


def _group(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    """``fixed`` or ``broken`` by training, or else ``solved`` or ``failed``."""
    if old is not None and new is not None and bool(old["success"]) != bool(new["success"]):
        return "fixed" if new["success"] else "broken"
    newest = new or old or {}
    return "solved" if newest["success"] else "failed"


def _group_by_return(old: dict[str, Any] | None, new: dict[str, Any] | None) -> str:
    if old is None or new is None:
        return "scored"
    return "better" if _return(new) > _return(old) else "worse"


def _curves(rows: list[dict[str, Any]]) -> dict[str, list[float | None]]:
    """Name -> values, one for each row; every name has the same length."""
    # Keep every k-th row, and the last one.
    stride = -(-len(rows) // MAX_POINTS) or 1
    thin = [row for k, row in enumerate(rows) if k % stride == 0 or k == len(rows) - 1]
    names = dict.fromkeys(
        key
        for row in thin
        for key, value in row.items()
        if isinstance(value, (int, float)) and not key.startswith(BY_TASK)
    )
    return {name: [finite(row.get(name)) for row in thin] for name in names}
