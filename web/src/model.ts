// The data of a page as it arrives, and as the page uses it.

import type { Origin } from "./colours.ts";

export interface Figure { estimate: number | null; low: number | null; high: number | null; exact?: number }
export interface ValueInfo { name: string; title: string; unit: string }
/** Where resident memory is: all of it in bytes, its growth, what is in no known heap, the sum of its parts, and what of the heap is in use. */
export interface Resident { bytes: number; growth_per_minute?: number | null; not_seen?: number | null; parts: string; heap: string }
export interface Group { name: string; processes: number; totals: Figure[]; resident: Resident | null }
export interface Process {
  pid: number; comm: string; group: string; count: number; hook: string | null; not_inline: string | null;
  coverage: number; ended: boolean; not_hooked: number; allocators: string[]; totals: Figure[]; resident: Resident | null;
}
/** A function that grows: of which program (empty: of all), as it is shown and in full, how fast, or how much it keeps, and why that is suspected. */
export interface Growing { program: string; name: string; full_name: string; how_much: string; why: string }
export interface Lifetimes { median: number | null; temporary: number; curve?: [number, number][] }

/** `home`: the module, where another function has the same name. */
interface WireFunctions { name: number[]; home: number[]; short: number[]; allocator: number[] }
/** `rank`: how well a frame titles a stack. 0: the program's, 1: a library's or a runtime's, 2: `main`, 3: a wrapper of an allocator, 4: start-up. */
interface WireFrames { function: number[]; file: number[]; line: number[]; module: number[]; inlined: number[]; rank: number[]; runtime: number[] }
interface WireStacks { id: number[]; group: number[]; cut: number[]; shared: number[]; own: number[]; calls: number[] }
interface WireSheet { strings: string[]; functions: WireFunctions; frames: WireFrames; stacks: WireStacks }
/** Intervals and lifetimes of large boxes that several stacks share. `of` tells sets of stacks apart, `low` and `high` have a list for each value. */
export interface WireBoxes { of: number[]; low: (number | null)[][]; high: (number | null)[][]; lifetimes: ([number | null, number] | null)[] }
interface WireColumn { estimate: number[]; low: (number | null)[]; high: (number | null)[]; samples: number[] }

export interface PageData extends WireSheet {
  version: string; host: string; subject: string; started_ms: number; time_ms: number; duration_seconds: number;
  interval: number; criterion: string; confidence: number; live: boolean; values: ValueInfo[]; active: number;
  totals: Figure[]; groups: Group[]; targets: number; processes: Process[]; growing: Growing[] | null; remarks: string[]; counters: Record<string, number>;
  left_out: number; columns: WireColumn[]; sizes: { smallest: number[]; largest: number[] };
  lifetimes: (Lifetimes | null)[]; boxes: WireBoxes;
}

type Ends = [number | null, number | null, number | null];
export interface Change { before: Ends; after: Ends; change: Ends; q: number | null; significant: boolean }
export interface GrowthData extends WireSheet {
  from_ms: number; to_ms: number; confidence: number; false_discovery_rate: number; total: Change;
  notes: string[]; groups: string[]; rows: Change[];
}

export interface KeptData extends WireSheet {
  from_ms: number; to_ms: number; confidence: number; total: Figure; allocated: number | null; notes: string[]; groups: string[]; left_out: number; column: WireColumn;
}

/** What the server remembers, as columns. `after_gap`: 1 where samples are missing before. */
export interface HistoryData {
  time_ms: number[]; after_gap: number[]; inuse: (number | null)[]; low: (number | null)[]; high: (number | null)[]; alloc_per_second: (number | null)[];
  programs: { comm: string; inuse: (number | null)[] }[];
}
export interface Serving { probe_seconds: number | null; daemon_cpu_seconds: number; duration_seconds: number }
export interface LiveData { profile: PageData; moments: number[]; serving: Serving | null; formats: [string, string][] }
export interface StaticData { profile: PageData; report: string; growth?: GrowthData }

