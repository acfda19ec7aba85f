// A button for every format.

import { button, element, save } from "./dom.ts";
import { shown } from "./format.ts";
import type { Doc } from "./doc.ts";
import type { Server } from "./live.ts";
import type { Column } from "./model.ts";

/** `a;b;c value` of every stack, outermost first. */
export function folded(it: Doc, values: Float64Array): string {
  const { sheet } = it, lines: string[] = [];
  for (let stack = 0; stack < sheet.count; stack++) {
    if (!(values[stack] > 0)) continue;
    const names = Array.from(sheet.allFramesOf(stack), frame => shown(sheet.plain[sheet.frames.function[frame]], Infinity).replaceAll(";", ":"));
    if (sheet.groups.length > 1) names.unshift(shown(sheet.groups[sheet.group[stack]]).replaceAll(";", ":"));
    lines.push(`${names.join(";")} ${Math.round(values[stack])}`);
  }
  return `${lines.join("\n")}\n`;
}

/** A line for every stack, with intervals. */
export function csv(it: Doc): string {
  const quoted = (text: string) => `"${text.replaceAll('"', '""')}"`;
  const { sheet } = it, lines = [["group", ...it.columns.flatMap(({ info: { name } }) => [name, `${name}_low`, `${name}_high`]), "stack"].join(",")];
  const number = (n: number) => (Number.isFinite(n) ? String(Math.round(n)) : "");
  for (let stack = 0; stack < sheet.count; stack++) {
    const figures = it.columns.flatMap(column => [column.estimate[stack], column.low[stack], column.high[stack]].map(number));
    const chain = Array.from(sheet.allFramesOf(stack), frame => shown(sheet.plain[sheet.frames.function[frame]])).reverse().join(" < ");
    lines.push([quoted(shown(sheet.groups[sheet.group[stack]] ?? "")), ...figures, quoted(chain)].join(","));
  }
  return `${lines.join("\n")}\n`;
}

/** Buttons of what most people want; the others are behind "more". */
function ways(first: HTMLElement[], rest: HTMLElement[] = []): HTMLElement {
  const row = element("div", { class: "row" }, element("span", { class: "dim" }, "Save as"), ...first);
  if (!rest.length) return row;
  const others = element("span", { class: "row", hidden: "" }, ...rest);
  const more = button("more", () => {
    others.hidden = !others.hidden;
    more.setAttribute("aria-expanded", String(!others.hidden));
  }, { "aria-expanded": "false" });
  row.append(more, others);
  return row;
}

/** Buttons of a page without a server: what can be made from what it has. The page itself is the html. It knows too little of processes and losses for pprof. */
export function staticButtons(current: () => { doc: Doc; column: Column }, data: string): HTMLElement {
  const values = () => current().column.estimate;
  return ways([
    button("json", () => save("heapbpf-page.json", data, "application/json"), { title: "the data of this page" }),
    button("csv", () => save("heapbpf.csv", csv(current().doc), "text/csv")),
    button("folded", () => save("heapbpf.folded", folded(current().doc, values()), "text/plain")),
  ]);
}

/** The formats that most people want. */
const FIRST = ["pprof", "html", "json"];

/** Buttons of a server's formats. */
export function serverButtons(server: Server, formats: [string, string][], failed: (text: string) => void): HTMLElement {
  const fetchFile = async (name: string, extension: string) => {
    const response = await server.ask(`page/export?format=${encodeURIComponent(name)}`);
    if (!response) return failed("The server does not answer.");
    if (!response.ok) return failed((await response.text()).trim().slice(0, 500));
    save(`heapbpf${extension}`, await response.blob(), "application/octet-stream");
  };
  const [first, others] = [true, false].map(isFirst => formats.filter(([name]) => FIRST.includes(name) === isFirst)
    .map(([name, extension]) => button(name, () => void fetchFile(name, extension), { title: extension })));
  return ways(first, others);
}
