"""Settings of a world model's training, and of the env that dreams in it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from embodyrl.config import env_from_dict
from embodyrl.env import EnvConfig
from embodyrl.errors import UserError, refuse_unread
from embodyrl.ranges import (
    Choice,
    Count,
    CountOrZero,
    Device,
    NotNegative,
    Positive,
    Range,
    Seed,
    Share,
    Threads,
)
from embodyrl.storage.paths import machine_setting, path_setting
from embodyrl.world_models.model import WorldModel

MEMBERS = ("mean", "one", "worst", "faithful")
"""Values of ``env.members``."""
DOUBT = ("fails", "cut", "ignored")
"""Values of ``env.doubt``."""
OF_FRAMES = (
    *("wan", "latent_channels", "channels", "width", "layers", "heads", "stochastic"),
    *("batch_size", "codec_steps", "codec_lr", "inverse_steps", "steps", "muon_lr", "lr"),
    *(
        "pushforward_from",
        "max_unroll",
        "faithful_steps",
        "unroll_growth",
        "context_noise",
        "max_false_positives",
    ),
)
"""Settings of a world model that a model without frames does not read."""


@dataclass(frozen=True)
class WorldTrainConfig:
    """Settings of ``train_world``; one step is one minibatch.

    Attributes:
        data: LeRobot data sets, failures included.
        weights: how often each of them counts; empty means once.
        init: a world model whose training continues. Its codec is not trained any more, and the
            sizes are its own.
        wan: folder or hub id of a pretrained Wan or AnyFlow in diffusers' layout. Its codec and
            transformer replace the small ones (``embodyrl.world_models.nets.pretrained.load``);
            of the sizes below only ``horizon`` and ``stochastic`` are then used.
        out: folder of the run; the model is its ``model/``.
        frames: also imagine pictures. ``false`` trains finder and state model alone, in a fraction
            of the time: enough to choose among proposals, not to train a policy in dreams or to
            play. None means yes; with ``init``, if that model does.
        seed: of weights and minibatches.
        horizon: H, the most actions of one prediction.
        latent_channels: c.
        channels: of the codec.
        width: of the dynamics' transformer.
        layers: of the dynamics' transformer.
        heads: of the dynamics' transformer.
        state: also predict the simulator's state (``StateModel``). Frames and success then follow
            it, and critics in the dream may see it. None means yes if all data hold the state;
            with ``init``, if that model predicts it.
        found: where it reads no simulator's state, find one in the pictures (``Finder``): where
            the robot ends in episodes that are solved. None means yes, if the data do not hold the
            simulator's state, ``state`` is not false and there is no ``wan``; with ``init``, if
            that model does.
        found_steps: of the training that finds it, in pictures, and as many of what
            proprioception explains of them.
        stochastic: also learn to sample one of several possible next moments (see
            ``ChunkTransformer``). A dream in which two samples differ too much is in doubt.
        batch_size: frames or clips in a minibatch.
        codec_steps: of the codec's training.
        codec_lr: learning rate of the codec (AdamW).
        state_steps: of the state model's training.
        state_members: networks of the state model (``StateModel``). If there are several, a dream
            in which they differ too much is in doubt, and has failed. The limit is what 9 of 10
            held-out successes stay below.
        state_noise: the most noise on the states that a prediction starts from, in standard
            deviations of the data. If dreams of many actions diverge, try 0.05. None means 0, and
            0.02 for a found state.
        state_unroll: the most actions that the state model predicts before the one it learns from
            (pushforward). The number grows from 0 over the first half of ``state_steps``. It takes
            about twice the time. Dreams of many actions become more accurate, most of all where
            hands touch things, and hardly need ``state_noise``. None means 0, and 8 for a found
            state.
        prospects: networks of the state model that say whether the task will be solved, by which
            proposals are ranked (``world_models.dream_chooser``).
        judges: networks of the state model that say whether the task is solved; the least sure of
            them counts (``StateModel``).
        judge_noise: noise on the states that the judges learn from, in standard deviations of the
            data. With few judges and no noise, a policy trained in long dreams learns to fool the
            judges instead of solving the task. None means 0, and 0.1 for a found state.
        faithful_steps: of the training of a network that tells real transitions from those that the
            ``state_members`` predict (``env.members=faithful``); 0 trains none.
        inverse_steps: of the training of the inverse dynamics, which infer actions from pictures
            (``env.follow``, ``world eval``).
        steps: of the dynamics' training.
        muon_lr: learning rate of the transformer's matrices (Muon).
        lr: learning rate of everything else (AdamW).
        pushforward_from: share of ``steps`` after which clips may start in the model's own dreams.
        max_unroll: the most chunks imagined in a row; the last one is learned from.
        unroll_growth: share of the steps after ``pushforward_from`` over which that number grows
            from 1 (a curriculum); 0 uses ``max_unroll`` at once.
        styles: further copies of every episode, each in another light
            (``embodyrl.world_models.colour_jitter``).
        context_noise: the most noise on the context; half of the clips have some, and the model is
            told how much.
        held_out: share of the episodes kept for the calibration and for ``world eval``.
        max_false_positives: the largest share of failing held-out dreams that may be judged a
            success; and of held-out episodes that may be judged so in a real moment too early.
        checkpoint_every: steps between two checkpoints.
        device: ``auto`` takes the GPU if there is one.
        precision: ``bf16`` or ``f32``; ``auto`` takes bf16 if the machine is faster with it.
        threads: of PyTorch on the CPU; 0 leaves its default.
    """

    data: tuple[str, ...] = path_setting(())
    weights: tuple[Count, ...] = ()
    init: str = path_setting()
    wan: str = path_setting()
    out: str = "runs/world"
    frames: bool | None = None
    seed: Seed = 0
    horizon: Count = 5
    latent_channels: Count = 16
    channels: Count = 128
    width: Count = 128
    layers: Count = 5
    heads: Count = 4
    state: bool | None = None
    found: bool | None = None
    found_steps: Count = 900
    stochastic: bool = False
    batch_size: Count = 64
    codec_steps: Count = 1200
    codec_lr: Positive = 3e-3
    state_steps: Count = 2000
    state_members: Count = 1
    state_noise: NotNegative | None = None
    state_unroll: CountOrZero | None = None
    prospects: Count = 3
    judges: Count = 1
    judge_noise: NotNegative | None = None
    faithful_steps: CountOrZero = 0
    inverse_steps: Count = 600
    steps: Count = 4000
    muon_lr: Positive = 6e-3
    lr: Positive = 3e-3
    pushforward_from: Share = 0.6
    max_unroll: Count = 4
    unroll_growth: Share = 0.0
    styles: CountOrZero = 0
    context_noise: NotNegative = 0.3
    held_out: Annotated[float, Range(0, 0.5, open_low=True)] = 0.1
    max_false_positives: Share = 0.05
    checkpoint_every: Count = 500
    device: Device = machine_setting("auto")
    precision: Annotated[str, Choice("auto", "bf16", "f32")] = "auto"
    threads: Threads = machine_setting(0)

    def __post_init__(self) -> None:
        if self.state and self.wan:
            raise UserError(
                "A Wan's frames cannot follow a state model: leave out state=true or wan=."
            )
        if self.found and (self.state or self.wan):
            raise UserError(
                "found=true finds a state in pictures, and reads no simulator's; and a Wan's "
                "frames cannot follow it: leave out state=true and wan=."
            )
        if self.frames is False:
            if self.state is False and not self.found:
                raise UserError(
                    "state=false and frames=false leave nothing to imagine: leave one of them out."
                )
            refuse_unread(
                self, "world", OF_FRAMES, "a model without frames (frames=false) has none"
            )
        if self.weights and len(self.weights) != len(self.data):
            raise UserError(
                f"weights is {self.weights}; it takes one number, 1 or more, for each of "
                f"{self.data}."
            )


@dataclass(frozen=True)
class StateNoise:
    """What is done to the states that a state model learns from; see ``WorldTrainConfig``."""

    unroll: int
    start: float
    judge: float


READ_STATE = StateNoise(unroll=0, start=0.0, judge=0.0)
"""What is left out means this for a simulator's state ..."""
FOUND_STATE = StateNoise(unroll=8, start=0.02, judge=0.1)
"""... and this for one that is found in pictures, which is less sure."""


