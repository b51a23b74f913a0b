"""Compare the paper's claims about random-key crowding with our results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from membydesign.experiments.crowding.tables import ends
from membydesign.reports.comparison import highest, lowest

if TYPE_CHECKING:
    from membydesign.experiments.crowding.config import CrowdingConfig
    from membydesign.experiments.shared.addressed_sweep import Results
    from membydesign.reports.comparison import Check


def claims(config: CrowdingConfig, results: Results) -> list[Check]:
    """Compare what the paper says: the Bayesian Layer lowest everywhere, the diagonal covariance rising most."""
    inside = "The Bayesian Layer has the lowest loss, within the range of training (n/D ≤ 4)"
    outside = "The Bayesian Layer has the lowest loss, beyond the range of training (n/D > 4)"
    checks: list[Check] = []
    for n, density in config.densities.items():
        claim = inside if int(n) <= max(config.writes) else outside
        losses = results.each(config.compared, n, "cross_entropy")
        checks.append(lowest(claim, f"cross-entropy at n/D = {density:g}", "Bayesian Layer", losses))
    first, (edge, last) = str(config.test_writes[0]), ends(config)
    before = results.each(config.compared, first, "cross_entropy")
    for end, where in ((edge, "within the range of training"), (last, "beyond the range of training")):
        rise = {name: loss - before[name] for name, loss in results.each(config.compared, end, "cross_entropy").items()}
        what = f"rise of the loss from n/D = {config.densities[first]:g} to {config.densities[end]:g}"
        checks.append(
            highest(f"The diagonal covariance degrades most sharply, {where}", what, "Diagonal covariance", rise)
        )
    return checks
