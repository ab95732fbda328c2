"""``TrajectoryNet``: what noise hides in pieces of trajectories."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from embodyrl.policies.action_expert import sinusoid
from embodyrl.world_models.nets.saved_network import SavedNetwork, record_arguments


class TrajectoryNet(SavedNetwork):
    """A transformer over the L rows of a piece; every row sees all others.

    A row goes in with its two neighbours: how a state follows from the one before is most of what
    there is to learn.

    Rows are normalised: states, then actions, then the rest. What it estimates is the data, mixed
    of x_t and of the network's output so that the latter has unit variance at all times (EDM,
    arXiv:2206.00364, for x_t = (1-t) x + t e):

        D = c_skip x_t + c_out F(c_in x_t, t),    c_in = 1 / sqrt((1-t)^2 + t^2)
        c_skip = (1-t) c_in^2,   c_out = t c_in

    The first state is given, and is no noise at any time.

    Args:
        state_dim: S.
        row_dim: D, of state, action and the rest together.
        length: L.
        sentences: instructions that there are.
        width: of a row inside.
        layers: of the transformer.
        heads: of its attention.
    """

    @record_arguments
    def __init__(
        self,
        state_dim: int,
        row_dim: int,
        length: int,
        sentences: int,
        width: int = 128,
        layers: int = 3,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv1d(row_dim, width, 3, padding=1)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Linear(state_dim, width)
        self.sentence = nn.Embedding(sentences, width)
        layer = nn.TransformerEncoderLayer(
            width,
            heads,
            2 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, row_dim)

    def forward(
        self,
        x: Float[Tensor, "b l d"],
        t: Float[Tensor, " b"],
        first: Float[Tensor, "b s"],
        sentence: Int[Tensor, " b"],
    ) -> Float[Tensor, "b l d"]:
        """The estimated pieces, with the given first state in them."""
        # The first state stands in the first row, without noise.
        given = torch.zeros_like(x, dtype=torch.bool)
        given[:, 0, : first.shape[1]] = True
        clean = torch.zeros_like(x)
        clean[:, 0, : first.shape[1]] = first
        # Scales of a mixture of unit data and unit noise.
        time = t[:, None, None]
        c_in = ((1.0 - time) ** 2 + time**2).rsqrt()
        rows = torch.where(given, clean, c_in * x)
        rows = self.embed(rows.mT).mT + self.position
        # What holds for the whole piece is added to every row.
        width = self.position.shape[1]
        whole = self.time(sinusoid(t, width)) + self.first(first) + self.sentence(sentence)
        # The output completes what is known of the data from x alone.
        out = self.head(self.blocks(rows + whole[:, None]))
        return torch.where(given, clean, (1.0 - time) * c_in**2 * x + time * c_in * out)
