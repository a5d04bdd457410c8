// Keeps the laboratory for a time without network. A page comes from the network where there is one, so that a newer
// folder is seen; what a version's folder holds never changes, and comes from what is kept. worker.js keeps the rest.
const NAME = `lfm2np-${new URL(`${VERSION}/`, self.location.href).pathname}`;  // of the cache, as worker.js has it
self.addEventListener("install", (event) => event.waitUntil((async () => {
  await (await caches.open(NAME)).addAll(KEPT.map((name) => new Request(name, { cache: "no-cache" })));
  await self.skipWaiting();
})()));
self.addEventListener("activate", (event) => event.waitUntil((async () => {
  const ours = new URL(".", self.location.href).pathname;
  for (const name of await caches.keys()) if (name.startsWith(`lfm2np-${ours}`) && name !== NAME) await caches.delete(name);
  await self.clients.claim();
})()));
const POLICY = "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; connect-src 'self'";
self.addEventListener("fetch", (event) => {
  const { request } = event, address = new URL(request.url);
  if (request.method !== "GET" || address.origin !== self.location.origin) return;
  event.respondWith((async () => {
    const store = await caches.open(NAME);
    if (request.mode === "navigate") return fetch(request).catch(async () => (await store.match(request)) || store.match("./"));
    const found = (await store.match(request)) || (await fetch(request));
    if (!address.pathname.endsWith("/worker.js") || !found.ok) return found;
    const headers = new Headers(found.headers);  // a worker has the policy of its own file only, which no page can set
    headers.set("Content-Security-Policy", POLICY);
    return new Response(found.body, { headers });
  })());
});
