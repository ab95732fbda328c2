"""The figures of ``embodyrl world eval`` as text."""

from __future__ import annotations

from typing import Any

from embodyrl.dreams.ranking import print_ranking


def print_world(result: dict[str, Any]) -> None:
    """The figures of ``evaluate_world`` as text."""
    # What it foresees and dreams of held-out episodes.
    if foresight := result.get("foresight"):
        _print_foresight(foresight)
    if "by_depth" in result:
        _print_dreams(result)
    # Policies, and the proposals of one.
    if comparison := result.get("as_evaluator"):
        _print_policies(comparison)
    if ranking := result.get("ranking"):
        print_ranking(ranking)
    # How fast it is.
    for row in result.get("speed", ()):
        print(
            f"{row['dreams']:>4} dreams, {row['sampling_steps']} sampling steps: "
            f"{row['steps_per_second']:,.0f} imagined steps/s, {row['frames_per_second']:,.0f} "
            "frames drawn/s"
        )


def _print_foresight(found: dict[str, Any]) -> None:
    auroc = found["auroc"]
    known = "all end alike" if auroc is None else f"AUROC {auroc:.2f}"
    print(
        f"half-way through {found['episodes']} held-out episodes, will it be solved? {known} "
        f"({found['solved']} are)"
    )


def _print_dreams(result: dict[str, Any]) -> None:
    _print_pictures(result["by_depth"][-1])
    _print_outcomes(result["outcomes"])
    for judge, kinds in result["judged"].items():
        for kind, scores in kinds.items():
            _print_judge(judge, kind, scores)
    if following := result.get("followed"):
        print(
            f"action error of the pictures: {following['own']:.1f} for the commanded actions, "
            f"{following['others']:.1f} for another episode's (1.0 is usual for real pictures)"
        )
    swapped = result["swapped_actions"]
    print(
        f"other episodes' actions: {swapped['solved']:.0%} solved, {swapped['imagined']:.0%} in "
        "the dream"
    )


def _print_pictures(last: dict[str, float]) -> None:
    print(
        f"pictures after {last['steps']} steps: {last['psnr']:.1f} dB PSNR, {last['ssim']:.3f} SSIM"
    )
    print(
        f"  (a still picture has {last['psnr_still']:.1f} dB, the codec alone "
        f"{last['psnr_codec']:.1f} dB)"
    )


def _print_outcomes(found: dict[str, Any]) -> None:
    wrong = found["false_terminations"]
    failing = "" if wrong is None else f", {wrong:.0%} false successes"
    print(
        f"outcomes of {found['episodes']} held-out episodes: {found['solved']:.0%} solved, "
        f"{found['imagined']:.0%} in the dream; F1 {found['f1']:.2f}, AUROC "
        f"{found['auroc']:.2f}{failing}"
    )


def _print_judge(judge: str, kind: str, scores: dict[str, Any]) -> None:
    values = {name: scores[name.lower()]["value"] for name in ("F1", "AUROC", "ECE")}
    known = ", ".join(f"{name} {value:.3f}" for name, value in values.items() if value is not None)
    ended = scores["false_terminations"]
    print(
        f"the {judge} on {kind} moments: {known}; {ended['k']} of {ended['n']} failing episodes "
        "ended as solved"
    )


def _print_policies(comparison: dict[str, Any]) -> None:
    for row in comparison["policies"]:
        print(f"  {row['policy']}: {row['real']:.0%} real, {row['imagined']:.0%} in the dream")
        for dreams in row["believed"]:
            print(
                f"    dreams from chunk {dreams['after']} on: {dreams['imagined']} of "
                f"{dreams['episodes']} solved, {dreams['both']} of them truly; the same actions "
                f"solve {dreams['true']}"
            )
    print(
        f"policies: Pearson {comparison['pearson']:.2f}, Spearman {comparison['spearman']:.2f}, "
        f"MMRV {comparison['mmrv']:.3f}, mean error {comparison['mean_error']:.2f}"
    )