/** A figure of every stack. `low` is NaN where no interval is honest. */
export interface Column {
  info: ValueInfo;
  estimate: Float64Array; low: Float64Array; high: Float64Array; samples: Float64Array;
}

/** Which frames are shown: the program's own; those of libraries, too; all, with those of start-up. */
export type FrameView = "program" | "libraries" | "all";

/** By `rank`. */
const ORIGINS: Origin[] = ["program", "library", "program", "library", "startup"];

/** Functions, frames and stacks. */
export class Sheet {
  /** Names that tell functions apart. */
  readonly names: string[];
  /** Names in files. */
  readonly plain: string[];
  readonly short: string[];
  readonly allocator: number[];
  readonly frames: WireFrames;
  readonly strings: string[];
  readonly count: number;
  readonly id: number[];
  readonly group: number[];
  readonly cut: number[];
  /** Where the frames of a stack begin in `path`, outermost first. */
  private readonly start: Int32Array;
  private readonly path: Int32Array;
  /** The same of the frames that are shown. */
  private readonly shownStart: Int32Array;
  private readonly shownPath: Int32Array;
  /** The first frame of each function. */
  private readonly frameOf: Int32Array;

  constructor(wire: WireSheet, readonly groups: string[], readonly view: FrameView) {
    const { strings, functions, frames, stacks } = wire;
    this.strings = strings;
    this.plain = functions.name.map(text => strings[text]);
    this.names = this.plain.map((name, i) => (functions.home[i] ? `${name} (${strings[functions.home[i]]})` : name));
    this.short = functions.short.map(text => strings[text]);
    this.allocator = functions.allocator;
    this.frames = frames;
    this.frameOf = new Int32Array(functions.name.length);
    for (let frame = frames.function.length - 1; frame >= 0; frame--) this.frameOf[frames.function[frame]] = frame;
    this.id = stacks.id;
    this.group = stacks.group;
    this.cut = stacks.cut;
    this.count = stacks.id.length;
    let total = 0;
    for (let i = 0; i < this.count; i++) total += stacks.shared[i] + stacks.own[i];
    this.start = new Int32Array(this.count + 1);
    this.path = new Int32Array(total);
    let at = 0, next = 0, before = 0;
    for (let i = 0; i < this.count; i++) {
      this.start[i] = at;
      for (let k = 0; k < stacks.shared[i]; k++) this.path[at++] = this.path[before + k];
      for (let k = 0; k < stacks.own[i]; k++) this.path[at++] = stacks.calls[next++];
      before = this.start[i];
    }
    this.start[this.count] = at;
    this.shownStart = view === "all" ? this.start : new Int32Array(this.count + 1);
    this.shownPath = view === "all" ? this.path : new Int32Array(total);
    if (view !== "all") {
      let end = 0;
      for (let i = 0; i < this.count; i++) {
        this.shownStart[i] = end;
        for (const frame of this.selected(this.allFramesOf(i))) this.shownPath[end++] = frame;
      }
      this.shownStart[this.count] = end;
    }
  }

  /** The program's own frames of a stack, those of libraries if it has none; or all but those of start-up. `frames`: outermost first. The daemon selects
   * frames for its boxes by the same rules. */
  private selected(frames: Int32Array): Int32Array {
    const { rank } = this.frames;
    let best = 4;
    for (const frame of frames) best = Math.min(best, rank[frame]);
    if (this.view === "libraries") return best > 2 ? frames : frames.filter(frame => rank[frame] <= 3);
    let innermost = frames.length - 1;
    while (innermost > 0 && rank[frames[innermost]] !== best) innermost--;
    const isShown = (frame: number) => (best === 0 ? rank[frame] === 0 || rank[frame] === 2 : best <= 2 ? rank[frame] <= 2 : true);
    return frames.subarray(0, innermost + 1).filter(isShown);
  }

  /** The frames of a stack that are shown, outermost first. */
  framesOf(stack: number): Int32Array {
    return this.shownPath.subarray(this.shownStart[stack], this.shownStart[stack + 1]);
  }

