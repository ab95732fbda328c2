"""Which of the state model's networks a dream follows (``env.members``).

mean    the mean of them
one     one of them, drawn for each episode. The networks stand for a posterior over worlds, and a
        policy must do in all of them (NEUBAY, arXiv:2512.04341, whose policy also remembers)
faithful   after each chunk, the one whose course looks most like a real one, to a discriminator
        (``world_models.faithful``; MOREC, arXiv:2310.05422)
worst   after each chunk, the one in whose state the task is least likely to be solved: a robust
        MDP whose uncertainty set is the ensemble (Iyengar 2005; PMDB, arXiv:2210.06692)

"Likely to be solved" is what the state model's own ``prospects`` say (``StateModel.promise``): the
networks that learned from recorded episodes which of them were solved. They see what the model
predicts. No simulator is asked, and no reward is needed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.world_models.faithful import most_faithful
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.nets.state import MemberChoice, StateModel


class Members:
    """What N dreams of one model follow; see the module.

    Args:
        name: of ``env.members``.
        model: the world model.
        num_envs: N.

    Attributes:
        drawn: (N,) the network of each dream, where it is ``one``.

    Raises:
        UserError: the model has no networks to choose among, or none that tells what they promise.
    """

    def __init__(self, name: str, model: WorldModel, num_envs: int) -> None:
        check_members(name, model)
        self._name = name
        self._model = model
        self.drawn = torch.zeros(num_envs, dtype=torch.long, device=model.device)

    def draw(self, ids: Iterable[int], rngs: list[np.random.Generator]) -> None:
        """Draws the networks of dreams that begin, each by the generator of its env."""
        if self._name != "one":
            return
        assert self._model.state is not None
        count = len(self._model.state.members)
        for k in ids:
            self.drawn[k] = int(rngs[k].integers(count))

    def choice(
        self,
        rows: Int[Tensor, " m"],
        words: Float[Tensor, "m w"],
        actions: Float[Tensor, "m h a"],
        count: Int[Tensor, " m"],
    ) -> MemberChoice | None:
        """What ``StateModel.roll`` is to follow in the dreams ``rows``; None is the mean.

        Args:
            rows: numbers of the dreams that move.
            words: of their instructions.
            actions: of the chunk.
            count: how many of them are executed.
        """
        if self._name == "mean":
            return None
        if self._name == "one":
            return lambda courses: self.drawn[rows]
        state = self._model.state
        assert state is not None
        if self._name == "faithful":
            net = self._model.discriminator
            assert net is not None
            return lambda courses: most_faithful(state, net, courses, actions, count)
        return lambda courses: least_promising(state, courses, words)


def least_promising(
    state: StateModel, courses: Float[Tensor, "e t n d"], words: Float[Tensor, "n w"]
) -> Int[Tensor, " n"]:
    """The network in whose last state the task is least likely to be solved, now or later."""
    last = courses[:, -1]
    return state.promise(last, words.expand(len(last), -1, -1)).argmin(0)


def check_members(name: str, model: WorldModel) -> None:
    """Refuses a choice among networks that the model does not have.

    Raises:
        UserError: what is missing.
    """
    if name == "mean":
        return
    count = 0 if model.state is None else len(model.state.members)
    if model.state is None or count < 2:
        what = "one network" if count else "no networks"
        raise UserError(
            f"env.members is {name!r}, but this world model predicts the state by {what}, so there "
            "is nothing to choose among. Train one with state_members=5, or leave env.members out."
        )
    if name == "worst" and not len(model.state.prospects):
        raise UserError(
            "env.members=worst asks which network promises least, and this world model does not "
            "say whether a task will be solved: it was trained by an older version. Train it again."
        )
    if name == "faithful" and model.discriminator is None:
        raise UserError(
            "env.members=faithful asks a discriminator which network looks most like the real env, "
            "and this world model has none. Train it with faithful_steps=1000, or leave env.members "
            "out."
        )
