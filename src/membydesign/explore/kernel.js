/* Runs filter/native/csrc/step.c, compiled to WebAssembly: one decoding step of a design, in float64.
 *
 * C states each struct once and exports its layout as text. As in Python (filter/native/structs.py), a struct is filled
 * by the names in that text, so that the page and the kernel cannot disagree about the order of fields. */
"use strict";

async function loadKernel(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const { instance } = await WebAssembly.instantiate(bytes, {});
  return new Kernel(instance.exports);
}

class Kernel {
  constructor(compiled) {
    compiled._initialize();
    this.compiled = compiled;
    const fields = (name) => this.text(name).trim().split("\n").map((line) => line.split(" "));
    this.layouts = { Sizes: fields("Sizes_layout"), Tensors: fields("Tensors_layout") };
    this.rules = this.text("Rule_cases").trim().split(" ");
  }

  get buffer() {
    return this.compiled.memory.buffer; // a new one whenever memory grows
  }

  text(name) {
    const bytes = new Uint8Array(this.buffer);
    let at = new DataView(this.buffer).getUint32(this.compiled[name].value, true), text = "";
    for (; bytes[at]; at++) text += String.fromCharCode(bytes[at]);
    return text;
  }

  allocate(bytes) {
    const address = this.compiled.malloc(bytes);
    if (!address) throw new Error(`the kernel has no room for ${bytes} bytes`);
    return address;
  }

  fill(name, values) {
    const layout = this.layouts[name], unknown = Object.keys(values).filter((key) => !layout.some(([, f]) => f === key));
    if (unknown.length) throw new Error(`struct ${name}: no field ${unknown.join(", ")}`);
    const wide = ([kind]) => kind === "INT" || kind === "DOUBLE"; // 8 bytes; a pointer has 4
    const address = this.allocate(layout.reduce((sum, field) => sum + (wide(field) ? 8 : 4), 0));
    const view = new DataView(this.buffer);
    let at = address;
    for (const [kind, field] of layout) {
      if (!(field in values) && !kind.endsWith("_OR_NULL")) throw new Error(`struct ${name}: ${field} is missing`);
      if (kind === "INT") view.setBigInt64(at, BigInt(values[field]), true);
      else if (kind === "DOUBLE") view.setFloat64(at, values[field], true);
      else view.setUint32(at, values[field] ?? 0, true);
      at += wide([kind]) ? 8 : 4;
    }
    return address;
  }

  /* Room for one step of some heads: `lengths` says how many numbers each tensor has. */
  prepare(heads, sizes, lengths) {
    const at = {};
    for (const [name, length] of Object.entries(lengths)) at[name] = this.allocate(8 * length);
    const structs = [this.fill("Sizes", sizes), this.fill("Tensors", at)];
    const views = {};
    return {
      tensor: (name) => {
        if (views[name]?.buffer !== this.buffer) views[name] = new Float64Array(this.buffer, at[name], lengths[name]);
        return views[name];
      },
      run: () => {
        const flawed = this.compiled.step(structs[0], structs[1], BigInt(heads), 1n);
        if (flawed) throw new Error("the kernel refused a step: a parameter is out of bounds, or a result is not finite");
      },
      release: () => [...structs, ...Object.values(at)].forEach((address) => this.compiled.free(address)),
    };
  }
}
