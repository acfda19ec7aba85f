// What the page has seen over time. Bounded.

import type { Figure, Moment, PageData } from "./model.ts";

export interface Point { time_ms: number; inuse: number | null; low: number | null; high: number | null; allocated: number | null }

/** Most points that are kept. Beyond that, every second one of the older half is dropped. */
export const MOST_POINTS = 1200;

/** Drops every second one of the older half until there are few enough. The oldest and the latest stay. */
export function thinned<T>(list: T[], most: number): T[] {
  let all = list;
  while (all.length > most) {
    const half = all.length >> 1;
    const kept = all.filter((_, i) => i >= half || i % 2 === 0);
    if (kept.length === all.length) break;
    all = kept;
  }
  return all;
}

const allocated = (figure: Figure | undefined) => figure?.exact ?? figure?.estimate ?? null;

export class History {
  points: Point[] = [];
  /** Of each group. */
  readonly groups = new Map<string, Point[]>();

  /** Adds what a server kept, and what it just sent. */
  add(data: PageData, moments: Moment[]) {
    const known = new Set(this.points.map(point => point.time_ms));
    for (const { time_ms, inuse, alloc } of moments) {
      if (!known.has(time_ms)) this.points.push({ time_ms, inuse: inuse.estimate, low: inuse.low, high: inuse.high, allocated: allocated(alloc) });
    }
    const at = (name: string) => data.values.findIndex(value => value.name === name);
    const inuse = at("inuse_space"), alloc = at("alloc_space");
    const point = (totals: Figure[]): Point => {
      const { estimate, low, high } = totals[inuse] ?? { estimate: null, low: null, high: null };
      return { time_ms: data.time_ms, inuse: estimate, low, high, allocated: allocated(totals[alloc]) };
    };
    if (!known.has(data.time_ms) && !this.points.some(it => it.time_ms === data.time_ms)) this.points.push(point(data.totals));
    this.points.sort((a, b) => a.time_ms - b.time_ms);
    this.points = thinned(this.points, MOST_POINTS);
    const names = new Set(data.groups.map(group => group.name));
    for (const name of this.groups.keys()) if (!names.has(name)) this.groups.delete(name);
    for (const group of data.groups) {
      const list = this.groups.get(group.name) ?? [];
      if (list.at(-1)?.time_ms !== data.time_ms) list.push(point(group.totals));
      this.groups.set(group.name, thinned(list, 60));
    }
  }
}

/** Bytes allocated per second before each point. NaN where that is not known. */
export function rates(points: Point[]): (number | null)[] {
  return points.map((point, i) => {
    const before = points[i - 1];
    if (!before || before.allocated === null || point.allocated === null || point.time_ms <= before.time_ms) return null;
    return Math.max(0, (1000 * (point.allocated - before.allocated)) / (point.time_ms - before.time_ms));
  });
}

/** The moment nearest to a time. */
export function nearest(times: number[], time: number): number {
  return times.reduce((best, it) => (Math.abs(it - time) < Math.abs(best - time) ? it : best), times[0] ?? 0);
}
