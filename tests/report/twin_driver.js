// Runs the twin for test_twin.py: a JSON object of questions on stdin, one of answers on stdout.
"use strict";

const twin = require("../../minigen/report/twin.js");
const questions = JSON.parse(require("fs").readFileSync(0, "utf8"));
const bytes = (hexadecimal) => Uint8Array.from(Buffer.from(hexadecimal, "hex"));

const answers = {
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
    const model = new twin.Model(Uint8Array.from(Buffer.from(weights, "base64")), shape);
    const tokenizer = new twin.Tokenizer(merges);
    return {
      fingerprint: model.fingerprint(),
      cases: cases.map(({ prompt, policy, seed, position, length }) => {
        const ids = tokenizer.encode(bytes(prompt));
        const all = twin.stages(model.logits(ids), policy);
        const pieces = twin.generate(model, tokenizer, ids, policy, seed, length, position);
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
