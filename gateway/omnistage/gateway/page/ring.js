// On the audio thread: plays chunks of samples one after the other, and says how far it is.

const REPORT_BLOCKS = 8; // Between two reports: 43 ms at 24 kHz.

class Ring extends AudioWorkletProcessor {
  constructor() {
    super();
    this.clear(0);
    this.port.onmessage = ({ data }) => this.hear(data);
  }

  clear(turn) {
    this.turn = turn;
    this.chunks = [];
    this.at = 0; // In chunks[0].
    this.played = 0;
    this.underruns = 0;
    this.firstAt = null;
    this.runs = this.isWhole = this.isDry = this.isOver = false;
    this.blocks = 0;
  }

  hear({ deed, turn, samples }) {
    if (deed === "clear") return this.clear(turn);
    if (deed === "chunk") this.chunks.push(samples);
    if (deed === "start") this.runs = true;
    if (deed === "end") this.isWhole = true;
  }

  process(_, [[out]]) {
    if (!this.runs || this.isOver) return true;
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
    if (filled && this.firstAt === null) this.firstAt = currentTime;
    this.played += filled;
    const isDry = filled < out.length && !this.isWhole;
    if (isDry && !this.isDry) this.underruns += 1; // Once, however long the silence is.
    this.isDry = isDry;
    this.isOver = this.isWhole && !this.chunks.length;
    if (++this.blocks % REPORT_BLOCKS === 0 || this.isOver) this.report();
    return true;
  }

  report() {
    const { turn, played, underruns, firstAt, isOver } = this;
    this.port.postMessage({ turn, played, underruns, firstAt, isOver });
  }
}

registerProcessor("ring", Ring);
