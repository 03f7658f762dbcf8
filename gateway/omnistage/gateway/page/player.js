// Plays sound as it comes: with an AudioWorklet, or, if the browser has none, with sources that are scheduled one after the other.

const LEAD_S = 0.02; // Seconds ahead at which the first source is scheduled.
const LATE_S = 0.2; // The same for a source before which the sound ran dry: one long gap is better than many.
const USUAL_RATE_HZ = 24000;

/** Plays one answer at a time. heard: called with {played, underruns, isOver} as sound is played. hasNoWorklet: called if no worklet could
 * be loaded. */
export class Player {
  constructor(heard, hasNoWorklet) {
    this.heard = heard;
    this.hasNoWorklet = hasNoWorklet;
    this.context = null;
    this.turn = 0;
    this.sent = 0;
    this.last = { played: 0, underruns: 0, isOver: true };
  }

  static get hasWorklet() {
    return "AudioWorkletNode" in window && window.isSecureContext;
  }

  /** Prepare to play. Call it in the user's click: browsers let a page begin with sound only there. */
  open(rateHz = USUAL_RATE_HZ) {
    if (this.context?.sampleRate !== rateHz) {
      this.context?.close();
      this.context = new AudioContext({ sampleRate: rateHz, latencyHint: "interactive" });
      this.sink = this.newSink(this.context);
    }
    if (this.context.state !== "running") this.context.resume();
  }

  newSink(context) {
    const report = (told) => this.report(told);
    if (!Player.hasWorklet) return new ScheduledSink(context, report);
    const loaded = workletSink(context, report).catch((error) => {
      console.info("No audio worklet:", error.message);
      if (context.state !== "closed") this.hasNoWorklet();
      return new ScheduledSink(context, report);
    });
    return loadedSink(loaded);
  }

  /** Begin a new sound. prebufferS: seconds that it waits after its first samples, unless it is whole before. */
  begin(rateHz, prebufferS) {
    this.stop();
    this.open(rateHz);
    this.rateHz = rateHz;
    this.prebufferS = prebufferS;
    this.sent = 0;
    this.isWhole = false;
    this.last = { played: 0, underruns: 0, isOver: false };
    this.sink.clear(++this.turn);
  }

  push(samples) {
    if (!samples.length || this.last.isOver) return;
    if (!this.sent) this.waiting = setTimeout(() => this.sink.start(), this.prebufferS * 1000);
    this.sent += samples.length;
    this.sink.push(samples);
  }

  /** End the sound. */
  end() {
    if (this.last.isOver || this.isWhole) return;
    this.isWhole = true;
    clearTimeout(this.waiting);
    this.sink.start();
    this.sink.end();
  }

  stop() {
    clearTimeout(this.waiting);
    if (this.last.isOver) return;
    this.last = { ...this.last, isOver: true };
    this.sink.clear(++this.turn);
    this.heard(this.last);
  }

  get isPlaying() {
    return !this.last.isOver;
  }

  report(told) {
    if (told.turn !== this.turn || this.last.isOver) return;
    this.last = told;
    this.heard(told);
  }
}

/** A sink that plays in a worklet. */
async function workletSink(context, report) {
  await context.audioWorklet.addModule(new URL("ring.js", import.meta.url));
  const node = new AudioWorkletNode(context, "ring", { numberOfInputs: 0, outputChannelCount: [1] });
  node.port.onmessage = ({ data }) => report(data);
  node.connect(context.destination);
  return {
    clear: (turn) => node.port.postMessage({ deed: "clear", turn }),
    push: (samples) => node.port.postMessage({ deed: "chunk", samples }, [samples.buffer]),
    start: () => node.port.postMessage({ deed: "start" }),
    end: () => node.port.postMessage({ deed: "end" }),
  };
}

/** A sink that passes all calls on to another one in order, even those that came while that was still being loaded. */
function loadedSink(loaded) {
  let last = loaded;
  const passOn = (deed) => (value) => {
    last = last.then((sink) => {
      sink[deed](value);
      return sink;
    });
  };
  return { clear: passOn("clear"), push: passOn("push"), start: passOn("start"), end: passOn("end") };
}

class ScheduledSink {
  constructor(context, report) {
    this.context = context;
    this.told = report;
    this.sources = new Set();
    this.clear(0);
  }

  clear(turn) {
    for (const source of this.sources) {
      source.onended = null;
      source.stop();
    }
    this.sources.clear();
    this.turn = turn;
    this.waiting = [];
    this.until = null; // When the last scheduled source ends.
    this.played = this.underruns = 0;
    this.runs = this.isWhole = false;
  }

  push(samples) {
    if (this.runs) this.schedule(samples);
    else this.waiting.push(samples);
  }

  start() {
    if (this.runs) return;
    this.runs = true;
    this.waiting.splice(0).forEach((samples) => this.schedule(samples));
  }

  end() {
    this.isWhole = true;
    if (!this.sources.size) this.report();
  }

  schedule(samples) {
    const { context } = this;
    const buffer = context.createBuffer(1, samples.length, context.sampleRate);
    buffer.copyToChannel(samples, 0);
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(context.destination);
    const isDry = this.until !== null && this.until < context.currentTime;
    if (isDry) this.underruns += 1;
    if (isDry || this.until === null) this.until = context.currentTime + (isDry ? LATE_S : LEAD_S);
    source.onended = () => {
      this.sources.delete(source);
      this.played += samples.length;
      this.report();
    };
    source.start(this.until);
    this.sources.add(source);
    this.until += samples.length / context.sampleRate;
  }

  report() {
    const { turn, played, underruns } = this;
    this.told({ turn, played, underruns, isOver: this.isWhole && !this.sources.size });
  }
}
