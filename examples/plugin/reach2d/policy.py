"""``GaussianMLP``: a Gaussian around a small net's output; a policy in one file.

It scores paths of one step and imitates by regression, so grpo, reinforce and sft can train it.
With its value head ppo can, too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from embodyrl.functional.flow import Generators, gaussian_log_prob, randn
from embodyrl.functional.losses import masked_mean
from embodyrl.policy import Mode
from embodyrl.types import ActionSample, DenoisingTrace, EnvSpec, Obs, PolicyEval


@dataclass(frozen=True)
class GaussianMLPConfig:
    """Settings of ``GaussianMLP``.

    Attributes:
        name: registry name.
        horizon: H, actions in a chunk.
        width: of the hidden layers.
        std: of the noise at the start.
    """

    name: str = "gaussian_mlp"
    horizon: int = 2
    width: int = 32
    std: float = 0.3


@dataclass(frozen=True)
class OneStep:
    """A path of one step, which always draws noise."""

    kind: str = "gaussian"
    num_steps: int = 1
    num_noisy: int = 1
    eta: float = 0.0


def _net(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


class GaussianMLP(nn.Module):
    """See the module's docstring."""

    Config = GaussianMLPConfig
    transition = OneStep()

    def __init__(self, config: GaussianMLPConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.config = config
        self.spec = spec
        self.shape = (config.horizon, spec.action_dim)
        self.actor = _net(spec.proprio_dim, config.width, config.horizon * spec.action_dim)
        self.log_std = nn.Parameter(torch.full(self.shape, config.std).log())
        self.critic = _net(spec.proprio_dim, config.width, 1)

    # Policy: it acts, and says what of it is trained.

    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """The mean, or in training a draw around it."""
        with torch.no_grad():
            mean = self._mean(obs)
            if mode == "eval":
                return ActionSample(mean.clamp(-1.0, 1.0))
            noise = randn(mean.shape, generator, mean.device)
            actions = mean + self.log_std.exp() * noise
            path = torch.stack([noise, actions], dim=1)
            trace = DenoisingTrace(path, torch.ones_like(path[:, :1, 0, 0], dtype=torch.bool))
            logprob = self.evaluate(obs, trace).logprob
            return ActionSample(actions.clamp(-1.0, 1.0), trace, logprob, self.value(obs))

    def actor_parameters(self) -> list[nn.Parameter]:
        """All but the value head."""
        return [*self.actor.parameters(), self.log_std]

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Nothing to normalise."""

    # ScoresPaths.

    def evaluate(self, obs: Obs, trace: DenoisingTrace) -> PolicyEval:
        """The density of the actions that were drawn."""
        logprob = gaussian_log_prob(trace.x[:, 1], self._mean(obs), self.log_std.exp())
        entropy = self.log_std.mean().expand(len(obs))
        return PolicyEval(logprob[:, None], entropy, self.value(obs))

    # HasValue.

    def value(self, obs: Obs) -> Tensor:
        """The value head's estimate."""
        return self.value_of(self.critic_features(obs))

    def critic_features(self, obs: Obs) -> Tensor:
        """The critic sees what the actor sees."""
        return obs.proprio

    def value_of(self, features: Tensor) -> Tensor:
        """The estimate from what ``critic_features`` gave."""
        return self.critic(features).squeeze(-1)

    def critic_parameters(self) -> list[nn.Parameter]:
        """Of the value head."""
        return list(self.critic.parameters())

    def fit_critic_inputs(self, obs: Obs) -> None:
        """Nothing to normalise."""

    # Imitates.

    def imitation_loss(self, obs: Obs, actions: Tensor, mask: Tensor) -> Tensor:
        """The squared error of demonstrated actions."""
        return masked_mean((self._mean(obs) - actions).square().mean(-1), mask)

    # ExportsToLeRobot.

    def save_lerobot(self, folder: str | Path) -> Path:
        """Writes the weights and the config."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.state_dict(), folder / "model.safetensors")
        config = {"type": self.config.name, **asdict(self.config)}
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        return folder

    def _mean(self, obs: Obs) -> Tensor:
        return self.actor(obs.proprio).view(len(obs), *self.shape)
