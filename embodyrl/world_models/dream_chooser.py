"""``DreamChooser``: a dream ranks what a policy proposes, and the best is done. Nothing is trained.

    obs, Finder --> state (B, D) --+
    proposals (B, N, H, A) --------+--> StateModel: the state after each --> will it be solved? (B, N)

It is best-of-N sampling, as by the critics of ``policies.chooser``, but what ranks is a world model
that was learned from recordings alone. No picture is imagined, so it is quick. Any policy that can
propose several chunks will do.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from embodyrl.data.policy_actor import ProposalChoice
from embodyrl.errors import UserError
from embodyrl.functional.flow import Generators
from embodyrl.policy import Chooses, Mode, has_ability, num_executed
from embodyrl.storage.env_spec import check_compatible
from embodyrl.types import ActionSample, Obs
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models.model import WorldModel


class DreamChooser:
    """Acts by the proposal whose dream promises most; see the module.

    Args:
        policy: proposes.
        model: ranks.
        proposals: N; the policy's own sample is the first of them.
        margin: the policy's own sample is kept unless another one's promise is higher by more than
            this, in probability.

    Attributes:
        config: of the policy.
        spec: of the policy.
        executed: H, actions of a chunk that are dreamt. A plan may be longer.
        chooses: True, as of a policy whose critics choose: it is recorded in ``"eval"`` mode.

    Raises:
        UserError: the policy cannot propose, or its own critics choose already; the model cannot
            rank, or was made for another env.
    """

    chooses = True

    def __init__(
        self, policy: Any, model: WorldModel, proposals: int = 8, margin: float = 0.0
    ) -> None:
        if not has_ability(policy, Chooses):
            raise UserError(
                f"A dream chooses among several proposals, and {policy.config.name} makes one. "
                "Leave --dream out."
            )
        if getattr(policy, "chooses", False):
            raise UserError(
                "The policy's own critics choose among its proposals already. Set "
                "policy.proposals=1 to let a dream choose."
            )
        if proposals < 2:
            raise UserError(f"--proposals is {proposals}; there is a choice among 2 or more.")
        if not 0.0 <= margin < 1.0:
            raise UserError(f"--margin is {margin}; it is a probability, from 0 to below 1.")
        require_ranking(model)
        check_compatible(model.spec, policy.spec)
        self.policy = policy
        self.model = model
        self.proposals = proposals
        self.margin = margin
        self.config = policy.config
        self.spec = policy.spec
        self.executed = num_executed(policy.config)

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Actor.sample``; only in ``"eval"`` mode.

        Raises:
            UserError: another mode, because a choice has no likelihood.
        """
        if mode != "eval":
            raise UserError("A dream chooses in evaluation and on a robot, not in training.")
        # Propose, dream, choose.
        return ActionSample(self.choose(obs, self.policy.propose(obs, self.proposals, generator)))

    def choose(self, obs: Obs, proposals: Float[Tensor, "b n h a"]) -> Float[Tensor, "b h a"]:
        """The best of the proposals, or the first where none is better by more than the margin."""
        promised = promises(self.model, obs, proposals[:, :, : self.executed])
        # Of equal ones the first is taken.
        best = promised.argmax(1)
        every = torch.arange(len(best), device=best.device)
        better = promised[every, best] - promised[:, 0] > self.margin
        return proposals[every, torch.where(better, best, 0)]


def choice_by_dream(dream: str, proposals: int = 8, margin: float = 0.0) -> ProposalChoice:
    """A world model's choice for the recording of episodes (``data.collect``).

    Args:
        dream: folder of the model.
        proposals: see ``DreamChooser``.
        margin: see there.
    """

    def wrap(policy: Any, device: torch.device) -> DreamChooser:
        return DreamChooser(policy, WorldModel.load(dream, device), proposals, margin)

    return ProposalChoice(wrap, {"dream": dream, "proposals": proposals, "margin": margin})


@torch.no_grad()
def promises(
    model: WorldModel, obs: Obs, proposals: Float[Tensor, "b n h a"]
) -> Float[Tensor, "b n"]:
    """The probability that the task will be solved, after each of N chunks at B observations.

    It is 0 where the networks of the state model disagree too much: a dream in doubt has failed.

    Raises:
        UserError: the model needs a simulator's state, and the observations have none.
    """
    assert model.state is not None
    obs = obs.to(model.device)
    known = model.state_of(obs)
    if known is None:
        raise UserError(
            f"This world model of {model.spec.name} reads the simulator's state, which a robot "
            "does not have. Train one that finds it in pictures: `embodyrl world train ... "
            "found=true`."
        )
    count, n = proposals.shape[:2]
    # Every proposal from the state of its observation.
    state = torch.cat([obs.proprio, known], dim=1).repeat_interleave(n, 0)
    words = torch.stack([_embedded(sentence) for sentence in obs.instruction])
    words = words.to(model.device).repeat_interleave(n, 0)
    chunks = proposals.flatten(0, 1).to(model.device)
    # Dream of each, and ask how it will end.
    steps = torch.full((count * n,), chunks.shape[1], device=model.device)
    after, spread = model.state.roll(state, chunks, steps)
    promised = model.state.promise(after, words)
    if model.max_spread:
        promised = torch.where(spread > model.max_spread, 0.0, promised)
    return promised.view(count, n).to(proposals.device)


@functools.lru_cache(maxsize=1024)
def _embedded(sentence: str) -> Tensor:
    """(E,); reading the table anew for every chunk would take longer than the dream."""
    return embed_sentences([sentence])[0]


def require_ranking(model: WorldModel) -> None:
    """Refuses a model that cannot rank proposals.

    Raises:
        UserError: it has no state model, or one of a version without prospects.
    """
    if model.state is None:
        raise UserError(
            "This world model knows pictures alone, and ranks proposals no better than chance. "
            "Train one that finds its state in them: `embodyrl world train` without state=false."
        )
    if not len(model.state.prospects):
        raise UserError(
            "This world model does not say whether a task will be solved: it was trained by an "
            "older version. Train it again."
        )
