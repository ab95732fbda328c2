"""ACT (arXiv:2304.13705) as LeRobot has it: a transformer that regresses action chunks.

    images, proprioception --encode--> tokens (S, N, D)
    tokens, latent z (N, L) --transformer--> chunk (N, C, A) --first H actions--> actions (N, H, A)

In imitation z comes from an encoder of the demonstrated chunk (a conditional VAE). Without noise it
is 0, as in LeRobot, and the chunk is a function of the observation. What explores and what proposes
draws z from its prior N(0, I). How much the chunks then differ is up to the checkpoint: where
imitation left z without meaning, they are alike.

It has no density, so PPO and GRPO cannot train it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.functional.flow import Generators, randn
from embodyrl.policies.chooser import CHOOSER_PARTS, Chooser, check_chooser
from embodyrl.policies.flow_checks import check_executed
from embodyrl.policies.vla.fixed_size import FixedSizeConfig, read_fixed_size
from embodyrl.policies.vla.lerobot_io import write_checkpoint
from embodyrl.policies.vla.processors import ActionNormalizer
from embodyrl.policy import Mode
from embodyrl.types import ActionSample, EnvSpec, Obs


@dataclass(frozen=True)
class ACTConfig(FixedSizeConfig):
    """Settings of ACT: those of ``FixedSizeConfig``."""

    name: str = "act"

    def __post_init__(self) -> None:
        check_chooser(self)
        check_executed(self)


@dataclass
class Tokens:
    """N encoded observations.

    Attributes:
        tokens: (S, N, D) of proprioception and pictures.
        places: (S, 1, D) their positional embeddings.
        state: (N, P) normalised proprioception.
    """

    tokens: Float[Tensor, "s n d"]
    places: Float[Tensor, "s 1 d"]
    state: Float[Tensor, "n p"]


class ACT(nn.Module):
    """See the module's docstring."""

    Config = ACTConfig
    reads_instructions = False
    belongs_to: ClassVar = CHOOSER_PARTS
    """Config key -> parts that keep their fresh weights if the initial checkpoint has another."""

    def __init__(self, config: ACTConfig, spec: EnvSpec) -> None:
        super().__init__()
        loaded = read_fixed_size(config, spec, "chunk_size", ("lerobot.policies.act.modeling_act",))
        self.config = dataclasses.replace(config, horizon=loaded.horizon, execute=loaded.execute)
        self.spec = spec
        self.lerobot = loaded.lerobot
        self.processors = loaded.processors
        self.normalize_action = ActionNormalizer(loaded.processors)
        theirs = loaded.lerobot.config
        if theirs.temporal_ensemble_coeff is not None:
            raise UserError(
                f"{config.pretrained} averages the chunks of several observations "
                "(temporal_ensemble_coeff), which policies here do not. Set it to null in its "
                "config.json, and say in policy.execute how many actions are executed."
            )
        self.chooser: Chooser | None = None
        if config.chooser_width:
            if not theirs.use_vae:
                raise UserError(
                    f"{config.pretrained} was trained without a latent (use_vae is false), so it "
                    "has one chunk for each observation, and a chooser has nothing to choose from. "
                    "Leave policy.chooser_width out, or use a checkpoint with use_vae."
                )
            self.chooser = Chooser(spec, loaded.execute, config)
        self.eval()

    def train(self, mode: bool = True) -> ACT:
        """Stays in evaluation mode: dropout is off, and no batch changes another row."""
        return super().train(False)

    def actor_parameters(self) -> list[nn.Parameter]:
        """LeRobot's parameters."""
        return list(self.lerobot.parameters())

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the normalisation from demonstrations, as LeRobot's fine-tuning does."""
        self.processors.fit(proprio, actions)

    @property
    def net(self) -> Any:
        """LeRobot's network."""
        return self.lerobot.model

    @property
    def latent_dim(self) -> int:
        """L."""
        return self.lerobot.config.latent_dim

    @property
    def imitation_noise(self) -> int:
        """See ``policy.DrawsNoise``: that of the latent."""
        return self.latent_dim

    @property
    def chooses(self) -> bool:
        """Whether the policy in evaluation is the best of several proposals."""
        return self.chooser is not None and self.config.proposals > 1 and bool(self.chooser.ready)

    def encode(self, obs: Obs) -> Tokens:
        """The tokens of proprioception and pictures."""
        batch = self.processors(obs)
        net = self.net
        state = batch["observation.state"]
        tokens = [net.encoder_robot_state_input_proj(state)[None]]
        # The embedding of the latent comes first, then that of proprioception.
        places = [net.encoder_1d_feature_pos_embed.weight[1:, None]]
        for key in self.lerobot.config.image_features:
            maps = net.backbone(batch[key])["feature_map"]
            # (N, D, h, w) to (h w, N, D).
            tokens.append(net.encoder_img_feat_input_proj(maps).flatten(2).permute(2, 0, 1))
            places.append(net.encoder_cam_feat_pos_embed(maps).flatten(2).permute(2, 0, 1))
        return Tokens(torch.cat(tokens), torch.cat(places), state)

    def chunk(self, context: Tokens, latent: Float[Tensor, "n l"]) -> Float[Tensor, "n c a"]:
        """The chunk of each latent, in normalised units."""
        net = self.net
        tokens = torch.cat([net.encoder_latent_input_proj(latent)[None], context.tokens])
        places = torch.cat([net.encoder_1d_feature_pos_embed.weight[:1, None], context.places])
        memory = net.encoder(tokens, pos_embed=places)
        queries = net.decoder_pos_embed.weight[:, None]
        blank = torch.zeros(len(queries), *tokens.shape[1:], device=tokens.device)
        decoded = net.decoder(blank, memory, encoder_pos_embed=places, decoder_pos_embed=queries)
        return net.action_head(decoded.transpose(0, 1))

    def _actions(self, chunk: Tensor) -> Tensor:
        """The executed actions (N, H, A) in [-1, 1] of a chunk (N, C, A)."""
        executed = chunk[:, : self.config.execute]
        return self.normalize_action.inverse(executed).clamp(-1.0, 1.0)

    def _draw_latent(self, n: int, generator: Generators, device: torch.device) -> Tensor:
        """The latent from its prior; 0 where there is none."""
        z = randn((n, self.latent_dim), generator, device)
        return z if self.lerobot.config.use_vae else torch.zeros_like(z)

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Actor.sample``; ``"train"`` draws the latent, ``"eval"`` takes 0."""
        if mode == "eval" and self.chooser is not None and self.chooses:
            proposals = self.propose(obs, self.config.proposals, generator)
            return ActionSample(self.chooser.best(obs, proposals))
        context = self.encode(obs)
        latent = torch.zeros(len(obs), self.latent_dim, device=context.state.device)
        if mode == "train":
            latent = self._draw_latent(len(obs), generator, latent.device)
        return ActionSample(self._actions(self.chunk(context, latent)))

    @torch.no_grad()
    def propose(self, obs: Obs, count: int, generator: Generators) -> Float[Tensor, "n count h a"]:
        """``count`` chunks for each observation, from as many draws of the latent."""
        context = self.encode(obs)
        device = context.state.device
        draws = [self._draw_latent(len(obs), generator, device) for _ in range(count)]
        return torch.stack([self._actions(self.chunk(context, z)) for z in draws], dim=1)

    def imitation_loss(
        self,
        obs: Obs,
        actions: Float[Tensor, "b h a"],
        mask: Bool[Tensor, "b h"],
        noise: Float[Tensor, "b l"],
    ) -> Tensor:
        """LeRobot's loss: L1 of the actions, and the divergence of the latent from its prior.

        Of a longer plan the rest has no loss.
        """
        c = self.lerobot.config
        # Padded to C with the last action, as LeRobot does beyond the end of an episode.
        rest = self.config.horizon - actions.shape[1]
        actions = torch.cat([actions, actions[:, -1:].expand(-1, rest, -1)], dim=1)
        mask = nn.functional.pad(mask, (0, rest))
        target = self.normalize_action(actions)
        context = self.encode(obs)
        latent, divergence = torch.zeros_like(noise), torch.zeros((), device=noise.device)
        if c.use_vae:
            mean, log_variance = self._posterior(context.state, target, mask)
            latent = mean + (0.5 * log_variance).exp() * noise
            # KL(N(mean, variance) || N(0, I)), summed over the latent's dims.
            per_row = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1)
            divergence = per_row.mean()
        error = (self.chunk(context, latent) - target).abs() * mask[..., None]
        l1 = error.sum() / (mask.sum() * target.shape[-1]).clamp_min(1)
        return l1 + c.kl_weight * divergence

    def _posterior(self, state: Tensor, target: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log-variance (B, L) of the latent, given the demonstrated chunk."""
        net = self.net
        # The sequence: a token whose output is read, proprioception, and the actions.
        read = net.vae_encoder_cls_embed.weight.expand(len(state), 1, -1)
        state = net.vae_encoder_robot_state_input_proj(state)[:, None]
        sequence = torch.cat([read, state, net.vae_encoder_action_input_proj(target)], dim=1)
        out = net.vae_encoder(
            sequence.transpose(0, 1),
            pos_embed=net.vae_encoder_pos_enc.transpose(0, 1),
            key_padding_mask=nn.functional.pad(~mask, (2, 0)),
        )[0]
        mean, log_variance = net.vae_encoder_latent_output_proj(out).chunk(2, dim=1)
        return mean, log_variance

    def save_lerobot(self, folder: str | Path) -> Path:
        """Writes a checkpoint that LeRobot's own ``from_pretrained`` loads."""
        return write_checkpoint(self.lerobot, self.processors, folder)
