// What must be in plain sight: how much, how sure, what was lost, what it costs, and how it was counted.

import { button, drawing, element, part } from "./dom.ts";
import { bytes, count, figure, interval, intervalTitle, literal, percent, seconds, shown, signed } from "./format.ts";
import type { History } from "./history.ts";
import type { Figure, PageData, Process, Resident, Serving } from "./model.ts";
import { Table, type TableColumn } from "./table.ts";

function card(title: string, value: string, about: string): HTMLElement {
  return element("div", { class: "card" }, element("small", {}, title), element("b", {}, value), element("small", {}, about));
}

function totalCard(title: string, total: Figure | undefined, unit: string): HTMLElement | null {
  if (!total) return null;
  if (total.estimate === null) return card(title, "not known", "frees were not tracked");
  const exact = total.exact === undefined ? "" : `counted: ${figure(total.exact, unit)}`;
  return card(title, figure(total.estimate, unit), [interval(total.low, total.high, unit), exact].filter(text => text).join(" · "));
}

/** Hits that were lost, of how many. */
export function lost(counters: Record<string, number>): { lost: number; hits: number } {
  const all = Object.entries(counters).filter(([name]) => name.startsWith("lost_") && name !== "lost_in_flight");
  return { lost: all.reduce((sum, [, n]) => sum + n, 0), hits: counters.hits ?? 0 };
}

/** How processes are counted, in words. */
const WAYS: Record<string, string> = { inline: "from inside", probe: "by probes", usdt: "by their own samples", "go runtime": "by Go's runtime" };

/** What grows; a click looks for the function. */
function growing(data: PageData, onFunction: (name: string) => void): HTMLElement | null {
  if (!data.growing) return null;
  if (!data.growing.length) return card("growing", "nothing", "that stands out");
  const lines = data.growing.map(it => element("p", {}, it.program ? `${shown(it.program, 60)}: ` : "", button(shown(it.name, 200), () => onFunction(literal(it.full_name)), { class: "link" }), ` ${it.how_much}`, element("br"), element("small", {}, it.why)));
  return element("div", { class: "card growing" }, element("small", {}, "growing"), ...lines);
}

/** How many processes there are, and how many of them are counted in which way. */
export function counted({ targets, processes }: Pick<PageData, "targets" | "processes">): [value: string, about: string] {
  const ways = new Map<string, number>();
  for (const { hook, count: n } of processes) {
    const way = WAYS[hook ?? ""] ?? "not counted";
    // Idle processes that have ended are listed, but do not count.
    if (n) ways.set(way, (ways.get(way) ?? 0) + n);
  }
  return [`${count(targets)} ${targets === 1 ? "process" : "processes"}`, Array.from(ways, ([way, n]) => `${count(n)} ${way}`).join(", ") || "not counted"];
}

export function summary(data: PageData, serving: Serving | null, onFunction: (name: string) => void): HTMLElement[] {
  const total = (name: string) => data.totals[data.values.findIndex(value => value.name === name)];
  const missing = lost(data.counters);
  const cost = serving?.probe_seconds ?? null;
  const share = serving && serving.duration_seconds > 0 ? (x: number) => percent(x / serving.duration_seconds) : null;
  const cards = [
    totalCard("in use", total("inuse_space"), "bytes"),
    totalCard("allocated", total("alloc_space"), "bytes"),
    growing(data, onFunction),
    card("counted", ...counted(data)),
    Object.keys(data.counters).length
      ? card("lost", missing.lost ? count(missing.lost) : "nothing", missing.hits ? `of ${count(missing.hits)} allocations` : "") : null,
    serving && share
      ? card("cost", cost === null ? "not measured" : `${share(cost)} of a CPU`, `in the programs (${seconds(cost ?? 0)}); heapbpf itself: ${share(serving.daemon_cpu_seconds)}`) : null,
  ];
  const remarks = [...data.remarks];
  if (data.left_out) remarks.push(`${count(data.left_out)} small stacks are not on this page, because there are too many`);
  if (remarks.length) {
    cards.push(element("div", { class: "card notes", role: "region", tabindex: "0", "aria-label": "Remarks" }, element("ul", {}, ...remarks.map(text => element("li", {}, shown(text, 2000))))));
  }
  return cards.filter(it => it !== null);
}

interface ProgramRow { name: string; processes: number; inuse: Figure | undefined; rate: number | null; resident: Resident | null; spark: (number | null)[] }

/** Processes by program. */
export class Programs {
  private sort: string | null = null;
  private readonly table = new Table<ProgramRow>("Processes by program", "-inuse", sort => {
    this.sort = sort;
    this.again();
  });
  private again = () => {};

  constructor(private readonly box: HTMLElement, private readonly onGroup: (name: string) => void) {}

