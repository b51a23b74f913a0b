"""When to use each design of the catalogue, in a sentence or two."""

from __future__ import annotations

WHEN = {
    "bayesian_layer": "Use it where keys overlap and what was written must survive: writes turn away from directions "
    "that are already resolved, and every read states its variance.",
    "bayesian_layer_diagonal": "An ablation: it shows what is lost without correlations between rows. Use it where D "
    "numbers of covariance are affordable and D² are not, and keys lie near the axes.",
    "covariance_reset": "An ablation: the Bayesian Layer that forgets its covariance after every write. Use it to "
    "see what the covariance does, all else being equal.",
    "stationary_bayesian_layer": "Use it for contexts longer than those of training: its gains do not depend on the "
    "position.",
    "partial_reset": "Use it to start from a trained delta rule, which it equals at retention 0, and to learn how "
    "much certainty to keep.",
    "discounted": "Use it for a regression that changes slowly and whose keys keep coming from all directions.",
    "unknown_scale": "Use it for error bars where the size of the noise is unknown: it learns the size from its own "
    "errors.",
    "robust_writes": "Use it where a few written values are badly wrong.",
    "block_diagonal": "Use it for large keys with many associations, whose keys overlap mostly inside a block.",
    "low_rank": "Use it for large keys with few associations alive at a time.",
    "deltanet": "Use it for short contexts with the smallest state; it corrects errors but never forgets.",
    "gated_deltanet": "Use it for the smallest state per key with a decay for each head; a strong baseline for "
    "language.",
    "kda": "Use it like Gated DeltaNet, with a decay for each row.",
    "longhorn": "Use it to compare with the closed form of its objective, which has a step size for each value column.",
    "linear_attention": "Use it as the simplest baseline: every value is added, nothing is corrected.",
    "retnet": "Use it as a baseline whose decay does not depend on the input.",
    "gla": "Use it as an additive baseline with a decay for each row.",
    "mamba2": "Use it as an additive baseline with a decay for each head.",
    "mesa_net": "Use it where nothing may be thrown away and a solve for each read is affordable.",
    "gated_kalmanet": "Use it to compare, or for a dense memory where rounding matters more than calibrated "
    "uncertainty.",
    "kla": "Use it to compare, or for many channels with few states each, where rows act as time scales.",
    "palimpsa": "Use it to compare with a memory whose entries each keep their own precision and forget by it.",
    "kalman_delta_isotropic": "Use it as a cheap step beyond KDA: one precision for each head lets gains fall as "
    "writes gather.",
    "kalman_delta_diagonal": "Use it as a cheap step beyond KDA, where D² of state is too much and a few distinct "
    "keys are written at a time.",
    "vla": "Use it to compare with a memory whose gain has length one, whatever was written.",
    "preconditioned_deltanet": "Use it to compare with a gradient step that is scaled for each row by how often it "
    "was written.",
    "gated_deltanet_2": "Use it to compare with a delta rule that erases and writes with gates of their own.",
    "deltaproduct": "Use it where a token must make several writes, or to track states with reflections.",
    "comba": "Use it to compare with a delta rule whose erasure is a drift, chosen from the key.",
    "rwkv7": "Use it to compare, or to track states: its transition removes along directions of its own.",
    "mlstm": "Use it as an additive baseline with an input gate without bound and a normaliser.",
    "count_memory": "Use it where values are counts or rates, or as linear attention with an exact normaliser.",
    "categorical_memory": "Use it where values are symbols: a read is a distribution over them.",
    "hidden_markov": "Use it to track which of D states is active.",
}
