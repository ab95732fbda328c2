"""``Thinker``: latent thoughts between what a policy sees and what it does.

    summary (N, F) --+--> net --> mean, std: the next thought z' = mean + std noise    (N, W)
    state z (N, W) --+        --> logit of stopping here
    last z  (N, W) --told--> offset of the summary (N, F), which the velocity net is conditioned on

z_0 = 0, and there are at most K thoughts. Thoughts and stopping have a log-probability
(``functional.thinking``), so PPO and GRPO optimise them together with the action, as LAPO does
(LaST-R1, arXiv:2604.28192). There latent tokens of a pretrained model imitate features of future
observations first; here they learn from actions alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import Generators, randn, random_uniform, squash_log_std
from embodyrl.functional.thinking import (
    log_stop_distribution,
    thinking_cost,
    thinking_log_prob,
)

STD_MIN = 0.1
STD_MAX = 1.0
"""Range of the std of a thought: below it densities explode, above it z is noise alone."""


@dataclass
class Thought:
    """Thoughts that were drawn.

    Attributes:
        latents: (N, K, W) z_1 .. z_K, zero after the last one.
        count: (N,) T, how many there are.
        logprob: (N, K) of the choice in each state (``functional.thinking``).
    """

    latents: Float[Tensor, "n k w"]
    count: Int[Tensor, " n"]
    logprob: Float[Tensor, "n k"]


class Thinker(nn.Module):
    """See the module's docstring.

    At the start all numbers of thoughts are equally likely, and thoughts change nothing: a policy
    that acts without them can learn to think.

    Args:
        features: F, of the summary.
        width: W, of a thought.
        most: K.
    """

    def __init__(self, features: int, width: int, most: int) -> None:
        super().__init__()
        self.width = width
        self.most = most
        self.net = nn.Sequential(
            nn.Linear(features + width, features),
            nn.SiLU(),
            nn.Linear(features, features),
            nn.SiLU(),
            nn.Linear(features, 2 * width + 1),
        )
        self.told = nn.Linear(width, features, bias=False)
        # s_j = 1 / (K + 1 - j), so that each of 0 .. K thoughts has the probability 1 / (K + 1).
        self.stop = nn.Parameter(torch.tensor([-math.log(most - j) for j in range(most)]))
        last = self.net[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight[-1].zero_()
            last.bias[-1].zero_()
            self.told.weight.zero_()

    def choices(
        self, summary: Float[Tensor, "n f"], states: Float[Tensor, "n j w"], first: int = 0
    ) -> tuple[Float[Tensor, "n j w"], Float[Tensor, "n j w"], Float[Tensor, "n j"]]:
        """Mean and log-std of the thought after each state, and the logit of stopping there.

        Args:
            summary: of N observations.
            states: z_first and those that follow.
            first: the number of the first state.
        """
        n, count, _ = states.shape
        inputs = torch.cat([summary[:, None].expand(n, count, -1), states], dim=-1)
        # Densities are exact, also where the net computes in low precision.
        update, raw_log_std, logit = (
            self.net(inputs).to(_exact(summary)).split([self.width, self.width, 1], dim=-1)
        )
        log_std = squash_log_std(raw_log_std, STD_MIN, STD_MAX)
        return states + update, log_std, logit[..., 0] + self.stop[first : first + count]

    def draw(self, summary: Float[Tensor, "n f"], generator: Generators) -> Thought:
        """Thinks as the policy does while it is trained: with noise, until it draws to stop."""
        n = len(summary)
        noise = randn((n, self.most, self.width), generator, summary.device)
        uniform = random_uniform((n, self.most), generator, summary.device)
        z = self._start(summary)
        thinks = torch.ones(n, dtype=torch.bool, device=z.device)
        latents: list[Tensor] = []
        goes_on: list[Tensor] = []
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for j in range(self.most):
            mean, log_std, logit = self.choices(summary, z[:, None], j)
            thinks = thinks & (uniform[:, j] >= logit[:, 0].sigmoid())
            thought = mean[:, 0] + log_std[:, 0].exp() * noise[:, j]
            z = torch.where(thinks[:, None], thought, z)
            latents.append(torch.where(thinks[:, None], thought, 0.0))
            goes_on.append(thinks)
            parts.append((mean, log_std, logit))
        chain = torch.stack(latents, dim=1)
        count = torch.stack(goes_on, dim=1).sum(1)
        mean, log_std, logits = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        return Thought(chain, count, thinking_log_prob(chain, count, mean, log_std, logits))

    def score(
        self, summary: Float[Tensor, "n f"], latents: Float[Tensor, "n k w"], count: Tensor
    ) -> Float[Tensor, "n k"]:
        """``Thought.logprob`` of thoughts that were drawn, with gradients."""
        states = self.states(latents)[:, :-1]
        return thinking_log_prob(latents, count, *self.choices(summary, states))

    @staticmethod
    def states(latents: Float[Tensor, "n k w"]) -> Float[Tensor, "n k1 w"]:
        """z_0 .. z_K."""
        return F.pad(latents, (0, 0, 1, 0))

    def last(self, latents: Float[Tensor, "n k w"], count: Tensor) -> Float[Tensor, "n w"]:
        """z_T, on which the action depends."""
        row = torch.arange(len(count), device=count.device)
        return self.states(latents)[row, count]

    def settled(
        self, summary: Float[Tensor, "n f"]
    ) -> tuple[Float[Tensor, "n w"], Int[Tensor, " n"]]:
        """z_T and T without noise: thoughts are their means, and it stops where s_j is above 1/2.

        Gradients flow through the means, and none into the stopping.
        """
        z = self._start(summary)
        thinks = torch.ones(len(summary), dtype=torch.bool, device=z.device)
        count = torch.zeros(len(summary), dtype=torch.long, device=z.device)
        for j in range(self.most):
            mean, _, logit = self.choices(summary, z[:, None], j)
            thinks = thinks & (logit[:, 0] <= 0)
            z = torch.where(thinks[:, None], mean[:, 0], z)
            count = count + thinks
        return z, count

    def _start(self, summary: Float[Tensor, "n f"]) -> Float[Tensor, "n w"]:
        """z_0."""
        return summary.new_zeros(len(summary), self.width, dtype=_exact(summary))

    def every_end(
        self, summary: Float[Tensor, "n f"], noise: Float[Tensor, "n kw"]
    ) -> tuple[Float[Tensor, "n k1 w"], Float[Tensor, "n k1"], Float[Tensor, " n"]]:
        """All places where thinking may end, for imitation; gradients flow through the noise.

        Args:
            summary: of N observations.
            noise: standard normal, of K thoughts.

        Returns:
            z_0 .. z_K, the probability that each is the last, and ``thinking_cost``.
        """
        z = self._start(summary)[:, None]
        states = [z]
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for j, drawn in enumerate(noise.split(self.width, dim=1)):
            mean, log_std, logit = self.choices(summary, z, j)
            z = mean + log_std.exp() * drawn[:, None]
            states.append(z)
            parts.append((mean, log_std, logit))
        mean, log_std, logits = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        ends = torch.cat(states, dim=1)
        cost = thinking_cost(ends[:, :-1], mean, log_std, logits)
        return ends, log_stop_distribution(logits).exp(), cost


def _exact(x: Tensor) -> torch.dtype:
    """Of densities: float32, or float64 where x has it."""
    return torch.promote_types(x.dtype, torch.float32)


def check_thoughts(config: Any) -> None:
    """Refuses settings of thoughts that nothing would read, and what cannot be combined.

    Raises:
        UserError: naming them.
    """
    if not config.thoughts:
        why = "thoughts=0 thinks nothing"
        refuse_unread(config, "policy", ("thought_width", "thought_cost"), why)
        return
    if config.shortcut_steps:
        raise UserError(
            "policy.thoughts and policy.shortcut_steps are both set. Shortcuts learn from the "
            "policy's own steps, whose thoughts would differ from step to step: set one of them "
            "to 0."
        )