  show(data: PageData, history: History | null) {
    this.box.hidden = data.groups.length === 0;
    const at = (name: string) => data.values.findIndex(value => value.name === name);
    const inuse = at("inuse_space"), alloc = at("alloc_space");
    const rows = data.groups.map((group): ProgramRow => {
      const allocated = group.totals[alloc]?.exact ?? group.totals[alloc]?.estimate;
      const since = data.duration_seconds > 0 && allocated !== null && allocated !== undefined ? allocated / data.duration_seconds : null;
      return {
        name: group.name, processes: group.processes, inuse: group.totals[inuse], resident: group.resident,
        rate: history ? history.rate(group.name) : since, spark: history?.trend(group.name) ?? [],
      };
    });
    const number = (key: string, title: string, value: (row: ProgramRow) => number | null | undefined, text: (n: number) => string): TableColumn<ProgramRow> => ({
      key, title, number: true, value: row => value(row) ?? -1,
      cell: row => { const n = value(row); return n === null || n === undefined ? "not known" : text(n); },
    });
    const columns: TableColumn<ProgramRow>[] = [
      { key: "name", title: "Program", number: false, value: row => row.name, cell: row => button(shown(row.name, 200), () => this.onGroup(row.name), { class: "link" }) },
      number("processes", "Processes", row => row.processes, count),
      number("inuse", "In use", row => row.inuse?.estimate, bytes),
      { key: "band", title: intervalTitle(data.confidence), number: true, value: row => row.inuse?.low ?? -1, cell: row => interval(row.inuse?.low ?? null, row.inuse?.high ?? null, "bytes") },
      number("resident", "Resident", row => row.resident?.bytes, bytes),
      number("growth", "Resident per minute", row => row.resident?.growth_per_minute, signed),
      number("unseen", "Not seen", row => row.resident?.not_seen, bytes),
      number("rate", "Allocated per second", row => row.rate, bytes),
    ];
    if (history) columns.push({ key: "trend", title: "In use over time", number: false, value: row => row.spark.length, cell: row => sparkline(row.spark) });
    // Of a whole host, the first question is who uses its memory.
    const first = data.groups.some(group => !group.totals.length) ? "-resident" : "-inuse";
    this.again = () => this.table.show(columns, rows, this.sort ?? first);
    this.again();
    if (!this.box.firstChild) this.box.append(element("h2", {}, "Programs"), this.table.root);
  }
}

function sparkline(values: (number | null)[]): Node | string {
  const known = values.filter(value => value !== null);
  if (known.length < 2) return "";
  const most = Math.max(...known, 1), step = 90 / (values.length - 1);
  // After a gap, the curve begins anew.
  const to = (i: number) => ((values[i - 1] ?? null) === null ? "M" : "L");
  const path = values.map((value, i) => (value === null ? "" : `${to(i)}${(i * step).toFixed(1)} ${(19 - (17 * value) / most).toFixed(1)}`)).join("");
  return drawing("svg", { viewBox: "0 0 90 20", class: "spark", role: "img", "aria-label": `from ${bytes(known[0])} to ${bytes(known[known.length - 1])}` }, drawing("path", { d: path }));
}

/** Most processes whose memory is told. */
const MOST_MEASURED = 64;

/** Where the resident memory of each process is: parts that add up, and what of the heap is in use. */
export function memory(data: PageData): HTMLElement[] {
  const measured = data.processes.filter(process => process.resident);
  measured.sort((a, b) => b.resident!.bytes - a.resident!.bytes);
  return measured.slice(0, MOST_MEASURED).map(process => element("p", {}, element("b", {}, shown(nameOf(process), 200)), ` ${process.resident!.parts}`, element("br"), element("span", { class: "dim" }, process.resident!.heap)));
}

function nameOf(process: Process): string {
  return `${process.comm || "unnamed"}${process.pid ? ` (${process.pid})` : ""}${process.ended ? ", ended" : ""}`;
}

function grown(resident: Resident | null): string {
  const growth = resident?.growth_per_minute;
  if (!resident) return "";
  return growth === null || growth === undefined ? "not known" : signed(growth);
}

/** Each process and how it is counted. */
export function hooks(data: PageData): HTMLElement {
  const table = part("table", {}, element("caption", { class: "sr" }, "Processes"));
  const head = ["Process", "Counted", "In use", "Resident", "Resident per minute", "Counted for", "Not counted", "Allocators"];
  table.append(part("thead", {}, part("tr", {}, ...head.map(text => part("th", { scope: "col" }, text)))));
  const inuse = data.values.findIndex(value => value.name === "inuse_space");
  const body = part("tbody");
  const order = [...data.processes].sort((a, b) => (b.resident?.bytes ?? 0) - (a.resident?.bytes ?? 0));
  for (const process of order.slice(0, 200)) {
    const way = `${WAYS[process.hook ?? ""] ?? "not"}${process.not_inline ? `: ${process.not_inline}` : ""}`;
    const total = process.totals[inuse]?.estimate;
    const cells = [shown(nameOf(process), 200), shown(way, 300), total === null || total === undefined ? "not known" : bytes(total), process.resident ? bytes(process.resident.bytes) : "", grown(process.resident), percent(process.coverage),
      process.not_hooked ? `${process.not_hooked} functions or files` : "", shown(process.allocators.join(", "), 200)];
    body.append(part("tr", {}, ...cells.map((text, i) => part("td", { class: "text", "data-title": head[i] }, text))));
  }
  table.append(body);
  return element("div", { class: "table-scroll" }, table);
}
