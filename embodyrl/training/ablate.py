"""Which of its inputs a policy uses: the same episodes with each of them taken away or exchanged.

A camera that may be blank, or an instruction that may be another one, without any loss of success
is not needed. Success alone does not show that: a policy that has learned where the objects mostly
stand looks as good as one that sees them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.functional.comparison import difference_text, holm, paired_difference
from embodyrl.functional.intervals import format_rate, wilson
from embodyrl.policy import Actor, num_executed
from embodyrl.rollouts.ablated_env import AblatedEnv
from embodyrl.rollouts.batches import Episode, by_policy
from embodyrl.rollouts.evaluation import evaluate
from embodyrl.training.ablation_cases import ablation_cases
from embodyrl.training.evaluate import (
    executed_text,
    open_checkpoint,
    score_summary,
    tell_progress,
)

CONFIDENCE = 0.95
MARGIN = 0.10
"""An input is called not needed where its loss changes success by less than this."""


def ablate_inputs(
    path: str,
    overrides: Sequence[str] = (),
    *,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> dict[str, Any]:
    """Scores a checkpoint as it is, and with each of its inputs taken away or exchanged.

    All cases begin in the same initial states with the same noise, so they are compared in pairs:
    by McNemar's exact test (returns: by sign flips), with Holm's correction over the cases.

    Args:
        path: as in ``evaluate_checkpoint``.
        overrides: likewise.
        seed: likewise.
        say: likewise.
        options: those of ``open_checkpoint``.

    Returns:
        ``checkpoint``, ``env``, ``split``, ``execute``, ``horizon`` and ``reports_success``;
        ``margin``, and ``could_fall``, whether success is high enough to fall by as much;
        ``as_is``, its score; ``cases``, name -> ``about`` and ``input`` in words, its ``score``,
        and what ``paired_difference`` says of it less ``as_is``, with a ``verdict`` (``uses``,
        ``misled``, ``not needed`` or ``undecided``); and ``not_applicable``, name -> why.

    Raises:
        UserError: fewer than two initial states, or a robot.
    """
    with open_checkpoint(path, overrides, say=say, **options) as run:
        found = ablate_actor(run.env, run.policy, run.inits, seed=seed, device=run.device, say=say)
    return {
        "checkpoint": str(path),
        "env": run.env.spec.name,
        "split": run.config.env.split,
        "execute": num_executed(run.policy.config),
        "horizon": run.policy.config.horizon,
        **found,
    }


def ablate_actor(
    env: VecEnv,
    actor: Actor,
    inits: Sequence[int],
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The same of anything that acts in an env; see ``evaluate`` for the arguments.

    Returns:
        What ``ablate_inputs`` returns from ``reports_success`` on.

    Raises:
        UserError: likewise.
    """
    if getattr(env, "supervised", False):
        raise UserError(f"{env.spec.name} is a robot, and no robot is moved blind.")
    if len(inits) < 2:
        raise UserError("Inputs are compared over several episodes: give --episodes 2 or more.")

    def play() -> list[Episode]:
        progress = partial(tell_progress, say, len(inits), [time.monotonic()])
        return evaluate(shown, actor, inits, seed=seed, device=device, progress=progress).episodes

    # As it is; this also shows what every episode begins with.
    shown = AblatedEnv(env)
    say("scoring the policy as it is")
    before = play()
    # Each case in the same states, with the same noise.
    cases, left_out = ablation_cases(env.spec, shown.first)
    after = {}
    for name, case in cases.items():
        say(f"scoring {name}: {case.about}")
        shown.change = case.change
        after[name] = play()
    success = env.spec.reports_success
    compared = {name: _compared(before, scored, success) for name, scored in after.items()}
    # Of all cases, none is to be called different by chance.
    raised = holm([of["p"] for of in compared.values()])
    could_fall = not success or _low(before) > MARGIN
    for of, p in zip(compared.values(), raised, strict=True):
        of["p"] = p
        of["verdict"] = _verdict(of, success, could_fall)
    return {
        "reports_success": success,
        "margin": MARGIN if success else None,
        "could_fall": could_fall,
        "as_is": score_summary(before),
        "cases": {
            name: {
                "about": cases[name].about,
                "input": cases[name].input,
                "score": score_summary(after[name]),
                **of,
            }
            for name, of in compared.items()
        },
        "not_applicable": left_out,
    }


def _compared(before: list[Episode], after: list[Episode], success: bool) -> dict[str, Any]:
    """The change of the score, in the initial states that count in both."""
    values = [
        {e.init: float(e.success) if success else e.reward for e in by_policy(episodes)}
        for episodes in (before, after)
    ]
    # Episodes that a person took over are left out of both.
    both = sorted(values[0].keys() & values[1].keys())
    if len(both) < 2:
        raise UserError("A person acted in nearly all episodes: of the policy they say nothing.")
    a, b = (np.array([[of[init] for init in both]]) for of in values)
    return paired_difference(a, b, CONFIDENCE, success)


def _low(episodes: list[Episode]) -> float:
    counted = by_policy(episodes)
    return wilson(sum(e.success for e in counted), len(counted))[0]


def _verdict(of: dict[str, Any], success: bool, could_fall: bool) -> str:
    # A change that the test shows, for the worse or for the better.
    if of["p"] <= 1 - CONFIDENCE and of["difference"] < 0:
        return "uses"
    if of["p"] <= 1 - CONFIDENCE and of["difference"] > 0:
        return "misled"
    # "Not needed" is more than "no difference is shown": the interval must be narrow.
    narrow = success and of["interval"][0] > -MARGIN and of["interval"][1] < MARGIN
    return "not needed" if narrow and could_fall else "undecided"


WORDS = {
    "uses": "it uses {input}",
    "misled": "it does better without {input}",
    "not needed": "it does not need {input}",
    "undecided": "no difference is shown",
}


def print_ablation(found: dict[str, Any]) -> None:
    """The figures of ``ablate_inputs`` as a table."""
    success = found["reports_success"]
    width = max(map(len, found["cases"]), default=8)
    print(f"{found['env']}, split {found['split']}")
    print(f"{'as it is':<{width}}  {_score(found['as_is'], success)}")
    for name, of in found["cases"].items():
        said = WORDS[of["verdict"]].format(input=of["input"])
        print(
            f"{name:<{width}}  {_score(of['score'], success):<24}  {difference_text(of, success)}: {said}"
        )
    # What the rows mean, and what there is none for.
    print()
    for name, of in found["cases"].items():
        print(f"{name:<{width}}  {of['about']}")
    for name, why in found["not_applicable"].items():
        print(f"{name:<{width}}  not applicable: {why}")
    if success:
        print(f'\n"Does not need": the 95% interval lies within {100 * MARGIN:.0f} points of 0.')
    if not found["could_fall"]:
        print("As it is, it solves too little to lose so much: nothing can be called not needed.")
    elif any(of["verdict"] == "undecided" for of in found["cases"].values()):
        print("Where no difference is shown, more episodes tell more: --episodes N.")
    print(executed_text(found["execute"], found["horizon"]))


def _score(of: dict[str, Any], success: bool) -> str:
    if success:
        return format_rate(of["successes"], of["episodes"])
    low, high = of["return_interval"]
    return f"return {of['return_mean']:.4g} [{low:.4g}, {high:.4g}]"
