"""Shards in this process: the plain loop's bits where there is one, repeatable, resumable, and refused in words."""

import shutil

import pytest
import torch
from scale_runs import DSRL, FPO, FQL, GRPO, PA_RL, PPO, SAC, assert_same, make, rows

from embodyrl.config import Config
from embodyrl.distributed.wire import pack, unpack
from embodyrl.errors import UserError
from embodyrl.rollouts.batches import Episode, EpisodeBatch, GroupBatch, RolloutBatch
from embodyrl.training.runner import train
from embodyrl.training.setup import build_algorithm
from embodyrl.training.shards import Shard, local_rollouts, merge_batches, shard_config
from embodyrl.types import DenoisingTrace, Obs

pytestmark = pytest.mark.timeout(600)
LAG = ("run.max_lag=1", "algorithm.behaviour_cap=5")


def rollout(config: Config, shard: int) -> RolloutBatch:
    """What a shard plays with initial weights."""
    made = Shard(config, shard, torch.device("cpu"))
    made.load(build_algorithm(made.config, made.envs, made.device).policy.state_dict())
    batch = made.play(0).batch
    made.envs.close()
    return batch


@pytest.mark.parametrize(
    "algorithm", [PPO, FPO, GRPO, SAC, DSRL, PA_RL, FQL], ids=lambda a: a["name"]
)
def test_one_shard_gives_the_bits_of_the_plain_loop(tmp_path, algorithm):
    config, plain = (make(tmp_path / where, algorithm=algorithm) for where in ("shard", "plain"))
    assert_same(train(plain), train(config, rollouts=lambda: local_rollouts(config)))


def test_two_shards_share_the_envs_and_play_different_episodes(tmp_path):
    config = make(tmp_path, "run.workers=2")
    shares = [shard_config(config, k) for k in (0, 1)]
    assert [s.env.num_envs for s in shares] == [4, 4] and [s.env.seed for s in shares] == [0, 4]
    rollouts = local_rollouts(config)
    assert rollouts.spec.num_envs == 8
    rollouts.close()
    first, second = (rollout(config, shard) for shard in (0, 1))
    assert not torch.equal(first.obs.proprio, second.obs.proprio)


def test_shards_in_threads_play_what_each_plays_alone_and_can_be_stopped(tmp_path):
    config = make(tmp_path, "run.workers=2")
    alone = merge_batches([rollout(config, shard) for shard in (0, 1)])
    one = Shard(config, 0, torch.device("cpu"))
    algorithm = build_algorithm(one.config, one.envs, one.device)
    rollouts = local_rollouts(config)
    options = {"generator": torch.Generator(), "device": torch.device("cpu")}
    together = rollouts.collect(algorithm, 0, between=lambda: None, **options)
    for a, b in ((alone.obs.proprio, together.obs.proprio), (alone.trace.x, together.trace.x)):
        assert torch.equal(a, b)
    assert torch.equal(alone.reward, together.reward) and alone.episodes == together.episodes

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollouts.collect(algorithm, 1, between=stop, **options)
    rollouts.close()
    one.envs.close()


@pytest.mark.parametrize(("lag", "algorithm"), [((), PPO), (LAG, PPO), ((), SAC), (LAG[:1], SAC)])
def test_a_run_in_shards_that_lost_its_tail_computes_it_again(tmp_path, lag, algorithm):
    a, b = (
        make(tmp_path / where, "run.workers=2", *lag, algorithm=algorithm) for where in ("a", "b")
    )
    whole = train(a)
    shutil.copytree(whole, tmp_path / "b" / "run")
    shutil.rmtree(tmp_path / "b" / "run" / "checkpoints" / "step_000004")
    assert_same(train(b), whole)


def test_off_policy_shards_go_on_with_their_episodes_and_warm_up_together(tmp_path):
    config = make(
        tmp_path,
        "run.workers=2",
        "run.max_lag=1",
        "run.iterations=8",
        "run.checkpoint_every=4",
        algorithm=SAC,
    )
    rollouts = local_rollouts(config)
    whole, options = (
        Shard(config, 0, torch.device("cpu")),
        {"device": torch.device("cpu"), "between": lambda: None},
    )
    algorithm, batches, ended = build_algorithm(whole.config, whole.envs, whole.device), [], []
    for iteration in range(5):
        batches.append(
            rollouts.collect(algorithm, iteration, generator=torch.Generator(), **options)
        )
        ended.append(len(batches[-1].episodes))
        algorithm.collected = 1000  # no longer uniform actions
    rollouts.close()
    whole.envs.close()
    chunks = [batch.chunks for batch in batches]
    assert all(len(batch) == 8 * 12 for batch in chunks)
    last, following = chunks[0].next_obs.proprio, chunks[1].obs.proprio
    for shard in (0, 48):  # rows of the first shard, then of the second
        assert torch.equal(last[shard + 44 : shard + 48], following[shard : shard + 4])
    assert not torch.equal(
        chunks[3].next_obs.proprio[44:48], chunks[4].obs.proprio[:4]
    )  # a checkpoint between
    uniform = [float(batch.choice.abs().mean()) for batch in chunks]
    assert uniform[:2] == pytest.approx([0.5, 0.5], abs=0.05)  # a lag of one: the second too
    assert all(abs(u - uniform[0]) > 0.05 for u in uniform[2:])
    assert sum(ended) >= 8


