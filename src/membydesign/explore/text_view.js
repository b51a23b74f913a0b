/* The page of a text: controls, heat map, curve, text and tables. All state is in `state`, and in the address after "#". */
"use strict";

const BLUE = [70, 130, 230], PAGE = 10;
let book, state, scales = {}, queued = false, timer = null, spans = [], painted = "";

const nameOf = (h) => `layer ${book.heads[h].layer}, head ${book.heads[h].head}`;
const bounds = (h) => (scales[`${state.measure} ${state.own ? h : ""}`] ??= range(state.own ? book.row(state.measure, h) : book.all(state.measure), MEASURES[state.measure]));
const shade = (h, t) => darkness(book.at(state.measure, h, t), bounds(h), MEASURES[state.measure]);
const told = (h, t) => Object.entries(MEASURES).map(([name, { title }]) => `${title.toLowerCase()} ${shown(book.at(name, h, t))}`).join(", ");

function change(update) {
  Object.assign(state, update);
  state.t = Math.min(book.T - 1, Math.max(0, state.t));
  state.head = Math.min(book.H - 1, Math.max(0, state.head));
  if (!queued) requestAnimationFrame(draw);
  queued = true;
}

function draw() {
  queued = false;
  for (const name of Object.keys(MEASURES)) $(`show-${name}`).checked = name === state.measure;
  $("meaning").textContent = MEASURES[state.measure].meaning;
  $("own").checked = state.own;
  for (const [id, value, text] of [["head", state.head, nameOf(state.head)], ["t", state.t, `${state.t + 1} of ${book.T}: ${visible(book.tokens[state.t])}`]]) {
    $(id).value = value;
    $(id).setAttribute("aria-valuetext", text);
    $(`${id}-value`).textContent = text;
  }
  drawMap();
  drawCurve();
  drawText();
  drawNumbers();
  if ($("more").open) drawAll();
  clearTimeout(timer); // address and announcement wait until a movement rests
  timer = setTimeout(() => {
    history.replaceState(null, "", "#" + toHash(state));
    $("summary").textContent = `Token ${state.t + 1} of ${book.T}, “${visible(book.tokens[state.t])}”, ${nameOf(state.head)}: ${told(state.head, state.t)}. ` +
      `Loss of the token ${shown(book.lossAt(state.t))} nats.`;
  }, 300);
}

/* ------------------------------------------------------------------------------------------------------- heat map */

function drawMap() {
  const canvas = $("cells"), look = `${state.measure} ${state.own}`, place = (element, left, top, width, height) =>
    Object.assign(element.style, { left: `${100 * left}%`, top: `${100 * top}%`, width: `${100 * width}%`, height: `${100 * height}%` });
  place($("column"), state.t / book.T, 0, 1 / book.T, 1);
  place($("row"), 0, state.head / book.H, 1, 1 / book.H);
  if (painted === look) return;
  painted = look;
  const context = canvas.getContext("2d"), image = context.createImageData(book.T, book.H);
  for (let h = 0; h < book.H; h++) for (let t = 0; t < book.T; t++) image.data.set([...BLUE, 255 * shade(h, t)], 4 * (h * book.T + t));
  context.putImageData(image, 0, 0);
}

function drawScale() {
  const found = bounds(state.head), { from, to, down } = MEASURES[state.measure];
  $("scale").replaceChildren();
  if (!found) { $("scale").textContent = "This head's design has no such number."; return; }
  const [light, dark] = down ? [...found].reverse() : found;
  $("scale").append(`${shown(light)} (${from}) `);
  html($("scale"), "span", "", { class: "ramp" });
  $("scale").append(` ${shown(dark)} (${to})${state.own ? `, ${nameOf(state.head)}` : ""}`);
}

function placeOf(event) {
  const box = $("map").getBoundingClientRect();
  const share = (x, size, count) => Math.min(count - 1, Math.max(0, Math.floor((count * x) / size)));
  return { t: share(event.clientX - box.left, box.width, book.T), head: share(event.clientY - box.top, box.height, book.H) };
}

function showTip(event, { head, t }) {
  const tip = $("tip");
  tip.textContent = `“${visible(book.tokens[t])}”, ${nameOf(head)}: ${told(head, t)}`;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 20 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 20}px`;
}

/* ---------------------------------------------------------------------------------------------------------- curve */

function drawCurve() {
  drawScale();
  const { title } = MEASURES[state.measure], width = 960, height = 180, left = 46, bottom = 20, top = 8;
  $("curve").replaceChildren();
  html($("curve"), "figcaption", `${title}, ${nameOf(state.head)} (${book.heads[state.head].design})`);
  const row = book.row(state.measure, state.head), known = Array.from(row).filter(Number.isFinite);
  if (!known.length) { html($("curve"), "p", "This head's design has no such number.", { class: "note" }); return; }
  const low = Math.min(...known, state.measure === "evidence" ? Infinity : 0), high = Math.max(...known);
  const x = (t) => left + ((width - left - 8) * t) / Math.max(1, book.T - 1), y = (value) => top + (height - top - bottom) * (1 - (value - low) / (high - low || 1));
  const root = svg($("curve"), "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title} over ${book.T} tokens, from ${shown(low)} to ${shown(high)}; the values are in the table below` });
  for (const value of [low, (low + high) / 2, high]) {
    svg(root, "path", { class: "axis", d: `M${left} ${y(value)}H${width - 8}` });
    svg(root, "text", { x: 2, y: y(value) + 4 }).textContent = +value.toPrecision(3);
  }
  for (const t of [0, book.T - 1]) svg(root, "text", { x: x(t), y: height - 4, "text-anchor": t ? "end" : "start" }).textContent = t + 1;
  let d = "";
  row.forEach((value, t) => { if (Number.isFinite(value)) d += `${d ? "L" : "M"}${x(t).toFixed(1)} ${y(value).toFixed(1)}`; });
  svg(root, "path", { class: "curve", d, style: "stroke:var(--d0)" });
  svg(root, "path", { class: "now", d: `M${x(state.t)} ${top}V${height - bottom}` });
}

