/* InfoNCE as a processor computes it, rounding each step, and bounds of its errors.

   Products: operands in the format, sums in float32 (float64 for fp64), as on tensor cores. Every other
   step is rounded to float32 too, or, for code in 16 bits throughout, to the format ("steps"). The
   positive stays out of the sum, or is subtracted from it as in textbooks ("formula"). Generators yield
   after each row. */
"use strict";

const Rounding = (() => {
  const { FORMATS, ROUND, rounded, bf16, whole } = typeof module === "undefined" ? Formats : require("./formats.js");
  const largest = (array) => array.reduce((most, v) => (v > most || v !== v ? v : most), 0);
  const softplus = (x) => Math.max(x, 0) + Math.log1p(Math.exp(-Math.abs(x)));
  const sigmoid = (x) => 1 / (1 + Math.exp(-x));

  /* Rounding of products' sums, and of each other step. */
  function steps({ format, inFormat }) {
    const wide = format === "fp64" ? "fp64" : "fp32";
    const narrow = inFormat && FORMATS[format].stored === 16 ? format : wide;
    const store = narrow === wide ? ROUND[wide] : (x) => ROUND[narrow](Math.fround(x));
    return { wide: ROUND[wide], store, wideName: wide, narrowName: narrow };
  }

  /* Sums over the last axis of both: a [m, k] by b [n, k], as [m, n]. */
  function* productSteps(a, b, m, n, k, format) {
    const out = new Float64Array(m * n);
    const wide = ROUND[format === "fp64" ? "fp64" : "fp32"];
    const split = format === "bf16x3";
    const left = rounded(a, split ? "bf16" : format), right = rounded(b, split ? "bf16" : format);
    const rest = (z, high) => z.map((v, i) => bf16(Math.fround(Math.fround(v) - high[i])));
    const dot = (p, q, i, j) => {
      let sum = 0;
      for (let c = 0; c < k; c++) sum = wide(sum + p[i * k + c] * q[j * k + c]);
      return sum;
    };
    const a2 = split && rest(a, left), b2 = split && rest(b, right);
    for (let i = 0; i < m; i++) {
      for (let j = 0; j < n; j++) {
        let sum = dot(left, right, i, j);
        if (split) sum = wide(sum + wide(dot(left, b2, i, j) + dot(a2, right, i, j)));
        out[i * n + j] = sum;
      }
      yield;
    }
    return out;
  }

  function transposed(a, rows, columns) {
    const out = new Float64Array(a.length);
    for (let i = 0; i < rows; i++) for (let j = 0; j < columns; j++) out[j * rows + i] = a[i * columns + j];
    return out;
  }

  /* The power of two by which dL/dx fits the range of float16, as the library has it. */
  function unitOf(most, { format, inFormat }) {
    return format === "fp16" && !inFormat && most > 0 ? 2 ** Math.floor(14 - Math.log2(most)) : 1;
  }

  /* Logits, log-sum-exps, losses, their mean and dL/dquery, every step rounded. */
  function* lossSteps({ query, key, n, d }, scale, settings) {
    const { wide, store } = steps(settings);
    const dots = yield* productSteps(query, key, n, n, d, settings.format);
    const x = dots.map((dot) => store(wide(scale * store(dot))));
    const lse = new Float64Array(n), losses = new Float64Array(n), dx = new Float64Array(n * n);
    for (let i = 0; i < n; i++) {
      const apart = !settings.textbook, positive = x[i * n + i];
      let top = -Infinity, sum = 0;
      for (let j = 0; j < n; j++) if (!(apart && j === i)) top = Math.max(top, x[i * n + j]);
      for (let j = 0; j < n; j++)
        if (!(apart && j === i)) sum = wide(sum + store(wide(Math.exp(store(x[i * n + j] - top)))));
      const all = store(top + store(wide(Math.log(store(sum)))));
      const gap = store(all - positive); // of the negatives, where the positive is apart
      losses[i] = apart ? store(wide(softplus(gap))) : gap;
      lse[i] = apart ? store(wide(positive + losses[i])) : all;
      for (let j = 0; j < n; j++)
        dx[i * n + j] = store(wide(Math.exp(store(x[i * n + j] - lse[i]))));
      dx[i * n + i] = apart ? -store(wide(sigmoid(gap))) : store(dx[i * n + i] - 1);
      yield;
    }
    let total = 0;
    for (const one of losses) total = wide(total + one);
    // Positives that are apart are no elements of the block: they are added to the sums afterwards
    const apart = !settings.textbook, block = dx.map((v, at) => (apart && at % (n + 1) === 0 ? 0 : v));
    const positive = FORMATS[settings.format].stored === 16 ? rounded(key, settings.format) : key;
    const unit = unitOf(largest(block.map(Math.abs)), settings);
    const products = yield* productSteps(block.map((v) => v * unit), transposed(key, n, d), n, d, n, settings.format);
    const gradient = products.map((sum, at) => {
      const others = store(sum / unit);
      const all = apart ? store(wide(others + wide(dx[Math.floor(at / d) * (n + 1)] * positive[at]))) : others;
      return store(wide((scale / n) * all));
    });
    return { x, lse, losses, dx, loss: store(wide(total / n)), gradient };
  }

  /* Bounds of the errors of the function above against `exact` (docs/explorer.md derives them). */
  function* boundSteps({ query, key, n, d }, exact, scale, settings) {
    const { narrowName, wideName } = steps(settings);
    const f = FORMATS[settings.format], w = FORMATS[wideName], s = FORMATS[narrowName];
    const split = settings.format === "bf16x3";
    const u = w.roundoff + (wideName === "fp64" ? 2 ** -52 : 2 ** -50); // the browser's own functions
    const rho = narrowName === wideName ? u : u + s.roundoff * (1 + u);
    const vanished = 2 ** -1000; // `exact` takes an exponential below e^-700 for 0
    const tiny = (narrowName === wideName ? w.tiny : w.tiny + s.tiny) + vanished;
    const most = (2 - 2 ** (1 - s.digits)) * 2 ** s.most;
    const operandMost = 2 ** (f.most + 1) * (1 - 2 ** -f.digits);
    const growth = (terms) => (terms * u) / (1 - terms * u);
    /* The error of a rounded result, from the error before. */
    const step = (size, error) => (size + error > most ? Infinity : error + rho * (size + error) + tiny);
    const operand = (v) => (v > operandMost ? Infinity : f.roundoff * v + f.tiny);
    /* How far a probability p moves with its exponent; p may be 0, and the exponent's error infinite. */
    const least = (a, b) => (a < b ? a : b);
    const moves = (p, error) => least(p * Math.expm1(error), 1);
    const dropped = split ? (2 ** -8 * (1 + 2 ** -8)) ** 2 : 0; // low part by low part

    const x = new Float64Array(n * n), lse = new Float64Array(n), losses = new Float64Array(n);
    const dx = new Float64Array(n * n);
    const logits = (i) => {
      for (let j = 0; j < n; j++) {
        let size = 0, error = 0;
        for (let c = 0; c < d; c++) {
          const a = Math.abs(query[i * d + c]), b = Math.abs(key[j * d + c]);
          const da = operand(a), db = operand(b);
          size += a * b;
          error += a * db + b * da + da * db + dropped * a * b;
        }
        error += growth(d + 3) * (size + error);
        const dot = Math.abs(exact.x[i * n + j]) / scale;
        error = narrowName === wideName ? error : step(dot, error);
        x[i * n + j] = step(Math.abs(exact.x[i * n + j]), scale * error);
      }
    };
    for (let i = 0; i < n; i++) {
      logits(i);
      yield;
    }
    for (let i = 0; i < n; i++) {
      const apart = !settings.textbook, at = i * n + i;
      const whole = apart ? exact.negative[i] : exact.lse[i];
      let top = -Infinity;
      for (let j = 0; j < n; j++) if (!(apart && j === i)) top = Math.max(top, exact.x[i * n + j]);
      let moved = 0, relative = growth(n), reach = 0; // of logits; of their exponentials' sum
      for (let j = 0; j < n; j++) if (!(apart && j === i)) reach = Math.max(reach, x[i * n + j]);
      for (let j = 0; j < n; j++) {
        if (apart && j === i) continue;
        const share = Math.exp(exact.x[i * n + j] - whole);
        moved += share * Math.expm1(x[i * n + j]);
        const far = Math.abs(exact.x[i * n + j] - top) + 2 * reach;
        relative += share * (Math.exp(rho * far + tiny) * (1 + rho) * (1 + growth(n)) - 1) + tiny;
      }
      relative = relative * (1 + rho) + rho;
      const logarithm = relative < 1 ? -Math.log1p(-relative) : Infinity;
      const before = least(Math.log1p(moved), reach) + logarithm;
      const all = step(Math.abs(whole), step(Math.abs(whole - top), before) + u * Math.abs(top));
      const gap = step(Math.abs(apart ? exact.gaps[i] : exact.losses[i]), all + x[at]);
      const share = sigmoid(exact.gaps[i]);
      losses[i] = apart ? step(exact.losses[i], least(share * Math.expm1(gap), gap)) : gap;
      lse[i] = apart ? step(Math.abs(exact.lse[i]), losses[i] + x[at]) : all;
      for (let j = 0; j < n; j++) {
        const exponent = x[i * n + j] + lse[i];
        const p = Math.exp(exact.x[i * n + j] - exact.lse[i]);
        const size = Math.abs(exact.x[i * n + j] - exact.lse[i]);
        dx[i * n + j] = step(p, moves(p, step(size, exponent)));
      }
      if (apart) dx[at] = step(share, moves(share, gap));
      else dx[at] = step(Math.abs(exact.dx[at]), dx[at]);
      yield;
    }
    const mean = losses.reduce((sum, one) => sum + one, 0) / n;
    const loss = step(exact.loss, mean + growth(n) * (exact.loss + mean));

    const unit = unitOf(largest(dx.map((e, at) => e + Math.abs(exact.dx[at]))), settings);
    const inUnits = unit === 1 ? operand : (v) => f.roundoff * v + (2 * f.tiny) / unit;
    const gradient = new Float64Array(n * d);
    const gradients = (i) => {
      for (let c = 0; c < d; c++) {
        let size = 0, error = 0;
        for (let j = 0; j < n; j++) {
          const p = Math.abs(exact.dx[i * n + j]), b = Math.abs(key[j * d + c]);
          const dp = dx[i * n + j] + inUnits(p + dx[i * n + j]), db = operand(b);
          size += p * b;
          error += p * db + b * dp + dp * db + dropped * (p + dp) * (b + db);
        }
        error += growth(n + 3) * (size + error);
        const sum = (Math.abs(exact.gradient[i * d + c]) * n) / scale;
        error = narrowName === wideName ? error : step(sum, error);
        gradient[i * d + c] = step(Math.abs(exact.gradient[i * d + c]), (scale / n) * error);
      }
    };
    for (let i = 0; i < n; i++) {
      gradients(i);
      yield;
    }
    return { x, lse, losses, loss, gradient };
  }

  const norm = (array) => Math.sqrt(array.reduce((sum, v) => sum + v * v, 0));

  /* Errors of `got`, and the bounds, of four quantities: of the worst logit and row, of the mean loss,
     and of the gradient's norm; `relative` to the size of that quantity. */
  function errors(got, exact, bound) {
    const off = (name) => got[name].map((v, i) => Math.abs(v - exact[name][i] - exact[name + "Low"][i]));
    const result = { x: off("x"), lse: off("lse"), losses: off("losses"), gradient: off("gradient") };
    const ratio = (a, b) => (a === 0 ? 0 : a / b);
    const rows = (name) => {
      const size = largest(exact[name].map(Math.abs));
      return { error: ratio(largest(result[name]), size), bound: ratio(largest(bound[name]), size) };
    };
    const length = norm(exact.gradient);
    result.relative = {
      logits: rows("x"),
      lse: rows("lse"),
      loss: { error: ratio(Math.abs(got.loss - exact.loss - exact.lossLow), exact.loss), bound: ratio(bound.loss, exact.loss) },
      gradient: { error: ratio(norm(result.gradient), length), bound: ratio(norm(bound.gradient), length) },
    };
    return result;
  }

  return { loss: whole(lossSteps), bounds: whole(boundSteps), product: whole(productSteps), errors, lossSteps, boundSteps };
})();

if (typeof module !== "undefined") module.exports = Rounding;
