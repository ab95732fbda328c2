"""The benchmark of token policies: how its runs are put together, and that they all run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import token_policies as bench  # noqa: E402

from embodyrl.config import compose  # noqa: E402


@pytest.mark.parametrize("decoding", bench.DECODINGS)
@pytest.mark.parametrize("algorithm", ["sft", *bench.ALGORITHMS])
def test_presets_take_every_decoding_and_read_no_hidden_state(decoding, algorithm):
    config = compose(f"mujoco_pick_tokens_{algorithm}", [*bench.DECODINGS[decoding]])
    assert config.policy.name == "small_token_vla" and config.policy.decoding == decoding
    assert config.policy.critic != "privileged"
    assert config.algorithm.name == algorithm


def test_what_is_imitated_fits_what_is_improved():
    def network(algorithm):
        policy = compose(f"mujoco_pick_tokens_{algorithm}").policy
        return [policy.width, policy.layers, policy.bins, policy.horizon, policy.decoding]

    assert all(network(name) == network("sft") for name in bench.ALGORITHMS)


@pytest.mark.slow
def test_it_runs_tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "OUT", tmp_path / "token_policies")
    for decoding, algorithm in (("masked", "grpo"), ("parallel", "pa_rl")):
        chosen = ["--seeds", "0", "--decodings", decoding, "--algorithms", algorithm]
        monkeypatch.setattr(sys, "argv", ["token_policies.py", "--tiny", *chosen])
        bench.main()
    found = bench.summarise({}, bench.TINY)
    assert set(found["tasks"]) == {"masked", "parallel"}
    assert set(found[bench.EDITS]) == {"sft", "grpo"}
