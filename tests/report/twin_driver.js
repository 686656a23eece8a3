// Runs the twin for test_twin.py: a JSON object of questions on stdin, one of answers on stdout.
"use strict";

const twin = require("../../minigen/report/twin.js");
const questions = JSON.parse(require("fs").readFileSync(0, "utf8"));
const bytes = (hexadecimal) => Uint8Array.from(Buffer.from(hexadecimal, "hex"));

// Floats travel by their bits, so that a sign of zero, an infinity and the last digit do.
const floats = (text) => twin.floatsOf(twin.fromBase64(text));
const coded = (numbers) => Buffer.from(Float64Array.from(numbers).buffer).toString("base64");

const answers = {
  constants: () => ({ ...twin.CONSTANTS, ROOTS: coded(twin.CONSTANTS.ROOTS) }),

  functions: ({ x, name }) => coded(floats(x).map((value) => twin[name](value))),

  integers: ({ seed, name, first, count, below }) =>
    new twin.Stream(seed, name).integers(first, count, below),

  norms: ({ vectors }) => coded(vectors.map((vector) => twin.norm(floats(vector)))),

  units: ({ largest, bits }) => coded(floats(largest).map((value) => twin.gridUnit(value, bits))),

  rates: ({ options, steps }) =>
    coded(Array.from({ length: steps }, (_, i) => twin.learningRate(i + 1, steps, options))),

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
          ids: tokens.map((token) => token.id),
          text: tokens.map((token) => token.text).join(""),
        };
      }),
    };
  },
};

const results = questions.map(({ kind, ...question }) => answers[kind](question));
process.stdout.write(JSON.stringify(results));
