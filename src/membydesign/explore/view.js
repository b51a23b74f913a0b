/* The page: controls, planes, charts, table, and the walk. All state is in `state`, and in the address after "#". */
"use strict";

const CSS_OF = (i) => `var(--d${i})`, NAMES = Object.keys(DESIGNS), DASHES = ["", "7 3", "2 2", "9 3 2 3", "4 4", "1 3"];
const DECADES = [0.001, 0.01, 0.1, 1].flatMap((ten) => [1, 1.5, 2, 3, 4, 5, 6, 8].map((n) => +(ten * n).toPrecision(3)));
const VALUES = { l2: [...DECADES, 10], r2: [...DECADES, 10], p0: [...DECADES, 10],
  decay: [0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98, 0.99, 0.995, 0.998, 0.999, 1] };
const ROWS = [["retrieval", "Retrieval of B against A"], ["margin", "Margin"], ["readout_B", "Read-out of B at k_B"],
  ["readout_A", "Read-out of A at k_B"], ["readout_at_A", "Read-out of A at k_A"],
  ["change_B", "Last change of B's read-out at k_B"], ["change_A", "Last change of A's read-out at k_B"],
  ["gain", "Gain of the last write along its key"], ["gain_at_B", "Gain of the last write along k_B"],
  ["warp", "Angle between key and warped key, degrees"], ["variance_A", "Variance at k_A"], ["variance_B", "Variance at k_B"],
  ["long_axis", "Longer half-axis of the ellipse"], ["short_axis", "Shorter half-axis of the ellipse"]];
const REACH = 1.9, MAP = 41; // the plane shown is [-REACH, REACH]^2; the uncertainty map has MAP x MAP places

let kernel, state, runs = {}, panels = {}, queued = false, timer = null, playing = null;

const whole = () => schedule(state.settings).length;

/* ------------------------------------------------------------------------------------------------ change and draw */

function change(update) {
  Object.assign(state, update, { settings: { ...state.settings, ...update.settings } });
  state.t = Math.min(state.t, whole());
  if (!queued) requestAnimationFrame(draw);
  queued = true;
}

function draw() {
  queued = false;
  try {
    const key = JSON.stringify(state.settings);
    for (const name of state.designs) if (runs[name]?.key !== key) runs[name] = { key, ...simulate(kernel, name, state.settings) };
  } catch (error) {
    $("problem").textContent = `The kernel stopped: ${error.message}.`;
    $("problem").hidden = false;
    return;
  }
  $("problem").hidden = true;
  const all = Object.fromEntries(state.designs.map((name) => [name, numbers(runs[name], state.t)]));
  drawControls();
  drawPlanes(all);
  drawCharts();
  drawTable(all);
  drawStory(all);
  clearTimeout(timer); // address and announcement wait until a drag rests
  timer = setTimeout(() => {
    history.replaceState(null, "", "#" + toHash(state));
    $("summary").textContent = summary(all);
  }, 300);
}

function lastWrite() {
  const order = schedule(state.settings);
  return state.t === 0 ? "nothing is written yet" : `the last write was ${LETTERS[order[state.t - 1]]}`;
}

function summary(all) {
  const each = state.designs.map((name) => `${DESIGNS[name].title} ${shown(all[name].retrieval)}`);
  return `After ${state.t} of ${whole()} writes (${lastWrite()}), retrieval of B against A: ${each.join("; ")}.`;
}

/* ------------------------------------------------------------------------------------------------------- controls */

function bindControls() {
  for (const name of Object.keys(BOUNDS)) {
    const input = $(name), values = VALUES[name];
    if (values) Object.assign(input, { min: 0, max: values.length - 1, step: 1 });
    input.addEventListener("input", () => {
      stop();
      const atEnd = state.t === whole(), counts = COUNTS.includes(name);
      change({ settings: { [name]: values ? values[+input.value] : +input.value, ...(counts ? { writes: "" } : {}) } });
      if (counts && atEnd) change({ t: whole() });
    });
  }
  $("writes").addEventListener("input", () => { stop(); change({ settings: { writes: $("writes").value.trim() } }); change({ t: whole() }); });
  $("t").addEventListener("input", () => { stop(); change({ t: +$("t").value }); });
  $("reset").addEventListener("click", () => { stop(); change({ settings: { ...DEFAULTS } }); change({ t: whole() }); });
  $("play").addEventListener("click", () => (playing ? stop() : play()));
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $("controls-heading").focus(); });
  for (const name of NAMES) {
    const label = html($("designs"), "label"), box = html(label, "input", "", { type: "checkbox", id: `show-${name}` });
    label.append(` ${DESIGNS[name].title}`);
    box.addEventListener("change", () => {
      const designs = NAMES.filter((each) => $(`show-${each}`).checked);
      if (designs.length) change({ designs }); else box.checked = true;
    });
  }
}

