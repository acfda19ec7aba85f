// Call trees. Every node comes after its parent.

import type { Origin } from "./colours.ts";
import { hash } from "./format.ts";
import type { Sheet } from "./model.ts";

/** Labels below 0 are not functions. */
export const ROOT = -1, INCOMPLETE = -2, FIRST_GROUP = -3;

export interface Tree {
  label: Int32Array;
  parent: Int32Array;
  first: Int32Array;
  next: Int32Array;
  depth: Int32Array;
  count: number;
  name(label: number): string;
  short(label: number): string;
  /** File, line and module; empty if they are not known. */
  place(label: number): string;
  origin(label: number): Origin;
}

/** A tree that grows. */
export class Builder {
  label = new Int32Array(1024);
  parent = new Int32Array(1024);
  first = new Int32Array(1024);
  next = new Int32Array(1024);
  depth = new Int32Array(1024);
  count = 0;

  add(parent: number, label: number): number {
    const node = this.count++;
    if (node === this.label.length) this.grow();
    this.label[node] = label;
    this.parent[node] = parent;
    this.first[node] = -1;
    if (parent >= 0) {
      this.depth[node] = this.depth[parent] + 1;
      this.next[node] = this.first[parent];
      this.first[parent] = node;
    } else {
      this.next[node] = -1;
    }
    return node;
  }

  private grow() {
    const larger = (old: Int32Array) => {
      const all = new Int32Array(old.length * 2);
      all.set(old);
      return all;
    };
    this.label = larger(this.label);
    this.parent = larger(this.parent);
    this.first = larger(this.first);
    this.next = larger(this.next);
    this.depth = larger(this.depth);
  }

  done(sheet: Sheet): Tree {
    const { label, parent, first, next, depth, count } = this;
    const extra = (id: number) => (id === ROOT ? "all" : id === INCOMPLETE ? "[incomplete]" : sheet.groups[FIRST_GROUP - id]);
    return {
      label, parent, first, next, depth, count,
      name: id => (id >= 0 ? sheet.names[id] : extra(id)),
      short: id => (id >= 0 ? sheet.short[id] : extra(id)),
      place: id => (id >= 0 ? sheet.placeOf(id) : ""),
      origin: id => (id >= 0 ? sheet.originOf(id) : "program"),
    };
  }
}

/** The tree of all stacks, and the node at which each stack ends. */
export function callTree(sheet: Sheet): { tree: Tree; leaf: Int32Array } {
  const builder = new Builder(), root = builder.add(-1, ROOT);
  const leaf = new Int32Array(sheet.count), open: number[] = [], labels: number[] = [];
  const withGroups = sheet.groups.length > 1;
  for (const i of sheet.order()) {
    labels.length = 0;
    if (withGroups) labels.push(FIRST_GROUP - sheet.group[i]);
    if (sheet.cut[i]) labels.push(INCOMPLETE);
    for (const frame of sheet.framesOf(i)) labels.push(sheet.frames.function[frame]);
    let level = 0;
    while (level < open.length && level < labels.length && builder.label[open[level]] === labels[level]) level++;
    open.length = level;
    for (; level < labels.length; level++) open.push(builder.add(level ? open[level - 1] : root, labels[level]));
    leaf[i] = open.length ? open[open.length - 1] : root;
  }
  return { tree: builder.done(sheet), leaf };
}

/** Sizes of all nodes: those of their stacks, without negative ones. */
export function sizes(tree: Tree, leaf: Int32Array, weights: Float64Array): Float64Array {
  const size = new Float64Array(tree.count);
  for (let i = 0; i < leaf.length; i++) if (weights[i] > 0) size[leaf[i]] += weights[i];
  for (let node = tree.count - 1; node > 0; node--) size[tree.parent[node]] += size[node];
  return size;
}

/** For each node whether it is `top` or below it. */
export function below(tree: Tree, top: number): Uint8Array {
  const inside = new Uint8Array(tree.count);
  inside[top] = 1;
  for (let node = top + 1; node < tree.count; node++) if (inside[tree.parent[node]]) inside[node] = 1;
  return inside;
}

