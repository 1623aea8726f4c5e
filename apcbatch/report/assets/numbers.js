// Numbers: values formatted with their units.

const NOT_KNOWN = "–";

function grouped(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

/** Format a count: 1494719, "token" -> "1,494,719 tokens" */
function counted(value, noun) {
  return `${grouped(value)} ${value === 1 ? noun : noun + "s"}`;
}

/** Format a share: 0.8731 -> "87.3 %". A share below 1 is never rounded to all, and one above 0 never to nothing. */
function percent(share) {
  if (share > 0 && share < 0.001) return "under 0.1 %";
  if (share < 1 && share > 0.999) return "over 99.9 %";
  return `${trimmed(share * 100, 1)} %`;
}

/** Format bytes: 3435973837 -> "3.2 GiB" */
function bytes(value) {
  let unit = 0;
  let rest = value;
  while (rest >= 1024 && unit < BYTE_UNITS.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${trimmed(rest, unit === 0 || rest >= 100 ? 0 : 1)} ${BYTE_UNITS[unit]}`;
}
const BYTE_UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Format seconds: 8.31 -> "8.3 s"; 0.0123 -> "12.3 ms"; 4000 -> "1 h 7 min" */
function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.9995) return `${trimmed(value * 1000, value < 0.1 ? 1 : 0)} ms`;
  if (value < 119.5) return `${trimmed(value, 1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(value / 60);
  return `${grouped(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

/** Format tokens per second; from 100 on without decimals. */
function rate(value) {
  return `${value >= 100 ? grouped(value) : trimmed(value, 1)} tokens/s`;
}

function trimmed(value, digits) {
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** Format seconds since 1970 in UTC: "2026-11-21 12:00:05 UTC" */
function instant(value) {
  return new Date(value * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

/** Format a value of any kind. */
function plain(value) {
  if (value === null || value === undefined) return NOT_KNOWN;
  if (typeof value === "number") return Number.isInteger(value) ? grouped(value) : trimmed(value, 3);
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "string" ? visible(value) : visible(JSON.stringify(value));
}

const IN_UNITS = {
  tokens: (value) => counted(value, "token"),
  requests: (value) => counted(value, "request"),
  bytes,
  s: seconds,
  seconds,
  ms: (value) => seconds(value / 1000),
  "tokens/s": rate,
  share: percent,
};

/** Format a value in the named unit; an unknown unit is written behind the number. */
function inUnit(value, unit) {
  if (typeof value !== "number") return plain(value);
  return IN_UNITS[unit] ? IN_UNITS[unit](value) : `${plain(value)}${unit ? " " + unit : ""}`;
}

/** Make a number on the page: its formatted text and, for programs, its name and raw value. */
function quantity(name, value, form = grouped) {
  const known = value !== null && value !== undefined;
  return element("span", { "data-name": name, "data-value": known ? String(value) : null, class: "quantity" },
    known ? form(value) : NOT_KNOWN);
}
