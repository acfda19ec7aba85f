// What a link opens again.

import type { FrameView } from "./model.ts";

export interface State {
  /** Value: `inuse_space`, …, `temporary`, `growth`. */
  value: string;
  tab: "flame" | "table" | "functions";
  /** The root at the top. */
  icicle: boolean;
  /** Hash of the path of the node that fills the width; 0: all. */
  zoom: number;
  search: string;
  /** Which frames are shown. */
  frames: FrameView;
  /** Id of the stack whose details are shown. */
  stack: number;
  /** The function of the sandwich view. */
  of: string;
  sort: string;
  /** Marks, as Unix time in milliseconds. */
  from: number;
  to: number;
  /** Minutes that the timeline shows. */
  span: number;
}

const SPANS = [10, 60, 360, 1440];

export const INITIAL: State = {
  value: "", tab: "flame", icicle: true, zoom: 0, search: "", frames: "program", stack: 0, of: "", sort: "-value", from: 0, to: 0, span: 60,
};

/** The state of a fragment. What is not understood is as if it were not there. */
export function parse(fragment: string): State {
  const pairs = new URLSearchParams(fragment.replace(/^#/, "")), state = { ...INITIAL };
  const whole = (key: string) => {
    const number = Number(pairs.get(key));
    return Number.isSafeInteger(number) && number > 0 ? number : 0;
  };
  state.value = (pairs.get("value") ?? "").slice(0, 40);
  const tab = pairs.get("tab");
  if (tab === "table" || tab === "functions") state.tab = tab;
  state.icicle = pairs.get("root") !== "below";
  state.zoom = whole("zoom");
  const frames = pairs.get("frames");
  if (frames === "libraries" || frames === "all") state.frames = frames;
  state.search = (pairs.get("search") ?? "").slice(0, 1000);
  state.stack = whole("stack");
  state.of = (pairs.get("of") ?? "").slice(0, 20000);
  state.sort = /^-?[a-z_]{1,20}$/.test(pairs.get("sort") ?? "") ? pairs.get("sort")! : INITIAL.sort;
  state.from = whole("from");
  state.to = whole("to");
  if (SPANS.includes(whole("span"))) state.span = whole("span");
  return state;
}

/** The fragment of a state, without what is as usual. */
export function fragment({ icicle, ...state }: State): string {
  const pairs = Object.entries(state).filter(([key, value]) => value !== INITIAL[key as keyof State]).map(([key, value]) => [key, String(value)]);
  const text = new URLSearchParams(icicle ? pairs : [...pairs, ["root", "below"]]).toString();
  return text && `#${text}`;
}
