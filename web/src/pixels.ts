// Boxes in rows of one height, written as pixels: a canvas takes longer for each rectangle than this for hundreds of pixels, and
// there may be tens of thousands of boxes.

import type { Colour } from "./colours.ts";

/** Narrowest box with a gap after it, in pixels. */
const WITH_GAP = 3;

export class Rows {
  readonly pixels: Uint32Array;
  /** Of each row, where its first line in sight begins, and how many lines are in sight; 0 if none. */
  private readonly begin: Int32Array;
  private readonly lines: Int32Array;

  /** `bytes`: of the picture. Row `i` reaches from `top(i)` to `bottom(i)`, in pixels; what is outside of the picture is left out. */
  constructor(bytes: Uint8ClampedArray<ArrayBuffer>, private readonly width: number, height: number, count: number, top: (row: number) => number, bottom: (row: number) => number) {
    this.pixels = new Uint32Array(bytes.buffer, 0, width * height).fill(0);
    this.begin = new Int32Array(count);
    this.lines = new Int32Array(count);
    for (let row = 0; row < count; row++) {
      const from = Math.max(0, Math.round(top(row)));
      this.begin[row] = from * width;
      this.lines[row] = Math.max(0, Math.min(height, Math.round(bottom(row))) - from);
    }
  }

  /** Whether something of a row is in sight. */
  has(row: number): boolean {
    return this.lines[row] > 0;
  }

  /** Writes a box into the first line of its row. Of boxes narrower than a pixel, the first one in it stays, if none is to `prevail`. */
  box(row: number, left: number, right: number, colour: Colour, prevail: boolean) {
    const { pixels, width } = this, from = Math.min(Math.round(left), width - 1), begin = this.begin[row];
    let to = Math.min(Math.round(right), width);
    if (to <= from) {
      if (prevail || !pixels[begin + from]) pixels[begin + from] = colour;
      return;
    }
    if (to - from >= WITH_GAP) to--;
    if (to - from < 8) for (let at = begin + from; at < begin + to; at++) pixels[at] = colour;
    else pixels.fill(colour, begin + from, begin + to);
  }

  /** Makes all lines of each row as its first one. */
  finish() {
    const { begin, lines, width } = this;
    for (let row = 0; row < begin.length; row++) {
      for (let line = 1; line < lines[row]; line++) this.pixels.copyWithin(begin[row] + line * width, begin[row], begin[row] + width);
    }
  }
}
