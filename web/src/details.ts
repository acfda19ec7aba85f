// One stack: its figures, its source lines, its lifetimes and sizes.

import { button, drawing, element } from "./dom.ts";
import { bytes, count, figure, interval, intervalTitle, known, percent, seconds, shown } from "./format.ts";
import type { Doc } from "./doc.ts";
import type { Change, Column, Lifetimes, Sheet } from "./model.ts";

export interface Details {
  sheet: Sheet;
  stack: number;
  columns: Column[];
  confidence: number;
  sizes?: { smallest: number; largest: number } | undefined;
  lifetimes?: Lifetimes | null | undefined;
  growth?: Change | undefined;
  onClose(): void;
  onFunction(label: number): void;
}

export function details(it: Details): HTMLElement {
  const { sheet, stack } = it, chain = sheet.chain(stack);
  const title = element("h2", { tabindex: "-1" }, shown(chain.length ? sheet.short[chain[0]] : "[no stack]", 120));
  const head = element("div", { class: "row" }, title, button("Close", it.onClose));
  const group = element("p", { class: "dim" }, shown(sheet.groups[sheet.group[stack]] ?? ""));
  const cut = sheet.cut[stack] ? element("p", { class: "warning" }, `Incomplete: ${shown(sheet.strings[sheet.cut[stack]])}`) : "";
  return element("div", {}, head, group, cut, figures(it), sizes(it), lifetimes(it.lifetimes), frames(it));
}

function figures({ columns, confidence, stack, growth }: Details): HTMLElement {
  const rows = columns.map(column => {
    const ends = interval(known(column.low[stack]), known(column.high[stack]), column.info.unit);
    return element("tr", {}, element("th", { scope: "row" }, column.info.title),
      element("td", { class: "number" }, figure(column.estimate[stack], column.info.unit)),
      element("td", { class: "dim" }, ends), element("td", { class: "number dim" }, column.samples[stack] ? `${count(column.samples[stack])} samples` : ""));
  });
  if (growth) {
    for (const [name, ends] of [["before", growth.before], ["after", growth.after]] as const) {
      rows.push(element("tr", {}, element("th", { scope: "row" }, `in use ${name}`), element("td", { class: "number" }, bytes(ends[0] ?? 0)),
        element("td", { class: "dim" }, interval(ends[1], ends[2], "bytes")), element("td")));
    }
    const judged = growth.q === null ? "cannot be judged" : growth.significant ? "significant" : "not significant";
    rows.push(element("tr", {}, element("th", { scope: "row" }, "growth is"), element("td", { class: "number" }, judged),
      element("td", { class: "dim" }, growth.q === null ? "" : qText(growth.q)), element("td")));
  }
  return element("table", { class: "facts" }, element("caption", { class: "sr" }, `Figures with ${intervalTitle(confidence)}s`), element("tbody", {}, ...rows));
}

/** A q-value, as far as its digits mean something. */
export function qText(q: number): string {
  return q < 1e-6 ? "q < 0.000001" : `q = ${q.toPrecision(2)}`;
}

function sizes({ sizes: it, columns, stack }: Details): HTMLElement | string {
  if (!it || !it.largest) return "";
  const of = (name: string) => columns.find(column => column.info.name === name)?.estimate[stack] ?? 0;
  const mean = of("alloc_objects") > 0 ? `, ${bytes(of("alloc_space") / of("alloc_objects"))} on average` : "";
  const range = it.smallest === it.largest ? `all ${bytes(it.largest)}` : `${bytes(it.smallest)} to ${bytes(it.largest)}${mean}`;
  return element("p", {}, element("b", {}, "Sizes of sampled blocks: "), range);
}

function lifetimeText(it: Lifetimes): string {
  const half = it.median === null ? "more than half are not freed" : `half are freed within ${seconds(it.median)}`;
  return `${half}${it.temporary > 0 ? `; ${percent(it.temporary)} temporary` : ""}`;
}

/** The interval and the lifetimes of a box of the graph, as far as they are known. */
export function boxTexts(view: Doc, column: Column, node: number): string[] {
  const box = view.boxes.of(view, column, node);
  if (!box) return [];
  const ends = interval(box.low, box.high, column.info.unit);
  return [ends && ends !== "exact" ? `${intervalTitle(view.confidence)}: ${ends}` : ends, box.lifetimes ? `Lifetimes: ${lifetimeText(box.lifetimes)}` : ""].filter(text => text);
}

const WIDE = 320, TALL = 110, EDGE = 260;

/** The lifetime curve. Beyond its end, blocks are still in use: how long they live is not known. */
function lifetimes(it: Lifetimes | null | undefined): HTMLElement | string {
  if (!it) return "";
  const text = lifetimeText(it);
  const title = element("p", {}, element("b", {}, "Lifetimes: "), text);
  const curve = it.curve ?? [];
  if (curve.length < 2) return title;
  const last = curve[curve.length - 1], longest = last[0] || 1;
  // Lifetimes spread over many orders of magnitude.
  const scale = (t: number) => (EDGE * Math.log1p((t / longest) * 999)) / Math.log(1000);
  const y = (share: number) => 8 + (TALL - 28) * (1 - share);
  let path = `M0 ${y(1)}`, share = 1;
  for (const [t, next] of curve) {
    path += `H${scale(t).toFixed(1)}V${y(next).toFixed(1)}`;
    share = next;
  }
  const tail = share > 0.0005 ? `${percent(share)} live longer than ${seconds(longest)}, as far as is known` : `none lives longer than ${seconds(longest)}`;
  const picture = drawing("svg", { viewBox: `0 0 ${WIDE} ${TALL}`, class: "curve", role: "img", "aria-label": `Share of blocks that live longer: ${text}. ${tail}.` },
    drawing("path", { d: `M0 ${y(0)}H${WIDE}`, class: "axis" }),
    share > 0.0005 ? drawing("rect", { x: EDGE, y: y(share), width: WIDE - EDGE, height: y(0) - y(share), class: "tail" }) : null,
    share > 0.0005 ? drawing("path", { d: `M${EDGE} ${y(share)}H${WIDE}`, class: "censored" }) : null,
    drawing("path", { d: path, class: "line" }),
    drawing("text", { x: 0, y: TALL - 6 }, "0"), drawing("text", { x: EDGE, y: TALL - 6, "text-anchor": "middle" }, seconds(longest)),
    share > 0.0005 ? drawing("text", { x: WIDE, y: TALL - 6, "text-anchor": "end" }, "not freed") : null);
  return element("div", {}, title, picture, element("p", { class: "dim" }, tail));
}

function frames({ sheet, stack, onFunction }: Details): HTMLElement {
  const list = element("ol", { class: "frames" });
  for (const frame of Array.from(sheet.framesOf(stack)).reverse()) {
    const label = sheet.frames.function[frame], module = sheet.strings[sheet.frames.module[frame]], place = sheet.place(frame);
    const name = button(shown(sheet.names[label]), () => onFunction(label), { class: "link", title: "Callers and callees" });
    const where = [shown(place), place === module ? "" : shown(module), sheet.frames.inlined[frame] ? "inlined" : ""].filter(text => text).join(" · ");
    list.append(element("li", {}, name, element("small", { class: "dim" }, where)));
  }
  return element("div", {}, element("h3", {}, "Calls, innermost first"), list);
}
