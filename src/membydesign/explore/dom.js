/* What both pages need of the document: elements by name, new elements, and numbers as text. */
"use strict";

const $ = (id) => document.getElementById(id);
const shown = (x) => (x === null ? "–" : Math.abs(x) < 5e-13 ? "0" : Math.abs(x) < 1e-4 ? x.toExponential(3) : +x.toPrecision(5) + "");

function svg(parent, name, attributes = {}) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return parent.appendChild(element);
}

function html(parent, name, text = "", attributes = {}) {
  const element = document.createElement(name);
  element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return parent.appendChild(element);
}
