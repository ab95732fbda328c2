"""A small flow policy for states: proprioception in, an action chunk out.

It sees no images and no language, and serves for locomotion and for ablations.

    proprio (N, P) --normalise--> features (N, P) --+
    noise (N, H, A) --------------------------------+--> net: velocity(features, x, t), K steps
                                                    --> x_K --tanh--> actions (N, H, A)

Velocity, learned noise and squashing follow SAC Flow (arXiv:2509.25756). With one step and
``velocity=gaussian`` it is the policy of plain SAC (arXiv:1801.01290).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from jaxtyping import Float
from torch import Tensor

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.flow import LEARNED_STD, squash_log_std
from embodyrl.policies.chooser import CHOOSER_PARTS, ChooserConfig, check_chooser
from embodyrl.policies.flow_base import FlowPolicy
from embodyrl.policies.flow_checks import check_executed, check_shortcut, check_start
from embodyrl.policies.mlp_velocities import VELOCITIES, mlp
from embodyrl.policies.normalize import Normalizer, TanhSquash
from embodyrl.policies.one_step import ONE_STEP_PARTS
from embodyrl.ranges import Choice, Count, CountOrZero, Positive, Share
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class FlowMLPConfig(ChooserConfig):
    """Size and sampler of a ``FlowMLP``.

    Attributes:
        name: registry name.
        horizon: C, actions in a chunk.
        execute: H, how many of them are executed before the next observation; 0 for all.
        num_denoise_steps: K.
        shortcut_steps: a shortcut policy: the velocity net is told the size of its step, and imitation
            teaches it steps of 1, 1/2, 1/4 and so on down to 1/``shortcut_steps``. The same weights
            then act with any such ``num_denoise_steps``. 0 for an ordinary flow.
        velocity: ``plain``, ``gated``, ``decoded`` (see ``policies/mlp_velocities.py``), or
            ``gaussian`` for plain SAC.
        width: of the hidden layers.
        layers: number of hidden layers, or of blocks of the decoder.
        transition: how a step draws noise: ``flow_noise`` adds it to the ODE's step;
            ``flow_sde_learned`` also corrects the drift, which keeps the marginal distributions of
            the ODE if the noise is small (``noise_max`` of .3 or less).
        noise_min: the std of one step lies in [noise_min, noise_max] / sqrt(K), before squashing.
        noise_max: see ``noise_min``.
        squash: True: actions are tanh of the path's end. False: they are the path's end in the
            data's units, clipped.
        critic_width: of the value head's two hidden layers, for PPO. (SAC brings its own critics.)
        start_noise: standard deviation of the initial noise of noise-free chunks: in evaluation, on
            a robot, and of proposals. The flow has learned from 1; less makes the policy more
            decided.
        steer_width: hidden width of the noise policy, which DSRL trains; 0 for none.
        steer_bound: the noise policy chooses noise in [-steer_bound, steer_bound].
        one_step_width: hidden width of the head that acts in one step, which FQL trains; 0 for
            none.
    """

    name: str = "flow_mlp"
    horizon: Count = 1
    execute: CountOrZero = 0
    num_denoise_steps: Count = 4
    shortcut_steps: CountOrZero = 0
    velocity: Annotated[str, Choice(*VELOCITIES)] = "gated"
    width: Count = 256
    layers: Count = 2
    transition: Annotated[str, Choice(*LEARNED_STD)] = "flow_noise"
    noise_min: Positive = 0.05
    noise_max: Positive = 1.0
    squash: bool = True
    critic_width: Count = 256
    start_noise: Share = 1.0
    steer_width: CountOrZero = 0
    steer_bound: Positive = 1.5
    one_step_width: CountOrZero = 0

    def __post_init__(self) -> None:
        if self.noise_min > self.noise_max:
            raise UserError(
                f"policy.noise_min is {self.noise_min}; it must not be above policy.noise_max, "
                f"which is {self.noise_max}."
            )
        check_start(self)
        check_shortcut(self)
        check_chooser(self)
        check_executed(self)
        if self.velocity == "gaussian" and (
            self.num_denoise_steps != 1 or self.transition != "flow_noise"
        ):
            raise UserError(
                "policy.velocity=gaussian is one step from noise to a Gaussian around the mean: "
                "set policy.num_denoise_steps=1 and policy.transition=flow_noise as well."
            )
        if self.velocity == "gaussian":
            why = "velocity=gaussian acts by its mean, whatever the initial noise"
            refuse_unread(self, "policy", ("start_noise", "shortcut_steps"), why)


class FlowMLP(FlowPolicy):
    """The policy and its value head; see the module's docstring."""

    Config = FlowMLPConfig
    starts_fresh = ("steer.", "net.step.", "net.decoder.step.")
    reads_instructions = False
    """Parts that may be missing in an initial checkpoint. They then keep their fresh weights."""
    belongs_to: ClassVar = CHOOSER_PARTS | ONE_STEP_PARTS
    """Config key -> parts that keep their fresh weights if the initial checkpoint has another."""

    def __init__(self, config: FlowMLPConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        if spec.cameras or len(spec.tasks) > 1:
            raise UserError(
                f"flow_mlp sees neither pictures nor instructions, but {spec.name} has cameras "
                f"({len(spec.cameras)}) or several tasks ({len(spec.tasks)}). Use "
                "policy.name=flow_vla."
            )
        # Inputs and outputs are normalised. The clip of the inputs is wide: while a cheetah learns
        # to run, its velocities become much larger than in the first rollout.
        c = config
        self.normalize_proprio = Normalizer(spec.proprio_dim, clip=100.0)
        if c.squash:
            self.normalize_action = TanhSquash()
        else:
            self.normalize_action = Normalizer(spec.action_dim, min_std=0.05)
        # The velocity net and the value head; the features of both are the normalised proprio.
        velocity = VELOCITIES[c.velocity]
        told = {"shortcut": True} if c.shortcut_steps else {}
        self.net = velocity(spec.proprio_dim, c.horizon, spec.action_dim, c.width, c.layers, **told)
        self.add_heads(spec.proprio_dim, mlp(spec.proprio_dim, c.critic_width, 2, 1))

    def encode(self, obs: Obs) -> Float[Tensor, "n p"]:
        """The context is the normalised proprioception itself."""
        return self.normalize_proprio(obs.proprio)

    def summary(self, context: Float[Tensor, "n p"]) -> Float[Tensor, "n p"]:
        """See ``FlowPolicy.summary``: critics see what the actor sees."""
        return context

    def velocity(
        self,
        context: Float[Tensor, "n p"],
        x: Float[Tensor, "n k h a"],
        t: Float[Tensor, "n k"],
        d: Tensor | None = None,
    ) -> Float[Tensor, "n k h a"]:
        """The velocity, noise - action, in units before squashing; for d see ``step_size``."""
        return self.net(context, x, t, *self.step_size(t, d))[0]

    def step_inputs(
        self,
        context: Float[Tensor, "n p"],
        x: Float[Tensor, "n k h a"],
        t: Float[Tensor, "n k"],
    ) -> tuple[Float[Tensor, "n k h a"], Float[Tensor, "n k h a"]]:
        """Velocity and log-std of one denoising step from x at times t."""
        velocity, raw_log_std = self.net(context, x, t, *self.step_size(t))
        # The noise of a whole path grows with K, so that of one step is scaled by 1/sqrt(K).
        scale = self.config.num_denoise_steps**-0.5
        low = self.config.noise_min * scale
        high = self.config.noise_max * scale
        return velocity, squash_log_std(raw_log_std, low, high)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations: proprio (B, P) and actions (B, A).

        The tanh of squashed actions has nothing to set.
        """
        self.normalize_proprio.fit(proprio)
        self.normalize_action.fit(actions)
