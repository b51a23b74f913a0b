/* What the page shows, without the page: settings, designs, the run of a design over a sequence of writes, its numbers.
 *
 * The keys are those of the paper's collision: k_A = e1, k_B = rho e1 + sqrt(1 - rho^2) e2, and e3, e4, … for the others. */
"use strict";

const D = 16, IDENTITIES = 6, COLUMNS = IDENTITIES + 1, PROBE = IDENTITIES, A = 0, B = 1, LETTERS = "ABCDEF";

const DEFAULTS = { rho: 0.92, l2: 0.05, r2: 0.05, p0: 3, decay: 1, seed: 2, target: 40, distractor: 60, writes: "" };
const BOUNDS = {
  rho: [0, 0.99], l2: [0.001, 10], r2: [0.001, 10], p0: [0.001, 10], decay: [0.5, 1],
  seed: [0, 5], target: [0, 100], distractor: [0, 100],
};
const COUNTS = ["seed", "target", "distractor"];
const MOST_WRITES = 400;

/* What step.c is told about each design of the catalogue, and the parameters that stand for l2, r2, p0 and the decay.
 * A reset and linear attention believe P = l2 I before every write, which gives all of them the same gain for a key. */
const KEEPS = (title, more) => ({ title, rule: "KALMAN", dense: true, ...more });
const RESETS = (title, more) => ({ title, rule: "DELTA", ...more });
const DESIGNS = {
  bayesian_layer: KEEPS("Bayesian Layer", { decays: true, noise: (s) => s.l2 }),
  bayesian_layer_diagonal: KEEPS("Bayesian Layer, diagonal", { dense: false, diagonal: true, decays: true, noise: (s) => s.l2 }),
  stationary_bayesian_layer: KEEPS("Bayesian Layer, stationary", { decays: true, stationary: true, noise: (s) => s.p0 }),
  gated_deltanet: RESETS("Gated DeltaNet", { decays: true }),
  deltanet: RESETS("DeltaNet", {}),
  linear_attention: { title: "Linear Attention", rule: "ADDITIVE" },
};

function keysOf(rho) {
  const keys = [];
  for (let i = 0; i < IDENTITIES; i++) keys.push(Float64Array.from({ length: D }, (_, j) => +(i === j)));
  keys[B][0] = rho;
  keys[B][1] = Math.sqrt(1 - rho * rho);
  return keys;
}

/* The identities that are written, in order: those of the field "writes", such as "C2 B40 A60", or of the counts. */
function schedule(settings) {
  const order = [], add = (identity, count) => { for (let i = 0; i < count; i++) order.push(identity); };
  if (settings.writes) {
    for (const [, letter, count] of settings.writes.toUpperCase().matchAll(/([A-F])\s*(\d*)/g))
      add(LETTERS.indexOf(letter), Math.min(MOST_WRITES, count === "" ? 1 : +count));
    return order.slice(0, MOST_WRITES);
  }
  for (let i = 0; i < settings.seed; i++) for (let each = 0; each < IDENTITIES; each++) order.push(each);
  add(B, settings.target);
  add(A, settings.distractor);
  return order;
}

/* Runs a design over the writes. Two heads hold the same memory and differ in what they ask for: k_A and k_B. A seventh
 * column of values is set to zero before each write and receives a one: afterwards it holds the gain of that write. */
function simulate(kernel, name, settings) {
  const design = DESIGNS[name], order = schedule(settings), keys = keysOf(settings.rho);
  const entries = design.dense ? D * D : design.diagonal ? D : 0, heads = 2;
  const strides = {};
  for (const [kind, field] of kernel.layouts.Sizes)
    if (kind === "INT" && /_(head|entry)$/.test(field)) strides[field] = 0; // one number of each parameter for all heads
  const whole = kernel.layouts.Sizes.some(([, field]) => field === "rows") ? { rows: D } : {}; // of P, in kernels with blocks
  const lengths = { q: heads * D, k: heads * D, v: heads * COLUMNS, from_M: heads * D * COLUMNS, r2: 1 };
  lengths.M = lengths.from_M, lengths.o = lengths.v;
  if (entries) lengths.from_P = lengths.P = heads * entries;
  lengths[design.noise ? "l2" : "lambda"] = 1;
  if (design.decays) lengths.log_a = 1;
  const step = kernel.prepare(heads, {
    D, M: COLUMNS, N: 1, rule: kernel.rules.indexOf(design.rule), diagonal: +!!design.diagonal, rotates: 0, every: 1,
    stationary: +!!design.stationary, bound: 1 + Math.sqrt(Number.EPSILON), ...strides, ...whole,
  }, lengths);
  try {
    step.tensor("q").set([...keys[A], ...keys[B]]);
    step.tensor("r2")[0] = settings.r2;
    if (design.noise) step.tensor("l2")[0] = design.noise(settings);
    else step.tensor("lambda")[0] = settings.l2;
    if (design.decays) step.tensor("log_a")[0] = Math.log(settings.decay);
    step.tensor("from_M").fill(0);
    if (entries) step.tensor("from_P").fill(0);
    for (let i = 0; entries && i < heads * D; i++)
      step.tensor("from_P")[design.dense ? Math.floor(i / D) * D * D + (i % D) * (D + 1) : i] = settings.p0;
    const read = new Float64Array(2 * COLUMNS);
    const states = [{ written: null, read, before: read, gain: null, plane: entries ? [settings.p0, 0, settings.p0] : null }];
    for (const written of order) {
      const v = step.tensor("v").fill(0), mean = step.tensor("from_M");
      for (let h = 0; h < heads; h++) {
        step.tensor("k").set(keys[written], h * D);
        v[h * COLUMNS + written] = v[h * COLUMNS + PROBE] = 1;
        for (let i = 0; i < D; i++) mean[(h * D + i) * COLUMNS + PROBE] = 0;
      }
      step.run();
      const M = step.tensor("M"), P = entries ? step.tensor("P") : null;
      const gain = new Float64Array(D);
      for (let i = 0; i < D; i++) gain[i] = M[i * COLUMNS + PROBE];
      states.push({
        written,
        before: states[states.length - 1].read,
        read: step.tensor("o").slice(),
        gain,
        plane: P && (design.dense ? [P[0], P[1], P[D + 1]] : [P[0], 0, P[1]]),
      });
      step.tensor("from_M").set(M);
      if (P) step.tensor("from_P").set(P);
    }
    return { name, settings, keys, states };
  } finally {
    step.release();
  }
}

