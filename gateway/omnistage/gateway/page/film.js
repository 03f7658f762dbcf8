// A film as it comes: seen while it grows where the browser can, else when it is whole.

const CODECS = { "video/webm": 'video/webm; codecs="vp9"', "video/mp4": 'video/mp4; codecs="av01.0.05M.08"' };
const ENDS = { "video/webm": "webm", "video/mp4": "mp4" };

/** In a `video`. */
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
    const type = mediaType.includes("codecs") ? mediaType : CODECS[this.mediaType];
    if (!type || !("MediaSource" in window) || !MediaSource.isTypeSupported(type)) return;
    this.source = new MediaSource();
    this.source.addEventListener("sourceopen", () => this.open(type), { once: true });
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
    if (this.waiting.length) this.buffer.appendBuffer(this.waiting.shift());
    else if (this.isWhole) this.source.endOfStream();
  }

  /** Nothing more comes. Returns the file, and how its name ends; null where nothing came. */
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
