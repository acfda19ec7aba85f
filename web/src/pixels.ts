// Boxes in rows of one height, written as pixels: a canvas takes longer for each rectangle than this for hundreds of pixels, and
// there may be tens of thousands of boxes.

/** Red, green, blue and alpha in one number, as they lie in memory: the first byte is the lowest, in every browser there is. */
export type Colour = number;

/** A colour from its hue in degrees, and its saturation and lightness in percent, as in CSS. */
export function hsl(hue: number, saturation: number, lightness: number): Colour {
  const light = lightness / 100, reach = (saturation / 100) * Math.min(light, 1 - light);
  const part = (n: number) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (light - reach * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return (0xff000000 | (part(4) << 16) | (part(8) << 8) | part(0)) >>> 0;
}

/** Whose code a function is. */
export type Origin = "program" | "library" | "runtime" | "startup";

/** The colour of a function by its origin: green, blue, amber, grey. `h`, from 0 to 1, tells neighbours apart. */
export function originColour(origin: Origin, h: number): Colour {
  switch (origin) {
    case "library": return hsl(212 + h * 24, 58 + h * 12, 72 + h * 6);
    case "runtime": return hsl(38 + h * 10, 72 + h * 8, 58 + h * 4);
    case "startup": return hsl(217, 8 + h * 2, 72 + h * 3);
    default: return hsl(95 + h * 70, 42 + h * 18, 62 + h * 14);
  }
}

/** What is no function, and what did not grow. */
export const GREY = hsl(217, 10, 75), PLAIN = hsl(216, 10, 81);

/** The colour of a function of which this share grew significantly. */
export function growthColour(share: number): Colour {
  return share > 0 ? hsl(12, 40 + share * 45, 78 - share * 18) : PLAIN;
}

/** The same colour, half transparent. */
export function faded(colour: Colour): Colour {
  return ((colour & 0xffffff) | 0x80000000) >>> 0;
}

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
