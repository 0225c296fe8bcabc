"use strict";
(() => {
  const get = (id) => document.getElementById(id);
  const { passes, lines, slides } = JSON.parse(get("slides").textContent);
  const layer = get("layer"), pass = get("pass"), ir = get("ir");
  const SAME = 0, ADDED = 1, MARKS = [" ", "+", "-"], CLASSES = ["", "added", "removed"];
  const INPUT = /^  (input|state|weight|dropped) /;
  const NEAR = 2; // unchanged lines kept around a change

  const textOf = (code) => lines[Math.floor(code / 3)];

  function lineOf(code, withOrigins) {
    const mark = code % 3, text = textOf(code);
    const row = document.createElement("div");
    if (mark !== SAME) row.className = CLASSES[mark];
    const cut = text.lastIndexOf(" from ");
    row.append(`${MARKS[mark]} ${cut < 0 ? text : text.slice(0, cut)}`);
    if (cut >= 0 && withOrigins) {
      const origin = document.createElement("span");
      origin.className = "from";
      origin.textContent = text.slice(cut);
      row.append(origin);
    }
    return row;
  }

  function note(text) {
    const row = document.createElement("div");
    row.className = "gap";
    row.textContent = text;
    return row;
  }

  function showIr() {
    const index = Number(pass.value), codes = (slides[layer.value] || [])[index] || [];
    const added = codes.filter((c) => c % 3 === ADDED).length;
    const removed = codes.filter((c) => c % 3 > ADDED).length;
    const change = added + removed ? `+${added} -${removed} lines` : "no change here";
    get("pass-name").textContent = `${index} ${passes[index]}: ${index ? change : "the start"}`;
    pass.setAttribute("aria-valuetext", `${passes[index]}, ${change}`);
    const near = new Set(), only = get("only").checked, inputs = get("inputs").checked;
    codes.forEach((code, i) => {
      if (code % 3 !== SAME) for (let j = i - NEAR; j <= i + NEAR; j++) near.add(j);
    });
    const skips = (code, i) => !near.has(i) && (only || (!inputs && INPUT.test(textOf(code))));
    const rows = [];
    let skipped = 0;
    const flush = () => {
      if (skipped) rows.push(note(`  ... ${skipped} unchanged lines`));
      skipped = 0;
    };
    codes.forEach((code, i) => {
      if (skips(code, i)) { skipped += 1; return; }
      flush();
      rows.push(lineOf(code, get("origins").checked));
    });
    flush();
    if (!codes.length) rows.push(note("  nothing of this layer"));
    ir.className = get("wrap").checked ? "wrap" : "";
    ir.replaceChildren(...rows);
  }

  function showLayer() {
    for (const figure of document.querySelectorAll("figure[data-layer]")) {
      figure.hidden = figure.dataset.layer !== layer.value;
    }
    for (const row of get("launches").tBodies[0].rows) {
      row.hidden = !get("all-layers").checked && row.dataset.layer !== layer.value;
    }
    showIr();
  }

  function filterRefusals() {
    const wanted = get("filter").value.toLowerCase();
    let shown = 0;
    for (const row of get("refusals").tBodies[0].rows) {
      row.hidden = !row.textContent.toLowerCase().includes(wanted);
      if (!row.hidden) shown += 1;
    }
    get("shown").textContent = `${shown} shown`;
  }

  function step(by) {
    pass.value = Number(pass.value) + by;
    showIr();
  }

  layer.addEventListener("change", showLayer);
  get("all-layers").addEventListener("change", showLayer);
  pass.addEventListener("input", showIr);
  for (const id of ["only", "inputs", "origins", "wrap"]) get(id).addEventListener("change", showIr);
  get("previous").addEventListener("click", () => step(-1));
  get("next").addEventListener("click", () => step(1));
  get("filter").addEventListener("input", filterRefusals);
  showLayer();
  filterRefusals();
})();
