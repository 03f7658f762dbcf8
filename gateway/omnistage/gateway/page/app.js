// The page: what is chosen, what is asked, and what becomes of the answer.

import { get } from "./api.js";
import { answer, chatRequest, drawRequest, floats, without } from "./ask.js";
import { byId, copy, make, seconds, toast } from "./elements.js";
import * as kept from "./history.js";
import { Pictures } from "./pictures.js";
import { Player } from "./player.js";
import { curl, python } from "./snippet.js";
import { Shown, clearThread, showFailure, showQuestion } from "./thread.js";
import { Timeline } from "./timeline.js";

const LOOK_MS = 3000; // Between two looks for models, while there are none.
const PICTURE_MOST = 400_000; // Characters of a drawing that stays in the browser.
const IDEAS = {
  talk: ["How do plants make food?", "Why is the sky blue?", "What is photosynthesis?"],
  draw: ["A red circle on blue.", "A green square on white.", "A yellow triangle on black."],
};

const timeline = new Timeline(byId("timeline"));
const player = new Player(heard);
const pictures = new Pictures();
let models = [];
let turns = kept.turns();
let looking = 0;
let running = null; // AbortController of the answer that is being made.
let last = null; // The last request.
let playedShown = null; // The answer that is being heard is that of the timeline.

// What is chosen -------------------------------------------------------------------------------------------------------------------------

const mode = () => document.querySelector("input[name=mode]:checked").value;
const model = () => models.find((one) => one.id === byId("model").value);
const number = (id) => (byId(id).value === "" || !byId(id).validity.valid ? null : Number(byId(id).value));
const answers = (one, what) => (what === "talk" ? one.outputs.includes("text") : one.outputs.includes("image"));

function fill(select, values, chosen) {
  select.replaceChildren(...values.map(([value, textContent]) => make("option", { value, textContent, selected: value === chosen })));
}

function showChoices() {
  const isDrawing = mode() === "draw";
  for (const label of document.querySelectorAll("label.talk")) label.hidden = isDrawing;
  for (const label of document.querySelectorAll("label.draw")) label.hidden = !isDrawing;
  const fitting = models.filter((one) => answers(one, mode()));
  const wanted = kept.choices()[`model-${mode()}`];
  fill(byId("model"), fitting.map((one) => [one.id, one.state === "ready" ? one.id : `${one.id} (${one.state})`]), wanted);
  byId("text").placeholder = isDrawing ? "Say what to draw" : "Ask anything";
  byId("text-label").textContent = isDrawing ? "What to draw" : "Your message";
  const ideas = IDEAS[mode()].map((text) => make("li", {}, make("button", { type: "button", textContent: text, on: { click: () => ask(text) } })));
  byId("ideas").replaceChildren(...ideas);
  showModel();
}

function showModel() {
  const chosen = model();
  const voices = chosen?.voices ?? [];
  byId("voice-label").hidden = mode() === "draw" || !voices.length;
  fill(byId("voice"), [["", "default"], ...voices.map((name) => [name, name])], kept.choices().voice);
  pictures.take(Boolean(chosen?.inputs.includes("image")));
  byId("model").title = chosen?.description ?? "";
  byId("send").disabled = !chosen;
}

function keepChoices() {
  const before = kept.choices();
  kept.keepChoices({ ...before, mode: mode(), [`model-${mode()}`]: byId("model").value, voice: byId("voice").value, speed: byId("speed").value, isSpoken: byId("aloud").checked, isKept: byId("keep").checked });
}

function useChoices() {
  const chosen = kept.choices();
  const radio = document.querySelector(`input[name=mode][value="${chosen.mode === "draw" ? "draw" : "talk"}"]`);
  radio.checked = true;
  if (chosen.speed) byId("speed").value = chosen.speed;
  byId("aloud").checked = chosen.isSpoken ?? true;
  byId("keep").checked = chosen.isKept ?? true;
}

async function look() {
  let said = "";
  try {
    models = (await get("v1/models", kept.key())).data;
    const ready = models.filter((one) => one.state === "ready").length;
    said = ready ? "" : models.length ? "The models are starting" : "No models are served";
    showChoices();
  } catch (failure) {
    said = failure.message;
  }
  const state = said || `${models.length} ${models.length === 1 ? "model" : "models"}`;
  byId("state").textContent = state;
  byId("state").classList.toggle("ready", !said);
  clearTimeout(looking);
  if (said) looking = setTimeout(look, LOOK_MS);
}

// Asking ---------------------------------------------------------------------------------------------------------------------------------

async function ask(text) {
  if (running || !model() || !(text || pictures.all.length)) return;
  const isSpoken = byId("aloud").checked && model().outputs.includes("audio");
  const sent = pictures.all;
  const turn = { role: "user", text, pictures: sent.map((one) => one.uri) };
  turns = [...turns.slice(1 - kept.MOST_TURNS), turn];
  showQuestion(turn);
  pictures.clear();
  byId("text").value = "";
  grow();
  const options = { isSpoken, voice: byId("voice").value, speed: Number(byId("speed").value), seed: number("seed"), size: byId("size").value.trim(), steps: number("steps") };
  if (mode() === "draw") return run(drawRequest(model().id, text, sent.map((one) => one.file), options), text);
  const told = spoken();
  const seen = told.map((one) => ({ ...one, pictures: model().inputs.includes("image") ? one.pictures : [] }));
  await run({ ...chatRequest(model().id, seen, options), turns: told }, text);
}