function drawControls() {
  for (const name of Object.keys(BOUNDS)) {
    const value = state.settings[name], values = VALUES[name], input = $(name);
    const nearest = values && values.reduce((best, each, i) => (Math.abs(each - value) < Math.abs(values[best] - value) ? i : best), 0);
    input.value = values ? nearest : value;
    input.setAttribute("aria-valuetext", value);
    $(`${name}-value`).textContent = value;
  }
  if (document.activeElement !== $("writes")) $("writes").value = state.settings.writes;
  $("t").max = whole();
  $("t").value = state.t;
  $("t-value").textContent = `${state.t} of ${whole()}: ${lastWrite()}`;
  $("t").setAttribute("aria-valuetext", $("t-value").textContent);
  for (const name of NAMES) $(`show-${name}`).checked = state.designs.includes(name);
}

function play() {
  if (state.t >= whole()) change({ t: 0 });
  const calm = matchMedia("(prefers-reduced-motion: reduce)").matches; // few large steps instead of a movement
  $("play").textContent = "Stop";
  playing = setInterval(() => {
    change({ t: state.t + (calm ? 10 : 1) });
    if (state.t >= whole()) stop();
  }, calm ? 1500 : 120);
}

function stop() {
  clearInterval(playing);
  playing = null;
  $("play").textContent = "Play the writes";
}

/* --------------------------------------------------------------------------------------------------------- planes */

function buildPlane(name) {
  const figure = html($("planes"), "figure"), caption = html(figure, "figcaption", DESIGNS[name].title);
  const numbersLine = html(caption, "small"), box = html(figure, "div", "", { class: "plane" });
  const canvas = html(box, "canvas", "", { width: MAP, height: MAP, "aria-hidden": "true" });
  const root = svg(box, "svg", { viewBox: `${-REACH} ${-REACH} ${2 * REACH} ${2 * REACH}`, role: "img", "aria-labelledby": `title-${name}` });
  const title = svg(root, "title", { id: `title-${name}` });
  svg(root, "path", { class: "axis", d: `M${-REACH} 0H${REACH}M0 ${-REACH}V${REACH}`, "stroke-width": 0.01 });
  const part = (shape, attributes) => svg(root, shape, attributes);
  const panel = { figure, canvas, title, numbersLine, belief: part("ellipse", { class: "belief" }),
    A: part("path", { class: "arrow A" }), B: part("path", { class: "arrow B" }), gain: part("path", { class: "arrow gain" }),
    textA: part("text", { class: "A" }), textB: part("text", { class: "B" }), handle: part("circle", { class: "handle", r: 0.2 }) };
  panel.textA.textContent = "A";
  panel.textB.textContent = "B";
  panel.handle.addEventListener("pointerdown", (event) => { event.preventDefault(); stop(); panel.handle.setPointerCapture(event.pointerId); });
  panel.handle.addEventListener("pointermove", (event) => {
    if (!panel.handle.hasPointerCapture(event.pointerId)) return;
    const place = root.getBoundingClientRect();
    const x = event.clientX - place.left - place.width / 2, y = place.top + place.height / 2 - event.clientY;
    const cosine = y > 0 ? x / Math.hypot(x, y) : x > 0 ? 1 : 0;
    change({ settings: { rho: Math.min(BOUNDS.rho[1], Math.max(BOUNDS.rho[0], Math.round(cosine * 100) / 100)) } });
  });
  return panel;
}

