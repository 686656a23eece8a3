// The twin: minigen once more, in plain JavaScript. It trains to the same weights, bit for bit, and
// writes the same token ids. `node twin.js train PAGE` trains the run of a report again.
//
// It can be exact because what it repeats is: IEEE-754 operations that every language rounds alike
// (+ - * / and the square root), sums of integers below 2^53, and random words that are a pure
// function of (seed, name, index). Written from docs/specification.md. No dependency, no DOM.
"use strict";

const twin = (() => {
  const END_OF_TEXT = 256;
  const MASK = (1n << 64n) - 1n;

  // ── SHA-256 (FIPS 180-4); crypto.subtle is missing on file:// in some browsers ────────────────

  // The first 32 bits behind the point of square and cube roots of primes, as the standard has it.
  const primes = [];
  for (let n = 2; primes.length < 64; n++) {
    if (primes.every((prime) => n % prime)) primes.push(n);
  }
  const fraction = (n, power) => {
    const target = BigInt(n) << BigInt(32 * power);
    let root = 0n;
    for (let bit = 1n << 40n; bit; bit >>= 1n) {
      if ((root + bit) ** BigInt(power) <= target) root += bit;
    }
    return Number(root & 0xffffffffn) | 0;
  };
  const ROUND_CONSTANTS = Int32Array.from(primes, (prime) => fraction(prime, 3));
  const INITIAL_STATE = Int32Array.from(primes.slice(0, 8), (prime) => fraction(prime, 2));

  /** SHA-256 of a Uint8Array, as 32 bytes. */
  function sha256(bytes) {
    const padded = new Uint8Array(((bytes.length + 72) >> 6) << 6);
    padded.set(bytes);
    padded[bytes.length] = 0x80;
    const view = new DataView(padded.buffer);
    view.setBigUint64(padded.length - 8, BigInt(bytes.length) * 8n);
    const state = INITIAL_STATE.slice();
    const w = new Int32Array(64);
    const rotate = (x, n) => (x >>> n) | (x << (32 - n));
    for (let start = 0; start < padded.length; start += 64) {
      for (let i = 0; i < 16; i++) w[i] = view.getInt32(start + 4 * i);
      for (let i = 16; i < 64; i++) {
        const s0 = rotate(w[i - 15], 7) ^ rotate(w[i - 15], 18) ^ (w[i - 15] >>> 3);
        const s1 = rotate(w[i - 2], 17) ^ rotate(w[i - 2], 19) ^ (w[i - 2] >>> 10);
        w[i] = w[i - 16] + s0 + w[i - 7] + s1;
      }
      let [a, b, c, d, e, f, g, h] = state;
      for (let i = 0; i < 64; i++) {
        const s1 = rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25);
        const t1 = (h + s1 + ((e & f) ^ (~e & g)) + ROUND_CONSTANTS[i] + w[i]) | 0;
        const s0 = rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22);
        const t2 = (s0 + ((a & b) ^ (a & c) ^ (b & c))) | 0;
        [h, g, f, e, d, c, b, a] = [g, f, e, (d + t1) | 0, c, b, a, (t1 + t2) | 0];
      }
      [a, b, c, d, e, f, g, h].forEach((word, i) => (state[i] += word));
    }
    const digest = new Uint8Array(32);
    state.forEach((word, i) => new DataView(digest.buffer).setInt32(4 * i, word));
    return digest;
  }

  const hex = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

  // ── Streams: Philox 4×64-10 under a key made of seed and name ─────────────────────────────────

  /** A sequence of words of 64 bits, which are BigInts; indices may be numbers or BigInts. */
  class Stream {
    constructor(seed, name) {
      const digest = sha256(new TextEncoder().encode(`minigen:${BigInt(seed)}:${name}`));
      const view = new DataView(digest.buffer);
      this.key = [view.getBigUint64(0, true), view.getBigUint64(8, true)];
      this.block = [];
      this.blockNumber = -1n;
    }

    word(index) {
      index = BigInt(index);
      const number = index / 4n;
      if (number !== this.blockNumber) {
        this.block = philox(number + 1n, this.key); // numpy counts before it draws
        this.blockNumber = number;
      }
      return this.block[Number(index % 4n)];
    }

    /** The words from number `first` on, `count` of them, as integers from 0 to below `below`. */
    integers(first, count, below) {
      const words = Array.from({ length: count }, (_, i) => this.word(BigInt(first) + BigInt(i)));
      return words.map((word) => Number((word * BigInt(below)) >> 64n));
    }

    /** Word number `index` as a float in [0, 1). */
    uniform(index) {
      return Number(this.word(index) >> 11n) * powerOfTwo(-53);
    }
  }

  function philox(counter, [k0, k1]) {
    let c = [0n, 64n, 128n, 192n].map((shift) => (counter >> shift) & MASK);
    for (let round = 0; round < 10; round++) {
      const x = c[0] * 0xd2e7470ee14c6c93n;
      const y = c[2] * 0xca5a826395121157n;
      c = [(y >> 64n) ^ c[1] ^ k0, y & MASK, (x >> 64n) ^ c[3] ^ k1, x & MASK];
      k0 = (k0 + 0x9e3779b97f4a7c15n) & MASK;
      k1 = (k1 + 0xbb67ae8584caa73bn) & MASK;
    }
    return c;
  }

  // ── Arithmetic: exp from a table and a cubic, log, cos, integer grids ─────────────────────────

  const bitLength = (n) => n.toString(2).length;
  const ceilLog2 = (n) => (n <= 1 ? 0 : bitLength(BigInt(n - 1)));

  /** 2^n for -1022 ≤ n ≤ 1023, from its bits: Math.pow promises no exact powers. */
  function powerOfTwo(n) {
    const view = new DataView(new ArrayBuffer(8));
    view.setBigUint64(0, BigInt(n + 1023) << 52n);
    return view.getFloat64(0);
  }

  /** a/b, correctly rounded: 64 bits or more of the quotient, the last one set if more follow. */
  function quotient(a, b) {
    const shift = Math.max(0, 64 + bitLength(b) - bitLength(a));
    const scaled = a << BigInt(shift);
    const sticky = scaled % b ? 1n : 0n;
    return Number((scaled / b) | sticky) * powerOfTwo(-shift);
  }

  /** Round to the nearest integer, of two the even one, for |x| ≤ 2^51. */
  const ROUNDER = 1.5 * 4503599627370496; // 1.5·2^52: where the last bit of a float counts ones
  const rint = (x) => x + ROUNDER - ROUNDER;

  function leadingBits(value, scale, bits) {
    const shift = BigInt(bitLength(value) - bits);
    const head = (value >> shift) << shift;
    return [quotient(head, 1n << scale), value - head];
  }

  const LN2 = 0xb17217f7d1cf79abc9e3b39803f2f6afn; // ln 2: 128 bits behind the binary point
  const STEPS = 1024;
  const STEPS_PER_NAT = quotient(1024n << 128n, LN2);
  const [STEP_HIGH, stepRest] = leadingBits(LN2, 138n, 32);
  const STEP_LOW = quotient(stepRest, 1n << 138n);
  const [LN2_HIGH, ln2Rest] = leadingBits(LN2, 128n, 42);
  const LN2_LOW = quotient(ln2Rest, 1n << 128n);
  const HALF_PI = 0x3243f6a8885a308d313198a2e03707344n >> 1n; // π/2: 128 bits behind the point
  const PER_HALF_PI = quotient(1n << 128n, HALF_PI);
  const [HALF_PI_HIGH, halfPiRest] = leadingBits(HALF_PI, 128n, 32);
  const [HALF_PI_MIDDLE, halfPiLast] = leadingBits(halfPiRest, 128n, 32);
  const HALF_PI_LOW = quotient(halfPiLast, 1n << 128n);

  /** Integer square root of a BigInt, by Newton's method from above. */
  function isqrt(n) {
    let root = 1n << BigInt((bitLength(n) + 1) >> 1);
    for (;;) {
      const next = (root + n / root) >> 1n;
      if (next >= root) return root;
      root = next;
    }
  }

  /** 2^(j/1024) for j = 0 … 1023. */
  const ROOTS = (() => {
    let root = 2n << 128n;
    for (let i = 0; i < 10; i++) root = isqrt(root << 128n);
    const powers = [1n << 128n];
    while (powers.length < STEPS) powers.push((powers[powers.length - 1] * root) >> 128n);
    return Float64Array.from(powers, (power) => quotient(power, 1n << 128n));
  })();

  const expTables = new Map();

  /** 2^(bits − m/1024) for m = 0 … 1024·(bits + 2). */
  function expTable(bits) {
    if (!expTables.has(bits)) {
      const table = new Float64Array(STEPS * (bits + 2) + 1);
      table.forEach((_, m) => {
        const rest = m % STEPS;
        const octave = powerOfTwo(bits - (m - rest) / STEPS);
        table[m] = octave * (rest ? 0.5 * ROOTS[STEPS - rest] : 1.0);
      });
      expTables.set(bits, table);
    }
    return expTables.get(bits);
  }

  /** rint(exp(−gap)·2^bits) for a gap ≥ 0 (Infinity included). */
  function integerExp(gap, bits) {
    gap = Math.min(gap, (bits + 2) * LN2_HIGH);
    const step = rint(gap * STEPS_PER_NAT);
    const r = -gap + step * STEP_HIGH + step * STEP_LOW;
    return rint((1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0)))) * expTable(bits)[step]);
  }

  /** Natural logarithm of a positive number that is not subnormal. */
  function log(x) {
    const view = new DataView(new ArrayBuffer(8));
    view.setFloat64(0, x);
    let k = (view.getUint16(0) >> 4) - 1022; // x = mantissa·2^k
    view.setUint16(0, (view.getUint16(0) & 0xf) | (1022 << 4));
    let mantissa = view.getFloat64(0); // from ½ to below 1
    if (mantissa < ROOTS[STEPS / 2] * 0.5) [mantissa, k] = [2.0 * mantissa, k - 1];
    const f = mantissa - 1.0;
    const s = f / (2.0 + f);
    const square = s * s;
    let series = 0.0;
    for (let n = 10; n > 0; n--) series = square * (2.0 / (2 * n + 1) + series);
    return k * LN2_HIGH + (f - (s * (f - series) - k * LN2_LOW));
  }

  /** Cosine of x in radians, for |x| ≤ 2^20. */
  function cos(x) {
    const n = rint(x * PER_HALF_PI);
    const r = x - n * HALF_PI_HIGH - n * HALF_PI_MIDDLE - n * HALF_PI_LOW;
    const square = r * r;
    let [cosine, sine] = [1.0, 1.0];
    for (let i = 17; i > 0; i -= 2) {
      cosine = 1.0 - (square / (i * (i + 1))) * cosine;
      sine = 1.0 - (square / ((i + 1) * (i + 2))) * sine;
    }
    const quadrant = ((n % 4) + 4) % 4;
    const magnitude = quadrant % 2 ? r * sine : cosine;
    return quadrant === 1 || quadrant === 2 ? -magnitude : magnitude;
  }

  const gridBits = (longestSum) => (53 - ceilLog2(longestSum)) >> 1;
  const EXPONENT_LIMIT = 400; // grids take magnitudes below 2^400

  /** The smallest power of two by which magnitudes up to `largest` are ≤ 2^bits. */
  function gridUnit(largest, bits) {
    if (!(largest < powerOfTwo(EXPONENT_LIMIT))) throw new RangeError(`magnitudes must be finite and below 2^400 (got ${largest})`);
    if (largest === 0) return powerOfTwo(-bits);
    const view = new DataView(new ArrayBuffer(8));
    view.setFloat64(0, largest);
    const word = view.getBigUint64(0);
    const isPower = (word & ((1n << 52n) - 1n)) === 0n;
    const exponent = Number(word >> 52n) - 1022 - (isPower ? 1 : 0); // largest ≤ 2^exponent
    return powerOfTwo(Math.max(exponent, -EXPONENT_LIMIT) - bits);
  }

  function largestMagnitude(x) {
    let most = 0;
    for (let i = 0; i < x.length; i++) {
      const magnitude = Math.abs(x[i]);
      if (!(magnitude <= most)) most = magnitude; // NaN stays
    }
    return most;
  }

  /** Round x to integers of `bits` bits times a power of two: [integers, unit]. */
  function roundToGrid(x, bits) {
    const unit = gridUnit(largestMagnitude(x), bits);
    const perUnit = 1.0 / unit;
    const integers = new Float64Array(x.length);
    for (let i = 0; i < x.length; i++) integers[i] = rint(x[i] * perUnit);
    return [integers, unit];
  }

  // ── The weights: E (V, D), W (D, K, V) and b (V), one after the other in one array ────────────

  const fromBase64 = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));

  function floatsOf(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    return Float64Array.from({ length: bytes.length / 8 }, (_, i) => view.getFloat64(8 * i, true));
  }

  /** E, W and b as views of one array. */
  function views(flat, [V, K, D]) {
    const [W, b] = [V * D, V * D + D * K * V];
    return { E: flat.subarray(0, W), W: flat.subarray(W, b), b: flat.subarray(b, b + V) };
  }

  /** SHA-256 over name, NUL, shape, NUL and bytes (little-endian) of E, W and b: what runs compare. */
  function fingerprint(flat, shape) {
    const [V, K, D] = shape;
    const heads = { E: [V, D], W: [D, K, V], b: [V] };
    const parts = Object.entries(views(flat, shape)).map(([name, tensor]) => {
      const head = new TextEncoder().encode(`${name}\0${heads[name].join(",")}\0`);
      const part = new Uint8Array(head.length + 8 * tensor.length);
      const view = new DataView(part.buffer);
      part.set(head);
      tensor.forEach((value, i) => view.setFloat64(head.length + 8 * i, value, true));
      return part;
    });
    const all = new Uint8Array(parts.reduce((length, part) => length + part.length, 0));
    let length = 0;
    for (const part of parts) {
      all.set(part, length);
      length += part.length;
    }
    return hex(sha256(all));
  }

  // ── The model: z = Σₖ T[xₖ, k] + b, a row of the table T for each token met so far ────────────

  const ROOM = 1 << 23; // numbers of the table that are kept

  class Model {
    constructor(flat, shape) {
      const [V, K, D] = shape;
      const bits = gridBits(Math.max(K * D, V));
      const parts = views(flat, shape);
      const [E, unitE] = roundToGrid(parts.E, bits);
      const [W, unitW] = roundToGrid(parts.W, bits);
      Object.assign(this, { V, K, D, E, W, b: parts.b, unit: unitE * unitW, rows: new Map() });
    }

    /** T's row of a token: integers (K·V), each an exact sum over D. */
    row(token) {
      const { K, V, D, E, W } = this;
      if (!this.rows.has(token)) {
        if ((this.rows.size + 1) * K * V > ROOM) this.rows.clear();
        const row = new Float64Array(K * V);
        for (let d = 0; d < D; d++) {
          const e = E[token * D + d];
          const start = d * K * V;
          for (let i = 0; i < row.length; i++) row[i] += e * W[start + i];
        }
        this.rows.set(token, row);
      }
      return this.rows.get(token);
    }

    /** Logits (V) of the last K ids, padded on the left with <|endoftext|>. */
    logits(ids) {
      const { K, V, unit, b } = this;
      const z = new Float64Array(V);
      for (let k = 0; k < K; k++) {
        const place = ids.length - K + k;
        const row = this.row(place < 0 ? END_OF_TEXT : ids[place]);
        for (let i = 0; i < V; i++) z[i] += row[k * V + i];
      }
      return z.map((sum, i) => sum * unit + b[i]);
    }
  }

  // ── Decoding: filters on integer weights, and the draw ────────────────────────────────────────

  const sum = (w) => w.reduce((total, weight) => total + weight, 0);

  /** ⌈fraction·of⌉, the fraction read as the decimal that was written. */
  function share(fraction, of) {
    const [, whole, digits = "", exponent = "0"] = /^(\d+)(?:\.(\d+))?(?:e(.+))?$/.exec(fraction);
    const numerator = BigInt(whole + digits) * BigInt(of);
    const denominator = 10n ** BigInt(digits.length - Number(exponent)); // fractions are at most 1
    return Number((numerator + denominator - 1n) / denominator);
  }

  const SLACK = powerOfTwo(-40);
  const slack = (S) => Math.floor(S * SLACK);

  function keepTopK(gap, k) {
    if (k >= gap.length) return gap;
    const kth = gap.slice().sort()[k - 1];
    return gap.map((value) => (value > kth ? Infinity : value));
  }

  function keepTopP(w, p) {
    const ordered = w.slice().sort().reverse();
    const threshold = share(p, sum(w)) - slack(sum(w));
    let kept = 1;
    for (let mass = ordered[0]; mass < threshold; kept++) mass += ordered[kept];
    const last = ordered[kept - 1];
    let room = kept - w.filter((weight) => weight > last).length; // for this many of the tied
    return w.map((weight) => (weight > last || (weight === last && room-- > 0) ? weight : 0));
  }

  function keepMinP(w, p) {
    const best = w.reduce((most, weight) => Math.max(most, weight));
    const threshold = share(p, best) - slack(sum(w));
    return w.map((weight) => (weight >= threshold || weight === best ? weight : 0));
  }

  const RULES = {
    temperature: [(x) => x >= 0 && x < Infinity, "a number of at least 0"],
    top_k: [(x) => x >= 0 && Number.isSafeInteger(x), "a whole number of at least 0"],
    top_p: [(x) => x >= 0 && x <= 1, "a number from 0 to 1"],
    min_p: [(x) => x >= 0 && x <= 1, "a number from 0 to 1"],
  };

  const isGreedy = ({ temperature, top_k, top_p }) =>
    temperature === 0 || top_k === 1 || top_p === 0;

  const greedy = (z) => z.reduce((best, logit, i) => (logit > z[best] ? i : best), 0);

  /**
   * What each stage of a policy leaves: [[name, integer weights], …], first the model's own
   * distribution ("model"), last the one that is drawn from. Stages that are off are left out.
   */
  function stages(z, policy) {
    const bits = 52 - ceilLog2(z.length);
    const best = z[greedy(z)];
    let gap = z.map((logit) => best - logit);
    const result = [["model", gap.map((value) => integerExp(value, bits))]];
    if (isGreedy(policy)) {
      const choice = greedy(z);
      result.push(["greedy", z.map((_, i) => (i === choice ? 1 : 0))]);
      return result;
    }
    const { temperature, top_k, top_p, min_p } = policy;
    if (temperature !== 1) {
      gap = gap.map((value) => value / temperature);
      result.push(["temperature", gap.map((value) => integerExp(value, bits))]);
    }
    if (top_k) {
      gap = keepTopK(gap, top_k);
      result.push(["top-k", gap.map((value) => integerExp(value, bits))]);
    }
    let w = result[result.length - 1][1];
    if (top_p < 1) result.push(["top-p", (w = keepTopP(w, top_p))]);
    if (min_p) result.push(["min-p", (w = keepMinP(w, min_p))]);
    return result;
  }

  /** The first token whose cumulative weight exceeds ⌊word·S/2^64⌋. */
  function draw(w, word) {
    const point = Number((word * BigInt(sum(w))) >> 64n);
    let cumulative = 0;
    return w.findIndex((weight) => (cumulative += weight) > point);
  }

  // ── The tokenizer: bytes, and merges inside words ─────────────────────────────────────────────

  const LETTER = "A-Za-z\\x80-\\xff";
  const BLANK = "\\t\\v\\f\\r ";
  const WORD = new RegExp(
    ` ?[${LETTER}]{1,60}` +
      "| ?[0-9]{1,60}" +
      `| ?[^${LETTER}0-9${BLANK}\\n\\u0100]{1,60}` +
      "|\\u0100" +
      `|[${BLANK}]{0,59}\\n` +
      `|[${BLANK}]{1,60}(?![^${BLANK}\\n\\u0100])` +
      `|[${BLANK}]`,
    "g",
  );

  class Tokenizer {
    constructor(merges) {
      this.bytes = Array.from({ length: 256 }, (_, value) => Uint8Array.of(value));
      this.bytes.push(new Uint8Array(0));
      this.merged = new Map();
      merges.forEach(([left, right]) => {
        this.merged.set(`${left},${right}`, this.bytes.length);
        this.bytes.push(Uint8Array.of(...this.bytes[left], ...this.bytes[right]));
      });
    }

    /** The ids of a text (a string, or a Uint8Array of its bytes). */
    encode(text) {
      const bytes = typeof text === "string" ? new TextEncoder().encode(text) : text;
      if (!this.merged.size) return Array.from(bytes);
      const characters = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
      return (characters.match(WORD) || []).flatMap((word) => this.encodeWord(word));
    }

    /** Join the pair that was learned first, of its places the leftmost, until none is left. */
    encodeWord(word) {
      const ids = Array.from(word, (character) => character.charCodeAt(0));
      for (;;) {
        let best = Infinity;
        let place = -1;
        for (let i = 0; i + 1 < ids.length; i++) {
          const id = this.merged.get(`${ids[i]},${ids[i + 1]}`);
          if (id < best) [best, place] = [id, i];
        }
        if (place < 0) return ids;
        ids.splice(place, 2, best);
      }
    }
  }

  /** An incremental UTF-8 decoder: what can never become a character is U+FFFD. */
  class TextStream {
    constructor() {
      this.decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    }
    push(bytes) {
      return this.decoder.decode(bytes, { stream: true });
    }
    close() {
      return this.decoder.decode();
    }
  }

  // ── Generation: the loop ──────────────────────────────────────────────────────────────────────

  /**
   * Continue a prompt's ids; yields {id, text, stages, word} for each token, text being what its
   * bytes complete (the last one carries what was held back). `first` is the stream's position.
   */
  function* generate(model, tokenizer, promptIds, policy, stream, maxNewTokens, first = 0) {
    const decoder = new TextStream(); // a character that began in the prompt is whole
    promptIds.slice(-3).forEach((id) => decoder.push(tokenizer.bytes[id]));
    const ids = promptIds.slice();
    for (let i = 0; i < maxNewTokens; i++) {
      const all = stages(model.logits(ids), policy);
      const w = all[all.length - 1][1];
      const word = isGreedy(policy) ? null : stream.word(BigInt(first) + BigInt(i));
      const id = word === null ? w.indexOf(1) : draw(w, word);
      ids.push(id);
      const isLast = id === END_OF_TEXT || i + 1 === maxNewTokens;
      const text = decoder.push(tokenizer.bytes[id]) + (isLast ? decoder.close() : "");
      yield { id, text, stages: all, word };
      if (isLast) return;
    }
  }

  // ── Training: what a batch says, as a sum of integers ─────────────────────────────────────────

  const LOSS_UNIT = powerOfTwo(-32); // nats: losses add up as integers of this size
  const LOSS_LIMIT = 4096; // nats: where one prediction costs more, the weights have blown up
  const TILE = 512; // columns that stay in cache while rows are combined

  /**
   * Rows of `out` += A·(rows of `source`), V columns each; a row is known by where it starts.
   * A is (rows of out) × (rows of source), flat. All are integers, so any order gives the same.
   */
  function addProducts(out, outStarts, A, source, sourceStarts, V) {
    const [R, J] = [outStarts.length, sourceStarts.length];
    const at = (r, j) => (r < R && j < J ? A[r * J + j] : 0); // what is not there counts nothing
    const start = (j) => sourceStarts[Math.min(j, J - 1)];
    for (let from = 0; from < V; from += TILE) {
      const until = Math.min(V, from + TILE);
      for (let r = 0; r < R; r += 2) {
        const isLast = r + 1 === R;
        const [o0, o1] = [outStarts[r], outStarts[isLast ? r : r + 1]];
        for (let j = 0; j < J; j += 4) {
          const [a0, a1, a2, a3] = [at(r, j), at(r, j + 1), at(r, j + 2), at(r, j + 3)];
          const [s0, s1, s2, s3] = [start(j), start(j + 1), start(j + 2), start(j + 3)];
          const [b0, b1, b2, b3] = [at(r + 1, j), at(r + 1, j + 1), at(r + 1, j + 2), at(r + 1, j + 3)];
          for (let i = from; i < until; i++) {
            const [x0, x1, x2, x3] = [source[s0 + i], source[s1 + i], source[s2 + i], source[s3 + i]];
            out[o0 + i] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3;
            out[o1 + i] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3;
          }
        }
      }
    }
  }

  /** out[rows[r]·J + j] += (row r of `left`)·(row j of `right`), over V columns. */
  function addDots(out, rows, left, right, rightStarts, V) {
    const J = rightStarts.length;
    for (let r = 0; r < rows.length; r += 2) {
      const isLast = r + 1 === rows.length;
      const [l0, l1] = [r * V, (isLast ? r : r + 1) * V];
      for (let j = 0; j < J; j += 2) {
        const isEdge = j + 1 === J;
        const [w0, w1] = [rightStarts[j], rightStarts[isEdge ? j : j + 1]];
        let [t00, t01, t10, t11] = [0, 0, 0, 0];
        for (let i = 0; i < V; i++) {
          const [x0, x1, y0, y1] = [left[l0 + i], left[l1 + i], right[w0 + i], right[w1 + i]];
          t00 += x0 * y0;
          t01 += x0 * y1;
          t10 += x1 * y0;
          t11 += x1 * y1;
        }
        out[rows[r] * J + j] += t00;
        if (!isEdge) out[rows[r] * J + j + 1] += t01;
        if (!isLast) out[rows[r + 1] * J + j] += t10;
        if (!isLast && !isEdge) out[rows[r + 1] * J + j + 1] += t11;
      }
    }
  }

  /** Bits of the grids of d and of the weights in a gradient of N predictions: [q, a]. */
  function gradientBits(N, K) {
    const bits = 51 - ceilLog2(N) - ceilLog2(K);
    const a = (bits - 6) >> 1;
    return [bits - a, a];
  }

  /**
   * Turn one row of integer logits into the integers d = rint(w·2^q/S) − 2^q·[i = target], in
   * place; returns the loss in units of LOSS_UNIT (a BigInt).
   */
  function differentiate(row, unit, b, target, q) {
    const V = b.length;
    const bits = 52 - ceilLog2(V);
    const table = expTable(bits);
    const span = (bits + 2) * LN2_HIGH;
    let best = -Infinity;
    for (let i = 0; i < V; i++) {
      const z = row[i] * unit + b[i];
      row[i] = z;
      if (z > best) best = z;
    }
    const gap = best - row[target];
    let S = 0;
    for (let i = 0; i < V; i++) {
      const clamped = Math.min(best - row[i], span);
      const step = rint(clamped * STEPS_PER_NAT);
      const r = step * STEP_HIGH - clamped + step * STEP_LOW;
      const w = rint((1.0 + r * (1.0 + r * (0.5 + r * (1.0 / 6.0)))) * table[step]);
      row[i] = w;
      S += w;
    }
    const one = powerOfTwo(q);
    const ratio = one / S;
    for (let i = 0; i < V; i++) row[i] = rint(row[i] * ratio);
    row[target] -= one;
    const loss = gap + log(S * powerOfTwo(-bits));
    if (!(loss < LOSS_LIMIT)) throw new RangeError(`a loss must stay below ${LOSS_LIMIT} nats (got ${loss})`);
    return BigInt(rint(loss / LOSS_UNIT));
  }

  /** What stands at position k of all contexts: its tokens, each once, or each prediction's own. */
  function rowsOf(contexts, k, K, V, D) {
    const N = contexts.length / K;
    const slotOf = new Int32Array(V).fill(-1);
    const slots = new Int32Array(N);
    const tokens = [];
    for (let n = 0; n < N; n++) {
      const token = contexts[n * K + k];
      if (slotOf[token] < 0) slotOf[token] = tokens.push(token) - 1;
      slots[n] = slotOf[token];
    }
    // By table: three products of a row each, and two passes over N rows; by contexts: N of each.
    if (3 * D * tokens.length + 2 * N < 3 * D * N) return { tokens, slots };
    return { tokens: Array.from(slots, (slot) => tokens[slot]), slots: null };
  }

  /** Rows number `rows` of a matrix with `width` columns, one after the other. */
  function gather(matrix, rows, width) {
    const taken = new Float64Array(rows.length * width);
    rows.forEach((row, r) => taken.set(matrix.subarray(row * width, row * width + width), r * width));
    return taken;
  }

  function transposed(matrix, height, width) {
    return Float64Array.from(matrix, (_, i) => matrix[(i % height) * width + Math.floor(i / height)]);
  }

  const multiples = (count, width) => Array.from({ length: count }, (_, i) => i * width);

  /**
   * Mean loss and gradient of N predictions under the weights `flat`: contexts (N·K), oldest token
   * first, and targets (N). Returns {loss (nats), gradient (flat, like the weights)}.
   */
  function lossAndGradient(flat, shape, contexts, targets) {
    const [V, K, D] = shape;
    const N = targets.length;
    const { E, W, b } = views(flat, shape);
    gridUnit(largestMagnitude(b), 0);
    const wStarts = (k) => Array.from({ length: D }, (_, d) => (d * K + k) * V);
    const rows = Array.from({ length: K }, (_, k) => rowsOf(contexts, k, K, V, D));

    const forwardBits = gridBits(Math.max(K * D, V));
    const [forwardE, unitE] = roundToGrid(E, forwardBits);
    const [forwardW, unitW] = roundToGrid(W, forwardBits);
    const d = new Float64Array(N * V); // logits as integers, then their gradient
    rows.forEach(({ tokens, slots }, k) => {
      const table = slots ? new Float64Array(tokens.length * V) : d;
      const A = gather(forwardE, tokens, D);
      addProducts(table, multiples(tokens.length, V), A, forwardW, wStarts(k), V);
      if (slots) for (let n = 0; n < N; n++) addRow(d, n * V, table, slots[n] * V, V);
    });

    const [q, a] = gradientBits(N, K);
    let loss = 0n;
    for (let n = 0; n < N; n++) {
      loss += differentiate(d.subarray(n * V, n * V + V), unitE * unitW, b, targets[n], q);
    }

    const [backwardE, stepE] = roundToGrid(E, a);
    const [backwardW, stepW] = roundToGrid(W, a);
    const gradient = new Float64Array(flat.length);
    const { E: dE, W: dW, b: db } = views(gradient, shape);
    for (let n = 0; n < N; n++) addRow(db, 0, d, n * V, V);
    rows.forEach(({ tokens, slots }, k) => {
      const dT = slots ? new Float64Array(tokens.length * V) : d;
      if (slots) for (let n = 0; n < N; n++) addRow(dT, slots[n] * V, d, n * V, V);
      const A = transposed(gather(backwardE, tokens, D), tokens.length, D);
      addProducts(dW, wStarts(k), A, dT, multiples(tokens.length, V), V);
      addDots(dE, tokens, dT, backwardW, wStarts(k), V);
    });
    const perPrediction = powerOfTwo(-q) * (1.0 / N);
    for (const [part, unit] of [[dE, stepW], [dW, stepE], [db, 1.0]]) {
      const factor = unit * perPrediction;
      for (let i = 0; i < part.length; i++) part[i] *= factor;
    }
    return { loss: quotient(loss, BigInt(N)) * LOSS_UNIT, gradient };
  }

  function addRow(out, outStart, source, start, V) {
    for (let i = 0; i < V; i++) out[outStart + i] += source[start + i];
  }

  // ── Training: the update rule ─────────────────────────────────────────────────────────────────

  const PI = 3.141592653589793;
  const EPSILON = 1e-8; // AdamW's guard against division by zero
  const SMALLEST_FIRST = powerOfTwo(-400); // moments below these become +0
  const SMALLEST_SECOND = powerOfTwo(-800);

  /** √Σx², from squares that are rounded to integers. */
  function norm(x) {
    const unit = gridUnit(largestMagnitude(x), 0);
    const perUnit = 1.0 / unit;
    const scale = powerOfTwo(53 - ceilLog2(x.length));
    let total = 0;
    for (let i = 0; i < x.length; i++) {
      const share = x[i] * perUnit;
      total += rint(share * share * scale);
    }
    return Math.sqrt(total / scale) * unit;
  }

  /** Learning rate of update number `step`, from 1: linear warm-up, then the decay. */
  function learningRate(step, steps, { learning_rate: peak, warmup_steps: warmup, decay }) {
    if (step <= warmup) return peak * (step / warmup);
    const t = (step - 1 - warmup) / Math.max(1, steps - warmup);
    if (decay === "cosine") return peak * (0.5 + 0.5 * cos(PI * t));
    return peak * (decay === "linear" ? 1.0 - t : 1.0);
  }

  /** The state of the update rule: moments (flat like the weights), and how often it was applied. */
  class Optimizer {
    constructor(options, steps, size, moments = null, step = 0) {
      const names = options.name === "adamw" ? 2 : 1;
      this.moments = moments || Array.from({ length: names }, () => new Float64Array(size));
      this.powers = [1.0, 1.0]; // of the two betas
      Object.assign(this, { options, steps, step });
      for (let i = 0; i < step; i++) this.countUp();
    }

    countUp() {
      const [beta1, beta2] = this.options.betas;
      this.powers = [this.powers[0] * beta1, this.powers[1] * beta2];
    }

    /** Change weights by one update; returns its learning rate. */
    update(weights, gradient) {
      const { name, weight_decay, gradient_clip, betas, momentum } = this.options;
      this.step += 1;
      this.countUp();
      const rate = learningRate(this.step, this.steps, this.options);
      const keep = 1.0 - rate * weight_decay;
      const length = gradient_clip > 0 ? norm(gradient) : 0;
      const clip = length > gradient_clip ? gradient_clip / length : 1.0;
      const [m, v] = this.moments;
      if (name === "sgd") {
        for (let i = 0; i < weights.length; i++) {
          const first = momentum * m[i] + gradient[i] * clip;
          m[i] = Math.abs(first) < SMALLEST_FIRST ? 0.0 : first + 0.0;
          weights[i] = weights[i] * keep - rate * m[i];
        }
        return rate;
      }
      const [beta1, beta2] = betas;
      const [rest1, rest2] = [1.0 - beta1, 1.0 - beta2];
      const corrected = rate / (1.0 - this.powers[0]);
      const spread = 1.0 / Math.sqrt(1.0 - this.powers[1]);
      for (let i = 0; i < weights.length; i++) {
        const g = gradient[i] * clip;
        const first = beta1 * m[i] + rest1 * g;
        const second = beta2 * v[i] + rest2 * (g * g);
        m[i] = Math.abs(first) < SMALLEST_FIRST ? 0.0 : first + 0.0;
        v[i] = second < SMALLEST_SECOND ? 0.0 : second;
        weights[i] = weights[i] * keep - (corrected * m[i]) / (Math.sqrt(v[i]) * spread + EPSILON);
      }
      return rate;
    }
  }

  // ── Training: the run ─────────────────────────────────────────────────────────────────────────

  /** E uniform in ±1, then W uniform in ±1/√(K·D), from the stream “init”; b is zero. */
  function initialWeights(seed, shape) {
    const [V, K, D] = shape;
    const stream = new Stream(seed, "init");
    const flat = new Float64Array(V * D + D * K * V + V);
    const bound = 1.0 / Math.sqrt(K * D);
    for (let i = 0; i < flat.length - V; i++) {
      flat[i] = (2.0 * stream.uniform(i) - 1.0) * (i < V * D ? 1.0 : bound);
    }
    return flat;
  }

  /**
   * A run that trains. `data` is what a report says of one (report/trainable.py). It starts from the
   * initial weights or, with `from`, from the checkpoint of that step in `data`. With `mistake` its
   * samples draw from the stream of the batches, as `inference` is there to prevent.
   */
  class Run {
    constructor(data, { from = 0, mistake = false } = {}) {
      const { seed, shape, steps, optimizer } = data;
      const bytes = fromBase64(data.tokens);
      const view = new DataView(bytes.buffer);
      const width = data.token_bytes;
      const read = (i) => (width === 2 ? view.getUint16(2 * i, true) : view.getUint32(4 * i, true));
      this.tokens = Uint32Array.from({ length: bytes.length / width }, (_, i) => read(i));
      let moments = null;
      if (from) {
        const saved = data.checkpoints.find(({ step }) => step === from);
        const names = optimizer.name === "adamw" ? 3 : 2; // the weights and the moments
        const state = floatsOf(fromBase64(saved.state));
        const size = state.length / names;
        [this.weights, ...moments] = multiples(names, size).map((start) => state.slice(start, start + size));
      } else {
        this.weights = initialWeights(seed, shape);
      }
      this.optimizer = new Optimizer(optimizer, steps, this.weights.length, moments, from);
      this.stream = new Stream(seed, "optimizer");
      this.position = from * data.batch_size;
      Object.assign(this, { data, shape, mistake });
    }

    get step() {
      return this.optimizer.step;
    }

    get fingerprint() {
      return fingerprint(this.weights, this.shape);
    }

    /** Contexts (N·K) and targets (N) of predictions; what is before a document's start is its edge. */
    predictions(indices) {
      const K = this.shape[1];
      const contexts = new Int32Array(indices.length * K);
      indices.forEach((index, n) => {
        let hasEnded = false;
        for (let k = K - 1; k >= 0; k--) {
          const token = this.tokens[Math.max(0, index + 1 - K + k)];
          hasEnded ||= token === END_OF_TEXT;
          contexts[n * K + k] = hasEnded ? END_OF_TEXT : token;
        }
      });
      return [contexts, indices.map((index) => this.tokens[index + 1])];
    }

    /** One update; returns {step, loss, learning_rate, optimizer_position}. */
    train() {
      const N = this.data.batch_size;
      const step = this.step + 1;
      try {
        const indices = this.stream.integers(this.position, N, this.tokens.length - 1);
        this.position += N;
        const { loss, gradient } = lossAndGradient(this.weights, this.shape, ...this.predictions(indices));
        const rate = this.optimizer.update(this.weights, gradient);
        gridUnit(largestMagnitude(this.weights), 0); // a fault is this step's, not the next one's
        if (this.mistake && step % this.data.sampling.every === 0) this.sample();
        return { step, loss, learning_rate: rate, optimizer_position: this.position };
      } catch (fault) {
        if (!(fault instanceof RangeError)) throw fault;
        throw new RangeError(`training diverged at step ${step}: ${fault.message}`);
      }
    }

    /** The classic mistake: write a sample with words of the stream that draws the batches. */
    sample() {
      const { prompt, policy, max_new_tokens, merges } = this.data.sampling;
      const tokenizer = new Tokenizer(merges);
      const model = new Model(this.weights, this.shape);
      const pieces = generate(model, tokenizer, tokenizer.encode(prompt), policy, this.stream, max_new_tokens, this.position);
      for (const { word } of pieces) this.position += word === null ? 0 : 1;
    }
  }

  /**
   * Holds what a run does against what was recorded of it: the bits of each loss and learning rate,
   * and fingerprints where they were measured.
   */
  class Comparison {
    constructor(data) {
      this.losses = data.losses && floatsOf(fromBase64(data.losses));
      this.rates = data.learning_rates && floatsOf(fromBase64(data.learning_rates));
      this.fingerprints = new Map(data.fingerprints);
      this.compared = { losses: 0, learning_rates: 0, fingerprints: 0 };
      this.difference = null; // the first one
    }

    /** Take one step's record; returns the fingerprint where one was recorded, else null. */
    take(record, run) {
      const at = record.step - 1;
      if (this.losses) this.compare("losses", record.step, this.losses[at], record.loss);
      if (this.rates) this.compare("learning_rates", record.step, this.rates[at], record.learning_rate);
      const recorded = this.fingerprints.get(record.step);
      if (!recorded) return null;
      const trained = run.fingerprint;
      this.compare("fingerprints", record.step, recorded, trained);
      return trained;
    }

    compare(what, step, recorded, trained) {
      this.compared[what] += 1;
      // Object.is: the same bits, since a zero has a sign there, and nothing here is NaN.
      if (!Object.is(recorded, trained)) this.difference ||= { what, step, recorded, trained };
    }
  }

  const CONSTANTS = {
    STEPS_PER_NAT, STEP_HIGH, STEP_LOW, LN2_HIGH, LN2_LOW, ROOTS: Array.from(ROOTS),
    PER_HALF_PI, HALF_PI_HIGH, HALF_PI_MIDDLE, HALF_PI_LOW, EXPONENT_LIMIT,
    LOSS_UNIT, LOSS_LIMIT, PI, EPSILON, SMALLEST_FIRST, SMALLEST_SECOND, END_OF_TEXT,
  };

  return {
    CONSTANTS, END_OF_TEXT, RULES, Comparison, Model, Optimizer, Run, Stream, TextStream, Tokenizer,
    cos, draw, fingerprint, floatsOf, fromBase64, generate, gradientBits, greedy, gridUnit, hex,
    initialWeights, integerExp, isGreedy, learningRate, log, lossAndGradient, norm, roundToGrid, sha256, stages, sum,
  };
})();

