"""``StateModel``: what actions do to the simulator's state, and when the task is solved.

It needs data that hold the simulator's state. Whether a hand closes on a block or beside it is a
matter of millimetres. A small latent map does not hold them, but a few dozen numbers do. A linear
model plus a small network predict them one action at a time. The frames of a dream follow them
(``ChunkTransformer``), and critics may see them.

An object rests until it is touched, wherever in the room that is. If the layout says which numbers
are positions (``EnvSpec.layout``), each object has a network of its own, which sees positions
relative to the object and no goals. A network that sees everything learns instead that objects
move to goals when hands do.

Where the data hold no such state, places found in pictures (``Finder``) stand in its place. They
are where the robot's own numbers will be, so the networks also see how far the robot is from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments

RESTS = 0.02
"""An object rests in an action if it moves less than this share of its usual movement."""
STEADY = 0.03
"""Input noise, in standard deviations, that the linear model is made robust to.

Without it, numbers that go together, such as a hand's position and the joint angles behind it, get
large weights of opposite signs, and a long dream diverges.
"""
NEAR = 5.0
"""Distances to found places are also seen this many times larger, clipped at ``NEAR_BY``."""
NEAR_BY = 3.0
FAR = 5.0
"""Standard deviations at which inputs are clipped: a dream outside the data must not diverge."""


type MemberChoice = Callable[[Tensor], Tensor]
"""Courses of E networks (E, H + 1, n, D) -> the number (n,) of the network that is followed."""


class StateModel(SavedNetwork):
    """A full state and an action -> the next full state.

    A full state is the proprio followed by the simulator's state, in the env's units.

    Args:
        body_dim: D, of the full state.
        action_dim: A.
        word_dim: of the instruction's embedding.
        width: of the networks.
        layers: their hidden layers.
        members: E networks that differ only in their first weights (an ensemble,
            arXiv:1612.01474). The prediction is their mean, or one of them
            (``world_models.members``). Where they differ, the data say nothing.
        layout: which numbers of the full state are positions (``EnvSpec.layout``).
        judges: J networks that say whether the task is solved; the least sure of them counts. A
            policy that is trained in a dream finds states that one network takes for solved by
            mistake, but seldom states that all do. If the layout names the robot's own numbers,
            the judges do not see them, because a hand can go anywhere, whatever the objects do.
        found: J, found places after the proprio, each as many numbers as the proprio. They rest.
            With them there is no layout.
        prospects: networks that say whether the task will be solved; their mean counts.
    """

    mean: Tensor
    std: Tensor
    linear: Tensor
    scale: Tensor
    reach: Tensor
    judged: Tensor

    @record_arguments
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
        found: int = 0,
        prospects: int = 0,
    ) -> None:
        super().__init__()
        # The robot's own numbers come first, and the found places behind them.
        self.found = found
        self.robot_dim = body_dim // (1 + found)
        # Where the layout has positions, objects, goals, and objects given relative to the hand.
        self.places = [start for kind, start, _ in layout if kind in ("hand", "object", "relative")]
        self.objects = [
            slice(start, start + numbers)
            for kind, start, numbers in layout
            if kind in ("object", "relative")
        ]
        self.hand = next((start for kind, start, _ in layout if kind == "hand"), 0)
        self.relative = [start for kind, start, _ in layout if kind == "relative"]
        self.marks = [
            slice(start, start + numbers) for kind, start, numbers in layout if kind == "mark"
        ]
        # The ensemble, and for each of its members a network per object.
        inputs = body_dim + action_dim
        distances = 2 * found * self.robot_dim
        self.net = residual_mlp(inputs + distances, body_dim, width, layers)
        self.others = nn.ModuleList(
            residual_mlp(inputs + distances, body_dim, width, layers) for _ in range(members - 1)
        )
        self.movers = nn.ModuleList(
            residual_mlp(inputs, 1 + part.stop - part.start, width, layers)
            for _ in range(members)
            for part in self.objects
        )
        # The judges, and the numbers that they see.
        judging = body_dim + distances + word_dim
        self.judge = residual_mlp(judging, 1, 64, 2)
        self.jury = nn.ModuleList(residual_mlp(judging, 1, 64, 2) for _ in range(judges - 1))
        self.prospects = nn.ModuleList(residual_mlp(judging, 1, 64, 2) for _ in range(prospects))
        judged = torch.ones(body_dim)
        for kind, start, numbers in layout:
            judged[start : start + numbers] *= kind != "robot"
        self.register_buffer("judged", judged, persistent=False)
        # Normalisation, and the linear model.
        self.register_buffer("mean", torch.zeros(body_dim))
        self.register_buffer("std", torch.ones(body_dim))
        self.register_buffer("linear", torch.zeros(inputs + 1, body_dim))
        self.register_buffer("scale", torch.ones(body_dim))
        if self.objects:
            self.register_buffer("reach", torch.ones(len(self.objects), len(self.places), 3))

    @property
    def members(self) -> list[nn.Module]:
        """The E networks."""
        return [self.net, *self.others]

    @torch.no_grad()
    def fit_linear(
        self,
        state: Float[Tensor, "b d"],
        actions: Float[Tensor, "b a"],
        after: Float[Tensor, "b d"],
    ) -> None:
        """Fits the normalisation, and the linear model by least squares.

        The squares are the expected ones with noise of ``STEADY`` on the input state, which the
        model is to take back. The networks learn what the linear model leaves over.

        Args:
            state: before the actions.
            actions: one each.
            after: the state after it.
        """
        x_state = state
        state = self._in_room(state)
        after = self._in_room(after)
        # Normalisation.
        self.mean.copy_(state.mean(0))
        self.std.copy_(state.std(0).clamp_min(1e-3))
        for i, part in enumerate(self.objects):
            distances = [(state[:, k : k + 3] - _point(state, part)).std(0) for k in self.places]
            self.reach[i] = torch.stack(distances).clamp_min(1e-3)
        # The normal equations, with the expected effect of the noise.
        x = self._inputs(x_state, actions).double()
        if self.found:  # a place that is uncertain by centimetres says nothing in a straight line
            x[:, self.robot_dim : self.mean.numel()] = 0.0
        y = ((after - state) / self.std).double()
        square = x.T @ x + 1e-2 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
        product = x.T @ y
        noise = len(x) * STEADY**2
        square.diagonal()[: y.shape[1]] += noise
        product.diagonal()[: y.shape[1]] -= noise
        self.linear.copy_(torch.linalg.solve(square, product))
        # Objects are left to their own networks.
        for part in self.objects:
            self.linear[:, part] = 0.0
        if self.found:
            self.linear[:, self.robot_dim :] = 0.0
        # The unit of what is left over.
        self.scale.copy_((y - x @ self.linear.double()).std(0).clamp_min(2e-3))

    def normalize(self, state: Tensor) -> Tensor:
        """Standardised and clipped."""
        return ((self._in_room(state) - self.mean) / self.std).clamp(-FAR, FAR)

    def loss(
        self,
        start: Float[Tensor, "b d"],
        state: Float[Tensor, "b d"],
        actions: Tensor,
        after: Tensor,
    ) -> Float[Tensor, ""]:
        """The sum of the networks' errors, in the units of what the linear model leaves over.

        Args:
            start: the state to predict from, which may be wrong.
            state: the true one; an object rests if it does so from here.
            actions: one each.
            after: the true state after it, which is to be reached from ``start``.
        """
        x = self._inputs(start, actions)
        start, state, after = (self._in_room(s) for s in (start, state, after))
        with torch.autocast(state.device.type, enabled=False):
            target = ((after - start) / self.std - x @ self.linear) / self.scale
            change = ((after - state) / self.std / self.scale).abs()
        total = x.new_zeros(())
        for member, net in enumerate(self.members):
            predicted = net(self._seen(start, x)).float()
            for i, part in enumerate(self.objects):
                # Whether the object moves, and where to if it does.
                movement, moves = self._object_movement(member, i, start, x)
                moved = change[:, part].amax(-1) > RESTS
                predicted[:, part] = torch.where(moved[:, None], movement, target[:, part])
                total = total + F.binary_cross_entropy_with_logits(moves, moved.float())
            # What was found rests, so there is nothing to predict.
            moving = slice(self.robot_dim if self.found else None)
            total = total + F.smooth_l1_loss(predicted[:, moving], target[:, moving], beta=0.5)
        return total

    def forward(
        self, states: Float[Tensor, "e n d"], actions: Float[Tensor, "n a"]
    ) -> Float[Tensor, "e n d"]:
        """The states after one action; row e is predicted by network e."""
        x = self._inputs(states, actions.expand(len(states), -1, -1))
        states = self._in_room(states)
        predicted = torch.stack(
            [
                net(self._seen(state, xe))
                for net, state, xe in zip(self.members, states, x, strict=True)
            ]
        )
        # Objects move as their own networks say, if these say that they move.
        for member, (state, xe) in enumerate(zip(states, x, strict=True)):
            for i, part in enumerate(self.objects):
                movement, moves = self._object_movement(member, i, state, xe)
                predicted[member, :, part] = movement * (moves > 0)[:, None]
        change = (x @ self.linear + predicted * self.scale) * self.std
        if self.found:
            change[..., self.robot_dim :] = 0.0
        return self._in_room(states + change, back=True)

    def roll(
        self,
        state: Float[Tensor, "n d"],
        actions: Float[Tensor, "n h a"],
        count: Int[Tensor, " n"],
        choose: MemberChoice | None = None,
    ) -> tuple[Float[Tensor, "n d"], Float[Tensor, " n"]]:
        """The state after the first ``count`` of the actions, and the ensemble's spread.

        Each network predicts its own course over all actions.

        Args:
            state: before the actions.
            actions: of a chunk.
            count: how many of them are executed.
            choose: which network's state it is in each row; None takes their mean.

        Returns:
            The state, and (n,) the networks' spread, 0 for a single one. With a layout the spread
            is the standard deviation, in metres, of the object position that the networks differ
            about most. Without one it is that of the full state, as a root mean square in standard
            deviations of the data.
        """
        courses = self.courses(state, actions, count)
        states = courses[:, -1]
        if choose is None:
            return states.mean(0), self._spread(states)
        rows = torch.arange(len(state), device=state.device)
        return states[choose(courses), rows], self._spread(states)

    def courses(
        self,
        state: Float[Tensor, "n d"],
        actions: Float[Tensor, "n h a"],
        count: Int[Tensor, " n"],
    ) -> Float[Tensor, "e h+1 n d"]:
        """The states before and after each action, by each network; they rest after ``count``."""
        states = [state.expand(len(self.members), -1, -1)]
        # In float32: bfloat16 cannot hold millimetres.
        with torch.autocast(state.device.type, enabled=False):
            for step in range(actions.shape[1]):
                after = self(states[-1], actions[:, step])
                states.append(torch.where((step < count)[:, None], after, states[-1]))
        return torch.stack(states, dim=1)

    def _spread(self, states: Float[Tensor, "e n d"]) -> Float[Tensor, " n"]:
        """See ``roll``."""
        spread = self._in_room(states).std(0, correction=0)
        if not self.objects:
            return (spread / self.std).square().mean(-1).sqrt()
        by_object = [_point(spread, part).norm(dim=-1) for part in self.objects]
        return torch.stack(by_object).amax(0)

    def transition(
        self,
        before: Float[Tensor, "*b d"],
        actions: Float[Tensor, "*b a"],
        after: Float[Tensor, "*b d"],
    ) -> Float[Tensor, "*b f"]:
        """State, action, and what the linear model leaves over of the change, clipped."""
        x = self._inputs(before, actions)
        with torch.autocast(before.device.type, enabled=False):
            change = (self._in_room(after) - self._in_room(before)) / self.std
            left = (change - x @ self.linear) / self.scale
        return torch.cat([x[..., :-1], left.clamp(-FAR, FAR)], dim=-1)

    def logit(
        self, state: Float[Tensor, "n d"], words: Float[Tensor, "n e"]
    ) -> Float[Tensor, " n"]:
        """Logit that the task of the instruction is solved, by the least sure of the judges."""
        return self.verdicts(state, words).amin(0)

    def verdicts(
        self, state: Float[Tensor, "n d"], words: Float[Tensor, "n e"]
    ) -> Float[Tensor, "j n"]:
        """The logit of each of the judges."""
        return self._ask([self.judge, *self.jury], state, words)

    def prospect_logits(
        self, state: Float[Tensor, "*e n d"], words: Float[Tensor, "*e n w"]
    ) -> Float[Tensor, "k *e n"]:
        """The logit, of each network for it, that the task will be solved, now or later."""
        return self._ask(list(self.prospects), state, words)

    def promise(
        self, state: Float[Tensor, "*e n d"], words: Float[Tensor, "*e n w"]
    ) -> Float[Tensor, "*e n"]:
        """The probability that the task will be solved, now or later: the mean of the networks."""
        return self.prospect_logits(state, words).sigmoid().mean(0)

    def _ask(self, nets: list[nn.Module], state: Tensor, words: Tensor) -> Tensor:
        """(nets, ..., n) what networks say of a state, the instruction beside."""
        with torch.autocast(state.device.type, enabled=False):
            seen = [self.normalize(state) * self.judged, *self._distances(state), words]
            x = torch.cat(seen, dim=-1)
            return torch.stack([net(x)[..., 0] for net in nets])

    def _distances(self, state: Tensor) -> list[Tensor]:
        """From the robot to the found places: in standard deviations of its numbers, and larger."""
        if not self.found:
            return []
        # A grasp is decided by millimetres, so they are seen large, too.
        robot = state[..., : self.robot_dim]
        places = state[..., self.robot_dim :].unflatten(-1, (self.found, self.robot_dim))
        apart = (places - robot[..., None, :]) / self.std[: self.robot_dim]
        apart = apart.flatten(-2)
        return [apart.clamp(-FAR, FAR), (NEAR * apart).clamp(-NEAR_BY, NEAR_BY)]

    def _seen(self, state: Tensor, x: Tensor) -> Tensor:
        """What a network of the ensemble sees: ``_inputs`` but the constant, and the distances."""
        return torch.cat([x[..., :-1], *self._distances(state)], dim=-1)

    def _in_room(self, state: Tensor, back: bool = False) -> Tensor:
        """Positions relative to the hand (``"relative"``) as positions in the room; or back.

        Objects rest in the room, and it is there that the networks' predictions are compared.
        """
        if not self.relative:
            return state
        state = state.clone()
        hand = state[..., self.hand : self.hand + 3]
        for start in self.relative:
            state[..., start : start + 3] += -hand if back else hand
        return state

    def _inputs(self, state: Tensor, actions: Tensor) -> Tensor:
        """Normalised state, action, and a 1 for the linear model's constant."""
        return torch.cat(
            [self.normalize(state), actions, torch.ones_like(actions[..., :1])], dim=-1
        )

    def _object_movement(
        self, member: int, i: int, state: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        """How object i moves.

        Returns:
            (n, numbers) its movement if it moves, in units of ``scale``; (n,) logit that it moves.
        """
        part = self.objects[i]
        seen = x[:, :-1].clone()
        # It is not told of goals.
        for mark in self.marks:
            seen[:, mark] = 0.0
        # Positions are relative to the object.
        for place, reach in zip(self.places, self.reach[i], strict=True):
            distance = state[:, place : place + 3] - _point(state, part)
            seen[:, place : place + 3] = (distance / reach).clamp(-FAR, FAR)
        # Except its own height: what it stands on has the same height everywhere.
        seen[:, part.start + 2] = x[:, part.start + 2]
        predicted = self.movers[member * len(self.objects) + i](seen).float()
        return predicted[:, 1:], predicted[:, 0]


def _point(state: Tensor, part: slice) -> Tensor:
    """(..., 3) the position of an object."""
    return state[:, part.start : part.start + 3]


class ResidualLayer(nn.Module):
    """x plus a layer of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return x + F.silu(self.layer(x))


def residual_mlp(inputs: int, outputs: int, width: int, layers: int) -> nn.Sequential:
    """A residual MLP whose outputs start at zero."""
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
