r"""Run the controlled collision: two overlapping keys, no learning, every number exact.

Six identities are seeded; then B is written 40 times (the target), then A 60 times (the distractor, with
$k_A^\top k_B = \rho = 0.92$), and $k_B$ is queried after every step. Updates differ only in what they keep of
the covariance. The paper: §4.1 and its appendix on controlled collision recall.
"""

from __future__ import annotations

from membydesign.experiments.collision.claims import NOTES, claims
from membydesign.experiments.collision.config import PRESETS, CollisionConfig
from membydesign.experiments.collision.figures import plot
from membydesign.experiments.collision.trajectory import first_crossing, gain_matched, plateau, updates, warped_key
from membydesign.experiments.shared.run_context import RunContext
from membydesign.reports.record import Outcome

__all__ = ["PRESETS", "TITLE", "CollisionConfig", "plot", "run"]

TITLE = "Controlled collision recall: a propagated covariance protects what was written"


def run(config: CollisionConfig, context: RunContext | None = None) -> Outcome:
    """Run the whole experiment and compare it with the paper."""
    progress = (context or RunContext()).stage
    progress("five updates over the schedule")
    main = updates(config, (config.overlap,))
    progress("overlap sweep")
    curve = tuple(sorted({*config.overlap_sweep, *(i / 100 for i in range(30, 100))}))
    sweep = updates(config, curve)
    progress("gain-matched sweep")
    fixed = gain_matched(config)
    progress("closed forms")
    plateaus = {
        "Bayesian Layer": plateau(config, main["Bayesian Layer"], bayesian=True),
        "DeltaNet-style": plateau(config, main["DeltaNet-style"], bayesian=False),
    }
    rows = {rho: i for i, rho in enumerate(curve)}
    comparisons = claims(config, main, fixed, sweep, rows, plateaus)
    reset, delta = main["Covariance reset"].retrieval(), main["DeltaNet-style"].retrieval()
    metrics = {
        "retrieval": {name: track.retrieval()[0].tolist() for name, track in main.items()},
        "first_sub_chance_step": {name: first_crossing(config, track.margin()[0]) for name, track in main.items()},
        "largest_difference_of_reset_and_deltanet": (reset - delta).abs().max().item(),
        "margin_at_control_overlap": {
            name: track.margin()[rows[config.overlap_control], -1].item() for name, track in sweep.items()
        },
        "plateaus": plateaus,
        "warped_key": warped_key(config, main["Bayesian Layer"]),
    }
    data = {"main": main, "sweep": sweep, "curve": curve, "fixed": fixed}
    return Outcome(config, comparisons, metrics, NOTES, {**data, **metrics, "config": config})
