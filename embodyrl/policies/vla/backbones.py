"""Vision-language models that ``token_vla`` can be made of: SmolVLM and Qwen3-VL.

A prompt is the tokens of all images, of the instruction, and one of proprioception. What differs from
model to model is how an image becomes tokens, where in the language model they go in, and how
positions are counted:

    SmolVLM   an image has a fixed size; its tokens go in with the words, and positions count tokens
    Qwen3-VL  any size in whole patches; the tokens of inner layers are added to the first layers of
              the language model, too (DeepStack); a position has three numbers, and those of an
              image are its rows and columns (M-RoPE, arXiv:2409.12191; Qwen3-VL, arXiv:2511.21631)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from embodyrl.errors import UserError
from embodyrl.policies.vla.token_base import Prompt

IMAGE_SIZE = 224
"""Side in pixels to which images are resized for a model that takes any size."""


class VLMBackbone(ABC):
    """How a kind of vision-language model is driven. It holds no weights.

    Args:
        vlm: config of the model.
        image_size: side in pixels to which images are resized; 0 means the model's own.
        cameras: images of a prompt.

    Raises:
        UserError: the model cannot take images of this size.
    """

    def __init__(self, vlm: Any, image_size: int, cameras: int) -> None:
        self.config = vlm
        self.cameras = cameras
        self.width = int(vlm.text_config.hidden_size)
        self.image_size = image_size

    @abstractmethod
    def vision(self, vlm: Any) -> nn.Module:
        """The image encoder."""

    @abstractmethod
    def read(
        self, vlm: Any, images: Sequence[UInt8[Tensor, "n h w 3"]], text: Any, state: Tensor
    ) -> Prompt:
        """One pass over a prompt.

        Args:
            vlm: the model.
            images: of each camera.
            text: the tokenizer's ``input_ids`` and ``attention_mask`` (N, T), padded at the right.
            state: (N, W) the token of proprioception.
        """

    @abstractmethod
    def go_on(
        self, vlm: Any, inputs: Float[Tensor, "n l w"], real: Tensor, mask: Tensor, cache: Any
    ) -> Float[Tensor, "n l w"]:
        """The last layer's output at further inputs, whose keys and values join ``cache``.

        Args:
            vlm: the model.
            inputs: after the prompt.
            real: (N, P + L) 1 at real tokens of prompt and inputs, which positions count.
            mask: the same, or (N, 1, L, P + L) what each input may see.
            cache: of the prompt, and of inputs since.
        """

    def _pixels(self, image: Tensor) -> Float[Tensor, "n 3 s s"]:
        """(N, h, w, 3) uint8 to squares of ``image_size``, in [-1, 1]."""
        x = image.permute(0, 3, 1, 2).float() / 127.5 - 1.0
        return F.interpolate(x, size=(self.image_size,) * 2, mode="bilinear")

    @staticmethod
    def _prompt(out: Any, mask: Tensor) -> Prompt:
        """Of a pass's output: keys, values, and the mean token."""
        mean = (out.last_hidden_state * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return Prompt(out.past_key_values, mask, mean)


class SmolVLMBackbone(VLMBackbone):
    """A SmolVLM."""

    def __init__(self, vlm: Any, image_size: int, cameras: int) -> None:
        own = int(vlm.vision_config.image_size)
        if image_size not in (0, own):
            raise UserError(
                f"policy.image_size is {image_size}, and this SmolVLM takes images of {own} x {own} "
                "pixels alone. Leave it out."
            )
        super().__init__(vlm, own, cameras)

    def vision(self, vlm: Any) -> nn.Module:
        """See ``VLMBackbone``."""
        return vlm.vision_model

    def read(self, vlm: Any, images: Sequence[Tensor], text: Any, state: Tensor) -> Prompt:
        """See ``VLMBackbone``."""
        tokens = [self._tokens(vlm, image) for image in images]
        # Only the instruction has padding.
        masks = [text["attention_mask"].new_ones(part.shape[:2]) for part in tokens]
        tokens += [vlm.get_input_embeddings()(text["input_ids"]), state[:, None]]
        masks += [text["attention_mask"], text["attention_mask"].new_ones(len(state), 1)]
        mask = torch.cat(masks, dim=1)
        # Positions count the real tokens.
        out = vlm.text_model(
            inputs_embeds=torch.cat(tokens, dim=1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp_min(0),
            use_cache=True,
        )
        return self._prompt(out, mask)

    def _tokens(self, vlm: Any, image: Tensor) -> Float[Tensor, "n p w"]:
        encoded = vlm.vision_model(pixel_values=self._pixels(image), patch_attention_mask=None)
        return vlm.connector(encoded.last_hidden_state)

    def go_on(
        self, vlm: Any, inputs: Tensor, real: Tensor, mask: Tensor, cache: Any
    ) -> Float[Tensor, "n l w"]:
        """See ``VLMBackbone``."""
        out = vlm.text_model(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=real.cumsum(1)[:, -inputs.shape[1] :] - 1,
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state


class Qwen3VLBackbone(VLMBackbone):
    """A Qwen3-VL. Each image stands between the tokens that begin and end one."""

    def __init__(self, vlm: Any, image_size: int, cameras: int) -> None:
        super().__init__(vlm, image_size or IMAGE_SIZE, cameras)
        vision = vlm.vision_config
        self.patch = int(vision.patch_size)
        self.merge = int(vision.spatial_merge_size)
        step = self.patch * self.merge
        if self.image_size % step:
            down = max(step, self.image_size // step * step)
            raise UserError(
                f"policy.image_size is {self.image_size}, and this Qwen3-VL makes a token of every "
                f"{step} x {step} pixels. Give a multiple of {step}, for example {down}."
            )
        self.side = self.image_size // step  # tokens per row of an image

    def vision(self, vlm: Any) -> nn.Module:
        """See ``VLMBackbone``."""
        return vlm.visual

    def read(self, vlm: Any, images: Sequence[Tensor], text: Any, state: Tensor) -> Prompt:
        """See ``VLMBackbone``."""
        # The tokens around an image.
        n, words = len(state), text["attention_mask"]
        embed = vlm.get_input_embeddings()
        ends = words.new_tensor(
            [self.config.vision_start_token_id, self.config.vision_end_token_id]
        )
        begin, end = embed(ends)[:, None, None].expand(-1, n, 1, -1)
        # Tokens, and what is added in inner layers at those of the images.
        tokens = []
        inner = []
        for image in images:
            encoded, deep = self._tokens(vlm, image)
            tokens += [begin, encoded.to(begin.dtype), end]
            inner.append(deep)
        tokens += [embed(text["input_ids"]), state[:, None]]
        # Where images stand, and what is real.
        places = self._image_places(words)
        mask = torch.cat([words.new_ones(n, len(places)), words, words.new_ones(n, 1)], dim=1)
        visual = F.pad(places, (0, mask.shape[1] - len(places))).expand(n, -1)
        out = vlm.language_model(
            inputs_embeds=torch.cat(tokens, dim=1),
            attention_mask=mask,
            position_ids=self._positions(mask),
            visual_pos_masks=visual,
            deepstack_visual_embeds=[
                torch.cat(layer, dim=1).flatten(0, 1) for layer in zip(*inner, strict=True)
            ],
            use_cache=True,
        )
        return self._prompt(out, mask)

    def _tokens(self, vlm: Any, image: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Tokens (N, P, W) of an image, and those of each inner layer."""
        pixels = self._patches(self._pixels(image)).to(vlm.visual.dtype)
        cells = self.image_size // self.patch
        grid = torch.tensor([[1, cells, cells]], device=pixels.device).expand(len(image), -1)
        found = vlm.visual(pixels, grid_thw=grid, return_dict=True)
        shape = (len(image), self.side**2, -1)
        return found.pooler_output.view(shape), [x.view(shape) for x in found.deepstack_features]

    def _patches(self, pixels: Float[Tensor, "n 3 s s"]) -> Float[Tensor, "patches values"]:
        """Patches in the encoder's order: those of a token follow each other.

        A still picture is a film of as many equal frames as a patch is long.
        """
        # Split rows and columns into tokens, patches of a token, and pixels.
        n = len(pixels)
        cells = (self.side, self.merge, self.patch)
        x = pixels.view(n, 3, *cells, *cells).permute(0, 2, 5, 3, 6, 1, 4, 7)
        frames = int(self.config.vision_config.temporal_patch_size)
        x = x[..., None, :, :].expand(*x.shape[:-2], frames, *x.shape[-2:])
        return x.reshape(n * (self.image_size // self.patch) ** 2, -1)

    def _image_places(self, like: Tensor) -> Tensor:
        """(P,) bool, which tokens before the instruction are an image's."""
        one = like.new_zeros(self.side**2 + 2, dtype=torch.bool)
        one[1:-1] = True
        return one.repeat(self.cameras)

    def _positions(self, mask: Int[Tensor, "n p"]) -> Int[Tensor, "3 n p"]:
        """Time, row and column of each token of a prompt; those of words are equal."""
        # Rows and columns of an image's tokens.
        side = self.side
        grid = torch.arange(side, device=mask.device)
        square = torch.stack([
            torch.zeros(side**2, dtype=torch.long, device=mask.device),
            grid.repeat_interleave(side),
            grid.repeat(side),
        ])  # fmt: skip
        # An image of side x side tokens takes as many positions as it has rows.
        edge = square.new_zeros(3, 1)
        one = torch.cat([edge, square + 1, edge + side + 1], dim=1)
        images = torch.cat([one + k * (side + 2) for k in range(self.cameras)], dim=1)
        # Words go on after the images.
        words = mask[:, images.shape[1] :].cumsum(1) - 1 + self.cameras * (side + 2)
        n = len(mask)
        parts = [images[:, None].expand(-1, n, -1), words.clamp_min(0).expand(3, -1, -1)]
        return torch.cat(parts, dim=2)

    def go_on(
        self, vlm: Any, inputs: Tensor, real: Tensor, mask: Tensor, cache: Any
    ) -> Float[Tensor, "n l w"]:
        """See ``VLMBackbone``."""
        # Images have fewer positions than tokens.
        fewer = self.cameras * (self.side**2 - self.side)
        positions = real.cumsum(1)[:, -inputs.shape[1] :] - 1 - fewer
        out = vlm.language_model(
            inputs_embeds=inputs,
            attention_mask=mask,
            position_ids=positions.expand(3, -1, -1),
            past_key_values=cache,
            use_cache=True,
        )
        return out.last_hidden_state


BACKBONES: dict[str, type[VLMBackbone]] = {"smolvlm": SmolVLMBackbone, "qwen3_vl": Qwen3VLBackbone}
"""``model_type`` of a config -> how it is driven."""


def make_backbone(vlm: Any, image_size: int, cameras: int, name: str) -> VLMBackbone:
    """How the model of a config is driven.

    Raises:
        UserError: nobody knows how, or it cannot take images of this size.
    """
    if vlm.model_type not in BACKBONES:
        raise UserError(
            f"{name} is a {vlm.model_type}, and token_vla supports SmolVLM and Qwen3-VL "
            f"({', '.join(BACKBONES)}). Give one of these."
        )
    return BACKBONES[vlm.model_type](vlm, image_size, cameras)
