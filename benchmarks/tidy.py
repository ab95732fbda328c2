"""The JSONs of ``benchmarks/`` as one tidy table: a row for each number, read by one walk.

Where a number lies in its JSON is its name: the last key is the metric, the keys before it are the
run. These shapes are read as what they mean:

    {"seed": 0, ...}, {"runs": {"TASK/NAME/0": ...}}       the seed
    {"iteration": 20, "env_steps": 5000, ...}              a point of a curve; x is in env steps
    {"successes": 8, "episodes": 9, ...}, [8, 9, .5, .9]   a success rate with its interval
    {"value": .8, "low": .7, "high": .9}, [.8, .7, .9]     a number with its interval
    [{"steps": 5, ...}, ...], [[5, .4], ...]               a curve over steps

A success rate without an interval gets its 95% Wilson interval. Text is left out, and so are
settings.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from embodyrl.errors import UserError
from embodyrl.functional.intervals import wilson

HERE = Path(__file__).resolve().parent
ABOUT = {"commit", "hardware", "versions", "settings", "title", "seed"}
"""Keys that say what was measured how."""
GROUPS = {
    *("runs", "tasks", "algorithms", "variants", "layouts", "table", "rows", "seeds"),
    *("evals", "evaluations", "curves"),
}
"""Keys that only hold runs together: they are no part of a run's name."""
COUNTS = (("successes", "episodes"), ("solved", "episodes"), ("k", "n"))
INTERVALS = {"iqm", "before", "after", "half_way"}
"""Keys whose lists of three numbers are a value with its lower and upper bound."""
UNITS = {
    r"by_real_steps/": "share",
    r"per_s": "1/s",
    r"minutes": "min",
    r"seconds|_s$": "s",
    r"(_|/|^)ms(/|$)": "ms",
    r"_mib": "MiB",
    r"_gib": "GiB",
    r"(env|real|eval|gate)_steps$": "env steps",
    r"psnr": "dB",
    r"return": "return",
    r"(success|solved|rate|before|after|alone|distilled)$|^iqm/": "share",
}
"""What a number is in, by its path; shares are those in [0, 1] alone."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One number: ``value`` of ``metric`` in ``run``, and what it was measured on.

    ``index`` is the iteration of training, or the place in a list of measurements. ``x`` is in env
    steps where the metric is of a policy, else in steps of what the run is about.
    ``low`` and ``high`` are its 95% interval. Shares are in [0, 1].
    """

    benchmark: str
    run: str
    label: str
    seed: int | None
    metric: str
    index: int | None
    x: float | None
    value: float
    successes: int | None
    episodes: int | None
    low: float | None
    high: float | None
    unit: str
    commit: str
    hardware: str


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the walk is: the path so far, and what was said on the way."""

    benchmark: str
    keys: tuple[str, ...]
    path: tuple[str, ...] = ()
    label: str = ""
    seed: int | None = None
    index: int | None = None
    x: float | None = None
    commit: str = ""
    hardware: str = ""

    def at(self, key: str) -> Place:
        """One key further."""
        return dataclasses.replace(self, path=(*self.path, key))


@functools.cache
def catalogue() -> dict[str, dict[str, Any]]:
    """Benchmark -> its entry of ``catalogue.yaml``."""
    return yaml.safe_load((HERE / "catalogue.yaml").read_text(encoding="utf-8"))


def read(name: str, path: Path | None = None) -> list[Row]:
    """The rows of ``benchmarks/NAME.json``, or of another file like it, in its order."""
    entry = catalogue().get(name, {})
    path = path or HERE / f"{name}.json"
    if not path.exists():
        raise UserError(
            f"There is no {path}. `python benchmarks/results.py list` shows the benchmarks; one that "
            "has not run yet has no file."
        )
    data = json.loads(path.read_text(encoding="utf-8"))
    rows = list(walk(data, Place(name, tuple(entry.get("keys", ())))))
    rows += differences(rows, entry.get("differences", {}))
    return [
        dataclasses.replace(row, label=label)
        for row, label in zip(rows, labels(rows, entry), strict=True)
    ]


def labels(rows: list[Row], entry: dict[str, Any]) -> Iterator[str]:
    """A run's label is its own, that of the catalogue, or that of another part of the JSON about it."""
    known = {row.run: row.label for row in rows if row.label}
    for row in rows:
        named = [t for run, t in entry.get("labels", {}).items() if fnmatch.fnmatch(row.run, run)]
        yield named[0] if named else known.get(row.run, "")


def differences(rows: list[Row], wanted: dict[str, list[str]]) -> Iterator[Row]:
    """Metrics that are one metric of a run less another one, as the catalogue names them."""
    known = {(row.run, row.metric): row for row in rows}
    for metric, (first, second) in wanted.items():
        for run in dict.fromkeys(row.run for row in rows):
            more, less = known.get((run, first)), known.get((run, second))
            if more and less:
                yield dataclasses.replace(more, metric=metric, value=more.value - less.value)


def walk(node: Any, place: Place) -> Iterator[Row]:
    """All numbers at and below a node."""
    if isinstance(node, dict):
        yield from walk_dict(node, place)
    elif isinstance(node, list):
        yield from walk_list(node, place)
    elif isinstance(node, int | float) and math.isfinite(node):
        yield number(place, float(node))


