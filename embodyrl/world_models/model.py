"""``WorldModel``: codec, dynamics and success head, as one folder on disk and one step function.

    frames --codec--> latents --backbone(actions)--> next latents --codec--> next frames
                                                          |--head(instruction)--> P(solved)

A model with a state model also predicts the simulator's state. Then the backbone draws the frames
for that state, and the state model says whether the task is solved.

Where no simulator gives a state, a finder reads one off the pictures: where the task leads.

A model without frames is finder and state model alone. It says what becomes of a proposal, and that
is all that a choice among several needs.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor, nn

from embodyrl.build import described_by
from embodyrl.errors import UserError
from embodyrl.storage.env_spec import spec_from_json, spec_to_json
from embodyrl.types import EnvSpec, Obs
from embodyrl.world_models import model_files
from embodyrl.world_models.dream import ChunkInputs, Dream
from embodyrl.world_models.nets.backbone import ChunkTransformer, FlowMap
from embodyrl.world_models.nets.codec import FrameCodec
from embodyrl.world_models.nets.discriminator import Discriminator
from embodyrl.world_models.nets.finder import Finder
from embodyrl.world_models.nets.inverse import InverseDynamics
from embodyrl.world_models.nets.state import MemberChoice, StateModel
from embodyrl.world_models.nets.success import SuccessHead
from embodyrl.world_models.reflectors.calibration import Calibration

if TYPE_CHECKING:  # Wan's part of diffusers takes seconds to import
    from embodyrl.world_models.nets.pretrained.video import VideoBackbone
    from embodyrl.world_models.nets.pretrained.wan import WanCodec

    type Codec = FrameCodec | WanCodec
    type Backbone = ChunkTransformer | VideoBackbone

NO_INVERSE = (
    "This world model cannot tell which actions its pictures show: it was trained by a version "
    "without inverse dynamics. Continue its training (init=FOLDER), or train it again."
)
NO_FRAMES = (
    "This world model of {name} imagines no pictures, because it was trained with frames=false. It "
    "ranks what a policy proposes (--dream), and nothing else. Train one with pictures: `embodyrl "
    "world train` without frames=false."
)


class WorldModel(nn.Module):
    """See the module's docstring.

    Attributes:
        codec: to latents and back; None in a model without frames, as are ``backbone``,
            ``success`` and ``inverse``. ``require_frames`` refuses it wherever they are needed.
        backbone: predicts latents.
        success: judges latents.
        state: predicts the state; None in a model of pictures alone.
        spec: of the real env that it was trained on; the cameras' order is that of the views.
        env: that env's config, as plain data.
        calibration: how the success head's probability becomes a verdict; fitted on held-out
            episodes (``train``).
        max_disagreement: how far two samples of the same next moment may differ
            (``disagreement``): the 99% quantile over held-out chunks. 0 for a deterministic model.
        max_spread: how far the networks of the state model may differ (``Dream.spread``): 9 of 10
            held-out successes stay below it. 0 for a single network.
        inverse: infers actions from pictures (``InverseDynamics``); None in an older model.
        finder: finds the state in pictures; None reads the simulator's, if there is a state model.
        discriminator: tells real transitions from those that the state model's networks predict
            (``world_models.faithful``); None where it was not asked for.
        max_action_error: how far pictures may be from showing the commanded actions
            (``InverseDynamics.error``): 9 of 10 held-out successes stay below it.
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
        codec: Codec | None,
        backbone: Backbone | None,
        success: SuccessHead | None,
        spec: EnvSpec,
        state: StateModel | None = None,
        inverse: InverseDynamics | None = None,
        finder: Finder | None = None,
        discriminator: Discriminator | None = None,
        horizon: int = 0,
    ) -> None:
        """Joins the networks; ``horizon`` is H where no backbone says it."""
        super().__init__()
        self.codec = cast("Codec", codec)
        self.backbone = cast("Backbone", backbone)
        self.success = cast("SuccessHead", success)
        self._horizon = horizon if backbone is None else int(backbone.config["horizon"])
        self.state = state
        self.inverse = inverse
        self.finder = finder
        self.discriminator = discriminator
        self.spec = spec
        self.env = {}
        self.calibration = Calibration()
        self.max_disagreement = 0.0
        self.max_spread = 0.0
        self.max_action_error = 0.0
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
        return self._horizon

    @property
    def imagines_frames(self) -> bool:
        """Whether it predicts pictures, and not a state alone."""
        return self.codec is not None

    def require_frames(self) -> None:
        """Refuses a model without frames.

        Raises:
            UserError: it has none.
        """
        if not self.imagines_frames:
            raise UserError(NO_FRAMES.format(name=self.spec.name))

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(c, y, x) of a view's latent; without frames it is empty."""
        return self.codec.latent_shape if self.imagines_frames else (0, 0, 0)

    @property
    def state_dim(self) -> int:
        """S, of the simulator's state; 0 without a state model."""
        return 0 if self.state is None else self.state.config["body_dim"] - self.spec.proprio_dim

    @property
    def stochastic(self) -> bool:
        """Whether it can sample one of several possible next moments."""
        return self.imagines_frames and bool(self.backbone.config["stochastic"])

    # ---- The start of a dream, and its step. ----

    def begin(
        self,
        context: Float[Tensor, "n 3 v c y x"],
        proprio: Float[Tensor, "n p"],
        words: Tensor,
        privileged: Float[Tensor, "n s"] | None = None,
    ) -> Dream:
        """Dreams that start from real frames.

        Args:
            context: latents of the episode's first frame, of the previous frame, and of the one to
                start from.
            proprio: in the env's units.
            words: (N, E) of the instructions, see ``SuccessHead``.
            privileged: the simulator's state; only a state model uses it.

        Raises:
            UserError: the model has a state model, and ``privileged`` is missing.
        """
        full_state = spread = None
        if self.state is not None:
            if privileged is None:
                raise UserError(
                    f"This world model of {self.spec.name} also predicts the simulator's state, "
                    "so a dream cannot begin without one. Train another model with state=false."
                )
            full_state = torch.cat([proprio, privileged], dim=1)
            spread = full_state.new_zeros(len(full_state))
        return Dream(context, self._normalized(proprio), words, full_state, spread)

    def imagine(
        self,
        dream: Dream,
        actions: Float[Tensor, "n h a"],
        count: Int[Tensor, " n"],
        noise: Tensor | None = None,
        sample: Tensor | None = None,
        steps: int = 1,
        full_state: Tensor | None = None,
        choose: MemberChoice | None = None,
    ) -> Dream:
        """One step of the dream: the moment after the first ``count`` (1 to H) of the actions.

        Args:
            dream: the moment before.
            actions: of the chunk.
            count: how many are executed.
            noise: (N,) level of the noise on the context; None means none.
            sample: Gaussian noise (N, V, c, y, x) that a stochastic model turns into one of the
                possible next moments; None gives their mean.
            steps: of denoising: Euler's, or the backbone's own (``AnyFlowBackbone``).
            full_state: the full state after the chunk, if it is known; None asks the state model,
                if there is one.
            choose: which of the state model's networks each dream follows; None means their mean.
        """
        noise = actions.new_zeros(len(actions)) if noise is None else noise
        # Predict the full state, which the frames then follow.
        spread = None
        if self.state is not None and dream.full_state is not None and full_state is None:
            full_state, spread = self.state.roll(dream.full_state, actions, count, choose)
        if not self.imagines_frames:
            return self._state_alone(dream, full_state, spread)
        # Predict the next latent: the mean of what may come, or one sample of it.
        inputs = ChunkInputs(dream, actions, count, noise, full_state)
        if sample is None:
            latent_change, proprio_change = self.predict_change(inputs)
        else:
            latent_change, proprio_change = self._sample_change(inputs, sample, steps)
        # Move the dream on to the next moment.
        next_dream = self.apply_change(dream, latent_change, proprio_change, full_state)
        next_dream.spread = spread
        return next_dream

    def _state_alone(self, dream: Dream, full_state: Tensor | None, spread: Tensor | None) -> Dream:
        """The next moment of a dream without frames."""
        assert full_state is not None
        proprio = self._normalized(full_state[:, : self.spec.proprio_dim])
        return Dream(dream.context, proprio, dream.words, full_state, spread)

    def predict_change(
        self,
        inputs: ChunkInputs,
        sample: Tensor | None = None,
        time: Tensor | None = None,
        until: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The backbone's changes of latent and proprio over one chunk.

        Args:
            inputs: see there.
            sample: noisy change of the latent; see ``ChunkTransformer.forward``.
            time: its noise level; see there.
            until: only for a ``FlowMap``; see ``AnyFlowBackbone.forward``.
        """
        arguments = (*inputs.of_backbone, sample, time)
        if until is not None:
            return self.backbone(*arguments, until)
        before = inputs.dream.full_state
        after = inputs.full_state
        if self.state is None or before is None or after is None:
            return self.backbone(*arguments)
        full_states = [self.state.normalize(before), self.state.normalize(after)]
        return self.backbone(*arguments, torch.cat(full_states, dim=1))

    def _sample_change(
        self, inputs: ChunkInputs, sample: Tensor, steps: int
    ) -> tuple[Tensor, Tensor]:
        """The changes of latent and proprio that the Gaussian noise ``sample`` flows to."""
        if isinstance(self.backbone, FlowMap):
            return self.backbone.denoise(*inputs.of_backbone, sample, steps)
        # Euler steps of the flow from noise (time 1) to data (time 0).
        proprio_change = inputs.dream.proprio
        time = torch.ones(len(sample), device=sample.device)
        for left in range(steps, 0, -1):
            clean, proprio_change = self.predict_change(inputs, sample, time * left / steps)
            sample = clean.float() + (left - 1) / left * (sample - clean.float())
        return sample, proprio_change

    def apply_change(
        self,
        dream: Dream,
        latent_change: Tensor,
        proprio_change: Tensor,
        full_state: Tensor | None = None,
    ) -> Dream:
        """The dream one chunk later.

        A known ``full_state`` contains the proprio, and then replaces the predicted change of it.
        """
        latent = dream.latent + latent_change.float()
        context = torch.stack([dream.context[:, 0], dream.latent, latent], dim=1)
        if full_state is None:
            return Dream(context, dream.proprio + proprio_change.float(), dream.words)
        proprio = self._normalized(full_state[:, : self.spec.proprio_dim])
        return Dream(context, proprio, dream.words, full_state)

    def _normalized(self, proprio: Tensor) -> Tensor:
        return (proprio - self.proprio_mean) / self.proprio_std

    # ---- What can be read off a dream. ----

    def state_of(self, obs: Obs) -> Float[Tensor, "n s"] | None:
        """What the state model knows of N observations beside proprio: found, or the simulator's."""
        return obs.privileged if self.finder is None else self.finder(obs)

    def success_probability(self, dream: Dream) -> Float[Tensor, " n"]:
        """The probability that the task is solved now, not calibrated."""
        if self.state is not None and dream.full_state is not None:
            return self.state.logit(dream.full_state, dream.words).sigmoid()
        return self.success(dream.latent, dream.proprio, dream.words).float().sigmoid()

    def ensemble_disagrees(self, dream: Dream) -> Bool[Tensor, " n"]:
        """Where the state model's networks differ by more than ``max_spread`` about the last chunk.

        There the training data say nothing.
        """
        if dream.spread is None or not self.max_spread:
            return torch.zeros(len(dream.proprio), dtype=torch.bool, device=self.device)
        return dream.spread > self.max_spread

    def action_error(self, dream: Dream, actions: Tensor, count: Tensor) -> Float[Tensor, " n"]:
        """How far the pictures of the last chunk are from showing ``actions``.

        See ``InverseDynamics.error`` for the unit.

        Raises:
            UserError: the model has no inverse dynamics.
        """
        if self.inverse is None:
            raise UserError(NO_INVERSE)
        return self.inverse.error(dream.context[:, -2], dream.latent, actions, count)

    def frames(self, dream: Dream) -> dict[str, UInt8[Tensor, "n h w 3"]]:
        """The decoded pictures: camera -> frames."""
        pixels = self.codec.decode(dream.latent)
        return {name: pixels[:, view] for view, name in enumerate(self.spec.cameras)}

    def privileged(self, dream: Dream) -> Float[Tensor, "n s"] | None:
        """The simulator's state, for critics only; a found one is none, and the real env has it not."""
        if dream.full_state is None or self.finder is not None:
            return None
        return dream.full_state[:, self.spec.proprio_dim :]

    def proprio(self, dream: Dream) -> Float[Tensor, "n p"]:
        """In the env's units."""
        return dream.proprio * self.proprio_std + self.proprio_mean

    # ---- On disk. ----

    def save(self, folder: str | Path) -> None:
        """Writes the folder completely or not at all (``model_files``)."""
        tensors = {f"keyframes.{k}": v.contiguous() for k, v in self.keyframes.items()}
        tensors |= {k: self.get_buffer(k) for k in ("proprio_mean", "proprio_std")}
        meta = {
            "spec": spec_to_json(self.spec),
            "env": self.env,
            "calibration": asdict(self.calibration),
            "doubt": self.max_disagreement,
            "spread": self.max_spread,
            "strayed": self.max_action_error,
            "sentences": self.sentences,
        }
        if not self.imagines_frames:
            meta["horizon"] = self.horizon
        parts = {name: getattr(self, name) for name in model_files.PARTS}
        model_files.write_folder(Path(folder), parts, tensors, meta)

    @staticmethod
    def read_meta(folder: str | Path) -> dict[str, Any]:
        """What ``world.json`` says of a saved model (``save``), without loading its weights.

        Raises:
            UserError: there is no world model in the folder.
        """
        return model_files.read_model_meta(Path(folder))

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str = "cpu") -> WorldModel:
        """Reads what ``save`` wrote.

        Raises:
            UserError: there is no world model in the folder, or its weights do not fit.
        """
        folder = Path(folder)
        meta = cls.read_meta(folder)
        spec = spec_from_json(meta["spec"])
        with described_by(folder):
            return cls._build(folder, spec, meta).eval().to(device)

    @classmethod
    def _build(cls, folder: Path, spec: EnvSpec, meta: dict[str, Any]) -> WorldModel:
        parts = model_files.read_parts(folder, frames="horizon" not in meta)
        model = cls(spec=spec, horizon=meta.get("horizon", 0), **parts)
        model.env = meta["env"]
        model.calibration = Calibration(**meta["calibration"])
        model.sentences = meta["sentences"]
        # Older models lack some of the limits.
        model.max_disagreement = meta.get("doubt", 0.0)
        model.max_spread = meta.get("spread", 0.0)
        model.max_action_error = meta.get("strayed", 0.0)
        tensors = model_files.read_tensors(folder)
        model.keyframes = {
            k.removeprefix("keyframes."): v
            for k, v in tensors.items()
            if k.startswith("keyframes.")
        }
        for name in ("proprio_mean", "proprio_std"):
            model.get_buffer(name).copy_(tensors[name])
        model_files.check_sizes(model)
        return model
