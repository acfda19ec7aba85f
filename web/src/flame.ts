// A flame graph on a canvas. Only what is in sight and wide enough to be seen is drawn.

import { figure, hash, percent, shown } from "./format.ts";
import { element } from "./dom.ts";
import { BOX_TEXT, bracketColour, faded, FOUND, GREY, groupColour, growthColour, MISSING, originColour, type Colour } from "./colours.ts";
import { Rows } from "./pixels.ts";
import { FIRST_GROUP, INCOMPLETE, type Tree } from "./tree.ts";

const ROW = 19;
/** Narrowest box that is drawn, in pixels. */
const LEAST = 0.5;
/** Narrowest box with a text, in pixels. */
const LEAST_TEXT = 28;

export interface Shown {
  tree: Tree;
  /** Of each node, a number that is the same in other trees. */
  hashes?: Uint32Array;
  size: Float64Array;
  unit: string;
  /** Share of each node that grew significantly; colours mean that, and nothing else, if it is there. */
  significant?: Float64Array;
  /** What is known of a node besides its size. */
  more?: (node: number) => string[];
}

export interface Options {
  label: string;
  /** The root at the top. */
  icicle: boolean;
  onZoom(node: number): void;
}

/** Boxes, by columns. */
class Boxes {
  node = new Int32Array(16384);
  x = new Float64Array(16384);
  width = new Float64Array(16384);
  level = new Int32Array(16384);
  count = 0;
  levels = 0;

  put(node: number, x: number, width: number, level: number) {
    if (this.count === this.node.length) this.grow();
    const i = this.count++;
    this.node[i] = node;
    this.x[i] = x;
    this.width[i] = width;
    this.level[i] = level;
    if (level >= this.levels) this.levels = level + 1;
  }

