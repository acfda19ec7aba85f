// What was before: the server's samples, and the page's own refreshes since the last of them.

import type { Figure, HistoryData, PageData } from "./model.ts";

/** `rate`: bytes allocated per second since the point before. `gap`: nothing is known of the time before. */
export interface Point { time_ms: number; inuse: number | null; low: number | null; high: number | null; rate: number | null; gap: boolean }

/** Time between two samples of the server, at least. */
const EVERY_MS = 10_000;
/** Refreshes that are kept. A rate is the difference of two. */
const MOST_LIVE = 8;
/** Beyond these, everything is asked for anew: the server thins out what is old. */
const MOST_POINTS = 4000;
const MOST_PROGRAMS = 200;
/** What a small curve covers, and its points. */
const TREND_MS = 3_600_000;
const MOST_TREND = 60;

interface Level { inuse: number | null; low: number | null; high: number | null; allocated: number | null }
interface Refresh { time_ms: number; total: Level; groups: Map<string, Level> }

const UNKNOWN: Figure = { estimate: null, low: null, high: null };

function level(data: PageData, totals: Figure[]): Level {
  const at = (name: string) => totals[data.values.findIndex(value => value.name === name)] ?? UNKNOWN;
  const { estimate, low, high } = at("inuse_space"), alloc = at("alloc_space");
  return { inuse: estimate, low, high, allocated: alloc.exact ?? alloc.estimate };
}

export class History {
  private past: Point[] = [];
  /** Bytes in use by the name of processes, at the same times. */
  private programs = new Map<string, (number | null)[]>();
  private live: Refresh[] = [];
  /** The name of a group's processes, where no other group has it. */
  private names = new Map<string, string>();

  /** The time since which samples are to be asked for; null if there are no new ones. */
  missing(now_ms: number): number | null {
    const last = this.past.at(-1)?.time_ms;
    if (last === undefined || this.past.length > MOST_POINTS || this.programs.size > MOST_PROGRAMS) return 0;
    return now_ms - last < EVERY_MS ? null : last + 1;
  }

  /** Adds samples of the server since a time. */
  addPast(data: HistoryData, from: number) {
    if (from === 0) {
      this.past = [];
      this.programs.clear();
    }
    const before = this.past.length;
    data.time_ms.forEach((time_ms, i) => this.past.push({
      time_ms, inuse: data.inuse[i], low: data.low[i], high: data.high[i], rate: data.alloc_per_second[i], gap: data.after_gap[i] === 1,
    }));
    for (const { comm, inuse } of data.programs) {
      const all = this.programs.get(comm) ?? [];
      while (all.length < before) all.push(null);
      this.programs.set(comm, all.concat(inuse));
    }
  }

  /** Adds a refresh. */
  addLive(data: PageData) {
    if (this.live.at(-1)?.time_ms === data.time_ms) return;
    const groups = new Map(data.groups.map(group => [group.name, level(data, group.totals)]));
    this.live.push({ time_ms: data.time_ms, total: level(data, data.totals), groups });
    this.live.splice(0, this.live.length - MOST_LIVE);
    const groupsOf = new Map<string, Set<string>>();
    for (const { comm, group } of data.processes) groupsOf.set(comm, (groupsOf.get(comm) ?? new Set()).add(group));
    this.names.clear();
    for (const [comm, groups] of groupsOf) if (groups.size === 1) for (const group of groups) this.names.set(group, comm);
  }

  /** The points of the last `span_ms`. */
  points(span_ms: number): Point[] {
    const all = [...this.past, ...this.since(it => it.total)], end = all.at(-1)?.time_ms ?? 0;
    return all.filter(point => point.time_ms >= end - span_ms);
  }

  /** Bytes that a group allocates per second now. */
  rate(group: string): number | null {
    return this.rateOf(this.live.length - 1, it => it.groups.get(group));
  }

  /** What a group had in use during the last hour, in equal steps; null where that is not known. */
  trend(group: string): (number | null)[] {
    const series = this.programs.get(this.names.get(group) ?? "") ?? [], first = (this.past.at(-1)?.time_ms ?? 0) - TREND_MS;
    const all: (number | null)[] = [];
    this.past.forEach(({ time_ms, gap }, i) => {
      if (time_ms < first) return;
      if (gap && all.length) all.push(null);
      all.push(series[i] ?? null);
    });
    const step = Math.ceil(all.length / MOST_TREND), values: (number | null)[] = [];
    for (let at = 0; at < all.length; at += step) {
      const some = all.slice(at, at + step);
      values.push(some.includes(null) ? null : some[some.length - 1]);
    }
    return [...values, ...this.since(it => it.groups.get(group)).map(point => point.inuse)];
  }

  /** Refreshes since the last sample. */
  private since(of: (it: Refresh) => Level | undefined): Point[] {
    const last = this.past.at(-1)?.time_ms ?? 0, points: Point[] = [];
    this.live.forEach((it, i) => {
      if (it.time_ms <= last) return;
      const { inuse, low, high } = of(it) ?? { inuse: null, low: null, high: null };
      points.push({ time_ms: it.time_ms, inuse, low, high, rate: this.rateOf(i, of), gap: false });
    });
    return points;
  }

  private rateOf(i: number, of: (it: Refresh) => Level | undefined): number | null {
    const now = this.live[i], before = this.live[i - 1];
    const [after, earlier] = [now, before].map(it => (it ? of(it)?.allocated ?? null : null));
    if (after === null || earlier === null || now.time_ms <= before.time_ms) return null;
    return Math.max(0, (1000 * (after - earlier)) / (now.time_ms - before.time_ms));
  }
}

/** Columns for the plot: seconds, high, low, in use, rate. A gap has a point without figures, so that no line crosses it. */
export function plotted(points: Point[]): [number[], ...(number | null)[][]] {
  const seconds: number[] = [], columns: (number | null)[][] = [[], [], [], []];
  const add = (time_ms: number, figures: (number | null)[]) => {
    seconds.push(time_ms / 1000);
    columns.forEach((column, i) => column.push(figures[i]));
  };
  points.forEach(({ time_ms, high, low, inuse, rate, gap }, i) => {
    if (gap && i > 0) add(time_ms - 1, [null, null, null, null]);
    add(time_ms, [high, low, inuse, rate]);
  });
  return [seconds, ...columns];
}

/** The moment nearest to a time. */
export function nearest(times: number[], time: number): number {
  return times.reduce((best, it) => (Math.abs(it - time) < Math.abs(best - time) ? it : best), times[0] ?? 0);
}
