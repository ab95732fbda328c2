"""Does a dream know which of a policy's proposals is better? What to ask before it is trusted.

From real states a policy proposes several chunks. The simulator carries out each, and plays on by
the policy to the end of the episode; the dream ranks them before. What counts is the order within
one state: over all states a model that knows easy states from hard ones looks good, and cannot
choose.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.functional.held_out import auroc
from embodyrl.functional.intervals import wilson
from embodyrl.policy import num_executed
from embodyrl.types import Obs
from embodyrl.world_models.dream_chooser import DreamChooser, promises
from embodyrl.world_models.model import WorldModel

FEWEST = 20
"""States whose proposals differ in their outcome, below which a ranking says nothing."""
RESAMPLES = 1000


def rank_proposals(
    model: WorldModel,
    policy: Any,
    env: VecEnv,
    *,
    states: int = 128,
    proposals: int = 8,
    first_init: int = 0,
    seed: int = 0,
    enough: int = 0,
) -> dict[str, Any]:
    """Ranks a policy's proposals in dreams, and compares with what they really lead to.

    Args:
        model: ranks.
        policy: proposes, and plays on.
        env: real envs, a multiple of ``proposals`` of them.
        states: at least so many, at random moments in the first half of an episode.
        proposals: at each state.
        first_init: the initial states are numbered from here on.
        seed: of the policy's noise and of the moments.
        enough: stop once the proposals differ in their outcome in so many states; 0 looks at all.

    Returns:
        See ``score_ranking``; and ``real_steps``, actions carried out in the real env.

    Raises:
        UserError: the policy cannot propose, or the model cannot rank.
    """
    DreamChooser(policy, model, proposals)  # refuses what cannot choose
    generator = torch.Generator().manual_seed(seed)
    moments = np.random.default_rng(seed)
    at_once = env.spec.num_envs // proposals
    longest = max(1, env.spec.max_episode_steps // num_executed(policy.config) // 2)
    promised: list[Tensor] = []
    solved: list[Tensor] = []
    init = first_init
    real_steps = 0
    while sum(map(len, solved)) < states and not (enough and _mixed(solved) >= enough):
        if env.spec.num_init_states is not None and init + at_once > env.spec.num_init_states:
            break
        # The same state in as many envs as there are proposals.
        age = int(moments.integers(longest))
        inits = range(init, init + at_once)
        obs, over, steps = _play_to(env, policy, inits, proposals, age, generator)
        init += at_once
        # A dream of each proposal, and what really becomes of it.
        seen = obs[::proposals]
        chunks = policy.propose(seen, proposals, generator)
        promised.append(promises(model, seen, chunks)[~over])
        ended = over.repeat_interleave(proposals)
        outcome, more = _play_on(env, policy, chunks.flatten(0, 1), ended, generator)
        real_steps += steps + more
        solved.append(outcome.view(at_once, proposals)[~over])
    if not solved or not len(torch.cat(solved)):
        raise UserError(
            f"{env.spec.name} has too few initial states for {states} states of "
            f"{proposals} proposals."
        )
    found = score_ranking(torch.cat(promised).numpy(), torch.cat(solved).numpy(), seed)
    return found | {"real_steps": real_steps}


def _mixed(solved: list[Tensor]) -> int:
    """The states whose proposals differ in their outcome."""
    return sum(int((part.any(1) & ~part.all(1)).sum()) for part in solved)


def _play_to(
    env: VecEnv, policy: Any, inits: range, copies: int, age: int, generator: torch.Generator
) -> tuple[Obs, Tensor, int]:
    """Every initial state in ``copies`` envs, ``age`` chunks later; (B,) which are over; steps."""
    obs = env.reset(init=[init for init in inits for _ in range(copies)])
    steps = 0
    over = torch.zeros(len(obs), dtype=torch.bool)
    for _ in range(age):
        actions = policy.sample(obs[::copies], generator=generator, mode="eval").actions
        step = env.step(actions.repeat_interleave(copies, 0))
        obs = step.obs
        over |= step.done.cpu()
        steps += int(step.valid.sum())
    return obs, over[::copies], steps


def _play_on(
    env: VecEnv, policy: Any, chunks: Tensor, ended: Tensor, generator: torch.Generator
) -> tuple[Tensor, int]:
    """(N,) which episodes are solved that go on with a chunk, then by the policy; and steps.

    Those that have ``ended`` (N,) before stay as they are.
    """
    steps = 0
    solved = torch.zeros(len(chunks), dtype=torch.bool)
    over = ended.clone()
    actions = chunks
    while not over.all():
        step = env.step(actions)
        solved |= step.success.cpu() & ~over
        over |= step.done.cpu()
        steps += int(step.valid.sum())
        actions = policy.sample(step.obs, generator=generator, mode="eval").actions
    return solved, steps


def score_ranking(promised: np.ndarray, solved: np.ndarray, seed: int = 0) -> dict[str, Any]:
    """How well promises order what was solved, within each state.

    Args:
        promised: (M, N) of the dream.
        solved: (M, N) bool, really.
        seed: of the bootstrap.

    Returns:
        ``states``; ``mixed``, those whose proposals differ in their outcome; ``auroc`` over the
        pairs of one state, with ``interval`` (95%, states resampled), None where nothing differs;
        ``mean``, ``chosen`` and ``best``: success of a proposal at random, of the dream's choice
        and of the best; ``verdict`` in words, and whether it ``passes``.
    """
    m = len(solved)
    count = solved.sum(1)
    mixed = np.flatnonzero((count > 0) & (count < solved.shape[1]))
    # Within each state: the share of (solved, unsolved) pairs in the right order, and how many.
    shares = np.array([auroc(promised[k], solved[k]) for k in mixed])
    pairs = count[mixed] * (solved.shape[1] - count[mixed])
    # What the dream's choice leads to.
    chosen = int(solved[np.arange(m), promised.argmax(1)].sum())
    found: dict[str, Any] = {
        "states": m,
        "proposals": solved.shape[1],
        "mixed": len(mixed),
        "auroc": None,
        "interval": None,
        "mean": float(solved.mean()),
        "chosen": chosen / m,
        "chosen_interval": wilson(chosen, m),
        "best": float((count > 0).mean()),
    }
    # The interval: states are resampled, whose pairs depend on one another.
    if len(mixed):
        draws = np.random.default_rng(seed).integers(len(mixed), size=(RESAMPLES, len(mixed)))
        resampled = (shares * pairs)[draws].sum(1) / pairs[draws].sum(1)
        found["auroc"] = float((shares * pairs).sum() / pairs.sum())
        found["interval"] = tuple(float(q) for q in np.quantile(resampled, [0.025, 0.975]))
    said = verdict(found)
    return found | {"verdict": said, "passes": said.startswith("passes")}


def verdict(found: dict[str, Any]) -> str:
    """What a ranking says, in a sentence."""
    if found["mixed"] < FEWEST:
        return (
            f"says nothing: the proposals differ in their outcome in {found['mixed']} of "
            f"{found['states']} states only. Take a policy that solves about half, or more states."
        )
    if found["interval"][0] <= 0.5:
        return (
            "fails: it orders proposals no better than chance. Do not let it choose, and train "
            "nothing in it. Record more episodes of this policy, failures among them."
        )
    if found["chosen"] <= found["mean"]:
        return (
            "fails: it orders proposals better than chance, but its choice solves no more than one "
            "at random. Record more episodes of this policy, failures among them."
        )
    return "passes: it knows better from worse proposals, so let it choose (--dream)."


def ranking_text(found: dict[str, Any]) -> str:
    """What was measured, as a sentence without a full stop."""
    order = ""
    if found["auroc"] is not None:
        low, high = found["interval"]
        order = f"AUROC within a state {found['auroc']:.2f} [{low:.2f}, {high:.2f}]; "
    return (
        f"of {found['proposals']} proposals in {found['states']} states: {order}its choice solves "
        f"{found['chosen']:.0%}, one at random {found['mean']:.0%}, the best {found['best']:.0%}"
    )


def print_ranking(found: dict[str, Any]) -> None:
    """The figures as text."""
    print(ranking_text(found))
    print(f"  the ranking {found['verdict']}")
