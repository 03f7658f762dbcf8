// Runs on the audio thread: plays chunks of samples one after the other, and reports how far it is.

const REPORT_BLOCKS = 8; // Between two reports: 43 ms at 24 kHz.
const HELD_S = 0.2; // Seconds of sound to collect after it ran dry, before it goes on: one long gap is better than many.

class Ring extends AudioWorkletProcessor {
  constructor() {
    super();
    this.clear(0);
    this.port.onmessage = ({ data }) => this.hear(data);
  }

  clear(turn) {
    this.turn = turn;
    this.chunks = [];
    this.at = 0; // The next sample in chunks[0].
    this.held = 0; // Samples that wait.
    this.played = 0;
    this.underruns = 0;
    this.runs = this.isWhole = this.isDry = this.isOver = false;
    this.blocks = 0;
  }

  hear({ deed, turn, samples }) {
    if (deed === "clear") return this.clear(turn);
    if (deed === "chunk") {
      this.chunks.push(samples);
      this.held += samples.length;
    }
    if (deed === "start") this.runs = true;
    if (deed === "end") this.isWhole = true;
  }

  process(_, [[out]]) {
    if (!this.runs || this.isOver) return true;
    if (this.isDry && !this.isWhole && this.held < HELD_S * sampleRate) return true;
    let filled = 0;
    while (filled < out.length && this.chunks.length) {
      const piece = this.chunks[0].subarray(this.at, this.at + out.length - filled);
      out.set(piece, filled);
      filled += piece.length;
      this.at += piece.length;
      if (this.at >= this.chunks[0].length) {
        this.chunks.shift();
        this.at = 0;
      }
    }
    this.played += filled;
    this.held -= filled;
    this.isDry = filled < out.length && !this.isWhole;
    if (this.isDry) this.underruns += 1;
    this.isOver = this.isWhole && !this.chunks.length;
    if (++this.blocks % REPORT_BLOCKS === 0 || this.isDry || this.isOver) this.report();
    return true;
  }

  report() {
    const { turn, played, underruns, isOver } = this;
    this.port.postMessage({ turn, played, underruns, isOver });
  }
}

registerProcessor("ring", Ring);
