
// The laboratory without a server: a Web Worker computes a link's page, which takes the place of this one's body.
const host = { worker: null, started: null, waiting: new Map(), number: 0, phase: "", loaded: 0, running: 0, note: "", versions: null, digests: {}, isKept: false };
const PATIENCE = 2000, PAGES = ["./", "drawings.html"];
const HOME = new URL(".", location.href);
const CAN = typeof WebAssembly === "object" && typeof Worker === "function" && typeof DecompressionStream === "function";
let left = new AbortController();
let shown = "", turn = 0;  // the link whose page this is, which the address may run ahead of; how many were asked for
const STOPPED = 499;  // the status of what was ended

function start() {
  host.phase = "loading";
  host.worker = new Worker(new URL(`${VERSION}/worker.js`, HOME));
  host.worker.onmessage = ({ data }) => ({
    progress() { host.loaded = data.loaded / data.total; },
    starting() { host.phase = "starting"; },
    ready() { Object.assign(host, { phase: "ready", versions: data.versions, digests: data.digests }); },
    whole() { areKept(data.names).then((are) => { host.isKept = are; tell(); }); },
    failed() { fail(data.sentence); },
    answer() { settle(data.number, data.value); },
    broken() { settle(data.number, { status: 500, text: `${data.sentence}.` }); restart(); },
  })[data.kind]() ?? tell();
  host.worker.onerror = (event) => { event.preventDefault(); fail("worker.js can't be loaded"); };
  tell();
}
function fail(sentence) {
  host.phase = "failed";
  host.why = `This browser can't compute: ${sentence}. What is drawn below stays; reload the page to try again.`;
  for (const number of [...host.waiting.keys()]) settle(number, null);
}
function settle(number, value) {
  host.waiting.get(number)?.(value);
  host.waiting.delete(number);
}
async function call(name, argument) {
  await host.started;
  if (host.phase === "failed" || !host.worker) return null;
  const number = ++host.number;
  return new Promise((answer) => { host.waiting.set(number, answer); host.worker.postMessage({ number, call: name, argument }); });
}
function restart(text = "Python was started anew; run it again.") {
  host.worker.terminate();
  for (const number of [...host.waiting.keys()]) settle(number, { status: STOPPED, text });
  start();
}
const SENTENCES = {
  loading: () => "Loading Python and the engine into this browser ...",
  starting: () => "Starting Python ...",
  ready: () => (host.running ? "The engine runs ..." : `Ready: Python ${host.versions.Python} and NumPy ${host.versions.NumPy} in this browser${host.isKept ? ", from now on without network" : ""}.${host.note}`),
  failed: () => host.why,
};
function tell() {
  const part = (name) => document.getElementById(`host-${name}`);
  const state = part("state"), bar = part("progress"), text = SENTENCES[host.phase]?.();
  if (text && state.textContent !== text) state.textContent = text;  // a screen reader says a change only
  bar.hidden = !["loading", "starting"].includes(host.phase);
  if (host.phase === "loading") bar.value = host.loaded; else bar.removeAttribute("value");
  if (!host.running && document.activeElement === part("stop")) state.focus();  // what is hidden has no focus
  part("stop").hidden = !host.running || !host.worker;
  if (host.phase === "ready") part("prove").hidden = false;
  part("prove").setAttribute("aria-disabled", host.phase !== "ready" || host.running > 0);
}
async function run(name, argument) {
  host.running += 1;
  host.note = "";
  tell();
  const value = await call(name, argument);
  host.running -= 1;
  tell();
  return value;
}
async function ask(link) {
  const mine = ++turn, answer = await run("page", link.replace(/^\?/, ""));
  const isOvertaken = mine !== turn;  // by a later link: its page is the one to show
  if (isOvertaken) return { ok: false, text: "Another page was asked for meanwhile.", isOvertaken };
  return answer && { ok: answer.status === 200, text: answer.text, isPage: [200, 400].includes(answer.status) };
}

