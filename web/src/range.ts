// What lies between two marks on the timeline: what was allocated there and kept, or how much memory in use grew.

import { growthDoc, keptDoc, type Doc } from "./doc.ts";
import { button, byId, element, renew } from "./dom.ts";
import { bytes, clock, count } from "./format.ts";
import { nearest } from "./history.ts";
import type { Server } from "./live.ts";
import type { Figure, FrameView, GrowthData, KeptData } from "./model.ts";

/** Values that are of a range. */
export const RANGE_VALUES = { kept: "allocated between the marks and kept", growth: "growth between the marks" } as const;
export type RangeValue = keyof typeof RANGE_VALUES;

export function isRange(value: string): value is RangeValue {
  return value in RANGE_VALUES;
}

/** A value of a range, ready to be shown. */
export interface Range { value: RangeValue; from: number; to: number; doc: Doc; text: string }

/** Asks the server for a value of a range. */
export async function askRange(server: Server, value: RangeValue, from: number, to: number, frames: FrameView): Promise<Range | { failed: string }> {
  const answer = await server.json<GrowthData | KeptData>(`page/${value}?from=${from}&to=${to}`);
  if (!("data" in answer)) return { failed: "gone" in answer ? "heapbpf does not answer." : answer.refused };
  const { data } = answer, grows = "rows" in data;
  return { value, from, to, doc: await (grows ? growthDoc(data, frames) : keptDoc(data, frames)), text: grows ? growthText(data) : keptText(data) };
}

const band = (low: number | null, high: number | null) => (low !== null && high !== null && low !== high ? ` [${bytes(low)}, ${bytes(high)}]` : "");

export function growthText(data: GrowthData): string {
  const [change, low, high] = data.total.change, significant = data.rows.filter(row => row.significant).length;
  const stacks = significant ? `${count(significant)} ${significant === 1 ? "stack" : "stacks"} grew significantly (coloured)` : "no stack grew significantly";
  return `${clock(data.from_ms)} to ${clock(data.to_ms)}: ${bytes(change ?? 0)}${band(low, high)} net; ${stacks}`;
}

export function keptText(data: KeptData): string {
  const total: Figure = data.total, of = data.allocated === null ? "" : ` of ${bytes(data.allocated)} allocated`;
  const notes = data.notes.map(note => `; ${note}`).join("");
  const left = data.left_out ? `; ${count(data.left_out)} small stacks are left out` : "";
  return `${clock(data.from_ms)} to ${clock(data.to_ms)}:${of ? `${of},` : ""} ${bytes(total.estimate ?? 0)}${band(total.low, total.high)} in use at the end${notes}${left}`;
}

/** Two moments that the server keeps, as near to these times as there are, or why there are none. */
export function ends(moments: number[], from: number, to: number): [number, number] | null {
  if (moments.length < 2) return null;
  const [first, last] = [nearest(moments, Math.min(from, to)), nearest(moments, Math.max(from, to))];
  if (first !== last) return [first, last];
  const at = moments.indexOf(first);
  return at > 0 ? [moments[at - 1], last] : [first, moments[1]];
}

/** Sliders for both marks, and what they are for. */
export function showMarks(moments: number[], from: number, to: number, mark: (from: number, to: number, value?: RangeValue) => void) {
  const box = byId("marks");
  // A slider that is being moved stays as it is.
  if (box.contains(document.activeElement) && document.activeElement instanceof HTMLInputElement) return;
  const last = moments[moments.length - 1] ?? 0, first = moments[0] ?? 0;
  const slider = (name: string, at: number, act: (time: number) => void) => {
    const index = Math.max(0, moments.indexOf(nearest(moments, at)));
    const input = element("input", { type: "range", min: "0", max: String(Math.max(0, moments.length - 1)), value: String(index), "aria-label": `Mark ${name}` });
    input.setAttribute("aria-valuetext", clock(moments[index]));
    input.addEventListener("change", () => act(moments[Number(input.value)]));
    return element("label", {}, `${name} ${at ? clock(at) : "–"} `, input);
  };
  renew(box,
    slider("A", from || first, time => mark(time, to || last)), slider("B", to || last, time => mark(from || first, time)),
    button("Growth since A", () => mark(from || first, last, "growth")),
    element("span", { class: "dim" }, "Drag over the timeline to see what was allocated in that time and kept."));
}
