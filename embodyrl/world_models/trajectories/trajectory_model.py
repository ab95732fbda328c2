"""``TrajectoryModel``: draws pieces of trajectories that begin in a given state."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.functional.flow import randn
from embodyrl.functional.guided_diffusion import Pull, sample_pulled
from embodyrl.storage.atomic_files import replacing_folder
from embodyrl.storage.env_spec import spec_from_json, spec_to_json
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import ANYTHING, FLAG, TEXT, first_line, read_json
from embodyrl.types import EnvSpec
from embodyrl.world_models.nets.saved_network import load_part
from embodyrl.world_models.nets.trajectory import TrajectoryNet
from embodyrl.world_models.trajectories.pieces import Pieces

META = "trajectories.json"
TENSORS = "trajectories.safetensors"
NETS = {"TrajectoryNet": "embodyrl.world_models.nets.trajectory"}
STRUCTURE = {
    "spec": {...: ANYTHING},
    "env": {...: ANYTHING},
    "split": TEXT,
    "sentences": [TEXT],
    "sparse": FLAG,
}
"""Structure of ``trajectories.json``."""
REMEDY = "Use another copy, or train the model again."
LEAST_STD = 1e-4
"""Numbers that vary less than this are constants."""
TIMES = 33
"""Times from 0 to 1 at which the error of the estimate is measured."""


class TrajectoryModel(nn.Module):
    """A diffusion model of pieces (L, D), D being state, action, reward and success.

    Attributes:
        net: on normalised rows.
        spec: of the env.
        env: its config as plain data, and ``split``; for the data sets that are written.
        sentences: instructions.
        sparse: rewards are successes.
        mean, std, low, high: (D,) of the recorded rows.
        starts: (M, S) states that pieces begin in, with ``told`` (M,) their instructions and
            ``begins`` (M,) whether an episode began there.
        doubt: (TIMES, A) mean squared error of estimated actions, in normalised units.
    """

    mean: Tensor
    std: Tensor
    low: Tensor
    high: Tensor
    starts: Tensor
    told: Tensor
    begins: Tensor
    doubt: Tensor

    def __init__(
        self,
        net: TrajectoryNet,
        spec: EnvSpec,
        sentences: list[str],
        tensors: dict[str, Tensor],
        *,
        sparse: bool,
        env: dict[str, Any] | None = None,
        split: str = "train",
    ) -> None:
        super().__init__()
        self.net = net
        self.spec = spec
        self.sentences = sentences
        self.sparse = sparse
        self.env = env or {}
        self.split = split
        for name, values in tensors.items():
            self.register_buffer(name, values)

    @classmethod
    def of(cls, pieces: Pieces, net: TrajectoryNet) -> Self:
        """A model with the units and beginnings of ``pieces``."""
        # Constants have no unit.
        rows = pieces.rows
        std = rows.std(0, correction=0)
        tensors = {
            "mean": rows.mean(0),
            "std": torch.where(std < LEAST_STD, 1.0, std),
            "low": rows.amin(0),
            "high": rows.amax(0),
            "starts": rows[pieces.index[:, 0], : pieces.spec.proprio_dim],
            "told": pieces.sentence,
            "begins": pieces.begins,
            "doubt": torch.ones(TIMES, pieces.spec.action_dim),
        }
        return cls(
            net,
            replace(pieces.spec, num_envs=1, privileged_dim=0),
            pieces.sentences,
            tensors,
            sparse=bool((rows[:, -2] == rows[:, -1]).all()),
            env=pieces.origin.get("config", {}),
            split=str(pieces.origin.get("split", "train")),
        )

    @property
    def length(self) -> int:
        """L."""
        return self.net.config.length

    @property
    def actions(self) -> slice:
        """Where in a row the action stands."""
        return slice(self.spec.proprio_dim, self.spec.proprio_dim + self.spec.action_dim)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.net.device

    def normalize(self, rows: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """To units of the net."""
        return (rows - self.mean) / self.std

    def doubt_at(self, t: float) -> Float[Tensor, " a"]:
        """V_t of ``functional.guided_diffusion``, between the times at which it was measured."""
        place = t * (TIMES - 1)
        below = min(int(place), TIMES - 2)
        return torch.lerp(self.doubt[below], self.doubt[below + 1], place - below)

    def sample(
        self,
        first: Float[Tensor, "b s"],
        told: Int[Tensor, " b"],
        generator: torch.Generator,
        *,
        steps: int = 32,
        pull: Pull | None = None,
        guidance: float = 1.0,
    ) -> Float[Tensor, "b l d"]:
        """Pieces that begin in ``first``, in the env's units, within the range of the data.

        Args:
            first: states.
            told: their instructions.
            generator: of the noise.
            steps: of the denoising.
            pull: a policy, in normalised units (``policy_pull.PolicyPull``).
            guidance: power of the policy's probability; 0 is the data's distribution.
        """
        # The net works in normalised units, and keeps the first state as it is given.
        given = (first - self.mean[: first.shape[1]]) / self.std[: first.shape[1]]

        def estimate(x: Tensor, t: float) -> Tensor:
            return self.net(x, x.new_full((len(x),), t), given, told)

        # Nothing may leave the range of the data.
        low = self.normalize(self.low)
        high = self.normalize(self.high)
        shape = (len(first), self.length, len(self.mean))
        x = sample_pulled(
            estimate,
            randn(shape, generator, self.device),
            steps,
            pull=pull,
            weight=guidance,
            part=self.actions,
            doubt=self.doubt_at,
            bound=lambda x: torch.minimum(torch.maximum(x, low), high),
        )
        # Back to the env's units.
        rows = x * self.std + self.mean
        rows[:, 0, : first.shape[1]] = first
        # Success is yes or no, and a reward that is nothing else too.
        rows[..., -1] = (rows[..., -1] > 0.5).float()
        if self.sparse:
            rows[..., -2] = rows[..., -1]
        return rows

    def save(self, folder: str | Path) -> None:
        """Writes the model completely or not at all."""
        meta = {
            "spec": spec_to_json(self.spec),
            "env": self.env,
            "split": self.split,
            "sentences": self.sentences,
            "sparse": self.sparse,
        }
        with replacing_folder(Path(folder)) as scratch:
            self.net.save_pretrained(scratch / "net")
            save_file({k: v.cpu() for k, v in self.named_buffers()}, scratch / TENSORS)
            (scratch / META).write_text(json.dumps(meta, indent=1))

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """The model that ``save`` wrote, on the CPU.

        Raises:
            UserError: there is none, or it is damaged.
        """
        folder = Path(folder)
        if not (folder / META).is_file():
            raise UserError(
                f"{folder} holds no trajectory model (there is no {META}). `embodyrl world "
                "trajectories train` makes one."
            )
        # Read all parts, and see that they belong together.
        meta = read_json(folder / META, STRUCTURE, REMEDY)
        require_readable(folder / TENSORS)
        try:
            tensors = load_file(folder / TENSORS)
        except (OSError, ValueError, SafetensorError) as error:
            raise UserError(
                f"{folder / TENSORS} is damaged ({first_line(error)}). {REMEDY}"
            ) from error
        net = load_part(folder / "net", NETS)
        spec = spec_from_json(meta["spec"])
        _check_shapes(folder, net, spec, meta["sentences"], tensors)
        return cls(
            net,
            spec,
            meta["sentences"],
            tensors,
            sparse=meta["sparse"],
            env=meta["env"],
            split=meta["split"],
        ).eval()


def _check_shapes(
    folder: Path, net: Any, spec: EnvSpec, sentences: list[str], tensors: dict[str, Tensor]
) -> None:
    """Refuses files that do not belong together.

    Raises:
        UserError: naming the first that differs.
    """
    state = spec.proprio_dim
    row = state + spec.action_dim + 2
    count = len(tensors.get("starts", ()))
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("mean", "std", "low", "high"), (row,)),
        "starts": (max(1, count), state),
        **dict.fromkeys(("told", "begins"), (count,)),
        "doubt": (TIMES, spec.action_dim),
    }
    # Tensors first, then the net, then what points into lists.
    wrong = [k for k, v in shapes.items() if k not in tensors or tuple(tensors[k].shape) != v]
    sizes = {"state_dim": state, "row_dim": row, "sentences": len(sentences)}
    wrong += [key for key, size in sizes.items() if net.config.get(key) != size]
    if not wrong and not 0 <= int(tensors["told"].min()) <= int(tensors["told"].max()) < len(
        sentences
    ):
        wrong = ["told"]
    if wrong:
        raise UserError(f"{folder} is damaged: {wrong[0]} does not fit the rest. {REMEDY}")
