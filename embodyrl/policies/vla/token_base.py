"""Base of the policies that predict actions as tokens.

A chunk is drawn as L tokens, and its log-probability is the sum of theirs. There are three kinds:

    tokens of      L               a chunk ends     a plan of C actions, of which H are executed
    bins           H * A           with its last    C * A tokens. No token reads what the network
                                                    reads at later places, so only the first H * A
                                                    are drawn; imitation learns all
    masked bins    C * A           with its last    every token reads all others, so all are drawn;
                                   step             see ``functional.masked_diffusion``
    coefficients   at most         after its end    all tokens describe the whole plan, so all are
                   ``num_places``  token            drawn (pi0-FAST)

A subclass brings the network: how a prompt is encoded, what the network reads at the place of a
token, and the logits that follow. The methods here are those of bins; a subclass with coefficients
replaces ``num_places``, ``actions_of`` and ``imitation_loss``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.functional.flow import Generators, randn
from embodyrl.functional.losses import masked_mean
from embodyrl.functional.masked_diffusion import (
    MASKED,
    MaskedPath,
    MaskedSteps,
    draw_path,
    draw_tokens,
    masked_at_random,
    score_path,
)
from embodyrl.policies.actor_critic import BELONGS_TO, ActorCritic
from embodyrl.policies.vla.nets import copy_cache
from embodyrl.policy import Mode, num_executed
from embodyrl.types import ActionSample, DenoisingTrace, Obs, PolicyEval

NO_TOKEN = -1
"""Stands in the places behind the end of a chunk. They have no probability."""


@dataclass
class Prompt:
    """Images, instruction and proprioception of N observations, encoded by the language model.

    Attributes:
        cache: keys and values of every layer.
        mask: (N, P) 1 at real tokens, 0 at padding.
        pooled: (N, W) the mean token.
    """

    cache: Any
    mask: Int[Tensor, "n p"]
    pooled: Float[Tensor, "n w"]


@dataclass(frozen=True)
class TokenTransition:
    """The ``policy.Steps`` of this policy: one step, whose probability is exact."""

    kind: str = "words"
    num_steps: int = 1
    num_noisy: int = 1
    eta: float = 0.0


class TokenPolicy(ActorCritic):
    """See the module's docstring.

    A subclass sets the attributes in its constructor.

    Attributes:
        transition: the single step of a path, whose probability is exact; or the steps in which
            masked tokens are revealed and edited.
        autoregressive: whether a token is predicted from those before it, one pass per token;
            otherwise one pass predicts all.
        end: the token that ends a chunk; None if all chunks have ``num_places`` tokens.
        normalize_action: actions to bin numbers, with ``inverse``.
    """

    belongs_to = BELONGS_TO
    transition: TokenTransition | MaskedSteps
    autoregressive: bool
    end: int | None = None
    normalize_action: Any

    def train(self, mode: bool = True) -> TokenPolicy:
        """Stays in evaluation mode: with dropout, the probability of a chunk would be random."""
        return super().train(False)

    def actor_parameters(self) -> list[nn.Parameter]:
        """What is trained, without the critic."""
        return [p for p in super().actor_parameters() if p.requires_grad]

    @property
    def num_places(self) -> int:
        """L, the most tokens that a chunk has."""
        actions = self.config.horizon if self._steps else num_executed(self.config)
        return actions * self.spec.action_dim

    @property
    def _steps(self) -> MaskedSteps | None:
        """The steps of masked tokens, where the policy draws such."""
        return self.transition if isinstance(self.transition, MaskedSteps) else None

    @property
    def trace_shape(self) -> tuple[int, int]:
        """Rows and columns of the tokens in a trace: one row for each action, and more if needed.

        Masked tokens have as many rows again, for the order in which they were revealed.
        """
        dims = self.spec.action_dim
        rows = max(num_executed(self.config), -(-self.num_places // dims))
        return (2 * rows if self._steps else rows), dims

    def _inputs(self, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n l w"]:
        """The network's input at the place of each token, of the first L of a plan."""
        raise NotImplementedError

    def _continue_prompt(
        self, mask: Tensor, cache: Any, inputs: Tensor
    ) -> Float[Tensor, "n l bins"]:
        """Logits of the tokens at further inputs (N, L, W) after a prompt.

        Their keys and values are appended to ``cache``. ``mask`` is that of the prompt.
        """
        raise NotImplementedError

    def logits(self, context: Prompt, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n l bins"]:
        """Logits of every token, given those before it (which ``parallel`` does not read)."""
        cache = copy_cache(context.cache)
        logits = self._continue_prompt(context.mask, cache, self._inputs(tokens))
        return logits / self.config.temperature

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Actor.sample``."""
        if mode == "eval" and self.chooses:
            return ActionSample(self.best_proposal(obs, generator))
        context = self.encode(obs)
        if self._steps:
            path = self._draw_masked(context, self._steps, len(obs), generator, mode)
            return self._masked_sample(obs, context, self._steps, path, mode)
        tokens = self._draw_tokens(context, len(obs), generator, mode)
        actions = self.actions_of(tokens)
        if mode == "eval":
            return ActionSample(actions)
        # The trace has the size of the longest chunk: traces of several batches are joined.
        rows, columns = self.trace_shape
        padded = F.pad(tokens, (0, rows * columns - self.num_places), value=NO_TOKEN)
        numbers = padded.view(len(tokens), rows, columns).float()
        trace = DenoisingTrace(
            torch.stack([torch.zeros_like(numbers), numbers], dim=1),
            torch.ones_like(tokens[:, :1], dtype=torch.bool),
        )
        logprob, _ = self._score(context, tokens)
        return ActionSample(actions, trace, logprob, self.value(obs, context))

    @torch.no_grad()
    def propose(self, obs: Obs, count: int, generator: Generators) -> Float[Tensor, "n count h a"]:
        """``count`` chunks for each observation, sampled at the temperature of training."""
        context = self.encode(obs)
        if self.autoregressive or self._steps:
            draws = [self._draw_tokens(context, len(obs), generator, "train") for _ in range(count)]
        else:
            # Parallel: all chunks of an observation are drawn from the same distribution.
            shape, device = (len(obs), self.num_places), context.mask.device
            logits = self.logits(context, torch.zeros(shape, dtype=torch.long, device=device))
            draws = [draw_tokens(logits, _uniform(shape, generator, device)) for _ in range(count)]
        return torch.stack([self.actions_of(tokens) for tokens in draws], dim=1)

    def _draw_tokens(
        self, context: Prompt, n: int, generator: Generators, mode: Mode
    ) -> Int[Tensor, "n l"]:
        """The tokens of one chunk for each of n prompts; ``NO_TOKEN`` behind its end."""
        if self._steps:
            return self._draw_masked(context, self._steps, n, generator, mode).tokens[:, -1]
        length = self.num_places
        uniform = _uniform((n, length), generator, context.mask.device)
        chance = None if mode == "eval" else uniform
        tokens = torch.zeros(n, length, dtype=torch.long, device=uniform.device)
        ended = torch.zeros(n, 1, dtype=torch.bool, device=uniform.device)
        if not self.autoregressive:
            # Parallel: one pass for all tokens.
            return draw_tokens(self.logits(context, tokens), chance)
        # Autoregressive: one pass per token, which extends the prompt's keys and values.
        cache = copy_cache(context.cache)
        mask = context.mask
        for i in range(length):
            this = slice(i, i + 1)
            inputs = self._inputs(tokens[:, : i + 1].clamp_min(0))[:, this]
            logits = self._continue_prompt(mask, cache, inputs) / self.config.temperature
            chosen = draw_tokens(logits, None if chance is None else chance[:, this])
            # A chunk that has ended gets no further token; when all have, nothing is left to do.
            tokens[:, this] = chosen.masked_fill(ended, NO_TOKEN)
            if self.end is not None:
                ended = ended | (chosen == self.end)
                if bool(ended.all()):
                    tokens[:, i + 1 :] = NO_TOKEN
                    break
            mask = torch.cat([mask, mask.new_ones(n, 1)], dim=1)
        return tokens

    def actions_of(self, tokens: Int[Tensor, "n l"]) -> Float[Tensor, "n h a"]:
        """The executed actions in [-1, 1] that the tokens of a chunk stand for."""
        numbers = tokens.view(len(tokens), -1, self.spec.action_dim).float()
        numbers = numbers[:, : num_executed(self.config)]
        return self.normalize_action.inverse(numbers).clamp(-1.0, 1.0)

    def evaluate(self, obs: Obs, trace: DenoisingTrace) -> PolicyEval:
        """See ``ScoresPaths.evaluate``; all tokens in one pass."""
        context = self.encode(obs)
        if self._steps:
            tokens, ranks = trace.x.long().flatten(2).chunk(2, dim=2)
            path = MaskedPath(tokens, ranks[:, 1:])
            logprob, entropy = score_path(partial(self.logits, context), self._steps, path)
            return PolicyEval(logprob, entropy, self.value(obs, context))
        logprob, entropy = self._score(context, trace.x[:, 1].flatten(1).long())
        return PolicyEval(logprob, entropy, self.value(obs, context))

    def _score(self, context: Prompt, tokens: Int[Tensor, "n l"]) -> tuple[Tensor, Tensor]:
        """(N, 1) log-probability of a chunk, and (N,) mean entropy of its tokens.

        The end token counts; places behind it do not.
        """
        drawn = tokens != NO_TOKEN
        if not tokens.is_meta:
            # Nothing is computed at places that no chunk of the batch has.
            length = int(drawn.sum(1).max())
            tokens = tokens[:, :length]
            drawn = drawn[:, :length]
        tokens = tokens.clamp_min(0)
        log_probs = self.logits(context, tokens).log_softmax(-1)
        chosen = log_probs.gather(-1, tokens[..., None])[..., 0]
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        mean_entropy = (entropy * drawn).sum(1) / drawn.sum(1)
        return (chosen * drawn).sum(1, keepdim=True), mean_entropy

    def _draw_masked(
        self, context: Prompt, steps: MaskedSteps, n: int, generator: Generators, mode: Mode
    ) -> MaskedPath:
        """A draft and its edits for each of n prompts."""
        shape = (n, steps.num_steps, 2, steps.places)
        uniform = _uniform(shape, generator, context.mask.device)
        # Of a normal number above 5 or so the distribution function is 1 in float32.
        uniform = uniform.clamp(1e-7, 1 - 1e-7)
        return draw_path(partial(self.logits, context), steps, uniform, mode == "eval")

    def _masked_sample(
        self, obs: Obs, context: Prompt, steps: MaskedSteps, path: MaskedPath, mode: Mode
    ) -> ActionSample:
        """Actions, and the whole path as the trace: tokens, and the order of each step."""
        actions = self.actions_of(path.tokens[:, -1])
        if mode == "eval":
            return ActionSample(actions)
        # The rows of a state are its tokens, then the order in which its step chose their places.
        before = torch.full_like(path.ranks[:, :1], MASKED)
        x = torch.cat([path.tokens, torch.cat([before, path.ranks], dim=1)], dim=2)
        x = x.view(len(x), -1, *self.trace_shape).float()
        stochastic = torch.ones_like(path.ranks[..., 0], dtype=torch.bool)
        logprob, _ = score_path(partial(self.logits, context), steps, path)
        return ActionSample(
            actions, DenoisingTrace(x, stochastic), logprob, self.value(obs, context)
        )

    @property
    def imitation_noise(self) -> int:
        """See ``DrawsNoise``: which tokens are masked."""
        return 1 + self._steps.places if self._steps else 0

    def imitation_loss(
        self, obs: Obs, actions: Float[Tensor, "b h a"], mask: Tensor, *noise: Tensor
    ) -> Tensor:
        """Cross-entropy of demonstrated actions, in nats per token.

        Args:
            obs: B observations.
            actions: (B, R, A), the first R of a plan.
            mask: (B, R) actions that count.
            noise: (B, ``imitation_noise``) normal numbers, where there are some.
        """
        return self._bins_loss(self.encode(obs), actions, mask, *noise)

    def _bins_loss(
        self, context: Prompt, actions: Float[Tensor, "b h a"], mask: Tensor, *noise: Tensor
    ) -> Tensor:
        """The same of observations that are encoded."""
        tokens = self.normalize_action(actions).long()
        if self._steps:
            return self._masked_loss(context, self._steps, tokens, mask, noise[0])
        # The temperature belongs to sampling: imitation fits the plain distribution.
        logits = self.logits(context, tokens.flatten(1)) * self.config.temperature
        loss = self._token_loss(logits, tokens.flatten(1))
        return masked_mean(loss.view(tokens.shape).mean(-1), mask)

    def _token_loss(
        self, logits: Float[Tensor, "n l bins"], tokens: Int[Tensor, "n l"]
    ) -> Float[Tensor, "n l"]:
        """Cross-entropy of each token."""
        return F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")

    def _masked_loss(
        self, context: Prompt, steps: MaskedSteps, tokens: Tensor, mask: Tensor, noise: Tensor
    ) -> Tensor:
        """Cross-entropy of tokens that are masked at random, given those that are not."""
        # What is planned and not shown is masked, and not asked for.
        known = mask[..., None].expand_as(tokens).flatten(1)
        missing = steps.places - known.shape[1]
        known = F.pad(known, (0, missing))
        tokens = F.pad(tokens.flatten(1), (0, missing))
        # A random share of the rest is masked too; these tokens are asked for.
        given, asked = masked_at_random(tokens, known, torch.special.ndtr(noise))
        logits = self.logits(context, given) * self.config.temperature
        return masked_mean(self._token_loss(logits, tokens), asked)


def _uniform(shape: tuple[int, ...], generator: Generators, device: torch.device) -> Tensor:
    """Uniform numbers in [0, 1].

    Only ``randn`` takes a generator per row, so normal numbers are mapped by their distribution
    function.
    """
    return torch.special.ndtr(randn(shape, generator, device))
