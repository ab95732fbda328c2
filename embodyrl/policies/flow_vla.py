"""A small vision-language-action policy with flow matching.

Images, instruction and proprioception go in, an action chunk comes out. For N observations, tokens
of width d and chunks (H, A):

    observation --ObservationTokens--> context: C tokens (N, C, d), and their summary (N, d)
    context     --ActionExpert.prefix--> keys and values
    ActionExpert: velocity(x, t) in K steps from noise (N, H, A) to actions (N, H, A)

The config sets the size, from under 1 M to over 100 M parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import squash_log_std
from embodyrl.policies.action_expert import ActionExpert, Context
from embodyrl.policies.actor_critic import BELONGS_TO, CRITICS
from embodyrl.policies.chooser import ChooserConfig
from embodyrl.policies.flow_base import FlowPolicy
from embodyrl.policies.flow_checks import TRAINED_STEPS, TRANSITIONS, check_sampler, check_shortcut
from embodyrl.policies.normalize import Normalizer
from embodyrl.policies.observation_tokens import VISION_ENCODERS, ObservationTokens
from embodyrl.policies.one_step import ONE_STEP_PARTS
from embodyrl.policies.thinker import check_thoughts
from embodyrl.ranges import Choice, Count, CountOrZero, NotNegative, Positive, Share
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class FlowVLAConfig(ChooserConfig):
    """Size and sampler of a ``FlowVLA``.

    Attributes:
        name: registry name.
        horizon: C, actions in a chunk.
        execute: H, how many of them are executed before the next observation; 0 for all.
        num_denoise_steps: K.
        shortcut_steps: a shortcut policy: the velocity net is told the size of its step, and imitation
            teaches it steps of 1, 1/2, 1/4 and so on down to 1/``shortcut_steps``. The same weights
            then act with any such ``num_denoise_steps``. 0 for an ordinary flow.
        width: d, of the transformers; an even multiple of ``heads``.
        layers: of the action expert.
        heads: attention heads.
        action_patch: actions per token of the expert; must divide the horizon.
        max_prefix: imitation gives the first 0 to ``max_prefix`` actions of a chunk as an input
            instead of predicting them. A robot can then hand over the actions that will be
            executed while the next chunk is computed (arXiv:2512.05964). Needs ``action_patch=1``.
        vision: the image encoder: ``film_cnn``, trained from random weights, or
            ``efficientnet_lite0``, with ImageNet weights.
        vision_frozen: do not train the pretrained layers of ``efficientnet_lite0``.
        vision_width: channels of the image encoder, and keypoints per camera.
        text_layers: of the instruction encoder.
        context_layers: transformer layers over all context tokens before the expert; 0 for small
            models.
        transition: how a step draws noise when training: ``flow_sde``, ``flow_cps`` or
            ``flow_noise``, whose std is learned and depends on observation, step and noisy chunk.
        eta: noise level of ``flow_sde`` and ``flow_cps``.
        noise_min: of ``flow_noise``, in units of the data's standard deviation. The std of one step
            lies in [noise_min, noise_max] / sqrt(K), so that the noise of a whole path does not
            depend on K. The defaults cover the noise of ``flow_sde`` at eta .5.
        noise_max: see ``noise_min``.
        trained_steps: ``all`` steps draw noise and are trained, or ``one`` drawn at random per env.
        critic: what the value head sees: ``shared`` features of the actor (no gradient into them),
            what hindsight has ``found`` in pictures beside proprioception and instruction, or
            ``privileged`` simulator state, which no robot has.
        critic_width: of the value head's two hidden layers.
        start_noise: standard deviation of the initial noise of noise-free chunks: in evaluation, on
            a robot, and of proposals. The flow has learned from 1; less makes the policy more
            decided.
        steer_width: hidden width of the noise policy, which DSRL trains; 0 for none.
        steer_bound: the noise policy chooses noise in [-steer_bound, steer_bound].
        one_step_width: hidden width of the head that acts in one step, which FQL trains; 0 for
            none.
        thoughts: the most latent thoughts between observation and action (LaST-R1,
            arXiv:2604.28192). The policy learns how many it has. PPO and GRPO optimise them
            together with the action; 0 for none.
        thought_width: numbers in a thought.
        thought_cost: weight in imitation of a thought's cost, one nat and what it says (see
            ``functional.thinking``).
    """

    name: str = "flow_vla"
    horizon: Count = 5
    execute: CountOrZero = 0
    num_denoise_steps: Count = 4
    shortcut_steps: CountOrZero = 0
    width: Count = 96
    layers: Count = 2
    heads: Count = 4
    action_patch: Count = 5
    max_prefix: CountOrZero = 0
    vision: Annotated[str, Choice(*VISION_ENCODERS)] = "film_cnn"
    vision_frozen: bool = False
    vision_width: Count = 32
    text_layers: CountOrZero = 1
    context_layers: CountOrZero = 0
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
    one_step_width: CountOrZero = 0
    thoughts: CountOrZero = 0
    thought_width: Count = 16
    thought_cost: NotNegative = 0.001

    def __post_init__(self) -> None:
        check_sampler(self)
        check_shortcut(self)
        check_thoughts(self)
        if self.shortcut_steps:
            why = "shortcut_steps learns steps from noise alone, without given actions"
            refuse_unread(self, "policy", ("max_prefix",), why)
        if self.vision == "film_cnn":
            refuse_unread(
                self, "policy", ("vision_frozen",), "vision=film_cnn has no pretrained layers"
            )
        if self.max_prefix and (self.action_patch != 1 or not 0 < self.max_prefix < self.horizon):
            raise UserError(
                f"policy.max_prefix is {self.max_prefix}. It needs policy.action_patch=1, so that "
                "each action has its own time, and it must be smaller than policy.horizon "
                f"{self.horizon}, so that some actions are left to predict."
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


class FlowVLA(ObservationTokens, FlowPolicy):
    """The policy and its critic; see the module's docstring."""

    Config = FlowVLAConfig
    starts_fresh = ("expert.noise.", "expert.step.", "steer.", "thinker.")
    """Parts that may be missing in an initial checkpoint, which was made without them.

    They then keep their fresh weights. A fresh std of the noise is in the middle of its range.
    """
    belongs_to = BELONGS_TO | ONE_STEP_PARTS

    def __init__(self, config: FlowVLAConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec, config.eta, config.trained_steps)
        c = config
        d = config.width
        self.normalize_action = Normalizer(spec.action_dim, min_std=0.05)
        self.add_encoders(c, spec)
        # The transformer that mixes the context tokens, then the action expert.
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
            shortcut=c.shortcut_steps > 0,
        )
        self.add_heads(d)

    def look(self, obs: Obs) -> Context:
        """The context of the denoising steps; it is computed once per observation."""
        x, mask, pooled = self.observe(obs)
        if self.config.context_layers:
            x = self.mixer(x, src_key_padding_mask=mask == 0)
        context = self.expert.prefix(x, mask, pooled)
        return context if self.thinker is None else replace(context, seen=pooled)

    def after_thought(self, context: Context, z: Float[Tensor, "n *k w"]) -> Context:
        """See ``FlowPolicy.after_thought``: the thought is an offset of the summary."""
        assert self.thinker is not None and context.seen is not None
        seen = context.seen if z.ndim == 2 else context.seen[:, None]
        return replace(context, pooled=seen + self.thinker.told(z))

    def velocity(
        self,
        context: Context,
        x: Float[Tensor, "n k h a"],
        t: Float[Tensor, "n k *h"],
        d: Tensor | None = None,
    ) -> Float[Tensor, "n k h a"]:
        """The learned velocity, noise - action, in normalised units.

        Args:
            context: of N observations.
            x: (N, K, H, A) noisy chunks.
            t: (N, K) their times; or (N, K, H), a time for each action (``max_prefix``).
            d: sizes of the steps; see ``step_size``.
        """
        return self.expert(context, x, t, *self.step_size(t, d))

    def step_inputs(
        self, context: Context, x: Float[Tensor, "n k h a"], t: Float[Tensor, "n k"]
    ) -> tuple[Float[Tensor, "n k h a"], Float[Tensor, "n k h a"] | None]:
        """What ``DenoisingTransition`` takes: velocity and, for Flow-Noise, the log-std."""
        c = self.config
        if c.transition != "flow_noise":
            return self.velocity(context, x, t), None
        velocity, raw_log_std = self.expert.with_noise(context, x, t, *self.step_size(t))
        # The noise of a whole path grows with K, so that of one step is scaled by 1/sqrt(K).
        scale = c.num_denoise_steps**-0.5
        return velocity, squash_log_std(raw_log_std, c.noise_min * scale, c.noise_max * scale)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations: proprio (B, P) and actions (B, A)."""
        self.normalize_proprio.fit(proprio)
        self.normalize_action.fit(actions)
