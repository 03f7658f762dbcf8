// Elements of the page. The words of a model are only ever set as text.

export const byId = (id) => document.getElementById(id);

/** A new element. properties: of the element, such as className and textContent; `on` has listeners by event. */
export function make(tag, properties = {}, ...children) {
  const { on, ...rest } = properties;
  const made = Object.assign(document.createElement(tag), rest);
  for (const [event, listener] of Object.entries(on ?? {})) made.addEventListener(event, listener);
  made.append(...children);
  return made;
}

let fading = 0;

/** Say something for a moment. */
export function toast(text) {
  const place = byId("toast");
  place.textContent = text;
  place.classList.add("shown");
  clearTimeout(fading);
  fading = setTimeout(() => place.classList.remove("shown"), 4000);
}

/** 52 ms, 1.74 s. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 100 ? 2 : 0)} s`;
}

/** Put text on the clipboard, even if the page has no secure context. Returns whether it is there. */
export async function copy(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      if (error.name !== "NotAllowedError") throw error;
    }
  }
  const area = make("textarea", { value: text, className: "hidden" });
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}