def test_a_lag_delays_what_is_learned_and_the_pipeline_runs_dry_at_checkpoints(tmp_path):
    config = make(
        tmp_path,
        "run.max_lag=2",
        "algorithm.behaviour_cap=5",
        "run.iterations=8",
        "run.checkpoint_every=4",
    )
    rollouts = local_rollouts(config)
    try:
        assert [rollouts._weights_of(i) for i in range(8)] == [0, 0, 0, 1, 4, 4, 4, 5]
    finally:
        rollouts.close()
    lagging = rows(train(config))
    current = rows(train(make(tmp_path / "b", "algorithm.behaviour_cap=5", "run.iterations=8")))
    weight = [row.get("behaviour_weight") for row in current if "behaviour_weight" in row]
    assert weight == pytest.approx(
        [1.0] * len(weight), abs=1e-5
    )  # current rollouts need no correction
    assert any(
        abs(row["behaviour_weight"] - 1) > 1e-4 for row in lagging if "behaviour_weight" in row
    )


def test_a_message_is_what_was_sent_bit_for_bit():
    g = torch.Generator().manual_seed(0)
    obs = Obs(
        {"front": torch.randint(0, 256, (3, 4, 5, 3), generator=g, dtype=torch.uint8)},
        torch.randn(3, 2),
        ["a"] * 3,
    )
    trace = DenoisingTrace(torch.randn(3, 3, 2, 2, generator=g), torch.ones(3, 2, dtype=torch.bool))
    kept = EpisodeBatch(
        obs,
        trace,
        torch.randn(3, 2),
        torch.tensor([0, 0, 1]),
        [Episode(1, "t", True, 0.5, 4), None],
        7,
    )
    batch = GroupBatch(kept, [Episode(1, "t", True, float("inf"), 4)], 7, 1)
    sent = {
        "batch": batch,
        "half": torch.randn(3, generator=g).bfloat16(),
        "one": torch.tensor(2.0),
        "t": (1, "x", None),
    }
    got = unpack(pack(sent))
    assert torch.equal(got["half"], sent["half"]) and got["half"].dtype == torch.bfloat16
    assert got["one"].shape == () and got["t"] == (1, "x", None)
    same = got["batch"].kept
    assert (
        torch.equal(same.obs.images["front"], obs.images["front"])
        and same.obs.instruction == obs.instruction
    )
    assert (
        torch.equal(same.trace.x, trace.x)
        and same.episodes == kept.episodes
        and got["batch"].episodes == batch.episodes
    )


def test_merged_rollouts_are_in_time_major_order():
    def part(first: int, n: int) -> RolloutBatch:
        row = torch.arange(2 * n).view(2, n) + first
        flat = row.flatten().float()[:, None]
        obs = Obs({}, flat, [str(int(x)) for x in flat])
        trace = DenoisingTrace(
            flat[:, None, None].expand(-1, 2, 1, 1), torch.ones(2 * n, 1, dtype=torch.bool)
        )
        per_action, flag = row[..., None].float(), torch.zeros(2, n, dtype=torch.bool)
        return RolloutBatch(
            obs,
            trace,
            flat,
            row.float(),
            row.float(),
            per_action,
            per_action > 0,
            flag,
            flag,
            [],
            n,
        )

    whole = merge_batches([part(0, 2), part(100, 1)])
    assert whole.value.tolist() == [[0, 1, 100], [2, 3, 101]] and whole.env_steps == 3
    assert (
        whole.obs.proprio.flatten().tolist()
        == [0, 1, 100, 2, 3, 101]
        == whole.logprob.flatten().tolist()
    )
    assert whole.obs.instruction == ["0", "1", "100", "2", "3", "101"]


@pytest.mark.parametrize(
    ("overrides", "algorithm", "says"),
    [
        (["run.workers=3"], None, "run.workers=3 cannot share env.num_envs=8 evenly"),
        (["run.workers=2", "algorithm.num_episodes=6"], GRPO, "a multiple of 4"),
        (["run.max_lag=1"], None, "algorithm.behaviour_cap=5"),
        (["run.max_lag=1"], {"name": "nft"}, "run.max_lag=0"),
        (["run.workers=2"], {"name": "sft"}, "sft has no rollouts to share"),
    ],
)
def test_what_cannot_be_shared_is_refused(tmp_path, overrides, algorithm, says):
    config = make(tmp_path, *overrides, **({"algorithm": algorithm} if algorithm else {}))
    with pytest.raises(UserError, match=says):
        train(config)
    assert not (tmp_path / "run").exists()
