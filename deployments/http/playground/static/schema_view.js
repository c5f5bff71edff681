// Shows JSON schemas as lists of fields. A schema that refers to another one is opened on request,
// so schemas that contain themselves come to an end.

import { h } from "./dom.js";

const PREFIX = "#/components/schemas/";

// Returns the schema that a reference names, and every other schema unchanged.
export function resolved(schema, schemas) {
  return schema.$ref ? (schemas[schema.$ref.slice(PREFIX.length)] ?? {}) : schema;
}

// Returns the type of a schema in a few words.
export function typeOf(schema, schemas) {
  if (schema.$ref) return schema.$ref.slice(PREFIX.length);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return [...new Set(choices.map((one) => typeOf(one, schemas)))].join(" | ");
  if (schema.type === "array") return `list of ${typeOf(schema.items ?? {}, schemas)}`;
  return schema.type ?? "any value";
}

// Returns the schemas with fields that a schema consists of or may be.
function partsOf(schema, schemas) {
  const whole = resolved(schema, schemas);
  if (whole.properties) return [whole];
  const choices = whole.anyOf ?? whole.oneOf ?? (whole.type === "array" ? [whole.items ?? {}] : []);
  return choices.flatMap((one) => partsOf(one, schemas));
}

// Returns the list of the fields of a schema, or null if it has none.
export function fieldsOf(schema, schemas) {
  const parts = partsOf(schema, schemas);
  if (!parts.length) return null;
  const items = parts.flatMap((part) =>
    Object.entries(part.properties).map(([name, field]) =>
      fieldItem(name, field, (part.required ?? []).includes(name), schemas),
    ),
  );
  return h("ul", { class: "fields" }, ...items);
}

function fieldItem(name, field, isNeeded, schemas) {
  const label = [
    h("code", {}, name),
    " ",
    h("span", { class: "type" }, typeOf(field, schemas)),
    isNeeded ? h("span", { class: "needed" }, " required") : null,
    field.default !== undefined && field.default !== null
      ? h("span", { class: "type" }, ` = ${JSON.stringify(field.default)}`)
      : null,
    field.description ? h("span", {}, ` ${field.description}`) : null,
  ];
  if (!partsOf(field, schemas).length) return h("li", {}, ...label);
  const details = h("details", {}, h("summary", {}, ...label));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(fieldsOf(field, schemas));
  });
  return h("li", {}, details);
}
