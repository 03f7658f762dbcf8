// The conversation on the page.

import { byId, copy, make, toast } from "./elements.js";
import { GrowingFilm } from "./film.js";

const MOST_FILES = 20; // Sounds and films that can be heard, seen or saved again; each is megabytes.
const files = [];

const SENTENCE = /[.!?…。！？]["')\]]*\s|\n/;

/** A question, for `add`. */
export function newQuestion({ text, pictures }) {
  const images = pictures.map((src) => make("img", { src, alt: "A picture that was sent" }));
  return make("article", { className: "user", ariaLabel: "You" }, ...(images.length ? [make("div", { className: "images" }, ...images)] : []), ...(text ? [make("p", { textContent: text })] : []));
}

/** One answer: text, pictures and notes as they come. */
export class Shown {
  constructor() {
    this.body = make("p", { className: "body" });
    this.images = make("div", { className: "images" });
    this.notes = make("div", { className: "notes" });
    this.deeds = make("div", { className: "deeds" });
    this.article = make("article", { className: "assistant live", ariaLabel: "Answer" }, this.body, this.images, this.notes, this.deeds);
    this.unsaid = "";
    this.text = "";
    add(this.article);
  }

  /** Add thoughts before the answer: the user opens them to read them, and a screen reader does not say them. */
  addThought(text) {
    this.thought ??= this.article.insertBefore(make("details", { className: "thought" }, make("summary", { textContent: "Thought" })), this.body);
    this.thought.append(text);
    follow();
  }

  addText(text) {
    this.text += text;
    this.body.append(text); // A node of text: never HTML.
    this.unsaid += text;
    const end = this.unsaid.match(SENTENCE);
    if (end) this.say(end.index + end[0].length);
    follow();
  }

  /** Give a screen reader the next sentences: it would stammer single tokens. */
  say(length) {
    byId("said").textContent = this.unsaid.slice(0, length);
    this.unsaid = this.unsaid.slice(length);
  }

  /** Show a preview or a finished picture: it replaces the preview before it. */
  setPicture(uri, isPreview, prompt) {
    this.pending ??= this.images.appendChild(make("img", {}));
    Object.assign(this.pending, { src: uri, alt: `${isPreview ? "Preview of" : "Drawing of"} ${prompt}`, className: isPreview ? "preview" : "whole" });
    if (!isPreview) {
      const name = `drawing.${uri.match(/^data:image\/(\w+)/)?.[1] ?? "png"}`;
      this.deeds.append(make("a", { href: uri, download: name, className: "quiet", textContent: "Save picture" }));
      this.pending = null;
      byId("said").textContent = "The drawing is finished.";
    }
    this.pending?.addEventListener("load", follow, { once: true });
    follow();
  }

  /** Add the next bytes of a film, which is shown from the first of them on. */
  addFilm(bytes, mediaType, prompt) {
    if (!this.film) {
      const video = make("video", { controls: true, muted: true, autoplay: true, loop: true, playsInline: true, ariaLabel: `Film of ${prompt}` });
      video.addEventListener("loadeddata", follow, { once: true });
      this.images.append(video);
      this.film = new GrowingFilm(video);
    }
    this.film.push(bytes, mediaType);
    follow();
  }

  setProgress(done, total) {
    this.bar ??= this.notes.appendChild(make("progress", { ariaLabel: "How far it is" }));
    if (total) Object.assign(this.bar, { max: total, value: done });
  }

  addNote(text, kind = "") {
    this.notes.append(make("p", { className: `note ${kind}`, textContent: text }));
    follow();
  }

  end() {
    this.say(this.unsaid.length);
    this.bar?.remove();
    this.endFilm();
    this.article.classList.remove("live");
    if (this.text) this.deeds.prepend(make("button", { type: "button", className: "quiet", textContent: "Copy text", on: { click: () => copy(this.text).then((done) => toast(done ? "Copied." : "The browser does not let this page copy.")) } }));
  }

  endFilm() {
    const film = this.film?.end();
    if (!film) return;
    const save = make("a", { href: film.href, download: `film.${film.end}`, className: "quiet", textContent: "Save film" });
    this.deeds.append(save);
    keepFile({ href: film.href, parts: [save, this.film.video], forget: () => this.film.forget() });
    byId("said").textContent = "The film is finished.";
  }

  /** Add the buttons for its sound. */
  addSound(wav, again) {
    const href = URL.createObjectURL(wav);
    const deeds = [
      make("button", { type: "button", className: "quiet", textContent: "Hear again", on: { click: again } }),
      make("a", { href, download: "answer.wav", className: "quiet", textContent: "Save sound" }),
    ];
    this.deeds.prepend(...deeds);
    keepFile({ href, parts: deeds });
    follow();
  }
}

function keepFile(file) {
  files.push(file);
  if (files.length > MOST_FILES) forget(files.shift());
}

function forget({ href, parts, forget: also }) {
  URL.revokeObjectURL(href);
  also?.();
  for (const part of parts) part.remove();
}

/** Show an error, its hint, and when to ask again. */
export function showFailure({ message, hint, retryAfterS = null }, again) {
  const button = make("button", { type: "button", className: "quiet", on: { click: () => again() && card.remove() } });
  const card = make("article", { className: "failure", role: "alert" }, make("p", { className: "what", textContent: message }), ...(hint ? [make("p", { textContent: hint })] : []));
  if (retryAfterS !== null) {
    let left = Math.ceil(retryAfterS);
    const count = () => {
      button.disabled = left > 0;
      button.textContent = left > 0 ? `Try again in ${left} s` : "Try again";
      if (left-- > 0 && (card.isConnected || !button.isConnected)) setTimeout(count, 1000);
    };
    count();
    card.append(button);
  }
  add(card);
}

/** Put an article at the end; if it stands elsewhere, move it. */
export function add(article) {
  byId("empty").hidden = true;
  thread.append(article);
  isFollowing = true;
  follow();
}

const NEAR = 160; // Pixels: a user who is no further from the end looks at it.
const thread = byId("thread");
let isFollowing = true;
let reached = 0;

thread.addEventListener("scroll", () => {
  const isUp = thread.scrollTop < reached; // Only a person scrolls up.
  reached = thread.scrollTop;
  if (thread.scrollHeight - reached - thread.clientHeight < NEAR) isFollowing = true;
  else if (isUp) isFollowing = false;
});

/** Keep the end in sight if the user looks at it, even after a picture that is higher than the window. */
function follow() {
  if (isFollowing) thread.scrollTop = thread.scrollHeight;
}

export function clearThread() {
  files.splice(0).forEach(forget);
  for (const article of thread.querySelectorAll("article")) article.remove();
  byId("empty").hidden = false;
}
