// A profile for pprof (https://github.com/google/pprof/blob/main/proto/profile.proto), of what a page has.

import { shown } from "./format.ts";
import type { Doc } from "./doc.ts";
import type { PageData } from "./model.ts";

/** Adds a number as protobuf writes it. */
function varint(to: number[], value: number) {
  let rest = BigInt.asUintN(64, BigInt(Math.round(value)));
  for (; rest > 127n; rest >>= 7n) to.push(Number(rest & 127n) | 128);
  to.push(Number(rest));
}

/** A message of fields, each a number or bytes, by their numbers. */
function message(...fields: [number: number, value: number | ArrayLike<number>][]): number[] {
  const all: number[] = [];
  for (const [number, value] of fields) {
    varint(all, (number << 3) | (typeof value === "number" ? 0 : 2));
    varint(all, typeof value === "number" ? value : value.length);
    // Not spread over arguments, of which there may be too many.
    if (typeof value !== "number") for (let i = 0; i < value.length; i++) all.push(value[i]);
  }
  return all;
}

function packed(values: Iterable<number>): number[] {
  const all: number[] = [];
  for (const value of values) varint(all, value);
  return all;
}

/** All stacks with all their values; not compressed, as pprof reads it too. `first`: the value that is shown first. heapbpf reads it by its comments. */
export function pprof({ sheet, columns }: Doc, first: string, of: Pick<PageData, "version" | "host" | "interval" | "criterion">): Uint8Array<ArrayBuffer> {
  const texts = new Map([["", 0]]), parts: number[][] = [];
  const text = (of: string) => texts.get(of) ?? (texts.set(of, texts.size), texts.size - 1);
  const put = (number: number, value: ArrayLike<number>) => parts.push(message([number, value]));
  const { function: functions, file, line } = sheet.frames;
  for (const { info } of columns) put(1, message([1, text(info.name)], [2, text(info.unit)]));
  for (let stack = 0; stack < sheet.count; stack++) {
    const calls = Array.from(sheet.allFramesOf(stack), frame => frame + 1).reverse(), values = columns.map(({ estimate }) => estimate[stack] || 0);
    // Without its process id, or its number of processes.
    const comm = shown((sheet.groups[sheet.group[stack]] ?? "").replace(/ \([^)]*\)$/, ""));
    put(2, message([1, packed(calls)], [2, packed(values)], [3, message([1, text("comm")], [2, text(comm)])]));
  }
  const files = new Map<number, number>();
  functions.forEach((id, frame) => {
    if (!files.has(id)) files.set(id, file[frame]);
    put(4, message([1, frame + 1], [4, message([1, id + 1], [2, line[frame]])]));
  });
  sheet.plain.forEach((name, id) => put(5, message([1, id + 1], [2, text(shown(name, Infinity))], [4, text(shown(sheet.strings[files.get(id) ?? 0], Infinity))])));
  const comments = [`heapbpf ${of.version} on ${shown(of.host)}: values are unbiased estimates`, `criterion=${of.criterion}`].map(text);
  parts.push(message([12, of.interval], ...comments.map((comment): [number, number] => [13, comment]), [14, text(first)]));
  const encoder = new TextEncoder();
  for (const of of texts.keys()) put(6, encoder.encode(of));
  const all = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  parts.reduce((at, part) => (all.set(part, at), at + part.length), 0);
  return all;
}
