// The page: shows the run's data, and lets the twin answer what the reader asks.
// Text from models and files goes through textContent alone.
"use strict";

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);

  /** An element with a class, text or children, and attributes. */
  function element(name, className = "", content = "", attributes = {}) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (Array.isArray(content)) made.append(...content);
    else made.textContent = content;
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    return made;
  }

  /** A name without what would turn the text around it. */
  const visible = (text) => text.replace(/[\p{Cc}\p{Cf}]/gu, "\ufffd");
  const count = (n) => n.toLocaleString("en-US");
  const percent = (p) => (p && p < 0.0001 ? "< 0.01 %" : `${(100 * p).toFixed(2)} %`);

  /** Say why a section is empty, and hide the rest of it; or leave it as it is. */
  function leaveOut(section, reason) {
    $(`${section}-missing`).textContent = reason;
    $(`${section}-missing`).hidden = false;
    $(`${section}-result`).hidden = true;
  }

  function check(state, text) {
    const marks = { right: "Right: ", wrong: "Wrong: ", unknown: "Not checked: " };
    const item = element("li", state, text);
    item.setAttribute("aria-label", marks[state] + text);
    $("checks").append(item);
  }

  function draw(id, spec, description) {
    $(id).setAttribute("aria-label", description);
    const inner = element("div");
    $(id).append(inner);
    return vegaEmbed(inner, spec, { mode: "vega", renderer: "svg", actions: false });
  }

  // ── The twin and what it checks ───────────────────────────────────────────────────────────────

  const { END_OF_TEXT } = twin;
  const tokenizer = new twin.Tokenizer(data.merges);
  let model = null;

  function checkFingerprint() {
    if (data.weights === null) {
      check("unknown", "The weights of this run are too large to travel in a page, so its twin was left out.");
      return;
    }
    const weights = twin.floatsOf(twin.fromBase64(data.weights));
    model = new twin.Model(weights, data.shape);
    const fingerprint = twin.fingerprint(weights, data.shape);
    if (fingerprint === data.fingerprint) {
      check("right", `SHA-256 of the weights in this page, computed here, is the run’s fingerprint ${fingerprint.slice(0, 16)}…`);
    } else {
      check("wrong", `The weights in this page have fingerprint ${fingerprint}, the run has ${data.fingerprint}.`);
    }
  }

  /** The log, too, says what the weights were, if it is the one that the checkpoint knows. */
  function checkLog() {
    const { doubt, logged } = data;
    if (doubt) check("wrong", `What is shown of the run’s logs is not all as it was recorded: ${doubt}.`);
    if (!logged || logged === data.fingerprint) return;
    check("wrong", `The run’s log says that step ${count(data.step)} had fingerprint ${logged.slice(0, 16)}…, the checkpoint has ${data.fingerprint.slice(0, 16)}….`);
  }

  function checkSample() {
    const sample = data.repeatable;
    if (!model || !data.samples.length) return;
    if (!sample) {
      const reason = data.policy
        ? "The run’s latest checkpoint has no sample of its own to write again."
        : "The run’s samples obey rules (penalties or further filters) that the twin does not know, so none was written again.";
      check("unknown", reason);
      return;
    }
    const ids = tokenizer.encode(sample.prompt);
    const stream = new twin.Stream(data.seed, "inference");
    const tokens = twin.generate(model, tokenizer, ids, data.policy, stream, sample.length, sample.position);
    const again = Array.from(tokens, (token) => token.id);
    const isEqual = again.length === sample.ids.length && again.every((id, i) => id === sample.ids[i]);
    if (isEqual) {
      check("right", `The run’s sample of step ${count(data.step)}, written again here: all ${count(again.length)} tokens are those that Python wrote.`);
    } else {
      check("wrong", `The run’s sample of step ${count(data.step)} came out different here.`);
    }
  }

  function showFigures() {
    const [V, K, D] = data.shape;
    const figures = [
      ["Steps trained", count(data.step)],
      ["Weights", count(data.parameters)],
      ["Tokens, V", count(V)],
      ["Context, K", count(K)],
      ["Embedding, D", count(D)],
    ];
    if (data.loss) figures.push(["Training loss", data.loss.last.loss.toFixed(3)]);
    if (data.loss && data.loss.validation) {
      figures.push(["Validation loss", data.loss.validation.validation_loss.toFixed(3)]);
    }
    for (const [name, value] of figures) {
      $("figures").append(element("div", "", [element("dt", "", name), element("dd", "", value)]));
    }
  }

  // ── Next token ────────────────────────────────────────────────────────────────────────────────

  const ROWS = 12; // tokens listed; what is drawn or greedy is listed in any case
  const OPTIONS = ["temperature", "top_k", "top_p", "min_p"];
  const NAMES = { temperature: "Temperature", top_k: "Top-k", top_p: "Top-p", min_p: "Min-p" };
  let tokens = [];

  /** The policy, seed and length as typed; null where a field breaks its rule, which it then says. */
  function readForm() {
    let isRight = true;
    const read = (id, name, obeys, rule) => {
      const text = $(id).value.trim();
      const isFine = text !== "" && obeys(text);
      isRight &&= isFine;
      $(id).setAttribute("aria-invalid", String(!isFine));
      $(`${id}-error`).textContent = isFine ? "" : `${name} must be ${rule}.`;
      $(`${id}-error`).hidden = isFine;
      return text;
    };
    const policy = {};
    for (const option of OPTIONS) {
      const [obeys, rule] = twin.RULES[option];
      policy[option] = Number(read(option, NAMES[option], (text) => obeys(Number(text)), rule));
    }
    const seed = read("seed", "Seed", (text) => /^\d{1,1000}$/.test(text), "a whole number of at least 0");
    const isLength = (text) => /^\d+$/.test(text) && Number(text) >= 1 && Number(text) <= 400;
    const length = Number(read("length", "Tokens", isLength, "a whole number from 1 to 400"));
    return isRight ? { policy, seed, length } : null;
  }

  const SLICE = 10; // milliseconds of writing, so that the next key finds the page free
  let asked = null; // what is being written, or was
  let writing = 0; // grows with each text begun, so that an older one stops

  function generate() {
    const form = readForm();
    if (!form) return;
    asked = form;
    const number = ++writing;
    const prompt = $("prompt").value;
    const stream = new twin.Stream(asked.seed, "inference");
    const pieces = twin.generate(model, tokenizer, tokenizer.encode(prompt), asked.policy, stream, asked.length);
    tokens = [];
    const write = () => {
      if (number !== writing) return;
      const end = performance.now() + SLICE;
      const fresh = [];
      let isOver = false;
      while (!isOver && performance.now() < end) {
        const { value, done } = pieces.next();
        if (done) isOver = true;
        else fresh.push(pieceOf(value, tokens.push(value) - 1));
      }
      if (tokens.length === fresh.length) $("text").replaceChildren(element("span", "prompt", prompt));
      $("text").append(...fresh);
      $("place").max = tokens.length;
      const place = Math.min(Number($("place").value), tokens.length);
      if (isOver || tokens.length - fresh.length < place) look(place - 1);
      $("text").setAttribute("aria-busy", String(!isOver));
      if (!isOver) setTimeout(write);
    };
    $("text").setAttribute("aria-busy", "true");
    write();
  }

  function pieceOf({ id, text }, i) {
    const shown = id === END_OF_TEXT ? "<|endoftext|>" : text;
    const piece = element("b", id === END_OF_TEXT ? "end" : "", shown, { "data-id": id });
    piece.addEventListener("click", () => look(i));
    return piece;
  }

  /** Show how token number i, from 0, was chosen. */
  function look(i) {
    $("place").value = i + 1;
    $("place-value").textContent = `${i + 1} of ${tokens.length}`;
    $("text").querySelectorAll("b").forEach((piece, j) => piece.classList.toggle("chosen", i === j));
    const { id, stages, word } = tokens[i];
    const last = stages[stages.length - 1][1];
    const best = twin.greedy(stages[0][1]);
    showCumulative(last, id, best, word);
    showWords(last, id, best, word, asked, i);
    showBars(stages, id, best);
  }

  function showCumulative(w, drawn, best, word) {
    const S = twin.sum(w);
    const room = $("cumulative").clientWidth / 9; // characters
    const segments = []; // [id, p]; the unlikely between two others share one, which has no id
    w.forEach((weight, id) => {
      const isShown = weight / S > 0.002 || id === drawn || id === best;
      const previous = segments[segments.length - 1];
      if (isShown) segments.push([id, weight / S]);
      else if (previous && previous[0] === null) previous[1] += weight / S;
      else if (weight) segments.push([null, weight / S]);
    });
    let left = 0;
    const track = segments.map(([id, p]) => {
      const label = id === null ? "unlikely tokens" : data.labels[id];
      const state = (id === drawn ? "drawn" : "") + (id === best ? " greedy" : "");
      const isReadable = id !== null && label.length + 0.5 < p * room;
      const segment = element("i", state.trim(), isReadable ? label : "");
      segment.style.left = `${100 * left}%`;
      segment.style.width = `${100 * p}%`;
      left += p;
      segment.title = `${label}: ${percent(p)}`;
      return segment;
    });
    const parts = [element("div", "track", track)];
    if (word !== null) {
      const needle = element("div", "needle");
      needle.style.left = `${(100 * Number(word)) / 2 ** 64}%`;
      parts.push(needle);
    }
    $("cumulative").replaceChildren(...parts);
  }

  function showWords(w, drawn, best, word, { seed }, i) {
    const label = (id) => `“${data.labels[id]}”`;
    const same = drawn === best ? "which is also what greedy takes" : `where greedy takes ${label(best)}`;
    const sentence =
      word === null
        ? `Greedy: the likeliest token is taken, ${label(drawn)}, and no random word is drawn.`
        : `Word ${i} of stream “inference” under seed ${seed} is 0x${word.toString(16).padStart(16, "0")}: ` +
          `${(Number(word) / 2 ** 64).toFixed(4)} of the way along the bar, on which tokens stand by their id. ` +
          `It falls on ${label(drawn)}, ${same}.`;
    $("draw-words").textContent = sentence;
    $("cumulative").setAttribute("aria-label", `Kept tokens side by side, each as wide as it is likely. ${sentence}`);
  }

  /** Of the tokens that top-p kept, the one with which the mass was reached. */
  function crossing(stages) {
    const stage = stages.find(([name]) => name === "top-p");
    if (!stage) return -1;
    return stage[1].reduce((last, weight, id, w) => (weight && (last < 0 || weight <= w[last]) ? id : last), -1);
  }

  function showBars(stages, drawn, best) {
    const first = stages[0][1];
    const last = stages[stages.length - 1][1];
    const [firstSum, lastSum] = [twin.sum(first), twin.sum(last)];
    const order = Array.from(first.keys()).sort((a, b) => first[b] - first[a] || a - b);
    const shown = order.filter((id, rank) => rank < ROWS || id === drawn || id === best);
    const most = Math.max(...shown.map((id) => Math.max(first[id] / firstSum, last[id] / lastSum)));
    const crosses = crossing(stages);
    const rows = shown.map((id) => {
      const [model, policy] = [first[id] / firstSum, last[id] / lastSum];
      const bars = [element("div", "model"), element("div", "policy")];
      bars[0].style.width = `${(100 * model) / most}%`;
      bars[1].style.width = `${(100 * policy) / most}%`;
      const dropper = stages.find(([, w]) => w[id] === 0);
      const tags = [dropper ? `dropped by ${dropper[0]}` : "kept"];
      if (dropper && dropper[0] === "model") tags[0] = "too unlikely to be drawn";
      if (dropper && dropper[0] === "greedy") tags[0] = "not the likeliest";
      const fate = [element("span", "tag", tags[0])];
      if (id === crosses) fate.push(element("span", "tag crossing", "crosses top-p"));
      if (id === best) fate.push(element("span", "tag greedy", "greedy"));
      if (id === drawn) fate.push(element("span", "tag drawn", "drawn"));
      const state = (dropper ? "dropped" : "kept") + (id === drawn ? " drawn" : "");
      return element("tr", state, [
        element("th", "token", data.labels[id], { scope: "row", title: `token ${id}` }),
        element("td", "measure", [element("div", "", bars)], { "aria-hidden": "true" }),
        element("td", "number", percent(policy), { "data-id": id, "data-p": String(policy) }),
        element("td", "number", percent(model)),
        element("td", "", fate),
      ]);
    });
    const others = order.filter((id) => !shown.includes(id));
    if (others.length) {
      const mass = (w, S) => percent(others.reduce((total, id) => total + w[id], 0) / S);
      const kept = others.filter((id) => last[id]).length;
      rows.push(
        element("tr", "rest", [
          element("th", "", `${count(others.length)} more`, { scope: "row" }),
          element("td", "measure", "", { "aria-hidden": "true" }),
          element("td", "number", mass(last, lastSum)),
          element("td", "number", mass(first, firstSum)),
          element("td", "", `${count(kept)} kept`),
        ]),
      );
    }
    $("bars").querySelector("tbody").replaceChildren(...rows);
  }

  function startNext() {
    $("prompt").value = data.prompt;
    const start = data.policy || { temperature: 1, top_k: 0, top_p: 1, min_p: 0 };
    if (!model) {
      $("next-form").hidden = true;
      leaveOut("next", "The weights of this run are more than 8 MB, so they are not in this page, and its generation cannot be shown here: use minigen next and minigen generate.");
      return;
    }
    for (const option of OPTIONS) {
      const [number, slider] = [$(option), $(`${option}-range`)];
      number.value = slider.value = start[option];
      slider.addEventListener("input", () => (number.value = slider.value));
      number.addEventListener("input", () => (slider.value = number.value));
    }
    $("seed").value = data.seed;
    $("length").value = 60;
    $("next-form").addEventListener("input", generate);
    $("next-form").addEventListener("submit", (event) => event.preventDefault());
    $("place").addEventListener("input", () => look(Number($("place").value) - 1));
    generate();
  }

  // ── The run ───────────────────────────────────────────────────────────────────────────────────

  function showLoss() {
    const { loss } = data;
    if (!loss) return leaveOut("loss", data.missing.metrics);
    const drawn = draw("loss-chart", loss.chart, `Training loss over ${count(loss.last.step)} steps; at the end ${loss.last.loss.toFixed(3)} nats per token.`);
    const { training_unit, validation_unit } = loss.units;
    const words = [];
    if (training_unit === null) {
      $("units").hidden = true;
      words.push(`Loss is in nats per token. ${data.missing.corpus || ""} So the entropies of its counts, and bits per byte, are left out.`);
    } else {
      words.push("Grey dashed lines belong to the training text: ln V is what knowing nothing costs; the entropies are what tables of counts of single tokens and of pairs would reach on that very text.");
      if (Object.keys(loss.validation_lines).length) words.push("Dashed lines in the colour of the validation curve are those entropies of the validation text, whose counts the model never saw.");
    }
    if (!loss.validation) words.push("No validation loss was measured.");
    if (loss.last.step > data.step) words.push(`The latest checkpoint is of step ${count(data.step)}; what was logged after it is shown as well.`);
    $("loss-words").textContent = words.join(" ");
    $("units").addEventListener("change", async (event) => {
      const { view } = await drawn;
      const isBits = event.target.value === "bits";
      view.signal("training_unit", isBits ? training_unit : 1);
      view.signal("validation_unit", isBits ? (validation_unit ?? training_unit) : 1);
      view.runAsync();
    });
  }

  function showSamples() {
    const { samples } = data;
    if (!samples.length) return leaveOut("samples", data.missing.samples);
    const show = () => {
      const { step, prompt, text } = samples[Number($("sample").value)];
      $("sample-step").textContent = count(step);
      $("sample").setAttribute("aria-valuetext", `step ${step}`);
      $("sample-text").replaceChildren(element("span", "prompt", prompt), element("span", "", text));
    };
    $("sample").max = samples.length - 1;
    $("sample").value = samples.length - 1;
    $("sample").disabled = samples.length === 1;
    $("sample").addEventListener("input", show);
    $("sample-words").textContent = `${count(samples.length)}${data.samplesTaken > samples.length ? ` of ${count(data.samplesTaken)}` : ""} samples, of steps ${count(samples[0].step)} to ${count(samples[samples.length - 1].step)}. The prompt is grey.`;
    show();
  }

  function showStreams() {
    const { streams } = data;
    if (!streams) return leaveOut("streams", data.missing.metrics);
    const init = streams.init ? `the initial weights took ${count(streams.init)} words of “init” before the first step, ` : "";
    const drawn = `${init}training ${count(streams.optimizer)} of “optimizer”, samples ${count(streams.inference)} of “inference”.`;
    draw("streams-chart", streams.chart, `Where each stream drew words: ${drawn}`);
    const agreement = streams.agree
      ? `All ${count(streams.lines)} recorded positions of “optimizer” are step × ${count(data.batchSize)}: samples took no word from it.`
      : "Recorded positions of “optimizer” are not step × batch size: something else drew from it.";
    $("streams-words").textContent = `Measured: ${drawn} ${agreement} A twin that trains without samples draws step × ${count(data.batchSize)} too, by the design: the same words, the same batches, the same fingerprint. Its two lanes are computed, not measured; minigen demo and minigen prove train one and compare.`;
    check(streams.agree ? "right" : "wrong", agreement);
  }

  // ── Training in the background ────────────────────────────────────────────────────────────────

  const TURN = 150; // milliseconds of training between two looks at it
  const exactly = (x) => (typeof x === "number" ? x.toString() : x);

  /** A worker made of this page's own twin: a file:// page may load no other. */
  function newWorker() {
    const source = new Blob([$("twin").textContent], { type: "text/javascript" });
    const url = URL.createObjectURL(source);
    const worker = new Worker(url);
    URL.revokeObjectURL(url);
    return worker;
  }

  function startTraining() {
    const { training } = data;
    if (training.missing) return leaveOut("train", training.missing);
    const last = training.step;
    for (const step of [0, ...training.checkpoints.map((saved) => saved.step)]) {
      const name = step ? `the checkpoint of step ${count(step)}` : "the initial weights";
      $("train-from").append(element("option", "", name, { value: step }));
    }
    const { every, is_own: isOwn } = training.sampling;
    const mistaken = isOwn ? `Samples, every ${count(every)} steps as in this run,` : `A sample every ${count(every)} steps`;
    $("train-mistake-hint").textContent = `${mistaken} ${isOwn ? "draw" : "draws"} from “optimizer”, the stream of the batches.`;
    const text = data.reproduce.isExternal ? "the text that it was trained on" : "the text";
    $("train-words").textContent = `For this the page carries ${text}, as ${count(training.tokens_count)} tokens.`;
    const chart = draw("train-chart", training.chart, `Loss over ${count(last)} steps, as recorded and as trained here.`);

    let worker = null;
    let isRunning = false;
    let asked = null; // {from, mistake}, and where the clock stands
    const shownEvery = Math.max(1, Math.floor(last / 1500));

    const show = (state, go, isBusy) => {
      $("train-state").textContent = state;
      $("train-go").textContent = go;
      $("train-again").disabled = !asked;
      $("train-from").disabled = $("train-mistake").disabled = isBusy;
    };
    const ask = (message = {}) => worker.postMessage({ ...message, until: last, milliseconds: TURN });

    function reset() {
      if (worker) worker.terminate();
      [worker, isRunning, asked] = [null, false, null];
      $("train-bar").value = 0;
      $("train-verdict").hidden = true;
      $("train-go").disabled = false;
      chart.then(({ view }) => view.remove("trained", () => true).runAsync());
      show(`${count(last)} steps of ${count(training.batch_size)} predictions each.`, "Train", false);
    }

    /** What the comparison has found so far, as a sentence. */
    function finding({ step, difference, compared, fingerprint, fault }) {
      if (fault) return ["wrong", `${fault[0].toUpperCase()}${fault.slice(1)}.`];
      const steps = `${count(compared.losses)} losses and learning rates`;
      if (difference) {
        const { what, step: at, recorded, trained } = difference;
        const numbers = `${exactly(recorded)} was recorded, ${exactly(trained)} came out here.`;
        const before = at > asked.from + 1 && what !== "fingerprints" ? ` Up to step ${count(at - 1)} every bit was the same.` : "";
        const why = asked.mistake
          ? " The sample before it took words that belong to the batches: from here on this is another run."
          : what === "fingerprints"
            ? " The weights of this run are not those that its config and text give."
            : " Its log, its text or its config is not what it was.";
        return ["wrong", `The ${what.replace("_", " ")} part at step ${count(at)}: ${numbers}${before}${why}`];
      }
      if (fingerprint === null) return null;
      const also = compared.losses ? `All ${steps} are the recorded ones to the last bit, and the` : "The";
      const end = `${also} weights after step ${count(step)} have the run’s fingerprint, ${fingerprint}.`;
      return asked.mistake ? ["right", `${end} No sample was due before the end, so the mistake changed nothing.`] : ["right", end];
    }

    function take(answer) {
      const { step, losses, difference, compared, fingerprint, fault } = answer;
      const shown = losses.filter(([at]) => at % shownEvery === 0 || at === last);
      chart.then(({ view }) => view.insert("trained", shown.map(([at, loss]) => ({ step: at, loss }))).runAsync());
      $("train-bar").value = step / last;
      const found = finding(answer);
      if (found) {
        const [state, sentence] = found;
        const verdict = $("train-verdict");
        verdict.className = `verdict ${state}`;
        if (verdict.textContent !== sentence) verdict.textContent = sentence;
        verdict.hidden = false;
      }
      const isOver = step === last || fault !== null;
      asked.spent += Date.now() - asked.since;
      asked.since = Date.now();
      const rate = (step - asked.from) / asked.spent; // steps a millisecond
      const left = isOver ? "" : `, about ${count(Math.ceil((last - step) / rate / 1000))} s left`;
      const equal = compared.losses && !difference ? `; ${count(compared.losses)} losses, all the recorded ones` : "";
      const state = `Step ${count(step)} of ${count(last)}${equal}${isRunning ? left : ""}.`;
      if (isOver) {
        isRunning = false;
        $("train-go").disabled = true;
        show(`${state} It took ${(asked.spent / 1000).toFixed(1)} s.`, "Done", true);
        if (fingerprint !== null && !asked.mistake) check(found[0], `Trained again here: ${found[1]}`);
      } else if (isRunning) {
        show(state, "Stop", true);
        ask();
      } else {
        show(`${state} Stopped.`, "Go on", true);
      }
    }

    $("train-form").addEventListener("submit", (event) => {
      event.preventDefault();
      isRunning = !isRunning;
      if (!isRunning) return; // the answer under way is the last one
      if (asked) {
        asked.since = Date.now();
        $("train-go").textContent = "Stop";
        ask();
        return;
      }
      asked = { from: Number($("train-from").value), mistake: $("train-mistake").checked, spent: 0, since: Date.now() };
      worker = newWorker();
      worker.onmessage = (event) => take(event.data);
      show("Making the first weights…", "Stop", true);
      ask({ begin: { data: training, options: asked } });
    });
    $("train-again").addEventListener("click", reset);
    reset();
  }

  function showEmbedding() {
    const { chart, kinds, tokens: size, shares } = data.embedding;
    const occurring = new Set(data.embedding.occurring);
    kinds.forEach((kind, number) => {
      if (!occurring.has(kind)) return;
      const swatch = element("i");
      swatch.style.background = `var(--kind-${number})`;
      const item = element("li", "", [swatch, kind]);
      $("kinds").append(item);
    });
    draw("embedding-chart", chart, `${count(size)} tokens in two dimensions.`);
    const which = data.missing.corpus ? "printable or learned tokens" : "tokens that occur in the training text";
    $("embedding-words").textContent = `${count(size)} ${which}; the two directions hold ${percent(shares[0])} and ${percent(shares[1])} of the variance. The axes are found with sums of integers, so this picture, too, is the same on every machine. ␣ is a space, ⏎ a line end; dots are learned merges and bytes that are no letter by themselves (hover to read them).`;
  }

  function showReproduce() {
    const { claim, command, config, notes } = data.reproduce;
    $("reproduce-claim").textContent = claim;
    $("command").textContent = command;
    $("fingerprint").textContent = data.fingerprint;
    $("config").textContent = config;
    $("reproduce-words").textContent = notes;
  }

  document.title = `${visible(data.name)}: minigen run report, step ${count(data.step)}, ${data.fingerprint.slice(0, 8)}`;
  $("name").textContent = visible(data.name);
  showFigures();
  checkFingerprint();
  checkLog();
  checkSample();
  startNext();
  showLoss();
  showSamples();
  showStreams();
  startTraining();
  showEmbedding();
  showReproduce();
})();
