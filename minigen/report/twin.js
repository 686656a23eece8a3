// The twin: minigen's generation once more, in plain JavaScript, bit for bit the same token ids.
//
// It can be exact because what it repeats is: IEEE-754 operations that every language rounds alike
// (+ - * /), sums of integers below 2^53, and random words that are a pure function of
// (seed, name, index). Each part names the Python file that it mirrors. No dependency, no DOM.
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

  // ── streams.py: Philox 4×64-10 under a key made of seed and name ──────────────────────────────

  /** Word number `index` (a BigInt, as the result is) of the stream (seed, name). */
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

  // ── arithmetic.py: exp from a table and a cubic, integer grids ─────────────────────────────────

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
  const [LN2_HIGH] = leadingBits(LN2, 128n, 42);

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

  const gridBits = (longestSum) => (53 - ceilLog2(longestSum)) >> 1;

  /** The smallest power of two by which magnitudes up to `largest` are ≤ 2^bits. */
  function gridUnit(largest, bits) {
    const view = new DataView(new ArrayBuffer(8));
    view.setFloat64(0, largest);
    const word = view.getBigUint64(0);
    const isPower = (word & ((1n << 52n) - 1n)) === 0n;
    const exponent = Number(word >> 52n) - 1022 - (isPower ? 1 : 0); // largest ≤ 2^exponent
    return powerOfTwo(Math.max(exponent, -400) - bits);
  }

  function roundToGrid(x, bits) {
    const unit = gridUnit(x.reduce((most, value) => Math.max(most, Math.abs(value)), 0), bits);
    return [x.map((value) => rint(value * (1.0 / unit))), unit];
  }

  // ── model.py: z = Σₖ T[xₖ, k] + b, a row of the table T for each token met so far ─────────────

  const ROOM = 1 << 23; // numbers of the table that are kept

  class Model {
    /** bytes: E (V, D), W (D, K, V) and b (V), little-endian float64, one after the other. */
    constructor(bytes, [V, K, D]) {
      Object.assign(this, { bytes, V, K, D });
      const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
      const numbers = Float64Array.from({ length: bytes.length / 8 }, (_, i) =>
        view.getFloat64(8 * i, true),
      );
      const bits = gridBits(Math.max(K * D, V));
      const [E, unitE] = roundToGrid(numbers.subarray(0, V * D), bits);
      const [W, unitW] = roundToGrid(numbers.subarray(V * D, V * D + D * K * V), bits);
      const b = numbers.subarray(V * D + D * K * V);
      Object.assign(this, { E, W, b, unit: unitE * unitW, rows: new Map() });
    }

    /** checkpoint.fingerprint: SHA-256 over name, NUL, shape, NUL and bytes of E, W and b. */
    fingerprint() {
      const { V, K, D, bytes } = this;
      const parts = [];
      let start = 0;
      for (const [name, shape] of [["E", [V, D]], ["W", [D, K, V]], ["b", [V]]]) {
        const end = start + 8 * shape.reduce((product, size) => product * size);
        parts.push(new TextEncoder().encode(`${name}\0${shape.join(",")}\0`));
        parts.push(bytes.subarray(start, end));
        start = end;
      }
      const all = new Uint8Array(parts.reduce((length, part) => length + part.length, 0));
      let length = 0;
      for (const part of parts) {
        all.set(part, length);
        length += part.length;
      }
      return hex(sha256(all));
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

  // ── decoding.py: filters on integer weights, and the draw ─────────────────────────────────────

  const sum = (w) => w.reduce((total, weight) => total + weight, 0);

  /** ⌈fraction·of⌉, the fraction read as the decimal that was written. */
  function share(fraction, of) {
    const [, whole, digits = "", exponent = "0"] = /^(\d+)(?:\.(\d+))?(?:e(.+))?$/.exec(fraction);
    const numerator = BigInt(whole + digits) * BigInt(of);
    const power = digits.length - Number(exponent);
    const denominator = 10n ** BigInt(Math.max(0, power));
    return Number((numerator * 10n ** BigInt(Math.max(0, -power)) + denominator - 1n) / denominator);
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

  // ── tokenizer.py: bytes, and merges inside words ──────────────────────────────────────────────

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

  // ── generation.py: the loop ───────────────────────────────────────────────────────────────────

  /**
   * Continue a prompt's ids; yields {id, text, stages, word} for each token, text being what its
   * bytes complete (the last one carries what was held back). `first` is the stream's position.
   */
  function* generate(model, tokenizer, promptIds, policy, seed, maxNewTokens, first = 0) {
    const stream = new Stream(seed, "inference");
    const decoder = new TextStream();
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

  return {
    END_OF_TEXT, RULES, Model, Stream, TextStream, Tokenizer,
    draw, generate, greedy, hex, integerExp, isGreedy, sha256, stages, sum,
  };
})();

if (typeof module !== "undefined") module.exports = twin;