function show(text, link) {
  const page = new DOMParser().parseFromString(text, "text/html");
  left.abort();
  left = new AbortController();
  document.body.replaceWith(document.adoptNode(page.body));
  shown = link;
  fresh();
  scrollTo(0, 0);
}
function fresh() {
  begin(left.signal);
  laboratory({ ask, gone: "This browser can't compute: see above.", go(link, text) { history.pushState(null, "", link + location.hash); show(text, link); } });
  document.getElementById("host-stop").addEventListener("click", () => restart("The run was stopped."));
  document.getElementById("host-prove").addEventListener("click", prove);
  tell();
}
async function visit(link, isNew) {
  const answer = await ask(link);
  if (!answer || answer.isOvertaken) return;
  if (!answer.isPage) {
    host.note = ` ${answer.text}`;
    if (!isNew) history.replaceState(null, "", shown || HOME.pathname);
    return tell();
  }
  if (isNew) history.pushState(null, "", link || HOME.pathname);
  show(answer.text, link);
  const title = document.querySelector(".lesson-text h2") || document.querySelector("h1");
  title.tabIndex = -1;
  title.focus({ preventScroll: true });
}
document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a[href]")?.getAttribute("href");
  if (link === undefined || !/^(\?|\.\/$)/.test(link) || event.button || event.ctrlKey || event.metaKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  visit(link === "./" ? "" : link, true);
});
addEventListener("popstate", () => { if (location.search !== shown) visit(location.search, false); else turn += 1; });

// The service worker, before anything is loaded, so that it keeps all of it; without one, each visit needs the network.
// One that is there already is not waited for, as to look for a newer one takes a browser seconds.
async function kept() {
  const workers = navigator.serviceWorker, late = new Promise((done) => { setTimeout(done, PATIENCE); });
  if (!workers) return;
  const registered = workers.register(new URL("service.js", HOME)).catch(() => null);
  if (!workers.controller && (await registered)) await Promise.race([late, new Promise((done) => { workers.addEventListener("controllerchange", done, { once: true }); })]);
  keepPages().catch(() => {});
}
async function keepPages() {
  for (const page of PAGES) if (!(await caches.match(new URL(page, HOME)))) await fetch(new URL(page, HOME));
}
async function areKept(names) {
  if (!navigator.serviceWorker?.controller) return false;
  const kept = await Promise.all([...names.map((name) => `${VERSION}/${name}`), "./"].map((name) => caches.match(new URL(name, HOME))));
  return kept.every(Boolean);
}

// "Prove it here": what anyone can repeat, on this machine.
async function prove() {
  if (host.running) return;
  const part = document.getElementById("host-proof"), query = shown.replace(/^\?/, "");
  const lines = document.createElement("dl");
  part.hidden = false;
  part.replaceChildren(lines);
  const line = (name, text) => {
    const said = document.createElement("dd"), head = document.createElement("dt");
    head.textContent = name;
    said.textContent = text;
    lines.append(head, said);
    return said;
  };
  const states = [["proof", query, line("This run", "is computed once more, alone ...")]];
  for (const name of Object.keys(host.digests)) states.push(["digest", name, line(`Digest of the fixture ${name}`, "is computed ...")]);
  for (const [name, argument, said] of states) {
    const answer = await run(name, argument);
    if (!said.isConnected) return;
    if (!answer || answer.status) { lines.replaceChildren(); line("Not proved", answer?.text ?? host.why); return; }
    const isRight = name === "proof" ? answer.right : answer.value === host.digests[argument];
    said.className = isRight ? "right" : "wrong";
    said.textContent = name === "proof" ? answer.sentence : `${answer.value}: ${isRight ? "equal to" : `other than ${host.digests[argument]}, that of`} the machine that built this page`;
  }
  line("Computed by", `${Object.entries(host.versions).map((each) => each.join(" ")).join(", ")}; ${navigator.userAgent}`);
}

fresh();
if (location.protocol === "file:") fail("a page from a file may not start one; python -m http.server in its folder serves it");
else if (CAN) {
  host.phase = "loading";
  host.started = kept().then(start);
  if (location.search) visit(location.search, false);
}
tell();
