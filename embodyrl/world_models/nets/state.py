"""``StateModel``: what actions do to the simulator's state, where the data hold it, and when the task is solved.

Whether a hand closes on a block or beside it is decided by millimetres that a small latent map does
not hold, but a few dozen numbers do. They are predicted one action at a time, by a small net that
adds to a linear model. The pictures of a dream follow them (``ChunkTransformer``), and critics may
see them.

An object rests until it is touched, wherever in the room that is. Where it is known which numbers
are positions (``EnvSpec.layout``), each object has a net of its own that sees positions relative to
it, and is told no goals: a net that sees everything learns instead that objects go to goals when
hands do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.world_models.nets.diffusers_io import ConfigMixin, ModelMixin, register_to_config

RESTS = 0.02
"""Share of an object's usual movement in one action below which it rests."""
STEADY = 0.03
"""Noise, in standard deviations, that the linear model is to bear. Without, numbers that go together, such as a hand's
position and the joints that decide it, get large weights of opposite signs, and a long dream runs
away."""
FAR = 5.0
"""Standard deviations at which inputs are cut off, so that a dream that left the data goes nowhere."""


class StateModel(ModelMixin, ConfigMixin):
    """A full_state (proprio and privileged state, in the env's units) and an action -> the full_state after it.

    Args:
        body_dim: D, proprio and privileged state.
        action_dim: A.
        word_dim: E, of the instruction's embedding.
        width: of the net.
        layers: hidden ones.
        members: E nets, alike but for their first weights (arXiv:1612.01474). Their mean is what is
            believed; where they differ, the data said nothing.
        layout: what positions lie in the full_state (``EnvSpec.layout``).
        judges: nets that say whether the task is solved; the least sure of them counts. A policy
            that is trained in a dream finds full_states that one net takes for solved, and seldom those
            that all take for it. None sees the robot's own numbers where the layout names them: a
            hand can go anywhere, whatever the objects do.
    """

    mean: Tensor
    std: Tensor
    linear: Tensor
    scale: Tensor
    reach: Tensor
    judged: Tensor

    @register_to_config
    def __init__(
        self,
        body_dim: int,
        action_dim: int,
        word_dim: int = 256,
        width: int = 256,
        layers: int = 3,
        members: int = 1,
        layout: Sequence[tuple[str, int, int]] = (),
        judges: int = 1,
    ) -> None:
        super().__init__()
        self.places = [start for kind, start, _ in layout if kind in ("hand", "object", "relative")]
        things = [
            (start, numbers) for kind, start, numbers in layout if kind in ("object", "relative")
        ]
        self.objects = [slice(start, start + numbers) for start, numbers in things]
        self.hand = next((start for kind, start, _ in layout if kind == "hand"), 0)
        self.relative = [start for kind, start, _ in layout if kind == "relative"]
        self.marks = [
            slice(start, start + numbers) for kind, start, numbers in layout if kind == "mark"
        ]
        self.net = _mlp(body_dim + action_dim, body_dim, width, layers)
        self.others = nn.ModuleList(
            _mlp(body_dim + action_dim, body_dim, width, layers) for _ in range(members - 1)
        )
        self.movers = nn.ModuleList(
            _mlp(body_dim + action_dim, 1 + part.stop - part.start, width, layers)
            for _ in range(members)
            for part in self.objects
        )
        self.judge = _mlp(body_dim + word_dim, 1, 64, 2)
        self.jury = nn.ModuleList(_mlp(body_dim + word_dim, 1, 64, 2) for _ in range(judges - 1))
        judged = torch.ones(body_dim)
        for kind, start, numbers in layout:
            judged[start : start + numbers] *= kind != "robot"
        self.register_buffer("judged", judged, persistent=False)
        self.register_buffer("mean", torch.zeros(body_dim))
        self.register_buffer("std", torch.ones(body_dim))
        self.register_buffer("linear", torch.zeros(body_dim + action_dim + 1, body_dim))
        self.register_buffer("scale", torch.ones(body_dim))
        if self.objects:
            self.register_buffer("reach", torch.ones(len(self.objects), len(self.places), 3))

    @torch.no_grad()
    def fit_linear(
        self,
        full_state: Float[Tensor, "b d"],
        actions: Float[Tensor, "b a"],
        after: Float[Tensor, "b d"],
    ) -> None:
        """Normalisation, and the linear model by least squares; what is left is the net's to learn.

        The squares are those expected with noise of ``STEADY`` on the full_state that it leads away from,
        and back.
        """
        inputs = full_state
        full_state = self._in_room(full_state)
        after = self._in_room(after)
        self.mean.copy_(full_state.mean(0))
        self.std.copy_(full_state.std(0).clamp_min(1e-3))
        for i, part in enumerate(self.objects):
            away = torch.stack(
                [(full_state[:, k : k + 3] - _point(full_state, part)).std(0) for k in self.places]
            )
            self.reach[i] = away.clamp_min(1e-3)
        x = self._inputs(inputs, actions).double()
        y = ((after - full_state) / self.std).double()
        square = x.T @ x + 1e-2 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        product = x.T @ y
        noise = len(x) * STEADY**2
        square.diagonal()[: y.shape[1]] += noise
        product.diagonal()[: y.shape[1]] -= noise
        self.linear.copy_(torch.linalg.solve(square, product))
        for part in self.objects:
            self.linear[:, part] = 0.0
        self.scale.copy_((y - x @ self.linear.double()).std(0).clamp_min(2e-3))

    def normalize(self, full_state: Tensor) -> Tensor:
        """Standardised and cut off."""
        return ((self._in_room(full_state) - self.mean) / self.std).clamp(-FAR, FAR)

    @property
    def members(self) -> list[nn.Module]:
        """The E nets."""
        return [self.net, *self.others]

    def loss(
        self,
        seen: Float[Tensor, "b d"],
        full_state: Float[Tensor, "b d"],
        actions: Tensor,
        after: Tensor,
    ) -> Float[Tensor, ""]:
        """How far the nets are off, in the units of what the linear model leaves, each net for itself.

        From ``seen``, which may be off, they are to lead to the true full_state ``after``; an object
        rests if it did so from the true one before, ``full_state``.
        """
        x = self._inputs(seen, actions)
        seen, full_state, after = (self._in_room(b) for b in (seen, full_state, after))
        with torch.autocast(full_state.device.type, enabled=False):
            wanted = ((after - seen) / self.std - x @ self.linear) / self.scale
            change = ((after - full_state) / self.std / self.scale).abs()
        total = x.new_zeros(())
        for member, net in enumerate(self.members):
            said = net(x[:, :-1]).float()
            for i, part in enumerate(self.objects):
                goes, moves = self._moved(member, i, seen, x)
                moved = change[:, part].amax(-1) > RESTS
                said[:, part] = torch.where(moved[:, None], goes, wanted[:, part])
                total = total + F.binary_cross_entropy_with_logits(moves, moved.float())
            total = total + F.smooth_l1_loss(said, wanted, beta=0.5)
        return total

    def forward(
        self, full_states: Float[Tensor, "e n d"], actions: Float[Tensor, "n a"]
    ) -> Float[Tensor, "e n d"]:
        """The full_states after one action, each by the net that it belongs to."""
        x = self._inputs(full_states, actions.expand(len(full_states), -1, -1))
        full_states = self._in_room(full_states)
        said = torch.stack([net(one[:, :-1]) for net, one in zip(self.members, x, strict=True)])
        for member, (full_state, one) in enumerate(zip(full_states, x, strict=True)):
            for i, part in enumerate(self.objects):
                goes, moves = self._moved(member, i, full_state, one)
                said[member, :, part] = goes * (moves > 0)[:, None]
        return self._in_room(
            full_states + (x @ self.linear + said * self.scale) * self.std, back=True
        )

    def roll(
        self,
        full_state: Float[Tensor, "n d"],
        actions: Float[Tensor, "n h a"],
        count: Int[Tensor, " n"],
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
        """The full_state after the first ``count`` of the actions, and how far the nets differ about it.

        Each net goes its own way for as long; the difference is a standard deviation: of the
        position of the object that they differ most about, in metres, or where no object is known
        that of the full_state, in those of the data (root mean square). It is 0 for a single net.
        """
        full_states = full_state.expand(len(self.members), -1, -1)
        with torch.autocast(
            full_state.device.type, enabled=False
        ):  # millimetres do not survive bfloat16
            for step in range(actions.shape[1]):
                full_states = torch.where(
                    (step < count)[:, None], self(full_states, actions[:, step]), full_states
                )
            spread = self._in_room(full_states).std(0, correction=0)
        if not self.objects:
            return full_states.mean(0), (spread / self.std).square().mean(-1).sqrt()
        return full_states.mean(0), torch.stack(
            [_point(spread, part).norm(dim=-1) for part in self.objects]
        ).amax(0)

    def logit(
        self, full_state: Float[Tensor, "n d"], words: Float[Tensor, "n e"]
    ) -> Float[Tensor, " n"]:
        """Whether the task of the instruction is solved, by the least sure of the judges."""
        return self.verdicts(full_state, words).amin(0)

    def verdicts(
        self, full_state: Float[Tensor, "n d"], words: Float[Tensor, "n e"]
    ) -> Float[Tensor, "j n"]:
        """The logit of each of the judges."""
        with torch.autocast(full_state.device.type, enabled=False):
            seen = torch.cat([self.normalize(full_state) * self.judged, words], dim=-1)
            return torch.stack([judge(seen)[..., 0] for judge in (self.judge, *self.jury)])

    def _in_room(self, full_state: Tensor, back: bool = False) -> Tensor:
        """Objects that are given as seen from the hand (``"relative"``) where they are in the room; and back.

        There they rest, and it is there that nets differ about them.
        """
        if not self.relative:
            return full_state
        full_state, hand = full_state.clone(), full_state[..., self.hand : self.hand + 3]
        for start in self.relative:
            full_state[..., start : start + 3] += -hand if back else hand
        return full_state

    def _inputs(self, full_state: Tensor, actions: Tensor) -> Tensor:
        return torch.cat(
            [self.normalize(full_state), actions, torch.ones_like(actions[..., :1])], dim=-1
        )

    def _moved(self, member: int, i: int, full_state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(n, numbers) how object i moves if it does, in the units of ``scale``, and (n,) the logit that it does."""
        part = self.objects[i]
        seen = x[:, :-1].clone()
        for mark in self.marks:
            seen[:, mark] = 0.0
        for place, reach in zip(self.places, self.reach[i], strict=True):
            seen[:, place : place + 3] = (
                (full_state[:, place : place + 3] - _point(full_state, part)) / reach
            ).clamp(-FAR, FAR)
        seen[:, part.start + 2] = x[
            :, part.start + 2
        ]  # its own height: what it stands on is everywhere as high
        said = self.movers[member * len(self.objects) + i](seen).float()
        return said[:, 1:], said[:, 0]


def _point(full_state: Tensor, part: slice) -> Tensor:
    return full_state[:, part.start : part.start + 3]


class ResidualLayer(nn.Module):
    """x + a layer of it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + F.silu(self.layer(x))


def _mlp(inputs: int, outputs: int, width: int, layers: int) -> nn.Sequential:
    net = nn.Sequential(
        nn.Linear(inputs, width),
        nn.SiLU(),
        *(ResidualLayer(width) for _ in range(layers - 1)),
        nn.Linear(width, outputs),
    )
    last = cast(nn.Linear, net[-1])
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return net
