"""A checkpoint as one file that runs without PyTorch: ``embodyrl export RUN --to FILE``."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

import embodyrl
from embodyrl.build import load_config, load_policy, load_spec
from embodyrl.errors import UserError
from embodyrl.policies.exported import runner
from embodyrl.policies.exported.arrays import flow_mlp_arrays
from embodyrl.policies.exported.c_source import c_source
from embodyrl.policies.exported.onnx_graph import (
    NoiseFree,
    max_tokens,
    write_onnx,
)
from embodyrl.policies.flow_mlp import FlowMLP
from embodyrl.policies.flow_vla import FlowVLA
from embodyrl.policies.normalize import Normalizer
from embodyrl.policy import ExportsAsPublished, ExportsToLeRobot, has_ability, num_executed
from embodyrl.storage.atomic_files import replacing, write_text
from embodyrl.storage.env_spec import spec_to_json
from embodyrl.storage.paths import require_writable
from embodyrl.word_embeddings import load_word_embeddings

KINDS = (".onnx", ".npz", ".c")
RUNNER = "policy_runner.py"
"""The name under which the runner is copied beside a file."""


def export_file(path: str, to: str | Path) -> list[Path]:
    """Writes the noise-free policy of a checkpoint as a file that runs without PyTorch.

    Args:
        path: a checkpoint, or a run's folder (its newest).
        to: ends in ``.onnx``, or for a ``flow_mlp`` in ``.npz`` or ``.c``.

    Returns:
        What was written: the file and, but for C, the runner beside it.

    Raises:
        UserError: the ending or the policy is another, a package is missing, or the file cannot be
            written.
    """
    to = Path(to)
    if to.suffix not in KINDS:
        raise UserError(
            f"--to is {to}, and its ending says what is written: it must be .onnx, .npz or .c."
        )
    # Everything that cannot be written is refused before the slow part.
    require_writable(to, "--to FILE")
    config = load_config(path)
    spec = load_spec(path)
    if spec.history > 1:
        raise UserError(
            f"{path} sees {spec.history} observations at once, and an exported policy the present "
            "one alone. Train it with env.history=1."
        )
    policy: Any = load_policy(path, config.policy, spec, config.run.seed)
    policy.eval()
    if not isinstance(policy, FlowMLP | FlowVLA):
        raise UserError(
            f"{path} holds a {config.policy.name}; only flow_mlp and flow_vla can be written to a "
            f"file. {_instead(policy)}"
        )
    if policy.chooses and config.policy.ascent_rate:
        raise UserError(
            f"{path} moves its chunk by gradients of its critics, which an exported policy cannot "
            "compute. Train it with policy.ascent_rate=0."
        )
    facts = facts_of(policy, config.run.name)
    # ONNX holds the whole graph; the other two hold the arrays of a small net.
    if to.suffix == ".onnx":
        texts = {runner.FACTS: json.dumps(facts)}
        if facts["max_tokens"]:
            texts[runner.TOKENIZER] = load_word_embeddings()[1].to_str()
        with replacing(to) as unfinished:
            write_onnx(NoiseFree(policy), unfinished, texts)
    else:
        arrays, more = flow_mlp_arrays(policy)
        facts |= more
        if to.suffix == ".c":
            title = f"{config.run.name}, {spec.name}, embodyrl {embodyrl.__version__}"
            write_text(to, c_source(arrays, facts, title))
            return [to]
        with replacing(to) as unfinished, unfinished.open("wb") as file:
            named: dict[str, Any] = {**arrays, runner.FACTS: np.array(json.dumps(facts))}
            np.savez(file, **named)
    # The runner stands beside the file, so that both can be copied together.
    beside = to.parent / RUNNER
    with replacing(beside) as unfinished:
        shutil.copyfile(runner.__file__, unfinished)
    return [to, beside]


def _instead(policy: Any) -> str:
    """What can be done with a policy that cannot be written to a file."""
    if has_ability(policy, ExportsToLeRobot):
        return "Leave --to out, and give a folder, for a checkpoint of LeRobot."
    if has_ability(policy, ExportsAsPublished):
        return "Leave --to out, and give a folder, for a checkpoint as it is published."
    return "Run the checkpoint itself: embodyrl serve, on a computer with PyTorch."


def facts_of(policy: Any, run: str) -> dict[str, Any]:
    """What a file says about its policy: the spec of its env, shapes, normalisation and config."""
    # Normalisation stands in the graph; it is said here for whoever reads the file.
    parts = {"proprio": policy.normalize_proprio, "actions": policy.normalize_action}
    return {
        "format": runner.FORMAT,
        "embodyrl": embodyrl.__version__,
        "run": run,
        **spec_to_json(policy.spec),
        "horizon": num_executed(policy.config),
        "steps": policy.transition.num_steps,
        "noise": [policy.noise_count, *policy.flow_shape],
        "max_tokens": max_tokens(policy),
        "normalisation": {
            name: {"mean": part.mean.tolist(), "std": part.std.tolist(), "clip": part.clip}
            for name, part in parts.items()
            if isinstance(part, Normalizer)
        },
        "config": asdict(policy.config),
    }
