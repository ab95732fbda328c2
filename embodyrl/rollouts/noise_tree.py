"""``NoiseTree``: episodes of a group draw the same noise until they branch.

No env needs to be put back into an earlier state. In an env whose steps depend on the initial state
and the actions alone, episodes that draw the same noise do the same: they are one episode, played
several times. From a branching point on each branch draws its own noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from embodyrl.functional.tree import levels_of, nodes


class NoiseTree:
    """Gives each env the generator of its node; the noise of a chunk depends on that alone.

    Args:
        branches: into how many each node branches, level by level (``functional.tree``).
        starts: the chunks with which levels 1, 2, ... begin.
        generator: what the tree's own seed is drawn from.
    """

    def __init__(
        self, branches: Sequence[int], starts: Sequence[int], generator: torch.Generator
    ) -> None:
        self.branches = tuple(branches)
        self.starts = tuple(starts)
        self.seed = int(torch.randint(2**62, (), generator=generator))

    def generators(self, leaf: Tensor, chunk: Tensor) -> list[torch.Generator]:
        """One for each env.

        Args:
            leaf: (N,) the number of its episode; groups follow one another. An env that idles may
                have any.
            chunk: (N,) the number of the chunk that it is about to choose, from 0.
        """
        # The seed of a chunk is (tree, chunk, node): the same for all leaves below the node.
        leaf = leaf.clamp_min(0)
        node = nodes(leaf, levels_of(chunk, self.starts), self.branches)
        rows = zip(chunk.tolist(), node.tolist(), strict=True)
        return [torch.Generator().manual_seed(_seed(self.seed, *row)) for row in rows]


def _seed(*numbers: int) -> int:
    """A well mixed seed of 64 bits (numpy's seed sequence)."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
