/* "Tell me what happens": the steps of the paper's collision. Numbers in the text are computed when it is shown. */
"use strict";

const WALK = ["bayesian_layer", "bayesian_layer_diagonal", "gated_deltanet", "linear_attention"];
const STORY = [
  {
    t: 0,
    tell: () => "Nothing is written yet. The keys of A and B overlap by 0.92, 23° apart. The Bayesian Layer is equally " +
      "unsure in all directions: its ellipse is a circle.",
  },
  {
    t: 12,
    tell: (n) => `Six keys, A and B among them, were written twice. Asked for B, the Bayesian Layer answers B rather than ` +
      `A with ${n.bayesian_layer.retrieval}, near the chance of 0.5, since A was written just as often.`,
  },
  {
    t: 52,
    tell: (n) => `Now B was written 40 times. The Bayesian Layer is sure along B (variance ${n.bayesian_layer.variance_B}) ` +
      `and less sure along A (${n.bayesian_layer.variance_A}): its ellipse is thin along B. All designs retrieve B, with ` +
      `${n.bayesian_layer.retrieval} and, for Gated DeltaNet, ${n.gated_deltanet.retrieval}.`,
  },
  {
    t: 53,
    tell: (n) => `The first write of A. The Bayesian Layer learns it with the gain ${n.bayesian_layer.gain}, but its write ` +
      `is turned by ${n.bayesian_layer.warp}°, away from B: the read-out of B changes by ${n.bayesian_layer.change_B}. ` +
      `Gated DeltaNet writes along A itself, and B's read-out changes by ${n.gated_deltanet.change_B}.`,
  },
  {
    t: 57,
    tell: (n) => `Five writes of A. With Gated DeltaNet the retrieval of B is ${n.gated_deltanet.retrieval}, below chance: what ` +
      `A and B share now belongs to A. A diagonal covariance sees only the axes, and stands at ` +
      `${n.bayesian_layer_diagonal.retrieval}; the Bayesian Layer at ${n.bayesian_layer.retrieval}.`,
  },
  {
    t: 112,
    tell: (n) => `Sixty writes of A. The Bayesian Layer still retrieves B with ${n.bayesian_layer.retrieval}, Gated DeltaNet ` +
      `with ${n.gated_deltanet.retrieval}, and linear attention, which adds up all writes, with ` +
      `${n.linear_attention.retrieval}. Now change the overlap, or write B once more at the end: C2 B40 A60 B.`,
  },
];
