// The gateway's interface: JSON, and server-sent events.

const MOST_CHARACTERS = 64 * 1024 * 1024; // The most characters of one event: a large picture.
const PASSING = [408, 429, 502, 503, 504]; // Statuses of failures that pass with time.
const AGAIN_S = 3; // Seconds after which to ask again, if such a failure does not say when.

/** A request failed. hint: what to do. retryAfterS: seconds after which to ask again; null: asking again does not help. isTooMuch: a
 * shorter conversation may succeed. */
export class Failure extends Error {
  constructor(message, { hint = "", retryAfterS = null, isTooMuch = false } = {}) {
    super(message);
    this.hint = hint;
    this.retryAfterS = retryAfterS;
    this.isTooMuch = isTooMuch;
  }
}

/** The error for an answer of a proxy on the way, or of a server that is no gateway. */
export function strange(what) {
  return new Failure(`The gateway's answer makes no sense: ${what}.`, { hint: "Look what stands between this page and the gateway, such as a proxy, or ask again.", retryAfterS: AGAIN_S });
}

const place = (path) => new URL(path, document.baseURI);

function headers(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function sent(path, options) {
  try {
    return await fetch(place(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("The gateway cannot be reached.", { hint: "Look whether it still runs, and whether this device is online.", retryAfterS: AGAIN_S });
  }
}

function ofError(error, retryAfterS = null, status = 200) {
  const said = (value) => (typeof value === "string" ? value : "");
  const message = said(error) || said(error?.message) || "The gateway said that something went wrong, and not what.";
  const isTooMuch = status === 413 || (status === 400 && said(error?.param).startsWith("messages"));
  return new Failure(message, { hint: said(error?.hint), retryAfterS, isTooMuch });
}

async function checked(response) {
  if (response.ok) return response;
  const { status } = response;
  const after = Number(response.headers.get("Retry-After") ?? NaN);
  const otherwise = PASSING.includes(status) ? AGAIN_S : null;
  const body = await ofJson(response).catch((error) => {
    if (error.name === "AbortError") throw error;
    return null; // A proxy in between answered, with HTML for example.
  });
  throw ofError(body?.error ?? `The gateway answered with status ${status}.`, Number.isNaN(after) ? otherwise : after, status);
}

async function ofJson(response) {
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw strange("it is no JSON");
  }
}

/** The answer to a GET of this path. Raises Failure, AbortError. */
export async function get(path, key, signal) {
  return ofJson(await checked(await sent(path, { headers: headers(key), cache: "no-store", signal })));
}

/** The answer to a POST. body: as in `stream`. Raises Failure, AbortError. */
export async function post(path, body, key, signal) {
  return ofJson(await posted(path, body, key, signal));
}

/** Tell the gateway that the resource is not wanted any more; a failure to tell it is ignored. */
export async function drop(path, key) {
  await sent(path, { method: "DELETE", headers: headers(key), keepalive: true }).catch((error) => console.info("Not deleted:", error.message));
}

/** The bytes of a file as they come. Raises Failure, AbortError. */
export async function* pieces(path, key, signal) {
  const response = await checked(await sent(path, { headers: headers(key), cache: "no-store", signal }));
  yield* read(response.body);
}

async function posted(path, body, key, signal) {
  const isForm = body instanceof FormData;
  const type = isForm ? {} : { "Content-Type": "application/json" };
  const sending = { method: "POST", headers: { ...headers(key), ...type }, body: isForm ? body : JSON.stringify(body), signal };
  return checked(await sent(path, sending));
}

/** The pieces of a body as they come. */
async function* read(body) {
  const reader = body.getReader();
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new Failure("The connection was lost in the middle of the answer.", { hint: "Ask again.", retryAfterS: 0 });
      });
      if (done) return;
      yield value;
    }
  } finally {
    await reader.cancel().catch(() => {}); // The connection is gone already.
  }
}

/** The events of an answer: {name, data}. body: an object that becomes JSON, or FormData. Raises Failure, AbortError. */
export async function* stream(path, body, key, signal) {
  const response = await posted(path, body, key, signal);
  if (!response.headers.get("Content-Type")?.startsWith("text/event-stream")) throw strange("it is no stream of events");
  for await (const event of told(response.body)) {
    if (event.text === "[DONE]") continue; // The connection ends by itself: to leave now would cancel the answer.
    const data = ofEvent(event.text);
    if (data.error) throw ofError(data.error, data.error.type === "server_error" ? AGAIN_S : null);
    yield { name: event.name, data };
  }
}

function ofEvent(text) {
  let data = null;
  try {
    data = JSON.parse(text);
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
  }
  if (data === null || typeof data !== "object") throw strange("an event is no JSON object");
  return data;
}

/** Server-sent events as they come: {name, text}. */
async function* told(body) {
  let rest = "";
  for await (const value of read(body.pipeThrough(new TextDecoderStream()))) {
    rest += value;
    if (rest.length > MOST_CHARACTERS) throw new Failure("The gateway sent more than this page can hold.");
    const blocks = rest.split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split(/\r?\n/);
      const of = (field) => lines.filter((line) => line.startsWith(`${field}:`)).map((line) => line.slice(field.length + 1).replace(/^ /, ""));
      const data = of("data");
      if (data.length) yield { name: of("event").at(-1) ?? "", text: data.join("\n") };
    }
  }
}
