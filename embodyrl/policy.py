"""The policy contract: what acts, what can be trained, and what an algorithm may ask of it.

A policy is an ``nn.Module`` with the methods of ``Policy``. What more it can do are its abilities,
each a protocol of its own. An algorithm names the abilities that it needs (``Algorithm.needs``) and
asks for nothing else, so a policy that has them can be trained by it:

    ability       what it means                                     who needs it
    ScoresPaths   knows how likely it was to act as it did          ppo, grpo
    HasValue      has a value head beside the actor                 ppo, fpo
    HasFlow       moves noise to actions along a learned velocity   sft, fpo, nft, sac_flow and kin
    HasFeatures   summarises an observation for critics             sac_flow and kin
    Steerable     lets a small policy choose the noise              dsrl
    Chooses       proposes several chunks; critics take the best    pa_rl
    ActsInOneStep has a small net beside the flow that acts         fql
    Imitates      has an imitation loss of its own                  sft (in place of HasFlow)
    ImitatesFromContext   computes it also of what encode gave      sft (with hindsight_coef)
    DrawsNoise    that loss is random                               sft

``embodyrl.checks.check_policy`` tries all that a policy offers, and says in words what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Protocol, Self, cast

from torch import Tensor, nn

from embodyrl.functional.flow import DenoisingTransition, Generators, randn
from embodyrl.types import ActionSample, DenoisingTrace, EnvSpec, Obs, PolicyEval

Mode = Literal["train", "eval"]


def num_executed(config: Any) -> int:
    """H, how many actions of a chunk are executed before the policy looks again.

    Args:
        config: of a policy. ``execute`` says it; without it, or with 0, all of ``horizon`` are.
    """
    return getattr(config, "execute", 0) or config.horizon


class Actor(Protocol):
    """Whatever acts: a policy, or several that act as one."""

    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """Draws a chunk for every row of obs.

        Args:
            obs: N observations.
            generator: source of all noise; a list gives each row its own.
            mode: ``"train"`` explores, and returns with the actions what training needs: the trace,
                its log-probability and the value, where the policy has them. ``"eval"`` returns the
                noise-free actions alone: a flow integrates the ODE, so that only its initial noise
                is random.
        """
        ...


class Policy(Actor, Protocol):
    """What can be trained: an ``nn.Module``, of which these methods are asked for.

    Attributes:
        config: frozen dataclass with at least ``name`` and ``horizon`` (C, actions in a chunk). It
            may have ``execute`` (see ``num_executed``).
        spec: of the env that it was built for.
    """

    config: Any
    spec: EnvSpec

    def actor_parameters(self) -> list[nn.Parameter]:
        """What an actor's optimiser trains: not the value head, nor what is frozen."""
        ...

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Normalises by the statistics of demonstrations: proprio (B, P) and actions (B, A)."""
        ...

    # The rest comes with nn.Module.

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...  # noqa: D102

    def named_parameters(  # noqa: D102
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Any]: ...  # noqa: D102

    def load_state_dict(  # noqa: D102
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any: ...

    def requires_grad_(self, requires_grad: bool = True) -> Self: ...  # noqa: D102


class Steps(Protocol):
    """The steps that a path takes; ``functional.flow.DenoisingTransition`` is one.

    Attributes:
        kind: how a step draws noise.
        num_steps: K.
        num_noisy: how many steps, counted from the first, have a density and can be trained.
        eta: noise level.
    """

    @property
    def kind(self) -> str: ...  # noqa: D102

    @property
    def num_steps(self) -> int: ...  # noqa: D102

    @property
    def num_noisy(self) -> int: ...  # noqa: D102

    @property
    def eta(self) -> float: ...  # noqa: D102


class ScoresPaths(Protocol):
    """Knows the log-probability of the path from noise to action that it sampled.

    Attributes:
        transition: the steps of that path.
    """

    @property
    def transition(self) -> Steps: ...  # noqa: D102

    def evaluate(self, obs: Obs, trace: DenoisingTrace) -> PolicyEval:
        """Scores a trace under the current parameters, with gradients.

        For the parameters that sampled it, the log-probability equals that of ``sample``.
        """
        ...


class HasValue(Protocol):
    """Has a value head. Its loss never reaches the actor."""

    def value(self, obs: Obs) -> Tensor:
        """The estimate (N,) of the discounted return: ``value_of(critic_features(obs))``."""
        ...

    def critic_features(self, obs: Obs) -> Tensor:
        """What the value head sees of obs, (N, F), without gradients into the actor."""
        ...

    def value_of(self, features: Tensor) -> Tensor:
        """The estimate (N,) from ``critic_features``, with gradients."""
        ...

    def critic_parameters(self) -> list[nn.Parameter]:
        """Of the value head."""
        ...

    def fit_critic_inputs(self, obs: Obs) -> None:
        """Normalises what the value head sees, by the first rollout of training."""
        ...


class HasFlow(Protocol):
    """Turns noise into actions along a learned velocity; t = 1 is noise and t = 0 is data.

    Attributes:
        transition: how a denoising step draws noise when the policy explores.
        normalize_action: actions to the units of the flow, with ``inverse`` and ``log_det``.
    """

    transition: DenoisingTransition
    normalize_action: Any

    @property
    def flow_shape(self) -> tuple[int, int]:
        """(C, D): of the flow's state, whose first H rows and A columns are executed."""
        ...

    def executed(self, x: Tensor) -> Tensor:
        """The part (..., H, A) of a flow state (..., C, D) that becomes actions."""
        ...

    def encode(self, obs: Obs) -> Any:
        """What the denoising steps need of obs, computed once."""
        ...

    def velocity(self, context: Any, x: Tensor, t: Tensor) -> Tensor:
        """Noise - action at x (N, K, C, D) and times t (N, K), of x's shape."""
        ...

    def step_inputs(self, context: Any, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """The velocity, and the log-std of the step's noise where the policy learns it."""
        ...


class HasFeatures(Protocol):
    """Summarises an observation for the critics of an off-policy algorithm.

    Attributes:
        features_dim: F of ``features``.
        critic_features_dim: F of ``critic_features``.
    """

    @property
    def features_dim(self) -> int: ...  # noqa: D102

    @property
    def critic_features_dim(self) -> int: ...  # noqa: D102

    def features(self, context: Any) -> Tensor:
        """A summary (N, F) of what ``encode`` gave, without gradients into the actor."""
        ...

    def critic_features(self, obs: Obs, context: Any = None) -> Tensor:
        """What critics see of obs, (N, F); ``context`` saves encoding obs a second time."""
        ...

    def fit_critic_inputs(self, obs: Obs) -> None:
        """Normalises what critics see, by the first rollouts."""
        ...


class Summarises(Protocol):
    """Summarises an observation with gradients, for losses that teach the policy to see.

    Attributes:
        features_dim: F of ``summary``.
    """

    @property
    def features_dim(self) -> int: ...  # noqa: D102

    def summary(self, context: Any) -> Tensor:
        """A summary (N, F) of what ``encode`` gave."""
        ...


class Steerable(Protocol):
    """Lets a small policy choose the noise that the denoising starts from.

    Attributes:
        steer: the small policy; None where the config asks for none.
    """

    steer: Any

    @property
    def flow_shape(self) -> tuple[int, int]:
        """(C, D): of the noise, whose first H rows and A columns are chosen."""
        ...

    def encode(self, obs: Obs) -> Any:
        """What the denoising steps need of obs, computed once."""
        ...

    def decode(self, context: Any, noise: Tensor) -> Tensor:
        """The noise-free actions (N, H, A) that become of ``noise`` (N, C, D)."""
        ...


class Chooses(Protocol):
    """Proposes several chunks, of which critics choose one.

    Attributes:
        chooser: the critics (``policies.chooser.Chooser``); None where the config asks for none.
    """

    chooser: Any

    def propose(self, obs: Obs, count: int, generator: Generators) -> Tensor:
        """``count`` chunks (N, count, H, A) for each of N observations, without exploration."""
        ...


class ActsInOneStep(Protocol):
    """Has a small net that makes actions of the flow's noise in one step.

    Attributes:
        one_step: the net (``policies.one_step.OneStepHead``); None where the config asks for none.
    """

    one_step: Any

    def decode(self, context: Any, noise: Tensor) -> Tensor:
        """The noise-free actions (N, H, A) that the flow makes of ``noise`` (N, C, D)."""
        ...

    def one_step_actions(self, features: Tensor, noise: Tensor) -> Tensor:
        """Those that the net makes of features (N, F) and noise, not yet clamped to [-1, 1]."""
        ...


class Imitates(Protocol):
    """Has an imitation loss of its own: a regressor, or a model that says actions in tokens."""

    def imitation_loss(self, obs: Obs, actions: Tensor, mask: Tensor) -> Tensor:
        """The mean loss of demonstrated actions (B, H, A), of those with ``mask`` (B, H)."""
        ...


class ImitatesFromContext(Protocol):
    """Computes its imitation loss also from what ``encode`` gave, so that another loss can share it."""

    def encode(self, obs: Obs) -> Any:
        """What acting needs of obs, computed once."""
        ...

    def imitation_loss_of(self, context: Any, actions: Tensor, mask: Tensor) -> Tensor:
        """See ``Imitates``."""
        ...


class DrawsNoise(Protocol):
    """Has an imitation loss that is random: it takes noise (B, ``imitation_noise``) after the mask.

    With a number of 0 it takes none.
    """

    @property
    def imitation_noise(self) -> int: ...  # noqa: D102


class ImitatesFromBefore(Protocol):
    """Imitates chunks that begin before what it sees, where demonstrations hold those actions.

    Its imitation loss then takes actions and mask (B, past + C), the oldest action first.
    """

    @property
    def past(self) -> int: ...  # noqa: D102

    @property
    def without_last(self) -> int:
        """Frames at the end of every episode at which no chunk begins."""
        ...


class ExportsToLeRobot(Protocol):
    """Can be written for another program: ``embodyrl export``."""

    def save_lerobot(self, folder: str | Path) -> Path:
        """Writes a checkpoint into a new or empty folder, and returns it."""
        ...


class ExportsAsPublished(Protocol):
    """Can be written as its family publishes its checkpoints: ``embodyrl export``."""

    def save_published(self, folder: str | Path) -> Path:
        """Writes a checkpoint into a new or empty folder, and returns it."""
        ...


# What the algorithms need, as types.


class PathPolicy(Policy, ScoresPaths, Protocol):
    """For the clipped surrogate without a critic: grpo."""


class ActorCriticPolicy(Policy, ScoresPaths, HasValue, Protocol):
    """For the clipped surrogate with a critic: ppo."""


class FlowPolicyProtocol(Policy, HasFlow, Protocol):
    """For flow matching: sft, nft."""


class FlowCriticPolicy(Policy, HasFlow, HasFeatures, Protocol):
    """For critics of action chunks: sac_flow, rlpd, wsrl."""


class ChoosingPolicy(Policy, Chooses, Protocol):
    """For choosing among proposals: pa_rl."""


class OneStepPolicy(FlowCriticPolicy, ActsInOneStep, Protocol):
    """For a head that is distilled from the flow: fql."""


class SteerablePolicy(FlowCriticPolicy, Steerable, Protocol):
    """For noise steering: dsrl."""


def has_ability(policy: object, ability: type) -> bool:
    """Whether ``policy`` has all that an ability asks for.

    ``isinstance`` would not do: it does not see the submodules of an ``nn.Module``.
    """
    return not missing_methods(policy, ability)


def missing_methods(policy: object, ability: type) -> list[str]:
    """The names that an ability asks for and ``policy`` lacks, in alphabetical order."""
    names = getattr(ability, "__protocol_attrs__", set())
    return sorted(name for name in names if not hasattr(policy, name))


def imitated_rows(policy: object) -> tuple[int, int]:
    """Actions before the observation that are imitated, and last frames that are left out."""
    if not has_ability(policy, ImitatesFromBefore):
        return 0, 0
    early = cast("ImitatesFromBefore", policy)
    return early.past, early.without_last


def imitation_noise(policy: object, actions: Tensor, generator: Generators) -> tuple[Tensor, ...]:
    """What an imitation loss takes after the mask: noise (B, M) for ``DrawsNoise``, else nothing."""
    count = getattr(policy, "imitation_noise", 0)
    if not count:
        return ()
    return (randn((len(actions), count), generator, actions.device),)
