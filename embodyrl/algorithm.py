"""The algorithm contract: who calls what, and when.

    when            what is called                              for
    start           ``needs`` is compared with the policy       a clear refusal
                    ``__init__(config, policy)``                optimisers, critics, buffers
                    ``add_demos(demos)``                        where ``takes_demos``
    resume          ``load_state_dict(state)``                  an exact continuation
    iteration       ``collect(player, ...)``                    a batch, where ``plays``
                    ``update(batch, ...)``                      gradient steps; returns metrics
    checkpoint      ``state_dict()``                            all that resuming needs
    evaluation      ``result.sample(mode="eval")``              the policy that is scored and saved
    workers         ``worker_config``, ``acting_state``         replicas that play elsewhere
    torchrun        ``shared_gradients``, ``optimizers``        several processes on one batch

Subclass ``Algorithm``, give it a frozen dataclass ``Config`` and the two methods ``collect`` and
``update``: then it trains, resumes, is evaluated, deployed and played by workers.
``embodyrl.checks.check_algorithm`` tries all of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from embodyrl.errors import UserError
from embodyrl.policy import Policy, missing_methods
from embodyrl.ranges import check_config
from embodyrl.types import DenoisingTrace, EnvSpec, Obs


class Peers(Protocol):
    """Other processes that compute a share of every batch.

    Attributes:
        rank: of this process.
        count: of all.
    """

    rank: int
    count: int

    def run(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn`` of ``args``, while all weights are whole; its gradient is the processes' sum."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, one after the other."""
        ...


class SharesGradients(Protocol):
    """What computes gradients in pieces, so that several processes can take a share each.

    Attributes:
        peers: the other processes; None for this one alone.
    """

    peers: Peers | None


@dataclass(frozen=True)
class MemoryPlan:
    """What an algorithm holds in memory, so that it can be counted before a run starts.

    Attributes:
        rows: observations whose gradient is computed at a time.
        loss: (policy, obs, trace) to a scalar, as a gradient step computes it.
        rollout_chunks: chunks that are kept of a rollout; 0 where there is none.
        extra_policies: further copies of what is trained of the policy.
    """

    rows: int
    loss: Callable[[Any, Obs, DenoisingTrace], Tensor]
    rollout_chunks: int = 0
    extra_policies: int = 0


