"""The figures of ``docs/images`` that are made of numbers, each drawn from rows of the tidy table.

A benchmark draws its figure by the same function from the rows of its own JSON: ``draw_json``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tidy import HERE, Row, catalogue, read

from embodyrl.errors import UserError
from embodyrl.functional.intervals import bootstrap_iqm

IMAGES = HERE.parent / "docs" / "images"
PUBLISHED = "ReinFlow after 80 M env steps"
STARTS = {"first_line": "First line", "first_work": "First work done"}


def training(rows: list[Row]) -> Figure:
    """Success against env steps and against minutes of RL, one line per seed."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for seed in seeds(rows):
        success = curve(rows, "", "success", seed)
        thousands = [row.x / 1000 for row in success]  # type: ignore[operator]
        minutes = [row.value for row in curve(rows, "", "minutes", seed)]
        for axis, x in zip(axes, (thousands, minutes), strict=True):
            percent = [100 * row.value for row in success]
            axis.plot(x, percent, marker="o", markersize=3, label=f"seed {seed}")
            axis.fill_between(x, *bounds(success), alpha=0.15)
    for axis, label in zip(axes, ("env steps (thousands)", "minutes of RL"), strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("success, held-out states (%)")
    axes[0].set_ylim(0, 100)
    axes[0].legend()
    figure.suptitle(rows[0].label)
    figure.tight_layout()
    return figure


def algorithms(rows: list[Row]) -> Figure:
    """Interquartile mean over seeds with its bootstrap interval, against env steps and against minutes."""
    runs = unique(row.run for row in rows if row.metric == "success")
    tasks = unique(run.split("/")[0] for run in runs)
    names = unique(row.run.split("/")[1] for row in rows if row.metric == "after")
    colours = dict(zip(names, plt.get_cmap("tab20").colors, strict=False))  # type: ignore[attr-defined]
    height = 4.2 * len(tasks)
    figure, grid = plt.subplots(len(tasks), 2, figsize=(11, height), squeeze=False, sharey=True)
    labels = catalogue()[rows[0].benchmark]["labels"]
    for axes, task in zip(grid, tasks, strict=True):
        for name in names:
            if f"{task}/{name}" in runs:
                draw_algorithm(axes, rows, f"{task}/{name}", colours[name])
        for axis, label in zip(axes, ("env steps (thousands)", "minutes on one core"), strict=True):
            axis.set_xlabel(label)
            axis.grid(alpha=0.3)
            axis.set_title(labels[task], fontsize=10)
        axes[0].set_ylabel("success, held-out states (%)")
        axes[0].set_ylim(0, 100)
        axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
    figure.tight_layout()
    return figure


def draw_algorithm(axes: Any, rows: list[Row], run: str, colour: Any) -> None:
    """One algorithm on one task, over its seeds, as far as all of them went."""
    numbers = seeds(rows, run)
    successes = list(zip(*(curve(rows, run, "success", seed) for seed in numbers), strict=False))
    minutes = list(zip(*(curve(rows, run, "minutes", seed) for seed in numbers), strict=False))
    steps = [mean(row.x for row in point) / 1000 for point in successes]  # type: ignore[misc]
    times = [mean(row.value for row in point) for point in minutes]
    y = [[100 * v for v in bootstrap_iqm([row.value for row in p])] for p in successes]
    label = successes[0][0].label
    for axis, x in zip(axes, (steps, times), strict=True):
        axis.plot(x, [p[0] for p in y], marker="o", markersize=3, color=colour, label=label)
        axis.fill_between(x, [p[1] for p in y], [p[2] for p in y], color=colour, alpha=0.1)


def dreams(rows: list[Row]) -> Figure:
    """Success in the simulator by dreamt actions and by minutes, a line a run."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for number, run in enumerate(unique(row.run for row in rows if row.metric == "after")):
        for first, seed in enumerate(seeds(rows, run)):
            success = curve(rows, run, "success", seed)
            thousands = [row.x / 1000 for row in success]  # type: ignore[operator]
            minutes = [row.value for row in curve(rows, run, "minutes", seed)]
            for axis, x in zip(axes, (thousands, minutes), strict=True):
                axis.plot(
                    x, [100 * row.value for row in success], marker="o", markersize=3,
                    color=f"C{number}", label=success[0].label if first == 0 else None,
                )  # fmt: skip
    names = ("actions, dreamt or real (thousands)", "minutes on one core")
    for axis, label in zip(axes, names, strict=True):
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="success in the simulator,\nheld-out states (%)", ylim=(0, 100))
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    return figure


def hopper(rows: list[Row]) -> Figure:
    """Return against env steps, a line a seed, and the published one."""
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for seed in seeds(rows):
        points = curve(rows, "", "return", seed)
        millions = [row.x / 1e6 for row in points]  # type: ignore[operator]
        axis.plot(millions, [row.value for row in points], label=f"seed {seed}")
    published = one(rows, "published", "after").value
    axis.axhline(published, color="grey", linestyle="--", linewidth=1)
    axis.text(0, published + 30, PUBLISHED, color="grey", fontsize=8)
    title = "Hopper-v5: PPO with Flow-Noise from behaviour cloning"
    axis.set(xlabel="env steps (millions)", ylabel="return", title=title)
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    return figure


def locomotion(rows: list[Row]) -> Figure:
    """Interquartile mean over seeds with its bootstrap interval, against env steps."""
    labels = list(catalogue()["locomotion"]["labels"].values())
    known = {row.run: labels.index(row.label) for row in rows if row.metric == "return"}
    runs = sorted(known, key=lambda run: known[run])
    envs = unique(row.run.split("/")[1] for row in rows if row.run.startswith("final_return/"))
    figure, axes = plt.subplots(1, len(envs), figsize=(4.5 * len(envs), 3.6), squeeze=False)
    shown: dict[str, Any] = {}
    for axis, env in zip(axes[0], envs, strict=True):
        for run in (run for run in runs if run.startswith(f"{env}/")):
            curves = (curve(rows, run, "return", seed) for seed in seeds(rows, run))
            # The last regular evaluation is five iterations before the one at the end: a jump.
            found = [[*points[:-2], points[-1]] for points in curves]
            y = [bootstrap_iqm([row.value for row in p]) for p in zip(*found, strict=False)]
            x = [row.x for row in found[0]][: len(y)]
            label = found[0][0].label
            colour = f"C{known[run]}"
            (shown[label],) = axis.plot(x, [p[0] for p in y], color=colour)
            axis.fill_between(x, [p[1] for p in y], [p[2] for p in y], color=colour, alpha=0.15)
        axis.set_title(env)
        axis.set_xlabel("env steps")
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("return")
    options = {"loc": "lower center", "ncols": len(shown), "frameon": False, "fontsize": 8}
    figure.legend(shown.values(), shown, **options)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    return figure


def imagination(rows: list[Row]) -> Figure:
    """Real success by real steps, pictures by depth, and policies in the dream against the real env."""
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), width_ratios=(1.5, 1, 1))
    for number, seed in enumerate(seeds(rows)):
        mine = [row for row in rows if row.seed == seed]
        draw_by_steps(axes[0], mine, f"C{number}")
        for metric, style in (
            ("psnr", {"label": f"seed {seed}"}),
            ("psnr_still", {"color": "grey", "linewidth": 0.8}),
        ):
            points = curve(mine, "deep/by_depth", metric, seed)
            axes[1].plot([row.x for row in points], [row.value for row in points], **style)
        judged = [row for row in mine if row.run.startswith("world/as_evaluator/policies/")]
        dreamt = [100 * row.value for row in judged if row.metric == "imagined" and is_policy(row)]
        real = [100 * row.value for row in judged if row.metric == "real" and is_policy(row)]
        axes[2].scatter(dreamt, real, s=16)
    steps = "real env steps (thousands); stars: held-out states"
    axes[0].set(xlabel=steps, ylabel="real success (%)", ylim=(0, 100))
    axes[1].set(xlabel="steps into the dream", ylabel="PSNR (dB); grey: a still picture")
    axes[2].plot([0, 100], [0, 100], color="grey", linewidth=0.8)
    names = {"xlabel": "success in the dream (%)", "ylabel": "real success (%)"}
    axes[2].set(**names, xlim=(0, 100), ylim=(0, 100))
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=6)
    figure.tight_layout()
    return figure


def draw_by_steps(axis: Axes, rows: list[Row], colour: str) -> None:
    """Success on the way, in the dream and in the simulator; a star for the held-out states at the end."""
    loop = one(rows, "loop", "real_steps").value + one(rows, "loop", "eval_steps").value
    ends = {"loop": (loop, one(rows, "loop/after", "success").value)}
    for run in unique(row.run for row in rows if row.run.startswith("simulator/")):
        steps, success = one(rows, run, "real_steps").value, one(rows, run, "success").value
        ends[run.split("/")[1]] = (steps, success)
    for (name, end), line in zip(ends.items(), ("o-", "--", ":", "-."), strict=False):
        way = [row for row in rows if row.run == "by_real_steps" and row.metric == name]
        called = "dream" if name == "loop" else f"simulator, {name.replace('_', ' ')}"
        axis.plot(
            [row.x / 1000 for row in way], [100 * row.value for row in way], line, color=colour,  # type: ignore[operator]
            markersize=3, linewidth=1, label=f"{called}, seed {rows[0].seed}",
        )  # fmt: skip
        axis.plot(end[0] / 1000, 100 * end[1], "*", color=colour, markersize=9)


def is_policy(row: Row) -> bool:
    """Whether a row is of a policy as a whole, not of its successes after some real chunks."""
    return row.run.count("/") == 3


def online(rows: list[Row]) -> Figure:
    """Success against minutes of the arm's time, with a person who takes over and without."""
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for person, name, colour in (
        ("person=True", "a person takes over", "tab:blue"),
        ("person=False", "alone", "tab:grey"),
    ):
        for first, seed in enumerate(seeds(rows, person)):
            success = curve(rows, person, "success", seed)
            x = [row.value for row in curve(rows, person, "arm_minutes", seed)]
            y = [100 * row.value for row in success]
            axis.plot(x, y, "o-", color=colour, label=None if first else name)
            axis.fill_between(x, *bounds(success), color=colour, alpha=0.12, linewidth=0)
    label = "success of the policy alone (%)"
    axis.set(xlabel="minutes of the arm's time", ylabel=label, ylim=(0, 102))
    axis.legend()
    figure.tight_layout()
    return figure


def improve(rows: list[Row]) -> Figure:
    """Success against a person's seconds and against the arm's minutes, a line for each way to help."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    costs = {"person_seconds": "seconds of a person", "arm_minutes": "minutes of the arm's time"}
    for number, run in enumerate(unique(r.run for r in rows if r.metric == "person_seconds")):
        for first, seed in enumerate(seeds(rows, run)):
            y = [100 * row.value for row in curve(rows, run, "success", seed)]
            for axis, (cost, label) in zip(axes, costs.items(), strict=True):
                x = [row.value for row in curve(rows, run, cost, seed)]
                name = None if first else run
                axis.plot(x, y, "o-", color=f"C{number}", markersize=3, label=name)
                axis.set_xlabel(label)
                axis.grid(alpha=0.3)
    axes[0].set(ylabel="success of the policy alone (%)", ylim=(0, 102))
    axes[0].legend()
    figure.tight_layout()
    return figure


def starts(rows: list[Row]) -> Figure:
    """Bars: seconds until the first line and until the first work, by command, before and after."""
    commands = unique(row.run.split("/")[1] for row in rows if row.run.startswith("seconds/"))
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    for axis, (metric, title) in zip(axes, STARTS.items(), strict=True):
        for offset, which in ((0.2, "before"), (-0.2, "after")):
            found = {
                number + offset: row.value
                for number, command in enumerate(commands)
                for row in rows
                if row.run == f"seconds/{command}/warm/{which}/median" and row.metric == metric
            }
            axis.barh(list(found), list(found.values()), height=0.38, label=which)
        axis.set_title(title)
        axis.set_xlabel("seconds")
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(commands)), commands)
    axes[0].invert_yaxis()
    axes[1].legend()
    figure.tight_layout()
    return figure


# Function and dots per inch, by the name that the catalogue calls a figure by.
FIGURES: dict[str, tuple[Callable[[list[Row]], Figure], int]] = {
    "training": (training, 130),
    "algorithms": (algorithms, 120),
    "dreams": (dreams, 120),
    "hopper": (hopper, 130),
    "locomotion": (locomotion, 130),
    "imagination": (imagination, 130),
    "online": (online, 120),
    "improve": (improve, 120),
    "starts": (starts, 130),
}


def draw(name: str, rows: list[Row], path: Path | None = None) -> Path:
    """Draws a benchmark's figure from its rows of the table, and returns its file."""
    kind = catalogue().get(name, {}).get("figure")
    if kind is None:
        drawn = ", ".join(n for n, entry in catalogue().items() if "figure" in entry)
        raise UserError(f"{name!r} has no figure. These have one: {drawn}.")
    return save(kind, rows, path or IMAGES / f"{name}.png")


def draw_json(path: Path, kind: str) -> Path:
    """Draws what a benchmark has just written: into ``docs/images`` if ``benchmarks/`` is where it wrote it."""
    published = path.resolve().parent == HERE
    file = IMAGES / f"{path.stem}.png" if published else path.with_suffix(".png")
    return save(kind, read(path.stem, path), file)


def save(kind: str, rows: list[Row], path: Path) -> Path:
    """Writes a figure of a kind of ``FIGURES``."""
    function, dpi = FIGURES[kind]
    figure = function(rows)
    figure.savefig(path, dpi=dpi)
    plt.close(figure)
    return path


def unique(names: Iterable[str]) -> list[str]:
    """Each name once, in the order of the table."""
    return list(dict.fromkeys(names))


def seeds(rows: list[Row], run: str | None = None) -> list[int]:
    """The seeds of a run, or of all, in the order of the table."""
    found = (row.seed for row in rows if run in (None, row.run))
    return [seed for seed in dict.fromkeys(found) if seed is not None]


def curve(rows: list[Row], run: str, metric: str, seed: int | None) -> list[Row]:
    """A metric of one seed of a run, in the order of training."""
    found = [r for r in rows if (r.run, r.metric, r.seed) == (run, metric, seed)]
    return [r for r in found if r.index is not None or r.x is not None]


def one(rows: list[Row], run: str, metric: str) -> Row:
    """The only row of that name."""
    [row] = [row for row in rows if row.run == run and row.metric == metric]
    return row


def bounds(points: list[Row]) -> tuple[list[float], list[float]]:
    """Lower and upper ends of the intervals, in percent."""
    low = [100 * row.low for row in points if row.low is not None]
    high = [100 * row.high for row in points if row.high is not None]
    return low, high
