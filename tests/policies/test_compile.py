"""Sampling with a compiled denoising step: the plain sampler's path, and an untouched update."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch._inductor import config as inductor

from embodyrl.build import make_policy
from embodyrl.errors import UserError
from embodyrl.policies.compile import compile_sampling
from embodyrl.policies.flow_mlp import FlowMLPConfig
from embodyrl.types import EnvSpec, Obs

inductor.compile_threads = 1  # or it starts a process per core, each with a torch of its own
SPEC = EnvSpec("test/arm", 3, 2, 4, "ee_delta_pos", 25.0, 20, {})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_compiled_sampling_is_sampling():
    plain = make_policy(
        FlowMLPConfig(horizon=2, num_denoise_steps=3, width=8, layers=1, critic_width=8), SPEC, 0
    )
    fast = copy.deepcopy(plain)
    compile_sampling(fast)
    obs = Obs({}, torch.randn(3, 4, generator=torch.Generator().manual_seed(1)), ["go"] * 3)
    for mode in ("train", "eval", "train"):
        one, two = (
            p.sample(obs, generator=torch.Generator().manual_seed(0), mode=mode)
            for p in (plain, fast)
        )
        torch.testing.assert_close(two.actions, one.actions, atol=1e-5, rtol=1e-5)
        if one.logprob is not None:
            torch.testing.assert_close(two.logprob, one.logprob, atol=1e-4, rtol=1e-4)
            assert torch.equal(
                plain.evaluate(obs, one.trace).logprob, fast.evaluate(obs, one.trace).logprob
            )
        with torch.no_grad():  # new weights are seen
            for policy in (plain, fast):
                next(policy.net.parameters()).add_(0.1)


def test_what_has_no_steps_is_refused():
    with pytest.raises(UserError, match="parallel is none"):
        compile_sampling(SimpleNamespace(config=SimpleNamespace(name="parallel")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_compiler_that_is_not_there_is_named():
    policy = make_policy(FlowMLPConfig(horizon=2, width=10, layers=1, critic_width=8), SPEC, 0)
    compile_sampling(policy)
    obs = Obs({}, torch.zeros(3, 4), ["go"] * 3)
    missing = inductor.patch({"cpp.cxx": (None, "/nowhere/c++"), "force_disable_caches": True})
    with missing, pytest.raises(UserError, match=r"could not be compiled.*run\.compile=false"):
        policy.sample(obs, generator=torch.Generator(), mode="eval")