/** A number of each node's path, which is the same after a refresh and in a link. */
export function pathHashes(tree: Tree): Uint32Array {
  const of = new Map<number, number>(), hashes = new Uint32Array(tree.count);
  for (let node = 0; node < tree.count; node++) {
    const label = tree.label[node];
    let own = of.get(label);
    // A group's name may have a number of processes in it, which changes.
    if (own === undefined) of.set(label, (own = hash(label <= FIRST_GROUP ? tree.name(label).replace(/ \(.*$/, "") : tree.name(label))));
    const parent = node ? hashes[tree.parent[node]] : 0x811c9dc5;
    hashes[node] = (Math.imul(parent ^ own, 16777619) ^ (own >>> 7)) >>> 0;
  }
  return hashes;
}

export interface FunctionFigures { label: number; total: number; self: number }

/** What each function allocates itself, and with all it calls. A function that calls itself counts once. */
export function functions(tree: Tree, size: Float64Array): FunctionFigures[] {
  const total = new Map<number, number>(), self = new Map<number, number>(), active = new Map<number, number>();
  const path: number[] = [];
  const own = Float64Array.from(size);
  for (let node = tree.count - 1; node > 0; node--) own[tree.parent[node]] -= size[node];
  for (let node = 0; node < tree.count; node++) {
    while (path.length && path[path.length - 1] !== tree.parent[node]) {
      const done = tree.label[path.pop()!];
      active.set(done, active.get(done)! - 1);
    }
    const label = tree.label[node], depth = active.get(label) ?? 0;
    active.set(label, depth + 1);
    path.push(node);
    if (label < 0) continue;
    if (!depth) total.set(label, (total.get(label) ?? 0) + size[node]);
    if (own[node] > 0) self.set(label, (self.get(label) ?? 0) + own[node]);
  }
  return Array.from(total, ([label, total]) => ({ label, total, self: self.get(label) ?? 0 })).sort((a, b) => b.total - a.total);
}

/** Callers and callees of a function, each as a tree whose root is the function, with sizes. */
export function sandwich(tree: Tree, size: Float64Array, label: number, sheet: Sheet): { callers: Sized; callees: Sized } {
  const callers = new Growing(label), callees = new Growing(label);
  // Where a node of the big tree is in the tree of callees; 0: nowhere.
  const at = new Int32Array(tree.count);
  for (let node = 0; node < tree.count; node++) {
    const parent = node ? at[tree.parent[node]] : 0;
    if (parent) {
      at[node] = callees.child(parent - 1, tree.label[node], size[node]) + 1;
      continue;
    }
    if (tree.label[node] !== label) continue;
    at[node] = 1;
    callees.size[0] += size[node];
    callers.size[0] += size[node];
    let place = 0;
    for (let up = tree.parent[node]; up > 0; up = tree.parent[up]) place = callers.child(place, tree.label[up], size[node]);
  }
  return { callers: callers.done(sheet), callees: callees.done(sheet) };
}

export interface Sized { tree: Tree; size: Float64Array }

/** A tree with sizes into which paths are merged. */
class Growing {
  size: number[] = [0];
  private readonly builder = new Builder();
  private readonly children = new Map<number, number>();

  constructor(label: number) {
    this.builder.add(-1, label);
  }

  child(parent: number, label: number, weight: number): number {
    // Labels have at most 2^22 values, nodes 2^30.
    const key = parent * 4194304 + (label + 2097152);
    let node = this.children.get(key);
    if (node === undefined) {
      node = this.builder.add(parent, label);
      this.children.set(key, node);
      this.size.push(0);
    }
    this.size[node] += weight;
    return node;
  }

  done(sheet: Sheet): Sized {
    return { tree: this.builder.done(sheet), size: Float64Array.from(this.size) };
  }
}

/** The size of all matches. What a match is in is counted once. */
export function matched(tree: Tree, size: Float64Array, searched: RegExp): number {
  const hit = new Map<number, boolean>(), inside = new Uint8Array(tree.count);
  let found = 0;
  for (let node = 0; node < tree.count; node++) {
    if (node && inside[tree.parent[node]]) {
      inside[node] = 1;
      continue;
    }
    const label = tree.label[node];
    let matches = hit.get(label);
    if (matches === undefined) hit.set(label, (matches = searched.test(tree.name(label))));
    if (!matches) continue;
    inside[node] = 1;
    found += size[node];
  }
  return found;
}
