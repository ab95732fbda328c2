"""``WorldTrainer``: the stages of a world model's training, one minibatch after another."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from embodyrl.build import described_by
from embodyrl.errors import UserError
from embodyrl.interrupt import Interrupted
from embodyrl.policies.localiser import LABELLED, LOCALISER_LR, PAINTED, PAINTER_LR, PAIRS
from embodyrl.storage import checkpoint
from embodyrl.storage.loggers import LiveTable, MetricsWriter
from embodyrl.word_embeddings import embed_sentences
from embodyrl.world_models.clips import Clips
from embodyrl.world_models.config import WorldTrainConfig, noise_on_states
from embodyrl.world_models.encode import encode, set_latent_scale
from embodyrl.world_models.faithful import discriminator_loss
from embodyrl.world_models.found_state import (
    find_states,
    frames_on_the_way,
    hindsight_loss,
    painting_loss,
)
from embodyrl.world_models.init import fit_linear
from embodyrl.world_models.model import WorldModel
from embodyrl.world_models.precision import use_bf16
from embodyrl.world_models.stage import Stage
from embodyrl.world_models.state_losses import state_loss
from embodyrl.world_models.training_losses import (
    codec_loss,
    colour_weights,
    dynamics_loss,
    inverse_loss,
    sample_clips,
)

STATE_BATCH = 256
STATE_LR = 3e-3
DISCRIMINATOR_LR = 1e-3
INVERSE_BATCH = 128
INVERSE_LR = 2e-3
LOG_EVERY = 20
"""Steps between two rows of metrics."""

type Losses = tuple[Tensor, dict[str, Tensor]]
"""The loss of a minibatch, and its parts by name."""


class WorldTrainer:
    """Trains all stages, from the newest checkpoint on.

    Args:
        config: the settings.
        folder: of the run.
        model: trained in place.
        clips: the data; their latents are computed on the way.
        rows: frames to learn from.
        check_interrupt: called before every step; may raise ``Interrupted``, after which a
            checkpoint is written.
    """

    def __init__(
        self,
        config: WorldTrainConfig,
        folder: Path,
        model: WorldModel,
        clips: Clips,
        rows: Tensor,
        check_interrupt: Callable[[], None],
    ) -> None:
        self.config = config
        self.folder = folder
        self.model = model
        self.clips = clips
        self.rows = rows
        self.rows_with_next = rows[rows + 1 < clips.end[rows]]
        self.state_noise = noise_on_states(config, found=model.finder is not None)
        self.check_interrupt = check_interrupt
        self.words = embed_sentences(clips.sentences).to(model.device)
        self.autocast = torch.autocast(
            model.device.type,
            torch.bfloat16,
            enabled=use_bf16(config.precision, model.device),
        )
        self.stages = _make_stages(config, model)

    def run(self) -> None:
        """Runs what is left of every stage.

        Raises:
            Interrupted: ``check_interrupt`` raised it; a checkpoint has been written.
            UserError: the newest checkpoint does not fit, or a loss is not finite.
        """
        self._load_newest_checkpoint()
        codec = self.stages.get("codec")
        trains_codec = codec is not None and codec.done < codec.steps
        self.colours = torch.ones(0)
        if trains_codec:
            self.colours = colour_weights(self.model, self.clips, self.rows)
        with MetricsWriter(self.folder, (), self._steps_done()) as self.metrics:
            try:
                # 1. The codec. Then the latent of every frame is computed once.
                if codec is not None:
                    self._run_stage("codec", "codec", self._codec_loss)
                    new_codec = not (self.config.init or self.config.wan)
                    if new_codec and self.stages["dynamics"].done == 0:
                        set_latent_scale(self.model, self.clips, self.rows)
                self.clips.latents = encode(self.model, self.clips)
                # 2. The state, where it is to be found in the pictures.
                if self.model.finder is not None:
                    self._find_state()
                # 3. What actions do to the state, and what actions pictures show.
                if "state_model" in self.stages:
                    self._run_stage("state_model", "state model", self._state_loss)
                if "discriminator" in self.stages:
                    self._run_stage("discriminator", "discriminator", self._discriminator_loss)
                if codec is not None:
                    self._run_stage("inverse", "inverse dynamics", self._inverse_loss)
                    # 4. Dynamics and success head, in latents.
                    self._run_stage("dynamics", "dynamics", self._dynamics_loss)
            except Interrupted:
                self._save_checkpoint()
                raise

    def _find_state(self) -> None:
        """Teaches the finder; what it finds in the data is then their state."""
        self.on_the_way = frames_on_the_way(self.clips, self.rows)
        self._run_stage("painter", "painter", self._painting_loss)
        self._run_stage("finder", "found state", self._hindsight_loss)
        self.clips.privileged = find_states(self.model, self.clips)
        if self.stages["state_model"].done == 0 and not self.config.init:
            assert self.model.state is not None
            fit_linear(self.model.state, self.clips, self.rows)

    def _run_stage(self, name: str, title: str, loss_of: Callable[[int], Losses]) -> None:
        """Takes the steps of one stage that are left.

        Args:
            name: of the stage.
            title: as the progress table shows it.
            loss_of: the loss of a step, by its number.
        """
        stage = self.stages[name]
        began = time.monotonic()
        first = stage.done
        with LiveTable(title, stage.steps, stage.done) as table:
            while stage.done < stage.steps:
                self.check_interrupt()
                # The loss of one minibatch.
                with self.autocast:
                    loss, losses = loss_of(stage.done)
                _check_finite(loss, stage.done)
                # Backpropagation, with clipped gradients.
                stage.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(stage.nets.parameters(), 1.0)
                # The optimisers' step.
                stage.optimizer_step()
                # Metrics and checkpoints.
                at_end = stage.done == stage.steps
                if stage.done % LOG_EVERY == 0 or at_end:
                    passed = (time.monotonic() - began) / 60
                    minutes = passed * stage.done / (stage.done - first)
                    self._log(table, stage, minutes, loss, losses)
                if at_end:
                    stage.finish()
                if stage.done % self.config.checkpoint_every == 0 or at_end:
                    self._save_checkpoint()

    # ---- The losses of a step. The minibatch depends on seed, stage and step alone. ----

    def _codec_loss(self, step: int) -> Losses:
        generator = _generator(self.config.seed, 1, step)
        drawn = torch.randint(len(self.rows), (self.config.batch_size,), generator=generator)
        return codec_loss(self.model, self.clips, self.rows[drawn], self.colours), {}

    def _painting_loss(self, step: int) -> Losses:
        generator = _generator(self.config.seed, 5, step)
        drawn = torch.randint(len(self.rows), (PAINTED,), generator=generator)
        return painting_loss(self.model, self.clips, self.rows[drawn]), {}

    def _hindsight_loss(self, step: int) -> Losses:
        generator = _generator(self.config.seed, 6, step)
        drawn = torch.randint(len(self.on_the_way), (LABELLED,), generator=generator)
        pairs = torch.randint(len(self.rows), (PAIRS,), generator=generator)
        rows = self.on_the_way[drawn]
        loss = hindsight_loss(self.model, self.clips, rows, self.rows[pairs])
        return loss, {"hindsight": loss}

    def _state_loss(self, step: int) -> Losses:
        config = self.config
        generator = _generator(config.seed, 3, step)
        drawn = torch.randint(len(self.rows_with_next), (STATE_BATCH,), generator=generator)
        # A curriculum: the pushforward grows in the first half of the steps.
        noise = self.state_noise
        unroll = round(noise.unroll * min(1.0, 2.0 * step / config.state_steps))
        return state_loss(
            self.model,
            self.clips,
            self.words,
            self.rows_with_next[drawn],
            unroll,
            noise.start,
            noise.judge,
            generator,
        )

    def _discriminator_loss(self, step: int) -> Losses:
        generator = _generator(self.config.seed, 7, step)
        drawn = torch.randint(len(self.rows_with_next), (STATE_BATCH,), generator=generator)
        loss = discriminator_loss(self.model, self.clips, self.rows_with_next[drawn], generator)
        return loss, {"discriminator": loss}

    def _inverse_loss(self, step: int) -> Losses:
        generator = _generator(self.config.seed, 4, step)
        rows, count, _ = sample_clips(
            self.clips, self.rows, INVERSE_BATCH, self.model.horizon, 1, generator
        )
        loss = inverse_loss(self.model, self.clips, rows, count)
        return loss, {"inverse": loss}

    def _dynamics_loss(self, step: int) -> Losses:
        config = self.config
        generator = _generator(config.seed, 2, step)
        # In the last part of training, start from moments that the model imagined itself.
        unroll = 1
        if step >= config.pushforward_from * config.steps:
            most = longest_unroll(config, step)
            unroll = int(torch.randint(1, most + 1, (1,), generator=generator))
        rows, count, before = sample_clips(
            self.clips, self.rows, config.batch_size, self.model.horizon, unroll, generator
        )
        return dynamics_loss(
            self.model,
            self.clips,
            self.words,
            rows,
            count,
            before,
            unroll,
            config.context_noise,
            generator,
        )

    # ---- Metrics and checkpoints. ----

    def _steps_done(self) -> int:
        return sum(stage.done for stage in self.stages.values())

    def _log(
        self,
        table: LiveTable,
        stage: Stage,
        minutes: float,
        loss: Tensor,
        losses: dict[str, Tensor],
    ) -> None:
        row = {"iteration": self._steps_done(), "loss": float(loss.detach()), "minutes": minutes}
        self.metrics.write(row | {k: float(v.detach()) for k, v in losses.items()})
        table.update(row | {"iteration": stage.done})

    def _save_checkpoint(self) -> None:
        states = {"model": self.model.state_dict()}
        states |= {name: stage.state_dict() for name, stage in self.stages.items()}
        done = {name: stage.done for name, stage in self.stages.items()}
        path = self.folder / "checkpoints" / f"step_{self._steps_done():07d}"
        checkpoint.save(path, states, done, keep_last=2)

    def _load_newest_checkpoint(self) -> None:
        newest = checkpoint.latest(self.folder / "checkpoints")
        if newest is None:
            return
        states, _ = checkpoint.load(newest, device=self.model.device)
        if not all(isinstance(state, dict) for state in states.values()):
            raise UserError(f"{newest} is malformed: a state is no mapping. Use an earlier one.")
        same_parts = states.keys() == {"model", *self.stages}
        if not same_parts or states["model"].keys() != self.model.state_dict().keys():
            raise UserError(
                f"{newest} was written by another version of embodyrl, whose world model has other "
                "parts, so it cannot be continued. Train anew in another folder (out=FOLDER), or "
                "continue with that version."
            )
        with described_by(newest):
            self.model.load_state_dict(states["model"])
            for name, stage in self.stages.items():
                stage.load_state_dict(states[name])


def longest_unroll(config: WorldTrainConfig, step: int) -> int:
    """The most chunks imagined in a row in a step after ``pushforward_from``.

    With ``unroll_growth`` it is a curriculum: the number grows from 1 to ``max_unroll``.
    """
    if not config.unroll_growth:
        return config.max_unroll
    first = config.pushforward_from * config.steps
    growing_steps = max(1.0, config.unroll_growth * (config.steps - first))
    return min(config.max_unroll, 1 + int((step - first) / growing_steps * config.max_unroll))


def _make_stages(config: WorldTrainConfig, model: WorldModel) -> dict[str, Stage]:
    """The stages by name, with fresh optimisers; one without frames has those of its state."""
    stages = _stages_of_frames(config, model) if model.imagines_frames else {}
    if model.finder is not None:
        localiser = model.finder.localiser
        painters = nn.ModuleList(localiser.each_painter())
        seeing = nn.ModuleList(localiser.parts_but_painters())
        stages["painter"] = Stage(painters, [], (0.0, PAINTER_LR), config.found_steps)
        stages["finder"] = Stage(seeing, [], (0.0, LOCALISER_LR), config.found_steps)
    if model.state is not None:
        stages["state_model"] = Stage(model.state, [], (0.0, STATE_LR), config.state_steps)
    if model.discriminator is not None:
        rates = (0.0, DISCRIMINATOR_LR)
        stages["discriminator"] = Stage(model.discriminator, [], rates, config.faithful_steps)
    return stages


def _stages_of_frames(config: WorldTrainConfig, model: WorldModel) -> dict[str, Stage]:
    assert model.inverse is not None
    codec = Stage(model.codec, [], (0.0, config.codec_lr), config.codec_steps)
    if config.init or config.wan:
        codec.done = codec.steps  # it has been trained
    matrices = [
        parameter
        for block in model.backbone.blocks
        for name, parameter in block.named_parameters()
        if parameter.ndim == 2 and not name.startswith("modulate")
    ]
    dynamics_nets = nn.ModuleList([model.backbone, model.success])
    dynamics = Stage(dynamics_nets, matrices, (config.muon_lr, config.lr), config.steps)
    inverse = Stage(model.inverse, [], (0.0, INVERSE_LR), config.inverse_steps)
    return {"codec": codec, "dynamics": dynamics, "inverse": inverse}


def _generator(seed: int, stage: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 4 + stage) * 1_000_003 + step)


def _check_finite(loss: Tensor, step: int) -> None:
    if not torch.isfinite(loss):
        raise UserError(
            f"The loss of step {step} is {float(loss)}; lower the learning rates (lr, muon_lr)."
        )
