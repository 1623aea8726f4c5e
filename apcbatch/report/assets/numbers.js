// Numbers: how a value reads, with its unit. Must not know what is counted.

const NOT_KNOWN = "–";

function grouped(value) {
  return value.toLocaleString("en-US", { maximumFractionDigits: 0 });
}

/** 1494719, "token" -> "1,494,719 tokens" */
function counted(value, noun) {
  return `${grouped(value)} ${value === 1 ? noun : noun + "s"}`;
}

/** 0.8731 -> "87.3 %". What is not all is never rounded to all, nor what is something to nothing. */
function percent(share) {
  if (share > 0 && share < 0.001) return "under 0.1 %";
  if (share < 1 && share > 0.999) return "over 99.9 %";
  return `${trimmed(share * 100, 1)} %`;
}

/** 3435973837 -> "3.2 GiB" */
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

/** 8.31 -> "8.3 s"; 0.0123 -> "12.3 ms"; 4000 -> "1 h 7 min" */
function seconds(value) {
  if (value === 0) return "0 s";
  if (value < 0.9995) return `${trimmed(value * 1000, value < 0.1 ? 1 : 0)} ms`;
  if (value < 119.5) return `${trimmed(value, 1)} s`;
  const whole = Math.round(value);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(value / 60);
  return `${grouped(Math.floor(minutes / 60))} h ${minutes % 60} min`;
}

/** Tokens a second: three figures are enough. */
function rate(value) {
  return `${value >= 100 ? grouped(value) : trimmed(value, 1)} tokens/s`;
}

function trimmed(value, digits) {
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

/** The instant, in UTC: seconds since 1970 -> "2026-11-21 12:00:05 UTC" */
function instant(value) {
  return new Date(value * 1000).toISOString().slice(0, 19).replace("T", " ") + " UTC";
}

/** A value of any kind, as short as it can be said. */
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

/** The value in the unit of this name, or with the name behind it. */
function inUnit(value, unit) {
  if (typeof value !== "number") return plain(value);
  return IN_UNITS[unit] ? IN_UNITS[unit](value) : `${plain(value)}${unit ? " " + unit : ""}`;
}

/** A number on the page: what is read, and for programs its name and raw value. */
function quantity(name, value, form = grouped) {
  const known = value !== null && value !== undefined;
  return element("span", { "data-name": name, "data-value": known ? String(value) : null, class: "quantity" },
    known ? form(value) : NOT_KNOWN);
}
