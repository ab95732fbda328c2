"""``SavedNetwork``: a network that is saved with the arguments it was made with.

The files are those of diffusers' models: ``config.json`` holds the class and the arguments, and
``diffusion_pytorch_model.safetensors`` the weights, in several files with an index if they are
large. diffusers itself is not imported: it takes seconds, and these networks need nothing else of
it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, Self

import torch
from torch import nn

from embodyrl.devices import keep_random_state
from embodyrl.errors import UserError
from embodyrl.storage.atomic_files import write_text
from embodyrl.storage.paths import require_readable
from embodyrl.storage.plain_data import first_line

CONFIG = "config.json"
WEIGHTS = "diffusion_pytorch_model{suffix}.safetensors"
"""Pattern of the files' names; the suffix counts them where there are several."""
MAX_FILE = "10GB"
"""Size of a file from which on weights are written to several, as in diffusers."""
DAMAGED = "is damaged, or of another version of embodyrl; train it again"


class RecordedArguments(dict[str, Any]):
    """The arguments that a network was made with; ``config.width`` is ``config["width"]``."""

    def __getattr__(self, name: str) -> Any:
        """The argument ``name``."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def record_arguments[Net: SavedNetwork, **Arguments](
    init: Callable[Concatenate[Net, Arguments], None],
) -> Callable[Concatenate[Net, Arguments], None]:
    """Decorates the ``__init__`` of a ``SavedNetwork``: its arguments become ``config``."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def recorded(self: Net, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        init(self, *args, **kwargs)
        # A subclass records after its base class, so its own arguments are those that stay.
        self.config = RecordedArguments(list(given.arguments.items())[1:])

    return recorded


class SavedNetwork(nn.Module):
    """Base class of networks that ``save_pretrained`` writes and ``from_pretrained`` reads.

    Attributes:
        config: the arguments of ``__init__``, which ``record_arguments`` decorates.
    """

    config: RecordedArguments

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights."""
        return next(self.parameters()).dtype

    def save_pretrained(self, folder: str | Path, max_file: str = MAX_FILE) -> None:
        """Writes config and weights.

        Args:
            folder: made if it is not there.
            max_file: size of a file, as in "5GB", from which on the weights are split.
        """
        from huggingface_hub import save_torch_model

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {"_class_name": type(self).__name__, **self.config}
        write_text(folder / CONFIG, json.dumps(config, indent=2, sort_keys=True) + "\n")
        save_torch_model(self, folder, filename_pattern=WEIGHTS, max_shard_size=max_file)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """The network that ``save_pretrained`` wrote, on the CPU, in evaluation mode.

        No random number is drawn, and nothing is unpickled.

        Raises:
            OSError: a file is missing.
            TypeError: the config has arguments that the class does not take.
            UserError: weights and config do not agree on the names of the weights.
            RuntimeError: they do not agree on shapes.
            SafetensorError: the weights are damaged.
        """
        from huggingface_hub import load_torch_model

        folder = Path(folder)
        config = json.loads((folder / CONFIG).read_text())
        with keep_random_state():
            # What begins with an underscore was not an argument.
            net = cls(**{key: value for key, value in config.items() if not key.startswith("_")})
        single = folder / WEIGHTS.format(suffix="")
        split = single.with_name(f"{single.name}.index.json").is_file()
        found: Any = load_torch_model(net, folder if split else single, filename_pattern=WEIGHTS)
        if different := [*found.missing_keys, *found.unexpected_keys]:
            raise UserError(
                f"{folder} {DAMAGED} (its weights and its config do not agree on {different[0]})."
            )
        return net.eval()


def load_part(folder: Path, classes: dict[str, str]) -> Any:
    """The network in ``folder``, of the class that its config names.

    Args:
        folder: as ``save_pretrained`` wrote it.
        classes: names of the classes that it may have, and the module of each.

    Raises:
        UserError: it has another class, or its weights do not fit.
    """
    # What may not be read is not damaged.
    for file in (folder, *folder.glob("*")):
        require_readable(file)
    try:
        name = json.loads((folder / CONFIG).read_text())["_class_name"]
        module = classes[name]
    except (OSError, RecursionError, TypeError, ValueError, KeyError) as error:
        raise UserError(
            f"{folder} is damaged: its config.json names none of {', '.join(classes)} ({error})."
        ) from error
    try:
        return getattr(importlib.import_module(module), name).from_pretrained(folder)
    except UserError:
        raise
    except Exception as error:  # each network raises errors of its own
        raise UserError(f"{folder} {DAMAGED} ({first_line(error)}).") from error
