// Asks the gateway, and turns all its answers into one kind of events:
//   {kind: "thought", text}   {kind: "text", text}   {kind: "sound", samples, pcm, rateHz, prebufferS}   {kind: "picture", uri, isPreview}
//   {kind: "film", bytes, mediaType, frames}   {kind: "progress", done, total, isPercent}   {kind: "failover", stage, pause_s, ...}   {kind: "accounts", usage, seed, pipeline, session_id}

import { Failure, drop, get, pieces, post, strange, stream } from "./api.js";

const CHAT = "v1/chat/completions", DRAW = "v1/images/generations", EDIT = "v1/images/edits", MODELS = "v1/models";
const FILM = "v1/videos", SOUND = "v1/audio/generate";
const LOOK_MS = 300; // Between two questions for the state of a film that has no bytes yet.
const WAV_HEAD = 44;
const DEFAULT_VOICE = "alloy"; // For this name the gateway takes the pipeline's default voice.
const PREVIEWS = 3;
const MOST_AGAIN = 8 * 1024 * 1024; // Characters of pictures that are sent again.

/** The models that the gateway serves. Raises Failure. */
export async function served(key) {
  const all = (await get(MODELS, key))?.data;
  const isModel = (one) => typeof one?.id === "string" && Array.isArray(one.inputs) && Array.isArray(one.outputs);
  if (!Array.isArray(all) || !all.every(isModel)) throw strange("it names no models");
  return all;
}

/** The request of a conversation. turns: the answered ones, and last the question. The newest pictures of earlier turns are sent again, as
 * far as there is room; unsent, in the result: how many are not. */
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
  return { path: CHAT, body: filled(body, { seed }), unsent };
}

function question(text, pictures) {
  if (!pictures.length) return { role: "user", content: text || "(A picture.)" };
  const parts = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: text ? [...parts, { type: "text", text }] : parts };
}

/** A body with the fields that the user has filled in. */
function filled(body, fields) {
  const chosen = Object.entries(fields).filter(([, value]) => value !== null && value !== "" && value !== "auto");
  return { ...body, ...Object.fromEntries(chosen) };
}

/** The request of a drawing. files: pictures that it begins from. */
export function drawRequest(model, prompt, files, { size, steps, seed }) {
  const body = filled({ model, prompt, stream: true, partial_images: PREVIEWS, include_events: true }, { size, steps, seed });
  return files.length ? { path: EDIT, body, files } : { path: DRAW, body };
}

/** The request of a film. files: a picture that it begins with. */
export function filmRequest(model, prompt, files, { size, seconds, steps, seed }) {
  const body = filled({ model, prompt }, { size, seconds, steps, seed });
  return files.length ? { path: FILM, body, files: files.slice(0, 1) } : { path: FILM, body };
}

/** The request of the sound that a prompt describes. */
export function soundRequest(model, prompt, { seconds, steps, seed }) {
  const body = { model, prompt, response_format: "wav", stream_format: "sse" };
  return { path: SOUND, body: filled(body, { seconds, steps, seed }) };
}

/** The events of an answer. Raises Failure, AbortError. */
export async function* answer({ path, body, files }, key, signal) {
  if (path === CHAT) return yield* chat(stream(path, body, key, signal));
  if (path === SOUND) return yield* sounding(stream(path, body, key, signal));
  const sent = files ? form(body, files, path === FILM ? "input_reference" : "image[]") : body;
  if (path === FILM) return yield* filming(sent, key, signal);
  yield* drawing(stream(path, sent, key, signal));
}

function form(body, files, field) {
  const made = new FormData();
  for (const [name, value] of Object.entries(body)) made.append(name, String(value));
  for (const file of files) made.append(field, file, file.name);
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

/** The events of a film, which is a job: wait for its first bytes, then read the file while it grows. If the reader stops, delete the job. */
async function* filming(body, key, signal) {
  let job = await post(FILM, body, key, signal), isOver = false;
  const place = `${FILM}/${job.id}`;
  try {
    while (!job.frames && (job.status === "queued" || job.status === "in_progress")) {
      yield { kind: "progress", done: job.progress, total: 100, isPercent: true };
      await pause(LOOK_MS, signal);
      job = await get(place, key, signal);
    }
    if (job.status !== "failed") for await (const bytes of pieces(`${place}/content?stream=true`, key, signal)) yield { kind: "film", bytes, mediaType: job.media_type };
    job = await get(place, key, signal);
    isOver = job.status === "failed" || job.status === "completed";
    if (job.status !== "completed") throw new Failure(job.error?.message ?? "The film broke off.", { hint: job.error ? "" : "Ask again.", retryAfterS: 0 });
    yield { kind: "progress", done: 100, total: 100, isPercent: true };
    yield { kind: "filmed", job };
  } finally {
    if (!isOver) await drop(place, key);
  }
}

const pause = (ms, signal) =>
  new Promise((resolve, reject) => {
    const waiting = setTimeout(resolve, ms);
    signal.addEventListener("abort", () => (clearTimeout(waiting), reject(new DOMException("Stopped", "AbortError"))), { once: true });
  });

async function* sounding(events) {
  let rateHz = 0, channels = 0, hasEnded = false;
  for await (const { data } of events) {
    if (data.type === "omnistage.progress") yield { kind: "progress", done: data.done, total: data.total };
    else if (data.type === "omnistage.failover") yield { kind: "failover", ...data };
    else if (data.type === "audio.done") {
      hasEnded = true;
      yield { kind: "accounts", ...data };
    } else if (data.type === "audio.delta") {
      let bytes = bytesOf(data.audio);
      if (!rateHz) {
        const head = bytes.length < WAV_HEAD ? null : new DataView(bytes.buffer);
        [channels, rateHz] = head ? [head.getUint16(22, true), head.getUint32(24, true)] : [0, 0];
        if (!channels || !rateHz) throw strange("a sound is no WAV");
        bytes = bytes.slice(WAV_HEAD);
      }
      if (bytes.length > 1) yield { kind: "sound", pcm: mixed(new Int16Array(bytes.buffer, 0, bytes.length >> 1), channels), rateHz, prebufferS: 0 };
    }
  }
  if (!hasEnded) throw new Failure("The sound broke off.", { hint: "Ask again.", retryAfterS: 0 });
}

/** The mean of the channels of samples that stand one after the other: the player has one channel. */
function mixed(pcm, channels) {
  if (channels === 1) return pcm;
  const made = new Int16Array(pcm.length / channels);
  for (let at = 0; at < made.length; at += 1) {
    let sum = 0;
    for (let channel = 0; channel < channels; channel += 1) sum += pcm[at * channels + channel];
    made[at] = sum / channels;
  }
  return made;
}

/** 16-bit samples from base64. */
function pcmOf(text) {
  const bytes = bytesOf(text);
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}

function bytesOf(text) {
  let bytes = null;
  try {
    bytes = Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  } catch (error) {
    if (error.name !== "InvalidCharacterError") throw error;
    throw strange("a sound is no base64");
  }
  return bytes;
}

/** Samples between -1 and 1. */
export const floats = (pcm) => Float32Array.from(pcm, (one) => one / 32768);
