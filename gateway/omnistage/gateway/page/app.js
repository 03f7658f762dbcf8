// The page: the user's choices, the questions, and the answers.

import { answer, chatRequest, drawRequest, filmRequest, floats, served, soundRequest } from "./ask.js";
import { byId, copy, make, seconds, toast } from "./elements.js";
import * as kept from "./history.js";
import { Pictures } from "./pictures.js";
import { Player } from "./player.js";
import { curl, python } from "./snippet.js";
import { Shown, add, clearThread, showFailure, newQuestion } from "./thread.js";
import { Timeline } from "./timeline.js";

const LOOK_MS = 3000; // Between two questions for the models, while one is starting.
const IDEAS = {
  talk: ["How do plants make food?", "Why is the sky blue?", "What is photosynthesis?"],
  draw: ["A red circle on blue.", "A green square on white.", "A yellow triangle on black."],
  film: ["A paper boat drifts over a pond.", "Clouds over a field, at speed."],
  sound: ["Rain on a tin roof.", "A slow piano in a large hall."],
};
const ASKED = {
  talk: ["Ask anything", "Your message"],
  draw: ["Say what to draw", "What to draw"],
  film: ["Say what to show", "What to show"],
  sound: ["Say what to hear", "What to hear"],
};

const timeline = new Timeline(byId("timeline"));
const player = new Player(heard, () => showPlain("The browser did not load what plays sound beside the page"));
const pictures = new Pictures();
let models = [];
let turns = kept.turns();
let looking = 0;
let running = null; // The answer that is being made: {control, turn, made}.
let last = null; // The last request.
let playedShown = null; // The answer that is played, if the timeline shows it.

// Choices --------------------------------------------------------------------------------------------------------------------------------

const radio = (what) => document.querySelector(`input[name=mode][value="${what}"]`);
const mode = () => document.querySelector("input[name=mode]:checked").value;
const model = () => models.find((one) => one.id === byId("model").value);
const number = (id) => (byId(id).value === "" || !byId(id).validity.valid ? null : Number(byId(id).value));
const sure = (one, ports) => ports.filter((port) => !(one.unsure_outputs ?? []).includes(port)); // Until its checkpoint is loaded.
const gives = (one, port) => sure(one, [...one.outputs, ...(one.outputs_on_request ?? [])]).includes(port);
const makes = (one, port) => Boolean(one.stages?.includes("diffusion")) && gives(one, port);
const DOES = {
  talk: (one) => one.outputs.includes("text"),
  draw: (one) => sure(one, one.outputs).includes("image"),
  film: (one) => makes(one, "video"),
  sound: (one) => makes(one, "audio"),
};
const answers = (one, what) => DOES[what](one);

function fill(select, values, chosen) {
  select.replaceChildren(...values.map(([value, textContent]) => make("option", { value, textContent, selected: value === chosen })));
}

function showChoices() {
  for (const label of document.querySelectorAll(".options > label[class]")) label.hidden = !label.classList.contains(mode());
  for (const what of ["film", "sound"]) radio(what).parentElement.hidden = mode() !== what && !models.some((one) => answers(one, what));
  const fitting = models.filter((one) => answers(one, mode()));
  const wanted = kept.choices()[`model-${mode()}`];
  fill(byId("model"), fitting.map((one) => [one.id, one.state === "ready" ? one.id : `${one.id} (${one.state})`]), wanted);
  [byId("text").placeholder, byId("text-label").textContent] = ASKED[mode()];
  const ideas = IDEAS[mode()].map((text) => make("li", {}, make("button", { type: "button", textContent: text, on: { click: () => ask(text) } })));
  byId("ideas").replaceChildren(...ideas);
  showModel();
}

function showModel() {
  const chosen = model();
  const voices = chosen?.voices ?? [];
  byId("voice-label").hidden = mode() !== "talk" || !voices.length;
  fill(byId("voice"), [["", "default"], ...voices.map((name) => [name, name])], kept.choices().voice);
  pictures.take(mode() !== "sound" && Boolean(chosen?.inputs.includes("image")));
  byId("model").title = chosen?.description ?? "";
  byId("send").disabled = !chosen;
}

function keepChoices() {
  const before = kept.choices();
  kept.keepChoices({ ...before, mode: mode(), [`model-${mode()}`]: byId("model").value, voice: byId("voice").value, speed: byId("speed").value, isSpoken: byId("aloud").checked, isKept: byId("keep").checked });
}

