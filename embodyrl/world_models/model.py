"""``WorldModel``: codec, dynamics and success head, as one folder on disk and one step function.

frames --codec--> latents --backbone(actions)--> next latents --codec--> next frames
                                                      |--head(instruction)--> P(solved)

One with a state model also has the simulator's state; the pictures then follow that, and it says
what is solved.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int, UInt8
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.storage.checkpoint import spec_from_json, spec_to_json
from embodyrl.storage.provenance import hardware
from embodyrl.types import EnvSpec
from embodyrl.world_models.dream import Dream
from embodyrl.world_models.nets.backbone import ChunkTransformer, FlowMap
from embodyrl.world_models.nets.codec import FrameCodec
from embodyrl.world_models.nets.diffusers_io import load_part
from embodyrl.world_models.nets.inverse import InverseDynamics
from embodyrl.world_models.nets.state import StateModel
from embodyrl.world_models.nets.success import SuccessHead
from embodyrl.world_models.reflectors.calibration import Calibration

if TYPE_CHECKING:  # Wan's part of diffusers takes seconds to import
    from embodyrl.world_models.nets.pretrained.video import VideoBackbone
    from embodyrl.world_models.nets.pretrained.wan import WanCodec

    type Codec = FrameCodec | WanCodec
    type Backbone = ChunkTransformer | VideoBackbone

PARTS = {
    "codec": {
        "FrameCodec": "embodyrl.world_models.nets.codec",
        "WanCodec": "embodyrl.world_models.nets.pretrained.wan",
    },
    "backbone": {
        "ChunkTransformer": "embodyrl.world_models.nets.backbone",
        "WanBackbone": "embodyrl.world_models.nets.pretrained.wan",
        "AnyFlowBackbone": "embodyrl.world_models.nets.pretrained.anyflow",
    },
    "success": {"SuccessHead": "embodyrl.world_models.nets.success"},
    "state": {"StateModel": "embodyrl.world_models.nets.state"},
    "inverse": {"InverseDynamics": "embodyrl.world_models.nets.inverse"},
}
"""Folder -> the classes that it may hold, and where they are."""
OPTIONAL = ("state", "inverse")
"""Folders that need not be there."""
NO_INVERSE = (
    "This world model cannot tell which actions its pictures show: it was trained before there "
    "was inverse dynamics. Go on training it (init=FOLDER), or train it again."
)


class WorldModel(nn.Module):
    """See the module's docstring.

    Attributes:
        spec: of the real env that it was trained on; the cameras' order is that of the views.
        env: that env's config, as plain data.
        calibration: how the success head's probability becomes a verdict; fitted on held-out
            episodes (``train``).
        doubt: how far two samples of one next moment differ (``disagreement``) in all but 1% of
            held-out chunks; more than that and a dream is not to be believed. 0 for a deterministic
            model.
        spread: how far the nets of the state model differ (``Dream.spread``) on the way to 9 of 10
            held-out successes; 0 for a single net.
        inverse: says which actions pictures show (``InverseDynamics``); None in a model of before
            there was one.
        strayed: how far pictures are from showing what was commanded (``InverseDynamics.error``) on
            the way to 9 of 10 held-out successes.
        keyframes: real moments that a dream can start from: ``context`` (M, 3, V, c, y, x) half
            (see ``begin``), ``proprio`` (M, P), ``sentence`` (M,) index into ``sentences``,
            ``init`` (M,) the episode's initial state or -1, ``age`` (M,) actions since its start,
            ``held_out`` (M,) bool, whether it was kept from training, and with a state model
            ``privileged`` (M, S).
        sentences: the instructions of the keyframes.
    """

    proprio_mean: Tensor
    proprio_std: Tensor

    def __init__(
        self,
        codec: Codec,
        backbone: Backbone,
        success: SuccessHead,
        spec: EnvSpec,
        state: StateModel | None = None,
        inverse: InverseDynamics | None = None,
    ) -> None:
        super().__init__()
        self.codec = codec
        self.backbone = backbone
        self.success = success
        self.state = state
        self.inverse = inverse
        self.spec = spec
        self.env = {}
        self.calibration = Calibration()
        self.doubt = self.spread = self.strayed = 0.0
        self.keyframes: dict[str, Tensor] = {}
        self.sentences: list[str] = []
        self.register_buffer("proprio_mean", torch.zeros(spec.proprio_dim))
        self.register_buffer("proprio_std", torch.ones(spec.proprio_dim))

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self.proprio_mean.device

    @property
    def horizon(self) -> int:
        """H, the most actions of one prediction."""
        return self.backbone.config["horizon"]

    @property
    def state_dim(self) -> int:
        """S, of the simulator's state; 0 without a state model."""
        return 0 if self.state is None else self.state.config["body_dim"] - self.spec.proprio_dim

    @property
    def stochastic(self) -> bool:
        """Whether it can draw one of several possible next moments."""
        return bool(self.backbone.config["stochastic"])

    def begin(
        self,
        context: Float[Tensor, "n 3 v c y x"],
        proprio: Float[Tensor, "n p"],
        words: Tensor,
        privileged: Float[Tensor, "n s"] | None = None,
    ) -> Dream:
        """Dreams that start from real frames.

        Args:
            context: latents of the episode's first frame, of one before, and of the one to start
                from.
            proprio: in the env's units.
            words: (N, E) of the instructions, see ``SuccessHead``.
            privileged: the simulator's state; a model without a state model does not look at it.

        Raises:
            UserError: there is none, and the model has a state model.
        """
        body = None
        if self.state is not None:
            if privileged is None:
                raise UserError(
                    f"This world model of {self.spec.name} also dreams of the simulator's state, "
                    "and does not know how to begin without one. Train another with state=false."
                )
            body = torch.cat([proprio, privileged], dim=1)
        spread = None if body is None else body.new_zeros(len(body))
        return Dream(context, self._normalized(proprio), words, body, spread)

    def _normalized(self, proprio: Tensor) -> Tensor:
        return (proprio - self.proprio_mean) / self.proprio_std

    def imagine(
        self,
        dream: Dream,
        actions: Float[Tensor, "n h a"],
        count: Int[Tensor, " n"],
        noise: Tensor | None = None,
        sample: Tensor | None = None,
        steps: int = 1,
        body: Tensor | None = None,
    ) -> Dream:
        """What the first ``count`` (1 to H) of the actions lead to.

        Args:
            dream: where it stands.
            actions: of the chunk.
            count: how many are executed.
            noise: (N,) level of the noise on the context; None means none.
            sample: Gaussian noise (N, V, c, y, x) that a stochastic model makes one of the possible
                next moments from; None gives the mean of them all.
            steps: of denoising: Euler's, or the backbone's own (``AnyFlowBackbone``).
            body: what the chunk makes of the body, where that is known; None asks the state model,
                if there is one.
        """
        noise = actions.new_zeros(len(actions)) if noise is None else noise
        spread = None
        if self.state is not None and dream.body is not None and body is None:
            body, spread = self.state.roll(dream.body, actions, count)
        given = (dream, actions, count, noise, body)
        change, moved = (
            self.change(*given) if sample is None else self._denoise(given, sample, steps)
        )
        after = self.after(dream, change, moved, body)
        after.spread = spread
        return after

    def change(
        self,
        dream: Dream,
        actions: Tensor,
        count: Tensor,
        noise: Tensor,
        body: Tensor | None,
        sample: Tensor | None = None,
        time: Tensor | None = None,
        until: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What the backbone says of a chunk that makes ``body`` of the body; see there."""
        given = (dream.context, dream.proprio, actions, count, noise, sample, time)
        if until is not None:
            return self.backbone(*given, until)
        if self.state is None or dream.body is None or body is None:
            return self.backbone(*given)
        return self.backbone(
            *given, torch.cat([self.state.normalize(b) for b in (dream.body, body)], dim=1)
        )

    def after(
        self, dream: Dream, change: Tensor, moved: Tensor, body: Tensor | None = None
    ) -> Dream:
        """The dream a chunk later, by the changes of latent and proprio, or by ``body``, which knows better."""
        latent = dream.latent + change.float()
        context = torch.stack([dream.context[:, 0], dream.latent, latent], dim=1)
        if body is None:
            return Dream(context, dream.proprio + moved.float(), dream.words)
        return Dream(context, self._normalized(body[:, : self.spec.proprio_dim]), dream.words, body)

    def _denoise(
        self, given: tuple[Dream, Tensor, Tensor, Tensor, Tensor | None], sample: Tensor, steps: int
    ) -> tuple[Tensor, Tensor]:
        """The change that ``sample`` flows to, and the proprio's."""
        if isinstance(self.backbone, FlowMap):
            dream, actions, count, noise, _ = given
            return self.backbone.denoise(
                dream.context, dream.proprio, actions, count, noise, sample, steps
            )
        moved = given[0].proprio
        time = torch.ones(len(sample), device=sample.device)
        for left in range(steps, 0, -1):
            clean, moved = self.change(*given, sample, time * left / steps)
            sample = clean.float() + (left - 1) / left * (sample - clean.float())
        return sample, moved

    def solved(self, dream: Dream) -> Float[Tensor, " n"]:
        """The probability that the task is solved, as it looks now."""
        if self.state is not None and dream.body is not None:
            return self.state.logit(dream.body, dream.words).sigmoid()
        return self.success(dream.latent, dream.proprio, dream.words).float().sigmoid()

    def doubted(self, dream: Dream) -> Bool[Tensor, " n"]:
        """Where the nets of the state model differ so much about the last chunk that the data said nothing of it."""
        if dream.spread is None or not self.spread:
            return torch.zeros(len(dream.proprio), dtype=torch.bool, device=self.device)
        return dream.spread > self.spread

    def strays(self, dream: Dream, actions: Tensor, count: Tensor) -> Float[Tensor, " n"]:
        """How far the pictures of the last chunk are from showing these actions; see ``InverseDynamics.error``.

        Raises:
            UserError: the model has no inverse dynamics.
        """
        if self.inverse is None:
            raise UserError(NO_INVERSE)
        return self.inverse.error(dream.context[:, -2], dream.latent, actions, count)

    def frames(self, dream: Dream) -> dict[str, UInt8[Tensor, "n h w 3"]]:
        """What the cameras see."""
        pixels = self.codec.decode(dream.latent)
        return {name: pixels[:, view] for view, name in enumerate(self.spec.cameras)}

    def privileged(self, dream: Dream) -> Float[Tensor, "n s"] | None:
        """The simulator's state, for critics alone."""
        return None if dream.body is None else dream.body[:, self.spec.proprio_dim :]

    def proprio(self, dream: Dream) -> Float[Tensor, "n p"]:
        """In the env's units."""
        return dream.proprio * self.proprio_std + self.proprio_mean

    def save(self, folder: str | Path) -> None:
        """Writes the folder whole or not at all: diffusers' format for the nets, JSON and safetensors for the rest."""
        folder = Path(folder)
        partial = folder.with_name(f".{folder.name}.tmp-{secrets.token_hex(4)}")
        partial.mkdir(parents=True)
        for name in PARTS:
            if (part := getattr(self, name)) is not None:
                part.save_pretrained(partial / name)
        tensors = {f"keyframes.{k}": v.contiguous() for k, v in self.keyframes.items()}
        tensors |= {k: self.get_buffer(k) for k in ("proprio_mean", "proprio_std")}
        save_file(tensors, partial / "world.safetensors")
        meta = {
            "spec": spec_to_json(self.spec),
            "env": self.env,
            "calibration": asdict(self.calibration),
            "doubt": self.doubt,
            "spread": self.spread,
            "strayed": self.strayed,
            "sentences": self.sentences,
        }
        (partial / "world.json").write_text(json.dumps(meta, indent=1))
        if folder.exists():
            old = folder.with_name(f".{folder.name}.old-{secrets.token_hex(4)}")
            os.replace(folder, old)
            os.replace(partial, folder)
            shutil.rmtree(old)
        else:
            os.replace(partial, folder)

    @staticmethod
    def read_meta(folder: str | Path) -> dict[str, Any]:
        """What is known of a saved model without loading it: ``spec``, ``env``, ``calibration`` and ``sentences``.

        Raises:
            UserError: there is no world model.
        """
        path = Path(folder) / "world.json"
        if not path.is_file():
            raise UserError(
                f"{folder} holds no world model (there is no world.json). `embodyrl world train` "
                "makes one."
            )
        return json.loads(path.read_text())

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu") -> WorldModel:
        """Reads what ``save`` wrote.

        Raises:
            UserError: there is no world model, or its weights do not fit.
        """
        folder, meta = Path(folder), cls.read_meta(folder)
        parts = {
            n: load_part(folder / n, c)
            for n, c in PARTS.items()
            if n not in OPTIONAL or (folder / n).exists()
        }
        model = cls(spec=spec_from_json(meta["spec"]), **parts)
        model.env = meta["env"]
        model.calibration = Calibration(**meta["calibration"])
        model.sentences = meta["sentences"]
        model.doubt, model.spread, model.strayed = (
            meta.get(key, 0.0) for key in ("doubt", "spread", "strayed")
        )
        tensors = load_file(folder / "world.safetensors")
        model.keyframes = {
            k.removeprefix("keyframes."): v
            for k, v in tensors.items()
            if k.startswith("keyframes.")
        }
        for name in ("proprio_mean", "proprio_std"):
            model.get_buffer(name).copy_(tensors[name])
        return model.eval().to(device)


def use_bf16(precision: str, device: torch.device) -> bool:
    """Whether products are computed in bfloat16: as asked, or where the machine is faster so than in float32.

    By AVX512-BF16 alone AMD's processors are, 1.7 times, and Intel's are slower (docs/notebook/2026-11.md,
    2026-11-25).
    """
    if precision != "auto":
        return precision == "bf16"
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported()
    amd = torch.cpu._is_avx512_bf16_supported() and "AMD" in hardware()["cpu"]
    return torch.cpu._is_amx_tile_supported() or amd
