// Keeps the laboratory for a time without network: the pages below and what its version's folder holds, and nothing else
// of this host. A page comes from the network where there is one, so that a newer folder is seen; a version's files never
// change, and come from what is kept. build.py sets VERSION.
const SCOPE = self.registration.scope, NAME = `lfm2np ${SCOPE}`;
const PAGES = ["", "index.html", "drawings.html"].map((name) => SCOPE + name), FILES = `${SCOPE}${VERSION}/`;
// A worker has the policy of its own file only, which a page can't set.
const POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'";

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil((async () => {
  const store = await caches.open(NAME);
  for (const { url } of await store.keys()) if (!PAGES.includes(url) && !url.startsWith(FILES)) await store.delete(url);
  await self.clients.claim();
})()));
self.addEventListener("fetch", (event) => {
  const { request } = event, address = request.url.replace(/[?#].*/, "");
  if (request.method !== "GET") return;
  if (PAGES.includes(address)) event.respondWith(page(address));
  else if (address.startsWith(FILES)) event.respondWith(file(request, address));
});

async function page(address) {
  const store = await caches.open(NAME);
  const found = await fetch(address, { cache: "no-cache", redirect: "manual" }).catch(() => null);
  if (!found) return (await store.match(address)) || (await store.match(SCOPE)) || Response.error();
  if (found.ok) store.put(address, found.clone()).catch(() => {});  // cut, or no room: not kept
  return found;
}
async function file(request, address) {
  const store = await caches.open(NAME);
  let found = await store.match(address);
  if (!found) {
    found = await fetch(request);
    if (found.ok) store.put(address, found.clone()).catch(() => {});
  }
  if (address !== `${FILES}worker.js`) return found;
  const headers = new Headers(found.headers);
  headers.set("Content-Security-Policy", POLICY);
  return new Response(found.body, { status: found.status, headers });
}
