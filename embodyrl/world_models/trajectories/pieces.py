"""``Pieces``: windows of recorded episodes, a row for each action, as a trajectory model learns them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from embodyrl.data.demonstrations import Demonstrations
from embodyrl.data.load_demonstrations import load_demonstrations
from embodyrl.errors import UserError
from embodyrl.storage.env_spec import check_compatible, spec_from_json
from embodyrl.types import EnvSpec

FEWEST = 4
"""Episodes that are long enough, of which one is held out."""


@dataclass(frozen=True)
class Pieces:
    """M pieces of L rows of E episodes.

    Attributes:
        rows: (F, D) of all frames: state, action, reward, and 1 where the action solved the task.
        index: the frames of each piece. A solved episode stands still after its last row.
        over: which rows of a piece stand there: they have no reward, and are solved.
        sentence: of each piece, index into ``sentences``.
        sentences: instructions.
        episode: of each piece, from 0 on.
        begins: whether an episode begins with the piece.
        spec: of the env.
        origin: what embodyrl noted about the first data set.
    """

    rows: Float[Tensor, "f d"]
    index: Int[Tensor, "m l"]
    over: Bool[Tensor, "m l"]
    sentence: Int[Tensor, " m"]
    sentences: list[str]
    episode: Int[Tensor, " m"]
    begins: Bool[Tensor, " m"]
    spec: EnvSpec
    origin: dict[str, Any]

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, numbers: Int[Tensor, " b"]) -> Float[Tensor, "b l d"]:
        """The rows of these pieces."""
        rows = self.rows[self.index[numbers]]
        over = self.over[numbers]
        # What stands still earns nothing more.
        rows[..., -2] = torch.where(over, 0.0, rows[..., -2])
        rows[..., -1] = torch.where(over, 1.0, rows[..., -1])
        return rows


def read_pieces(data: Sequence[str], length: int) -> Pieces:
    """The pieces of data sets, failed episodes included.

    Args:
        data: LeRobot data sets of one env, without cameras.
        length: L.

    Raises:
        UserError: no data, or data of which nothing can be learned: the message says why.
    """
    if not data:
        raise UserError(
            "A trajectory model learns from recorded episodes: name at least one data set."
        )
    # Read states and actions alone, and compare the envs.
    parts = [load_demonstrations(path, 1, keep="all", pictures=False) for path in data]
    specs = [_spec_of(path, part) for path, part in zip(data, parts, strict=True)]
    for path, spec in zip(data, specs, strict=True):
        try:
            check_compatible(specs[0], spec)
        except UserError as error:
            raise UserError(f"{data[0]} and {path} are of different envs. {error}") from error
    return cut_pieces(parts, length, specs[0])


def cut_pieces(parts: Sequence[Demonstrations], length: int, spec: EnvSpec) -> Pieces:
    """The same of data in memory.

    Raises:
        UserError: neither successes nor different rewards, or too few episodes that are long enough.
    """
    reward = torch.cat([part.reward for part in parts])
    solved = torch.cat([part.solved for part in parts])
    if not solved.any() and (reward == reward[0]).all():
        raise UserError(
            "None of the episodes is solved, and all rewards are the same: nothing in them tells good "
            "from bad, so trajectories like them would teach nothing. Add episodes that were solved "
            "(`embodyrl collect`)."
        )
    # Cut every episode; frames are numbered through all data sets.
    sentences = sorted({s for part in parts for s in part.sentences})
    found: list[tuple[Tensor, Tensor, int, int]] = []
    begin = 0
    for part in parts:
        told = [sentences.index(part.sentences[i]) for i in part.instruction.tolist()]
        offset = begin
        for end in part.end.unique().tolist():
            first = begin
            begin = offset + end
            index, over = _windows(solved[first:begin], length)
            found.append((index + first, over, told[first - offset], first))
    # What is long enough is kept.
    kept = [one for one in found if len(one[0])]
    if len(kept) < FEWEST:
        raise UserError(
            f"{len(kept)} of {len(found)} episodes hold a piece of {length} rows, and {FEWEST} are "
            "needed: an episode that is not solved must be as long as a piece. Set a smaller --length, "
            "or record longer episodes."
        )
    # All pieces, one after the other.
    counts = torch.tensor([len(one[0]) for one in kept])
    index = torch.cat([one[0] for one in kept])
    firsts = torch.tensor([one[3] for one in kept]).repeat_interleave(counts)
    return Pieces(
        rows=torch.cat(
            [
                torch.cat([part.proprio for part in parts]),
                torch.cat([part.actions for part in parts]),
                reward[:, None],
                solved[:, None].float(),
            ],
            dim=1,
        ),
        index=index,
        over=torch.cat([one[1] for one in kept]),
        sentence=torch.tensor([one[2] for one in kept]).repeat_interleave(counts),
        sentences=sentences,
        episode=torch.arange(len(kept)).repeat_interleave(counts),
        begins=index[:, 0] == firsts,
        spec=spec,
        origin=parts[0].origin,
    )


def _windows(solved: Bool[Tensor, " n"], length: int) -> tuple[Tensor, Tensor]:
    """Rows (W, L) of all pieces of an episode, and which of them are over (W, L)."""
    # The row in which the task is solved, or the last one.
    count = len(solved)
    ever = bool(solved.any())
    last = int(solved.int().argmax()) if ever else count - 1
    # A piece may begin at each row before success; where there is none, it must fit.
    starts = torch.arange(last + 1 if ever else max(0, count - length + 1))
    steps = starts[:, None] + torch.arange(length)
    return steps.clamp_max(last), steps > last


def _spec_of(path: str, part: Demonstrations) -> EnvSpec:
    """The env of a data set.

    Raises:
        UserError: it does not say, or has cameras or a history.
    """
    if "spec" not in part.origin:
        raise UserError(
            f"{path} does not say which env it is of (meta/embodyrl.json), so no policy could be "
            "held against it. Give data that embodyrl recorded."
        )
    # A row is one state, without pictures.
    spec = spec_from_json(part.origin["spec"])
    if spec.cameras:
        raise UserError(
            f"{path} has cameras ({', '.join(spec.cameras)}), and a trajectory model draws no "
            "pictures: a policy that sees them could neither guide it nor learn from it. Record "
            "states (`embodyrl collect ENV env.cameras=[]`), or dream (`embodyrl world train`)."
        )
    if spec.history > 1:
        raise UserError(
            f"{path} is of an env with env.history={spec.history}, and a piece has one state a row. "
            "Record with env.history=1."
        )
    return spec