/** The turns that a model is told of: without what was drawn beside them, what no longer fits, and questions that nobody answered. */
function spoken() {
  const isTold = (turn, n) => turn.role === "assistant" || n === turns.length - 1 || turns[n + 1].role === "assistant";
  return turns.filter((turn, n) => !turn.isDrawn && !turn.isLeftOut && isTold(turn, n));
}

/** The events of an answer. What the model finds too much is asked again without the oldest turns: first one pair of them, then two, four.
 * These are left out from then on. */
async function* answered(request, shown) {
  let first = null;
  for (let pairs = 0; ; pairs = 2 * pairs || 1) {
    const { count, shorter } = request.turns ? without(request, pairs) : { count: 0, shorter: request };
    last = shorter;
    try {
      let hasBegun = false;
      for await (const event of answer(shorter, kept.key(), running.signal)) {
        if (count && !hasBegun) {
          shown.addNote("The oldest turns no longer fit into the model: it was asked without them.");
          for (const turn of request.turns.slice(0, count)) turn.isLeftOut = true;
        }
        hasBegun = true;
        yield event;
      }
      return;
    } catch (failure) {
      first ??= failure;
      if (!failure.isTooMuch) throw failure;
      if (!request.turns || count === request.turns.length - 1) throw first;
    }
  }
}

async function run(request, prompt) {
  running = new AbortController();
  player.stop();
  if (request.body.modalities) player.open(); // In the click: see there.
  const shown = new Shown();
  const made = { role: "assistant", text: "", pictures: [], pcm: [], rateHz: 0 };
  playedShown = shown;
  timeline.begin(model().stages);
  showRunning(true);
  let failure = null;
  try {
    for await (const event of answered(request, shown)) take(event, shown, made, prompt);
  } catch (error) {
    if (error.name === "AbortError") shown.addNote("Stopped.");
    else failure = error;
  }
  if (running.signal.aborted) player.stop();
  else player.end();
  running = null;
  finish(shown, made);
  if (failure) {
    if (!made.text && !made.pictures.length) shown.article.remove();
    showFailure(failure, () => running === null && run(request, prompt));
    if (!("hint" in failure)) throw failure; // A fault of this page: its console tells.
  }
}

/** What an event changes. */
function take(event, shown, made, prompt) {
  switch (event.kind) {
    case "text":
      timeline.gotText(event.text);
      made.text += event.text;
      shown.addText(event.text);
      break;
    case "sound":
      if (!made.pcm.length) player.begin(event.rateHz, event.prebufferS);
      made.rateHz = event.rateHz;
      made.pcm.push(event.pcm);
      timeline.gotSound(event.pcm.length / event.rateHz);
      player.push(floats(event.pcm));
      break;
    case "picture":
      timeline.gotPicture(event.isPreview);
      shown.setPicture(event.uri, event.isPreview, prompt);
      if (!event.isPreview) made.pictures.push(event.uri);
      break;
    case "progress":
      timeline.gotProgress(event.done, event.total);
      shown.setProgress(event.done, event.total);
      break;
    case "failover":
      timeline.gotFailover(event.stage, event.pause_s);
      shown.addNote(`A ${event.stage} was lost; another one went on after ${seconds(event.pause_s)}.`);
      break;
    case "accounts":
      timeline.gotAccounts(event.usage);
      shown.addNote(`${event.pipeline} · seed ${event.seed}`, "faint");
      break;
  }
  showFigures();
}

function finish(shown, made) {
  timeline.end();
  shown.end();
  showRunning(false);
  showFigures();
  timeline.tell();
  if (made.pcm.length) {
    const again = () => {
      if (running) return;
      playedShown = null;
      player.open(made.rateHz);
      player.begin(made.rateHz, 0);
      for (const piece of made.pcm) player.push(floats(piece));
      player.end();
    };
    shown.addSound(wav(made.pcm, made.rateHz), again);
  }
  if (made.text || made.pictures.length) {
    const isDrawn = made.pictures.length > 0;
    if (isDrawn) turns.at(-1).isDrawn = true;
    turns.push({ role: "assistant", text: made.text, pictures: made.pictures, isDrawn });
    keepTurns();
  }
}

function keepTurns() {
  if (!byId("keep").checked) return;
  try {
    kept.keepTurns(turns.map((turn) => ({ ...turn, pictures: turn.pictures.filter((one) => one.length <= PICTURE_MOST) })));
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    toast("The browser has no room for the conversation: it is gone when this tab is closed.");
  }
}

