// Asks the gateway, and makes of its answers one kind of events:
//   {kind: "text", text}   {kind: "sound", samples, pcm, rateHz, prebufferS}   {kind: "picture", uri, isPreview}
//   {kind: "progress", done, total}   {kind: "failover", stage, pause_s, ...}   {kind: "accounts", usage, seed, pipeline, session_id}

import { Failure, stream } from "./api.js";

const CHAT = "v1/chat/completions", DRAW = "v1/images/generations", EDIT = "v1/images/edits";
const DEFAULT_VOICE = "alloy"; // The gateway gives it the pipeline's own.
const PREVIEWS = 3;

/** The request of a conversation. turns: {role, text, pictures}. */
export function chatRequest(model, turns, { isSpoken, voice, speed, seed }) {
  const body = { model, messages: turns.map(message), stream: true, stream_options: { include_usage: true, include_events: true } };
  if (isSpoken) Object.assign(body, { modalities: ["text", "audio"], audio: { voice: voice || DEFAULT_VOICE, format: "pcm16" } });
  if (isSpoken && speed !== 1) body.speed = speed;
  if (seed !== null) body.seed = seed;
  return { path: CHAT, body };
}

function message({ role, text, pictures }) {
  if (role !== "user" || !pictures.length) return { role, content: text };
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

/** The request of a drawing. files: pictures that it begins from. */
export function drawRequest(model, prompt, files, { size, steps, seed }) {
  const body = { model, prompt, stream: true, partial_images: PREVIEWS, include_events: true };
  if (size && size !== "auto") body.size = size;
  if (steps !== null) body.steps = steps;
  if (seed !== null) body.seed = seed;
  return files.length ? { path: EDIT, body, files } : { path: DRAW, body };
}

/** The request of a conversation without its oldest pairs of question and answer, and how many turns these are: all but the question, where
 * there are no more. */
export function without(request, pairs) {
  const { messages } = request.body;
  let count = Math.min(2 * pairs, messages.length - 1);
  while (messages[count].role !== "user") count++;
  return { count, shorter: { ...request, body: { ...request.body, messages: messages.slice(count) } } };
}

/** The events of an answer. Raises Failure, AbortError. */
export async function* answer({ path, body, files }, key, signal) {
  if (path === CHAT) return yield* chat(stream(path, body, key, signal));
  yield* drawing(stream(path, files ? form(body, files) : body, key, signal));
}

function form(body, files) {
  const made = new FormData();
  for (const [name, value] of Object.entries(body)) made.append(name, String(value));
  for (const file of files) made.append("image[]", file, file.name);
  return made;
}

async function* chat(events) {
  let rateHz = 24000, prebufferS = 0, hasEnded = false;
  for await (const { data } of events) {
    const ours = data.omnistage;
    if (ours?.sound) ({ sample_rate_hz: rateHz, prebuffer_s: prebufferS } = ours.sound);
    if (ours?.failover) yield { kind: "failover", ...ours.failover };
    if (ours?.usage) yield { kind: "accounts", ...ours };
    const choice = data.choices[0];
    if (!choice) continue;
    hasEnded ||= Boolean(choice.finish_reason);
    const { content, audio } = choice.delta;
    const text = content || audio?.transcript;
    if (text) yield { kind: "text", text };
    if (audio?.data) yield { kind: "sound", pcm: pcmOf(audio.data), rateHz, prebufferS: prebufferS ?? 0 };
  }
  if (!hasEnded) throw new Failure("The answer broke off.", { hint: "Ask again.", retryAfterS: 0 });
}

async function* drawing(events) {
  let hasEnded = false;
  for await (const { name, data } of events) {
    const kind = name || data.type || "";
    if (kind === "omnistage.progress") yield { kind: "progress", done: data.done, total: data.total };
    else if (kind === "omnistage.failover") yield { kind: "failover", ...(data.failover ?? data) };
    else if (kind === "omnistage.usage") yield { kind: "accounts", ...data };
    else if (data.b64_json) {
      const isPreview = kind.endsWith("partial_image");
      hasEnded ||= !isPreview;
      yield { kind: "picture", uri: `data:image/${data.output_format ?? "png"};base64,${data.b64_json}`, isPreview };
    }
  }
  if (!hasEnded) throw new Failure("The drawing broke off.", { hint: "Ask again.", retryAfterS: 0 });
}

/** 16-bit samples of base64. */
function pcmOf(text) {
  const bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}

/** Samples between -1 and 1. */
export const floats = (pcm) => Float32Array.from(pcm, (one) => one / 32768);
