// A profile or a comparison, ready to be shown.

import { pause } from "./dom.ts";
import { columns, growthColumn, keptColumn, Sheet, type Change, type Column, type GrowthData, type KeptData, type Lifetimes, type PageData } from "./model.ts";
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
}

async function doc(sheet: Sheet, all: Column[], rest: Pick<Doc, "lifetimes" | "sizes" | "changes">): Promise<Doc> {
  await pause();
  const { tree, leaf } = callTree(sheet);
  await pause();
  return { sheet, tree, leaf, hashes: pathHashes(tree), columns: all, ...rest };
}

/** A profile. The work is done in pieces, so that the page stays alive. `all`: with the frames of libraries. */
export async function profileDoc(data: PageData, all: boolean): Promise<Doc> {
  const sheet = new Sheet(data, data.groups.map(group => group.name), all);
  await pause();
  return doc(sheet, columns(data), { lifetimes: data.lifetimes, sizes: data.sizes, changes: null });
}

/** What grew between two moments. */
export async function growthDoc(data: GrowthData, all: boolean): Promise<Doc> {
  return doc(new Sheet(data, data.groups, all), [growthColumn(data)], { lifetimes: null, sizes: null, changes: data.rows });
}

/** What was allocated between two moments and kept. */
export async function keptDoc(data: KeptData, all: boolean): Promise<Doc> {
  return doc(new Sheet(data, data.groups, all), [keptColumn(data)], { lifetimes: null, sizes: null, changes: null });
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
