/* The page of the explorer: its state, its controls, and what follows from them. */
"use strict";

(() => {
  const { element, short } = Plots;
  const NAMES = Object.keys(Formats.FORMATS);
  const QUANTITIES = { logits: "Logits", lse: "Log-sum-exps", loss: "Loss", gradient: "Gradient" };
  const TEMPERATURES = Array.from({ length: 13 }, (_, i) => 0.005 * 200 ** (i / 12));
  const DEFAULT = { format: "bf16", temperature: 0.07, n: 64, d: 64, norm: 1, cosine: 0.5, seed: 1, inFormat: false, textbook: false };
  const SLIDERS = {
    temperature: ["temperature", [5, 6, 7, 8, 10, 12, 14, 17, 20, 25, 30, 35, 40, 50, 60, 70, 80, 100, 120, 140, 170, 200, 250, 300, 350, 400, 500,
      600, 700, 800, 1000].map((t) => t / 1000)],
    n: ["batch, rows", [8, 16, 32, 64, 128, 256, 512, 1024]],
    d: ["dimension", [8, 16, 32, 64, 128, 256]],
    norm: ["norm of rows", [0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8]],
    cosine: ["cosine of pairs", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98]],
  };
  const SWITCHES = {
    inFormat: ["other steps", { false: "in float32", true: "in the format" }],
    textbook: ["positive", { false: "kept out of the sum", true: "subtracted from it" }],
  };

  const state = { ...DEFAULT };
  const root = document.getElementById("explorer");
  const places = {}; // elements that change, by name
  const nearest = (values, v) => values.reduce((best, w, i) => (Math.abs(w - v) < Math.abs(values[best] - v) ? i : best), 0);

  // --- state and address ------------------------------------------------------------------------

  function read() {
    for (const [key, text] of new URLSearchParams(location.hash.slice(1))) {
      if (key === "format" && NAMES.includes(text)) state.format = text;
      else if (key in SWITCHES) state[key] = text === "true";
      else if (key in SLIDERS) state[key] = SLIDERS[key][1][nearest(SLIDERS[key][1], Number(text))];
      else if (key === "seed" && Number.isInteger(Number(text))) state.seed = Number(text);
    }
  }

  function write() {
    const changed = Object.entries(state).filter(([key, value]) => value !== DEFAULT[key]);
    history.replaceState(null, "", changed.length ? `#${new URLSearchParams(changed)}` : location.pathname + location.search);
  }

  // --- controls ---------------------------------------------------------------------------------

  function choice(name, options, onPick) {
    const group = element("div", { class: "choice", role: "radiogroup", "aria-label": name });
    for (const [value, ...content] of options) {
      const input = element("input", { type: "radio", name, value });
      input.checked = String(state[name]) === value;
      input.addEventListener("change", () => onPick(value));
      group.append(element("label", {}, input, element("span", {}, ...content)));
    }
    return group;
  }

  function slider(name, [title, values]) {
    const shown = element("output", {}, String(state[name]));
    const input = element("input", { type: "range", min: 0, max: values.length - 1, step: 1, "aria-label": title });
    input.value = nearest(values, state[name]);
    input.addEventListener("input", () => {
      state[name] = values[input.value];
      shown.textContent = state[name];
      changed();
    });
    return element("label", { class: "slider" }, element("span", {}, title), shown, input);
  }

  function controls() {
    const pick = (name, convert = (v) => v) => (value) => ((state[name] = convert(value)), changed());
    const layout = (name) => {
      const { exponent, digits } = Formats.FORMATS[name];
      return name === "bf16x3" ? "3 products" : `${exponent} + ${digits - 1} bits`;
    };
    const formats = choice("format", NAMES.map((name) => [name, element("b", {}, name), element("small", {}, layout(name))]), pick("format"));
    formats.classList.add("formats");
    const another = element("button", { type: "button" }, "other features");
    another.addEventListener("click", () => ((state.seed += 1), changed()));
    return element("section", { class: "controls" }, formats,
      element("div", { class: "sliders" }, ...Object.entries(SLIDERS).map(([name, about]) => slider(name, about))),
      element("div", { class: "switches" },
        ...Object.entries(SWITCHES).map(([name, [title, options]]) =>
          element("div", {}, element("span", {}, title), choice(name, Object.entries(options), pick(name, (v) => v === "true")))),
        another));
  }

  function panel(title, note, ...content) {
    return element("section", { class: "panel" }, element("h3", {}, title), element("p", {}, note), ...content);
  }

  function place(name, tag = "div", style = "") {
    return (places[name] = element(tag, { class: style }));
  }

  function build() {
    const key = element("span", { class: "key" }, element("i", { class: "error" }), " true error  ", element("i", { class: "bound" }), " derived bound");
    root.replaceChildren(
      controls(), place("progress", "p", "progress"), place("cards", "div", "cards"),
      panel("Against the temperature", "Relative errors of the chosen format; the upright line is the temperature above.", key, place("curves", "div", "multiples")),
      panel("All formats", "The same features and temperature in each format.", key.cloneNode(true), place("ladders", "div", "multiples")),
      panel("Where the errors are", "", place("where", "div", "where")));
  }

  // --- results ----------------------------------------------------------------------------------

  let round = 0; // of drawing: an older one stops
  const SLICE = 20; // milliseconds of work after which the page may answer
  const MANY = 128; // rows: what takes longest is computed once beyond, and not at each temperature
  const kept = { features: "", at: new Map() };
  const later = () => new Promise((resolve) => setTimeout(resolve, 0));

  class Outdated extends Error {}

  /* The result of a generator. The page answers between its steps, and a change of a control ends it. */
  async function run(steps, own) {
    for (let until = performance.now() + SLICE; ; ) {
      const { done, value } = steps.next();
      if (done) return value;
      if (performance.now() > until) {
        await later();
        if (own !== round) throw new Outdated();
        until = performance.now() + SLICE;
      }
    }
  }

  /* Features, and the exact loss at one temperature: both are kept until the features change. */
  async function exactAt(temperature, own) {
    const { n, d, norm, cosine, seed } = state, name = [n, d, norm, cosine, seed].join();
    if (kept.features !== name) {
      const rows = Formats.features(state), dots = await run(Exact.productSteps(rows), own);
      Object.assign(kept, { features: name, rows, dots, at: new Map() });
    }
    if (!kept.at.has(temperature)) {
      const wide = n <= MANY || temperature === state.temperature;
      const exact = await run(Exact.lossSteps(kept.rows, kept.dots, 1 / temperature, wide), own);
      if (n > MANY && kept.at.size > 1) kept.at.clear();
      kept.at.set(temperature, exact);
    }
    return kept.at.get(temperature);
  }

  async function evaluate(format, temperature, own) {
    const settings = { ...state, format }, exact = await exactAt(temperature, own);
    const got = await run(Rounding.lossSteps(kept.rows, 1 / temperature, settings), own);
    const bounds = await run(Rounding.boundSteps(kept.rows, exact, 1 / temperature, settings), own);
    return { got, exact, bounds, errors: Rounding.errors(got, exact, bounds) };
  }

  const worstOf = (errors) => errors.reduce((best, v, i) => (!(v <= errors[best]) ? i : best), 0);
  const rightDigits = (got, want) => (got === want ? 17 : Math.max(0, -Math.log10(Math.abs((got - want) / want))));

  function card(name, { got, exact, errors }) {
    const { n, d } = state, field = { logits: "x", lse: "lse", loss: "loss", gradient: "gradient" }[name];
    let computed = got.loss, want = exact.loss, where = `mean of ${n} rows`;
    if (name !== "loss") {
      const at = worstOf(errors[field]);
      [computed, want] = [got[field][at], exact[field][at]];
      where = { logits: `worst of ${n * n}: query ${Math.floor(at / n)}, key ${at % n}`, lse: `worst of ${n}: row ${at}`,
                gradient: `worst of ${n * d}: row ${Math.floor(at / d)}, column ${at % d}` }[name];
    }
    const { error, bound } = errors.relative[name], right = rightDigits(computed, want);
    const bar = (v) => `${Math.max(0, Math.min(100, ((Math.log10(Math.max(v, 1e-300)) + 17) / 18) * 100)).toFixed(1)}%`;
    const level = element("div", { class: "level", title: "relative error, 10⁻¹⁷ to 10" }, element("i", { class: "error" }), element("i", { class: "bound" }));
    level.children[0].style.width = bar(error);
    level.children[1].style.left = bar(bound);
    const digits = error === 0 ? "all" : Math.max(0, -Math.log10(error)).toFixed(1);
    return element("section", { class: "card" },
      element("h3", {}, QUANTITIES[name]),
      element("p", { class: "right" }, element("b", {}, error !== error ? "0" : digits), " right digits"),
      level,
      element("p", { class: "numbers" }, element("span", { class: "error" }, `error ${short(error)}`), element("span", { class: "bound" }, `bound ${short(bound)}`)),
      element("dl", {}, element("dt", {}, "exact"), element("dd", {}, Plots.digits(want, 17)),
              element("dt", {}, "computed"), element("dd", {}, Plots.digits(computed, Math.floor(right)))),
      element("p", { class: "place" }, where));
  }

  /* An empty figure in its place, and then the drawing, as wide as the figure. */
  function draw(figure, drawing) {
    figure.append(drawing(Math.max(220, figure.clientWidth)));
  }

  function multiples(place, drawing) {
    const figures = Object.entries(QUANTITIES).map(([name, title]) => [name, element("figure", {}, element("h4", {}, title))]);
    place.replaceChildren(...figures.map(([, figure]) => figure));
    for (const [name, figure] of figures) draw(figure, (width) => drawing(width, name));
  }

  function where({ got, exact, errors, bounds }) {
    const canvas = element("canvas", { role: "img", "aria-label": "errors of all logits" });
    const most = Plots.map(canvas, errors.x, state.n), at = worstOf(errors.x);
    const stored = Formats.FORMATS[state.inFormat && Formats.FORMATS[state.format].stored === 16 ? state.format : state.format === "fp64" ? "fp64" : "fp32"];
    const right = Math.floor(Formats.rightBits(got.x[at], exact.x[at]));
    const shares = element("figure", {});
    places.where.replaceChildren(
      element("figure", {}, canvas, element("div", { class: "scale" }, element("span", {}, short(most / 1000)), element("i", { style: `background: ${Plots.scale}` }), element("span", {}, short(most))),
        element("figcaption", {}, "Errors of the logits: queries down, keys across.")),
      shares,
      element("figure", { class: "wide" },
        element("div", {}, element("span", {}, "exact"), Plots.bits(Formats.bits64(exact.x[at]), 52, 52)),
        element("div", {}, element("span", {}, "computed"), Plots.bits(Formats.bits64(got.x[at]), right, stored.digits - 1)),
        element("figcaption", {}, "The worst logit as a float64 number: ", element("i", { class: "sign" }, "sign"), ", ", element("i", { class: "exponent" }, "exponent"), ", fraction. ",
          element("i", { class: "wrong" }, "Wrong bits"), "; ", element("i", { class: "absent" }, "bits that the logit's format does not have"), ".")));
    draw(shares, (width) => Plots.histogram(width, [
      { name: "logits", errors: errors.x, bounds: bounds.x },
      { name: "gradient", errors: errors.gradient, bounds: bounds.gradient }]));
    shares.append(element("figcaption", {}, "How far each error is from its own bound: rounding errors of many terms cancel, a bound takes them all the worst way."));
  }

  async function changed() {
    const own = ++round;
    write();
    root.setAttribute("aria-busy", "true");
    try {
      await show(own);
      places.progress.textContent = "";
      root.removeAttribute("aria-busy");
    } catch (error) {
      if (!(error instanceof Outdated)) throw error;
    }
  }

  /* First the chosen format and temperature, then all formats, then all temperatures. */
  async function show(own) {
    const temperatures = state.n > MANY ? TEMPERATURES.filter((_, i) => i % 2 === 0) : TEMPERATURES;
    let computed = 0;
    const next = async (format, temperature) => {
      places.progress.textContent = `computing ${(computed += 1)} of ${1 + NAMES.length + temperatures.length}`;
      await later();
      if (own !== round) throw new Outdated();
      return evaluate(format, temperature, own);
    };
    const result = await next(state.format, state.temperature);
    places.cards.replaceChildren(...Object.keys(QUANTITIES).map((name) => card(name, result)));
    where(result);
    root.dataset.result = JSON.stringify(result.errors.relative);

    const rows = NAMES.map((format) => ({ format }));
    for (const row of rows) {
      row.errors = (await next(row.format, state.temperature)).errors.relative;
      multiples(places.ladders, (width, name) =>
        Plots.ladder(width, rows.map((r) => ({ format: r.format, relative: r.errors?.[name] })), state.format, [-18, 2]));
    }
    const points = [];
    for (const temperature of temperatures) {
      points.push({ temperature, relative: (await next(state.format, temperature)).errors.relative });
      multiples(places.curves, (width, name) => {
        const all = points.flatMap((p) => [p.relative[name].error, p.relative[name].bound]).filter((v) => v > 0 && v < Infinity).map(Math.log10);
        const range = [Math.max(-18, Math.floor(Math.min(...all, 0))), Math.min(2, Math.ceil(Math.max(...all, -18)))];
        return Plots.curves(width, points.map((p) => ({ temperature: p.temperature, ...p.relative[name] })), state.temperature, range, [0.005, 1]);
      });
    }
  }

  read();
  build();
  changed();
})();
