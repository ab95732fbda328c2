"""SmolVLA, pi0 and pi0.5 as policies that every algorithm here can post-train.

The network and the pre- and post-processing are LeRobot's (``nets.py``, ``processors.py``,
``lerobot_io.py``). The sampler, its probabilities and the critic are those of every flow policy
(``flow_base.py``).

    obs --Processors--> batch --net.prefix--> Prefix: keys and values of P tokens, pooled (N, F)
    noise (N, C, D) --K steps of net.features and net.velocity--> x_K (N, C, D)
    x_K --first H rows, A columns, Processors.unnormalize--> actions (N, H, A)

The flow's state is LeRobot's whole chunk, (C, D) with its padding. Without noise in the steps, the
same initial noise gives the same actions as LeRobot's ``select_action``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodyrl.errors import UserError
from embodyrl.functional.flow import squash_log_std
from embodyrl.policies.actor_critic import BELONGS_TO, CRITICS
from embodyrl.policies.chooser import ChooserConfig
from embodyrl.policies.flow_base import FlowPolicy
from embodyrl.policies.flow_checks import TRAINED_STEPS, TRANSITIONS, check_sampler
from embodyrl.policies.vla import lerobot_io, lerobot_parts
from embodyrl.policies.vla.frozen_weights import SharesFrozenWeights
from embodyrl.policies.vla.lora import add_adapters, without_adapters
from embodyrl.policies.vla.nets import NETS, Prefix
from embodyrl.policies.vla.prefix_cache import PrefixCache
from embodyrl.policies.vla.processors import ActionNormalizer
from embodyrl.ranges import Choice, Count, CountOrZero, NotNegative, Positive, Share
from embodyrl.storage.paths import path_setting
from embodyrl.types import EnvSpec, Obs

TRAINED = ("expert", "language", "all")


@dataclass(frozen=True)
class VLAConfig(ChooserConfig):
    """What to load, which parts to train, and how to sample.

    Attributes:
        name: registry name: ``smolvla``, ``pi0`` or ``pi05``.
        pretrained: a LeRobot checkpoint, a folder or an id of the Hugging Face hub.
        revision: of a hub id.
        random_weights: use only the config.json of ``pretrained``, and train from random weights.
        vlm: folder or hub id of a tokenizer (and, for SmolVLA, a model config), used in place of
            the one that the checkpoint names; for machines without a network.
        cameras: the checkpoint's cameras in the order of the env's; empty if the names are the
            same.
        horizon: C, actions that the model plans; 0 for as many as in the checkpoint. Only random
            weights can have another number.
        execute: H, how many of them are executed before the next observation; 0 for as many as in
            the checkpoint (its ``n_action_steps``), or all if it plans fewer.
        max_prefix: imitation gives the first 0 to ``max_prefix`` actions of a chunk as an input
            instead of predicting them; see ``FlowVLAConfig``.
        num_denoise_steps: K.
        train: ``expert`` trains the action expert and its projections, ``language`` the language
            model too, ``all`` the image encoder as well.
        lora_rank: train low-rank adapters of this rank instead of the transformers' weights; 0
            trains the weights.
        precision: ``float32``, or ``bfloat16``: everything is computed and frozen weights are
            stored in bfloat16. Trained weights stay float32.
        checkpointing: recompute the denoising steps in the backward pass, one at a time: less
            memory, more time.
        keep_prefixes: number of observations whose keys and values stay on the device, for later
            epochs over the same rollout; 0 for none. It needs ``train=expert``, and also freezes
            SmolVLA's projection of proprioception.
        transition: how a step draws noise when training: ``flow_sde``, ``flow_cps`` or
            ``flow_noise``, whose std is learned and depends on observation, step and noisy chunk.
        eta: noise level of ``flow_sde`` and ``flow_cps``.
        noise_min: of ``flow_noise``; see ``FlowVLAConfig``.
        noise_max: see ``noise_min``.
        trained_steps: ``all`` steps draw noise and are trained, or ``one`` drawn at random per env.
        critic: what the value head sees: ``shared``, the language model's mean token and
            proprioception (no gradient into them), what hindsight has ``found`` in pictures, or
            ``privileged`` simulator state.
        critic_width: of the value head's two hidden layers.
        start_noise: standard deviation of the initial noise of noise-free chunks: in evaluation, on
            a robot, and of proposals. The flow has learned from 1; less makes the policy more
            decided.
        steer_width: hidden width of the noise policy, which DSRL trains; 0 for none.
        steer_bound: the noise policy chooses noise in [-steer_bound, steer_bound].
    """

    name: str = "smolvla"
    pretrained: str = path_setting()
    revision: str = ""
    random_weights: bool = False
    vlm: str = path_setting()
    cameras: tuple[str, ...] = ()
    horizon: CountOrZero = 0
    execute: CountOrZero = 0
    max_prefix: CountOrZero = 0
    num_denoise_steps: Count = 10
    train: Annotated[str, Choice(*TRAINED)] = "expert"
    lora_rank: CountOrZero = 0
    precision: Annotated[str, Choice("float32", "bfloat16")] = "float32"
    checkpointing: bool = False
    keep_prefixes: CountOrZero = 0
    transition: Annotated[str, Choice(*TRANSITIONS)] = "flow_sde"
    eta: NotNegative = 0.5
    noise_min: Positive = 0.3
    noise_max: Positive = 1.0
    trained_steps: Annotated[str, Choice(*TRAINED_STEPS)] = "all"
    critic: Annotated[str, Choice(*CRITICS)] = "shared"
    critic_width: Count = 256
    start_noise: Share = 1.0
    steer_width: CountOrZero = 0
    steer_bound: Positive = 1.5

    def __post_init__(self) -> None:
        check_sampler(self)
        if self.keep_prefixes and self.train != "expert":
            raise UserError(
                "policy.keep_prefixes keeps what a frozen model computed, but "
                f"policy.train={self.train} trains this model. Leave one of them out."
            )
        if self.lora_rank and self.train == "all":
            raise UserError(
                "policy.lora_rank puts no adapters on the image encoder. Use policy.train=language."
            )
        if self.horizon:
            check_prefix(self)


def check_prefix(config: VLAConfig) -> None:
    """Refuses a prefix that leaves no action to predict.

    Raises:
        UserError: ``max_prefix`` is not below ``horizon``.
    """
    if config.max_prefix >= config.horizon:
        raise UserError(
            f"policy.max_prefix is {config.max_prefix}: it must be smaller than policy.horizon "
            f"{config.horizon}, so that some actions are left to predict."
        )


class VLA(SharesFrozenWeights, FlowPolicy):
    """See the module's docstring.

    It is built on the CPU. Its weights are those of the checkpoint, or random from torch's global
    generator.
    """

    Config: ClassVar[type[VLAConfig]] = VLAConfig
    starts_fresh = ("noise.", "steer.")
    """Parts that may be missing in an initial checkpoint. They then keep their fresh weights."""
    belongs_to = BELONGS_TO

    def __init__(self, config: VLAConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, config.eta, config.trained_steps)
        # LeRobot's policy: its config, then the network, weights and adapters.
        folder, weights = lerobot_parts.find_folder(config, spec, "lerobot/smolvla_base")
        self._lerobot_config = self._configure(folder, weights)
        keys = lerobot_io.camera_keys(self._lerobot_config, spec, config.cameras, folder)
        lerobot = lerobot_io.build_lerobot_policy(self._lerobot_config)
        if weights:
            lerobot_io.read_weights(lerobot, folder)
        if config.lora_rank:
            add_adapters(lerobot, config.lora_rank, language=config.train == "language")
        self.net = NETS[config.name](lerobot)
        self._set_precision()
        # What the checkpoint says is known now.
        self.config = dataclasses.replace(
            config, horizon=self.flow_shape[0], execute=self._lerobot_config.n_action_steps
        )

        # Prefixes computed with earlier weights are forgotten when new weights are loaded.
        self._prefixes = PrefixCache(config.keep_prefixes) if config.keep_prefixes else None
        self.register_load_state_dict_post_hook(VLA._forget_prefixes)

        # Normalisation, from the checkpoint's own pipelines.
        self.processors = lerobot_parts.load_processors(
            config, self._lerobot_config, spec, folder, keys
        )
        self.normalize_action = ActionNormalizer(self.processors)

        # The head of the learned noise, the value head and the noise policy. The first predicts
        # zeros at the start, which is the middle of the range of the std.
        self.noise = None
        if config.transition == "flow_noise":
            self.noise = nn.Linear(self.net.width, self.flow_shape[1])
            nn.init.zeros_(self.noise.weight)
            nn.init.zeros_(self.noise.bias)
        self.add_heads(self.net.pooled_width + spec.proprio_dim)
        self.note_frozen(self.net)
        self.eval()

    def _configure(self, folder: Path, weights: bool) -> Any:
        """LeRobot's config of the checkpoint, with this env's features and this run's settings."""
        c = self.config
        config = lerobot_parts.configure(c, self.spec, folder, weights)
        # What is trained.
        config.freeze_vision_encoder = c.train != "all"
        config.train_expert_only = c.train == "expert"
        if c.keep_prefixes and hasattr(config, "train_state_proj"):
            config.train_state_proj = False
        if c.vlm and hasattr(config, "vlm_model_name"):
            config.vlm_model_name = c.vlm
        # Denoising steps; an export then samples in LeRobot as it was trained here.
        steps_key = "num_steps" if hasattr(config, "num_steps") else "num_inference_steps"
        setattr(config, steps_key, c.num_denoise_steps)
        return config

    def _set_precision(self) -> None:
        """Stores frozen weights in ``config.precision``, and trained ones in float32."""
        if self.config.precision == "bfloat16":
            self.net.to_bfloat16()
        lerobot_parts.keep_trained_in_float32(self.net)

    def _forget_prefixes(self, _: Any) -> None:
        """The hook that runs after weights are loaded."""
        if self._prefixes is not None:
            self._prefixes.clear()

    @property
    def flow_shape(self) -> tuple[int, int]:
        """(C, D): LeRobot's chunk and its padded width."""
        return self.net.chunk_shape

    def actor_parameters(self) -> list[nn.Parameter]:
        """What ``config.train`` names, and the learned noise."""
        frozen = set(self._frozen)
        return [p for p in super().actor_parameters() if p not in frozen]

    def encode(self, obs: Obs) -> Prefix:
        """The prefix and its keys and values; computed once per observation."""
        batch = self.processors(obs)
        if self._prefixes is None:
            return self._compute_prefix(batch)
        with torch.no_grad():
            return self._prefixes.get(batch, self._compute_prefix)

    def _compute_prefix(self, batch: dict[str, Any]) -> Prefix:
        with self._autocast():
            return self.net.prefix(batch)

    def _features(self, context: Prefix, x: Tensor, t: Tensor) -> Float[Tensor, "n k c w"]:
        """The expert's last hidden states at x (N, K, C, D)."""

        def compute(x: Tensor, t: Tensor) -> Tensor:
            with self._autocast():
                return self.net.features(context, x, t)

        if not (self.config.checkpointing and torch.is_grad_enabled()):
            return compute(x, t)
        # Gradient checkpointing: each denoising step is recomputed in the backward pass.
        steps = zip(x.split(1, dim=1), t.split(1, dim=1), strict=True)
        parts = [cast(Tensor, checkpoint(compute, *step, use_reentrant=False)) for step in steps]
        return torch.cat(parts, dim=1)

    def _autocast(self) -> torch.autocast:
        """The context manager under which the network computes in ``config.precision``."""
        device = next(self.critic.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def velocity(self, context: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """The velocity, of x's shape.

        Args:
            context: of N observations.
            x: (N, K, C, D) noisy chunks.
            t: (N, K) their times; or (N, K, C), a time for each action (``max_prefix``).
        """
        features = self._features(context, x, t)
        return self.net.velocity(features)

    def step_inputs(self, context: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity and, for Flow-Noise, the log-std, both of x's shape; see ``velocity``."""
        c = self.config
        features = self._features(context, x, t)
        velocity = self.net.velocity(features)
        if self.noise is None:
            return velocity, None
        raw_log_std = self.noise(features)
        scale = c.num_denoise_steps**-0.5
        return velocity, squash_log_std(raw_log_std, c.noise_min * scale, c.noise_max * scale)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations: proprio (B, P) and actions (B, A).

        LeRobot's fine-tuning does the same.
        """
        self.processors.fit(proprio, actions)

    def save_lerobot(self, folder: str | Path) -> Path:
        """Writes a checkpoint that LeRobot's own ``from_pretrained`` loads."""
        merged = without_adapters(self.net.lerobot)
        return lerobot_io.write_checkpoint(merged, self.processors, folder)

    def train(self, mode: bool = True) -> VLA:
        """Stays in evaluation mode: with dropout, the probability of a path would be random."""
        return super().train(False)


@dataclass(frozen=True)
class Pi0Config(VLAConfig):
    """Settings of pi0: those of ``VLAConfig``."""

    name: str = "pi0"


@dataclass(frozen=True)
class Pi05Config(VLAConfig):
    """Settings of pi0.5: those of ``VLAConfig``."""

    name: str = "pi05"


class SmolVLA(VLA):
    """SmolVLA (arXiv:2506.01844)."""


class Pi0(VLA):
    """pi0 (arXiv:2410.24164)."""

    Config = Pi0Config


class Pi05(VLA):
    """pi0.5 (arXiv:2504.16054)."""

    Config = Pi05Config
