// Runs the twin for test_twin.py: a JSON object of questions on stdin, one of answers on stdout.
"use strict";

const twin = require("../../minigen/report/twin.js");
const questions = JSON.parse(require("fs").readFileSync(0, "utf8"));
const bytes = (hexadecimal) => Uint8Array.from(Buffer.from(hexadecimal, "hex"));

// Floats travel by their bits, so that a sign of zero, an infinity and the last digit do.
const floats = (text) => twin.floatsOf(twin.fromBase64(text));
const coded = (numbers) => Buffer.from(Float64Array.from(numbers).buffer).toString("base64");

// docs/vectors.json: floats are 16 hexadecimal digits there, the most significant first.
const unbits = (digits) => Buffer.from(digits, "hex").readDoubleBE();
const bits = (x) => {
  if (typeof x !== "number") return Array.from(x, bits);
  const buffer = Buffer.alloc(8);
  buffer.writeDoubleBE(x);
  return buffer.toString("hex");
};
const digest = (numbers) => {
  const positive = Float64Array.from(numbers, (value) => value + 0); // -0 counts as 0
  return twin.hex(twin.sha256(new Uint8Array(positive.buffer)));
};
const firstOf = (numbers) => Array.from(numbers.subarray(0, 3));
const weightsOf = ({ seed, shape, times }) =>
  twin.initialWeights(seed, shape).map((weight) => weight * times);

const vectors = {
  stream: ({ seed, name, position, below }) => {
    const stream = new twin.Stream(seed, name);
    const places = [0, 1, 2, 3, 4].map((i) => position + i);
    return {
      words: places.map((place) => stream.word(place).toString(16).padStart(16, "0")),
      integers: stream.integers(position, 5, below),
      uniforms: places.map((place) => bits(stream.uniform(place))),
    };
  },

  exponential: ({ gaps, B }) => gaps.map((gap) => twin.integerExp(unbits(gap), B)),
  logarithm: ({ x }) => x.map((value) => bits(twin.log(unbits(value)))),
  cosine: ({ x }) => x.map((value) => bits(twin.cos(unbits(value)))),

  grid: ({ x, bits: size }) => {
    const [integers, unit] = twin.roundToGrid(Float64Array.from(x, unbits), size);
    return { unit: bits(unit), integers: Array.from(integers, (value) => value + 0) };
  },

  encoding: ({ merges, texts }) => {
    const tokenizer = new twin.Tokenizer(merges);
    return texts.map((text) => tokenizer.encode(bytes(text)));
  },

  model: (given) => {
    const flat = weightsOf(given);
    const logits = new twin.Model(flat, given.shape).logits(given.context);
    const [[, w]] = twin.stages(logits, { temperature: 0 });
    return {
      fingerprint: twin.fingerprint(flat, given.shape),
      E_first: bits(firstOf(flat)),
      logits_first: bits(firstOf(logits)),
      logits_sha256: digest(logits),
      w_first: firstOf(w),
      S: twin.sum(w),
    };
  },

  gradient: (given) => {
    const { shape, contexts, targets } = given;
    const [V, K, D] = shape;
    const [q, a] = twin.gradientBits(targets.length, K);
    const flat = Int32Array.from(contexts.flat());
    const { loss, gradient } = twin.lossAndGradient(weightsOf(given), shape, flat, targets);
    const [dE, dW, db] = [
      gradient.subarray(0, V * D),
      gradient.subarray(V * D, V * D + D * K * V),
      gradient.subarray(V * D + D * K * V),
    ];
    return {
      q, a, loss: bits(loss), db_first: bits(firstOf(db)),
      dE_sha256: digest(dE), dW_sha256: digest(dW), db_sha256: digest(db),
    };
  },

  norm: ({ x }) => bits(twin.norm(Float64Array.from(x, unbits))),

  schedule: ({ steps, optimizer }) =>
    Array.from({ length: steps }, (_, i) => bits(twin.learningRate(i + 1, steps, optimizer))),

  update: ({ steps, optimizer, weights, gradients }) => {
    const flat = Float64Array.from(weights, unbits);
    const rule = new twin.Optimizer(optimizer, steps, flat.length);
    return gradients.map((gradient) => {
      rule.update(flat, Float64Array.from(gradient, unbits));
      return { weights: bits(flat), moments: rule.moments.flatMap(bits) };
    });
  },

  run: ({ data, sample, given_merges: merges }) => {
    const run = new twin.Run(data);
    const records = Array.from({ length: data.steps }, () => run.train());
    const tokenizer = new twin.Tokenizer(merges);
    const model = new twin.Model(run.weights, data.shape);
    const policy = { temperature: 1, top_k: 0, top_p: 1, min_p: 0, ...sample.policy };
    const ids = tokenizer.encode(sample.prompt);
    const stream = new twin.Stream(sample.seed, "inference");
    const tokens = twin.generate(model, tokenizer, ids, policy, stream, sample.max_new_tokens);
    return {
      losses: records.map(({ loss }) => bits(loss)),
      learning_rates: records.map(({ learning_rate }) => bits(learning_rate)),
      fingerprint: run.fingerprint,
      sample: Array.from(tokens, ({ id }) => id),
    };
  },
};