class Algorithm(ABC):
    """Base class of all algorithms; the module's table says who calls what.

    Attributes:
        Config: frozen dataclass of the settings; its field ``name`` is the registry name.
        needs: abilities that a policy must have (protocols of ``embodyrl.policy``).
        Batch: what ``collect`` returns: a dataclass with ``episodes``, ``env_steps``, ``to`` and
            ``merge`` (see ``rollouts.batches``). None for an algorithm that does not play.
        plays: whether it learns from rollouts; False for one that has demonstrations alone.
        continues_episodes: whether a collection goes on with the episodes of the one before.
        whole_episodes: whether a collection plays every episode to its end.
        max_choice: largest size of a number in ``Transitions.choice``; 1 for actions. A learner
            refuses larger ones from an actor elsewhere.
        config: the settings.
        policy: acts in rollouts.
        result: is evaluated, saved and deployed; mostly the same object.
        verdict: what it says of the run in words, for its end and ``meta.json``; mostly nothing.
    """

    Config: ClassVar[type]
    needs: ClassVar[tuple[type, ...]] = ()
    Batch: ClassVar[type | None] = None
    plays: ClassVar[bool] = True
    continues_episodes: ClassVar[bool] = False
    whole_episodes: ClassVar[bool] = False
    max_choice: ClassVar[float] = 1.0

    config: Any
    policy: Any
    result: Any

    @property
    def verdict(self) -> str:
        """See the class."""
        return ""

    def __init__(self, config: Any, policy: Policy) -> None:
        check_config("algorithm", config)
        check_abilities(type(self), config.name, policy)
        self.config = config
        self.policy = policy
        self.result = policy

    # The loop of a run.

    def collect(
        self,
        player: Any,
        *,
        generator: torch.Generator,
        between: Callable[[], None] = lambda: None,
    ) -> Any:
        """Plays what one iteration learns from; only called where ``plays``.

        Args:
            player: a ``rollouts.collect.Player``: the envs and the initial states to take.
            generator: source of the policy's noise.
            between: to be called before every chunk; may raise, to give the rollout up.
        """
        raise NotImplementedError(f"{type(self).__name__} has plays = True but no collect.")

    @abstractmethod
    def update(
        self, batch: Any, *, progress: float, generator: torch.Generator
    ) -> dict[str, float]:
        """One iteration of learning; it owns its epochs and optimiser steps.

        Args:
            batch: what ``collect`` returned, or the demonstrations where it does not play.
            progress: of the run, in [0, 1), for schedules.
            generator: of minibatches and noise.

        Returns:
            Name -> figure, for the log.
        """

    def rehearse(self, obs: Obs, generator: torch.Generator) -> None:
        """Computes about what a gradient step does, and changes nothing.

        ``run.threads`` is chosen by its time.

        Args:
            obs: B blank observations.
            generator: of noise.
        """
        self.policy.sample(obs, generator=generator, mode="train")

    # Demonstrations.

    @property
    def wants_demos(self) -> bool:
        """Whether the run's ``data`` section is needed."""
        return not self.plays

    @property
    def takes_demos(self) -> bool:
        """Whether the ``data`` section is read where there is one; always where ``wants_demos``."""
        return self.wants_demos

    def add_demos(self, demos: Any) -> None:  # noqa: B027 - only where demos are taken
        """Takes the demonstrations of the run, if it has any, before the first update."""

    # Checkpoints.

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What an exact resume needs beyond the weights of ``result``: tensors and plain values."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of ``state_dict``."""

    # Workers: replicas that play elsewhere, with weights that are sent to them.

    @classmethod
    def tolerates_lag(cls, config: Any) -> bool:
        """Whether it may learn from rollouts of weights that are some updates old."""
        return False

    @classmethod
    def worker_config(cls, config: Any, count: int) -> Any:
        """The settings of one of ``count`` replicas that share the rollouts.

        Raises:
            UserError: they cannot be shared evenly.
        """
        return config

    def acting_state(self) -> dict[str, Tensor]:
        """What a replica needs beside the weights in order to act as this one does."""
        return {}

    def load_acting_state(self, state: dict[str, Tensor]) -> None:  # noqa: B027 - often nothing
        """The inverse of ``acting_state``, in a replica."""

    # Several processes that torchrun started.

    def shared_gradients(self) -> list[SharesGradients]:
        """Its parts that compute gradients in pieces; empty where processes cannot share it."""
        return []

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Its optimisers, whose state is sharded with the weights."""
        return []

    # Memory.

    @classmethod
    def memory_plan(cls, config: Any, policy: Any, spec: EnvSpec) -> MemoryPlan | None:
        """What it holds; None where that is not known before a run."""
        return None


def check_abilities(algorithm: type[Algorithm], name: str, policy: Policy) -> None:
    """Refuses a policy that lacks what an algorithm needs.

    Raises:
        UserError: naming the ability and the methods that are missing.
    """
    for ability in (Policy, *algorithm.needs):
        if not isinstance(ability, type):
            raise UserError(
                f"{algorithm.__name__}.needs holds {ability!r}, which is no ability. Give the class "
                f"from embodyrl.policy without quotes, for example needs = (ScoresPaths,)."
            )
        if missing := missing_methods(policy, ability):
            # A policy may say why it cannot have an ability.
            if reason := getattr(policy, "cannot", {}).get(ability.__name__):
                raise UserError(f"{name} cannot train {type(policy).__name__}: {reason}")
            raise UserError(
                f"{name} needs a policy with the ability {ability.__name__} "
                f"({_first_line(ability)}), and {type(policy).__name__} lacks "
                f"{', '.join(missing)}. Add them (docs: Your own policy), or use another "
                "algorithm."
            )


def _first_line(ability: type) -> str:
    return (ability.__doc__ or "").strip().split("\n")[0].rstrip(".").lower()
