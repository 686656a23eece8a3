// The probe for JavaScript: `node probe.cjs TWIN {name: file, …}` trains runs of the twin and prints
// what probe.py prints. In a browser a page sets TWIN_RUNS, and the line becomes its text.
"use strict";

const probe = (twin, runs, engine) => {
  const clock = () => (typeof process === "undefined" ? performance.now() * 1e3 : process.cpuUsage().user);
  const start = clock();
  const results = {};
  for (const [name, data] of Object.entries(runs)) {
    const run = new twin.Run(data);
    while (run.step < data.steps) run.train();
    results[name] = run.fingerprint;
  }
  const environment = { python: "", system: "", engine };
  return JSON.stringify({ environment, results, seconds: (clock() - start) / 1e6 });
};

if (typeof document === "undefined") {
  const { readFileSync } = require("fs");
  const [path, files] = process.argv.slice(2);
  const runs = {};
  for (const [name, file] of Object.entries(JSON.parse(files))) runs[name] = JSON.parse(readFileSync(file, "utf8"));
  const { deno, bun, node, v8 } = process.versions;
  const own = deno ? `Deno ${deno}` : bun ? `Bun ${bun}, JavaScriptCore` : `Node ${node}`;
  console.log(probe(require(path), runs, v8 && !bun ? `${own}, V8 ${v8}` : own));
} else {
  const version = /(Chrome|Firefox)\/[\d.]+/.exec(navigator.userAgent)[0].replace("/", " ");
  document.body.textContent = `\n${probe(twin, TWIN_RUNS, version)}\n`;  // a line of its own
}
