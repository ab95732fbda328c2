"""Low-rank adapters (LoRA, arXiv:2106.09685) on the transformers of a LeRobot policy, by peft."""

from __future__ import annotations

import copy
from typing import Any

from embodyrl.errors import MissingDependencyError

EXPERT = "lm_expert|gemma_expert"
LANGUAGE = "text_model|language_model"
PROJECTIONS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"


def add_adapters(lerobot: Any, rank: int, language: bool) -> None:
    """Puts adapters on every linear layer of the action expert, and of the language model if asked; in place.

    What LeRobot would train beside the two transformers (the projections of actions, time and
    state) still is.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingDependencyError(
            "policy.lora_rank needs peft: pip install 'embodyrl[vla]'."
        ) from error
    where = f"{EXPERT}|{LANGUAGE}" if language else EXPERT
    named = lerobot.named_parameters()  # model.NAME of a projection, or of a transformer
    projections = [
        p for name, p in named if p.requires_grad and not name.split(".")[1].endswith("with_expert")
    ]
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=rf".*\.({where})\..*\.({PROJECTIONS})"
    )
    inject_adapter_in_model(config, lerobot)
    for p in projections:
        p.requires_grad_(True)


def without_adapters(lerobot: Any) -> Any:
    """The policy itself, or a copy in which adapters are merged into the weights: what LeRobot can load."""
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return lerobot
    if not any(isinstance(m, BaseTunerLayer) for m in lerobot.modules()):
        return lerobot
    twin = copy.deepcopy(lerobot)
    for name, module in list(twin.named_modules()):
        if isinstance(module, BaseTunerLayer):
            module.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, module.get_base_layer())
    return twin
