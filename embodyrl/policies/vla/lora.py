"""Low-rank adapters (LoRA, arXiv:2106.09685) for the transformers of a LeRobot policy, by peft."""

from __future__ import annotations

import copy
from typing import Any

from embodyrl.errors import MissingDependencyError

EXPERT = "lm_expert|gemma_expert"
LANGUAGE = "text_model|language_model"
PROJECTIONS = "q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj"


def add_adapters(lerobot: Any, rank: int, language: bool) -> None:
    """Adds adapters to every linear layer of the action expert, in place.

    The projections of actions, time and state, which LeRobot trains beside the two transformers,
    stay trainable as they are.

    Args:
        lerobot: LeRobot's policy.
        rank: of the adapters.
        language: add adapters to the language model too.

    Raises:
        MissingDependencyError: peft is not installed.
    """
    # Parameters are named model.MODULE.(...): the module "..._with_expert" holds the transformers,
    # all others are projections.
    projections = [
        p
        for name, p in lerobot.named_parameters()
        if p.requires_grad and not name.split(".")[1].endswith("with_expert")
    ]
    transformers = f"{EXPERT}|{LANGUAGE}" if language else EXPERT
    targets = rf".*\.({transformers})\..*\.({PROJECTIONS})"
    # peft freezes everything but the adapters; the projections are trained as before.
    inject_adapters(lerobot, rank, targets)
    for p in projections:
        p.requires_grad_(True)


def inject_adapters(model: Any, rank: int, targets: str) -> None:
    """Adds adapters to the linear layers whose names match a pattern; freezes all other weights.

    Args:
        model: changed in place.
        rank: of the adapters.
        targets: regular expression of the layers' names.

    Raises:
        MissingDependencyError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise MissingDependencyError(
            "policy.lora_rank needs peft: pip install 'embodyrl[vla]'."
        ) from error
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    inject_adapter_in_model(config, model)


def without_adapters(lerobot: Any) -> Any:
    """A policy that LeRobot can load: without adapters.

    Returns:
        The policy itself if it has no adapters; otherwise a copy whose weights include them.
    """
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError:
        return lerobot
    if not any(isinstance(m, BaseTunerLayer) for m in lerobot.modules()):
        return lerobot
    merged = copy.deepcopy(lerobot)
    for name, module in list(merged.named_modules()):
        if isinstance(module, BaseTunerLayer):
            # Add the adapter to the layer's weight, then put the plain layer in its place.
            module.merge()
            parent, _, leaf = name.rpartition(".")
            setattr(merged.get_submodule(parent), leaf, module.get_base_layer())
    return merged