// ── In a worker: train while the page asks for more ─────────────────────────────────────────────

if (typeof WorkerGlobalScope !== "undefined") {
  let run, comparison;
  // The page asks again after each answer, so that to stop is to ask no more.
  self.onmessage = ({ data: { begin, until, milliseconds } }) => {
    if (begin) {
      run = new twin.Run(begin.data, begin.options);
      comparison = new twin.Comparison(begin.data);
    }
    const losses = [];
    let fault = null;
    const end = Date.now() + milliseconds;
    try {
      while (run.step < until && Date.now() < end) {
        const record = run.train();
        comparison.take(record, run);
        losses.push([record.step, record.loss]);
      }
    } catch (error) {
      fault = error.message;
    }
    const { difference, compared } = comparison;
    const fingerprint = run.step === until ? run.fingerprint : null;
    self.postMessage({ step: run.step, losses, difference, compared, fingerprint, fault });
  };
}

// ── Under Node: `node twin.js train FILE` ───────────────────────────────────────────────────────

if (typeof module !== "undefined") {
  module.exports = twin;
  if (require.main === module) process.exitCode = main(process.argv.slice(2));
}

/** Train the run of a report again; prints what came out as JSON. 0: as recorded, 1: not, 2: usage. */
function main([command, file, ...options]) {
  const usage = "usage: node twin.js train FILE [--from STEP] [--until STEP] [--mistake]";
  const asked = { from: 0, until: null, mistake: false };
  for (let i = 0; i < options.length; i++) {
    const name = options[i].replace(/^--/, "");
    if (options[i] === "--mistake") asked.mistake = true;
    else if ((name === "from" || name === "until") && /^\d+$/.test(options[i + 1])) asked[name] = Number(options[++i]);
    else file = undefined;
  }
  const complain = (message) => {
    process.stderr.write(`${message}\n`);
    return 2;
  };
  if (command !== "train" || file === undefined) return complain(usage);
  let data;
  try {
    const text = require("fs").readFileSync(file, "utf8");
    const inPage = /<script type="application\/json" id="data">(.*?)<\/script>/s.exec(text);
    const read = JSON.parse(inPage ? inPage[1] : text);
    data = "training" in read ? read.training : read;
  } catch (error) {
    return complain(`cannot read ${file}: ${error.message}`);
  }
  if (data.missing) return complain(`${file} cannot be trained: ${data.missing}`);
  const until = asked.until ?? data.step;
  const starts = [0, ...data.checkpoints.map(({ step }) => step)];
  if (!starts.includes(asked.from)) return complain(`--from must be a step of which the file holds the weights: ${starts.join(", ")} (got ${asked.from})`);
  if (until < asked.from || until > data.steps) return complain(`--until must be from ${asked.from} to ${data.steps} (got ${until})`);
  const run = new twin.Run(data, asked);
  const comparison = new twin.Comparison(data);
  let fault = null;
  try {
    while (run.step < until) {
      comparison.take(run.train(), run);
      if (process.stderr.isTTY) process.stderr.write(`\rstep ${run.step} of ${until}`);
    }
  } catch (error) {
    if (!(error instanceof RangeError)) throw error;
    fault = error.message;
  }
  if (process.stderr.isTTY) process.stderr.write("\n");
  const { compared, difference } = comparison;
  const agrees = !fault && !difference;
  const answer = { step: run.step, fingerprint: run.fingerprint, compared, difference, fault, agrees };
  process.stdout.write(`${JSON.stringify(answer, null, 2)}\n`);
  return agrees ? 0 : 1;
}
