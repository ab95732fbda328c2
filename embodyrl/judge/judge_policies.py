"""``embodyrl judge``: several policies, from recorded episodes and a dream alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embodyrl import starting
from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.devices import use_device
from embodyrl.errors import UserError, did_you_mean
from embodyrl.judge.dreamt import dreamt_successes, first_observations, open_dream
from embodyrl.judge.estimates import WAYS, Estimate, agreement, differences
from embodyrl.judge.fitted_q import fitted_q, would_do
from embodyrl.judge.logged import Logged, read_logged
from embodyrl.policy import num_executed
from embodyrl.storage.paths import expand_home

DEFAULT = "agreement"
"""In the pilot it alone put the best policy first (docs/howto/judge.md)."""
BETTER = {"agreement": "agrees more with the solved episodes than"}
"""What a real difference says of a way that is no estimate of success."""


def judge_policies(
    runs: Sequence[str],
    data: Sequence[str],
    *,
    dream: str = "",
    by: str = "",
    episodes: int = 64,
    seed: int = 0,
    device: str = "auto",
) -> dict[str, Any]:
    """What recorded episodes say of each policy, and which differences are real.

    Args:
        runs: checkpoints, or runs, whose newest checkpoint is meant.
        data: LeRobotDatasets with solved and failed episodes, whoever played them.
        dream: folder of a world model; empty for none.
        by: the way of ``WAYS`` by which the policies are sorted and compared; by default
            ``DEFAULT``.
        episodes: recorded beginnings from which the policies dream.
        seed: of critics, and of what is sampled.
        device: of policies and critics.

    Returns:
        ``solved`` and ``failed`` episodes; ``ways``, and ``by`` which one the policies are sorted;
        ``policies``, the best first, each with ``policy`` and the ``value`` and ``interval`` of each
        way; ``pairs`` (``estimates.differences``); and ``remarks``.

    Raises:
        UserError: a checkpoint named twice, data that cannot judge these policies, or a way that is
            not known.
    """
    ways = ["fitted_q", "agreement", *(["dream"] if dream else [])]
    by = by or DEFAULT
    if by == "dream" and not dream:
        raise UserError("--by dream sorts by a dream, and none is given: name one (--dream MODEL).")
    if by not in ways:
        raise UserError(f"There is no way to judge {by!r}. {did_you_mean(by, ways)}")
    if twice := [run for run in runs if runs.count(run) > 1]:
        raise UserError(f"{twice[0]} is named twice. Name each policy once.")
    if episodes < 1:
        raise UserError(f"--episodes is {episodes}; it must be at least 1.")
    where = use_device(device, "--device")
    found: dict[str, dict[str, Estimate]] = {}
    remarks: list[str] = []
    # What recorded episodes say. Policies of the same env and chunks read them alike.
    read: tuple[Any, Logged] | None = None
    for run in runs:
        policy: Any = load_policy(run, load_config(run).policy, load_spec(run), 0, where)
        policy.eval()
        key = (policy.spec, num_executed(policy.config))
        if read is None or read[0] != key:
            with starting.step("reading the episodes"):
                logged, said = read_logged(data, policy, where, seed)
            read = (key, logged)
            remarks += [text for text in said if text not in remarks]
        with starting.step(f"judging {run}"):
            proposals = would_do(policy, read[1], where, seed)
            found[run] = {
                "fitted_q": Estimate("fitted_q", fitted_q(read[1], proposals, seed)),
                "agreement": Estimate("agreement", agreement(read[1], proposals)),
            }
        remarks += _learned_from(run, data)
    assert read is not None
    success = read[1].success
    if dream:
        _dream(found, dream, data, min(episodes, len(success)), seed, str(where))
    summaries = {run: {way: of[way].summary() for way in ways} for run, of in found.items()}
    order = sorted(runs, key=lambda run: -summaries[run][by]["value"])
    return {
        "data": list(data),
        "solved": int(success.sum()),
        "failed": int((~success).sum()),
        "ways": ways,
        "by": by,
        "policies": [{"policy": run, **summaries[run]} for run in order],
        "pairs": differences([found[run][by] for run in order]),
        "remarks": remarks,
    }


def _dream(
    found: dict[str, dict[str, Estimate]],
    model: str,
    data: Sequence[str],
    episodes: int,
    seed: int,
    device: str,
) -> None:
    """Adds what a world model says of each policy."""
    env = open_dream(model, episodes, device)
    beginnings = first_observations(data, env.spec, episodes)
    for run, of in found.items():
        with starting.step(f"dreaming with {run}"):
            solved = dreamt_successes(run, env, beginnings, seed)
            of["dream"] = Estimate("dream", solved.double().numpy())


def _learned_from(run: str, data: Sequence[str]) -> list[str]:
    """A sentence for each of the data sets that a policy was trained on."""
    section = load_config(run).data
    known = {_absolute(path) for path in (section.path, *section.more) if path}
    return [
        f"{run} learned from {path}: it agrees with those episodes more than with others."
        for path in data
        if _absolute(path) in known
    ]


def _absolute(path: str) -> str:
    return str(Path(expand_home(path)).absolute())


def print_judgement(found: dict[str, Any]) -> None:
    """The same for people to read."""
    rows = found["policies"]
    width = max(len(row["policy"]) for row in rows)
    heads = "".join(f"  {WAYS[way]:>18}" for way in found["ways"])
    print(f"   {'':<{width}}{heads}")
    for k, row in enumerate(rows):
        cells = "".join(f"  {_cell(row[way]):>18}" for way in found["ways"])
        print(f"{letter(k)}  {row['policy']:<{width}}{cells}")
    total = found["solved"] + found["failed"]
    print(
        f"From {total:,} recorded episodes, {found['solved']:,} of them solved; nothing was played. "
        f"Sorted by {WAYS[found['by']]}."
    )
    print(verdict_of(found["pairs"], len(rows), BETTER.get(found["by"], "is better than")))
    for text in found["remarks"]:
        print(text)


def _cell(of: dict[str, Any]) -> str:
    low, high = of["interval"]
    return f"{100 * of['value']:.1f}% [{100 * low:.0f}, {100 * high:.0f}]"


def letter(k: int) -> str:
    """The k-th policy's name in a sentence: A to Z, then A1 and so on."""
    return chr(ord("A") + k % 26) + (str(k // 26) if k >= 26 else "")


def verdict_of(
    pairs: Sequence[dict[str, Any]], count: int, better_than: str = "is better than"
) -> str:
    """Which differences are real, e.g. ``"A is better than C. Cannot tell A from B; B from C."``."""
    if count < 2:
        return "There is one policy, so there is nothing to tell it from."
    better: dict[int, list[str]] = {}
    alike: dict[int, list[str]] = {}
    for pair in pairs:
        # Sorted by their values, the first of a pair is never the worse one.
        kind = better if pair["better"] else alike
        kind.setdefault(pair["a"], []).append(letter(pair["b"]))
    if not better:
        return "Cannot tell any of these policies from another: their differences may be chance."
    told = [f"{letter(a)} {better_than} {_listed(of)}." for a, of in better.items()]
    unsure = "; ".join(f"{letter(a)} from {_listed(of)}" for a, of in alike.items())
    return " ".join([*told, *([f"Cannot tell {unsure}."] if unsure else [])])


def _listed(names: Sequence[str]) -> str:
    """Names as a sentence lists them."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
