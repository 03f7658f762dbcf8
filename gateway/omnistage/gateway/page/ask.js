// Asks the gateway, and makes of its answers one kind of events:
//   {kind: "thought", text}   {kind: "text", text}   {kind: "sound", samples, pcm, rateHz, prebufferS}   {kind: "picture", uri, isPreview}
//   {kind: "progress", done, total}   {kind: "failover", stage, pause_s, ...}   {kind: "accounts", usage, seed, pipeline, session_id}

import { Failure, get, strange, stream } from "./api.js";

const CHAT = "v1/chat/completions", DRAW = "v1/images/generations", EDIT = "v1/images/edits", MODELS = "v1/models";
const DEFAULT_VOICE = "alloy"; // The gateway gives it the pipeline's own.
const PREVIEWS = 3;
const MOST_AGAIN = 8 * 1024 * 1024; // Characters of pictures that are sent again.

/** The models that are served. Raises Failure. */
export async function served(key) {
  const all = (await get(MODELS, key))?.data;
  const isModel = (one) => typeof one?.id === "string" && Array.isArray(one.inputs) && Array.isArray(one.outputs);
  if (!Array.isArray(all) || !all.every(isModel)) throw strange("it names no models");
  return all;
}

/** The request of a conversation. turns: those that were answered, and at last the one that is asked. unsent: how many pictures of earlier
 * turns stay here; the newest are sent again, as far as there is room. */
export function chatRequest({ id, inputs }, turns, { isSpoken, voice, speed, seed }) {
  const asked = turns.at(-1), messages = [];
  let room = MOST_AGAIN, unsent = 0;
  for (const turn of turns.toReversed()) {
    const pictures = inputs.includes("image") ? turn.pictures : [];
    if (turn !== asked) room -= pictures.reduce((sum, one) => sum + one.length, 0);
    if (room < 0) unsent += pictures.length;
    if (turn.answer) messages.unshift({ role: "assistant", content: turn.answer.text });
    messages.unshift(question(turn.text, room < 0 ? [] : pictures));
  }
  const body = { model: id, messages, stream: true, stream_options: { include_usage: true, include_events: true } };
  if (isSpoken) Object.assign(body, { modalities: ["text", "audio"], audio: { voice: voice || DEFAULT_VOICE, format: "pcm16" } });
  if (isSpoken && speed !== 1) body.speed = speed;
  if (seed !== null) body.seed = seed;
  return { path: CHAT, body, unsent };
}

function question(text, pictures) {
  if (!pictures.length) return { role: "user", content: text || "(A picture.)" };
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}

/** The request of a drawing. files: pictures that it begins from. */
export function drawRequest(model, prompt, files, { size, steps, seed }) {
  const body = { model, prompt, stream: true, partial_images: PREVIEWS, include_events: true };
  if (size && size !== "auto") body.size = size;
  if (steps !== null) body.steps = steps;
  if (seed !== null) body.seed = seed;
  return files.length ? { path: EDIT, body, files } : { path: DRAW, body };
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
    const choice = Array.isArray(data.choices) ? data.choices[0] : null;
    if (!choice) continue;
    hasEnded ||= Boolean(choice.finish_reason);
    const { content, audio, reasoning_content: thought } = choice.delta ?? {};
    if (typeof thought === "string" && thought) yield { kind: "thought", text: thought };
    const text = content || audio?.transcript;
    if (typeof text === "string" && text) yield { kind: "text", text };
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
  let bytes = null;
  try {
    bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  } catch (error) {
    if (error.name !== "InvalidCharacterError") throw error;
    throw strange("a sound is no base64");
  }
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}

/** Samples between -1 and 1. */
export const floats = (pcm) => Float32Array.from(pcm, (one) => one / 32768);