def walk_dict(node: dict[str, Any], place: Place) -> Iterator[Row]:
    """What is said of all that lies below comes first; then the numbers with an interval; then the rest."""
    place = informed(place, node)
    used = set(ABOUT)
    if "iteration" in node:
        used |= {"iteration", "env_steps"}
    for solved, episodes in COUNTS:
        if isinstance(node.get(solved), int) and isinstance(node.get(episodes), int):
            yield share(place.at("success"), node[solved], node[episodes], node.get("interval"))
            used |= {solved, episodes, "interval", "success", "success_rate", "rate", "low", "high"}
            break
    for key in ("value", "iqm"):
        if key in node and "low" in node:
            here = place if key == "value" else place.at(key)
            yield number(here, node[key], (node["low"], node["high"]))
            used |= {key, "low", "high"}
    for key in ("success", "difference"):
        interval = node.get(f"interval of the {key}", node.get("interval"))
        if key not in used and isinstance(node.get(key), float) and interval:
            yield number(place.at(key), node[key], tuple(interval), node.get("episodes"))
            used |= {key, "interval", f"interval of the {key}"}
    for key, value in node.items():
        if key in used:
            continue
        run, _, seed = key.rpartition("/") if is_run(value) else ("", "", key)
        if seed.isdigit() and (run or is_curve(value)):
            inside = dataclasses.replace(place, seed=int(seed))
            yield from walk(value, inside.at(run) if run else inside)
        else:
            group = key in GROUPS and isinstance(value, dict | list)
            yield from walk(value, place if group else place.at(key))


def walk_list(node: list[Any], place: Place) -> Iterator[Row]:
    """A rate, a number with its interval, a curve, or elements by name or by number."""
    if is_rate(node):
        yield share(place, node[0], node[1], node[2:])
    elif is_interval(node) and INTERVALS & set(place.path):
        yield number(place, node[0], (node[1], node[2]))
    else:
        for index, element in enumerate(node):
            if isinstance(element, dict):
                yield from walk(element, element_place(element, index, place))
            elif isinstance(element, list) and len(element) == 2:
                yield number(dataclasses.replace(place, x=float(element[0])), element[1])
            else:
                yield from walk(element, dataclasses.replace(place, index=index))


def element_place(element: dict[str, Any], index: int, place: Place) -> Place:
    """An element of a list goes by the fields that the catalogue names, or by its steps, seed, or number."""
    told = [k for k in place.keys if k in element]
    if told:
        names = (element[k] if isinstance(element[k], str) else f"{k}={element[k]}" for k in told)
        return place.at(" ".join(names))
    if "iteration" in element or "seed" in element:
        return place
    if "steps" in element and "psnr" in element:
        return dataclasses.replace(place, x=float(element["steps"]))
    return place.at(str(index))


def informed(place: Place, node: dict[str, Any]) -> Place:
    """The place with what a dict says of all that lies in it."""
    found: dict[str, Any] = {
        name: node[key]
        for key, name in (("seed", "seed"), ("iteration", "index"))
        if isinstance(node.get(key), int)
    }
    if "iteration" in node and "env_steps" in node:
        found["x"] = float(node["env_steps"])
    if isinstance(node.get("commit"), str):
        found["commit"] = node["commit"]
    if isinstance(node.get("title"), str):
        found["label"] = node["title"]
    if isinstance(node.get("hardware"), dict):
        found["hardware"] = machine(node["hardware"])
    return dataclasses.replace(place, **found)


def machine(hardware: dict[str, Any]) -> str:
    """``2 x AMD EPYC, 24 GiB, NVIDIA H100``."""
    cpu = re.sub(r"\(R\)|\(TM\)| Processor", "", hardware["cpu"]).strip()
    memory = f", {hardware['memory_gib']:.0f} GiB" if "memory_gib" in hardware else ""
    gpu = f", {hardware['gpu']}" if hardware.get("gpu") else ""
    return f"{hardware['cores']} x {cpu}{memory}{gpu}"


def number(
    place: Place,
    value: float,
    interval: tuple[float, ...] | None = None,
    episodes: int | None = None,
    successes: int | None = None,
) -> Row:
    """The row of a number whose metric is the last key of its path."""
    *run, metric = place.path
    low, high = interval or (None, None)
    path = "/".join(place.path)
    unit = next((unit for pattern, unit in UNITS.items() if re.search(pattern, path)), "")
    unit = "" if unit == "share" and not 0 <= value <= 1 else unit
    return Row(
        place.benchmark, "/".join(run), place.label, place.seed, metric, place.index, place.x,
        float(value), successes, episodes, low, high, unit, place.commit, place.hardware,
    )  # fmt: skip


def share(place: Place, successes: int, episodes: int, interval: list[float] | None) -> Row:
    """A success rate."""
    bounds = tuple(interval) if interval else wilson(successes, episodes)
    value = successes / episodes if episodes else 0.0
    return number(place, value, bounds, episodes, successes)


def is_rate(node: list[Any]) -> bool:
    """``[successes, episodes, low, high]``."""
    if len(node) != 4 or not all(isinstance(x, int | float) for x in node):
        return False
    successes, episodes, low, high = node
    whole = isinstance(successes, int) and isinstance(episodes, int)
    return whole and episodes > 0 and low - 1e-9 <= successes / episodes <= high + 1e-9 <= 1.1


def is_interval(node: list[Any]) -> bool:
    """``[value, low, high]``."""
    plain = len(node) == 3 and all(isinstance(x, int | float) for x in node)
    return plain and node[1] <= node[0] <= node[2]


def is_curve(value: Any) -> bool:
    """A list of evaluations."""
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, dict) and "iteration" in first


def is_run(value: Any) -> bool:
    """A dict with the evaluations of one run."""
    return isinstance(value, dict) and "evaluations" in value
