/* The loss in double-double arithmetic: pairs (high, low) of float64 numbers, some 32 digits.

   Each function of numbers leaves its result in `H` and `L`, so that no object is made for it.
   Generators yield after each row. */
"use strict";

const Exact = (() => {
  const { whole } = typeof module === "undefined" ? Formats : require("./formats.js");
  let H = 0, L = 0;
  const SPLIT = 2 ** 27 + 1;
  const LN2 = [0.6931471805599453, 2.3190468138462996e-17];
  const STEPS = 6, TERMS = 12; // of exp: a Taylor series at x / 2^STEPS

  function set(high, low) {
    H = high + low;
    L = low - (H - high);
  }

  function plus(ah, al, bh, bl) {
    const s = ah + bh, v = s - ah;
    set(s, ah - (s - v) + (bh - v) + al + bl);
  }

  function times(ah, al, bh, bl) {
    const p = ah * bh;
    let t = SPLIT * ah;
    const a1 = t - (t - ah), a2 = ah - a1;
    t = SPLIT * bh;
    const b1 = t - (t - bh), b2 = bh - b1;
    set(p, a1 * b1 - p + a1 * b2 + a2 * b1 + a2 * b2 + (ah * bl + al * bh));
  }

  function exp(h, l) {
    if (h < -700) return set(0, 0);
    const k = Math.round(h / LN2[0]);
    times(LN2[0], LN2[1], k, 0);
    plus(h, l, -H, -L);
    const rh = H / 2 ** STEPS, rl = L / 2 ** STEPS;
    set(1, 0);
    for (let i = TERMS; i > 0; i--) { // 1 + r / i * (what comes after)
      times(H, L, rh, rl);
      divide(H, L, i);
      plus(H, L, 1, 0);
    }
    for (let i = 0; i < STEPS; i++) times(H, L, H, L);
    set(H * 2 ** k, L * 2 ** k);
  }

  function divide(h, l, by) {
    const q = h / by;
    times(q, 0, by, 0);
    plus(h, l, -H, -L);
    set(q, H / by);
  }

  /* One step of Newton from float64's logarithm. */
  function log(h, l) {
    const y = Math.log(h);
    exp(-y, 0);
    times(H, L, h, l);
    plus(H, L, -1, 0);
    plus(y, 0, H - (H * H) / 2, L);
  }

  /* log(1 + e) of a number e >= 0 that may be tiny: then e (1 - e / 2 + e^2 / 3 - ...). */
  function log1p(h, l) {
    if (h > 0.01) {
      plus(1, 0, h, l);
      return log(H, L);
    }
    set(0, 0);
    for (let i = 17; i > 0; i--) {
      times(H, L, -h, -l);
      const after = H, afterLow = L;
      divide(1, 0, i);
      plus(H, L, after, afterLow);
    }
    times(H, L, h, l);
  }

  /* The sum of a_c b_c over d numbers, from two offsets. */
  function dot(a, from, b, start, d) {
    let sh = 0, sl = 0;
    for (let c = 0; c < d; c++) {
      times(a[from + c], 0, b[start + c], 0);
      plus(sh, sl, H, L);
      (sh = H), (sl = L);
    }
  }

  /* <q_i, k_j> [n, n], as high and low parts. */
  function* productSteps({ query, key, n, d }) {
    const high = new Float64Array(n * n), low = new Float64Array(n * n);
    for (let i = 0; i < n; i++) {
      for (let j = 0; j < n; j++) {
        dot(query, i * d, key, j * d, d);
        (high[i * n + j] = H), (low[i * n + j] = L);
      }
      yield;
    }
    return { high, low };
  }

  /* Everything of InfoNCE at one scale; gaps are log-sum-exps of negatives less positives. The
     gradient in double-double takes time: without it, the matrix product is in float64. */
  function* lossSteps({ key, n, d }, dots, scale, wideGradient) {
    const pair = (length) => [new Float64Array(length), new Float64Array(length)];
    const [x, xLow] = pair(n * n), [lse, lseLow] = pair(n), [losses, lossesLow] = pair(n);
    const dx = pair(n * n), gaps = new Float64Array(n), negative = new Float64Array(n);
    let totalHigh = 0, totalLow = 0;

    function row(i) {
      let top = -Infinity;
      for (let j = 0; j < n; j++) {
        const at = i * n + j;
        times(dots.high[at], dots.low[at], scale, 0);
        (x[at] = H), (xLow[at] = L);
        if (j !== i) top = Math.max(top, H);
      }
      let sh = 0, sl = 0;
      for (let j = 0; j < n; j++) {
        if (j === i) continue;
        plus(x[i * n + j], xLow[i * n + j], -top, 0);
        exp(H, L);
        plus(sh, sl, H, L);
        (sh = H), (sl = L);
      }
      log(sh, sl);
      plus(H, L, top, 0);
      negative[i] = H;
      plus(H, L, -x[i * n + i], -xLow[i * n + i]);
      const gh = H, gl = L, sign = gh > 0 ? -1 : 1;
      gaps[i] = gh;
      exp(sign * gh, sign * gl); // e^-|gap|
      log1p(H, L);
      if (sign < 0) plus(gh, gl, H, L);
      (losses[i] = H), (lossesLow[i] = L);
      plus(totalHigh, totalLow, H, L);
      (totalHigh = H), (totalLow = L);
      plus(losses[i], lossesLow[i], x[i * n + i], xLow[i * n + i]);
      (lse[i] = H), (lseLow[i] = L);
      let away = 0, awayLow = 0; // probability of the negatives
      for (let j = 0; j < n; j++) {
        if (j === i) continue;
        const at = i * n + j;
        plus(x[at], xLow[at], -lse[i], -lseLow[i]);
        exp(H, L);
        (dx[0][at] = H), (dx[1][at] = L);
        plus(away, awayLow, H, L);
        (away = H), (awayLow = L);
      }
      (dx[0][i * n + i] = -away), (dx[1][i * n + i] = -awayLow);
    }

    for (let i = 0; i < n; i++) {
      row(i);
      yield;
    }
    divide(totalHigh, totalLow, n);
    const mean = [H, L];
    return { x, xLow, lse, lseLow, losses, lossesLow, loss: mean[0], lossLow: mean[1], gaps, negative,
             dx: dx[0], ...(yield* gradientSteps(dx, key, n, d, scale, wideGradient)) };
  }

  /* dL/dquery [n, d], as high and low parts. */
  function* gradientSteps(dx, key, n, d, scale, wide) {
    const high = new Float64Array(n * d), low = new Float64Array(n * d);

    function row(i) {
      for (let c = 0; c < d; c++) {
        let sh = 0, sl = 0;
        for (let j = 0; j < n; j++) {
          const at = i * n + j;
          if (wide) {
            times(dx[0][at], dx[1][at], key[j * d + c], 0);
            plus(sh, sl, H, L);
            (sh = H), (sl = L);
          } else sh += dx[0][at] * key[j * d + c];
        }
        times(sh, sl, scale, 0);
        divide(H, L, n);
        (high[i * d + c] = H), (low[i * d + c] = L);
      }
    }

    for (let i = 0; i < n; i++) {
      row(i);
      yield;
    }
    return { gradient: high, gradientLow: low };
  }

  return { products: whole(productSteps), loss: whole(lossSteps), productSteps, lossSteps };
})();

if (typeof module !== "undefined") module.exports = Exact;
