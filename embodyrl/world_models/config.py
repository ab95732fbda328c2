"""The settings of training a world model, and of dreaming in one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

from embodyrl.config import build_section, config_class
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError
from embodyrl.world_models.model import WorldModel


@dataclass(frozen=True)
class WorldTrainConfig:
    """Settings of ``train_world``; one step is one minibatch.

    Attributes:
        data: LeRobot data sets, failures included.
        weights: how often each of them counts; empty means once.
        init: a world model to go on from. Its codec stays as it is, and sizes are its own.
        wan: folder or hub id of a pretrained Wan or AnyFlow in diffusers' layout, whose codec and
            transformer take the small ones' place (``embodyrl.world_models.nets.pretrained.load``);
            then only ``horizon`` and ``stochastic`` are read of the sizes.
        out: folder of the run; the model is its ``model/``.
        seed: of weights and minibatches.
        horizon: H, the most actions of one prediction.
        latent_channels: c.
        channels: of the codec.
        width: of the dynamics' transformer.
        layers: of it.
        heads: of it.
        state: also learn to predict the simulator's state (``StateModel``), which pictures and
            success then follow and critics in the dream may see. None: where all data hold it;
                after ``init``, where that model does.
        stochastic: also learn to draw one of several possible next moments (see
            ``ChunkTransformer``); how far two draws differ then says when a dream is in doubt.
        batch_size: frames or clips in a minibatch.
        codec_steps: of the codec.
        codec_lr: its AdamW's.
        state_steps: of the state model.
        state_members: nets of the state model (``StateModel``). With more than one a dream in which
            they differ more than on the way to 9 of 10 held-out successes is in doubt, and has
            failed.
        state_noise: the most noise on what they start from, in standard deviations of the data:
            where a dream of many actions runs away, .05 may hold it.
        state_unroll: actions at the most, a number that grows from 0 in the first half of its
            steps, through which they have come by themselves to what they start from. It costs
            about twice the time; dreams of many actions are the truer for it, where hands touch
            things above all, and hardly need ``state_noise``.
        judges: nets of the state model that say what is solved, the least sure of which counts
            (``StateModel``).
        judge_noise: on what they learn from, in standard deviations of the data. With few judges
            and no noise a policy trained in a long dream learns to fool them rather than to solve
            the task.
        inverse_steps: of the inverse dynamics, which say what actions pictures show
            (``env.follow``, ``world eval``).
        steps: of the dynamics.
        muon_lr: of the transformer's matrices (Muon).
        lr: of everything else (AdamW).
        pushforward_from: share of ``steps`` after which clips may start in the model's own dreams.
        max_unroll: chunks imagined in a row at the most, the last of which is learned from.
        unroll_growth: share of the steps after ``pushforward_from`` in which that number grows from
            1, a curriculum; 0 has it from the first of them on.
        styles: so many times every episode is also shown in another light
            (``embodyrl.world_models.colour_jitter``).
        context_noise: the most noise on the context; half of the clips have some, and the model is
            told how much.
        held_out: share of the episodes kept for the calibration and for ``world eval``.
        max_false_positives: the most failing held-out dreams, as a share, that may be judged a
            success; and the most held-out episodes that may be so in a real moment before it.
        checkpoint_every: steps.
        device: ``auto`` takes the GPU where there is one.
        precision: ``bf16`` or ``f32``; ``auto`` takes bf16 where the machine is fast at it.
        threads: of PyTorch on the CPU; 0 leaves its default.
    """

    data: tuple[str, ...] = ()
    weights: tuple[int, ...] = ()
    init: str = ""
    wan: str = ""
    out: str = "runs/world"
    seed: int = 0
    horizon: int = 5
    latent_channels: int = 16
    channels: int = 128
    width: int = 128
    layers: int = 5
    heads: int = 4
    state: bool | None = None
    stochastic: bool = False
    batch_size: int = 64
    codec_steps: int = 1200
    codec_lr: float = 3e-3
    state_steps: int = 2000
    state_members: int = 1
    state_noise: float = 0.0
    state_unroll: int = 0
    judges: int = 1
    judge_noise: float = 0.0
    inverse_steps: int = 600
    steps: int = 4000
    muon_lr: float = 6e-3
    lr: float = 3e-3
    pushforward_from: float = 0.6
    max_unroll: int = 4
    unroll_growth: float = 0.0
    styles: int = 0
    context_noise: float = 0.3
    held_out: float = 0.1
    max_false_positives: float = 0.05
    checkpoint_every: int = 500
    device: str = "auto"
    precision: str = "auto"
    threads: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.held_out <= 0.5:
            raise UserError(f"held_out is {self.held_out}; it must lie above 0 and not above 0.5.")
        for key in ("pushforward_from", "unroll_growth"):
            if not 0 <= getattr(self, key) <= 1:
                raise UserError(f"{key} is {getattr(self, key)}; it must lie in [0, 1].")
        if self.state and self.wan:
            raise UserError(
                "A Wan does not draw what a state model says: leave state out, or wan empty."
            )
        if self.weights and (len(self.weights) != len(self.data) or min(self.weights) < 1):
            raise UserError(
                f"weights is {self.weights}; it takes one number, 1 or more, for each of "
                f"{self.data}."
            )
        for key in ("styles", "state_noise", "state_unroll", "judge_noise"):
            if getattr(self, key) < 0:
                raise UserError(f"{key} is {getattr(self, key)}; it must be 0 or more.")
        counts = (
            "horizon",
            "max_unroll",
            "steps",
            "state_steps",
            "state_members",
            "judges",
            "inverse_steps",
        )
        for key in (*counts, "codec_steps", "batch_size", "checkpoint_every"):
            if getattr(self, key) < 1:
                raise UserError(f"{key} is {getattr(self, key)}; it must be at least 1.")


@dataclass(frozen=True)
class WorldModelConfig(EnvConfig):
    """Settings of ``WorldModelEnv``.

    Attributes:
        name: registry name.
        model: folder of the world model (``embodyrl world train``).
        reflector: folder of a reflector that judges the frames (``embodyrl world reflect``); empty
            for the model's own success head.
        max_episode_steps: 0 means as many as the real env's.
        starts: ``first`` begins dreams with an episode's first frame, ``any`` at any moment of it.
            What a model says of the next few chunks is worth more than what it says of a whole
            episode.
        length: actions after which a dream is broken off, and bootstrapped; 0 lets it last until
            the episode's time is up.
        sampling_steps: of a stochastic model: 0 imagines the mean, 1 or more draws what comes next
            in that many steps, and a dream whose second draw differs too much from the first
            (``WorldModel.doubt``) has failed.
        follow: a dream whose pictures do not show what was commanded, by more than on the way to 9
            of 10 held-out successes (``WorldModel.strayed``), has failed.
        real_envs: so many of the ``num_envs`` are no dreams but the real env (``MixedEnv``).
        split: ``train`` starts dreams from the moments that the model was trained on, ``eval`` from
            held-out ones.
        precision: ``bf16`` or ``f32`` of the model's products; ``auto`` takes bf16 where the
            machine is fast at it.
    """

    name: str = "world_model"
    model: str = ""
    reflector: str = ""
    max_episode_steps: int = 0
    starts: str = "first"
    length: int = 0
    sampling_steps: int = 0
    follow: bool = False
    real_envs: int = 0
    precision: str = "auto"

    def __post_init__(self) -> None:
        if not self.terminate_on_success:
            raise UserError(
                "A dream always ends when the task is solved: leave env.terminate_on_success true."
            )
        if self.starts not in ("first", "any"):
            raise UserError(f"env.starts is {self.starts!r}; it must be first or any.")
        if self.real_envs and not 0 < self.real_envs < self.num_envs:
            raise UserError(
                f"env.real_envs is {self.real_envs}; it must be 0, or leave some of the "
                f"{self.num_envs} envs."
            )
        for key in ("length", "sampling_steps"):
            if getattr(self, key) < 0:
                raise UserError(f"env.{key} is {getattr(self, key)}; it must be 0 or more.")
        if self.precision not in ("auto", "bf16", "f32"):
            raise UserError(f"env.precision is {self.precision!r}; it must be auto, bf16 or f32.")

    def for_evaluation(self, split: str) -> EnvConfig:
        """The real env: what was learned in a dream counts there alone."""
        given = OmegaConf.create(WorldModel.read_meta(model_folder(self))["env"])
        if not given:
            raise UserError(
                f"{self.model} does not say which real env it models, so nothing can be evaluated "
                "there."
            )
        real = build_section("env", config_class("env", given), given)
        return dataclasses.replace(real, split=split, num_envs=self.num_envs, device=self.device)


def model_folder(config: WorldModelConfig) -> Path:
    """Where the model is.

    Raises:
        UserError: the config does not say.
    """
    if not config.model:
        raise UserError(
            "env.model is empty: give the folder of a world model, which `embodyrl world train` "
            "makes."
        )
    return Path(config.model)
