// The columns of the tables of stacks and functions.

import type { Doc } from "./doc.ts";
import { button, element } from "./dom.ts";
import { count, figure, interval, intervalTitle, known, percent, seconds, shown } from "./format.ts";
import type { Column } from "./model.ts";
import { bar, type TableColumn } from "./table.ts";
import { below, type FunctionFigures } from "./tree.ts";

/** The stacks below a node that a search finds, and the largest value with its error bar. */
export function stackRows(view: Doc, column: Column, zoom: number, searched: RegExp | null): { rows: number[]; most: number } {
  const { sheet } = view, inside = zoom ? below(view.tree, zoom) : null;
  const hits = searched ? sheet.names.map(name => searched.test(name)) : null;
  const rows: number[] = [];
  let most = 0;
  for (let stack = 0; stack < sheet.count; stack++) {
    if (inside && !inside[view.leaf[stack]]) continue;
    if (hits && !sheet.framesOf(stack).some(frame => hits[sheet.frames.function[frame]])) continue;
    rows.push(stack);
    most = Math.max(most, column.high[stack] || 0, column.estimate[stack]);
  }
  return { rows, most };
}

export function stackColumns(view: Doc, column: Column, most: number, open: (stack: number) => void): TableColumn<number>[] {
  const { changes, lifetimes } = view, { unit } = column.info;
  const columns: TableColumn<number>[] = [
    { key: "stack", title: "Stack", number: false, value: stack => chainName(view, stack), cell: stack => stackCell(view, stack, open) },
    { key: "value", title: column.info.title, number: true, value: stack => column.estimate[stack], cell: stack => valueCell(view.confidence, column, stack, most) },
  ];
  if (changes) {
    columns.push({
      key: "q", title: "Significant", number: true, value: stack => 1 - (changes[stack].q ?? 1),
      cell: stack => element("span", { class: changes[stack].significant ? "significant" : "dim" }, changes[stack].significant ? "yes" : "no"),
    });
    return columns;
  }
  columns.push({ key: "samples", title: "Samples", number: true, value: stack => column.samples[stack], cell: stack => count(column.samples[stack]) });
  for (const other of view.columns.filter(it => it !== column && /_space$/.test(it.info.name))) {
    columns.push({ key: other.info.name, title: other.info.title, number: true, value: stack => other.estimate[stack], cell: stack => figure(other.estimate[stack], unit) });
  }
  if (lifetimes?.some(it => it)) {
    columns.push({ key: "median", title: "Median lifetime", number: true, value: stack => lifetimes[stack]?.median ?? Infinity, cell: stack => medianText(view, stack) });
  }
  return columns;
}

function valueCell(confidence: number, column: Column, stack: number, most: number): HTMLElement {
  const { unit } = column.info, ends = interval(known(column.low[stack]), known(column.high[stack]), unit);
  const text = element("span", { title: ends ? `${intervalTitle(confidence)}: ${ends}` : "" }, figure(column.estimate[stack], unit));
  return element("span", {}, bar(column.estimate[stack], column.low[stack], column.high[stack], most), text, ends ? element("span", { class: "sr" }, ` (${ends})`) : null);
}

function stackCell(view: Doc, stack: number, open: (stack: number) => void): HTMLElement {
  const { sheet } = view, chain = sheet.chain(stack);
  const name = chain.length ? sheet.short[chain[0]] : "[no stack]";
  const rest = chain.slice(1, 12).map(f => shown(sheet.short[f], 80)).join(" ← ");
  return element("div", {}, button(shown(name, 200), () => open(stack), { class: "link" }), element("small", { class: "dim" }, rest));
}

export function functionColumns(view: Doc, column: Column, total: number, open: (name: string) => void): TableColumn<FunctionFigures>[] {
  const { tree } = view, { unit, title } = column.info;
  return [
    { key: "name", title: "Function", number: false, value: row => tree.name(row.label), cell: row => button(shown(tree.name(row.label), 300), () => open(tree.name(row.label)), { class: "link" }) },
    { key: "total", title: `${title}, with callees`, number: true, value: row => row.total, cell: row => element("span", {}, bar(row.total, NaN, NaN, total), figure(row.total, unit)) },
    { key: "share", title: "Share", number: true, value: row => row.total, cell: row => percent(row.total / total) },
    { key: "self", title: "Itself", number: true, value: row => row.self, cell: row => figure(row.self, unit) },
  ];
}

function chainName(view: Doc, stack: number): string {
  const chain = view.sheet.chain(stack);
  return chain.length ? view.sheet.short[chain[0]] : "";
}

function medianText(view: Doc, stack: number): string {
  const it = view.lifetimes?.[stack];
  if (!it) return "";
  return it.median === null ? "not freed" : seconds(it.median);
}
