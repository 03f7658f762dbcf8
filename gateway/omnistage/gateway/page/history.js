// What stays in the browser: the conversation and the choices; the key only for as long as the tab is open.

const TURNS = "omnistage.turns", CHOICES = "omnistage.choices", KEY = "omnistage.key";
const MOST_TURNS = 200;
const MOST_CHARACTERS = 2_000_000; // Browsers give a page about five million.

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    localStorage.removeItem(name); // No JSON: another program wrote it.
    return otherwise;
  }
}

export const choices = () => read(CHOICES, {});
export const keepChoices = (chosen) => localStorage.setItem(CHOICES, JSON.stringify(chosen));

export const key = () => sessionStorage.getItem(KEY) ?? "";
export const keepKey = (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY));

/** Turns: {role, text, pictures}, pictures as data URIs. */
export function turns() {
  const kept = read(TURNS, []);
  return Array.isArray(kept) ? kept.filter((turn) => typeof turn?.text === "string" && Array.isArray(turn.pictures)) : [];
}

/** Keep the newest turns; of older ones first their pictures go. */
export function keepTurns(all) {
  let kept = all.slice(-MOST_TURNS).map(({ role, text, pictures }) => ({ role, text, pictures }));
  for (let oldest = 0; size(kept) > MOST_CHARACTERS && oldest < kept.length; oldest++) kept[oldest].pictures = [];
  while (size(kept) > MOST_CHARACTERS) kept = kept.slice(1);
  localStorage.setItem(TURNS, JSON.stringify(kept));
}

export const forgetTurns = () => localStorage.removeItem(TURNS);

function size(kept) {
  return kept.reduce((sum, turn) => sum + turn.text.length + turn.pictures.reduce((all, one) => all + one.length, 0), 0);
}