/* An arrow from the origin; the y axis of SVG points down. */
function arrow(x, y) {
  const length = Math.hypot(x, y);
  if (length < 1e-6) return "";
  const head = Math.min(0.12, length / 2), [c, s] = [x / length, y / length];
  const side = (sign) => `L${x - head * (c - 0.6 * sign * s)} ${-(y - head * (s + 0.6 * sign * c))}`;
  return `M0 0L${x} ${-y}M${x} ${-y}${side(1)}M${x} ${-y}${side(-1)}`;
}

function drawPlanes(all) {
  for (const name of Object.keys(panels)) if (!state.designs.includes(name)) { panels[name].figure.remove(); delete panels[name]; }
  const figures = state.designs.map((name) => (panels[name] ??= buildPlane(name)).figure);
  // A figure that is moved in the document loses the pointer that drags its key.
  if (figures.some((figure, i) => $("planes").children[i] !== figure)) $("planes").replaceChildren(...figures);
  for (const name of state.designs) {
    const panel = panels[name], { keys, states } = runs[name], { gain, plane } = states[state.t], n = all[name];
    const [kx, ky] = keys[B];
    panel.A.setAttribute("d", arrow(1, 0));
    panel.B.setAttribute("d", arrow(kx, ky));
    panel.gain.setAttribute("d", gain ? arrow(gain[0], gain[1]) : "");
    for (const [text, x, y] of [[panel.textA, 1.06, -0.2], [panel.textB, 1.2 * kx, 1.2 * ky + 0.06]]) { text.setAttribute("x", x); text.setAttribute("y", -y); }
    panel.handle.setAttribute("cx", kx);
    panel.handle.setAttribute("cy", -ky);
    const axes = plane ? ellipse(plane) : { long: Math.sqrt(state.settings.l2), short: Math.sqrt(state.settings.l2), angle: 0 };
    panel.belief.setAttribute("rx", axes.long);
    panel.belief.setAttribute("ry", axes.short);
    panel.belief.setAttribute("transform", `rotate(${(-axes.angle * 180) / Math.PI})`);
    panel.belief.classList.toggle("assumed", !plane);
    drawMap(panel.canvas, plane);
    panel.numbersLine.textContent = `retrieval ${shown(n.retrieval)}, gain ${shown(n.gain)}`;
    panel.title.textContent = `${DESIGNS[name].title}: retrieval of B ${shown(n.retrieval)}; gain ${shown(n.gain)}, turned by ${shown(n.warp)} degrees; ` +
      (plane ? `ellipse with half-axes ${shown(n.long_axis)} and ${shown(n.short_axis)}` : "no covariance is kept");
  }
}

/* The standard deviation of a read at every place of the plane, from clear (sure) to blue (unsure, 2 and more). */
function drawMap(canvas, plane) {
  const context = canvas.getContext("2d"), image = context.createImageData(MAP, MAP);
  for (let i = 0; plane && i < MAP; i++) for (let j = 0; j < MAP; j++) {
    const x = REACH * ((2 * j + 1) / MAP - 1), y = REACH * (1 - (2 * i + 1) / MAP);
    image.data.set([70, 130, 230, Math.min(1, Math.sqrt(along(plane, [x, y])) / 2) * 230], 4 * (i * MAP + j));
  }
  context.putImageData(image, 0, 0);
}

/* --------------------------------------------------------------------------------------------------------- charts */

function drawCharts() {
  $("legend").replaceChildren();
  for (const name of state.designs) {
    const entry = html($("legend"), "span"), i = NAMES.indexOf(name);
    const line = svg(entry, "svg", { class: "swatch", viewBox: "0 0 36 8", "aria-hidden": "true" });
    svg(line, "path", { class: "curve", d: "M0 4H36", style: `stroke:${CSS_OF(i)}`, "stroke-dasharray": DASHES[i] });
    entry.append(DESIGNS[name].title);
  }
  $("charts").replaceChildren();
  chart("retrieval", "Retrieval of B against A at k_B", [0, 1]);
  chart("gain", "Gain of each write along its own key", [0, 1]);
}

