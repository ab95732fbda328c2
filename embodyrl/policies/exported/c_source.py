"""A ``flow_mlp`` as one C99 file: no library but ``libm``, no allocation, for a small controller."""

from __future__ import annotations

from typing import Any

import numpy as np

STEP = {
    "plain": "out[i]",
    "gated": "0.5f * (1.0f + tanhf(0.5f * out[i])) * (x[i] - out[SIZE + i])",
}
"""The velocity of number i of the chunk, from the net's outputs."""

HEAD = """\
/* A policy that embodyrl wrote: {title}. C99, needs -lm.
 *
 *   void policy_act(const float proprio[{p}], const float noise[{size}], float actions[{acts}]);
 *
 * proprio: in the units of the env. noise: standard normal numbers, or zeros.
 * actions: {h} actions of {a} numbers in [-1, 1], one after the other; {hz:g} a second.
 */
#include <math.h>

enum {{ P = {p}, A = {a}, H = {h}, SIZE = {size}, WIDEST = {widest} }};

"""

LAYER = """\
static void layer(const float *w, const float *b, const float *in, int n, float *out, int m, int relu) {
    for (int i = 0; i < m; i++) {
        float sum = b[i];
        for (int j = 0; j < n; j++) sum += w[i * n + j] * in[j];
        out[i] = relu && sum < 0.0f ? 0.0f : sum;
    }
}

"""

NORMALISE = """\
void policy_act(const float proprio[P], const float noise[SIZE], float actions[H * A]) {
    float in[WIDEST], out[WIDEST], x[SIZE];
    for (int i = 0; i < SIZE; i++) x[i] = start_noise[0] * noise[i];
"""

SEEN = """\
    for (int i = 0; i < P; i++) {
        float s = (proprio[i] - proprio_mean[i]) / proprio_std[i];
        in[i] = fminf(fmaxf(s, -proprio_clip[0]), proprio_clip[0]);
    }
"""


def c_source(arrays: dict[str, np.ndarray], facts: dict[str, Any], title: str) -> str:
    """The file's text, from ``arrays.flow_mlp_arrays`` and the facts of the policy."""
    _, c, a = facts["noise"]
    # One buffer is wide enough for every layer.
    weights = [arrays[f"weight{i}"] for i in range(facts["layers"])]
    widest = max(max(w.shape) for w in weights)
    head = HEAD.format(
        title=title.replace("*/", ""), p=facts["proprio_dim"], a=a, h=facts["horizon"],
        size=c * a, acts=facts["horizon"] * a, widest=widest, hz=facts["control_hz"],
    )  # fmt: skip
    numbers = "".join(_array(name, x) for name, x in arrays.items())
    return head + numbers + LAYER + NORMALISE + _body(facts, weights) + _ending(facts)


def _array(name: str, x: np.ndarray) -> str:
    # Nine digits give every float32 back exactly.
    values = ", ".join(f"{v:.9e}f" for v in x.ravel())
    return f"static const float {name}[] = {{{values}}};\n"


def _body(facts: dict[str, Any], weights: list[np.ndarray]) -> str:
    """From the noise x to the end of the flow, in the units of the net."""
    net = _net(weights)
    chunk = "    for (int i = 0; i < SIZE; i++) in[P + i] = x[i];\n"
    if facts["kind"] == "gaussian":
        return SEEN + net + "    for (int i = 0; i < SIZE; i++) x[i] = out[i];\n"
    if facts["kind"] == "one_step":
        return SEEN + chunk + net + "    for (int i = 0; i < H * A; i++) x[i] = out[i];\n"
    # Each denoising step sees the observation, the chunk and its time anew.
    times = weights[0].shape[1] - facts["proprio_dim"] - facts["noise"][1] * facts["noise"][2]
    steps = (
        SEEN
        + chunk
        + f"    for (int i = 0; i < {times}; i++) in[P + SIZE + i] = time[k * {times} + i];\n"
        + net
        + f"    for (int i = 0; i < SIZE; i++) x[i] -= ({STEP[facts['kind']]}) / {facts['steps']}.0f;\n"
    )
    steps = "".join(f"    {line}\n" for line in steps.splitlines())
    return f"    for (int k = 0; k < {facts['steps']}; k++) {{\n{steps}    }}\n"


def _net(weights: list[np.ndarray]) -> str:
    """All layers; inputs and outputs change places after each, and the last lands in ``out``."""
    lines = []
    # ReLU between the layers, none behind the last.
    for i, w in enumerate(weights):
        rows, columns = w.shape
        last = i == len(weights) - 1
        lines.append(
            f"    layer(weight{i}, bias{i}, in, {columns}, out, {rows}, {int(not last)});\n"
        )
        if not last:
            lines.append(f"    for (int i = 0; i < {rows}; i++) in[i] = out[i];\n")
    return "".join(lines)


def _ending(facts: dict[str, Any]) -> str:
    """From the end of the flow to actions."""
    action = "tanhf(x[i])" if facts["squash"] else "x[i] * action_std[i % A] + action_mean[i % A]"
    return (
        "    for (int i = 0; i < H * A; i++) {\n"
        f"        float action = {action};\n"
        "        actions[i] = fminf(fmaxf(action, -1.0f), 1.0f);\n"
        "    }\n}\n"
    )