function useChoices() {
  const chosen = kept.choices();
  radio(chosen.mode in DOES ? chosen.mode : "talk").checked = true;
  if (chosen.speed) byId("speed").value = chosen.speed;
  byId("aloud").checked = chosen.isSpoken ?? true;
  byId("keep").checked = chosen.isKept ?? true;
}

async function look() {
  let said = "";
  try {
    const offered = await served(kept.key());
    const isNew = !looking || JSON.stringify(offered) !== JSON.stringify(models);
    models = offered;
    const ready = models.filter((one) => one.state !== "starting").length;
    said = ready ? "" : models.length ? "The models are starting" : "No models are served";
    if (isNew) showChoices();
  } catch (failure) {
    said = failure.message;
  }
  const state = said || `${models.length} ${models.length === 1 ? "model" : "models"}`;
  byId("state").textContent = state;
  byId("state").classList.toggle("ready", !said);
  clearTimeout(looking);
  if (said || models.some((one) => one.state === "starting")) looking = setTimeout(look, LOOK_MS);
}

// Asking ---------------------------------------------------------------------------------------------------------------------------------

async function ask(text) {
  const chosen = model();
  if (running || !chosen || !(text || pictures.all.length)) return;
  const sent = pictures.all, what = mode(), isDrawn = what !== "talk";
  const isSpoken = what === "sound" || (!isDrawn && byId("aloud").checked && chosen.outputs.includes("audio"));
  const options = { isSpoken, voice: byId("voice").value, speed: Number(byId("speed").value), seed: number("seed"), size: byId("size").value.trim(), steps: number("steps"), seconds: number("seconds") };
  const files = sent.map((one) => one.file);
  const requests = {
    talk: (told) => chatRequest(chosen, told, options),
    draw: () => drawRequest(chosen.id, text, files, options),
    film: () => filmRequest(chosen.id, text, files, options),
    sound: () => soundRequest(chosen.id, text, options),
  };
  const request = requests[what];
  const turn = { id: `${Date.now()}-${Math.random()}`, at: 0, text, pictures: sent.map((one) => one.uri), answer: null, isDrawn };
  pictures.clear();
  byId("text").value = "";
  grow();
  await run({ turn, chosen, isSpoken, request, question: newQuestion(turn), shown: null });
}

/** The turns that the model gets, the last of which is `turn`: no drawings, no turns that no longer fit, and no questions without an answer. */
function toldOf(turn) {
  return turns.filter((one) => one === turn || (one.answer && !one.isDrawn && !one.isLeftOut));
}

/** The events of an answer. If the conversation is too long for the model, it is asked again without the oldest turns: without one, then
 * two, then four, and so on. These turns are left out from then on. */
async function* answered({ turn, request }, shown, signal) {
  const told = turn.isDrawn ? [turn] : toldOf(turn);
  let first = null;
  for (let left = 0; ; left = Math.min(2 * left || 1, told.length - 1)) {
    last = request(told.slice(left));
    try {
      let hasBegun = false;
      for await (const event of answer(last, kept.key(), signal)) {
        if (!hasBegun) tellWhatIsLeft(shown, told.slice(0, left), last.unsent);
        hasBegun = true;
        yield event;
      }
      return;
    } catch (failure) {
      first ??= failure;
      if (!failure.isTooMuch) throw failure;
      if (left === told.length - 1) throw first;
    }
  }
}

function tellWhatIsLeft(shown, left, unsent) {
  if (unsent) shown.addNote(`Pictures of earlier turns were not all sent again, ${unsent} not: they are large.`);
  if (!left.length) return;
  shown.addNote("The oldest turns no longer fit into the model: it was asked without them.");
  for (const turn of left) turn.isLeftOut = true;
  keep(left);
}

