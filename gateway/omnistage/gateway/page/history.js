// The data that stays in the browser: the conversation and the choices; the key only for as long as the tab is open.

const TURNS = "omnistage.turns", CHOICES = "omnistage.choices", KEY = "omnistage.key";
export const MOST_TURNS = 100;
const MOST_CHARACTERS = 2_000_000; // Browsers give a page about five million.
const MOST_PICTURE = 400_000; // Characters of one picture.

/** A store of the browser; if the browser lets this page keep nothing, one that lasts as long as the page. */
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

/** Returns whether there was room. */
function write(name, text) {
  try {
    lasting.setItem(name, text);
    return true;
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
    return false;
  }
}

export const choices = () => read(CHOICES, {});
export const keepChoices = (chosen) => write(CHOICES, JSON.stringify(chosen));

export const key = () => ofTab.getItem(KEY) ?? "";
export const keepKey = (value) => (value ? ofTab.setItem(KEY, value) : ofTab.removeItem(KEY));

/** Turns, oldest first: {id, at, text, pictures, answer: {text, pictures} or null, isDrawn, isLeftOut}, pictures as
 * data URIs. */
export function turns() {
  const kept = read(TURNS, []);
  return Array.isArray(kept) ? kept.filter((turn) => turn?.id && isSaid(turn) && (turn.answer === null || isSaid(turn.answer))) : [];
}

const isSaid = (one) => typeof one?.text === "string" && Array.isArray(one.pictures);

/** Add these turns to the kept ones: another tab may have kept some too. The newest stay, and older ones lose their pictures first. Returns
 * whether there was room. */
export function keepTurns(some) {
  const all = new Map([...turns(), ...some.map(stored)].map((turn) => [turn.id, turn]));
  let kept = [...all.values()].sort((one, other) => one.at - other.at).slice(-MOST_TURNS);
  for (let oldest = 0; size(kept) > MOST_CHARACTERS && oldest < kept.length; oldest++) for (const one of parts(kept[oldest])) one.pictures = [];
  while (size(kept) > MOST_CHARACTERS) kept = kept.slice(1);
  return write(TURNS, JSON.stringify(kept));
}

/** Remove the kept turns. */
export const dropTurns = () => lasting.removeItem(TURNS);

/** Forget the conversation, in other tabs too. */
export function forgetTurns() {
  dropTurns(); // First: it makes room for the note that follows.
  write(TURNS, "[]");
}

/** Call `hasForgotten` when another tab forgets the conversation, and `hasChosen` when its choices change. */
export function listenToTabs(hasForgotten, hasChosen) {
  window.addEventListener("storage", ({ storageArea, key: name, newValue }) => {
    if (storageArea !== lasting) return;
    if (name === TURNS && newValue === "[]") hasForgotten();
    if (name === CHOICES) hasChosen();
  });
}

/** The turn without pictures that are too large for a browser's store. */
function stored({ id, at, text, pictures, answer, isDrawn, isLeftOut }) {
  const small = (all) => all.filter((one) => one.length <= MOST_PICTURE);
  return { id, at, text, pictures: small(pictures), answer: answer && { text: answer.text, pictures: small(answer.pictures) }, isDrawn, isLeftOut };
}

const parts = (turn) => (turn.answer ? [turn, turn.answer] : [turn]);

function size(kept) {
  return kept.flatMap(parts).reduce((sum, { text, pictures }) => sum + text.length + pictures.reduce((all, one) => all + one.length, 0), 0);
}