function chart(quantity, caption, [low, high]) {
  const figure = html($("charts"), "figure"), width = 480, height = 220, left = 34, top = 10, bottom = 22, T = whole();
  html(figure, "figcaption", caption);
  const root = svg(figure, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${caption}, over ${T} writes; the values are in the table below` });
  const x = (t) => left + ((width - left - 8) * t) / Math.max(1, T), y = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low));
  for (const value of [0, 0.25, 0.5, 0.75, 1]) {
    svg(root, "path", { class: "axis", d: `M${left} ${y(value)}H${width - 8}` });
    svg(root, "text", { x: 2, y: y(value) + 4 }).textContent = value;
  }
  for (const t of [0, T]) svg(root, "text", { x: x(t), y: height - 6, "text-anchor": t ? "end" : "start" }).textContent = t;
  for (const name of state.designs) {
    let d = "";
    for (let t = 0; t <= T; t++) {
      const value = CURVES[quantity](runs[name], runs[name].states[t]);
      if (value !== null) d += `${d ? "L" : "M"}${x(t).toFixed(2)} ${y(Math.min(high, Math.max(low, value))).toFixed(2)}`;
    }
    const i = NAMES.indexOf(name);
    svg(root, "path", { class: "curve", d, style: `stroke:${CSS_OF(i)}`, "stroke-dasharray": DASHES[i] });
  }
  svg(root, "path", { class: "now", d: `M${x(state.t)} ${top}V${height - bottom}` });
}

/* ------------------------------------------------------------------------------------------------- table and walk */

function drawTable(all) {
  const table = $("numbers");
  table.replaceChildren();
  html(table, "caption", `After ${state.t} of ${whole()} writes`, { class: "note" });
  const head = html(html(table, "thead"), "tr"), body = html(table, "tbody");
  html(head, "th", "Number", { scope: "col" });
  for (const name of state.designs) html(head, "th", DESIGNS[name].title, { scope: "col" });
  for (const [quantity, label] of ROWS) {
    const row = html(body, "tr");
    html(row, "th", label, { scope: "row" });
    for (const name of state.designs) html(row, "td", shown(all[name][quantity]), { title: String(all[name][quantity] ?? "this design has none") });
  }
}

function tellStory(step) {
  stop();
  change({ story: step, settings: { ...DEFAULTS }, designs: WALK, t: STORY[step].t });
}

function drawStory(all) {
  const on = state.story !== null, step = on && STORY[state.story];
  $("story-back").disabled = !on || state.story === 0;
  $("story-end").disabled = !on;
  $("story-next").disabled = on && state.story === STORY.length - 1;
  $("story-next").textContent = on ? "Next" : "Start";
  // Once the reader moves something, the text of the step stays as it was told.
  if (!step || JSON.stringify(state.settings) !== JSON.stringify(DEFAULTS) || state.t !== step.t || WALK.some((name) => !all[name])) return;
  const round = (x, digits) => (x === null ? "–" : (Math.abs(x) < 5e-4 ? x.toExponential(1) : x.toFixed(digits)).replace("-", "−"));
  const told = Object.fromEntries(Object.entries(all).map(([name, n]) => [name, Object.fromEntries(Object.entries(n).map(([key, x]) => [key, round(x, key === "warp" ? 1 : 3)]))]));
  const text = `${state.story + 1} of ${STORY.length}. ${step.tell(told)}`;
  if ($("story-text").textContent !== text) $("story-text").textContent = text;
}

function bindStory() {
  $("story-next").addEventListener("click", () => tellStory(state.story === null ? 0 : Math.min(STORY.length - 1, state.story + 1)));
  $("story-back").addEventListener("click", () => tellStory(Math.max(0, state.story - 1)));
  const start = $("story-text").textContent;
  $("story-end").addEventListener("click", () => { $("story-text").textContent = start; change({ story: null }); });
}

function readAddress() {
  state = fromHash(location.hash.slice(1));
  if (state.story !== null && state.story >= STORY.length) state.story = null;
}

loadKernel(WASM_BASE64).then((loaded) => {
  kernel = loaded;
  readAddress();
  bindControls();
  bindStory();
  addEventListener("hashchange", () => { readAddress(); change({}); });
  change({});
}).catch((error) => {
  $("problem").textContent = `This page needs WebAssembly with SIMD (every browser since 2023): ${error.message}`;
  $("problem").hidden = false;
});
