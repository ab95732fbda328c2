"""``Chooser``: critics that choose among the chunks that a policy proposes.

Best-of-N sampling: the policy proposes N chunks, the critics take the best. Nothing is
differentiated through the policy, so any policy that can be sampled will do. PA-RL
(arXiv:2412.06685) trains the critics and imitates what they chose.

    obs --encoder--> features (B, F) --+
    proposals (B, N, H, A) ------------+--> Critics --mean of E--> values (B, N)

Two options go a little further than the proposals. An ``Editor`` changes each of them within a
bound: an edit policy, a residual policy, or RLT's actor (see there). Gradient ascent moves the
chosen chunk (the local step of PA-RL).

The critics see what a real robot sees, and no state of a simulator: what hindsight finds in
pictures (``policies.found_features``), or the policy's features (``policies.shared_features``).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.policies.critics import Critics
from embodyrl.policies.found_features import FoundFeatures
from embodyrl.policies.shared_features import SharedFeatures
from embodyrl.ranges import Choice, Count, CountOrZero, NotNegative, Range
from embodyrl.types import EnvSpec, Obs

EDITOR_WIDTH = 256
SEEN = ("found", "shared")
"""What ``chooser_sees`` may be."""
CHOOSER_PARTS = {
    "chooser_width": ("chooser.",),
    "chooser_prefixes": ("chooser.critics.lengths",),
    "edit_scale": ("chooser.editor.",),
}
"""Config key -> parts that keep their fresh weights if the initial checkpoint has another value."""


@dataclass(frozen=True)
class ChooserConfig:
    """How a policy chooses among what it proposes; every policy that can be sampled has it.

    Attributes:
        chooser_width: hidden width of the critics that choose among proposals, which PA-RL trains;
            0 for none.
        chooser_sees: what they see of an observation: what hindsight has ``found`` in pictures
            beside proprioception and instruction, or ``shared`` features of the policy, which must
            not change then, and proprioception.
        chooser_prefixes: they also learn the value after each action of a chunk. The value of the
            whole chunk chooses.
        proposals: N, chunks that the noise-free policy proposes, of which the chooser takes the
            best; 1 is the policy alone.
        edit_scale: a small net changes each action of a proposal by up to this, and the critics
            choose among proposals and edited proposals (EXPO); 0 for none, 2 for anywhere.
        edit_only: they choose among edited proposals alone: a residual policy (ResFiT), or RLT's
            actor.
        ascent_rate: step size of gradient ascent of the critics on the chosen chunk (PA-RL); 0 for
            none.
        ascent_steps: steps of it.
    """

    chooser_width: CountOrZero = 0
    chooser_sees: Annotated[str, Choice(*SEEN)] = "found"
    chooser_prefixes: bool = False
    proposals: Count = 8
    edit_scale: Annotated[float, Range(0, 2)] = 0.0
    edit_only: bool = False
    ascent_rate: NotNegative = 0.0
    ascent_steps: Count = 5


def check_chooser(config: Any) -> None:
    """Refuses settings of the chooser that nothing would read.

    Raises:
        UserError: a number of proposals without a chooser, or a chooser and a noise policy.
    """
    if not config.chooser_width:
        unread = [f.name for f in fields(ChooserConfig) if f.name != "chooser_width"]
        refuse_unread(config, "policy", unread, "chooser_width=0 has no critics to choose")
    elif getattr(config, "steer_width", 0):
        raise UserError(
            "policy.chooser_width and policy.steer_width are both set. The noise policy leaves one "
            "proposal, so there is nothing to choose from: set one of them to 0."
        )
    else:
        if not config.ascent_rate:
            refuse_unread(config, "policy", ("ascent_steps",), "ascent_rate=0 takes no step")
        if not config.edit_scale:
            refuse_unread(config, "policy", ("edit_only",), "edit_scale=0 edits nothing")


class Editor(nn.Module):
    """A small actor that changes a proposal, its reference; nothing before it is trained.

    It moves each action by at most ``scale``, and stays in the range of actions:

        a = r + c min(scale, 1 - r) where c > 0,   r + c min(scale, r + 1) elsewhere,
        c = tanh(net(features, r))

    With a small scale it is the edit policy of EXPO (arXiv:2507.07986), or, over a frozen policy, a
    residual policy (Policy Decorator, arXiv:2412.13630; ResFiT, arXiv:2509.19301). With a scale
    of 2 it goes anywhere, as RLT's actor does (arXiv:2604.23073).
    """

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
        self, features: Float[Tensor, "b f"], reference: Float[Tensor, "b h a"]
    ) -> Float[Tensor, "b h a"]:
        """The edited proposals, in the range of actions."""
        change = self.net(torch.cat([features, reference.flatten(1)], dim=-1)).tanh()
        change = change.view_as(reference)
        # How far there is to go, up and down. So no gradient ends at the edge of the range.
        up = (1.0 - reference).clamp(0.0, self.scale)
        down = (1.0 + reference).clamp(0.0, self.scale)
        edited = reference + change * torch.where(change > 0, up, down)
        return edited.clamp(-1.0, 1.0)  # of rounding


class Chooser(nn.Module):
    """An encoder and E critics of (observation, action chunk); see the module.

    Args:
        spec: of the env.
        horizon: H.
        config: of the chooser.
        shared: the policy's features; None where it has none.
        count: E.
        layers: hidden layers.

    Attributes:
        encoder: what the critics see of an observation.
        editor: changes proposals; None where the config asks for none.
        ready: bool scalar, whether the critics have learned enough to choose.
    """

    ready: Tensor

    def __init__(
        self,
        spec: EnvSpec,
        horizon: int,
        config: ChooserConfig,
        shared: SharedFeatures | None = None,
        count: int = 2,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.config = config
        self.encoder = _encoder(spec, config, shared)
        self.register_buffer("ready", torch.tensor(False))
        if config.chooser_prefixes and horizon < 2:
            raise UserError(
                "policy.chooser_prefixes learns a value after each action of a chunk, and a chunk "
                "has one action here. Leave it out, or execute more actions of a chunk."
            )
        # LayerNorm bounds the values of chunks that nobody tried.
        size, width = horizon * spec.action_dim, config.chooser_width
        prefixes = horizon if config.chooser_prefixes else 0
        self.critics = Critics(self.encoder.dim, size, count, width, layers, "layer", prefixes)
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
        # Edited proposals beside those of the policy, or in their place.
        if self.editor is not None:
            edited = self.editor(*_each_proposal(features, proposals)).view_as(proposals)
            own = [] if self.config.edit_only else [proposals]
            proposals = torch.cat([*own, edited], dim=1)
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


def _encoder(
    spec: EnvSpec, config: ChooserConfig, shared: SharedFeatures | None
) -> FoundFeatures | SharedFeatures:
    """What ``chooser_sees`` names.

    Raises:
        UserError: the policy has no features.
    """
    if config.chooser_sees == "found":
        return FoundFeatures(spec)
    if shared is None:
        raise UserError(
            "policy.chooser_sees=shared needs a policy that summarises observations, and this one "
            "does not. Leave it out."
        )
    return shared


def _each_proposal(
    features: Float[Tensor, "b f"], proposals: Float[Tensor, "b n h a"]
) -> tuple[Float[Tensor, "m f"], Float[Tensor, "m h a"]]:
    """Each observation's features once for each of its proposals."""
    b, n = proposals.shape[:2]
    return features[:, None].expand(b, n, -1).flatten(0, 1), proposals.flatten(0, 1)
