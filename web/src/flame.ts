// A flame graph on a canvas. Only what is in sight and wide enough to be seen is drawn.

import { figure, hash, percent, shown } from "./format.ts";
import { element } from "./dom.ts";
import { FIRST_GROUP, INCOMPLETE, type Tree } from "./tree.ts";

const ROW = 19;
/** Narrowest box that is drawn, in pixels. */
const LEAST = 0.5;
/** More boxes than there ever are. */
const BOXES = 2 ** 24;

export interface Shown {
  tree: Tree;
  /** Of each node, a number that is the same in other trees. */
  hashes?: Uint32Array;
  size: Float64Array;
  unit: string;
  /** Share of each node that grew significantly; colours mean that, and nothing else, if it is there. */
  significant?: Float64Array;
}

export interface Options {
  label: string;
  /** The root at the top. */
  icicle: boolean;
  onZoom(node: number): void;
}

interface Boxes { node: Int32Array; x: Float64Array; width: Float64Array; level: Int32Array; count: number; levels: number }

export class FlameGraph {
  readonly root: HTMLElement;
  private readonly scroller: HTMLElement;
  private readonly spacer: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly tip: HTMLElement;
  private readonly live: HTMLElement;
  private shown: Shown | null = null;
  private zoom = 0;
  private selected = 0;
  private pattern: RegExp | null = null;
  private matches = new Map<number, boolean>();
  private colours = new Map<number, string>();
  private boxes: Boxes | null = null;
  private width = 0;
  private scheduled = 0;

  constructor(private readonly options: Options) {
    const keys = "Arrow keys move, Enter zooms, Escape zooms out.";
    this.canvas = element("canvas", { tabindex: "0", role: "application", "aria-label": `${options.label}. ${keys}` });
    this.spacer = element("div", { class: "flame-space" }, this.canvas);
    this.scroller = element("div", { class: "flame-scroll" }, this.spacer);
    this.tip = element("div", { class: "tip", hidden: "" });
    this.live = element("div", { class: "sr", "aria-live": "polite" });
    this.root = element("div", { class: "flame" }, this.scroller, this.tip, this.live);
    this.scroller.addEventListener("scroll", () => this.schedule());
    this.canvas.addEventListener("mousemove", event => this.hover(event));
    this.canvas.addEventListener("mouseleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", event => {
      const node = this.at(event);
      if (node !== null) this.options.onZoom(node);
    });
    this.canvas.addEventListener("keydown", event => this.key(event));
    this.canvas.addEventListener("focus", () => this.schedule());
    this.canvas.addEventListener("blur", () => this.schedule());
    new ResizeObserver(() => {
      if (this.scroller.clientWidth !== this.width) this.layout();
    }).observe(this.scroller);
  }

  show(shown: Shown, zoom: number) {
    const before = this.shown, other = before?.tree !== shown.tree;
    const same = (node: number, old: number) => before?.hashes !== undefined && shown.hashes?.[node] === before.hashes[old];
    // After a refresh, what is selected and in sight stays so.
    const stays = same(zoom, this.zoom), selected = stays && shown.hashes ? shown.hashes.indexOf(before!.hashes![this.selected]) : -1;
    this.shown = shown;
    if (other) {
      this.colours.clear();
      this.matches.clear();
    }
    if (shown.significant) this.colours.clear();
    this.zoom = zoom < shown.tree.count ? zoom : 0;
    this.selected = selected >= 0 ? selected : this.zoom;
    this.layout(stays);
  }

  /** What is to stand out from the next `show` on. */
  search(pattern: RegExp | null) {
    if (this.pattern?.source === pattern?.source) return;
    this.pattern = pattern;
    this.matches.clear();
  }

  turn(icicle: boolean) {
    if (this.options.icicle === icicle) return;
    this.options.icicle = icicle;
    this.layout();
  }

  redraw() {
    this.colours.clear();
    this.schedule();
  }

