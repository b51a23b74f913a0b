"""What the paper prints about the collision experiment, digit by digit."""

GAINS_BAYESIAN = {"t=1": "0.98", "t=53": "0.91", "t=112": "0.62"}
GAINS_RESET = {"t=1": "0.50", "t=53": "0.50", "t=112": "0.50"}
MARGINS_BAYESIAN = {"t=52": "0.46", "t=112": "0.45"}
MARGINS_RESET = {"t=52": "0.46", "t=112": "-0.30"}
"""The table of key numerical values."""

PLATEAUS = {
    "Bayesian Layer": {
        "a0(A)": "0.90019",
        "a0(B)": "0.10271",
        "b0(A)": "0.00000",
        "b0(B)": "1.00000",
        "b∞(A)": "0.01978",
        "b∞(B)": "0.97964",
        "b∞(B) − b∞(A)": "0.95986",
        "p∞": "0.72309",
    },
    "DeltaNet-style": {
        "a0(A)": "0.13145",
        "a0(B)": "0.88467",
        "b0(A)": "0.00000",
        "b0(B)": "1.00000",
        "b∞(A)": "0.79907",
        "b∞(B)": "0.18610",
        "b∞(B) − b∞(A)": "-0.61296",
        "p∞": "0.35138",
    },
}
"""The exact panel-(a) limits; the paper prints b0 as the whole numbers 0 and 1."""

GAIN_MATCHED = {
    # c: (gain, margin at t=112, zero-crossing step)
    0.01: ("0.17", "-0.35", 57),
    0.05: ("0.50", "-0.30", 54),
    0.10: ("0.67", "-0.27", 53),
    0.50: ("0.91", "-0.21", 53),
    1.0: ("0.95", "-0.20", 53),
    3.0: ("0.98", "-0.19", 53),
}
GAIN_MATCHED_BAYESIAN = ("0.45", "never")
"""The gain-matched fixed-prior control."""

OVERLAP_SWEEP = {
    rho: {"Bayesian Layer": bayesian, "Covariance reset": reset}
    for rho, bayesian, reset in (
        (0.30, "0.46", "0.40"),
        (0.45, "0.46", "0.32"),
        (0.60, "0.46", "0.20"),
        (0.75, "0.46", "0.01"),
        (0.85, "0.46", "-0.16"),
        (0.90, "0.45", "-0.26"),
        (0.92, "0.45", "-0.30"),
        (0.95, "0.43", "-0.36"),
        (0.98, "0.34", "-0.42"),
    )
}
"""The overlap sweep."""

ROUNDED_TWICE = {("c = 0.01", "-0.35"), ("ρ = 0.98", "0.34")}
"""Rows whose last printed digit comes out only if it was rounded in two steps; ours are −0.34483 and 0.33497."""

NOTES = [
    "Ours must round to the digits that the paper prints. Two rows do so only if the paper's digit was rounded in two "
    "steps: the margin at c = 0.01 is −0.34483, which is −0.34 when rounded once and the paper's −0.35 by way of "
    "−0.345; the Bayesian Layer's margin at ρ = 0.98 is 0.33497, likewise 0.33 or the paper's 0.34 by way of 0.335. "
    "They are marked, and only they have a wider tolerance.",
    "The slope of σ²(k_B) is compared with the paper's formula (1 − ρ²)ℓ², of which it prints no digits.",
    "A zero crossing is looked for from the first distractor write on (t = 53). In the seed phase every update is "
    "below chance at t = 1, when A was written and B was not; the fixed priors are so again at t = 7.",
    "DeltaNet-style is run as the catalogue's DeltaNet with its gate set to the reset's gain 0.5. It coincides with "
    "the covariance reset, as it must for unit-norm keys.",
    "The paper's limit of the steady gain for fast drift, 1 − r²/(2ℓ²), is a slip for 1 − r²/ℓ² (docs/theory.md). It "
    "enters none of the numbers above.",
]