const answers = {
  vectors: ({ name, givens }) => givens.map((given) => vectors[name](given)),

  constants: () => ({ ...twin.CONSTANTS, ROOTS: coded(twin.CONSTANTS.ROOTS) }),

  rules: ({ name, values }) => values.map((value) => twin.RULES[name][0](Number(value))),

  functions: ({ x, name }) => coded(floats(x).map((value) => twin[name](value))),

  integers: ({ seed, name, first, count, below }) =>
    new twin.Stream(seed, name).integers(first, count, below),

  norms: ({ vectors }) => coded(vectors.map((vector) => twin.norm(floats(vector)))),

  units: ({ largest, bits }) => coded(floats(largest).map((value) => twin.gridUnit(value, bits))),

  rates: ({ options, steps }) =>
    coded(Array.from({ length: steps }, (_, i) => twin.learningRate(i + 1, steps, options))),

  positions: ({ data, steps }) => {
    const run = new twin.Run(data, { mistake: true });
    return Array.from({ length: steps }, () => run.train().optimizer_position);
  },

  initial: ({ seed, shape }) => coded(twin.initialWeights(seed, shape)),

  gradients: ({ cases }) =>
    cases.map(({ weights, shape, contexts, targets }) => {
      const { loss, gradient } = twin.lossAndGradient(
        floats(weights), shape, Int32Array.from(contexts), targets);
      return coded([loss, ...gradient]);
    }),

  updates: ({ options, steps, weights, moments, gradients }) => {
    const flat = floats(weights);
    const optimizer = new twin.Optimizer(options, steps, flat.length, moments.map(floats), 3);
    gradients.forEach((gradient) => optimizer.update(flat, floats(gradient)));
    return [flat, ...optimizer.moments].map((numbers) => coded(numbers));
  },

  draws: ({ w, words }) => words.map((word) => twin.draw(w, BigInt(word))),

  sha256: ({ texts }) => texts.map((text) => twin.hex(twin.sha256(bytes(text)))),

  words: ({ seed, name, indices }) => {
    const stream = new twin.Stream(seed, name);
    return indices.map((index) => stream.word(index).toString());
  },

  exponentials: ({ gaps, bits }) =>
    gaps.map((gap) => twin.integerExp(gap === null ? Infinity : gap, bits)),

  encodings: ({ merges, texts }) => {
    const tokenizer = new twin.Tokenizer(merges);
    return texts.map((text) => tokenizer.encode(bytes(text)));
  },

  decodings: ({ texts }) =>
    texts.map((parts) => {
      const decoder = new twin.TextStream();
      return [...parts.map((part) => decoder.push(bytes(part))), decoder.close()];
    }),

  models: ({ weights, shape, merges, cases }) => {
    const flat = twin.floatsOf(twin.fromBase64(weights));
    const model = new twin.Model(flat, shape);
    const tokenizer = new twin.Tokenizer(merges);
    return {
      fingerprint: twin.fingerprint(flat, shape),
      cases: cases.map(({ prompt, policy, seed, position, length }) => {
        const ids = tokenizer.encode(bytes(prompt));
        const all = twin.stages(model.logits(ids), policy);
        const stream = new twin.Stream(seed, "inference");
        const pieces = twin.generate(model, tokenizer, ids, policy, stream, length, position);
        const tokens = Array.from(pieces);
        return {
          logits: Array.from(model.logits(ids)),
          weights: Array.from(all[all.length - 1][1]),
          stages: all.map(([name]) => name),
          ids: tokens.map((token) => token.id),
          text: tokens.map((token) => token.text).join(""),
        };
      }),
    };
  },
};

const results = questions.map(({ kind, ...question }) => answers[kind](question));
process.stdout.write(JSON.stringify(results));