  private grow() {
    const larger = <T extends Int32Array | Float64Array>(old: T, all: T): T => (all.set(old), all), room = 2 * this.count;
    this.node = larger(this.node, new Int32Array(room));
    this.x = larger(this.x, new Float64Array(room));
    this.width = larger(this.width, new Float64Array(room));
    this.level = larger(this.level, new Int32Array(room));
  }
}

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
  private colours = new Map<number, Colour>();
  private texts = new Map<number, string>();
  private readonly letters = new Float64Array(128);
  /** Of the picture that is drawn: a larger one than the last needs no other memory, if it fits into the window. */
  private memory = new ArrayBuffer(0);
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
      this.texts.clear();
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
    this.boxes = boxesOf(this.shown, this.zoom, this.width, this.boxes);
    const height = this.boxes.levels * ROW;
    this.spacer.style.height = `${height}px`;
    this.spacer.style.minHeight = `${ROW}px`;
    const tall = Math.min(height, this.scroller.clientHeight || height);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${tall}px`;
    const across = Math.max(1, Math.round(this.width * ratio)), down = Math.max(1, Math.round(tall * ratio));
    // A canvas whose size is set is made again, even if it has that size.
    if (this.canvas.width !== across) this.canvas.width = across;
    if (this.canvas.height !== down) this.canvas.height = down;
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
    const { boxes, shown: it, pattern } = this;
    if (!boxes || !it) return;
    const pen = this.canvas.getContext("2d")!, ratio = window.devicePixelRatio || 1, { width: across, height: down } = this.canvas;
    const ancestors = it.tree.depth[this.zoom], { level: levels, node: nodes, x: left, width: widths } = boxes, texts: number[] = [];
    if (this.memory.byteLength < 4 * across * down) this.memory = new ArrayBuffer(4 * across * Math.max(down, Math.ceil(innerHeight * ratio)));
    const bytes = new Uint8ClampedArray(this.memory, 0, 4 * across * down);
    const scrolled = this.scroller.scrollTop, y = (level: number) => this.row(level) * ROW - scrolled;
    const rows = new Rows(bytes, across, down, boxes.levels, level => y(level) * ratio, level => (y(level) + ROW - 1) * ratio);
    const fades = (level: number, found: boolean) => level < ancestors || (pattern !== null && !found);
    for (let i = 0; i < boxes.count; i++) {
      const level = levels[i];
      if (!rows.has(level)) continue;
      const node = nodes[i], label = it.tree.label[node], found = pattern !== null && this.matching(label);
      const colour = found ? FOUND : this.colour(node, label);
      rows.box(level, left[i] * ratio, (left[i] + widths[i]) * ratio, fades(level, found) ? faded(colour) : colour, found);
      if (widths[i] > LEAST_TEXT) texts.push(i);
    }
    rows.finish();
    pen.putImageData(new ImageData(bytes, across, down), 0, 0);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    pen.direction = "ltr";
    pen.fillStyle = BOX_TEXT;
    for (const i of texts) {
      const label = it.tree.label[nodes[i]], text = titled(pen, this.text(label), widths[i] - 8, this.letters);
      if (!text) continue;
      pen.globalAlpha = fades(levels[i], pattern !== null && this.matching(label)) ? 0.5 : 1;
      pen.fillText(text, left[i] + 4, y(levels[i]) + ROW / 2);
    }
    pen.globalAlpha = 1;
    if (document.activeElement === this.canvas) this.outline(pen);
  }

  private text(label: number): string {
    let text = this.texts.get(label);
    if (text === undefined) this.texts.set(label, (text = shown(this.shown!.tree.short(label), 200)));
    return text;
  }

  private outline(pen: CanvasRenderingContext2D) {
    const boxes = this.boxes!;
    const i = boxes.node.subarray(0, boxes.count).indexOf(this.selected);
    if (i < 0) return;
    pen.strokeStyle = getComputedStyle(this.root).getPropertyValue("--text");
    pen.lineWidth = 2;
    pen.strokeRect(boxes.x[i] + 1, this.y(boxes.level[i]) + 1, Math.max(boxes.width[i] - 2.6, 1), ROW - 3);
  }

  private colour(node: number, label: number): Colour {
    const it = this.shown!;
    if (it.significant) return node === 0 ? GREY : growthColour(it.significant[node]);
    let colour = this.colours.get(label);
    if (colour === undefined) {
      const h = (hash(it.tree.name(label)) % 1000) / 1000;
      if (label <= FIRST_GROUP) colour = groupColour(h);
      else if (label < 0) colour = label === INCOMPLETE ? MISSING : GREY;
      else if (it.tree.name(label).startsWith("[")) colour = bracketColour(h);
      else colour = originColour(it.tree.origin(label), h);
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
    const { tree } = this.shown!, label = tree.label[node], place = tree.place(label);
    const lines = [this.about(node), ...(this.shown!.more?.(node) ?? []), place ? shown(place, 300) : ""].filter(text => text);
    this.tip.replaceChildren(shown(tree.name(label)), ...lines.map(text => element("small", {}, text)));
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
    this.live.textContent = `${shown(tree.name(tree.label[this.selected]))}: ${[this.about(this.selected), ...(it.more?.(this.selected) ?? [])].join("; ")}`;
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

/** The name of a function as far as it fits: its own name, without what that is in, rather than the beginning. */
function titled(pen: CanvasRenderingContext2D, name: string, room: number, letters: Float64Array): string {
  const text = fitted(pen, name, room, letters), own = name.lastIndexOf("::");
  return text === name || own < 0 ? text : fitted(pen, name.slice(own + 2), room, letters);
}

/** The beginning of a text that fits into so many pixels. `letters`: widths of plain letters; 0 where they are not known yet. */
function fitted(pen: CanvasRenderingContext2D, text: string, room: number, letters: Float64Array): string {
  const width = (letter: number) => letters[letter] || (letters[letter] = pen.measureText(String.fromCharCode(letter)).width);
  // No text has the letter 0 here.
  const dots = letters[0] || (letters[0] = pen.measureText("…").width);
  let used = 0, cut = 0;
  for (let i = 0; i < text.length; i++) {
    const letter = text.charCodeAt(i);
    // Widths of other writing do not add up.
    if (letter > 127) return measured(pen, text, room);
    used += width(letter);
    if (used + dots <= room) cut = i + 1;
    if (used > room) return cut > 1 ? `${text.slice(0, cut)}…` : "";
  }
  return text;
}

/** The same for any writing: each length that is tried is measured. */
function measured(pen: CanvasRenderingContext2D, text: string, room: number): string {
  if (pen.measureText(text).width <= room) return text;
  let low = 0, high = text.length;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (pen.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
    else high = middle - 1;
  }
  return low > 1 ? `${text.slice(0, low)}…` : "";
}

/** Where everything is that is wide enough to be seen. `old`: boxes that are no longer needed, whose memory is used again. */
export function boxesOf(it: Shown, zoom: number, width: number, old: Boxes | null = null): Boxes {
  const { tree, size } = it, boxes = old ?? new Boxes();
  boxes.count = boxes.levels = 0;
  for (let up = tree.parent[zoom]; up >= 0; up = tree.parent[up]) boxes.put(up, 0, width, tree.depth[up]);
  if (!(size[zoom] > 0)) {
    boxes.put(zoom, 0, width, tree.depth[zoom]);
    return boxes;
  }
  const scale = width / size[zoom], pending = [zoom], places = [0];
  while (pending.length) {
    const node = pending.pop()!, first = pending.length;
    let x = places.pop()!;
    boxes.put(node, x, size[node] * scale, tree.depth[node]);
    for (let child = tree.first[node]; child >= 0; child = tree.next[child]) if (size[child] * scale >= LEAST) pending.push(child);
    largestFirst(pending, first, size);
    for (let i = first; i < pending.length; i++) {
      places.push(x);
      x += size[pending[i]] * scale;
    }
  }
  return boxes;
}

/** Sorts the nodes from `first` on. There are mostly few, for which a call of the language's own sort takes longer. */
function largestFirst(nodes: number[], first: number, size: Float64Array) {
  if (nodes.length - first > 32) {
    const sorted = nodes.splice(first).sort((a, b) => size[b] - size[a]);
    for (const node of sorted) nodes.push(node);
    return;
  }
  for (let i = first + 1; i < nodes.length; i++) {
    const node = nodes[i], own = size[node];
    let at = i;
    for (; at > first && size[nodes[at - 1]] < own; at--) nodes[at] = nodes[at - 1];
    nodes[at] = node;
  }
}
