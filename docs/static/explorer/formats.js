/* Formats of floating-point numbers: rounding to them, bits, digits; and random features.

   Every format but fp64 rounds float32 numbers, as tensor cores and casts do. */
"use strict";

const Formats = (() => {
  // digits: of the significand in base 2, the leading one among them; least, most: exponents
  const FORMATS = {
    fp64: { digits: 53, exponent: 11, least: -1022, most: 1023, stored: 64 },
    fp32: { digits: 24, exponent: 8, least: -126, most: 127, stored: 32 },
    bf16x3: { digits: 16, exponent: 8, least: -126, most: 127, stored: 32 },
    tf32: { digits: 11, exponent: 8, least: -126, most: 127, stored: 32 },
    fp16: { digits: 11, exponent: 5, least: -14, most: 15, stored: 16 },
    bf16: { digits: 8, exponent: 8, least: -126, most: 127, stored: 16 },
  };
  for (const format of Object.values(FORMATS)) {
    format.roundoff = 2 ** -format.digits;
    format.tiny = 2 ** (format.least - format.digits); // half of the smallest number above 0
  }
  // tf32 and bf16x3 in 32 bits: tiny is that of their operands
  FORMATS.bf16x3.tiny = FORMATS.bf16.tiny;

  const float = new Float32Array(1);
  const word = new Uint32Array(float.buffer);
  const double = new Float64Array(1);
  const words = new Uint32Array(double.buffer); // [low, high] on little-endian machines

  const bits32 = (x) => ((float[0] = x), word[0]);
  const from32 = (bits) => ((word[0] = bits), float[0]);

  /* Nearest bfloat16, ties to even. */
  function bf16(x) {
    const bits = bits32(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return NaN;
    return from32((bits + 0x7fff + ((bits >>> 16) & 1)) & 0xffff0000);
  }

  /* Nearest tf32, ties away from zero: cvt.rna.tf32.f32. */
  function tf32(x) {
    const bits = bits32(x);
    if ((bits & 0x7f800000) === 0x7f800000) return float[0];
    return from32((bits + 0x1000) & 0xffffe000);
  }

  const TO_INTEGER = 1.5 * 2 ** 52; // a float64 sum with it has no bits after the point

  /* Nearest float16, ties to even, subnormal numbers among them. */
  function fp16(x) {
    float[0] = x;
    const y = float[0];
    const exponent = ((word[0] >>> 23) & 0xff) - 127;
    if (exponent > 15) return y * Infinity; // NaN stays
    const ulp = 2 ** (Math.max(exponent, -14) - 10);
    const nearest = (y / ulp + TO_INTEGER - TO_INTEGER) * ulp;
    if (nearest === 0) return 1 / y < 0 ? -0 : 0;
    return Math.abs(nearest) > 65504 ? y * Infinity : nearest;
  }

  /* Sum of two bfloat16 parts. */
  function bf16x3(x) {
    const y = Math.fround(x);
    const high = bf16(y);
    return high + bf16(Math.fround(y - high));
  }

  const ROUND = { fp64: (x) => x, fp32: Math.fround, bf16x3, tf32, fp16, bf16 };

  function rounded(array, name) {
    const round = ROUND[name];
    return Float64Array.from(array, round);
  }

  /* Sign, exponent and fraction of x in float64, as a text of 64 digits. */
  function bits64(x) {
    double[0] = x;
    return [words[1], words[0]].map((w) => w.toString(2).padStart(32, "0")).join("");
  }

  /* How many bits of the fraction of `got` follow from `want`: -log2 of the relative error. */
  function rightBits(got, want) {
    if (!Number.isFinite(got)) return 0;
    return Math.max(0, Math.min(53, -Math.log2(Math.abs((got - want) / want))));
  }

  /* Uniform 32-bit integers by splitmix32, then normal numbers by Box and Muller. */
  function generator(seed) {
    let state = seed >>> 0;
    const next = () => {
      state = (state + 0x9e3779b9) >>> 0;
      let z = state;
      z = Math.imul(z ^ (z >>> 16), 0x21f0aaad);
      z = Math.imul(z ^ (z >>> 15), 0x735a2d97);
      return ((z ^ (z >>> 15)) >>> 0) + 0.5;
    };
    return () => Math.sqrt(-2 * Math.log(next() / 2 ** 32)) * Math.cos((2 * Math.PI * next()) / 2 ** 32);
  }

  /* Queries and keys [n, d], float32 numbers of one norm; key i has this cosine to query i. */
  function features({ n, d, norm, cosine, seed }) {
    const normal = generator(seed);
    const unit = (row) => {
      const length = Math.sqrt(row.reduce((sum, x) => sum + x * x, 0));
      return row.map((x) => x / length);
    };
    const query = new Float64Array(n * d), key = new Float64Array(n * d);
    const rest = Math.sqrt(1 - cosine * cosine);
    for (let i = 0; i < n; i++) {
      const q = unit(Array.from({ length: d }, normal));
      let other = Array.from({ length: d }, normal);
      const along = other.reduce((sum, x, c) => sum + x * q[c], 0);
      other = unit(other.map((x, c) => x - along * q[c]));
      for (let c = 0; c < d; c++) {
        query[i * d + c] = Math.fround(norm * q[c]);
        key[i * d + c] = Math.fround(norm * (cosine * q[c] + rest * other[c]));
      }
    }
    return { query, key, n, d };
  }

  /* A function that runs all steps of a generator, and returns its result. The page runs the steps
     itself, some at a time, so that it answers meanwhile. */
  function whole(steps) {
    return (...given) => {
      const run = steps(...given);
      for (;;) {
        const { done, value } = run.next();
        if (done) return value;
      }
    };
  }

  return { FORMATS, ROUND, rounded, bits64, rightBits, features, bf16, whole };
})();

if (typeof module !== "undefined") module.exports = Formats;
