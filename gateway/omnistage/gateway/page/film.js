// A film as it comes: shown while it grows if the browser can, otherwise when it is whole.

const ENDS = { "video/webm": "webm", "video/mp4": "mp4" };

/** Shows a film in a `video` element. */
export class GrowingFilm {
  constructor(video) {
    this.video = video;
    this.all = [];
    this.waiting = [];
    this.buffer = null;
    this.isWhole = false;
  }

  push(bytes, mediaType) {
    if (!this.all.length) this.begin(mediaType);
    this.all.push(bytes);
    this.waiting.push(bytes);
    this.feed();
  }

  begin(mediaType) {
    this.mediaType = mediaType.split(";")[0].trim();
    // A browser takes a film in pieces only if it is told the codecs.
    if (!mediaType.includes("codecs") || !("MediaSource" in window) || !MediaSource.isTypeSupported(mediaType)) return;
    this.source = new MediaSource();
    this.source.addEventListener("sourceopen", () => this.open(mediaType), { once: true });
    this.video.src = this.opened = URL.createObjectURL(this.source);
  }

  open(type) {
    if (this.isWhole && !this.waiting.length) return;
    this.buffer = this.source.addSourceBuffer(type);
    this.buffer.addEventListener("updateend", () => this.feed());
    this.video.dataset.grows = "true";
    this.feed();
  }

  feed() {
    if (!this.buffer || this.buffer.updating || this.source.readyState !== "open") return;
    if (this.waiting.length) this.append();
    else if (this.isWhole) this.source.endOfStream();
  }

  /** Give the browser the next piece. A film with more bytes than the browser keeps in pieces is shown from the whole file at the end. */
  append() {
    try {
      this.buffer.appendBuffer(this.waiting[0]);
      this.waiting.shift();
    } catch (error) {
      if (error.name !== "QuotaExceededError") throw error;
      this.source.endOfStream();
      this.source = this.buffer = null;
    }
  }

  /** End the film. Returns the file and the ending of its name; null if nothing came. */
  end() {
    this.isWhole = true;
    this.feed();
    if (!this.all.length) return null;
    const href = URL.createObjectURL(new Blob(this.all, { type: this.mediaType }));
    if (!this.source && this.video.canPlayType(this.mediaType)) this.video.src = href;
    this.video.hidden = !this.video.src;
    return { href, end: ENDS[this.mediaType] ?? "bin" };
  }

  forget() {
    if (this.opened) URL.revokeObjectURL(this.opened);
  }
}
