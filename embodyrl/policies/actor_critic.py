"""``ActorCritic``: adds to an actor a value head, and the parts that choose for it.

    obs --encode--> context --pooled--> features --+
    obs --FoundFeatures--> found ------------------+--> critic --> value     (``policy.critic``)
    obs.privileged --------------------------------+

The noise policy (DSRL) and the chooser (PA-RL) stand beside, where the config asks for them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.functional.flow import Generators
from embodyrl.policies.chooser import CHOOSER_PARTS, Chooser
from embodyrl.policies.found_features import FoundFeatures
from embodyrl.policies.noise_policy import NoisePolicy
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.one_step import OneStepHead
from embodyrl.policies.shared_features import SharedFeatures
from embodyrl.policy import num_executed
from embodyrl.types import EnvSpec, Obs

CRITICS = ("shared", "found", "privileged")
"""What ``policy.critic`` may be: what the value head sees."""
BELONGS_TO = {"critic": ("critic.", "normalize_privileged.", "found."), **CHOOSER_PARTS}
"""Config key -> parts that keep their fresh weights if the initial checkpoint has another value."""


class ActorCritic(nn.Module):
    """Base of the policies with a value head.

    A subclass implements ``encode`` and calls ``add_heads`` at the end of its constructor. The
    class has the abilities ``HasValue`` and ``HasFeatures`` of ``embodyrl.policy``.
    """

    config: Any
    spec: EnvSpec

    def encode(self, obs: Obs) -> Any:
        """The context that acting needs, with a summary ``pooled`` (N, F) of the observation."""
        raise NotImplementedError

    def add_heads(self, features: int, critic: nn.Sequential | None = None) -> None:
        """Builds the value head and, if the config asks for it, the noise policy.

        Args:
            features: F, width of ``features``.
            critic: the value head's net; None builds one whose value is zero at the start.
        """
        # The value head reads the simulator's privileged state, what hindsight finds in pictures,
        # or the actor's features.
        c = self.config
        reads = getattr(c, "critic", "shared")
        self.features_dim = features
        self.critic_features_dim = features
        self.reads_privileged = reads == "privileged"
        self.found: FoundFeatures | None = None
        if self.reads_privileged:
            if not self.spec.privileged_dim:
                raise UserError(
                    f"{self.spec.name} gives no privileged state for the critic. Set "
                    "policy.critic=found to let it see what hindsight finds in pictures, or "
                    "policy.critic=shared to let it see the actor's features."
                )
            self.critic_features_dim = self.spec.privileged_dim
            self.normalize_privileged = Normalizer(self.critic_features_dim)
        elif reads == "found":
            self.found = FoundFeatures(self.spec)
            self.critic_features_dim = self.found.dim
        self.critic = critic or _value_head(self.critic_features_dim, c.critic_width)
        # Only a flow has a one-step head.
        self.one_step: OneStepHead | None = None
        # The noise policy chooses the initial noise of the flow (DSRL).
        self.steer = None
        if getattr(c, "steer_width", 0):
            self.steer = NoisePolicy(
                features, num_executed(c), self.spec.action_dim, c.steer_width, c.steer_bound
            )
        # The chooser takes the best of several proposals (PA-RL).
        self.chooser: Chooser | None = None
        if getattr(c, "chooser_width", 0):
            shared = SharedFeatures(self, features) if c.chooser_sees == "shared" else None
            self.chooser = Chooser(self.spec, num_executed(c), c, shared)

    @property
    def chooses(self) -> bool:
        """Whether the policy in evaluation is the best of several proposals.

        Before the critics have learned it is the policy alone.
        """
        return self.chooser is not None and self.config.proposals > 1 and bool(self.chooser.ready)

    def propose(self, obs: Obs, count: int, generator: Generators) -> Float[Tensor, "n count h a"]:
        """``count`` chunks for each of N observations, without exploration."""
        raise NotImplementedError

    def best_proposal(self, obs: Obs, generator: Generators) -> Float[Tensor, "n h a"]:
        """The proposal that the chooser values most."""
        assert self.chooser is not None
        return self.chooser.best(obs, self.propose(obs, self.config.proposals, generator))

    def actor_parameters(self) -> list[nn.Parameter]:
        """Everything but the value head and what it sees, the noise policy and the chooser."""
        others = set(self.critic.parameters())
        for part in (self.found, self.steer, self.chooser, self.one_step):
            if part is not None:
                others.update(part.parameters())
        return [p for p in self.parameters() if p not in others]

    def critic_parameters(self) -> list[nn.Parameter]:
        """The parameters of the value head."""
        return list(self.critic.parameters())

    def value(self, obs: Obs, context: Any = None) -> Float[Tensor, " n"]:
        """The estimated discounted return from obs.

        Args:
            obs: N observations.
            context: ``encode(obs)``, if it is at hand; otherwise obs is encoded again.
        """
        return self.value_of(self.critic_features(obs, context))

    def critic_features(self, obs: Obs, context: Any = None) -> Float[Tensor, "n f"]:
        """What the value head sees of obs: the privileged state, ``found``, or ``features``.

        No gradient goes into them. They change only when the actor changes, or when hindsight has
        taught ``found`` more.
        """
        if self.found is not None:
            return self.found(obs)
        if self.reads_privileged:
            assert obs.privileged is not None
            return self.normalize_privileged(obs.privileged)
        if context is None:
            with torch.no_grad():
                context = self.encode(obs)
        return self.features(context)

    def value_of(self, features: Float[Tensor, "n f"]) -> Float[Tensor, " n"]:
        """The value (N,) of ``critic_features``."""
        return self.critic(features).squeeze(-1)

    def features(self, context: Any) -> Float[Tensor, "n f"]:
        """The ``summary`` for small nets beside the actor, without gradient."""
        return self.summary(context).detach()

    def summary(self, context: Any) -> Float[Tensor, "n f"]:
        """What an observation says as a whole."""
        return context.pooled

    def fit_critic_inputs(self, obs: Obs) -> None:
        """Sets the statistics that normalise what the value head sees, from a first rollout.

        A value head that was trained before keeps the statistics it was trained with.
        """
        if self.found is not None and not self.found.fitted:
            self.found.fit_inputs(obs)
        if self.reads_privileged and not self.normalize_privileged.fitted:
            assert obs.privileged is not None
            self.normalize_privileged.fit(obs.privileged)


def _value_head(inputs: int, width: int) -> nn.Sequential:
    """A net with two hidden layers whose output is 0 at the start."""
    head = nn.Sequential(
        nn.Linear(inputs, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, 1),
    )
    last = cast(nn.Linear, head[-1])
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return head
