// Keeps the laboratory for a time without network. A page comes from the network where there is one, so that a newer
// folder is seen; what a version's folder holds never changes, and comes from what is kept. build.py sets VERSION.
const NAME = `lfm2np ${self.registration.scope}`;
// A worker has the policy of its own file only, which a page can't set.
const POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'";
const isOfAnother = (address) => /^[0-9a-f]{12}\//.test(address.replace(self.registration.scope, "")) && !address.includes(`/${VERSION}/`);

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil((async () => {
  const store = await caches.open(NAME);
  for (const request of await store.keys()) if (isOfAnother(request.url)) await store.delete(request);
  await self.clients.claim();
})()));
self.addEventListener("fetch", (event) => {
  const { request } = event;
  if (request.method === "GET" && request.url.startsWith(self.registration.scope)) event.respondWith(answer(request));
});

async function answer(request) {
  const store = await caches.open(NAME), address = request.url.replace(/[?#].*/, "");
  const isPage = request.mode === "navigate" || !address.includes(`/${VERSION}/`);
  const kept = async () => (await store.match(address)) || (request.mode === "navigate" ? store.match(self.registration.scope) : undefined);
  let found = isPage ? undefined : await kept();
  if (!found) {
    found = await fetch(request).catch(async (problem) => { const old = await kept(); if (old) return old; throw problem; });
    if (found.ok && !found.redirected) store.put(address, found.clone()).catch(() => {});  // cut, or no room: not kept
  }
  if (!address.endsWith("/worker.js")) return found;
  const headers = new Headers(found.headers);
  headers.set("Content-Security-Policy", POLICY);
  return new Response(found.body, { status: found.status, headers });
}
