// Keeps the files of the page, so that it opens without its gateway too. Answers of models are never kept.

const STORE = "omnistage-page-1";

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("message", (event) => {
  // Files that were loaded before this worker was there.
  event.waitUntil(caches.open(STORE).then((store) => store.addAll(event.data)).then(() => event.source.postMessage("kept")));
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const home = new URL("..", self.location).href;
  const isOurs = request.method === "GET" && (request.url === home || request.url.startsWith(`${home}page/`));
  if (isOurs) event.respondWith(newest(request));
});

async function newest(request) {
  const store = await caches.open(STORE);
  try {
    const response = await fetch(request);
    if (response.ok) await store.put(request, response.clone());
    return response;
  } catch (error) {
    const kept = await store.match(request, { ignoreSearch: true });
    if (kept) return kept;
    throw error;
  }
}
