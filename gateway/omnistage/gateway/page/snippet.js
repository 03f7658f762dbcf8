// The last request, for a terminal or a program. A key never stands in it.

const OURS = { chat: ["speed"], pictures: ["seed", "steps"] }; // Fields that OpenAI's client does not know.

/** What is shown of a body: without what only this page needs, and without the bytes of pictures. */
function shown(body) {
  const text = JSON.stringify(body, (name, value) => {
    if (name === "include_events") return undefined;
    return typeof value === "string" ? value.replace(/^(data:[\w/+.-]+;base64,).+$/s, "$1...") : value;
  });
  return JSON.parse(text);
}

/** Between single quotes of a shell. */
const quote = (text) => text.replaceAll("'", "'\\''");

const url = (path) => new URL(path, document.baseURI).href;

export function curl({ path, body, files }) {
  const start = [`curl --no-buffer ${url(path)} \\`, '  -H "Authorization: Bearer $OMNISTAGE_API_KEY" \\'];
  if (files) {
    const parts = Object.entries(shown(body)).map(([name, value]) => `  --form-string '${quote(`${name}=${value}`)}'`);
    return [...start, [...parts, ...files.map(({ name }) => `  -F 'image[]=@${quote(name)}'`)].join(" \\\n")].join("\n");
  }
  return [...start, "  -H 'Content-Type: application/json' \\", `  -d '${quote(JSON.stringify(shown(body), null, 2))}'`].join("\n");
}

export function python({ path, body, files }) {
  const isChat = path.endsWith("chat/completions");
  const ours = isChat ? OURS.chat : OURS.pictures;
  const fields = Object.entries(shown(body));
  const extra = Object.fromEntries(fields.filter(([name]) => ours.includes(name)));
  const given = fields.filter(([name]) => !ours.includes(name)).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) given.push(`    extra_body=${literal(extra)},`);
  if (files) given.unshift(`    image=[${files.map(({ name }) => `open(${literal(name)}, "rb")`).join(", ")}],`);
  const call = isChat ? "chat.completions.create" : files ? "images.edit" : "images.generate";
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(url("v1"))}, api_key=os.environ.get("OMNISTAGE_API_KEY", "none"))`,
    `events = client.${call}(`,
    ...given,
    ")",
    "for event in events:",
    "    print(event)",
    "",
  ].join("\n");
}

/** A value as Python writes it. */
function literal(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(literal).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one)}`).join(", ")}}`;
  return JSON.stringify(value);
}
