// The colours of the boxes in the flame graph. (All others are in style.css.)

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

/** The colour of a program, or of another group of processes. */
export function groupColour(h: number): Colour {
  return hsl(45 + h * 10, 60, 74 + h * 6);
}

/** The colour of a name in brackets, which stands for something unknown. */
export function bracketColour(h: number): Colour {
  return hsl(30, 20 + h * 15, 68 + h * 8);
}

/** What was searched for and found, and what stands for frames that are missing. */
export const FOUND = hsl(306, 70, 70), MISSING = hsl(30, 30, 72);

/** The text in boxes, in either theme. */
export const BOX_TEXT = "#14181c";

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
