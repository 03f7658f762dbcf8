// What stays in the browser: the conversation and the choices; the key only for as long as the tab is open.

const TURNS = "omnistage.turns", CHOICES = "omnistage.choices", KEY = "omnistage.key";
export const MOST_TURNS = 200;
const MOST_CHARACTERS = 2_000_000; // Browsers give a page about five million.

/** A store of the browser; where it lets this page keep nothing, one that lasts as long as the page. */
function store(name) {
  try {
    return window[name];
  } catch (error) {
    if (error.name !== "SecurityError") throw error;
    const values = new Map();
    return { getItem: (key) => values.get(key) ?? null, setItem: (key, value) => values.set(key, value), removeItem: (key) => values.delete(key) };
  }
}

const lasting = store("localStorage"), ofTab = store("sessionStorage");

function read(name, otherwise) {
  try {
    return JSON.parse(lasting.getItem(name)) ?? otherwise;
  } catch (error) {
    if (!(error instanceof SyntaxError)) throw error;
    lasting.removeItem(name); // Another program wrote it.
    return otherwise;
  }
}

export const choices = () => read(CHOICES, {});
export const keepChoices = (chosen) => lasting.setItem(CHOICES, JSON.stringify(chosen));

export const key = () => ofTab.getItem(KEY) ?? "";
export const keepKey = (value) => (value ? ofTab.setItem(KEY, value) : ofTab.removeItem(KEY));

/** Turns: {role, text, pictures, isDrawn, isLeftOut}, pictures as data URIs. */
export function turns() {
  const kept = read(TURNS, []);
  return Array.isArray(kept) ? kept.filter((turn) => typeof turn?.text === "string" && Array.isArray(turn.pictures)) : [];
}

/** Keep the newest turns; of older ones first their pictures go. */
export function keepTurns(all) {
  let kept = all.slice(-MOST_TURNS).map(({ role, text, pictures, isDrawn, isLeftOut }) => ({ role, text, pictures, isDrawn, isLeftOut }));
  for (let oldest = 0; size(kept) > MOST_CHARACTERS && oldest < kept.length; oldest++) kept[oldest].pictures = [];
  while (size(kept) > MOST_CHARACTERS) kept = kept.slice(1);
  lasting.setItem(TURNS, JSON.stringify(kept));
}

export const forgetTurns = () => lasting.removeItem(TURNS);

function size(kept) {
  return kept.reduce((sum, turn) => sum + turn.text.length + turn.pictures.reduce((all, one) => all + one.length, 0), 0);
}
