"""What networks that are saved in diffusers' format are made of."""

from __future__ import annotations

from embodyrl.errors import MissingDependencyError

try:
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.models.modeling_utils import ModelMixin
except ImportError as error:
    raise MissingDependencyError(
        "World models and trained reflectors are saved in the format of diffusers, which is not installed here. "
        "Install it: pip install 'embodyrl[wm]'."
    ) from error

__all__ = ["ConfigMixin", "ModelMixin", "register_to_config"]
