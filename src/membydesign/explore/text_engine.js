/* What the page of a text shows, without the page: the numbers of heads and tokens, their colours, the address. */
"use strict";

const MEASURES = {
  variance: { title: "Variance of the read", log: true, from: "sure", to: "unsure",
    meaning: "q·Pq, how unsure the read at a token is, after the write at that token. Darker: less is known." },
  gain: { title: "Gain of the write", log: false, from: "0, kept as it was", to: "replaced",
    meaning: "How much of its error along the key a write corrects: 0 leaves memory as it is, 1 replaces what it holds. Darker: written more strongly." },
  evidence: { title: "Log evidence of the write", log: false, down: true, from: "expected", to: "a surprise",
    meaning: "How expected the written value was, in nats per entry, before it was written. Darker: more of a surprise." },
};

function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0)), view = new DataView(bytes.buffer);
  return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

/* The data of a page: `at(measure, head, t)` is a number, or null where there is none. */
function opened(data) {
  const values = Object.fromEntries(Object.keys(MEASURES).map((name) => [name, unpack(data[name])]));
  const loss = unpack(data.loss), T = data.tokens.length, none = (x) => (Number.isNaN(x) ? null : x);
  return {
    ...data, T, H: data.heads.length,
    at: (measure, head, t) => none(values[measure][head * T + t]),
    lossAt: (t) => none(loss[t]),
    row: (measure, head) => values[measure].subarray(head * T, (head + 1) * T),
    all: (measure) => values[measure],
  };
}

/* The range of colours: from the 2nd to the 98th hundredth of the numbers. */
function range(values, { log }) {
  const sorted = Array.from(values).filter((x) => Number.isFinite(x) && (!log || x > 0)).sort((a, b) => a - b);
  if (!sorted.length) return null;
  const place = (share) => sorted[Math.round(share * (sorted.length - 1))];
  return [place(0.02), place(0.98)];
}

/* How dark a number is, from 0 to 1. */
function darkness(x, bounds, { log, down }) {
  if (x === null || !bounds) return 0;
  const f = log ? (value) => Math.log(Math.max(value, 1e-30)) : (value) => value;
  const [low, high] = bounds.map(f), share = high > low ? Math.min(1, Math.max(0, (f(x) - low) / (high - low))) : 0.5;
  return down ? 1 - share : share;
}

const mean = (values) => {
  const known = Array.from(values).filter(Number.isFinite);
  return known.length ? known.reduce((sum, x) => sum + x, 0) / known.length : null;
};

/* A token as a reader sees it, also if it is a space or the end of a line. */
const visible = (token) => token.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/^ +$/, (spaces) => "␣".repeat(spaces.length)) || "∅";

function toHash(state) {
  return new URLSearchParams({ measure: state.measure, head: state.head, t: state.t, ...(state.own ? { own: 1 } : {}) }).toString();
}

function fromHash(text, book) {
  const given = new URLSearchParams(text), whole = (name, most) => (/^\d+$/.test(given.get(name) ?? "") ? Math.min(+given.get(name), most) : 0);
  const known = Object.keys(MEASURES).filter((name) => book.all(name).some(Number.isFinite));
  const measure = known.includes(given.get("measure")) ? given.get("measure") : known[0] ?? "variance";
  return { measure, head: whole("head", book.H - 1), t: whole("t", book.T - 1), own: given.get("own") === "1" };
}
