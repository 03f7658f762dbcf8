// The endpoints of this gateway, as its own document has them.

import { byId, copy, make } from "./elements.js";

const [IGNORED, REFUSED] = ["Taken, and means nothing here.", "Refused, if something is in it."];
const base = new URL(".", location).href.replace(/\/$/, "");

const code = (text, className = "") => make("code", { className }, text);

/** The schema itself, where it is only named. */
const meant = (schema, all) => (schema.$ref ? all[schema.$ref.split("/").pop()] : schema);

/** The forms that a value may have; null is as good as nothing. */
const formsOf = (schema) => (schema.anyOf ?? [schema]).filter((form) => form.type !== "null");

function typeOf(schema) {
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  const { minimum, maximum, exclusiveMinimum, exclusiveMaximum } = schema;
  const lowest = exclusiveMinimum === undefined ? minimum : `above ${exclusiveMinimum}`;
  const highest = exclusiveMaximum === undefined ? maximum : `below ${exclusiveMaximum}`;
  const bounds = [lowest ?? "", highest ?? ""].map((bound) => (Math.abs(bound) > Number.MAX_SAFE_INTEGER ? "" : `${bound}`));
  const range = bounds[0] && bounds[1] ? ` ${bounds.join(" to ")}` : bounds[0] ? ` from ${bounds[0]}` : bounds[1] ? ` to ${bounds[1]}` : "";
  if (schema.contentMediaType || schema.format === "binary") return "file";
  if (schema.type === "array") return `list of ${typesOf(schema.items ?? {}).replace(/^\w+$/, "$&s")}`;
  return `${schema.$ref ? "object" : (schema.type ?? "any value")}${range}`;
}

const typesOf = (schema) => [...new Set(formsOf(schema).map(typeOf))].join(" or ");

/** Every field of a schema, the required ones first, with the fields of its objects: {path, schema, must}. */
function fieldsOf(schema, all, before = "") {
  const { properties = {}, required = [] } = meant(schema, all);
  const entries = Object.entries(properties).sort(([one], [other]) => required.includes(other) - required.includes(one));
  return entries.flatMap(([name, value]) => {
    const path = before + name;
    const inner = formsOf(value).flatMap((form) => {
      const items = form.type === "array" ? formsOf(form.items ?? {}) : [form];
      return items.filter((item) => item.$ref || item.properties).flatMap((item) => fieldsOf(item, all, `${path}${item === form ? "" : "[]"}.`));
    });
    return [{ path, schema: value, must: required.includes(name) }, ...inner];
  });
}

function fieldList(fields) {
  const rows = fields.map(({ path, schema, must, where }) => {
    const fixed = schema.default ?? null;
    const told = [schema.description ?? "", fixed === null ? "" : `Default: ${JSON.stringify(fixed)}.`].filter(Boolean).join(" ");
    const type = make("span", { className: "type" }, typesOf(schema));
    return make("div", {},
      make("dt", {}, code(path), must ? make("span", { className: "must" }, " required") : "", where ? make("span", { className: "type" }, ` ${where}`) : ""),
      make("dd", {}, type, told && ` · ${told}`));
  });
  return make("dl", {}, ...rows);
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** A command that asks it. */
function curlOf(method, path, operation, all) {
  const words = ["curl", ...(method === "get" || method === "post" ? [] : ["-X", method.toUpperCase()])];
  words.push(base + path.replaceAll(/\{(\w+)\}/g, (_, name) => name.toUpperCase()));
  const content = operation.requestBody?.content ?? {};
  const { example } = content["application/json"] ?? {};
  const form = content["multipart/form-data"];
  if (example) words.push("-H", quoted("Content-Type: application/json"), "-d", quoted(JSON.stringify(example)));
  else if (form) {
    for (const { path: name, schema, must } of fieldsOf(form.schema, all)) {
      if (must) words.push("-F", quoted(`${name}=${typesOf(schema).includes("file") ? "@FILE" : "..."}`));
    }
  }
  const sounds = Object.keys(operation.responses[200]?.content ?? {}).some((type) => type.startsWith("audio/"));
  if (sounds) words.push("--output", `answer.${example?.response_format ?? "mp3"}`);
  return words.join(" ");
}

function asked(command) {
  const button = make("button", { type: "button" }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(command)) ? "Copied" : "Not copied";
  });
  return make("div", { className: "ask" }, make("pre", {}, command), button);
}

/** The fields of a body that may come as JSON or as a form; those that only one of them has say which. */
function bodyFields(content, all) {
  const listed = Object.entries(content).map(([type, { schema }]) => [type === "application/json" ? "as JSON" : "in a form", fieldsOf(schema, all)]);
  const has = (fields, path) => fields.some((field) => field.path === path);
  return listed.flatMap(([where, fields], number) => fields
    .filter(({ path }) => !listed.slice(0, number).some(([, earlier]) => has(earlier, path)))
    .map((field) => ({ ...field, where: listed.every(([, others]) => has(others, field.path)) ? "" : where })));
}

function article(method, path, operation, all) {
  const parameters = (operation.parameters ?? []).map(({ name, schema, required }) => ({ path: name, schema, must: required }));
  const fields = [...parameters, ...bodyFields(operation.requestBody?.content ?? {}, all)];
  const told = (what) => fields.filter(({ schema }) => schema.description === what).map(({ path: name }) => name).join(", ");
  const heeded = fields.filter(({ schema }) => ![IGNORED, REFUSED].includes(schema.description));
  const types = Object.keys(operation.responses[200]?.content ?? {});
  const made = make("article", { id: anchorOf(method, path) },
    make("h3", {}, make("span", { className: `method ${method}` }, method.toUpperCase()), path),
    make("p", {}, operation.description ?? ""),
    asked(curlOf(method, path, operation, all)));
  if (heeded.length) made.append(make("details", { open: heeded.length < 12 }, make("summary", {}, heeded.length === 1 ? "1 field" : `${heeded.length} fields`), fieldList(heeded)));
  for (const [words, names] of [["Taken, and changes nothing: ", told(IGNORED)], ["Refused unless empty: ", told(REFUSED)], ["Gives ", types.join(", ")]]) {
    if (names) made.append(make("p", { className: "soft" }, words, names));
  }
  return made;
}

const anchorOf = (method, path) => `${method}${path.replaceAll(/[{}]/g, "").replaceAll("/", "-")}`;

async function show() {
  const response = await fetch("openapi.json");
  if (!response.ok) throw new Error(`the gateway answers ${response.status}`);
  const { info, paths, components } = await response.json();
  byId("about").textContent = `${info.version} · ${info.summary}`;
  const parts = new Map();
  for (const [path, operations] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      const tag = operation.tags?.[0] ?? "others";
      parts.set(tag, [...(parts.get(tag) ?? []), [method, path, operation]]);
    }
  }
  byId("state").remove();
  for (const [tag, endpoints] of parts) {
    const links = endpoints.map(([method, path]) => make("li", {},
      make("a", { href: `#${anchorOf(method, path)}` }, make("span", { className: `method ${method}` }, method.toUpperCase()), path)));
    byId("list").append(make("h2", {}, tag), make("ul", {}, ...links));
    const articles = endpoints.map(([method, path, operation]) => article(method, path, operation, components.schemas));
    byId("endpoints").append(make("h2", {}, tag), ...articles);
  }
  if (location.hash) byId(location.hash.slice(1))?.scrollIntoView();
}

try {
  await show();
} catch (error) {
  byId("state").textContent = `Nothing can be shown: ${error.message}. Is the gateway there? Reload to try again.`;
}