const dot = (x, y) => x.reduce((sum, each, i) => sum + each * y[i], 0);
const along = ([xx, xy, yy], [x, y]) => x * x * xx + 2 * x * y * xy + y * y * yy;

/* Half-axes of the ellipse of a covariance [xx, xy, yy], and the angle of the longer one. */
function ellipse([xx, xy, yy]) {
  const middle = (xx + yy) / 2, spread = Math.hypot((xx - yy) / 2, xy);
  const large = middle + spread, small = large > 0 ? (xx * yy - xy * xy) / large : 0;
  return { long: Math.sqrt(large), short: Math.sqrt(Math.max(0, small)), angle: Math.atan2(2 * xy, xx - yy) / 2 };
}

const PART = (o, query, column) => o[query * COLUMNS + column];
const differenceOf = ({ read }) => PART(read, B, B) - PART(read, B, A);
const CURVES = {
  retrieval: (run, state) => 1 / (1 + Math.exp(-differenceOf(state))),
  gain: (run, { written, gain }) => gain && dot(run.keys[written], gain),
};

/* Every number that the page shows of a design after t writes; null where the design has no such number. */
function numbers(run, t) {
  const state = run.states[t], { written, read, before, gain, plane } = state, axes = plane && ellipse(plane);
  const key = gain && run.keys[written], own = CURVES.gain(run, state);
  const across = gain && Math.sqrt(gain.reduce((sum, g, i) => sum + (g - own * key[i]) ** 2, 0));
  return {
    retrieval: CURVES.retrieval(run, state),
    margin: Math.tanh(differenceOf(state) / 2),
    readout_B: PART(read, B, B),
    readout_A: PART(read, B, A),
    readout_at_A: PART(read, A, A),
    change_B: PART(read, B, B) - PART(before, B, B),
    change_A: PART(read, B, A) - PART(before, B, A),
    gain: own,
    gain_at_B: gain && dot(run.keys[B], gain),
    warp: gain && (Math.atan2(across, own) * 180) / Math.PI,
    variance_A: plane && along(plane, run.keys[A]),
    variance_B: plane && along(plane, run.keys[B]),
    long_axis: axes && axes.long,
    short_axis: axes && axes.short,
  };
}

/* Settings, designs and position as the part of an address after "#", and back; what is not understood is left out. */
function toHash(state) {
  const parts = Object.entries(state.settings).filter(([name, value]) => value !== DEFAULTS[name]);
  parts.push(["designs", state.designs.join(",")], ["t", state.t]);
  if (state.story !== null) parts.push(["story", state.story]);
  return new URLSearchParams(parts).toString();
}

function fromHash(text) {
  const given = new URLSearchParams(text), settings = { ...DEFAULTS };
  for (const [name, [low, high]] of Object.entries(BOUNDS)) {
    const value = given.get(name) ? Number(given.get(name)) : NaN;
    if (Number.isFinite(value)) settings[name] = Math.min(high, Math.max(low, COUNTS.includes(name) ? Math.round(value) : value));
  }
  settings.writes = (given.get("writes") ?? "").slice(0, 200);
  const designs = (given.get("designs") ?? "").split(",").filter((name) => Object.hasOwn(DESIGNS, name));
  const whole = (name, fallback) => (/^\d+$/.test(given.get(name) ?? "") ? +given.get(name) : fallback);
  return {
    settings,
    designs: designs.length ? designs : ["bayesian_layer", "bayesian_layer_diagonal", "gated_deltanet", "linear_attention"],
    t: Math.min(whole("t", Infinity), schedule(settings).length),
    story: whole("story", null),
  };
}
