"""A noise-free flow policy as an ONNX graph.

    noise (1, M, C, D) --------+
    proprio (1, P) ------------+
    instruction (1, L) int64 --+--> FlowPolicy.noise_free --> actions (1, H, A) in [-1, 1]
    image_NAME (1, h, w, 3) ---+

The graph is that of the policy's own code, traced by ``torch.export``. Normalisation of inputs and
actions, ``start_noise``, all denoising steps, and the critics that choose among M proposals are
inside. All shapes are fixed, for one robot: an instruction has L token ids, with -1 after its end.
"""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodyrl.errors import MissingDependencyError, UserError
from embodyrl.policies.text import TextEncoder
from embodyrl.types import Obs

OPSET = 18


class NoiseFree(nn.Module):
    """A policy as a function of tensors alone; see the module's docstring.

    Args:
        policy: a flow policy. It is copied, and the copy's flags become plain values, which a
            graph can be built by.

    Attributes:
        inputs: names of the inputs, in their order.
    """

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.policy = copy.deepcopy(policy).eval().requires_grad_(False)
        self.reads_instruction = reads_instruction(policy)
        self.inputs = ["noise", "proprio"]
        self.inputs += ["instruction"] if self.reads_instruction else []
        self.inputs += [f"image_{name}" for name in policy.spec.cameras]
        # Whether a part has learned decides which graph is built.
        for part in (self.policy.chooser, self.policy.one_step):
            if part is not None:
                ready = bool(part.ready)
                del part._buffers["ready"]
                part.ready = ready
        # All instruction encoders read the same table, which is written once.
        encoders = [m for m in self.policy.modules() if isinstance(m, TextEncoder)]
        for encoder in encoders:
            encoder._buffers["table"] = encoders[0].get_buffer("table")

    def forward(self, *tensors: Tensor) -> Tensor:
        """Actions (1, H, A) of the inputs, in the order of ``inputs``."""
        # The observation as the policy knows it.
        given = dict(zip(self.inputs, tensors, strict=True))
        images = {name: given[f"image_{name}"] for name in self.policy.spec.cameras}
        # An instruction encoder takes token ids in place of sentences.
        words: Any = given.get("instruction", [])
        return self.policy.noise_free(Obs(images, given["proprio"], words), given["noise"])


def reads_instruction(policy: Any) -> bool:
    """Whether a part of the policy encodes the instruction."""
    return any(isinstance(m, TextEncoder) for m in policy.modules())


def max_tokens(policy: Any) -> int:
    """L, the longest instruction that every encoder of the policy reads; 0 without one."""
    return min((m.max_tokens for m in policy.modules() if isinstance(m, TextEncoder)), default=0)


def example_inputs(graph: NoiseFree, seed: int = 0) -> list[Tensor]:
    """Random inputs of ``graph``, with an instruction of five tokens."""
    generator = torch.Generator().manual_seed(seed)
    policy = graph.policy
    ids = torch.full((1, max_tokens(policy)), -1)
    ids[:, :5] = torch.randint(0, 1000, (1, 5), generator=generator)[:, : ids.shape[1]]
    made = {
        "noise": torch.randn(1, policy.noise_count, *policy.flow_shape, generator=generator),
        "proprio": torch.randn(1, policy.spec.proprio_dim, generator=generator),
        "instruction": ids,
    }
    for name, size in policy.spec.cameras.items():
        picture = torch.randint(0, 256, (1, *size, 3), generator=generator, dtype=torch.uint8)
        made[f"image_{name}"] = picture
    return [made[name] for name in graph.inputs]


def write_onnx(graph: NoiseFree, path: Path, metadata: dict[str, str]) -> None:
    """Writes the graph and texts about it as one file.

    Raises:
        MissingDependencyError: ONNX is not installed.
        UserError: the policy does something that ONNX has no operation for.
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch.onnx needs it
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            f"An ONNX file needs {error.name}, which is not installed. Install it with: pip "
            "install 'embodyrl[export]'"
        ) from error
    # Trace the policy's own code, then check the file and give it its texts.
    inputs = tuple(example_inputs(graph))
    with _quiet(), torch.no_grad():
        try:
            program = torch.onnx.export(
                graph, inputs, input_names=graph.inputs, output_names=["actions"],
                opset_version=OPSET, dynamo=True, verbose=False,
            )  # fmt: skip
        except torch.onnx.OnnxExporterError as error:
            first = next(line for line in str(error).splitlines() if line.strip())
            raise UserError(
                f"This policy cannot be written as ONNX ({first.strip()[:300]})."
            ) from error
    assert program is not None
    model = program.model_proto
    onnx.helper.set_model_props(model, metadata)
    onnx.checker.check_model(model)
    path.write_bytes(model.SerializeToString())


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter's progress is not shown; nor is attention's fast path taken, which ONNX lacks."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
