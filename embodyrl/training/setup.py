"""A run's envs and its algorithm, built from its config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from embodyrl import registry, starting
from embodyrl.algorithm import Algorithm, Peers
from embodyrl.build import config_builds, described_by, limit_num_envs, make_env, make_policy
from embodyrl.config import Config
from embodyrl.data.lerobot_read import open_dataset
from embodyrl.devices import keep_random_state
from embodyrl.env import VecEnv
from embodyrl.errors import UserError
from embodyrl.policies.compile import compile_sampling
from embodyrl.rollouts.collect import Rollouts
from embodyrl.rollouts.evaluation import Evaluation
from embodyrl.storage import checkpoint
from embodyrl.storage.env_spec import spec_from_json
from embodyrl.types import EnvSpec


class Ranks(Rollouts, Peers, Protocol):
    """The processes that torchrun started, which play and train together (``distributed.fsdp``).

    Attributes:
        own: the config with this process's share of the envs.
        plays: whether they play rollouts.
        first: whether this is the process that writes.
    """

    own: Config
    plays: bool

    @property
    def first(self) -> bool: ...  # noqa: D102

    def shard(self, policy: Any) -> None:
        """Shards what is trained of a policy in place, before an optimiser is made of it."""
        ...

    def attach(self, algorithm: Algorithm) -> None:
        """Lets the algorithm compute its share of every minibatch alone."""
        ...

    def evaluation(
        self, play: Callable[[list[int]], Evaluation], policy: Any, inits: list[int]
    ) -> Evaluation:
        """``play`` of all initial states, each process its share."""
        ...

    def agree(self, minutes: float, stop: bool) -> tuple[float, bool]:
        """The first process's clock, and whether anybody was asked to stop."""
        ...

    def whole_state(self, state: Any) -> Any:
        """A nested state with whole tensors; in the first process alone."""
        ...

    def wait(self) -> None:
        """Until all are here."""
        ...


class Envs:
    """The training env and the evaluation env of a run, each built when first asked for.

    Attributes:
        rollouts: who plays in the training env in place of this process, if anybody.
        given: the spec of an env that nobody may build; None where they are built.
    """

    def __init__(
        self, config: Config, rollouts: Rollouts | None = None, given: EnvSpec | None = None
    ) -> None:
        self.rollouts = rollouts
        self.given = given
        self._device = config.run.device
        self._configs = {
            "train": config.env,
            "eval": limit_num_envs(
                config.env.for_evaluation(config.run.eval_split), config.run.eval_episodes
            ),
        }
        self._built: dict[str, VecEnv] = {}

    def _get(self, which: str) -> VecEnv:
        if which not in self._built:
            self._built[which] = make_env(self._configs[which], self._device)
        return self._built[which]

    @property
    def train(self) -> VecEnv:
        """Of the split that the config names."""
        return self._get("train")

    @property
    def eval(self) -> VecEnv:
        """Of ``run.eval_split``."""
        return self._get("eval")

    @property
    def train_spec(self) -> EnvSpec:
        """Of the training env, wherever it is."""
        return self.rollouts.spec if self.rollouts else self.train.spec

    @property
    def spec(self) -> EnvSpec:
        """What both agree on."""
        return self.given or (self.rollouts or self._built.get("train") or self.eval).spec

    def close(self) -> None:
        """Closes what was built."""
        for env in self._built.values():
            env.close()
        self._built.clear()
        if self.rollouts is not None:
            self.rollouts.close()


def recorded_spec(config: Config) -> EnvSpec | None:
    """The spec that the run's data were recorded with, for an env that nothing can play in.

    Returns:
        None where the env can be built.

    Raises:
        UserError: there are no data, they are another env's, or the run plays.
    """
    if not config.env.only_recorded:
        return None
    if not config.data.path:
        raise UserError(
            "Nothing can play on this arm, so the run needs recorded data: give data.path=FOLDER "
            "of embodyrl record."
        )
    # Other data do not say what the policy's numbers mean.
    origin = open_dataset(config.data.path).origin
    if "spec" not in origin or origin.get("env") != f"{config.env.name}/lerobot":
        raise UserError(
            f"{config.data.path} was not recorded on an arm of LeRobot's by embodyrl record, and "
            "such a recording says what the policy's numbers mean. Record the data anew, or choose "
            "the env that these are for."
        )
    return spec_from_json(origin["spec"])


def starts_elsewhere(config: Config) -> bool:
    """Whether the run begins with the weights of another one, and has none of its own yet."""
    own = checkpoint.latest(config.run.folder / "checkpoints")
    return bool(config.run.init_checkpoint) and own is None


def build_algorithm(
    config: Config, envs: Envs, device: torch.device, ranks: Ranks | None = None
) -> Algorithm:
    """Policy, critic and optimiser, with initial weights that depend on ``run.seed`` alone."""
    cls = registry.load("algorithms", config.algorithm.name)
    if envs.given is not None and cls.plays:
        raise UserError(
            f"{config.algorithm.name} plays while it learns, and here it learns from recorded "
            "episodes alone: choose an algorithm that does, such as sft or pa_rl_offline."
        )
    spec = envs.train_spec if cls.plays else envs.given or envs.eval.spec
    with starting.step(f"building the policy ({config.policy.name})"):
        with config_builds("policy"):
            policy = make_policy(config.policy, spec, config.run.seed, device)
        if starts_elsewhere(config):
            with described_by(config.run.init_checkpoint):
                checkpoint.load_weights(config.run.init_checkpoint, policy, spec)
    if ranks is not None:
        ranks.shard(policy)
    # The first optimiser of a process makes PyTorch import its compiler, which takes seconds.
    with starting.step("building the optimiser"), keep_random_state():
        torch.manual_seed(config.run.seed)
        algorithm = cls(config.algorithm, policy)
    if ranks is not None:
        ranks.attach(algorithm)
    if config.run.compile:
        for acting in {id(p): p for p in (algorithm.policy, algorithm.result)}.values():
            compile_sampling(acting)
    return algorithm
