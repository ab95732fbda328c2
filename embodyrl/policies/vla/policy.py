"""SmolVLA, pi0 and pi0.5 as policies that every algorithm here can post-train.

LeRobot's own network, pre- and post-processing (``nets.py``, ``processors.py``, ``lerobot_io.py``);
the sampler, its probabilities and the critic are those of every flow policy (``flow_base.py``). The
flow's state is LeRobot's whole chunk, (C, D) with its padding: noise-free, the same noise gives the
same actions as LeRobot's ``select_action``.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from embodyrl.errors import UserError, did_you_mean
from embodyrl.functional.flow import squash_log_std
from embodyrl.policies.flow_base import FlowPolicy, check_sampler, pad
from embodyrl.policies.vla import lerobot_io
from embodyrl.policies.vla.lora import add_adapters, without_adapters
from embodyrl.policies.vla.nets import NETS, Prefix
from embodyrl.policies.vla.prefix_cache import PrefixStore
from embodyrl.policies.vla.processors import ACTION, STATE, ActionNormalizer, Processors
from embodyrl.types import EnvSpec, Obs

TRAINED = ("expert", "language", "all")


@dataclass(frozen=True)
class VLAConfig:
    """What to load, what of it to train, and how to sample.

    Attributes:
        name: registry name: ``smolvla``, ``pi0`` or ``pi05``.
        pretrained: a LeRobot checkpoint, a folder or an id of the Hugging Face hub.
        revision: of a hub id.
        random_weights: take the architecture of ``pretrained``'s config.json alone, and train from
            nothing.
        vlm: folder or hub id whose tokenizer (SmolVLA: and model config) takes the place of the one
            that the checkpoint names, for machines without a network.
        cameras: the checkpoint's cameras in the order of the env's; empty where the names are the
            same.
        horizon: H, actions that are executed before the next look.
        chunk_size: C, actions that the model plans; 0 means as in the checkpoint, or with
            ``random_weights`` H.
        max_prefix: imitation gives the first 0 to so many actions of a chunk instead of asking for
            them; see ``FlowVLAConfig``.
        num_denoise_steps: K.
        train: ``expert`` trains the action expert and its projections, ``language`` the language
            model too, ``all`` the image encoder as well.
        lora_rank: train low-rank adapters on the transformers that ``train`` names in place of
            their weights; 0: none.
        precision: ``float32``, or ``bfloat16``: frozen weights are stored in it and everything is
            computed in it; what is trained stays float32.
        checkpointing: compute the denoising steps anew in the backward pass, one at a time: less
            memory, more time.
        keep_prefixes: how many observations' keys and values stay on the device, for later epochs
            over the same rollout; needs ``train=expert``, and SmolVLA's projection of
            proprioception is then frozen too. 0 for none.
        transition: how a step draws noise when training: ``flow_sde``, ``flow_cps`` or
            ``flow_noise``, whose std is learned and depends on observation, step and noisy chunk.
        eta: noise level of ``flow_sde`` and ``flow_cps``.
        noise_min: of ``flow_noise``; see ``FlowVLAConfig``.
        noise_max: see there.
        trained_steps: ``all`` steps draw noise and are trained, or ``one`` drawn at random per env.
        critic: what the value head sees: ``shared``, the language model's mean token and
            proprioception (no gradient into them), or ``privileged`` simulator state.
        critic_width: of its two hidden layers.
        steer_width: hidden width of a policy over the initial noise, which DSRL trains; 0 for none.
        steer_bound: it chooses noise in [-steer_bound, steer_bound].
    """

    name: str = "smolvla"
    pretrained: str = ""
    revision: str = ""
    random_weights: bool = False
    vlm: str = ""
    cameras: tuple[str, ...] = ()
    horizon: int = 10
    chunk_size: int = 0
    max_prefix: int = 0
    num_denoise_steps: int = 10
    train: str = "expert"
    lora_rank: int = 0
    precision: str = "float32"
    checkpointing: bool = False
    keep_prefixes: int = 0
    transition: str = "flow_sde"
    eta: float = 0.5
    noise_min: float = 0.3
    noise_max: float = 1.0
    trained_steps: str = "all"
    critic: str = "shared"
    critic_width: int = 256
    steer_width: int = 0
    steer_bound: float = 1.5

    def __post_init__(self) -> None:
        check_sampler(self)
        for key, valid in (("train", TRAINED), ("precision", ("float32", "bfloat16"))):
            if (given := getattr(self, key)) not in valid:
                raise UserError(f"policy.{key} is {given!r}. {did_you_mean(given, valid)}")
        if self.keep_prefixes and self.train != "expert":
            raise UserError(
                "policy.keep_prefixes keeps what a frozen model computed, but "
                f"policy.train={self.train} trains it. Leave one of them out."
            )
        if self.lora_rank and self.train == "all":
            raise UserError(
                "policy.lora_rank puts no adapters on the image encoder. Use policy.train=language."
            )
        if self.horizon < 1 or 0 < self.chunk_size < self.horizon:
            raise UserError(
                f"policy.horizon is {self.horizon}; it must be at least 1 and not above "
                f"policy.chunk_size {self.chunk_size}."
            )
        if self.max_prefix and not 0 < self.max_prefix < self.horizon:
            raise UserError(
                f"policy.max_prefix is {self.max_prefix}: it must leave some of the {self.horizon} "
                "actions of a chunk to be asked for."
            )


class VLA(FlowPolicy):
    """See the module's docstring. Built on the CPU; weights are LeRobot's, or depend on torch's global seed."""

    Config: ClassVar[type[VLAConfig]] = VLAConfig
    starts_fresh = ("noise.", "steer.")
    """Parts that an initial checkpoint may lack."""

    def __init__(self, config: VLAConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, config.eta, config.trained_steps)
        if not config.pretrained:
            raise UserError(
                f"policy.name={config.name} needs policy.pretrained: a LeRobot checkpoint (a "
                "folder, or an id of the Hugging Face hub such as lerobot/smolvla_base)."
            )
        lerobot_io.require()
        # Without data, on the meta device, nothing but the architecture is wanted: an estimate of
        # memory.
        self._blank = torch.get_default_device().type == "meta"
        folder = lerobot_io.find(config.pretrained, config.revision, weights=not self._blank)
        self._lerobot_config = self._configure(folder)
        keys = lerobot_io.camera_keys(self._lerobot_config, spec, config.cameras, folder)
        lerobot = lerobot_io.build(self._lerobot_config)
        if not (config.random_weights or self._blank):
            lerobot_io.read_weights(lerobot, folder)
        if config.lora_rank:
            add_adapters(lerobot, config.lora_rank, language=config.train == "language")
        self.net = NETS[config.name](lerobot)
        self._set_precision()
        self._store = PrefixStore(config.keep_prefixes) if config.keep_prefixes else None
        self.register_load_state_dict_post_hook(VLA._forget)
        if config.horizon > self.flow_shape[0]:
            raise UserError(
                f"policy.horizon is {config.horizon}, but {folder} plans {self.flow_shape[0]} "
                "actions. Lower it, or set policy.chunk_size too."
            )
        with torch.device("cpu"):
            self.processors = self._processors(folder, keys)
        self.normalize_action = ActionNormalizer(self.processors)
        width = self.net.width
        self.noise = (
            nn.Linear(width, self.flow_shape[1]) if config.transition == "flow_noise" else None
        )
        if self.noise is not None:
            nn.init.zeros_(self.noise.weight)
            nn.init.zeros_(self.noise.bias)
        self.add_heads(self.net.pooled_width + spec.proprio_dim)
        self._frozen = [p for p in self.net.parameters() if not p.requires_grad]
        self.eval()

    def _configure(self, folder: Path) -> Any:
        """LeRobot's config, with this env's features and this run's choices."""
        c = self.config
        config = lerobot_io.read_config(
            folder, c.name, weights=not (c.random_weights or self._blank)
        )
        for key in ("use_relative_actions", "adapt_to_pi_aloha"):
            if getattr(config, key, False):
                raise UserError(
                    f"{folder} was trained with {key}, which the envs here do not give. Use "
                    "another one."
                )
        lerobot_io.set_features(config, self.spec, keep_cameras=not c.random_weights)
        config.device = "meta" if self._blank else "cpu"
        config.compile_model = False
        config.gradient_checkpointing = False
        config.rtc_config = None
        config.freeze_vision_encoder = c.train != "all"
        config.train_expert_only = c.train == "expert"
        if c.vlm and hasattr(config, "vlm_model_name"):
            config.vlm_model_name = c.vlm
        if c.keep_prefixes and hasattr(config, "train_state_proj"):
            config.train_state_proj = False
        chunk = c.chunk_size or (c.horizon if c.random_weights else config.chunk_size)
        config.chunk_size = chunk
        config.n_action_steps = min(c.horizon, chunk)
        # An export samples as it was trained.
        setattr(
            config,
            "num_steps" if hasattr(config, "num_steps") else "num_inference_steps",
            c.num_denoise_steps,
        )
        return config

    def _processors(self, folder: Path, keys: dict[str, str]) -> Processors:
        c = self.config
        spec = self.spec
        config = self._lerobot_config
        make = lerobot_io.make_processors if c.random_weights else lerobot_io.read_processors
        processors = Processors(*make(config, folder, c.vlm), keys)
        processors.set_features({**config.input_features, **config.output_features})
        for key, dims, what in (
            (STATE, spec.proprio_dim, "proprio"),
            (ACTION, spec.action_dim, "action"),
        ):
            if (found := processors.dims(key)) not in (None, dims):
                processors.forget(key)
                processors.refused = (
                    f"{folder} was trained on {found} {what} dims, and {spec.name} has {dims}. "
                    "Fine-tune it on demonstrations of this env first (algorithm.name=sft), which "
                    "sets its normalisation too."
                )
        return processors

    def _set_precision(self) -> None:
        if self.config.precision == "bfloat16":
            self.net.halve()
        for p in self.net.parameters():
            if p.requires_grad:  # small steps would be rounded away in bfloat16
                p.data = p.data.float()

    def _forget(self, _: Any) -> None:
        if self._store is not None:
            self._store.clear()

    @property
    def flow_shape(self) -> tuple[int, int]:
        """(C, D): LeRobot's chunk and its padded width."""
        return self.net.chunk_shape

    def actor_parameters(self) -> list[nn.Parameter]:
        """What ``config.train`` names, and the learned noise."""
        frozen = set(self._frozen)
        return [p for p in super().actor_parameters() if p not in frozen]

    def encode(self, obs: Obs) -> Prefix:
        """The prefix and its keys and values, once per observation."""
        batch = self.processors(obs)
        if self._store is None:
            return self._prefix(batch)
        with torch.no_grad():
            return self._store.get(batch, self._prefix)

    def _prefix(self, batch: dict[str, Any]) -> Prefix:
        with self._autocast():
            return self.net.prefix(batch)

    def _features(self, context: Prefix, x: Tensor, t: Tensor) -> Float[Tensor, "n k c w"]:
        """The expert's last hidden states."""

        def compute(x: Tensor, t: Tensor) -> Tensor:
            with self._autocast():
                return self.net.features(context, x, t)

        x = pad(x, self.flow_shape)
        if not (self.config.checkpointing and torch.is_grad_enabled()):
            return compute(x, t)
        steps = zip(x.split(1, dim=1), t.split(1, dim=1), strict=True)
        parts = [cast(Tensor, checkpoint(compute, *step, use_reentrant=False)) for step in steps]
        return torch.cat(parts, dim=1)

    def _autocast(self) -> torch.autocast:
        device = next(self.critic.parameters()).device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.config.precision == "bfloat16")

    def velocity(self, context: Prefix, x: Tensor, t: Tensor) -> Tensor:
        """The velocity at x (N, K, C, D), or (N, K, H, A) with nothing but zeros beyond; of x's shape.

        Times t are (N, K), or (N, K, C) for a policy with ``max_prefix``.
        """
        features = self._features(context, x, t)
        return self.net.velocity(features)[..., : x.shape[-2], : x.shape[-1]]

    def step_inputs(self, context: Prefix, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity and, for Flow-Noise, the log-std, both of x's shape."""
        c = self.config
        features = self._features(context, x, t)
        cut = (..., slice(x.shape[-2]), slice(x.shape[-1]))
        velocity = self.net.velocity(features)[cut]
        if self.noise is None:
            return velocity, None
        scale = c.num_denoise_steps**-0.5
        return velocity, squash_log_std(
            self.noise(features)[cut], c.noise_min * scale, c.noise_max * scale
        )

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Normalises by the statistics of demonstrations, as LeRobot's fine-tuning does."""
        if self.config.horizon != self.flow_shape[0]:
            raise UserError(
                f"Imitation learns whole chunks: set policy.horizon={self.flow_shape[0]}, which is "
                "what this model plans (or policy.chunk_size to what you want). Later runs may "
                "execute fewer."
            )
        self.processors.fit(proprio, actions)

    def save_lerobot(self, folder: str | Path) -> Path:
        """Writes a checkpoint that LeRobot's own ``from_pretrained`` loads."""
        return lerobot_io.write(without_adapters(self.net.lerobot), self.processors, folder)

    def train(self, mode: bool = True) -> VLA:
        """Nothing changes: dropout would make a path's probability differ from when it was sampled."""
        return super().train(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> VLA:
        """A copy that shares the frozen weights: of a model of 3 billion most are."""
        memo |= {id(p): p for p in self._frozen}
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return twin


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
