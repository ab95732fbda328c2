"""Refuses settings of a flow policy that contradict one another, or that nothing would read."""

from __future__ import annotations

from typing import Any

from embodyrl.errors import UserError, refuse_unread
from embodyrl.policies.chooser import check_chooser
from embodyrl.policies.one_step import check_one_step

TRANSITIONS = ("flow_sde", "flow_cps", "flow_noise")
TRAINED_STEPS = ("all", "one")
"""What ``transition`` and ``trained_steps`` of a flow policy may be."""


def check_sampler(config: Any) -> None:
    """Refuses wrong settings of the sampler, the critic and the noise policy.

    Raises:
        UserError: a value that does not exist, or a changed setting that nothing would read.
    """
    if config.noise_min > config.noise_max:
        raise UserError(
            f"policy.noise_min is {config.noise_min}; it must not be above policy.noise_max, which "
            f"is {config.noise_max}."
        )
    unread = ("eta",) if config.transition == "flow_noise" else ("noise_min", "noise_max")
    refuse_unread(config, "policy", unread, f"transition={config.transition} does not read it")
    check_start(config)
    check_chooser(config)
    check_executed(config)


def check_shortcut(config: Any) -> None:
    """Refuses numbers of steps that a shortcut policy does not learn.

    Raises:
        UserError: ``shortcut_steps`` or ``num_denoise_steps`` is no such power of two.
    """
    most = config.shortcut_steps
    if not most:
        return
    if most < 2 or most & (most - 1):
        raise UserError(
            f"policy.shortcut_steps is {most}; it must be a power of two of at least 2, because a "
            "step is learned from two of half its size. 8 is usual."
        )
    # It acts with a size that it has learned.
    steps = config.num_denoise_steps
    if steps > most or steps & (steps - 1):
        raise UserError(
            f"policy.num_denoise_steps is {steps}, but a policy with policy.shortcut_steps={most} "
            f"learns to act in 1, 2, 4 and so on up to {most} steps. Take one of these, or raise "
            "policy.shortcut_steps."
        )


def check_start(config: Any) -> None:
    """Refuses a changed setting of the initial noise that nothing would read, and two ways to act.

    Raises:
        UserError: naming it.
    """
    check_one_step(config)
    if config.steer_width:
        refuse_unread(config, "policy", ("start_noise",), "the noise policy chooses that noise")
    else:
        why = "steer_width=0 leaves the initial noise as it is"
        refuse_unread(config, "policy", ("steer_bound",), why)


def check_executed(config: Any) -> None:
    """Refuses to execute more actions than a chunk has.

    Raises:
        UserError: ``execute`` is above ``horizon``.
    """
    if config.execute > config.horizon > 0:
        raise UserError(
            f"policy.execute is {config.execute}, but a chunk has {config.horizon} actions "
            "(policy.horizon). Execute at most that many."
        )
