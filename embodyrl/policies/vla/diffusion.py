"""Diffusion Policy (arXiv:2303.04137) as LeRobot has it, with the density of its denoising chain.

    obs --Processors, encoders--> condition (N, F)
    noise (N, C, A) --K steps of the U-Net--> x_K --first H rows, Processors.unnormalize--> actions

The steps are those of ``functional.diffusion``. Without noise they are LeRobot's with a DDIM
scheduler; with ``eta=1`` and ``noise_min=0`` those with its DDPM scheduler. Sampling, scoring and
the heads are those of every denoising policy (``flow_base.py``). PPO on the noisy chain is DPPO
(arXiv:2409.00588).

LeRobot plans from the oldest of the n observations that it sees. Here the flow's state begins with
the present action; the n - 1 earlier ones stand at its end, and are not executed. Imitation takes
them from the demonstrations, as LeRobot's does (``action_delta_indices`` of its config), and like it
leaves out the last frames of every episode (``drop_n_last_frames``).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from embodyrl.errors import UserError, refuse_unread
from embodyrl.functional.diffusion import DiffusionTransition
from embodyrl.policies.actor_critic import BELONGS_TO, CRITICS
from embodyrl.policies.chooser import check_chooser
from embodyrl.policies.flow_base import FlowPolicy
from embodyrl.policies.flow_checks import TRAINED_STEPS, check_executed, check_start
from embodyrl.policies.sample_path import integrate
from embodyrl.policies.vla.fixed_size import FixedSizeConfig, read_fixed_size
from embodyrl.policies.vla.lerobot_io import write_checkpoint
from embodyrl.policies.vla.processors import STATE, ActionNormalizer
from embodyrl.ranges import Choice, Count, CountOrZero, NotNegative, Positive, Share
from embodyrl.types import EnvSpec, Obs


@dataclass(frozen=True)
class DiffusionConfig(FixedSizeConfig):
    """What to load, and how to sample.

    Attributes:
        num_denoise_steps: K; 0 for as many as the checkpoint takes.
        eta: noise of a step when training; 0 is DDIM, 1 is DDPM.
        noise_min: smallest std of such a step, in normalised units (DPPO).
        trained_steps: ``all`` steps draw noise and are trained, or ``one`` drawn at random per env.
        critic: what the value head sees: ``shared``, the encoded observation (no gradient into it),
            what hindsight has ``found`` in pictures, or ``privileged`` simulator state.
        critic_width: of the value head's two hidden layers.
        start_noise: standard deviation of the initial noise of noise-free chunks: in evaluation, on
            a robot, and of proposals. The flow has learned from 1; less makes the policy more
            decided.
        steer_width: hidden width of the noise policy, which DSRL trains; 0 for none.
        steer_bound: the noise policy chooses noise in [-steer_bound, steer_bound].
    """

    name: str = "diffusion"
    num_denoise_steps: CountOrZero = 0
    eta: Share = 1.0
    noise_min: NotNegative = 0.1
    trained_steps: Annotated[str, Choice(*TRAINED_STEPS)] = "all"
    critic: Annotated[str, Choice(*CRITICS)] = "shared"
    critic_width: Count = 256
    start_noise: Share = 1.0
    steer_width: CountOrZero = 0
    steer_bound: Positive = 1.5

    def __post_init__(self) -> None:
        if not self.eta:
            refuse_unread(self, "policy", ("noise_min",), "eta=0 draws no noise")
        check_start(self)
        check_chooser(self)
        check_executed(self)


@dataclass
class Condition:
    """N encoded observations: what the U-Net is conditioned on."""

    pooled: Float[Tensor, "n f"]


class DiffusionPolicy(FlowPolicy):
    """See the module's docstring.

    It has no ``velocity``: what its network predicts is noise or data at one of LeRobot's times, so
    algorithms that need a flow (NFT, FPO, SAC-Flow) refuse it.
    """

    Config = DiffusionConfig
    reads_instructions = False
    reads_history = True
    starts_fresh = ("steer.",)
    belongs_to = BELONGS_TO
    transition: DiffusionTransition  # pyright: ignore[reportIncompatibleVariableOverride]
    timesteps: Tensor
    alphas: Tensor

    def __init__(self, config: DiffusionConfig, spec: EnvSpec) -> None:
        # LeRobot's policy, whose sampler is that of the noise-free steps here: an export then acts
        # in LeRobot as it was evaluated.
        packages = ("diffusers", "lerobot.policies.diffusion.modeling_diffusion")
        settings: dict[str, Any] = {"noise_scheduler_type": "DDIM", "compile_model": False}
        if config.num_denoise_steps:
            settings["num_inference_steps"] = config.num_denoise_steps
        loaded = read_fixed_size(config, spec, "horizon", packages, **settings)
        theirs = loaded.lerobot.config
        steps = loaded.lerobot.diffusion.num_inference_steps
        if steps > theirs.num_train_timesteps:
            raise UserError(
                f"policy.num_denoise_steps is {steps}, but {config.pretrained} was trained with "
                f"{theirs.num_train_timesteps} times. Take at most that many steps."
            )
        stride = 2 ** len(theirs.down_dims)
        if theirs.horizon % stride:
            past = theirs.n_obs_steps - 1
            raise UserError(
                f"policy.horizon is {loaded.horizon}; with the {past} actions before it, it must "
                f"be a multiple of {stride}, by which the U-Net shortens a chunk."
            )
        if theirs.n_obs_steps > spec.history:
            raise UserError(
                f"{config.pretrained} sees {theirs.n_obs_steps} observations at once "
                f"(n_obs_steps), and {spec.name} shows {spec.history}. Set "
                f"env.history={theirs.n_obs_steps}."
            )
        times, before_after, all_alphas = _schedule(theirs, steps)
        config = dataclasses.replace(
            config, horizon=loaded.horizon, execute=loaded.execute, num_denoise_steps=steps
        )
        transition = DiffusionTransition(
            num_steps=steps,
            eta=config.eta,
            alphas=before_after,
            noise_min=config.noise_min,
            clip=theirs.clip_sample_range if theirs.clip_sample else math.inf,
            predicts=theirs.prediction_type,
        )
        super().__init__(config, spec, trained_steps=config.trained_steps, transition=transition)
        self.lerobot = loaded.lerobot
        self.processors = loaded.processors
        self.normalize_action = ActionNormalizer(loaded.processors)
        self.past = theirs.n_obs_steps - 1
        self.without_last = theirs.drop_n_last_frames
        self.register_buffer("timesteps", torch.tensor(times), persistent=False)
        self.register_buffer("alphas", torch.tensor(all_alphas), persistent=False)
        block = self.net.unet.down_modules[0][0]
        self.add_heads(block.cond_encoder[1].in_features - theirs.diffusion_step_embed_dim)
        self.eval()

    @property
    def net(self) -> Any:
        """LeRobot's networks."""
        return self.lerobot.diffusion

    @property
    def flow_shape(self) -> tuple[int, int]:
        """(C, A) of the flow's state; beyond the config's C there are ``past`` earlier actions."""
        return self.config.horizon + self.past, self.spec.action_dim

    def train(self, mode: bool = True) -> DiffusionPolicy:
        """Stays in evaluation mode: no random crops, and no batch changes another row."""
        return super().train(False)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations, as LeRobot's fine-tuning does."""
        self.processors.fit(proprio, actions)

    def encode(self, obs: Obs) -> Condition:
        """Pictures and proprioception, encoded once per observation."""
        # Dims: (N, n, P) and (N, n, cameras, 3, h, w), the oldest observation first.
        frames = [self.processors(seen) for seen in obs.frames()[-self.past - 1 :]]
        batch = {STATE: torch.stack([frame[STATE] for frame in frames], dim=1)}
        keys = list(self.lerobot.config.image_features)
        pictures = [torch.stack([frame[key] for key in keys], dim=1) for frame in frames]
        batch["observation.images"] = torch.stack(pictures, dim=1)
        return Condition(self.net._prepare_global_conditioning(batch))

    def step_inputs(
        self, context: Condition, x: Float[Tensor, "n k c a"], t: Float[Tensor, "n k"]
    ) -> tuple[Float[Tensor, "n k c a"], None]:
        """What ``DiffusionTransition`` takes: the U-Net's output at the K-step grid's times t."""
        index = ((1.0 - t) * self.transition.num_steps).round().long()
        return self._predict(context, x, self.timesteps[index]), None

    def _predict(
        self, context: Condition, x: Float[Tensor, "n k c a"], times: Tensor
    ) -> Float[Tensor, "n k c a"]:
        """The U-Net's output at LeRobot's integer times (N, K)."""
        n, k = x.shape[:2]
        condition = context.pooled.repeat_interleave(k, dim=0)
        # LeRobot's order: the earlier actions come first.
        ordered = x.flatten(0, 1).roll(self.past, dims=1)
        out = self.net.unet(ordered, times.expand(n, k).flatten(), global_cond=condition)
        return out.roll(-self.past, dims=1).unflatten(0, (n, k))

    @property
    def imitation_noise(self) -> int:
        """See ``policy.DrawsNoise``: of the chunk, of a plan's start, and of the time."""
        return 2 * math.prod(self.flow_shape) + 1

    def imitation_loss(
        self,
        obs: Obs,
        actions: Float[Tensor, "b h a"],
        mask: Bool[Tensor, "b h"],
        noise: Float[Tensor, "b m"],
    ) -> Tensor:
        """LeRobot's loss: the squared error of the prediction at a random time.

        Actions (B, past + C) begin before the observation, as in LeRobot's batches. Others begin
        with the present one: a copy of it stands for the earlier ones. Where they are fewer than C
        nobody knows the rest, so it is the policy's own plan; it has no loss. Beyond the ends of an
        episode the action there is repeated, which is learned unless the checkpoint says
        ``do_mask_loss_for_padding``.
        """
        if not self.lerobot.config.do_mask_loss_for_padding:
            mask = torch.ones_like(mask)
        context = self.encode(obs)
        shape = (len(actions), *self.flow_shape)
        size = math.prod(self.flow_shape)
        chunk_noise = noise[:, :size].view(shape)
        # A uniform number, of which the time is made.
        uniform = torch.special.ndtr(noise[:, -1])
        index = (uniform * len(self.alphas)).long().clamp_max(len(self.alphas) - 1)
        clean, mask = self._padded(context, actions, mask, noise[:, size:-1].view(shape))
        noisy = self.transition.noisy(clean, chunk_noise, self.alphas[index])
        predicted = self._predict(context, noisy[:, None], index[:, None])[:, 0]
        target = chunk_noise if self.transition.predicts == "epsilon" else clean
        error = (predicted - target) ** 2 * mask[..., None]
        return error.sum() / (mask.sum() * error.shape[-1]).clamp_min(1)

    def _padded(
        self, context: Condition, actions: Tensor, mask: Tensor, start: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normalised actions and their mask, as long as the flow's state."""
        given = self.normalize_action(actions)
        # LeRobot's order, in which the earlier actions come first.
        if actions.shape[1] == self.flow_shape[0]:
            return given.roll(-self.past, dims=1), mask.roll(-self.past, dims=1)
        rest = self.config.horizon - actions.shape[1]
        if rest:
            with torch.no_grad():
                plan = integrate(partial(self.step_inputs, context), self.transition, start)
            given = torch.cat([given, plan[:, actions.shape[1] : self.config.horizon]], dim=1)
        mask = nn.functional.pad(mask, (0, rest))
        # Copies of the first stand for the earlier actions, as at the start of an episode.
        given = torch.cat([given, given[:, :1].expand(-1, self.past, -1)], dim=1)
        return given, torch.cat([mask, mask[:, :1].expand(-1, self.past)], dim=1)

    def save_lerobot(self, folder: str | Path) -> Path:
        """Writes a checkpoint that LeRobot's own ``from_pretrained`` loads."""
        return write_checkpoint(self.lerobot, self.processors, folder)


def _schedule(theirs: Any, steps: int) -> tuple[list[int], tuple[float, ...], list[float]]:
    """LeRobot's noise schedule.

    Returns:
        The times of ``steps`` denoising steps, alpha-bar before each and after the last, and
        alpha-bar of all times.
    """
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

    with torch.device("cpu"):
        scheduler = DDIMScheduler(
            num_train_timesteps=theirs.num_train_timesteps,
            beta_start=theirs.beta_start,
            beta_end=theirs.beta_end,
            beta_schedule=theirs.beta_schedule,
        )
        scheduler.set_timesteps(steps)
        times = scheduler.timesteps.tolist()
        alphas = scheduler.alphas_cumprod.tolist()
    # A step ends one stride earlier; the last one ends at the data, where alpha-bar is 1.
    return times, (*(alphas[t] for t in times), 1.0), alphas
