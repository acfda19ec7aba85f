// A profile or a comparison, ready to be shown.

import { pause } from "./dom.ts";
import { known } from "./format.ts";
import { columns, growthColumn, keptColumn, Sheet, type Change, type Column, type FrameView, type GrowthData, type KeptData, type Lifetimes, type PageData, type WireBoxes } from "./model.ts";
import { callTree, pathHashes, sizes, type Tree } from "./tree.ts";

export interface Doc {
  sheet: Sheet;
  tree: Tree;
  leaf: Int32Array;
  hashes: Uint32Array;
  columns: Column[];
  lifetimes: (Lifetimes | null)[] | null;
  sizes: { smallest: number[]; largest: number[] } | null;
  changes: Change[] | null;
  boxes: Boxes;
  /** Level of its intervals. */
  confidence: number;
}

/** What is known of a box of the graph besides its size. */
export interface BoxFigures { low: number | null; high: number | null; lifetimes: Lifetimes | null }

/** Figures of boxes: those of a box of one stack are the stack's, those of large boxes come from the daemon. */
export class Boxes {
  private readonly at: Map<number, number>;
  private made: { tree: Tree; stacks: Float64Array; places: Float64Array; sums: Float64Array } | null = null;

  constructor(private readonly wire: WireBoxes = { of: [], low: [], high: [], lifetimes: [] }, private readonly values: string[] = []) {
    this.at = new Map(wire.of.map((sum, i) => [sum, i]));
  }

  /** The figures of a node; null if they are not known. */
  of(it: Pick<Doc, "tree" | "leaf" | "sheet" | "lifetimes">, column: Column, node: number): BoxFigures | null {
    const { stacks, places, sums } = this.sets(it);
    if (stacks[node] === 1) {
      const stack = places[node] - 1;
      return { low: known(column.low[stack]), high: known(column.high[stack]), lifetimes: it.lifetimes?.[stack] ?? null };
    }
    const at = this.at.get(sums[node]), value = this.values.indexOf(column.info.name);
    if (at === undefined) return null;
    const lifetimes = this.wire.lifetimes[at];
    return {
      low: this.wire.low[value]?.[at] ?? null, high: this.wire.high[value]?.[at] ?? null,
      lifetimes: lifetimes && { median: lifetimes[0], temporary: lifetimes[1] },
    };
  }

  /** Of each node, how many stacks end in or below it, and sums of their places and numbers, of which the latter tell sets apart. Made at the first question. */
  private sets({ tree, leaf, sheet }: Pick<Doc, "tree" | "leaf" | "sheet">) {
    if (this.made?.tree !== tree) {
      const sum = (of: (stack: number) => number) => sizes(tree, leaf, Float64Array.from(leaf, (_, stack) => of(stack)));
      this.made = { tree, stacks: sum(() => 1), places: sum(stack => stack + 1), sums: sum(stack => sheet.id[stack] % 2 ** 36) };
    }
    return this.made;
  }
}

async function doc(sheet: Sheet, all: Column[], rest: Pick<Doc, "lifetimes" | "sizes" | "changes" | "boxes" | "confidence">): Promise<Doc> {
  await pause();
  const { tree, leaf } = callTree(sheet);
  await pause();
  return { sheet, tree, leaf, hashes: pathHashes(tree), columns: all, ...rest };
}

/** A profile. The work is done in pieces, so that the page stays alive. */
export async function profileDoc(data: PageData, view: FrameView): Promise<Doc> {
  const sheet = new Sheet(data, data.groups.map(group => group.name), view);
  await pause();
  const boxes = new Boxes(data.boxes, data.values.map(value => value.name));
  return doc(sheet, columns(data), { lifetimes: data.lifetimes, sizes: data.sizes, changes: null, boxes, confidence: data.confidence });
}

/** What grew between two moments. */
export async function growthDoc(data: GrowthData, view: FrameView): Promise<Doc> {
  return doc(new Sheet(data, data.groups, view), [growthColumn(data)], { lifetimes: null, sizes: null, changes: data.rows, boxes: new Boxes(), confidence: data.confidence });
}

/** What was allocated between two moments and kept. */
export async function keptDoc(data: KeptData, view: FrameView): Promise<Doc> {
  return doc(new Sheet(data, data.groups, view), [keptColumn(data)], { lifetimes: null, sizes: null, changes: null, boxes: new Boxes(), confidence: data.confidence });
}

/** The column of a value, or the first. */
export function columnOf(it: Doc, value: string): Column {
  return it.columns.find(column => column.info.name === value) ?? it.columns[0];
}

/** For each node the share of its growth that is of stacks that grew significantly. */
export function significantShare(it: Doc, size: Float64Array): Float64Array | undefined {
  if (!it.changes) return undefined;
  const own = it.columns[0].estimate.map((change, i) => (it.changes![i].significant ? change : 0));
  const significant = sizes(it.tree, it.leaf, own);
  return significant.map((part, node) => (size[node] > 0 ? part / size[node] : 0));
}
