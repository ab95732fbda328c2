"""MetaWorld's tasks in words, and the suites that they form."""

from __future__ import annotations

from embodyrl.errors import UserError, did_you_mean
from embodyrl.ranges import names_in
from embodyrl.registry import TaskInfo

SPLITS = {"train": "resets with even seeds", "eval": "resets with odd seeds"}

SENTENCES = {
    "assembly-v3": "pick up the nut and put it onto the peg",
    "basketball-v3": "dunk the ball into the basket",
    "bin-picking-v3": "pick the block from one bin and place it into the other",
    "box-close-v3": "grasp the lid and close the box with it",
    "button-press-topdown-v3": "press the button from the top",
    "button-press-topdown-wall-v3": "press the button from the top, past the wall",
    "button-press-v3": "press the button",
    "button-press-wall-v3": "press the button, past the wall",
    "coffee-button-v3": "push the button of the coffee machine",
    "coffee-pull-v3": "pull the mug away from the coffee machine",
    "coffee-push-v3": "push the mug under the coffee machine",
    "dial-turn-v3": "turn the dial",
    "disassemble-v3": "lift the nut off the peg",
    "door-close-v3": "close the door",
    "door-lock-v3": "lock the door by turning its lock",
    "door-open-v3": "open the door",
    "door-unlock-v3": "unlock the door by turning its lock",
    "hand-insert-v3": "insert the gripper into the hole",
    "drawer-close-v3": "close the drawer",
    "drawer-open-v3": "open the drawer",
    "faucet-open-v3": "open the faucet",
    "faucet-close-v3": "close the faucet",
    "hammer-v3": "hammer the nail into the wall",
    "handle-press-side-v3": "press the handle down from the side",
    "handle-press-v3": "press the handle down",
    "handle-pull-side-v3": "pull the handle up from the side",
    "handle-pull-v3": "pull the handle up",
    "lever-pull-v3": "pull the lever up",
    "peg-insert-side-v3": "insert the peg into the hole from the side",
    "pick-place-wall-v3": "pick up the puck, carry it over the wall and place it at the goal",
    "pick-out-of-hole-v3": "pick the puck out of the hole",
    "reach-v3": "reach the goal",
    "push-back-v3": "push the block back to the goal",
    "push-v3": "push the puck to the goal",
    "pick-place-v3": "pick up the puck and place it at the goal",
    "plate-slide-v3": "slide the plate into the cabinet",
    "plate-slide-side-v3": "slide the plate sideways into the cabinet",
    "plate-slide-back-v3": "slide the plate back out of the cabinet",
    "plate-slide-back-side-v3": "slide the plate back sideways out of the cabinet",
    "peg-unplug-side-v3": "unplug the peg sideways",
    "soccer-v3": "kick the ball into the goal",
    "stick-push-v3": "grasp the stick and push the box with it",
    "stick-pull-v3": "grasp the stick and pull the box with it",
    "push-wall-v3": "push the puck past the wall to the goal",
    "reach-wall-v3": "reach the goal past the wall",
    "shelf-place-v3": "pick up the block and place it onto the shelf",
    "sweep-into-v3": "sweep the block into the hole",
    "sweep-v3": "sweep the block off the table",
    "window-open-v3": "push the window open",
    "window-close-v3": "push the window closed",
}
"""Task -> sentence, in MetaWorld's order."""

_MT10 = (
    "reach-v3",
    "push-v3",
    "pick-place-v3",
    "door-open-v3",
    "drawer-open-v3",
    "drawer-close-v3",
    "button-press-topdown-v3",
    "peg-insert-side-v3",
    "window-open-v3",
    "window-close-v3",
)
_MT25 = (
    *_MT10,
    "coffee-pull-v3",
    "pick-out-of-hole-v3",
    "disassemble-v3",
    "pick-place-wall-v3",
    "basketball-v3",
    "stick-pull-v3",
    "button-press-wall-v3",
    "faucet-open-v3",
    "door-lock-v3",
    "lever-pull-v3",
    "sweep-into-v3",
    "faucet-close-v3",
    "coffee-button-v3",
    "button-press-topdown-wall-v3",
    "dial-turn-v3",
)
SUITES = {"mt10": _MT10, "mt25": _MT25, "mt50": tuple(SENTENCES)}
"""MetaWorld's multi-task suites."""


def chosen_tasks(suite: str, task: str) -> tuple[str, ...]:
    """The tasks of a run.

    Args:
        suite: a name of ``SUITES``.
        task: names of the suite's tasks, separated by commas; empty for all.

    Raises:
        UserError: there is no such suite or task.
    """
    if suite not in SUITES:
        raise UserError(f"MetaWorld has no suite {suite!r}. {did_you_mean(suite, SUITES)}")
    if not task:
        return SUITES[suite]
    names = names_in(task)
    for name in names:
        if name not in SENTENCES:
            hint = did_you_mean(name, SENTENCES)
            near = f"{hint} " if hint.startswith("Did you mean") else ""
            listed = ", ".join(sorted(SENTENCES))
            raise UserError(f"MetaWorld has no task {name!r}. {near}Valid names: {listed}.")
        if name not in SUITES[suite]:
            raise UserError(
                f"MetaWorld's task {name} is not in {suite}; set env.suite=mt50, which has all."
            )
    return names


def list_tasks() -> list[TaskInfo]:
    """All fifty, under the smallest suite that has them."""
    smallest = {name: suite for suite in ("mt50", "mt25", "mt10") for name in SUITES[suite]}
    return [
        TaskInfo(name, sentence, f"env.task={name}", group=smallest[name])
        for name, sentence in SENTENCES.items()
    ]
