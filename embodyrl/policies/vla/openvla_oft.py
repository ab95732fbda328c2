"""OpenVLA-OFT (arXiv:2502.19645): published checkpoints as policies that regress chunks of actions.

    V cameras --image_tokens--> 256 V tokens --+
    proprio --ProprioProjector--> a token -----+--Llama, all see all--> H * A hidden states
    prompt, H * A empty tokens, end of text ---+        --ActionHead--> chunk (H, A)

One pass predicts the chunk; its tokens see each other in both directions. A chunk is a function of
the observation, without a density. So the policy can imitate and be evaluated, but PPO and GRPO,
which need probabilities, cannot train it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.functional.flow import Generators
from embodyrl.functional.losses import masked_mean
from embodyrl.policies.flow_checks import check_executed
from embodyrl.policies.vla import openvla_io
from embodyrl.policies.vla.action_tokens import QuantileScale
from embodyrl.policies.vla.nets import all_see_all
from embodyrl.policies.vla.openvla import PrismaticConfig, PrismaticParts, check_prismatic
from embodyrl.policy import Mode, num_executed
from embodyrl.ranges import Count, CountOrZero, Range
from embodyrl.storage.paths import files_of
from embodyrl.types import ActionSample, EnvSpec, Obs


@dataclass(frozen=True)
class OpenVLAOFTConfig(PrismaticConfig):
    """Settings of OpenVLA-OFT.

    Attributes:
        name: registry name.
        horizon: H, actions in a chunk; no file of a checkpoint says it. 8 in LIBERO.
        execute: how many of them are executed before the next observation; 0 for all.
        crop_area: share of a picture's area that is kept, around its middle; 0.9 because OpenVLA-OFT
            is trained with random crops.
    """

    name: str = "openvla_oft"
    horizon: Count = 8
    execute: CountOrZero = 0
    crop_area: Annotated[float, Range(0.1, 1)] = 0.9

    def __post_init__(self) -> None:
        check_prismatic(self)
        check_executed(self)


class ProprioProjector(nn.Module):
    """Normalised proprioception (N, P) as a token (N, W); the names are the published ones."""

    def __init__(self, dims: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dims, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio: Tensor) -> Tensor:
        """See the class."""
        return self.fc2(F.gelu(self.fc1(proprio)))


class ActionHead(nn.Module):
    """The A hidden states of an action to the action; the names are the published ones.

    Args:
        dims: A.
        width: of the language model.
    """

    def __init__(self, dims: int, width: int) -> None:
        super().__init__()
        self.model = ResidualMLP(dims * width, width, dims)

    def forward(self, hidden: Float[Tensor, "n h aw"]) -> Float[Tensor, "n h a"]:
        """Normalised actions from the hidden states of their dims, one beside the other."""
        return self.model(hidden)


class ResidualMLP(nn.Module):
    """An MLP with two residual blocks."""

    def __init__(self, inputs: int, width: int, outputs: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(2))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(..., inputs) to (..., outputs)."""
        x = F.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class ResidualBlock(nn.Module):
    """A norm, a layer and a ReLU around a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """(..., width) to (..., width)."""
        return x + self.ffn(x)


class OpenVLAOFT(PrismaticParts, nn.Module):
    """See the module's docstring."""

    Config = OpenVLAOFTConfig
    cannot: ClassVar = {
        "ScoresPaths": "it regresses its actions, so they have no density and no probability that "
        "could be raised. Use algorithm.name=sft, or policy.name=openvla, which predicts actions "
        "as tokens."
    }
    """Name of an ability -> why this policy cannot have it, as the end of a message."""

    def __init__(self, config: OpenVLAOFTConfig, spec: EnvSpec) -> None:
        super().__init__()
        self.spec = spec
        said = self.load_parts(config, spec)
        if not self.cameras:
            raise UserError(
                f"OpenVLA-OFT sees pictures, but {spec.name} has no camera. Turn its cameras on."
            )
        weights = not (config.random_weights or torch.get_default_device().type == "meta")
        width = self.net.language_model.config.hidden_size
        self.end = self.tokenizer.id_of("</s>")
        self.normalize_action = QuantileScale(said["statistics"]["action"])
        self.action_head = ActionHead(spec.action_dim, width)
        # Proprioception is optional: it is there if a checkpoint has its projector.
        proprio = said["statistics"].get("proprio")
        reads = bool(files_of(self.folder, "proprio_projector--*")) if weights else bool(proprio)
        self.proprio_projector: ProprioProjector | None = None
        if reads:
            dims = len(proprio["q01"]) if proprio else 0
            if dims != spec.proprio_dim:
                raise UserError(
                    f"{self.config.unnorm_key} in {self.folder} has proprioception of {dims} dims, "
                    f"and {spec.name} has {spec.proprio_dim}. Use an env with the same robot state."
                )
            self.normalize_proprio = QuantileScale(proprio)
            self.proprio_projector = ProprioProjector(dims, width)
        if weights:
            openvla_io.read_component(self.action_head, self.folder, "action_head")
            if self.proprio_projector is not None:
                openvla_io.read_component(self.proprio_projector, self.folder, "proprio_projector")
        self.eval()

    def train(self, mode: bool = True) -> OpenVLAOFT:
        """Stays in evaluation mode."""
        return super().train(False)

    def actor_parameters(self) -> list[nn.Parameter]:
        """What ``config.train`` names, and the parts beside the network."""
        return [p for p in self.parameters() if p.requires_grad]

    def predict(self, obs: Obs) -> Float[Tensor, "n h a"]:
        """Normalised chunks, in one pass."""
        ids, text_mask = self.prompt_ids(obs)
        n = len(ids)
        tokens = self.config.horizon * self.spec.action_dim
        with self._autocast():
            # Inputs: the first token of the text, images, proprioception, and the rest of the text
            # with the space that ends a prompt.
            seen = [self.image_tokens(obs)]
            if self.proprio_projector is not None:
                state = self.normalize_proprio(obs.proprio)
                seen.append(self.proprio_projector(state)[:, None])
            words = self.net.embed(torch.cat([ids, ids.new_full((n, 1), self.tokenizer.space)], 1))
            # The tokens of the chunk have no content, only a position. The end of text follows them.
            empty = words.new_zeros(n, tokens, words.shape[-1])
            end = self.net.embed(ids.new_full((n, 1), self.end))
            inputs = torch.cat([words[:, :1], *seen, words[:, 1:], empty, end], dim=1)
            num_seen = sum(part.shape[1] for part in seen)
            mask = torch.cat(
                [
                    text_mask.new_ones(n, 1 + num_seen),
                    text_mask[:, 1:],
                    text_mask.new_ones(n, 1 + tokens + 1),
                ],
                dim=1,
            )
            out = self.net.language_model.model(
                inputs_embeds=inputs,
                attention_mask=all_see_all(mask, mask.shape[1], inputs.dtype),
                position_ids=(mask.cumsum(1) - 1).clamp_min(0),
                use_cache=False,
            )
            # As in a language model, a token is predicted one place before its own.
            hidden = out.last_hidden_state[:, -(tokens + 2) : -2]
            chunk = self.action_head(hidden.reshape(n, self.config.horizon, -1))
        return chunk.float()

    @torch.no_grad()
    def sample(self, obs: Obs, *, generator: Generators, mode: Mode) -> ActionSample:
        """See ``Actor.sample``; both modes give the same actions, and nothing is drawn."""
        actions = self.normalize_action.inverse(self.predict(obs)).clamp(-1.0, 1.0)
        return ActionSample(actions[:, : num_executed(self.config)])

    def imitation_loss(self, obs: Obs, actions: Float[Tensor, "b h a"], mask: Tensor) -> Tensor:
        """The mean absolute error of normalised actions.

        Args:
            obs: B observations.
            actions: (B, H, A).
            mask: (B, H) actions that count.
        """
        error = (self.predict(obs) - self.normalize_action(actions)).abs()
        return masked_mean(error.mean(-1), mask)

    def fit_inputs(self, proprio: Tensor, actions: Tensor) -> None:
        """Sets the quantiles from demonstrations: proprio (B, P) and actions (B, A)."""
        self.normalize_action.fit(actions)
        if self.proprio_projector is not None:
            self.normalize_proprio.fit(proprio)
