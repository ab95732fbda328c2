"""A small flow-matching vision-language-action policy: images, instruction and proprio in, an action chunk out.

    images --FilmCNN--> tokens --+
    instruction --TextEncoder----+--> context --> ActionExpert: velocity(x, t), K steps from noise
    to actions proprio --MLP----------------+

Sized by its config from under 1 M to over 100 M parameters, on the same code path.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import squash_log_std
from embodyrl.policies.action_expert import ActionExpert, Context
from embodyrl.policies.efficientnet import EfficientNetEncoder
from embodyrl.policies.flow_base import FlowPolicy, check_sampler
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.text import TextEncoder
from embodyrl.policies.vision import FilmCNN
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class FlowVLAConfig:
    """Size and sampler of a ``FlowVLA``.

    Attributes:
        name: registry name.
        horizon: H, actions in a chunk.
        num_denoise_steps: K.
        width: of the transformer; a multiple of ``heads``.
        layers: of the action expert.
        heads: attention heads.
        action_patch: actions per token of the expert; must divide the horizon.
        max_prefix: imitation gives the first 0 to so many actions of a chunk instead of asking for
            them, so that a robot's next chunk can be told what will have been done when it arrives
            (arXiv:2512.05964); needs ``action_patch=1``.
        vision: the image encoder: ``film_cnn``, trained from nothing, or ``efficientnet_lite0``,
            with ImageNet weights.
        vision_frozen: with ``efficientnet_lite0``, leave the pretrained layers as they are.
        vision_width: channels of the image encoder, and keypoints per camera.
        text_layers: of the instruction encoder.
        context_layers: transformer layers over all context tokens before the expert; 0 for small
            models.
        transition: how a step draws noise when training: ``flow_sde``, ``flow_cps`` or
            ``flow_noise``, whose std is learned and depends on observation, step and noisy chunk.
        eta: noise level of ``flow_sde`` and ``flow_cps``.
        noise_min: of ``flow_noise``, in units of the data's standard deviation: the std of one step
            lies in [noise_min, noise_max] / sqrt(K), so that the noise of a whole path does not
            depend on K. The defaults span what ``flow_sde`` draws at eta .5.
        noise_max: see there.
        trained_steps: ``all`` steps draw noise and are trained, or ``one`` drawn at random per env.
        critic: what the value head sees: ``privileged`` simulator state, or ``shared`` features of
            the actor (no gradient into them).
        critic_width: of its two hidden layers.
        steer_width: hidden width of a policy over the initial noise, which DSRL trains; 0 for none.
        steer_bound: it chooses noise in [-steer_bound, steer_bound].
    """

    name: str = "flow_vla"
    horizon: int = 5
    num_denoise_steps: int = 4
    width: int = 96
    layers: int = 2
    heads: int = 4
    action_patch: int = 5
    max_prefix: int = 0
    vision: str = "film_cnn"
    vision_frozen: bool = False
    vision_width: int = 32
    text_layers: int = 1
    context_layers: int = 0
    transition: str = "flow_sde"
    eta: float = 0.5
    noise_min: float = 0.3
    noise_max: float = 1.0
    trained_steps: str = "all"
    critic: str = "privileged"
    critic_width: int = 256
    steer_width: int = 0
    steer_bound: float = 1.5

    def __post_init__(self) -> None:
        if self.vision not in (valid := ("film_cnn", "efficientnet_lite0")):
            raise UserError(
                f"policy.vision is {self.vision!r}; it must be one of {', '.join(valid)}."
            )
        check_sampler(self)
        if self.vision == "film_cnn":
            refuse_unread(
                self, "policy", ("vision_frozen",), "vision=film_cnn has no pretrained layers"
            )
        if self.max_prefix and (self.action_patch != 1 or not 0 < self.max_prefix < self.horizon):
            raise UserError(
                f"policy.max_prefix is {self.max_prefix}: it needs policy.action_patch=1, so that "
                f"each action has a time of its own, and must leave some of the {self.horizon} "
                "actions of a chunk to be asked for."
            )
        if self.horizon % self.action_patch:
            raise UserError(
                f"policy.action_patch {self.action_patch} does not divide policy.horizon "
                f"{self.horizon}."
            )
        if self.width % (2 * self.heads):
            raise UserError(
                f"policy.width {self.width} is not an even multiple of policy.heads {self.heads}."
            )


class FlowVLA(FlowPolicy):
    """The policy and its critic; see the module's docstring."""

    Config = FlowVLAConfig
    starts_fresh = ("expert.noise.", "steer.")
    """Parts that an initial checkpoint may lack: imitation learns no noise, whose std begins mid-range."""
    belongs_to: ClassVar = {"critic": ("critic.", "normalize_privileged.")}
    """Parts of a setting: with another value of it than an initial checkpoint's they start fresh."""

    def __init__(self, config: FlowVLAConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, config.eta, config.trained_steps)
        c = config
        d = config.width
        self.normalize_action = Normalizer(spec.action_dim, min_std=0.05)
        self.normalize_proprio = Normalizer(spec.proprio_dim)
        self.text = TextEncoder(d, c.text_layers, c.heads)
        self.proprio = nn.Sequential(nn.Linear(spec.proprio_dim, d), nn.SiLU(), nn.Linear(d, d))
        pooled = [d, d]
        if spec.cameras:
            self.vision = _vision(c)
            tokens = {name: self.vision.num_tokens(size) for name, size in spec.cameras.items()}
            self.camera = nn.ParameterDict(
                {name: nn.Parameter(torch.randn(n, d) * 0.02) for name, n in tokens.items()}
            )
            pooled += [2 * self.vision.num_keypoints] * len(spec.cameras)
        # Each source is brought to the same scale first, or the largest would drown the others
        # early in training.
        self.pool_norms = nn.ModuleList(nn.LayerNorm(dim) for dim in pooled)
        self.pool = nn.Sequential(nn.Linear(sum(pooled), 2 * d), nn.SiLU(), nn.Linear(2 * d, d))
        layer = nn.TransformerEncoderLayer(
            d, c.heads, 4 * d, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.mixer = nn.TransformerEncoder(layer, c.context_layers, enable_nested_tensor=False)
        self.expert = ActionExpert(
            d,
            c.layers,
            c.heads,
            c.horizon,
            spec.action_dim,
            c.action_patch,
            noise=c.transition == "flow_noise",
        )
        self.add_heads(d)

    def encode(self, obs: Obs) -> Context:
        """What the denoising steps need of an observation, once per observation."""
        tokens, mask, pooled = self.text(obs.instruction)
        proprio = self.proprio(self.normalize_proprio(obs.proprio))
        all_tokens = [tokens, proprio[:, None]]
        all_pooled = [pooled, proprio]
        for name in self.spec.cameras:
            image_tokens, keypoints = self.vision(obs.images[name], pooled)
            all_tokens.append(image_tokens + self.camera[name])
            all_pooled.append(keypoints)
        x = torch.cat(all_tokens, dim=1)
        full_mask = torch.cat([mask, mask.new_ones(len(x), x.shape[1] - mask.shape[1])], dim=1)
        if self.config.context_layers:
            x = self.mixer(x, src_key_padding_mask=full_mask == 0)
        normed = [norm(part) for norm, part in zip(self.pool_norms, all_pooled, strict=True)]
        return self.expert.prefix(x, full_mask, self.pool(torch.cat(normed, dim=-1)))

    def velocity(
        self, context: Context, x: Float[Tensor, "n k h a"], t: Float[Tensor, "n k *h"]
    ) -> Float[Tensor, "n k h a"]:
        """The learned velocity noise - action, in normalised units; each token of actions may have a time t."""
        return self.expert(context, x, t)

    def step_inputs(self, context: Context, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """Velocity and, for Flow-Noise, the log-std: what ``DenoisingTransition`` takes."""
        c = self.config
        if c.transition != "flow_noise":
            return self.velocity(context, x, t), None
        velocity, raw = self.expert.with_noise(context, x, t)
        scale = c.num_denoise_steps**-0.5
        return velocity, squash_log_std(raw, c.noise_min * scale, c.noise_max * scale)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Normalises by the statistics of demonstrations: proprio (B, P) and actions (B, A)."""
        self.normalize_proprio.fit(proprio)
        self.normalize_action.fit(actions)


def _vision(c: FlowVLAConfig) -> FilmCNN | EfficientNetEncoder:
    if c.vision == "efficientnet_lite0":
        return EfficientNetEncoder(
            c.vision_width, c.width, text_dim=c.width, frozen=c.vision_frozen
        )
    return FilmCNN(c.vision_width, c.width, text_dim=c.width)