/** A file of 16-bit samples. */
function wav(pieces, rateHz) {
  const size = pieces.reduce((sum, piece) => sum + piece.length * 2, 0);
  const head = new DataView(new ArrayBuffer(44));
  const word = (at, text) => [...text].forEach((one, n) => head.setUint8(at + n, one.charCodeAt(0)));
  const set = (at, value, bytes = 4) => (bytes === 4 ? head.setUint32(at, value, true) : head.setUint16(at, value, true));
  word(0, "RIFF"), set(4, 36 + size), word(8, "WAVEfmt "), set(16, 16), set(20, 1, 2), set(22, 1, 2);
  set(24, rateHz), set(28, rateHz * 2), set(32, 2, 2), set(34, 16, 2), word(36, "data"), set(40, size);
  return new Blob([head, ...pieces], { type: "audio/wav" });
}

// What is shown --------------------------------------------------------------------------------------------------------------------------

function heard({ played, underruns, isOver }) {
  if (playedShown) {
    timeline.gotHeard(played / player.rateHz, underruns);
    showFigures();
    if (isOver && !running) timeline.tell();
  }
  const { first, heard: begun } = timeline.sound;
  Object.assign(byId("stage").dataset, { sent: player.sent, played, isPlaying: !isOver, prebufferS: player.prebufferS, cameS: first, begunS: begun });
  showRunning(Boolean(running));
}

function showFigures() {
  const figures = timeline.figures.map(([name, title, textContent]) => {
    const shown = make("div", {}, make("dt", {}, make("abbr", { title, textContent: name })), make("dd", { textContent }));
    shown.dataset.figure = name;
    return shown;
  });
  byId("figures").replaceChildren(...figures);
}

function showRunning(isRunning) {
  const canStop = isRunning || player.isPlaying;
  const hadFocus = document.activeElement === byId("stop");
  byId("stop").hidden = !canStop;
  byId("send").hidden = canStop && !byId("text").value.trim();
  byId("send").disabled = isRunning || !model();
  byId("stage").classList.toggle("live", isRunning);
  for (const id of ["copy-curl", "copy-python"]) byId(id).disabled = !last;
  if (hadFocus && !canStop) byId("text").focus();
}

function stop() {
  running?.abort();
  player.stop();
  showRunning(Boolean(running));
}

/** The field is as high as what stands in it. */
function grow() {
  const area = byId("text");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 180)}px`;
}

function showTurns() {
  for (const [n, turn] of turns.entries()) {
    if (turn.role === "user") showQuestion(turn);
    else {
      const shown = new Shown();
      shown.body.textContent = shown.text = turn.text;
      for (const uri of turn.pictures) shown.setPicture(uri, false, turns[n - 1]?.text ?? "");
      shown.end();
    }
  }
  byId("said").textContent = "";
}

function listen() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    ask(byId("text").value.trim());
  });
  byId("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    byId("composer").requestSubmit();
  });
  byId("text").addEventListener("input", () => {
    grow();
    showRunning(Boolean(running));
  });
  document.addEventListener("keydown", (event) => event.key === "Escape" && !byId("settings").open && stop());
  byId("stop").addEventListener("click", stop);
  byId("composer").addEventListener("change", (event) => {
    if (event.target.name === "mode") {
      kept.keepChoices({ ...kept.choices(), mode: mode() });
      showChoices();
    } else {
      keepChoices();
      if (event.target.id === "model") showModel();
    }
  });
  for (const [id, write] of [["copy-curl", curl], ["copy-python", python]]) {
    byId(id).addEventListener("click", async () => toast((await copy(write(last))) ? "Copied. Put your key into OMNISTAGE_API_KEY." : "The browser does not let this page copy."));
  }
  document.addEventListener("visibilitychange", () => document.visibilityState === "visible" && !running && look());
  listenToSettings();
}

function listenToSettings() {
  byId("settings-open").addEventListener("click", () => {
    byId("key").value = kept.key();
    byId("settings").showModal();
  });
  byId("settings").addEventListener("close", () => {
    kept.keepKey(byId("key").value.trim());
    byId("key").value = "";
    keepChoices();
    if (byId("keep").checked) keepTurns();
    else kept.forgetTurns();
  });
  byId("clear").addEventListener("click", () => {
    stop();
    turns = [];
    kept.forgetTurns();
    clearThread();
    toast("The conversation is forgotten.");
  });
}

/** The worker keeps the files of the page, for when its gateway is away. Plain HTTP from another machine has none. */
async function keepFiles() {
  if (!("serviceWorker" in navigator)) return;
  try {
    await navigator.serviceWorker.register(new URL("page/worker.js", document.baseURI), { scope: new URL(".", document.baseURI) });
  } catch (error) {
    console.info("The browser keeps no files of this page:", error.message); // As some do in a private window.
    return;
  }
  const { active } = await navigator.serviceWorker.ready;
  navigator.serviceWorker.addEventListener("message", () => (document.documentElement.dataset.kept = "true"));
  const loaded = performance.getEntriesByType("resource").map((one) => one.name.split("#")[0]);
  const files = loaded.filter((name) => name.startsWith(new URL("page/", document.baseURI)));
  active.postMessage([document.baseURI.split(/[?#]/)[0], ...files, new URL("ring.js", import.meta.url).href]);
}

useChoices();
showTurns();
showChoices();
showFigures();
listen();
byId("plain").hidden = Player.hasWorklet;
await Promise.all([look(), keepFiles()]);
