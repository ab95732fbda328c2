"""``embodyrl compare``: which of several policies is better, on which tasks, and how sure that is.

Two statements are kept apart. *These policies*: would the one still be better in other episodes?
Episodes are compared in pairs that begin in the same initial state. *Training*: would the one still
be better if both were trained anew? That needs several runs of each, usually with other seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodyrl.errors import UserError
from embodyrl.functional.comparison import adastop, holm, paired_difference, runs_interval
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import COUNT, FLAG, TEXT, read_json, read_yaml
from embodyrl.storage.run_files import EPISODE, read_evaluation, read_evaluations, read_meta

EPISODE_OF_EVAL = {k: v for k, v in EPISODE.items() if k != "return"} | {
    "reward": EPISODE["return"]
}
EVAL = {
    "results": [EPISODE_OF_EVAL],
    "reports_success?": FLAG,
    "execute?": COUNT,
    "env?": TEXT,
    "split?": TEXT,
}
"""Structure of what ``eval --json`` prints."""


OF_THE_MACHINE = (
    *("num_envs", "num_threads", "num_workers", "render_batch", "max_models"),
    *("device", "seed", "split", "randomise"),
)
"""Settings of an env that leave an evaluation as it is."""


@dataclass(frozen=True)
class Scores:
    """One evaluation of one policy.

    Attributes:
        name: where it is from.
        seed: of the training run; None where that is not known.
        success: whether these are successes, and not returns.
        execute: actions executed of each chunk; None where that is not known.
        env: what is known of the env's settings, the split among them.
        values: (initial state, task) -> 1 for a solved episode and 0 for another; or its return.
    """

    name: str
    seed: float | None
    success: bool
    execute: int | None
    env: dict[str, Any]
    values: dict[tuple[int, str], float]


def read_side(text: str) -> list[Scores]:
    """The evaluations of one side.

    Args:
        text: a run's folder, which means its last evaluation; ``FOLDER:NAME``, its evaluation
            ``evals/NAME.json`` (``before``, ``after``, ``iter_000100``); a file that
            ``eval --json`` wrote; several of them, separated by commas; or a folder that holds runs.

    Raises:
        UserError: there is none, or it is damaged.
    """
    found: list[Scores] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        # FOLDER:NAME, unless a file or folder has a colon in its name.
        folder, _, name = part.rpartition(":") if not Path(part).exists() else (part, "", "")
        path = Path(folder or name)
        if path.is_file():
            found.append(_of_file(path))
        elif (path / "evals").is_dir():
            found.append(_of_run(path, name))
        elif runs := sorted(p.parent for p in path.glob("*/evals")):
            found += [_of_run(run, name) for run in runs]
        else:
            raise UserError(
                f"{part} is no run with evaluations, no folder of such runs and no file of "
                "`embodyrl eval RUN --json`. Give one of these, or RUN:before for an evaluation "
                "of a run that is not its last."
            )
    if not found:
        raise UserError("There is nothing to compare: give a run's folder.")
    return found


def _of_run(folder: Path, name: str) -> Scores:
    known = read_evaluations(folder)
    if not known:
        raise UserError(
            f"{folder} has no evaluation yet. `embodyrl eval {folder} --json` makes one."
        )
    if name and name not in known:
        raise UserError(f"{folder} has no evaluation {name!r}. There are: {', '.join(known)}.")
    evaluation = known[name or list(known)[-1]]
    meta = read_meta(folder / "meta.json") if (folder / "meta.json").is_file() else {}
    label = f"{folder}:{name}" if name else str(folder)
    return _scores(label, evaluation, meta.get("seed"), _env_of_run(folder))


def _env_of_run(folder: Path) -> dict[str, Any]:
    """The settings of the env in which a run was evaluated, without those of the machine."""
    if not (folder / "config.yaml").is_file():
        return {}
    config = read_yaml(folder / "config.yaml")
    env = config.get("env") or {}
    split = (config.get("run") or {}).get("eval_split", "eval")
    return {k: v for k, v in env.items() if k not in OF_THE_MACHINE} | {"split": split}


def _of_file(path: Path) -> Scores:
    require_readable(path)
    if path.parent.name == "evals":
        return _scores(str(path), read_evaluation(path), None, _env_of_run(path.parent.parent))
    found = read_json(path, EVAL, "Write it anew: embodyrl eval RUN --json > FILE.")
    rows = [{**row, "return": row["reward"]} for row in found["results"]]
    known = {"env": found.get("env"), "split": found.get("split")}
    env = {key: value for key, value in known.items() if value}
    return _scores(str(path), found | {"episodes": rows}, None, env)


def _scores(
    name: str, evaluation: dict[str, Any], seed: float | None, env: dict[str, Any]
) -> Scores:
    success = evaluation.get("reports_success", True)
    # Where a person acted, an episode says nothing about the policy.
    rows = [row for row in evaluation["episodes"] if not row.get("person")]
    key = "success" if success else "return"
    if any(row[key] is None for row in rows):
        raise UserError(f"{name} has episodes without a {key}, so it has no score to compare.")
    values = {(row["init"], row["task"]): float(row[key]) for row in rows}
    return Scores(name, seed, success, evaluation.get("execute"), env, values)


def compare(sides: Sequence[str], confidence: float = 0.95, groups: int = 0) -> dict[str, Any]:
    """Compares every pair of sides.

    Args:
        sides: two or more, see ``read_side``.
        confidence: of intervals; 1 less the error of the tests. All tests of a call hold at once
            (Holm).
        groups: planned looks of AdaStop's test over runs; 0 leaves it out.

    Returns:
        ``sides`` (name, runs, episodes, mean), ``kind`` (``success`` or ``return``) and ``pairs``:
        for each ``a``, ``b`` and their ``mean``s, the ``difference`` with its ``interval``, ``p``
        (raised for all pairs), ``verdict``, ``pairs`` of episodes, ``needed`` pairs, the same by
        ``tasks``, and ``training``; and ``remarks``, sentences on settings that differ.

    Raises:
        UserError: the sides cannot be compared.
    """
    if len(sides) < 2:
        raise UserError("Give at least two sides to compare: embodyrl compare A B.")
    read = {side: read_side(side) for side in sides}
    remarks = _check(list(itertools.chain.from_iterable(read.values())))
    pairs = [_pair(a, b, read, confidence, groups) for a, b in itertools.combinations(read, 2)]
    # Of all pairs, and of all tasks of all pairs, none is to be called different by chance.
    for tests in (pairs, [task for pair in pairs for task in pair["tasks"].values()]):
        for test, p in zip(tests, holm([t["p"] for t in tests]), strict=True):
            test["p"] = p
            test["verdict"] = _verdict(test, 1 - confidence)
    return {
        "kind": "success" if read[sides[0]][0].success else "return",
        "confidence": confidence,
        "sides": {
            side: {
                "runs": len(scores),
                "episodes": sum(len(s.values) for s in scores),
                "mean": float(np.mean([v for s in scores for v in s.values.values()])),
            }
            for side, scores in read.items()
        },
        "pairs": pairs,
        "remarks": remarks,
    }


def _check(scores: list[Scores]) -> list[str]:
    """What else differs between the evaluations, in words.

    Raises:
        UserError: they differ in something from which no difference of the policies could be told.
    """
    known = {
        "kind of score": [s.success for s in scores],
        "number of executed actions": [s.execute for s in scores if s.execute is not None],
        "split": [s.env["split"] for s in scores if "split" in s.env],
        "simulator": [s.env["name"] for s in scores if "name" in s.env],
        "env": [s.env["env"] for s in scores if "env" in s.env],
    }
    for what, values in known.items():
        if len(set(values)) > 1:
            raise UserError(
                f"These evaluations differ in their {what} ({_listed(values)}), so no difference "
                "of the policies could be told from that. Evaluate them alike."
            )
    # Other settings may change the initial states, or only what is seen of them.
    shared = sorted(set.intersection(*(set(s.env) for s in scores)))
    said = {key: _listed([s.env[key] for s in scores]) for key in shared}
    return [
        f"They were evaluated with different env.{key} ({values}): the pairs hold if that leaves "
        "the initial states as they are."
        for key, values in said.items()
        if values != str(scores[0].env[key])
    ]


def _listed(values: list[Any]) -> str:
    return ", ".join(dict.fromkeys(str(value) for value in values))


def _pair(
    a: str, b: str, read: dict[str, list[Scores]], confidence: float, groups: int
) -> dict[str, Any]:
    """Two sides: in the initial states that both have."""
    # Initial states that all runs of both sides played make the pairs.
    common = set.intersection(*(set(s.values) for side in (a, b) for s in read[side]))
    if len(common) < 2:
        raise UserError(
            f"{a} and {b} have {len(common)} initial states of the same task in common, and it "
            "takes 2 to compare. Evaluate them on the same env and split."
        )
    starts = sorted(common)
    table = {
        side: np.array([[s.values[start] for start in starts] for s in read[side]])
        for side in (a, b)
    }
    success = read[a][0].success
    # By task, where there are several.
    rows = {task: [t == task for _, t in starts] for task in sorted({t for _, t in starts})}
    tasks = {
        task: paired_difference(table[a][:, these], table[b][:, these], confidence, success)
        for task, these in rows.items()
        if len(rows) > 1
    }
    return {
        "a": a,
        "b": b,
        **paired_difference(table[a], table[b], confidence, success),
        "tasks": tasks,
        "training": _training(a, b, table, read, confidence, groups),
    }


def _verdict(test: dict[str, Any], alpha: float) -> str:
    if test["p"] > alpha or test["difference"] == 0:
        return "undecided"
    return "b" if test["difference"] > 0 else "a"


def _training(
    a: str,
    b: str,
    table: dict[str, np.ndarray],
    read: dict[str, list[Scores]],
    confidence: float,
    groups: int,
) -> dict[str, Any] | None:
    """What holds if both are trained anew; None where one side is a single run."""
    scores = [table[side].mean(axis=1).tolist() for side in (a, b)]
    if min(map(len, scores)) < 2:
        return None
    # Runs of one seed share demonstrations and the policy that they start from.
    seeds = [[s.seed for s in read[side]] for side in (a, b)]
    paired = None not in seeds[0] and seeds[0] == seeds[1] and len(set(seeds[0])) == len(seeds[0])
    mean, low, high = runs_interval(*scores, paired=paired, confidence=confidence)
    found: dict[str, Any] = {"paired_by_seed": paired, "difference": mean, "interval": (low, high)}
    found["verdict"] = "b" if low > 0 else "a" if high < 0 else "undecided"
    if groups:
        after, shown, could = adastop(*scores, groups=groups, alpha=1 - confidence)
        looks = {"groups": groups, "stops_after": after, "shown": shown, "could_show": could}
        found["adastop"] = looks
    return found
