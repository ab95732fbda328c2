"""Which dream for which trouble: one world model, one imitated policy, SAC-Flow in dreams of several kinds.

    python benchmarks/imagination.py --beside --seeds 0 1 2      # first: the world models and the imitated policies
    python benchmarks/dream_members.py
    python benchmarks/dream_members.py --seeds 0 --variants mean one --minutes 5
    python benchmarks/dream_members.py --seeds 0 --tiny --worlds FOLDER     # the whole way in minutes, for nothing

As ``dream_algorithms.py``, with SAC-Flow alone: what differs is which of the state model's five
networks a dream follows (``env.members``), what becomes of one in doubt (``env.doubt``), and, where
dreams are cut after 15 actions, what a target takes of ten critics (``algorithm.target_critics``).
``faithful`` runs where it is named: it needs worlds whose model has a discriminator, of a loop with
``faithful_steps=1000`` in ``world`` and ``refresh``.
Runs go to ``runs/bench/dream_members``, can be interrupted and resumed; what is finished goes into
``benchmarks/dream_members.json`` and ``docs/images/dream_members.png``. ``--tiny`` writes beside its
runs instead.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from dream_algorithms import HIDDEN, Algorithm, begin, summary
from shared import HERE, complete

from embodyrl.training.run_folder import finished

OUT = Path("runs/bench/dream_members")
SHORT = "env.length=15"
TEN = "algorithm.num_critics=10"


def sac_flow(title: str, *overrides: str) -> Algorithm:
    """SAC-Flow with demonstrations, whose critics read the state that the model predicts."""
    return Algorithm(title, "dream_sac_flow", 40, (HIDDEN, *overrides), demos=True)


VARIANTS = {
    "mean": sac_flow("the mean of five networks, doubt fails"),
    "mean_ignored": sac_flow("the mean, without doubt", "env.doubt=ignored"),
    "one": sac_flow("one network an episode", "env.members=one"),
    "one_cut": sac_flow(
        "one network an episode, doubt cuts", "env.members=one", "env.doubt=cut"
    ),
    "worst": sac_flow("the worst network", "env.members=worst"),
    "worst_ignored": sac_flow(
        "the worst network, without doubt", "env.members=worst", "env.doubt=ignored"
    ),
    "faithful": sac_flow("the most faithful network", "env.members=faithful"),
    "short": sac_flow("dreams of 15 actions, two of ten critics", SHORT, TEN),
    "short_least": sac_flow(
        "dreams of 15 actions, the least of ten", SHORT, TEN, "algorithm.target_critics=least"
    ),
}  # fmt: skip
TINY = (
    "env.num_envs=4", "algorithm.num_chunks=2", "algorithm.warmup_chunks=16",
    "algorithm.batch_size=8", "run.eval_episodes=4",
)  # fmt: skip


def main() -> None:
    """Runs what is not finished, then writes JSON and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--worlds",
        type=Path,
        default=Path("runs/imagination/mujoco_pick"),
        help="of imagination.py",
    )
    parser.add_argument(
        "--variants",
        nargs="+",
        default=[name for name in VARIANTS if name != "faithful"],
        choices=list(VARIANTS),
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--minutes", type=float, default=10.0, help="of training")
    parser.add_argument("--tiny", action="store_true", help="so small that it means nothing")
    a = parser.parse_args()
    out = OUT.with_name("dream_members_tiny") if a.tiny else OUT
    minutes = 0.1 if a.tiny else a.minutes
    more = TINY if a.tiny else ()
    where = out if a.tiny else HERE
    found = {}
    for seed in a.seeds:
        for name in a.variants:
            if not finished(out / f"{name}_{seed}"):
                variant = VARIANTS[name]
                complete(begin(variant, a.worlds / str(seed), out, name, seed, minutes, more))
            found = summary("dream_members", VARIANTS, out, {"minutes": minutes}, where)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
