"""What the paper says of MQAR, and where it leaves something open, what we take it to say."""

LEARNING_RATES = {
    "base": (1e-4, 3e-4, 1e-3),
    "update": (5e-4, 1e-3, 3e-3, 5e-3),
    "block": (1e-4, 3e-4, 5e-4, 1e-3),
}
"""The grids from which peak learning rates are chosen, by validation query accuracy."""

TRAIN_EXAMPLES = {"base": 100_000, "update": 160_000, "block": 120_000}
"""The pools, which are visited in each of the epochs."""

EPOCHS, BATCH_SIZE, WARMUP, VOCABULARY, WIDTH, HEAD_DIM = 40, 256, 1024, 8192, 128, 32

UPDATE_BAYESIAN, UPDATE_OTHERS = 88.0, 60.0
"""Update-MQAR, in per cent: "holds at ≈ 88 % while GDN/Mamba-2 fall to ≈ 60 %"."""

UPDATE_ARMS = ("bayesian_layer", "gated_deltanet", "gated_deltanet_no_conv", "mamba2", "mamba2_no_conv")
"""The models that this is about: the paper does not say whether the last four had their convolutions."""

ABOUT = 5.0
"""How many per cent "≈" may be off: our reading."""

NEAR_PERFECT = 99.0
""""Near-perfect recall at larger widths", in per cent: our reading."""

COMPETITIVE = 1.0
"""How far below the best baseline is still "matches the best baselines", in per cent: our reading."""

BRIDGES = 90.0
""""Bridge the key–value gap" and "retains high accuracy", in per cent: our reading."""

NOTES = {
    "base": [
        "The paper gives neither lengths nor numbers of pairs for Base-MQAR; ours are those in the table by D. Its "
        "results for models other than the Bayesian Layer are taken from other papers; ours are all trained here, on "
        "the same examples.",
    ],
    "update": [
        "The paper's update fractions U ∈ {D, D/2, D/4, D/8} are taken as the number of rewrites of a sequence, each "
        "of a key drawn at random. Of the paper's grid no U fits L = 64 with D = 16, and an eighth of 4 keys is none: "
        "those sequences have no rewrites.",
        "A key that was rewritten more often was also written later, and the queries of keys without rewrites come "
        "from all sequences. The splits by rewrites are therefore shown at the largest D.",
    ],
    "block": [
        "Without a convolution a model has to hold a key until its value comes, B = 2 tokens later, by its memory "
        "alone.",
    ],
}
"""What a reader of each variant should know."""
