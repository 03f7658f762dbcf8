// Pictures that go with a question: chosen, dropped or pasted.

import { byId, make, toast } from "./elements.js";

const MOST = 4;
const MOST_BYTES = 10 * 1024 * 1024;

/** The pictures to send, as data URIs. */
export class Pictures {
  constructor() {
    this.all = [];
    this.areTaken = false;
    byId("attach").addEventListener("click", () => byId("file").click());
    byId("file").addEventListener("change", (event) => {
      this.add(event.target.files);
      event.target.value = "";
    });
    document.addEventListener("paste", (event) => this.add(event.clipboardData.files));
    document.addEventListener("dragover", (event) => event.preventDefault());
    document.addEventListener("drop", (event) => {
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  /** Whether the chosen model sees pictures. */
  take(areTaken) {
    this.areTaken = areTaken;
    byId("attach").hidden = !areTaken;
    if (!areTaken) this.clear();
  }

  async add(files) {
    for (const file of files) {
      if (!this.areTaken) return toast("This model takes no pictures.");
      if (!file.type.startsWith("image/")) toast(`${file.name} is no picture.`);
      else if (file.size > MOST_BYTES) toast(`${file.name} has more than ${MOST_BYTES >> 20} MiB.`);
      else if (this.all.length >= MOST) return toast(`At most ${MOST} pictures go with a message.`);
      else {
        this.all.push({ name: file.name, file, uri: await asUri(file) });
        this.show();
      }
    }
  }

  clear() {
    this.all = [];
    this.show();
  }

  show() {
    const list = byId("pictures");
    list.hidden = !this.all.length;
    list.replaceChildren(
      ...this.all.map((one) => {
        const remove = () => {
          this.all = this.all.filter((other) => other !== one);
          this.show();
          byId("text").focus();
        };
        const button = make("button", { type: "button", textContent: "×", ariaLabel: `Remove ${one.name}`, on: { click: remove } });
        return make("li", {}, make("img", { src: one.uri, alt: one.name }), button);
      }),
    );
  }
}

function asUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
