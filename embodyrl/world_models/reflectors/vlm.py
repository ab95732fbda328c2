"""``VLMReflector``: a Hugging Face vision-language model, such as Qwen3-VL or SmolVLM."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.world_models.reflectors.base import check_window
from embodyrl.world_models.reflectors.calibration import Calibration
from embodyrl.world_models.reflectors.question import QUESTION, answer_of, check_question, enlarged

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class VLMConfig:
    """Settings of a ``VLMReflector``."""

    model: str
    """A folder or a hub id; code that comes with the model is never run."""
    cameras: tuple[str, ...] = ("front",)
    window: int = 9
    """T, frames per call: the first of the episode and up to T-1 that are judged."""
    question: str = QUESTION
    image_size: int = 224
    """Smaller frames are enlarged until their shorter side has this many pixels."""
    dtype: str = "bfloat16"
    batch_size: int = 16
    """Questions in a forward pass."""
    min_mass: float = 0.05
    """Least probability of yes and no together; below it the frame is not judged."""
    template: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, e.g. ``{"enable_thinking": false}``."""

    def __post_init__(self) -> None:
        """Checks the settings.

        Raises:
            UserError: an unknown dtype, no camera, a number out of range, or a question without the
                task.
        """
        object.__setattr__(self, "cameras", tuple(self.cameras))
        if self.dtype not in DTYPES or self.window < 2 or not self.cameras or self.batch_size < 1:
            raise UserError(
                f"{self}: dtype must be one of {', '.join(DTYPES)}, window at least 2, batch_size "
                "at least 1."
            )
        check_question(self.question)


class VLMReflector:
    """See ``Reflector`` for the interface.

    Each new frame of each row is one question. The answer is the probability of yes against no.
    """

    def __init__(
        self, config: VLMConfig, device: str = "cpu", calibration: Calibration | None = None
    ) -> None:
        """Loads the model.

        Raises:
            UserError: it cannot be loaded, or has no tokens for yes and no.
            MissingDependencyError: transformers is not installed.
        """
        try:
            from transformers import AutoModelForImageTextToText, AutoProcessor
        except ImportError as error:
            raise MissingDependencyError(
                "Vision-language models need transformers. Install it with: pip install "
                "'embodyrl[vla]'"
            ) from error
        self.config = config
        self.window = config.window
        self.cameras = config.cameras
        self.calibration = calibration or Calibration()
        self.device = device
        try:
            self.processor = AutoProcessor.from_pretrained(config.model, trust_remote_code=False)
            model: Any = AutoModelForImageTextToText.from_pretrained(
                config.model, dtype=DTYPES[config.dtype], trust_remote_code=False
            )
        except ImportError as error:
            raise MissingDependencyError(
                f"{config.model!r} needs a further package: {error}"
            ) from error
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise UserError(
                f"The vision-language model {config.model!r} cannot be loaded ({reason})."
            ) from error
        self.model = model.to(device).eval()
        # Padding comes first, because the answer follows the last token of every row.
        self.processor.tokenizer.padding_side = "left"
        # All tokens that mean yes, and all that mean no.
        vocabulary = self.processor.tokenizer.get_vocab()
        words = {
            word: [i for token, i in vocabulary.items() if answer_of(token) == word]
            for word in ("yes", "no")
        }
        if not all(words.values()):
            raise UserError(
                f"The vocabulary of {config.model!r} has no single token for yes or for no."
            )
        self._yes = torch.tensor(words["yes"], device=device)
        self._no = torch.tensor(words["no"], device=device)

    @torch.no_grad()
    def judge(
        self, frames: Mapping[str, Tensor], instruction: list[str], new: int = 0
    ) -> Float[Tensor, "n t"]:
        """See ``Reflector``."""
        n, t, wanted = check_window(self, frames, instruction, new)
        views = {name: frames[name].cpu().numpy() for name in self.cameras}

        def picture(camera: str, row: int, column: int) -> Image.Image:
            return enlarged(views[camera][row, column], self.config.image_size)

        def conversation(row: int, column: int) -> list[dict[str, Any]]:
            text = self.config.question.replace("{instruction}", instruction[row])
            pictures = [picture(name, row, k) for k in (0, column) for name in self.cameras]
            content = [
                *({"type": "image", "image": image} for image in pictures),
                {"type": "text", "text": text},
            ]
            return [{"role": "user", "content": content}]

        questions = [(row, column) for row in range(n) for column in range(t - wanted, t)]
        out = torch.full((n, t), math.nan)
        for i in range(0, len(questions), self.config.batch_size):
            batch = questions[i : i + self.config.batch_size]
            rows = [row for row, _ in batch]
            columns = [column for _, column in batch]
            out[rows, columns] = self._answers([conversation(r, c) for r, c in batch])
        return out

    def _answers(self, conversations: list[list[dict[str, Any]]]) -> Float[Tensor, " b"]:
        # Text and pictures as the model wants them.
        texts = self.processor.apply_chat_template(
            conversations, add_generation_prompt=True, **self.config.template
        )
        images = [
            [part["image"] for part in talk[0]["content"] if part["type"] == "image"]
            for talk in conversations
        ]
        inputs = self.processor(text=texts, images=images, padding=True, return_tensors="pt")
        inputs = inputs.to(self.device, DTYPES[self.config.dtype])
        # The next token's log-probabilities, summed over the tokens of each word.
        logits = self.model(**inputs, logits_to_keep=1, use_cache=False).logits[:, -1].float()
        logprob = logits.log_softmax(-1)
        yes = logprob[:, self._yes].logsumexp(-1)
        no = logprob[:, self._no].logsumexp(-1)
        # Little probability of both means that the question was not understood; so does NaN.
        understood = torch.logaddexp(yes, no).exp() >= self.config.min_mass
        return torch.where(understood, torch.sigmoid(yes - no), math.nan).cpu()
