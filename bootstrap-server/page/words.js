// Numbers, times and names in words.

const HOUR = 3600;
const DAY = 86400;

/** `1 rank`, `1,024 ranks`. */
export function count(number, noun, plural = `${noun}s`) {
  return `${grouped(number)} ${number === 1 ? noun : plural}`;
}

/** A number with its thousands apart. */
export function grouped(number) {
  return String(number).replace(/\B(?=(\d{3})+(?!\d))/g, ",");
}

/** `a`, `a and b`, `a, b and c`, `a, b, c and 4 more`. */
export function listed(names, shown = 3) {
  const rest = names.length - shown;
  const heads = rest > 0 ? [...names.slice(0, shown), `${grouped(rest)} more`] : names;
  if (heads.length < 2) return heads.join("");
  return `${heads.slice(0, -1).join(", ")} and ${heads.at(-1)}`;
}

/** Bytes in the largest binary unit that leaves a whole part. */
export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let value = number;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const digits = unit === 0 || value >= 100 || Number.isInteger(value) ? 0 : 1;
  return `${value.toFixed(digits)} ${units[unit]}`;
}

/** A duration in seconds, in the two largest units that matter. */
export function duration(seconds) {
  const whole = Math.max(0, Math.floor(seconds));
  if (whole < 60) return `${whole} s`;
  if (whole < HOUR) return `${Math.floor(whole / 60)} min`;
  if (whole < DAY) return two(whole, HOUR, "h", 60, "min");
  return two(whole, DAY, "d", HOUR, "h");
}

function two(whole, large, largeUnit, small, smallUnit) {
  const rest = Math.floor((whole % large) / small);
  const head = `${Math.floor(whole / large)} ${largeUnit}`;
  return rest === 0 ? head : `${head} ${rest} ${smallUnit}`;
}

function padded(number) {
  return String(number).padStart(2, "0");
}

/** The reader's time of day, with the date in front when it was not today. */
export function clock(seconds, today = new Date()) {
  const then = new Date(seconds * 1000);
  const time = [then.getHours(), then.getMinutes(), then.getSeconds()].map(padded).join(":");
  if (then.toDateString() === today.toDateString()) return time;
  return `${then.getFullYear()}-${padded(then.getMonth() + 1)}-${padded(then.getDate())} ${time}`;
}

/** The same moment for a log search: UTC. */
export function absolute(seconds) {
  return `${iso(seconds).replace("T", " ").replace(/\.\d+Z$/, "")} UTC`;
}

/** As `time` elements carry it. */
export function iso(seconds) {
  const then = new Date(seconds * 1000);
  return Number.isNaN(then.getTime()) ? "" : then.toISOString();
}

/** A rank's name without the dimensions that its engine has only one of. */
export function rankName(rank, sizes) {
  const parts = ["dp", "cp", "tp", "pp"].filter((name) => sizes[name] > 1).map((name) => `${name}${rank[name]}`);
  return parts.length === 0 ? "its only rank" : parts.join(" ");
}
