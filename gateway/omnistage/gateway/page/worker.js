// Keeps the files of the page, so that it opens without its gateway too. It never keeps answers of models.

const STORE = "omnistage-page-1";

self.addEventListener("install", () => self.skipWaiting());
self.addEventListener("activate", (event) => event.waitUntil(self.clients.claim()));

self.addEventListener("message", (event) => {
  // Files that were loaded before this worker existed.
  const told = async () => (await tryToKeep((store) => store.addAll(event.data))) && event.source.postMessage("kept");
  event.waitUntil(told());
});

self.addEventListener("fetch", (event) => {
  const { request } = event;
  const home = new URL("..", self.location).href;
  const isOurs = request.method === "GET" && (request.url === home || request.url.startsWith(`${home}page/`));
  if (isOurs) event.respondWith(newest(event));
});

async function newest(event) {
  const { request } = event;
  try {
    const response = await fetch(request);
    if (response.ok) {
      const copy = response.clone();
      event.waitUntil(tryToKeep((store) => store.put(request, copy)));
    }
    return response;
  } catch (error) {
    const store = await caches.open(STORE);
    const kept = await store.match(request, { ignoreSearch: true });
    if (kept) return kept;
    throw error;
  }
}

/** Keep files, and return whether they are kept: on a full disk they are not, and the page works all the same. */
async function tryToKeep(keep) {
  try {
    await keep(await caches.open(STORE));
    return true;
  } catch (error) {
    console.info("The browser keeps no files of this page:", error.message);
    return false;
  }
}
