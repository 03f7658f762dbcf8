// The last request, for a terminal or a program. A key never stands in it.

const OUR_FIELDS = new Set(["speed", "steps", "include_events"]);

/** What is shown of a body: without what only this page needs, and without the bytes of pictures. */
function shown(body) {
  const text = JSON.stringify(body, (name, value) => {
    if (name === "include_events") return undefined;
    return typeof value === "string" ? value.replace(/^(data:[\w/+.-]+;base64,).+$/s, "$1...") : value;
  });
  return JSON.parse(text);
}

const url = (path) => new URL(path, document.baseURI).href;

export function curl({ path, body }) {
  const quoted = JSON.stringify(shown(body), null, 2).replaceAll("'", "'\\''");
  return [`curl --no-buffer ${url(path)} \\`, '  -H "Authorization: Bearer $OMNISTAGE_API_KEY" \\', "  -H 'Content-Type: application/json' \\", `  -d '${quoted}'`].join("\n");
}

export function python({ path, body }) {
  const known = shown(body), extra = {};
  for (const name of Object.keys(known)) {
    if (!OUR_FIELDS.has(name)) continue;
    extra[name] = known[name];
    delete known[name];
  }
  const given = Object.entries(known).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) given.push(`    extra_body=${literal(extra)},`);
  const isChat = path.endsWith("chat/completions");
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(url("v1"))}, api_key=os.environ.get("OMNISTAGE_API_KEY", "none"))`,
    `events = client.${isChat ? "chat.completions.create" : "images.generate"}(`,
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
