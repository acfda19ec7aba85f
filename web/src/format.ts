// Numbers and names as text.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

/** Bytes in the unit that fits. */
export function bytes(n: number): string {
  const sign = n < 0 ? "−" : "";
  let size = Math.abs(n), unit = 0;
  while (size >= 999.5 && unit < UNITS.length - 1) {
    size /= 1024;
    unit++;
  }
  return `${sign}${unit === 0 ? size.toFixed(0) : size.toPrecision(3)} ${UNITS[unit]}`;
}

/** A change in bytes. */
export function signed(n: number): string {
  return `${n > 0 ? "+" : ""}${bytes(n)}`;
}

/** A whole number with separators. */
export function count(n: number): string {
  return Math.round(n).toLocaleString("en");
}

/** A number of the unit `bytes` or of anything that is counted. */
export function figure(n: number, unit: string): string {
  return unit === "bytes" ? bytes(n) : count(n);
}

/** A share, without digits that mean nothing. */
export function percent(share: number): string {
  if (!Number.isFinite(share)) return "";
  const value = share * 100;
  return `${Math.abs(value) >= 10 ? value.toFixed(0) : value.toFixed(1)} %`;
}

/** A time span. */
export function seconds(s: number): string {
  if (s < 0.001) return `${(s * 1e6).toFixed(0)} µs`;
  if (s < 1) return `${(s * 1e3).toPrecision(3)} ms`;
  if (s < 120) return `${s.toPrecision(3)} s`;
  if (s < 7200) return `${(s / 60).toPrecision(3)} min`;
  return `${(s / 3600).toPrecision(3)} h`;
}

/** Marks of a time axis (Unix time in seconds) that are `step` seconds apart: as many digits as tell them apart. */
export function axisTime(time: number, step: number): string {
  const date = new Date(time * 1000), of = date.toLocaleTimeString("en-GB");
  if (step < 1) return `${of.slice(3)}.${Math.floor(date.getMilliseconds() / 100)}`;
  if (step < 60) return of;
  return step < 86400 ? of.slice(0, 5) : date.toLocaleDateString("en-CA");
}

/** Time of day. */
export function clock(ms: number): string {
  return new Date(ms).toLocaleTimeString("en-GB");
}

/** A number, unless it stands for none. */
export function known(n: number): number | null {
  return Number.isFinite(n) ? n : null;
}

/** What an interval at a level of confidence is called: `95 % interval`. */
export function intervalTitle(confidence: number): string {
  return `${Number((confidence * 100).toPrecision(4))} % interval`;
}

/** A title after a figure that says its unit. */
export function afterFigure(title: string): string {
  return title.replace(/^bytes /, "");
}

/** An interval in the unit of its figure; empty if there is none. */
export function interval(low: number | null, high: number | null, unit: string): string {
  if (low !== null && low === high) return "exact";
  return low === null || high === null ? "" : `${figure(low, unit)} – ${figure(high, unit)}`;
}

// Control characters, separators and marks that change the direction of text.
const CONTROLS = /[\u0000-\u001f\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]/g;

/** A name as it may be shown: in one line, in its own order, and not endless. */
export function shown(name: string, most = 400): string {
  const cut = name.length > most ? `${name.slice(0, most)}…` : name;
  return cut.replace(CONTROLS, c => `\\u{${c.charCodeAt(0).toString(16)}}`);
}

/** A pattern that finds the text as it is. */
export function literal(text: string): string {
  return text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
}

/** What a search looks for: a regular expression, or the text itself if it is none. */
export function pattern(text: string): RegExp | null {
  if (text === "") return null;
  try {
    return new RegExp(text, "i");
  } catch {
    return new RegExp(literal(text), "i");
  }
}

/** FNV-1a of 32 bits. */
export function hash(text: string, start = 0x811c9dc5): number {
  let h = start;
  for (let i = 0; i < text.length; i++) h = Math.imul(h ^ text.charCodeAt(i), 16777619);
  return h >>> 0;
}