  /** All frames of a stack, outermost first. */
  allFramesOf(stack: number): Int32Array {
    return this.path.subarray(this.start[stack], this.start[stack + 1]);
  }

  /** All stacks so that those with equal outer functions follow each other. The daemon sends them in that order for all frames. */
  order(): number[] {
    const order = Array.from({ length: this.count }, (_, i) => i), of = this.frames.function;
    if (this.view === "all") return order;
    const compare = (a: number, b: number) => {
      const differs = this.group[a] - this.group[b] || Number(this.cut[a] === 0) - Number(this.cut[b] === 0);
      if (differs) return differs;
      const left = this.framesOf(a), right = this.framesOf(b), both = Math.min(left.length, right.length);
      for (let k = 0; k < both; k++) if (of[left[k]] !== of[right[k]]) return of[left[k]] - of[right[k]];
      return left.length - right.length;
    };
    return order.sort(compare);
  }

  /** Functions of a stack from the innermost one that is not the allocator's. */
  chain(stack: number): number[] {
    const functions = Array.from(this.framesOf(stack), frame => this.frames.function[frame]).reverse();
    const skipped = functions.findIndex(f => !this.allocator[f]);
    return skipped > 0 ? functions.slice(skipped) : functions;
  }

  /** The function of a name, also of one that told functions apart when a link was made; -1 if there is none. */
  find(name: string): number {
    const found = this.names.indexOf(name);
    return found < 0 ? this.plain.indexOf(name) : found;
  }

  /** File, line and module of a function's first frame. */
  placeOf(label: number): string {
    const frame = this.frameOf[label], place = this.place(frame), module = this.strings[this.frames.module[frame]];
    return module && module !== place ? [place, module].filter(text => text).join(" · ") : place;
  }

  originOf(label: number): Origin {
    const frame = this.frameOf[label], { rank, runtime } = this.frames;
    return runtime[frame] ? "runtime" : ORIGINS[rank[frame]];
  }

  /** `file:line`, or the module. */
  place(frame: number): string {
    const file = this.strings[this.frames.file[frame]], line = this.frames.line[frame];
    if (file) return line ? `${file}:${line}` : file;
    return this.strings[this.frames.module[frame]];
  }
}

function numbers(list: (number | null)[]): Float64Array {
  const all = new Float64Array(list.length);
  for (let i = 0; i < list.length; i++) all[i] = list[i] ?? NaN;
  return all;
}

/** The value that is computed here: what was allocated and freed again at once. */
export const TEMPORARY = "temporary";

function column(info: ValueInfo, { estimate, low, high, samples }: WireColumn): Column {
  return { info, estimate: numbers(estimate), low: numbers(low), high: numbers(high), samples: numbers(samples) };
}

/** The columns of a profile, with that of temporary allocations if lifetimes are known. */
export function columns(data: PageData): Column[] {
  const all = data.columns.map((it, i) => column(data.values[i], it));
  const bytes = all.find(column => column.info.name === "alloc_space");
  if (bytes && data.lifetimes.some(it => it)) {
    const estimate = bytes.estimate.map((value, i) => value * (data.lifetimes[i]?.temporary ?? 0));
    const none = new Float64Array(estimate.length).fill(NaN);
    const info = { name: TEMPORARY, title: "bytes in temporary allocations", unit: "bytes" };
    all.push({ info, estimate, low: none, high: none, samples: bytes.samples });
  }
  return all;
}

/** The column of what was allocated between two moments and kept. */
export function keptColumn(data: KeptData): Column {
  return column({ name: "kept", title: "bytes allocated between the marks and kept", unit: "bytes" }, data.column);
}

/** The column of growth, and whether each stack's growth is significant. */
export function growthColumn(data: GrowthData): Column {
  const of = (k: number) => numbers(data.rows.map(row => row.change[k]));
  const info = { name: "growth", title: "growth of bytes in use", unit: "bytes" };
  return { info, estimate: of(0), low: of(1), high: of(2), samples: new Float64Array(data.rows.length) };
}
