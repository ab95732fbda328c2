"""Imports what embodyrl imports, once: Python then keeps the bytecode, and later starts are quick.

Without this the first start pays for it. On machines where Python may not write bytecode
(``PYTHONDONTWRITEBYTECODE``, as in many containers) every start would.
"""

import contextlib
import importlib
import pkgutil
import warnings

# What embodyrl imports only where it is needed.
LATE = (
    "torch._dynamo", "torch.distributed.fsdp", "mujoco_warp", "gymnasium.envs", "sapien",
    "mani_skill.envs", "mplib", "robosuite", "libero.libero.envs", "lerobot.policies.factory",
    "lerobot.datasets.lerobot_dataset", "diffusers.models.modeling_utils",
    "diffusers.models.transformers.transformer_wan", "transformers.modeling_utils", "ray", "rich.live",
    "matplotlib.pyplot", "pytest", "xdist", "hypothesis",
)  # fmt: skip


def main() -> None:
    """Imports every module of embodyrl, and ``LATE``; what cannot be imported is no matter here."""
    warnings.simplefilter("ignore")
    import embodyrl

    own = (m.name for m in pkgutil.walk_packages(embodyrl.__path__, "embodyrl."))
    for name in (*own, *LATE):
        if not name.endswith("__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


if __name__ == "__main__":
    main()