/* ----------------------------------------------------------------------------------------------------------- text */

function buildText() {
  book.tokens.forEach((token, t) => {
    const span = html($("text"), "span", token.replace(/\n/g, "↵\n"));
    span.dataset.t = t;
    spans.push(span);
  });
}

function drawText() {
  const look = `${state.measure} ${state.own} ${state.head}`;
  if ($("text").dataset.look !== look) spans.forEach((span, t) => { span.style.backgroundColor = `rgba(${BLUE},${(0.6 * shade(state.head, t)).toFixed(3)})`; });
  $("text").dataset.look = look;
  $("text").querySelector(".here")?.classList.remove("here");
  spans[state.t].classList.add("here");
  const box = $("text"), top = spans[state.t].offsetTop;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 30) box.scrollTop = top - box.clientHeight / 2;
}

/* --------------------------------------------------------------------------------------------------------- tables */

function tableOf(table, caption, headings, rows) {
  table.replaceChildren();
  html(table, "caption", caption, { class: "note" });
  const head = html(html(table, "thead"), "tr"), body = html(table, "tbody");
  for (const heading of headings) html(head, "th", heading, { scope: "col" });
  for (const [name, here, ...cells] of rows) {
    const row = html(body, "tr", "", here ? { class: "here" } : {});
    html(row, "th", name, { scope: "row" });
    for (const cell of cells) html(row, "td", shown(cell), { title: String(cell ?? "there is none") });
  }
}

function drawNumbers() {
  const titles = Object.values(MEASURES).map(({ title }) => title), names = Object.keys(MEASURES);
  tableOf($("numbers"), `Token ${state.t + 1}, “${visible(book.tokens[state.t])}”; loss ${shown(book.lossAt(state.t))} nats`,
    ["Head", ...titles, ...titles.map((title) => `${title}, mean of the text`)],
    book.heads.map((_, h) => [nameOf(h), h === state.head, ...names.map((name) => book.at(name, h, state.t)), ...names.map((name) => (scales[`mean ${name} ${h}`] ??= mean(book.row(name, h))))]));
}

function drawAll() {
  tableOf($("all"), nameOf(state.head), ["Token", "Loss", ...Object.values(MEASURES).map(({ title }) => title)],
    book.tokens.map((token, t) => [`${t + 1} ${visible(token)}`, t === state.t, book.lossAt(t), ...Object.keys(MEASURES).map((name) => book.at(name, state.head, t))]));
}

/* ----------------------------------------------------------------------------------------------------------- start */

function bind() {
  for (const [name, { title }] of Object.entries(MEASURES)) {
    const label = html($("measures"), "label"), button = html(label, "input", "", { type: "radio", name: "measure", id: `show-${name}` });
    label.append(` ${title}`);
    button.disabled = !book.all(name).some(Number.isFinite);
    button.addEventListener("change", () => change({ measure: name }));
  }
  $("head").max = book.H - 1;
  $("t").max = book.T - 1;
  $("head").addEventListener("input", () => change({ head: +$("head").value }));
  $("t").addEventListener("input", () => change({ t: +$("t").value }));
  $("own").addEventListener("change", () => change({ own: $("own").checked }));
  $("more").addEventListener("toggle", () => { if ($("more").open) drawAll(); });
  $("skip").addEventListener("click", (event) => { event.preventDefault(); $("controls-heading").focus(); });
  const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], PageUp: [-PAGE, 0], PageDown: [PAGE, 0], Home: [-Infinity, 0], End: [Infinity, 0] };
  $("map").addEventListener("keydown", (event) => {
    if (!moves[event.key] || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    change({ t: state.t + moves[event.key][0], head: state.head + moves[event.key][1] });
  });
  $("map").addEventListener("pointermove", (event) => { showTip(event, placeOf(event)); if (event.buttons) change(placeOf(event)); });
  $("map").addEventListener("pointerdown", (event) => change(placeOf(event)));
  $("text").addEventListener("pointermove", (event) => { if (event.target.dataset.t) showTip(event, { head: state.head, t: +event.target.dataset.t }); });
  $("text").addEventListener("click", (event) => { if (event.target.dataset.t) change({ t: +event.target.dataset.t }); });
  for (const id of ["map", "text"]) $(id).addEventListener("pointerleave", () => { $("tip").hidden = true; });
  addEventListener("hashchange", () => { state = fromHash(location.hash.slice(1), book); change({}); });
}

book = opened(JSON.parse($("data").textContent));
$("model").textContent = book.model;
$("size").textContent = `${book.T} tokens${book.left_out ? ` (the next ${book.left_out} are left out, to keep this page small)` : ""}, ${book.H} heads`;
Object.assign($("cells"), { width: book.T, height: book.H });
$("map").style.height = `${Math.max(64, Math.min(640, 18 * book.H))}px`;
state = fromHash(location.hash.slice(1), book);
bind();
buildText();
change({});
