"""The gate of ``embodyrl world loop``: nothing is learned from a model that cannot rank proposals.

Before a round's learning the model ranks what the policy proposes in real states, and the real env
carries it out (``dreams.ranking``). A model that fails costs the round its learning, not its data:
the next round records more episodes and goes on training the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from embodyrl.build import make_env
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.dreams.loop_config import LoopConfig
from embodyrl.dreams.ranking import FEWEST, rank_proposals, ranking_text
from embodyrl.dreams.score import load_for_env
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.world_models.dream_chooser import DreamChooser
from embodyrl.world_models.model import WorldModel

ENOUGH = FEWEST + 4
"""States whose proposals differ in their outcome, after which the gate looks at no more."""
FEW = 100
"""Solved or failed episodes, below which more of them are the first thing to try."""


class GateClosed(UserError):
    """No round's model passed the gate, so no policy was trained."""

    status = 3


def measure_gate(config: LoopConfig, model: str, policy: str, real: EnvConfig) -> dict[str, Any]:
    """Whether a world model may be learned from.

    Args:
        config: of the loop.
        model: folder of the world model.
        policy: run or checkpoint that proposes.
        real: config of the real env.

    Returns:
        What ``rank_proposals`` found; of a model or policy that cannot rank at all only ``passes``,
        ``verdict`` and ``real_steps``.
    """
    # As many envs as the real env has, in whole groups of proposals.
    groups = max(1, real.num_envs // config.proposals)
    env = make_env(dataclasses.replace(real, split="train", num_envs=groups * config.proposals))
    try:
        world = WorldModel.load(model)
        actor = load_for_env(policy, env)
        # A model that cannot rank at all is no better than one that ranks by chance.
        try:
            DreamChooser(actor, world, config.proposals)
        except UserError as error:
            return {"passes": False, "verdict": f"fails: {error}", "real_steps": 0}
        # What it foresees of each proposal, and what really becomes of it.
        return rank_proposals(
            world,
            actor,
            env,
            states=config.gate_states,
            proposals=config.proposals,
            seed=config.seed,
            enough=ENOUGH,
        )
    finally:
        env.close()


def gate_text(found: dict[str, Any], config: LoopConfig, data: Sequence[str]) -> str:
    """What was measured, and, of a model that does not pass, what would help and how to go on.

    Args:
        found: by ``measure_gate``.
        config: of the loop.
        data: all data sets that the model has learned from.
    """
    measured = f"{ranking_text(found)}. " if "states" in found else ""
    text = f"{measured}The ranking {found['verdict']}"
    if found["passes"]:
        return text
    return " ".join([text, *_what_helps(found, config, data)])


def _what_helps(found: dict[str, Any], config: LoopConfig, data: Sequence[str]) -> list[str]:
    if "states" not in found:
        return []
    # Proposals that all end alike say nothing of the model.
    if found["mixed"] < FEWEST and found["mean"] > 0.5:
        return ["Little is left to choose for this policy: take harder initial states."]
    if found["mixed"] < FEWEST:
        return ["The policy hardly ever solves the task: imitate more demonstrations first."]
    # What the data have little of.
    solved, failed = episode_counts(data)
    advice = []
    if solved < FEW:
        advice.append(
            f"Of {solved + failed} recorded episodes {solved} are solved, and what the robot does in "
            "those is all that says where the task leads: give demonstrations (data=[FOLDER]), or "
            "more episodes (first_episodes, episodes)."
        )
    if failed < FEW:
        advice.append(
            f"Of {solved + failed} recorded episodes {failed} failed, and most is learned from those "
            "that nearly succeed: raise near and derail."
        )
    # Enough of both: more of everything.
    if not advice:
        advice.append(
            f"It has learned from {solved} solved and {failed} failed episodes. More episodes of this "
            "policy (episodes), replays that just fail (near), or longer training "
            "(refresh=[found_steps=...,state_steps=...]) would help."
        )
    return advice


def closed_text(found: dict[str, Any], config: LoopConfig, data: Sequence[str]) -> str:
    """Why the loop ends, and how to go on."""
    return (
        f"No model of {config.rounds} rounds may be learned from, so no policy was trained. "
        f"{gate_text(found, config, data)} All episodes and models are kept in {config.out}. The same "
        f"command with rounds={config.rounds + 1} records {config.episodes} more episodes, trains the "
        "model further and asks again; with gate=warn it learns from this model all the same."
    )


def episode_counts(data: Sequence[str]) -> tuple[int, int]:
    """How many recorded episodes are solved, and how many failed."""
    solved = failed = 0
    for path in data:
        # An episode is solved if one of its actions solved the task.
        columns = open_dataset(path, ["next.success"]).columns
        ended = {}
        for episode, success in zip(
            columns["episode_index"].tolist(), columns["next.success"].tolist(), strict=True
        ):
            ended[episode] = ended.get(episode, False) or bool(success)
        solved += sum(ended.values())
        failed += len(ended) - sum(ended.values())
    return solved, failed