def noise_on_states(config: WorldTrainConfig, *, found: bool) -> StateNoise:
    """What a config says, and where it says nothing, what suits the state.

    Args:
        config: of the training.
        found: whether the state is found in pictures.
    """
    default = FOUND_STATE if found else READ_STATE
    return StateNoise(
        unroll=default.unroll if config.state_unroll is None else config.state_unroll,
        start=default.start if config.state_noise is None else config.state_noise,
        judge=default.judge if config.judge_noise is None else config.judge_noise,
    )


@dataclass(frozen=True)
class WorldModelConfig(EnvConfig):
    """Settings of ``WorldModelEnv``.

    Attributes:
        name: registry name.
        model: folder of the world model (``embodyrl world train``).
        reflector: folder of a reflector that judges the frames (``embodyrl world reflect``); empty
            uses the model's own success head.
        max_episode_steps: 0 means as many as in the real env.
        starts: ``first`` begins dreams at an episode's first frame, ``any`` at any moment of it. A
            model is more accurate over the next few chunks than over a whole episode.
        length: actions after which a dream is truncated, so that its value is bootstrapped; 0 lets
            it last until the episode's time is up.
        sampling_steps: of a stochastic model: 0 imagines the mean, 1 or more samples the next
            moment in that many steps. A dream in which two samples differ by more than
            ``WorldModel.max_disagreement`` is in doubt.
        follow: a dream whose pictures do not show the commanded actions is in doubt; the limit is
            ``WorldModel.max_action_error``.
        members: which of the state model's networks (``world train state_members=5``) a dream
            follows: their ``mean``; ``one``, drawn for each episode; or after each chunk the
            ``worst``, or the most ``faithful``. See ``world_models.members``.
        doubt: what becomes of a dream that cannot be trusted any more: it ``fails``
            (arXiv:2005.05951), is ``cut`` and its value bootstrapped, or the doubt is ``ignored``.
        real_envs: how many of the ``num_envs`` are the real env instead of dreams (``MixedEnv``).
        split: ``train`` starts dreams from the moments that the model was trained on, ``eval`` from
            held-out ones.
        precision: ``bf16`` or ``f32`` of the model's matrix products; ``auto`` takes bf16 if the
            machine is faster with it.
    """

    name: str = "world_model"
    model: str = path_setting()
    reflector: str = path_setting()
    max_episode_steps: CountOrZero = 0
    starts: Annotated[str, Choice("first", "any")] = "first"
    length: CountOrZero = 0
    sampling_steps: CountOrZero = 0
    follow: bool = False
    members: Annotated[str, Choice(*MEMBERS)] = "mean"
    doubt: Annotated[str, Choice(*DOUBT)] = "fails"
    real_envs: CountOrZero = 0
    precision: Annotated[str, Choice("auto", "bf16", "f32")] = "auto"

    def __post_init__(self) -> None:
        if not self.terminate_on_success:
            raise UserError(
                "A dream always ends when the task is solved: leave env.terminate_on_success true."
            )
        if self.history > 1:
            raise UserError(
                f"env.history is {self.history}, but a dream has one picture for each chunk, and "
                "none of the action before. Train in the real env."
            )
        if self.follow and self.doubt == "ignored":
            raise UserError(
                "env.follow=true doubts dreams whose pictures do not show the actions, and "
                "env.doubt=ignored takes no notice of it: leave one of them out."
            )
        if self.real_envs and not 0 < self.real_envs < self.num_envs:
            raise UserError(
                f"env.real_envs is {self.real_envs}; it must be 0, or leave some of the "
                f"{self.num_envs} envs."
            )

    @property
    def judges_itself(self) -> bool:
        """See ``EnvConfig``; every imagined frame is judged."""
        return True

    @property
    def uses_gpu(self) -> bool:
        """See ``EnvConfig``; the whole world model can."""
        return True

    def for_evaluation(self, split: str) -> EnvConfig:
        """The config of the real env: policies trained in dreams are evaluated there."""
        given = WorldModel.read_meta(model_folder(self))["env"]
        if not given:
            raise UserError(
                f"{self.model} does not say which real env it models, so no policy can be "
                "evaluated there: its training data came without the env's config."
            )
        real = env_from_dict(given)
        return dataclasses.replace(real, split=split, num_envs=self.num_envs, device=self.device)

    def for_demonstrations(self) -> EnvConfig | None:
        """The real env."""
        return self.for_evaluation("train")

    def smallest(self) -> EnvConfig:
        """One dream, and one real env if there are any."""
        real = min(1, self.real_envs)
        return dataclasses.replace(self, num_envs=1 + real, real_envs=real)


def model_folder(config: WorldModelConfig) -> Path:
    """The folder of the config's world model.

    Raises:
        UserError: the config names none.
    """
    if not config.model:
        raise UserError(
            "env.model is empty: give the folder of a world model, which `embodyrl world train` "
            "makes."
        )
    return Path(config.model)
