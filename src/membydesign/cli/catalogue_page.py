"""The page docs/catalogue.md, written from the designs themselves."""

from __future__ import annotations

from membydesign.design import catalogue, state_formula

_HEAD = """\
# The catalogue

Every row of the paper's Table 1 and every ablation, by name: `membydesign.catalogue["gated_deltanet"]`. This page is
written by `mbd catalogue --markdown` from the designs themselves; `mbd catalogue NAME` shows one of them in a terminal.

The letters: D key size, M value size, G noise groups; $\\mathbf{M}_t$ mean, $\\mathbf{P}_t$ covariance,
$\\mathbf{A}_t$ transition, $\\ell_t^2$ process noise, $r_t^2$ write noise, $\\lambda_t$ prior variance.

| name | memory drifts | a write observes | covariance | exactness | state per head |
|---|---|---|---|---|---|
"""


def catalogue_page() -> str:
    """The whole page, as Markdown."""
    rows, sections = [], []
    for name, design in catalogue.items():
        parts = [type(part).__name__ for part in (design.transition, design.write, design.covariance)]
        rows.append(f"| [{name}](#{name}) | {' | '.join(parts)} | {design.exactness} | {state_formula(design)} |")
        description = design.describe()
        facts = "\n".join(f"- **{fact}**: {'; '.join(value.splitlines())}" for fact, value in description.facts)
        sections.append(f"## {name}\n\n{description.title}\n\n$$\n{description.latex}\n$$\n\n{facts}\n")
    return _HEAD + "\n".join(rows) + "\n\n" + "\n".join(sections)
