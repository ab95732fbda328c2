"""``Chooser``: critics that choose among the chunks that a policy proposes.

Best-of-N sampling: the policy proposes N chunks, the critics take the best. Nothing is
differentiated through the policy, so any policy that can be sampled will do. PA-RL
(arXiv:2412.06685) trains the critics and imitates what they chose.

    obs --FoundFeatures--> features (B, F) --+
    proposals (B, N, H, A) ------------------+--> Critics --mean of E--> values (B, N)

Two options go a little further than the proposals. An ``Editor`` changes each of them within a
bound, and the critics choose among both (EXPO, arXiv:2507.07986; with a frozen policy it is a
residual policy, as ResFiT's, arXiv:2509.19301). Gradient ascent moves the chosen chunk
(the local step of PA-RL).

The critics see what a real robot sees, and no state of a simulator (``policies.found_features``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.policies.critics import Critics
from embodyrl.policies.found_features import FoundFeatures
from embodyrl.ranges import Count, CountOrZero, NotNegative, Range
from embodyrl.types import EnvSpec, Obs

EDITOR_WIDTH = 256


@dataclass(frozen=True)
class ChooserConfig:
    """How a policy chooses among what it proposes; every policy that can be sampled has it.

    Attributes:
        chooser_width: hidden width of the critics that choose among proposals, which PA-RL trains;
            0 for none.
        proposals: N, chunks that the noise-free policy proposes, of which the chooser takes the
            best; 1 is the policy alone.
        edit_scale: a small net changes each action of a proposal by up to this, and the critics
            choose among proposals and edited proposals (EXPO); 0 for none.
        ascent_rate: step size of gradient ascent of the critics on the chosen chunk (PA-RL); 0 for
            none.
        ascent_steps: steps of it.
    """

    chooser_width: CountOrZero = 0
    proposals: Count = 8
    edit_scale: Annotated[float, Range(0, 2)] = 0.0
    ascent_rate: NotNegative = 0.0
    ascent_steps: Count = 5


def check_chooser(config: Any) -> None:
    """Refuses settings of the chooser that nothing would read.

    Raises:
        UserError: a number of proposals without a chooser, or a chooser and a noise policy.
    """
    if not config.chooser_width:
        unread = ("proposals", "edit_scale", "ascent_rate", "ascent_steps")
        refuse_unread(config, "policy", unread, "chooser_width=0 has no critics to choose")
    elif getattr(config, "steer_width", 0):
        raise UserError(
            "policy.chooser_width and policy.steer_width are both set. The noise policy leaves one "
            "proposal, so there is nothing to choose from: set one of them to 0."
        )
    elif not config.ascent_rate:
        refuse_unread(config, "policy", ("ascent_steps",), "ascent_rate=0 takes no step")


class Editor(nn.Module):
    """A change of a proposal, at most ``scale`` for each action; none before it is trained."""

    def __init__(self, features: int, horizon: int, action_dim: int, scale: float) -> None:
        super().__init__()
        size = horizon * action_dim
        self.scale = scale
        self.net = nn.Sequential(
            nn.Linear(features + size, EDITOR_WIDTH),
            nn.LayerNorm(EDITOR_WIDTH),
            nn.ReLU(),
            nn.Linear(EDITOR_WIDTH, size),
        )
        nn.init.zeros_(self.net[-1].weight)  # pyright: ignore[reportArgumentType]
        nn.init.zeros_(self.net[-1].bias)  # pyright: ignore[reportArgumentType]

    def forward(
        self, features: Float[Tensor, "b f"], proposal: Float[Tensor, "b h a"]
    ) -> Float[Tensor, "b h a"]:
        """The edited proposals, in the range of actions."""
        change = self.net(torch.cat([features, proposal.flatten(1)], dim=-1))
        return (proposal + self.scale * change.tanh().view_as(proposal)).clamp(-1.0, 1.0)


class Chooser(nn.Module):
    """An encoder and E critics of (observation, action chunk); see the module.

    Args:
        spec: of the env.
        horizon: H.
        config: of the chooser.
        count: E.
        layers: hidden layers.

    Attributes:
        ready: bool scalar, whether the critics have learned enough to choose.
    """

    ready: Tensor

    def __init__(
        self, spec: EnvSpec, horizon: int, config: ChooserConfig, count: int = 2, layers: int = 2
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = FoundFeatures(spec)
        self.register_buffer("ready", torch.tensor(False))
        # LayerNorm bounds the values of chunks that nobody tried.
        size, width = horizon * spec.action_dim, config.chooser_width
        self.critics = Critics(self.encoder.dim, size, count, width, layers, "layer")
        self.editor: Editor | None = None
        if config.edit_scale:
            self.editor = Editor(self.encoder.dim, horizon, spec.action_dim, config.edit_scale)

    @torch.no_grad()
    def values_of(
        self, features: Float[Tensor, "b f"], proposals: Float[Tensor, "b n h a"]
    ) -> Float[Tensor, "b n"]:
        """The mean of the critics for N proposals at each of B observations."""
        # All proposals in one batch.
        b, n = proposals.shape[:2]
        features, proposals = _each_proposal(features, proposals)
        return self.critics(features, proposals).mean(0).view(b, n)

    def choose(
        self, features: Float[Tensor, "b f"], proposals: Float[Tensor, "b n h a"]
    ) -> Float[Tensor, "b h a"]:
        """The proposal with the largest value, as it is."""
        index = self.values_of(features, proposals).argmax(1)
        return proposals[torch.arange(len(index), device=index.device), index]

    @torch.no_grad()
    def best_of(
        self, features: Float[Tensor, "b f"], proposals: Float[Tensor, "b n h a"]
    ) -> Float[Tensor, "b h a"]:
        """The chunk with the largest value, among proposals and edited ones, after the ascent."""
        # Edited proposals beside those of the policy.
        if self.editor is not None:
            edited = self.editor(*_each_proposal(features, proposals)).view_as(proposals)
            proposals = torch.cat([proposals, edited], dim=1)
        chunk = self.choose(features, proposals)
        return self._ascend(features, chunk) if self.config.ascent_rate else chunk

    def best(self, obs: Obs, proposals: Float[Tensor, "b n h a"]) -> Float[Tensor, "b h a"]:
        """The same from the observations themselves."""
        return self.best_of(self.encoder(obs), proposals)

    @torch.enable_grad()
    def _ascend(
        self, features: Float[Tensor, "b f"], chunk: Float[Tensor, "b h a"]
    ) -> Float[Tensor, "b h a"]:
        """The chunk after steps that raise its value; where none did, as it was."""
        # Each step follows the slope of the mean critic.
        start = chunk
        for _ in range(self.config.ascent_steps):
            chunk = chunk.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.critics(features, chunk).mean(0).sum(), chunk)
            chunk = (chunk + self.config.ascent_rate * slope).clamp(-1.0, 1.0).detach()
        return self.choose(features, torch.stack([start, chunk], dim=1))


def _each_proposal(
    features: Float[Tensor, "b f"], proposals: Float[Tensor, "b n h a"]
) -> tuple[Float[Tensor, "m f"], Float[Tensor, "m h a"]]:
    """Each observation's features once for each of its proposals."""
    b, n = proposals.shape[:2]
    return features[:, None].expand(b, n, -1).flatten(0, 1), proposals.flatten(0, 1)
