/* Drawings of the explorer: SVG and canvas, without a library. */
"use strict";

const Plots = (() => {
  const HEIGHT = 190;
  const LEFT = 40, RIGHT = 10, TOP = 10, BOTTOM = 30;

  function element(name, attributes = {}, ...children) {
    const svg = ["svg", "g", "line", "path", "circle", "rect", "text", "title"].includes(name);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  const clamp = (v, low, high) => Math.max(low, Math.min(high, v));
  const power = (exponent) => `10${[...String(exponent)].map((c) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[c] ?? "⁻").join("")}`;

  /* A number in few characters: 3.1e-7 as 3.1·10⁻⁷. */
  function short(v) {
    if (v === 0) return "0";
    if (!Number.isFinite(v)) return v !== v ? "NaN" : "∞";
    if (Math.abs(v) >= 0.01 && Math.abs(v) < 1000) return String(Number(v.toPrecision(2)));
    const [digits, exponent] = v.toExponential(1).split("e");
    return `${digits}·${power(Number(exponent))}`;
  }

  function label(x, y, text, anchor = "middle", style = "tick") {
    return element("text", { x, y, "text-anchor": anchor, class: style }, text);
  }

  // Drawings are as wide as their place, in pixels, so that text keeps its size

  /* Errors and bounds against temperature, both axes logarithmic. */
  function curves(wide, points, temperature, [low, high], [from, to]) {
    const x = (t) => LEFT + ((Math.log(t / from) / Math.log(to / from)) * (wide - LEFT - RIGHT));
    const y = (v) => {
      const e = v > 0 ? Math.log10(v) : -99;
      return TOP + ((high - clamp(e, low, high)) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    };
    const svg = element("svg", { viewBox: `0 0 ${wide} ${HEIGHT}`, role: "img" });
    for (let e = Math.ceil(low); e <= high; e++) {
      if (e % 2 && high - low > 6) continue;
      svg.append(element("line", { x1: LEFT, x2: wide - RIGHT, y1: y(10 ** e), y2: y(10 ** e), class: "grid" }),
                 label(LEFT - 6, y(10 ** e) + 4, e === 0 ? "1" : power(e), "end"));
    }
    for (const t of [0.01, 0.1, 1]) svg.append(label(x(t), HEIGHT - BOTTOM + 16, t));
    svg.append(label((LEFT + wide - RIGHT) / 2, HEIGHT - 2, "temperature"));
    svg.append(element("line", { x1: x(temperature), x2: x(temperature), y1: TOP, y2: HEIGHT - BOTTOM, class: "now" }));
    const shown = points.filter((p) => p);
    if (shown.length > 1) {
      const line = shown.map((p) => `${x(p.temperature).toFixed(1)},${y(p.bound).toFixed(1)}`);
      const last = shown[shown.length - 1], bottom = HEIGHT - BOTTOM;
      svg.append(element("path", { class: "under", d: `M${x(shown[0].temperature)},${bottom}L${line.join("L")}L${x(last.temperature)},${bottom}Z` }),
                 element("path", { class: "bound", d: `M${line.join("L")}` }));
    }
    for (const p of shown)
      svg.append(element("circle", { cx: x(p.temperature), cy: y(p.error), r: 3.4, class: "error" },
                         element("title", {}, `T = ${short(p.temperature)}: error ${short(p.error)}, bound ${short(p.bound)}`)));
    return svg;
  }

  /* Error and bound of each format: one row a format, a logarithmic axis. */
  function ladder(wide, rows, chosen, [low, high]) {
    const step = 25, height = TOP + rows.length * step + BOTTOM, left = 54;
    const x = (v) => {
      const e = v > 0 ? Math.log10(v) : -99;
      return left + ((clamp(e, low, high) - low) / (high - low)) * (wide - left - RIGHT);
    };
    const svg = element("svg", { viewBox: `0 0 ${wide} ${height}`, role: "img" });
    const apart = wide < 260 ? 6 : 4; // powers of ten between two labels
    for (let e = low; e <= high; e += apart)
      svg.append(element("line", { x1: x(10 ** e), x2: x(10 ** e), y1: TOP, y2: height - BOTTOM, class: "grid" }),
                 label(x(10 ** e), height - BOTTOM + 16, e === 0 ? "1" : power(e)));
    svg.append(label((left + wide - RIGHT) / 2, height - 2, "relative error"));
    rows.forEach((row, i) => {
      const y = TOP + (i + 0.5) * step;
      if (row.format === chosen) svg.append(element("rect", { x: 0, y: y - step / 2, width: wide, height: step, class: "chosen" }));
      svg.append(label(left - 8, y + 4, row.format, "end", "name"));
      if (!row.relative) return;
      const { error, bound } = row.relative;
      svg.append(element("line", { x1: x(error), x2: x(bound), y1: y, y2: y, class: "gap" }),
                 element("line", { x1: x(bound), x2: x(bound), y1: y - 7, y2: y + 7, class: "bound" }),
                 element("circle", { cx: x(error), cy: y, r: 4.4, class: "error" },
                         element("title", {}, `${row.format}: error ${short(error)}, bound ${short(bound)}`)));
    });
    return svg;
  }

  /* How many errors are which share of their bound: two histograms, one above the other. */
  function histogram(all, sets, low = -6) {
    const bins = 36, tall = 290, left = 10, right = 26;
    const bin = (all - left - right) / bins, bottom = tall - BOTTOM;
    const svg = element("svg", { viewBox: `0 0 ${all} ${tall}`, role: "img" });
    sets.forEach(({ name, errors, bounds }, at) => {
      const counts = new Float64Array(bins);
      errors.forEach((error, i) => {
        const share = error === 0 || bounds[i] === Infinity ? low : Math.log10(error / bounds[i]);
        counts[clamp(Math.floor(((share - low) / -low) * bins), 0, bins - 1)] += 1;
      });
      const most = Math.max(...counts), room = (bottom - TOP) / sets.length;
      const base = TOP + room * (at + 1);
      counts.forEach((count, i) => {
        const height = (count / most) * (room - 16);
        svg.append(element("rect", { x: left + i * bin + 0.5, y: base - height, width: bin - 1, height, class: "bar" },
                           element("title", {}, `${count} of ${errors.length}`)));
      });
      svg.append(label(all - right, base - room + 14, name, "end", "name"),
                 element("line", { x1: left, x2: all - right, y1: base, y2: base, class: "grid" }));
    });
    for (let e = low; e <= 0; e += 2)
      svg.append(label(left + ((e - low) / -low) * (all - left - right), bottom + 16, e === 0 ? "bound" : power(e)));
    svg.append(label((left + all - right) / 2, tall - 2, "error / its bound"));
    return svg;
  }

  const SHADES = [[13, 27, 62], [48, 62, 133], [126, 50, 132], [206, 73, 87], [247, 145, 61], [252, 231, 146]];

  function shade(t) {
    const at = clamp(t, 0, 1) * (SHADES.length - 1), i = Math.min(Math.floor(at), SHADES.length - 2);
    return SHADES[i].map((c, k) => Math.round(c + (at - i) * (SHADES[i + 1][k] - c)));
  }

  /* |errors| [n, n] as colours: black to yellow over three powers of ten below the largest. */
  function map(canvas, errors, n) {
    canvas.width = canvas.height = n;
    const context = canvas.getContext("2d"), image = context.createImageData(n, n);
    const most = errors.reduce((m, v) => (v > m ? v : m), 1e-300);
    errors.forEach((error, i) => {
      const colour = error <= most ? shade(1 + Math.log10(error / most) / 3) : [255, 0, 0];
      image.data.set([...colour, 255], 4 * i);
    });
    context.putImageData(image, 0, 0);
    return most;
  }

  /* A number whose first digits are right, the others marked. */
  function digits(value, right) {
    const text = Number.isFinite(value) ? value.toPrecision(17) : String(value);
    const node = element("code", { class: "digits" });
    let seen = 0, run = "", wrong = false, exponent = false;
    const flush = () => run && node.append(wrong ? element("b", {}, run) : run) || (run = "");
    for (const c of text.replace("-", text[0] === "-" ? "−" : "-")) {
      exponent ||= c === "e" || c === "I" || c === "N";
      const digit = c >= "0" && c <= "9" && !exponent;
      if (digit && (seen > 0 || c !== "0" || value === 0)) seen += 1;
      const now = digit && seen > right;
      if (now !== wrong && (digit || exponent)) flush(), (run = ""), (wrong = now);
      run += c;
    }
    flush();
    return node;
  }

  /* The 64 bits of a number: its first ones right, then wrong, then those that the format lacks. */
  function bits(text, right, kept) {
    const node = element("code", { class: "bits" });
    const part = (from, to, style) => from < to && node.append(element("span", { class: style }, text.slice(from, to)));
    part(0, 1, "sign");
    part(1, 12, "exponent");
    const first = 12 + Math.min(right, kept);
    part(12, first, "right");
    part(first, 12 + kept, "wrong");
    part(12 + kept, 64, "absent");
    return node;
  }

  const scale = `linear-gradient(90deg, ${SHADES.map((c) => `rgb(${c})`).join()})`;

  return { element, short, scale, curves, ladder, histogram, map, digits, bits };
})();

if (typeof module !== "undefined") module.exports = Plots;
