"use strict";
// The Web Worker that computes: Pyodide, the engine and its fixtures, all from the folder beside this file. What came is
// held against files.json: its SHA-256 where the page came by HTTPS or from this machine, elsewhere its length, as
// browsers compute no hash there. A call is answered after those before it.
const say = (message) => self.postMessage(message);
const folder = new URL(".", self.location.href);
const contents = new Map();  // what Pyodide fetches, by address
const network = self.fetch.bind(self);
self.fetch = async (address, options) => contents.get(new URL(address?.url ?? address, folder).href)?.() ?? network(address, options);

const hex = (bytes) => [...new Uint8Array(bytes)].map((byte) => byte.toString(16).padStart(2, "0")).join("");
async function check(bytes, file) {
  if (bytes.length !== file.size) throw new Error(`${file.name} came with ${bytes.length.toLocaleString("en")} of ${file.size.toLocaleString("en")} bytes`);
  if (self.crypto.subtle && hex(await crypto.subtle.digest("SHA-256", bytes)) !== file.sha256) throw new Error(`${file.name} is not the file that was built`);
}
async function download(file, came) {
  const address = new URL(file.name, folder).href;
  const answer = await network(address).catch(() => { throw new Error(`${file.name} can't be loaded`); });
  if (!answer.ok) throw new Error(`${file.name} is not there: HTTP status ${answer.status}`);
  const bytes = new Uint8Array(file.size), reader = answer.body.getReader();
  let length = 0;
  for (let part; !(part = await reader.read().catch(() => ({ done: true }))).done; length += part.value.length) {
    if (length + part.value.length > file.size) throw new Error(`${file.name} is longer than the file that was built`);
    bytes.set(part.value, length);
    came(part.value.length);
  }
  const whole = bytes.subarray(0, length);
  await check(whole, file).catch(async (problem) => {
    for (const name of self.caches ? await caches.keys() : []) await (await caches.open(name)).delete(address);  // not again
    throw problem;
  });
  return whole;
}
async function unzipped(bytes) {
  return new Uint8Array(await new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer());
}

let python, browser, late, site;
async function load() {
  const plan = await (await network("files.json").catch(() => { throw new Error("files.json can't be loaded"); })).json();
  const early = plan.files.filter((file) => !file.late), total = early.reduce((sum, file) => sum + file.size, 0);
  let loaded = 0;
  const came = (count) => { loaded += count; say({ kind: "progress", loaded, total }); };
  const files = Object.fromEntries(await Promise.all(early.map(async (file) => [file.name, await download(file, came)])));
  const serve = (name, bytes, type) => contents.set(new URL(name, folder).href, () => new Response(bytes, { headers: { "Content-Type": type } }));
  serve("pyodide.asm.wasm", await unzipped(files["pyodide.asm.wasm.gz"]), "application/wasm");
  for (const name of plan.served) serve(name, files[name], "application/octet-stream");
  importScripts("pyodide.js", "pyodide.asm.js");
  say({ kind: "starting" });
  python = await loadPyodide({ indexURL: folder.href, stdout() {}, stderr() {} });
  await python.loadPackage("numpy", { messageCallback() {}, errorCallback(text) { throw new Error(text); } });
  site = python.runPython("import site; site.getsitepackages()[0]");
  for (const name of plan.early) python.unpackArchive(files[name], "zip", { extractDir: site });
  browser = python.pyimport("lfm2np.teaching.lab.static.browser");
  browser.load_models();
  contents.clear();
  say({ kind: "ready", versions: { ...JSON.parse(browser.versions()), Pyodide: python.version, files: `compared by ${self.crypto.subtle ? "SHA-256" : "length only, without HTTPS"}` }, digests: plan.digests });
  late = Promise.all(plan.files.filter((file) => file.late).map(async (file) => python.unpackArchive(await download(file, () => {}), "zip", { extractDir: site })));
  late.then(() => say({ kind: "whole", names: [...plan.files.map((file) => file.name), "files.json", "worker.js"] }), () => {});  // who needs a fixture that did not come is answered with what went wrong
}

const sentence = (problem) => (problem instanceof RangeError || /memory/i.test(problem.message) ? "this browser gave too little memory" : problem.message.trim().split("\n").pop());
const loading = load();
loading.catch((problem) => say({ kind: "failed", sentence: sentence(problem) }));
let before = loading;
self.onmessage = ({ data: { number, call, argument } }) => {
  before = before.then(async () => {
    try {
      if (call === "digest") await late;
      say({ kind: "answer", number, value: JSON.parse(browser[call](argument)) });
    } catch (problem) {
      say({ kind: "broken", number, sentence: sentence(problem) });
    }
  }).catch(() => {});
};