  /** Whether a label matches the search. */
  matching(label: number): boolean {
    if (!this.pattern || !this.shown) return false;
    let found = this.matches.get(label);
    if (found === undefined) this.matches.set(label, (found = this.pattern.test(this.shown.tree.name(label))));
    return found;
  }

  private layout(stays = false) {
    if (!this.shown) return;
    // From the root, which may be below.
    const scrolled = this.options.icicle ? this.scroller.scrollTop : this.scroller.scrollHeight - this.scroller.scrollTop;
    this.width = this.scroller.clientWidth;
    this.boxes = boxesOf(this.shown, this.zoom, this.width);
    const height = this.boxes.levels * ROW;
    this.spacer.style.height = `${height}px`;
    this.spacer.style.minHeight = `${ROW}px`;
    const tall = Math.min(height, this.scroller.clientHeight || height);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${tall}px`;
    this.canvas.width = Math.max(1, Math.round(this.width * ratio));
    this.canvas.height = Math.max(1, Math.round(tall * ratio));
    this.scroller.scrollTop = this.options.icicle ? (stays ? scrolled : 0) : height - (stays ? scrolled : 0);
    this.draw();
  }

  private schedule() {
    if (!this.scheduled) {
      this.scheduled = requestAnimationFrame(() => {
        this.scheduled = 0;
        this.draw();
      });
    }
  }

  private row(level: number): number {
    return this.options.icicle ? level : this.boxes!.levels - 1 - level;
  }

  private y(level: number): number {
    return this.row(level) * ROW - this.scroller.scrollTop;
  }

  private draw() {
    const { boxes, shown: it } = this;
    if (!boxes || !it) return;
    const pen = this.canvas.getContext("2d")!, ratio = window.devicePixelRatio || 1;
    const tall = this.canvas.height / ratio, ancestors = it.tree.depth[this.zoom];
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, this.width, tall);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.direction = "ltr";
    const letter = pen.measureText("abcdefghijklmnopqrstuvwxyz").width / 26;
    // There may be tens of thousands of boxes: what the browser is asked or told for each takes most of the time.
    const { pattern } = this, { level: levels, node: nodes, x: left, width: widths } = boxes, scrolled = this.scroller.scrollTop;
    // Of boxes narrower than a pixel, one is drawn in each: the last column with one, by level.
    const column = new Int32Array(boxes.levels).fill(-1), texts: number[] = [];
    // Boxes of a function are drawn one after the other, because they have one colour.
    const order = new Float64Array(boxes.count);
    let count = 0;
    for (let i = 0; i < boxes.count; i++) {
      const level = levels[i], y = this.row(level) * ROW - scrolled;
      if (y < -ROW || y > tall) continue;
      const width = widths[i];
      if (width < 1 && pattern === null) {
        if (column[level] === Math.floor(left[i])) continue;
        column[level] = Math.floor(left[i]);
      }
      if (width > 28) texts.push(i);
      order[count++] = it.tree.label[nodes[i]] * BOXES + i;
    }
    let alpha = 1, style = "";
    const fade = (level: number, found: boolean) => {
      const wanted = level < ancestors || (pattern && !found) ? 0.5 : 1;
      if (wanted !== alpha) pen.globalAlpha = alpha = wanted;
    };
    for (const key of order.subarray(0, count).sort()) {
      const label = Math.floor(key / BOXES), i = key - label * BOXES, found = pattern !== null && this.matching(label);
      fade(levels[i], found);
      const colour = found ? "#e87bdc" : this.colour(nodes[i], label);
      if (colour !== style) pen.fillStyle = style = colour;
      pen.fillRect(left[i], this.row(levels[i]) * ROW - scrolled, Math.max(widths[i] - 0.6, 0.4), ROW - 1);
    }
    pen.fillStyle = "#14181c";
    for (const i of texts) {
      const label = it.tree.label[nodes[i]];
      fade(levels[i], pattern !== null && this.matching(label));
      pen.fillText(fitted(pen, shown(it.tree.short(label), 200), widths[i] - 8, letter), left[i] + 4, this.row(levels[i]) * ROW - scrolled + ROW / 2);
    }
    pen.globalAlpha = 1;
    if (document.activeElement === this.canvas) this.outline(pen);
  }

  private outline(pen: CanvasRenderingContext2D) {
    const boxes = this.boxes!;
    const i = boxes.node.subarray(0, boxes.count).indexOf(this.selected);
    if (i < 0) return;
    pen.strokeStyle = getComputedStyle(this.root).getPropertyValue("--text");
    pen.lineWidth = 2;
    pen.strokeRect(boxes.x[i] + 1, this.y(boxes.level[i]) + 1, Math.max(boxes.width[i] - 2.6, 1), ROW - 3);
  }

  private colour(node: number, label: number): string {
    const it = this.shown!;
    if (it.significant) {
      const share = it.significant[node];
      return share > 0 ? `hsl(12 ${40 + share * 45}% ${78 - share * 18}%)` : node === 0 ? "#b9bec6" : "#c9cdd3";
    }
    let colour = this.colours.get(label);
    if (colour === undefined) {
      const h = (hash(it.tree.name(label)) % 1000) / 1000;
      if (label <= FIRST_GROUP) colour = `hsl(${210 + h * 30} 40% ${74 + h * 8}%)`;
      else if (label < 0) colour = label === INCOMPLETE ? "hsl(30 30% 72%)" : "#b9bec6";
      else if (it.tree.name(label).startsWith("[")) colour = `hsl(30 ${20 + h * 15}% ${68 + h * 8}%)`;
      else colour = `hsl(${95 + h * 70} ${42 + h * 18}% ${62 + h * 14}%)`;
      this.colours.set(label, colour);
    }
    return colour;
  }

  private at(event: MouseEvent): number | null {
    const boxes = this.boxes;
    if (!boxes) return null;
    const area = this.canvas.getBoundingClientRect(), x = event.clientX - area.left;
    const row = Math.floor((event.clientY - area.top + this.scroller.scrollTop) / ROW);
    const level = this.options.icicle ? row : boxes.levels - 1 - row;
    for (let i = 0; i < boxes.count; i++) {
      if (boxes.level[i] === level && x >= boxes.x[i] && x < boxes.x[i] + boxes.width[i]) return boxes.node[i];
    }
    return null;
  }

  private about(node: number): string {
    const it = this.shown!, size = it.size[node];
    let own = size;
    for (let child = it.tree.first[node]; child >= 0; child = it.tree.next[child]) own -= it.size[child];
    const self = own > size * 1e-9 && own < size ? `, of which ${figure(own, it.unit)} itself` : "";
    return `${figure(size, it.unit)} (${percent(size / it.size[0])})${self}`;
  }

  private hover(event: MouseEvent) {
    const node = this.at(event);
    this.tip.hidden = node === null;
    if (node === null) return;
    const it = this.shown!;
    this.tip.replaceChildren(shown(it.tree.name(it.tree.label[node])), element("small", {}, this.about(node)));
    const left = Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8);
    const top = event.clientY + 18 + this.tip.offsetHeight > innerHeight ? event.clientY - this.tip.offsetHeight - 10 : event.clientY + 18;
    this.tip.style.left = `${Math.max(4, left)}px`;
    this.tip.style.top = `${Math.max(4, top)}px`;
  }

  private key(event: KeyboardEvent) {
    const it = this.shown;
    if (!it) return;
    const { tree, size } = it;
    const inward = this.options.icicle ? "ArrowDown" : "ArrowUp", outward = this.options.icicle ? "ArrowUp" : "ArrowDown";
    const siblings = () => childrenOf(it, tree.parent[this.selected]);
    let to: number | undefined = this.selected;
    if (event.key === inward) to = childrenOf(it, this.selected)[0];
    else if (event.key === outward) to = tree.parent[this.selected];
    else if (event.key === "ArrowRight" && this.selected) to = siblings()[siblings().indexOf(this.selected) + 1];
    else if (event.key === "ArrowLeft" && this.selected) to = siblings()[siblings().indexOf(this.selected) - 1];
    else if (event.key === "Enter" || event.key === " ") this.options.onZoom(this.selected);
    else if (event.key === "Escape") this.options.onZoom(Math.max(0, tree.parent[this.zoom]));
    else if (event.key === "Home") to = 0;
    else return;
    event.preventDefault();
    if (to !== undefined && to >= 0 && size[to] > 0) this.selected = to;
    this.live.textContent = `${shown(tree.name(tree.label[this.selected]))}: ${this.about(this.selected)}`;
    const y = this.y(tree.depth[this.selected]);
    if (y < 0) this.scroller.scrollTop += y;
    if (y + ROW > this.scroller.clientHeight) this.scroller.scrollTop += y + ROW - this.scroller.clientHeight;
    this.schedule();
  }
}

/** Children with a size, largest first. */
function childrenOf({ tree, size }: Shown, node: number): number[] {
  const all: number[] = [];
  for (let child = tree.first[node]; child >= 0; child = tree.next[child]) if (size[child] > 0) all.push(child);
  return all.sort((a, b) => size[b] - size[a]);
}

/** Text that fits into so many pixels. */
function fitted(pen: CanvasRenderingContext2D, text: string, room: number, letter: number): string {
  // Short enough for sure, or measured.
  if (text.length * letter * 0.8 <= room && pen.measureText(text).width <= room) return text;
  let low = 0, high = Math.min(text.length, Math.ceil(room / (letter * 0.35)));
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? `${text.slice(0, low)}…` : "";
}

/** Where everything is that is wide enough to be seen. */
export function boxesOf(it: Shown, zoom: number, width: number): Boxes {
  const { tree, size } = it;
  let room = 4096;
  const boxes: Boxes = {
    node: new Int32Array(room), x: new Float64Array(room), width: new Float64Array(room), level: new Int32Array(room), count: 0, levels: 0,
  };
  const put = (node: number, x: number, wide: number, level: number) => {
    if (boxes.count === room) {
      room *= 2;
      const larger = <T extends Int32Array | Float64Array>(old: T, all: T): T => (all.set(old), all);
      boxes.node = larger(boxes.node, new Int32Array(room));
      boxes.x = larger(boxes.x, new Float64Array(room));
      boxes.width = larger(boxes.width, new Float64Array(room));
      boxes.level = larger(boxes.level, new Int32Array(room));
    }
    const i = boxes.count++;
    boxes.node[i] = node;
    boxes.x[i] = x;
    boxes.width[i] = wide;
    boxes.level[i] = level;
    boxes.levels = Math.max(boxes.levels, level + 1);
  };
  for (let up = tree.parent[zoom]; up >= 0; up = tree.parent[up]) put(up, 0, width, tree.depth[up]);
  if (!(size[zoom] > 0)) {
    put(zoom, 0, width, tree.depth[zoom]);
    return boxes;
  }
  // Two lists, because one of whole numbers and others is slow.
  const scale = width / size[zoom], pending = [zoom], places = [0], seen: number[] = [];
  while (pending.length) {
    const node = pending.pop()!;
    let x = places.pop()!;
    put(node, x, size[node] * scale, tree.depth[node]);
    seen.length = 0;
    for (let child = tree.first[node]; child >= 0; child = tree.next[child]) if (size[child] * scale >= LEAST) seen.push(child);
    if (seen.length > 1) seen.sort((a, b) => size[b] - size[a]);
    for (const child of seen) {
      pending.push(child);
      places.push(x);
      x += size[child] * scale;
    }
  }
  return boxes;
}
