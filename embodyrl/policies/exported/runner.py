"""Runs a policy that ``embodyrl export --to`` wrote. It needs no PyTorch and nothing else of embodyrl.

This file may be copied to a robot's computer and used alone:

    from policy_runner import PolicyFile

    policy = PolicyFile("policy.onnx")
    chunk = policy.act(proprio, {"front": picture}, "pick up the red block")    # (H, A) in [-1, 1]

``policy.facts`` says what the numbers mean: cameras and their sizes, control rate, action kind.

    file    needs
    .npz    numpy
    .onnx   numpy, onnxruntime; where the policy reads instructions also tokenizers
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FORMAT = 1
"""Version of the facts; a file of another version is refused."""
FACTS = "embodyrl"
"""Where a file holds its facts, as JSON."""
TOKENIZER = "tokenizer"
"""Where an ONNX file holds the tokenizer of instructions, as JSON."""
SUFFIXES = (".onnx", ".npz")


class PolicyFileError(ValueError):
    """The file cannot be run, or an observation does not fit it; the text says what to do."""


class PolicyFile:
    """A noise-free policy.

    Args:
        path: the ``.onnx`` or ``.npz`` file.
        seed: of the noise that the flow starts from.

    Attributes:
        facts: what was exported: ``env``, ``action_dim`` (A), ``proprio_dim`` (P), ``horizon``
            (H, actions of a chunk), ``cameras`` (name -> height and width), ``control_mode``,
            ``control_hz``, ``max_episode_steps``, ``conventions``, ``noise`` (the shape M, C, D),
            ``normalisation``, ``config`` and ``tasks``.

    Raises:
        PolicyFileError: it is no such file, or a package is missing.
    """

    def __init__(self, path: str | Path, seed: int = 0) -> None:
        self.path = Path(path)
        if self.path.suffix not in SUFFIXES:
            raise PolicyFileError(f"{path} does not end in .onnx or .npz.")
        if not self.path.is_file():
            raise PolicyFileError(f"There is no file {path}.")
        self._net = _Onnx(self.path) if self.path.suffix == ".onnx" else _Arrays(self.path)
        self.facts = self._net.facts
        # Noise, the tokenizer (made when it is needed), and the sentences seen so far.
        self._random = np.random.default_rng(seed)
        self._tokenizer: Any = None
        self._ids: dict[str, np.ndarray] = {}

    def act(
        self,
        proprio: np.ndarray,
        images: Mapping[str, np.ndarray] | None = None,
        instruction: str = "",
        noise: np.ndarray | None = None,
    ) -> np.ndarray:
        """The next chunk of actions (H, A) float32, in [-1, 1].

        Args:
            proprio: (P,), in the units of the env; the file normalises it.
            images: camera name -> (h, w, 3) uint8.
            instruction: the sentence, where the policy reads one.
            noise: standard normal numbers of the shape ``facts["noise"]``; None draws them. Zeros
                make the policy repeatable, and mostly more decided.

        Raises:
            PolicyFileError: a part of the observation is missing, or has another shape.
        """
        facts = self.facts
        # The noise, and each part of the observation, checked, with a leading batch dimension.
        shape = tuple(facts["noise"])
        if noise is None:
            noise = self._random.standard_normal(shape)
        inputs = {
            "noise": _fitting(noise, "noise", np.float32, shape),
            "proprio": _fitting(proprio, "proprio", np.float32, (facts["proprio_dim"],)),
        }
        given = images or {}
        for name, size in facts["cameras"].items():
            if name not in given:
                cameras = ", ".join(facts["cameras"])
                raise PolicyFileError(f"The picture of {name!r} is missing. It needs: {cameras}.")
            shape = (*size, 3)
            inputs[f"image_{name}"] = _fitting(given[name], f"image {name!r}", np.uint8, shape)
        if facts["max_tokens"]:
            inputs["instruction"] = self._tokens(instruction)[None]
        return self._net.run(inputs)

    def _tokens(self, sentence: str) -> np.ndarray:
        """Token ids (L,) int64 of a sentence, with -1 after its end."""
        if sentence in self._ids:
            return self._ids[sentence]
        if self._tokenizer is None:
            try:
                from tokenizers import Tokenizer
            except ModuleNotFoundError as error:
                raise PolicyFileError(
                    f"{self.path} reads an instruction, which needs the package tokenizers: pip "
                    "install tokenizers"
                ) from error
            self._tokenizer = Tokenizer.from_str(self._net.tokenizer)
        # An empty sentence has the single token 0, as in training.
        found = self._tokenizer.encode(sentence, add_special_tokens=False).ids or [0]
        ids = np.full(self.facts["max_tokens"], -1, np.int64)
        known = found[: len(ids)]
        ids[: len(known)] = known
        self._ids[sentence] = ids
        return ids


def _fitting(value: Any, what: str, kind: type, shape: tuple[int, ...]) -> np.ndarray:
    """An array of that shape with a leading 1."""
    # Shape, kind of number, and that no number is missing.
    array = np.asarray(value)
    if array.shape != shape:
        raise PolicyFileError(f"The {what} has the shape {array.shape}; it must be {shape}.")
    if kind is np.uint8 and array.dtype != np.uint8:
        raise PolicyFileError(f"The {what} is {array.dtype}; it must be uint8, from 0 to 255.")
    if kind is np.float32 and not np.isfinite(array).all():
        raise PolicyFileError(f"The {what} has numbers that are not finite.")
    return np.ascontiguousarray(array, kind)[None]


def _read_facts(text: str | None, path: Path) -> dict[str, Any]:
    try:
        facts = json.loads(text or "")
        version = facts["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise PolicyFileError(
            f"{path} was not written by embodyrl export: it holds no facts about its policy."
        ) from error
    if version != FORMAT:
        raise PolicyFileError(
            f"{path} has format {version}, and this runner reads {FORMAT}. Export the checkpoint "
            "again, or use the runner of the version that wrote it."
        )
    return facts


class _Onnx:
    """The graph, run by onnxruntime on the CPU."""

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime
        except ModuleNotFoundError as error:
            raise PolicyFileError(
                f"{path} needs the package onnxruntime: pip install onnxruntime"
            ) from error
        # One thread on the CPU: a robot's other programs need the rest.
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1  # small nets: more threads only wait for one another
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                path, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its classes differ between versions of onnxruntime
            raise PolicyFileError(
                f"{path} cannot be read as ONNX ({str(error)[:200]}). Export it again, or copy it "
                "again."
            ) from error
        texts = self._session.get_modelmeta().custom_metadata_map
        self.facts = _read_facts(texts.get(FACTS), path)
        self.tokenizer = texts.get(TOKENIZER, "")

    def run(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        return np.asarray(self._session.run(None, inputs)[0])[0]


class _Arrays:
    """The weights of a ``flow_mlp``, run by numpy."""

    tokenizer = ""

    def __init__(self, path: Path) -> None:
        if not zipfile.is_zipfile(path):
            raise PolicyFileError(
                f"{path} cannot be read as .npz: it is none, or not whole. Export it again, or copy "
                "it again."
            )
        try:
            with np.load(path, allow_pickle=False) as file:
                self._w = {name: file[name] for name in file.files}
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise PolicyFileError(
                f"{path} cannot be read as .npz ({error}). Export it again, or copy it again."
            ) from error
        self.facts = _read_facts(str(self._w.pop(FACTS, "")), path)

    def run(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        w = self._w
        # Normalise what is seen. The flow starts from noise (C, A).
        clip = w["proprio_clip"]
        seen = ((inputs["proprio"][0] - w["proprio_mean"]) / w["proprio_std"]).clip(-clip, clip)
        x = w["start_noise"] * inputs["noise"][0, 0]
        kind = self.facts["kind"]
        if kind == "one_step":
            x = self._mlp(np.concatenate([seen, x.ravel()])).reshape(-1, x.shape[1])
        elif kind == "gaussian":
            x = self._mlp(seen).reshape(2, *x.shape)[0]
        else:
            # K denoising steps x - v / K.
            for time in w["time"]:
                out = self._mlp(np.concatenate([seen, x.ravel(), time]))
                out = out.reshape(-1, *x.shape)
                v = _sigmoid(out[0]) * (x - out[1]) if kind == "gated" else out[0]
                x = x - v / np.float32(len(w["time"]))
        # Back to the units of the actions; those that are not executed are left out.
        x = x[: self.facts["horizon"]]
        actions = np.tanh(x) if self.facts["squash"] else x * w["action_std"] + w["action_mean"]
        return actions.clip(-1.0, 1.0).astype(np.float32)

    def _mlp(self, x: np.ndarray) -> np.ndarray:
        """Linear layers with ReLU between them."""
        # The last layer is linear.
        count = self.facts["layers"]
        for i in range(count):
            x = self._w[f"weight{i}"] @ x + self._w[f"bias{i}"]
            if i < count - 1:
                x = np.maximum(x, 0.0)
        return x


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))
