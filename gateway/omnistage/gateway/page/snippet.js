// The last request as a snippet for a terminal or a program. A key never stands in it.

const OURS = { chat: ["speed"], pictures: ["seed", "steps"] }; // Fields that OpenAI's client does not know.

/** A body as it is shown: without fields that only this page needs, and without the bytes of pictures. */
function shown(body) {
  const text = JSON.stringify(body, (name, value) => {
    if (name === "include_events") return undefined;
    return typeof value === "string" ? value.replace(/^(data:[\w/+.-]+;base64,).+$/s, "$1...") : value;
  });
  return JSON.parse(text);
}

/** The text between single quotes of a shell. */
const quote = (text) => text.replaceAll("'", "'\\''");

const url = (path) => new URL(path, document.baseURI).href;

const FIELDS = { "v1/videos": "input_reference" }; // The field of a picture in a form, by the path.

export function curl({ path, body, files }) {
  const start = [`curl --no-buffer ${url(path)} \\`, '  -H "Authorization: Bearer $OMNISTAGE_API_KEY" \\'];
  if (files) {
    const parts = Object.entries(shown(body)).map(([name, value]) => `  --form-string '${quote(`${name}=${value}`)}'`);
    return [...start, [...parts, ...files.map(({ name }) => `  -F '${FIELDS[path] ?? "image[]"}=@${quote(name)}'`)].join(" \\\n")].join("\n");
  }
  return [...start, "  -H 'Content-Type: application/json' \\", `  -d '${quote(JSON.stringify(shown(body), null, 2))}'`].join("\n");
}

export function python({ path, body, files }) {
  if (path === "v1/audio/generate") return fetched(path, body);
  const isChat = path.endsWith("chat/completions");
  const isFilm = path in FIELDS;
  const ours = isChat ? OURS.chat : OURS.pictures;
  const fields = Object.entries(shown(body));
  const extra = Object.fromEntries(fields.filter(([name]) => ours.includes(name)));
  const given = fields.filter(([name]) => !ours.includes(name)).map(([name, value]) => `    ${name}=${literal(value)},`);
  if (Object.keys(extra).length) given.push(`    extra_body=${literal(extra)},`);
  if (files && isFilm) given.unshift(`    input_reference=open(${literal(files[0].name)}, "rb"),`);
  else if (files) given.unshift(`    image=[${files.map(({ name }) => `open(${literal(name)}, "rb")`).join(", ")}],`);
  const call = isFilm ? "videos.create_and_poll" : isChat ? "chat.completions.create" : files ? "images.edit" : "images.generate";
  return [
    "import os",
    "",
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(url("v1"))}, api_key=os.environ.get("OMNISTAGE_API_KEY", "none"))`,
    `${isFilm ? "video" : "events"} = client.${call}(`,
    ...given,
    ")",
    ...(isFilm ? ['client.videos.download_content(video.id).write_to_file("film.webm")'] : ["for event in events:", "    print(event)"]),
    "",
  ].join("\n");
}

/** Python for a request that OpenAI's client has no method for. */
function fetched(path, body) {
  const { stream_format: _, ...asked } = shown(body);
  return [
    "import json",
    "import os",
    "from urllib.request import Request, urlopen",
    "",
    `body = json.dumps(${literal(asked)}).encode()`,
    'headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get(\'OMNISTAGE_API_KEY\', \'none\')}"}',
    `with urlopen(Request(${literal(url(path))}, body, headers)) as answer, open("sound.wav", "wb") as file:`,
    "    file.write(answer.read())",
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
