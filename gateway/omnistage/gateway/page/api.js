// The gateway's interface: JSON, and server-sent events.

const MOST_CHARACTERS = 64 * 1024 * 1024; // Of one event: a large picture.

/** A request failed. hint: what to do. retryAfterS: when to ask again; null: asking again does not help. isTooMuch: perhaps less of the
 * conversation would do. */
export class Failure extends Error {
  constructor(message, { hint = "", retryAfterS = null, isTooMuch = false } = {}) {
    super(message);
    this.hint = hint;
    this.retryAfterS = retryAfterS;
    this.isTooMuch = isTooMuch;
  }
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
    throw new Failure("The gateway cannot be reached.", { hint: "Look whether it still runs, and whether this device is online.", retryAfterS: 3 });
  }
}

function ofError(error, retryAfterS = null, status = 200) {
  const isTooMuch = status === 413 || (status === 400 && Boolean(error?.param?.startsWith("messages")));
  return new Failure(error?.message ?? "The gateway said that something went wrong, and not what.", { hint: error?.hint ?? "", retryAfterS, isTooMuch });
}

async function checked(response) {
  if (response.ok) return response;
  const after = response.headers.get("Retry-After");
  const body = await response.json().catch(() => ({ error: { message: `The gateway answered with status ${response.status}.` } }));
  throw ofError(body.error, after === null ? null : Number(after), response.status);
}

/** What a GET of this path returns. Raises Failure. */
export async function get(path, key) {
  return (await checked(await sent(path, { headers: headers(key), cache: "no-store" }))).json();
}

/** The events of an answer: {name, data}. body: what becomes JSON, or FormData. Raises Failure, AbortError. */
export async function* stream(path, body, key, signal) {
  const isForm = body instanceof FormData;
  const response = await checked(
    await sent(path, {
      method: "POST",
      headers: { ...headers(key), ...(isForm ? {} : { "Content-Type": "application/json" }) },
      body: isForm ? body : JSON.stringify(body),
      signal,
    }),
  );
  for await (const event of told(response.body)) {
    if (event.text === "[DONE]") continue; // Its connection ends by itself: who leaves now would cancel it.
    const data = JSON.parse(event.text);
    if (data.error) throw ofError(data.error);
    yield { name: event.name, data };
  }
}

/** Server-sent events as they come: {name, text}. */
async function* told(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read().catch((error) => {
        if (error.name === "AbortError") throw error;
        throw new Failure("The connection was lost in the middle of the answer.", { hint: "Ask again.", retryAfterS: 0 });
      });
      if (done) return;
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
  } finally {
    await reader.cancel().catch(() => {}); // The connection is gone already.
  }
}
