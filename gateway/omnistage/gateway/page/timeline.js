// Shows which stage worked when: a lane for each stage, which grows as output arrives, and is completed by the stages' own accounts.

import { byId, make, seconds } from "./elements.js";

const NAMES = { thinker: "Thinker", talker: "Talker", code2wav: "Code2Wav", diffusion: "Diffusion" };
const LANE = 30, BAR = 16, AXIS = 22, TOP = 6, TICK = 2;
const LONGEST = 1.8; // The time axis is at most so many times as long as the work.
const MOST_MARKS = 4000; // On one lane; a screen has fewer columns.
const TICKS_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600];

/** The lane of each kind of output; if a chain has no such stage, the lane of its last stage. */
const MAKER = { text: "thinker", sound: "code2wav", picture: "diffusion" };

export class Timeline {
  constructor(svg) {
    this.svg = svg;
    this.isCalm = matchMedia("(prefers-reduced-motion: reduce)");
    this.scale = 1;
    this.stages = ["thinker", "talker", "code2wav"];
    this.reset();
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  reset() {
    this.lanes = new Map(this.stages.map((stage) => [stage, { marks: [], account: null, lost: [] }]));
    this.begun = null; // performance.now() / 1000 when the question was asked.
    this.ended = null; // Seconds after `begun`, as all other times.
    this.text = { first: null, last: null, pieces: 0, characters: 0 };
    this.sound = { first: null, last: null, received: 0, heard: null, played: 0, underruns: 0 };
    this.pictures = { first: null, last: null, previews: 0, whole: 0, done: 0, total: 0, film: 0, isPercent: false };
  }

  get now() {
    return performance.now() / 1000 - this.begun;
  }

  /** Begin a new answer. */
  begin(stages) {
    if (stages?.length) this.stages = stages;
    this.reset();
    this.begun = performance.now() / 1000;
    this.scale = 0.05;
    this.run();
  }

  mark(kind) {
    const lane = this.lanes.get(MAKER[kind]) ?? [...this.lanes.values()].at(-1);
    const at = this.now;
    if (lane.marks.length < MOST_MARKS) lane.marks.push(at);
    return at;
  }

  /** Mark that output of this kind came. output: what is known of that kind. */
  came(kind, output) {
    output.last = this.mark(kind);
    output.first ??= output.last;
  }

  gotText(text) {
    this.came("text", this.text);
    this.text.pieces += 1;
    this.text.characters += text.length;
  }

  gotSound(durationS) {
    this.came("sound", this.sound);
    this.sound.received += durationS;
  }

  gotPicture(isPreview) {
    this.came("picture", this.pictures);
    this.pictures[isPreview ? "previews" : "whole"] += 1;
  }

  /** The next piece of a film; isWhole: there is none after it. */
  gotFilm(isWhole) {
    const { pictures } = this;
    if (isWhole) pictures.whole = 1;
    else this.came("picture", pictures);
    pictures.film += !isWhole;
  }

  /** isPercent: the numbers are percent and not steps. */
  gotProgress(done, total, isPercent = false) {
    if (isPercent && this.pictures.isPercent && this.pictures.done === done) return;
    this.mark("picture");
    Object.assign(this.pictures, { done, total, isPercent });
  }

  /** A server was lost, and another one went on. */
  gotFailover(stage, pauseS) {
    const lane = this.lanes.get(stage) ?? [...this.lanes.values()][0];
    lane.lost.push(Math.max(0, this.now - pauseS));
  }

  /** How much sound the player has played. */
  gotHeard(playedS, underruns) {
    if (playedS && this.sound.heard === null) this.sound.heard = Math.max(this.sound.first ?? 0, this.now - playedS);
    Object.assign(this.sound, { played: playedS, underruns });
    this.run();
  }

  /** The stages' own accounts. Their times count from the opening of the chain, which this page does not see: it takes the latest moment for
   * which no output arrives before it was made. */
  gotAccounts({ queued_s: queued, stages }) {
    const arrivals = { thinker: this.text, code2wav: this.sound, diffusion: this.pictures };
    const latest = stages.flatMap(({ stage, first_output_s: first, total_s: total }) => {
      const seen = arrivals[stage];
      return seen?.first == null ? [this.now - total] : [this.now - total, seen.first - first, seen.last - total];
    });
    const offset = Math.max(queued, Math.min(...latest));
    for (const { stage, ...account } of stages) {
      if (!this.lanes.has(stage)) this.lanes.set(stage, { marks: [], account: null, lost: [] });
      this.lanes.get(stage).account = { ...account, offset };
    }
  }

  end() {
    this.ended = this.now;
    this.run();
  }

  /** The figures of an answer that speaks or draws: [name, what it is, value]. */
  get figures() {
    const { text, sound, pictures } = this;
    if (this.isDrawing) {
      const isWhole = pictures.whole > 0;
      return [
        ["first view", "time to the first preview or picture", seconds(pictures.first)],
        ["drawn", pictures.film ? "time to the end of the film" : "time to the last picture", isWhole ? seconds(pictures.last) : "–"],
        pictures.isPercent ? ["made", "how far it is", `${pictures.done} %`] : ["steps", "of the drawing", pictures.total ? `${pictures.done}/${pictures.total}` : "–"],
      ];
    }
    return [
      ["ttft", "time to first text", seconds(text.first)],
      ["ttfa", "time to first audio", seconds(sound.first)],
      ["rtf", "real-time factor: arrival of the last sound, over how long the sound is", sound.received ? (sound.last / sound.received).toFixed(2) : "–"],
      ["underruns", "how often the sound ran dry", sound.first === null ? "–" : String(sound.underruns)],
    ];
  }

  get isDrawing() {
    return this.pictures.first !== null || (this.stages.includes("diffusion") && this.sound.first === null);
  }

  // Drawing ------------------------------------------------------------------------------------------------------------------------------

  /** Draw until nothing moves. */
  run() {
    if (this.frame) return;
    const next = () => {
      const target = this.span;
      const isThere = this.isCalm.matches || Math.abs(target - this.scale) < target * 0.002;
      this.scale = isThere ? target : this.scale + (target - this.scale) * 0.18;
      this.draw();
      const moves = this.begun !== null && (this.ended === null || !isThere);
      this.frame = moves ? requestAnimationFrame(next) : 0;
    };
    this.frame = requestAnimationFrame(next);
  }

  /** Seconds on the time axis: all work, and so much of the playback that the work is not squeezed. */
  get span() {
    if (this.begun === null) return 1;
    const accounts = [...this.lanes.values()].map(({ account }) => (account ? account.offset + account.total_s : 0));
    const worked = Math.max(this.ended ?? this.now, this.text.last ?? 0, this.sound.last ?? 0, this.pictures.last ?? 0, ...accounts);
    const heard = this.sound.heard === null ? 0 : this.sound.heard + this.sound.received;
    return Math.max(0.02, worked * 1.06, Math.min(heard * 1.06, worked * LONGEST));
  }

  draw() {
    const width = this.svg.clientWidth, rows = this.lanes.size + 1;
    if (!width) return;
    const left = width < 500 ? 82 : 96, right = width - 4, height = TOP + rows * LANE + AXIS;
    const x = (at) => left + (Math.min(Math.max(at, 0), this.scale) / this.scale) * (right - left);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    const parts = this.axis(x, left, right, height);
    let row = 0;
    for (const [stage, lane] of this.lanes) parts.push(...this.lane(stage, lane, x, TOP + row++ * LANE, left, right));
    parts.push(...this.hearing(x, TOP + row * LANE, left, right));
    if (this.begun !== null && this.ended === null) parts.push(this.shape("line", { x1: x(this.now), x2: x(this.now), y1: 0, y2: height - AXIS, class: "now" }));
    this.svg.replaceChildren(...parts);
  }

  axis(x, left, right, height) {
    const most = (right - left) / 72;
    const step = TICKS_S.find((one) => this.scale / one <= most) ?? this.scale;
    const parts = [];
    for (let n = 0; n * step <= this.scale && n < 100; n++) {
      const at = x(n * step);
      parts.push(this.shape("line", { x1: at, x2: at, y1: TOP, y2: height - AXIS, class: "grid" }));
      if (at < right - 24) parts.push(this.label(n ? tick(n * step, step) : "0", at, height - 6, n ? "axis middle" : "axis"));
    }
    return parts;
  }

  lane(stage, { marks, account, lost }, x, y, left, right) {
    const top = y + (LANE - BAR) / 2, parts = [this.label(NAMES[stage] ?? stage, 0, y + LANE / 2 + 4, "name")];
    const bar = (from, to, kind) => parts.push(this.shape("rect", { x: x(from), y: top, width: Math.max(x(to) - x(from), 2), height: BAR, rx: 5, class: `${kind} ${stage}` }));
    parts.push(this.shape("rect", { x: left, y: top, width: right - left, height: BAR, rx: 5, class: "track" }));
    if (account) {
      const { offset, queued_s: queued, first_output_s: first, total_s: total } = account;
      bar(offset + queued, offset + total, "taken");
      bar(offset + Math.max(queued, first || queued), offset + total, "work");
    } else if (this.begun !== null && this.ended === null) bar(0, this.now, "taken");
    if (marks.length) {
      const d = marks.map((at) => `M${x(at).toFixed(1)} ${top + 2}v${BAR - 4}`).join("");
      parts.push(this.shape("path", { d, "stroke-width": this.svg.clientWidth < 500 ? 1 : TICK, class: `marks ${stage}` }));
    }
    for (const at of lost) parts.push(this.shape("path", { d: `M${x(at)} ${y + 2}l6 ${LANE / 2 - 2}l-6 ${LANE / 2 - 2}l-6 ${-LANE / 2 + 2}z`, class: "lost" }));
    return parts;
  }

  /** Draw the lane of the sound and the film that a person hears and sees. */
  hearing(x, y, left, right) {
    const { sound, pictures } = this, top = y + (LANE - BAR) / 2;
    const isSeen = this.isDrawing;
    const parts = [this.label(isSeen ? "You see" : "You hear", 0, y + LANE / 2 + 4, "name")];
    parts.push(this.shape("rect", { x: left, y: top, width: right - left, height: BAR, rx: 5, class: "track" }));
    const begins = isSeen ? pictures.first : sound.heard;
    if (begins === null) return parts;
    const until = isSeen ? (this.ended ?? this.now) : begins + sound.received;
    const bar = (from, to, kind) => parts.push(this.shape("rect", { x: x(from), y: top, width: Math.max(x(to) - x(from), 2), height: BAR, rx: 5, class: kind }));
    bar(begins, until, "taken heard");
    bar(begins, isSeen ? until : begins + sound.played, "work heard");
    if (isSeen || sound.received < 0.05 || right - x(begins) < 130) return parts;
    const told = `${sound.played.toFixed(1)} of ${sound.received.toFixed(1)} s${until > this.scale ? " →" : ""}`;
    const wide = told.length * 6.6 + 14;
    parts.push(this.shape("rect", { x: right - wide - 5, y: top + 1, width: wide, height: BAR - 2, rx: 7, class: "plate" }));
    parts.push(this.label(told, right - wide / 2 - 5, y + LANE / 2 + 4, "told middle"));
    return parts;
  }

  shape(tag, attributes) {
    const made = document.createElementNS(this.svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, typeof value === "number" ? value.toFixed(1) : value);
    return made;
  }

  label(text, x, y, kind) {
    const made = this.shape("text", { x, y, class: kind });
    made.textContent = text;
    return made;
  }

  // The same in words --------------------------------------------------------------------------------------------------------------------

  /** Write the timeline as a sentence and a table, for those who do not see it. */
  tell() {
    const { text, sound, pictures } = this, said = [];
    if (text.pieces) said.push(`Text from ${seconds(text.first)} to ${seconds(text.last)}`);
    if (sound.first !== null) said.push(`sound from ${seconds(sound.first)} to ${seconds(sound.last)}, ${seconds(sound.received)} long, heard from ${seconds(sound.heard)} on`);
    if (pictures.film) said.push(`A film from ${seconds(pictures.first)} to ${seconds(pictures.last)}`);
    else if (pictures.first !== null) said.push(`${pictures.previews} previews and ${pictures.whole} pictures, the first after ${seconds(pictures.first)}`);
    const lost = [...this.lanes].filter(([, lane]) => lane.lost.length).map(([stage, lane]) => `${NAMES[stage] ?? stage} was lost ${lane.lost.length} times and went on`);
    this.svg.setAttribute("aria-label", `${[...said, ...lost].join("; ") || "Nothing came"}.`);
    const head = ["stage", "waited", "first output", "ended", "gave", "server"];
    const rows = [...this.lanes].map(([stage, { account }]) => {
      const times = ["queued_s", "first_output_s", "total_s"].map((name) => seconds(account?.[name]));
      const gave = Object.entries(account?.output_items ?? {}).map(([port, count]) => `${count} of ${port}`);
      return [NAMES[stage] ?? stage, ...times, gave.join(", ") || "–", account?.replica ?? "–"];
    });
    const cells = (tag, row) => make("tr", {}, ...row.map((textContent) => make(tag, { textContent })));
    byId("timeline-text").replaceChildren(make("table", {}, make("thead", {}, cells("th", head)), make("tbody", {}, ...rows.map((row) => cells("td", row)))));
  }
}

function tick(at, step) {
  if (step < 1) return at < 1 && step < 0.1 ? `${+(at * 1000).toFixed(1)} ms` : `${+at.toFixed(3)} s`;
  return at < 120 ? `${at} s` : `${Math.round(at / 60)} min`;
}