/** Ask, or ask again: the question becomes the newest turn. */
async function run(asked) {
  const { turn, chosen, isSpoken, question } = asked;
  const control = new AbortController();
  const made = { text: "", pictures: [], pcm: [], rateHz: 0 };
  running = { control, turn, made };
  let shown = null, failure = null;
  try {
    Object.assign(turn, { at: Date.now(), answer: null });
    turns = [...turns.filter((one) => one !== turn).slice(1 - kept.MOST_TURNS), turn];
    keep([turn]);
    asked.shown?.article.remove();
    add(question);
    asked.shown = shown = new Shown();
    player.stop();
    if (isSpoken) player.open(); // Still in the user's click, as `open` needs it.
    playedShown = shown;
    timeline.begin(chosen.stages);
    showRunning(true);
    for await (const event of answered(asked, shown, control.signal)) take(event, shown, made, turn.text);
  } catch (error) {
    if (error.name === "AbortError") shown.addNote("Stopped.");
    else failure = error;
  } finally {
    running = null;
  }
  if (control.signal.aborted) player.stop();
  else player.end();
  finish(shown, made, turn);
  if (failure) {
    if (!turn.answer) shown.article.remove();
    if (turns.includes(turn)) showFailure(failure, () => running === null && run(asked));
    if (!("hint" in failure)) throw failure; // A fault of this page: its console tells.
  }
}

/** Take an event of an answer. */
function take(event, shown, made, prompt) {
  switch (event.kind) {
    case "thought":
      shown.addThought(event.text);
      break;
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
    case "film":
      timeline.gotFilm(false);
      shown.addFilm(event.bytes, event.mediaType, prompt);
      break;
    case "filmed":
      timeline.gotFilm(true);
      shown.addNote(`${event.job.model} · ${event.job.frames} frames · seed ${event.job.seed}`, "faint");
      for (const note of event.job.notes ?? []) shown.addNote(note, "faint");
      break;
    case "progress":
      timeline.gotProgress(event.done, event.total, event.isPercent);
      shown.setProgress(event.done, event.total);
      break;
    case "failover":
      timeline.gotFailover(event.stage, event.pause_s);
      shown.addNote(`A ${event.stage} was lost; another one went on after ${seconds(event.pause_s)}.`);
      break;
    case "accounts":
      timeline.gotAccounts(event.usage);
      shown.addNote(event.usage.drew === false ? event.pipeline : `${event.pipeline} · seed ${event.seed}`, "faint");
      for (const note of event.usage.notes ?? []) shown.addNote(note, "faint");
      if (event.usage.unspoken) shown.addNote(`not spoken: ${event.usage.unspoken_words} (${event.usage.unspoken})`, "faint");
      break;
  }
  showFigures();
}

function finish(shown, made, turn) {
  timeline.end();
  shown.end();
  showRunning(false);
  showFigures();
  timeline.tell();
  settle(turn, made);
  if (!made.pcm.length || !turns.includes(turn)) return;
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

/** Keep an answer with its question, unless the question was forgotten meanwhile. */
function settle(turn, { text, pictures: drawn }) {
  if (!turns.includes(turn)) return;
  if (text || drawn.length) turn.answer = { text, pictures: drawn };
  keep([turn]);
}

function keep(some) {
  if (!byId("keep").checked || kept.keepTurns(some)) return;
  toast("The browser has no room for the conversation: it is gone when this tab is closed.");
}

function forget() {
  turns = [];
  last = null; // The request holds the conversation.
  stop();
  clearThread();
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

// Showing --------------------------------------------------------------------------------------------------------------------------------

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
  running?.control.abort();
  player.stop();
  showRunning(Boolean(running));
}

function showPlain(why) {
  byId("plain").textContent = `${why}: sound is played in another way, which may crackle on a busy device.`;
  byId("plain").hidden = false;
}

/** Make the field as high as its text. */
function grow() {
  const area = byId("text");
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, 180)}px`;
}

function showTurns() {
  for (const turn of turns) {
    add(newQuestion(turn));
    if (!turn.answer) continue;
    const shown = new Shown();
    shown.body.textContent = shown.text = turn.answer.text;
    for (const uri of turn.answer.pictures) shown.setPicture(uri, false, turn.text);
    shown.end();
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
  window.addEventListener("pagehide", () => running && settle(running.turn, running.made));
  kept.listenToTabs(forget, () => (byId("keep").checked = kept.choices().isKept ?? true));
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
    if (byId("keep").checked) keep(turns);
    else kept.dropTurns();
  });
  byId("clear").addEventListener("click", () => {
    forget();
    kept.forgetTurns();
    toast("The conversation is forgotten.");
  });
}

/** Start the worker, which keeps the files of the page for when its gateway is away. Plain HTTP from another machine has no worker. */
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
if (!Player.hasWorklet) showPlain("This page came over plain HTTP from another machine, so the browser gives it no audio worklet");
await Promise.all([look(), keepFiles()]);
