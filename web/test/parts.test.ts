import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";
import { faded, GREY, growthColour, hsl, originColour, PLAIN } from "../src/colours.ts";
import { qText } from "../src/details.ts";
import { Boxes } from "../src/doc.ts";
import { csv, folded } from "../src/export.ts";
import { boxesOf } from "../src/flame.ts";
import { axisTime, bytes, figure, interval, intervalTitle, pattern, percent, seconds, shown } from "../src/format.ts";
import { History, nearest, plotted } from "../src/history.ts";
import { refreshPause, retryPause } from "../src/live.ts";
import { columns, Sheet, TEMPORARY, type FrameView, type HistoryData, type KeptData, type PageData } from "../src/model.ts";
import { Rows } from "../src/pixels.ts";
import { ends, keptText } from "../src/range.ts";
import { fragment, INITIAL, parse } from "../src/state.ts";
import { counted, lost } from "../src/summary.ts";
import { below, callTree, functions, INCOMPLETE, pathHashes, sandwich, sizes } from "../src/tree.ts";

/** Stacks by their functions, outermost first, in the order in which the daemon sends them. */
function sheet(chains: string[][], groups: string[] = ["app"], group: number[] = [], view: FrameView = "all"): Sheet {
  const names = [...new Set(chains.flat())].sort(), frames = names.map((_, i) => i);
  const zeros = names.map(() => 0);
  const calls = chains.map(chain => chain.map(name => names.indexOf(name)));
  return new Sheet({
    strings: ["", ...names],
    functions: { name: names.map((_, i) => i + 1), home: zeros, short: names.map((_, i) => i + 1), allocator: names.map(name => Number(name === "malloc")) },
    frames: { function: frames, file: zeros, line: zeros, module: zeros, inlined: zeros, rank: names.map(rankOf), runtime: names.map(name => Number(name === "lib_vm")) },
    stacks: {
      id: chains.map((_, i) => 1000 + i), group: chains.map((_, i) => group[i] ?? 0), cut: chains.map(() => 0),
      ...prefixes(calls),
    },
  }, groups, view);
}

/** `std` stands for a wrapper of an allocator, `lib` for a library. */
function rankOf(name: string): number {
  return name === "_start" ? 4 : name === "main" ? 2 : name.startsWith("lib") ? 1 : name === "malloc" || name === "std" ? 3 : 0;
}

function prefixes(calls: number[][]) {
  const shared: number[] = [], own: number[] = [], rest: number[] = [];
  calls.forEach((chain, i) => {
    const last = calls[i - 1] ?? [];
    let k = 0;
    while (k < chain.length && k < last.length && chain[k] === last[k]) k++;
    shared.push(k);
    own.push(chain.length - k);
    rest.push(...chain.slice(k));
  });
  return { shared, own, calls: rest };
}

const CHAINS = [["main", "a", "malloc"], ["main", "a", "b", "malloc"], ["main", "b", "a", "b", "malloc"], ["main", "c"]];
const WEIGHTS = Float64Array.from([10, 20, 30, 40]);

test("functions of one name in two modules are two, in files by their own name", () => {
  const zeros = [0, 0];
  const it = new Sheet({
    strings: ["", "f", "a.so", "b.so"],
    functions: { name: [1, 1], home: [2, 3], short: [1, 1], allocator: zeros },
    frames: { function: [0, 1], file: zeros, line: zeros, module: [2, 3], inlined: zeros, rank: zeros, runtime: zeros },
    stacks: { id: [1, 2], group: zeros, cut: zeros, shared: zeros, own: [1, 1], calls: [0, 1] },
  }, ["app"], "all");
  assert.deepEqual(it.names, ["f (a.so)", "f (b.so)"]);
  assert.deepEqual(["f (b.so)", "f", "g"].map(name => it.find(name)), [1, 0, -1]);
  assert.equal(callTree(it).tree.count, 3);
  assert.equal(folded({ sheet: it } as never, Float64Array.from([10, 20])), "f 10\nf 20\n");
});

test("without frames of libraries, stacks are the program's own", () => {
  const chains = [["main", "a", "lib", "b", "std", "malloc"], ["main", "a", "lib2", "b", "malloc"], ["main", "lib", "malloc"], ["main", "a", "c"]];
  const it = sheet(chains, ["app"], [], "program"), names = (stack: number) => Array.from(it.framesOf(stack), frame => it.names[it.frames.function[frame]]);
  assert.deepEqual(chains.map((_, i) => names(i)), [["main", "a", "b"], ["main", "a", "b"], ["main", "lib"], ["main", "a", "c"]]);
  assert.equal(it.allFramesOf(0).length, 6);
  const { tree, leaf } = callTree(it);
  // Equal stacks end at one node, wherever the daemon sent them.
  assert.equal(leaf[0], leaf[1]);
  assert.deepEqual(Array.from(sizes(tree, leaf, WEIGHTS)).sort((a, b) => b - a), [100, 100, 70, 40, 30, 30]);
  assert.equal(folded({ sheet: it } as never, WEIGHTS).split("\n")[0], "main;a;lib;b;std;malloc 10");
});

test("start-up is folded with frames of libraries, unless there is nothing else", () => {
  const chains = [["_start", "main", "lib", "malloc"], ["_start", "malloc"]];
  const names = (view: FrameView) => {
    const it = sheet(chains, ["app"], [], view);
    return chains.map((_, i) => Array.from(it.framesOf(i), frame => it.names[it.frames.function[frame]]).join(" "));
  };
  assert.deepEqual(names("libraries"), ["main lib malloc", "_start malloc"]);
  assert.deepEqual(names("all"), ["_start main lib malloc", "_start malloc"]);
});

test("a box has the figures of its stack, or those of its set of stacks", () => {
  const it = sheet(CHAINS), { tree, leaf } = callTree(it), nan = WEIGHTS.map(() => NaN);
  const column = { info: { name: "inuse_space", title: "", unit: "bytes" }, estimate: WEIGHTS, low: WEIGHTS.map(weight => weight - 1), high: nan, samples: WEIGHTS };
  const whole = 1000 + 1001 + 1002 + 1003;
  const boxes = new Boxes({ of: [whole], low: [[90]], high: [[110]], lifetimes: [[2, 0.5]] }, ["inuse_space"]);
  const doc = { tree, leaf, sheet: it, lifetimes: null }, node = (name: string, stack: number) => {
    let at = leaf[stack];
    while (tree.name(tree.label[at]) !== name) at = tree.parent[at];
    return at;
  };
  assert.deepEqual(boxes.of(doc, column, node("main", 0)), { low: 90, high: 110, lifetimes: { median: 2, temporary: 0.5 } });
  assert.deepEqual(boxes.of(doc, column, node("c", 3)), { low: 39, high: null, lifetimes: null });
  assert.equal(boxes.of(doc, column, node("a", 0)), null, "two stacks, of which nothing was told");
  assert.equal(boxes.of(doc, { ...column, info: { ...column.info, name: "temporary" } }, node("main", 0))?.low, null);
});

test("numbers have their units", () => {
  assert.equal(bytes(0), "0 B");
  assert.equal(bytes(1023), "0.999 KiB");
  assert.equal(bytes(-5 * 1024 * 1024), "−5.00 MiB");
  assert.equal(figure(1234.4, "count"), "1,234");
  assert.equal(percent(0.123), "12 %");
  assert.equal(seconds(0.0021), "2.10 ms");
  assert.equal(interval(null, 3, "bytes"), "");
  assert.equal(interval(3, 3, "bytes"), "exact");
  assert.deepEqual([0.5, 0.95, 0.999, 0.9999].map(intervalTitle), ["50 % interval", "95 % interval", "99.9 % interval", "99.99 % interval"]);
  assert.equal(axisTime(1.25, 0.25).length, "00:01.2".length);
  assert.equal(axisTime(90, 30).length, "00:01:30".length);
  assert.equal(axisTime(86_400 * 40, 86_400), "1970-02-10");
});

test("names are shown in one line and in their own order", () => {
  assert.equal(shown("a\u202eb\nc\u001b[31m"), "a\\u{202e}b\\u{a}c\\u{1b}[31m");
  assert.equal(shown("x".repeat(10_000)).length, 401);
  assert.equal(shown("<img src=x onerror=alert(1)>"), "<img src=x onerror=alert(1)>");
});

test("a search that is no regular expression looks for its text", () => {
  assert.ok(pattern("operator(")!.test("operator()"));
  assert.ok(pattern("^ma")!.test("MAIN"));
  assert.equal(pattern(""), null);
});

test("stacks are read back from what differs between neighbours", () => {
  const it = sheet(CHAINS);
  assert.deepEqual(CHAINS.map((_, i) => Array.from(it.framesOf(i), frame => it.names[it.frames.function[frame]])), CHAINS);
  assert.deepEqual(it.chain(1).map(f => it.names[f]), ["b", "a", "main"], "without the allocator");
});

test("a tree adds up and joins neighbours", () => {
  const it = sheet(CHAINS), { tree, leaf } = callTree(it), size = sizes(tree, leaf, WEIGHTS);
  assert.equal(size[0], 100);
  assert.equal(tree.count, 11);
  for (let node = 0; node < tree.count; node++) {
    assert.ok(tree.parent[node] < node);
    let sum = 0;
    for (let child = tree.first[node]; child >= 0; child = tree.next[child]) sum += size[child];
    assert.ok(sum <= size[node]);
  }
  assert.equal(sizes(tree, leaf, Float64Array.from([-5, 1, 1, 1]))[0], 3, "what shrank has no width");
});

test("groups and incomplete stacks are nodes of their own", () => {
  const it = sheet([["main"], ["main"]], ["one", "two (3 processes)"], [0, 1]);
  const { tree } = callTree(it);
  assert.deepEqual(Array.from({ length: tree.count }, (_, i) => tree.name(tree.label[i])), ["all", "one", "main", "two (3 processes)", "main"]);
  it.cut[1] = 1;
  assert.ok(callTree(it).tree.label.includes(INCOMPLETE));
});

test("a path's number is the same in another profile, and after processes came and went", () => {
  const one = callTree(sheet([["main", "x"], ["main", "z"]])).tree, two = callTree(sheet([["main", "a"], ["main", "z"]])).tree;
  assert.equal(pathHashes(one)[3], pathHashes(two)[3]);
  assert.notEqual(pathHashes(one)[2], pathHashes(two)[2]);
  const group = (name: string) => pathHashes(callTree(sheet([["a"], ["a"]], [name, "x"], [0, 1])).tree)[1];
  assert.equal(group("web (3 processes)"), group("web (4 processes)"));
});

test("a function counts once, however often it calls itself", () => {
  const it = sheet(CHAINS), { tree, leaf } = callTree(it), size = sizes(tree, leaf, WEIGHTS);
  const all = Object.fromEntries(functions(tree, size).map(row => [tree.name(row.label), [row.total, row.self]]));
  assert.deepEqual(all, { main: [100, 0], a: [60, 0], b: [50, 0], malloc: [60, 60], c: [40, 40] });
});

test("callers and callees of a function add up to it", () => {
  const it = sheet(CHAINS), { tree, leaf } = callTree(it), size = sizes(tree, leaf, WEIGHTS);
  const { callers, callees } = sandwich(tree, size, it.names.indexOf("b"), it);
  assert.equal(callers.size[0], 50);
  assert.equal(callees.size[0], 50);
  const children = ({ tree, size }: typeof callers, node: number) => {
    const all: Record<string, number> = {};
    for (let child = tree.first[node]; child >= 0; child = tree.next[child]) all[tree.name(tree.label[child])] = size[child];
    return all;
  };
  assert.deepEqual(children(callers, 0), { a: 20, main: 30 });
  assert.deepEqual(children(callees, 0), { malloc: 20, a: 30 });
});

test("only what can be seen is laid out", () => {
  const it = sheet(CHAINS), { tree, leaf } = callTree(it), size = sizes(tree, leaf, WEIGHTS);
  const all = boxesOf({ tree, size, unit: "bytes" }, 0, 1000);
  assert.equal(all.count, tree.count);
  const inside = below(tree, 2);
  const zoomed = boxesOf({ tree, size, unit: "bytes" }, 2, 1000);
  assert.equal(zoomed.count, 2 + inside.reduce((sum, it) => sum + it, 0));
  assert.ok(boxesOf({ tree, size, unit: "bytes" }, 0, 4).count < tree.count);
  assert.equal(boxesOf({ tree, size: new Float64Array(tree.count), unit: "bytes" }, 0, 100).count, 1, "nothing is one box");
});

test("the largest child comes first, however many there are, and boxes are used again", () => {
  const chains = Array.from({ length: 100 }, (_, i) => ["main", `f${String(i).padStart(3, "0")}`]);
  const it = sheet(chains), { tree, leaf } = callTree(it);
  const size = sizes(tree, leaf, Float64Array.from(chains, (_, i) => 1 + ((i * 37) % 100)));
  const first = boxesOf({ tree, size, unit: "bytes" }, 0, 100_000), order = Array.from(first.node.subarray(0, first.count));
  assert.equal(first.count, tree.count);
  const leaves = order.filter(node => tree.depth[node] === 2).map(node => first.x[order.indexOf(node)]);
  assert.deepEqual(leaves.toSorted((a, b) => b - a), leaves, "the last to be pushed is laid out first");
  const widths = order.filter(node => tree.depth[node] === 2).map(node => size[node]);
  assert.deepEqual(widths.toSorted((a, b) => a - b), widths);
  const again = boxesOf({ tree, size, unit: "bytes" }, leaf[0], 100, first);
  assert.ok(again === first && again.count === 3 && again.levels === 3);
});

test("boxes are pixels in all lines of their row that are in sight", () => {
  const bytes = new Uint8ClampedArray(4 * 10 * 6), red = hsl(0, 100, 50), green = hsl(120, 100, 50);
  assert.deepEqual([red, green, faded(red)], [0xff0000ff, 0xff00ff00, 0x800000ff]);
  // Three rows of four pixels with a gap of one; half of the first is out of sight, and so is all of the last.
  const rows = new Rows(bytes, 10, 6, 3, row => row * 4 - 2, row => row * 4 + 1);
  assert.deepEqual([0, 1, 2].map(row => rows.has(row)), [true, true, false]);
  rows.box(0, 0, 10, red, false);
  rows.box(1, 2.2, 5.1, green, false);
  // Narrower than a pixel: the first stays, if none prevails.
  rows.box(1, 6.1, 6.3, green, false);
  rows.box(1, 6.3, 6.4, red, false);
  rows.box(1, 7.1, 7.2, green, false);
  rows.box(1, 7.2, 7.3, red, true);
  rows.box(1, 9.9, 10, red, false);
  rows.finish();
  const text = (line: number) => Array.from(rows.pixels.subarray(line * 10, line * 10 + 10), it => (it === red ? "r" : it === green ? "g" : it ? "?" : ".")).join("");
  assert.deepEqual([0, 1, 2, 3, 4, 5].map(text), ["rrrrrrrrr.", "..........", "..gg..gr.r", "..gg..gr.r", "..gg..gr.r", ".........."]);
});

test("a link opens the same view, and nonsense is nothing", () => {
  const state = { ...INITIAL, value: "alloc_space", tab: "table" as const, zoom: 77, search: "a&b=#", stack: 2 ** 52, of: "f<int>(x)", icicle: false, from: 5, to: 9, span: 1440 };
  assert.deepEqual(parse(fragment(state)), state);
  assert.equal(fragment(INITIAL), "");
  assert.deepEqual(parse("#zoom=-1&stack=1e99&tab=<x>&sort=;;&from=NaN&span=7"), INITIAL);
});

test("temporary allocations are a share of what was allocated", () => {
  const data = {
    values: [{ name: "alloc_space", title: "bytes allocated", unit: "bytes" }],
    columns: [{ estimate: [100, 50], low: [90, null], high: [120, null], samples: [3, 1] }],
    lifetimes: [{ median: 1, temporary: 0.25 }, null],
  } as unknown as PageData;
  const [alloc, temporary] = columns(data);
  assert.ok(Number.isNaN(alloc.low[1]));
  assert.equal(temporary.info.name, TEMPORARY);
  assert.deepEqual(Array.from(temporary.estimate), [25, 0]);
});

/** Samples of a server, one every ten seconds from `start` on, with a gap before those in `gaps`. */
function samples(start: number, inuse: (number | null)[], gaps: number[] = []): HistoryData {
  const all = <T>(of: (i: number) => T) => inuse.map((_, i) => of(i));
  return {
    time_ms: all(i => start + i * 10_000), after_gap: all(i => Number(gaps.includes(i))), inuse, low: inuse, high: inuse, alloc_per_second: all(i => (i ? 7 : null)),
    programs: [{ comm: "web", inuse }],
  };
}

/** A refresh in which a program of this name has so much in use and allocated. */
function refresh(time_ms: number, inuse: number, exact: number | undefined, comm = "web"): PageData {
  const totals = [{ estimate: inuse, low: inuse, high: inuse }, { estimate: null, low: null, high: null, ...(exact === undefined ? {} : { exact }) }];
  const group = `${comm} (2 processes)`;
  return { time_ms, values: [{ name: "inuse_space" }, { name: "alloc_space" }], totals, groups: [{ name: group, totals }], processes: [{ comm, group }, { comm, group }] } as unknown as PageData;
}

test("the page goes on from what the server remembers", () => {
  const history = new History();
  assert.equal(history.missing(5), 0);
  history.addLive(refresh(29_000, 4, 100));
  history.addPast(samples(0, [1, 2, 3]), 0);
  assert.equal(history.missing(29_999), null);
  assert.equal(history.missing(30_000), 20_001);
  history.addLive(refresh(31_000, 5, 300));
  history.addLive(refresh(31_000, 5, 300));
  history.addLive(refresh(33_000, 6, undefined));
  assert.deepEqual(history.points(3_600_000).map(it => [it.time_ms, it.inuse, it.rate]),
    [[0, 1, null], [10_000, 2, 7], [20_000, 3, 7], [29_000, 4, null], [31_000, 5, 100], [33_000, 6, null]]);
  assert.deepEqual(history.points(13_000).map(it => it.time_ms), [20_000, 29_000, 31_000, 33_000]);
  assert.equal(history.rate("web (2 processes)"), null);
  assert.deepEqual(history.trend("web (2 processes)"), [1, 2, 3, 4, 5, 6]);
  assert.deepEqual(history.trend("nobody"), [null, null, null, null, null, null]);
  // What the server has by now replaces the page's own refreshes.
  history.addPast(samples(30_000, [8]), 20_001);
  assert.deepEqual(history.trend("web (2 processes)"), [1, 2, 3, 8, 5, 6]);
  history.addLive(refresh(34_000, 1, 5, "other"));
  assert.deepEqual(history.trend("other (2 processes)").slice(0, 4), [null, null, null, null], "nothing is known of another name");
  history.addPast(samples(0, [9]), 0);
  assert.equal(history.points(1e9)[0].inuse, 9);
  assert.equal(nearest([10, 20, 40], 31), 40);
});

test("gaps are gaps", () => {
  const history = new History();
  history.addPast(samples(0, [1, 2, 3, null], [0, 2]), 0);
  const [seconds, , , inuse, rate] = plotted(history.points(1e9));
  assert.deepEqual(seconds, [0, 10, 19.999, 20, 30]);
  assert.deepEqual(inuse, [1, 2, null, 3, null]);
  assert.deepEqual(rate, [null, 7, null, 7, 7]);
  history.addLive(refresh(31_000, 5, 1));
  assert.deepEqual(history.trend("web (2 processes)"), [1, 2, null, 3, null, 5]);
});

test("what a page remembers is bounded", () => {
  const history = new History();
  history.addPast(samples(0, Array.from({ length: 4001 }, (_, i) => i)), 0);
  assert.equal(history.missing(1e12), 0);
  history.addLive(refresh(40_000_001, 5, 1));
  const trend = history.trend("web (2 processes)");
  assert.ok(trend.length <= 61 && trend.length > 50, `${trend.length}`);
  assert.deepEqual(trend.slice(-2), [4000, 5]);
});

test("marks lie on moments that the server keeps, and never on one", () => {
  assert.deepEqual(ends([10, 20, 40], 38, 9), [10, 40]);
  assert.deepEqual(ends([10, 20, 40], 19, 21), [10, 20]);
  assert.deepEqual(ends([10, 20, 40], 0, 1), [10, 20]);
  assert.equal(ends([10], 0, 99), null);
});

test("what was kept is said with what it is of, and with what is not known", () => {
  const data = { from_ms: 1, to_ms: 3, total: { estimate: 2048, low: 1024, high: 3072 }, allocated: 4096, notes: ["a note"], left_out: 0 } as unknown as KeptData;
  assert.ok(keptText(data).endsWith(": of 4.00 KiB allocated, 2.00 KiB [1.00 KiB, 3.00 KiB] in use at the end; a note"));
  assert.ok(keptText({ ...data, allocated: null }).includes(": 2.00 KiB ["));
});

test("a busy or absent server is not asked more often", () => {
  assert.equal(refreshPause(0.01), 2);
  assert.equal(refreshPause(3), 12);
  assert.equal(refreshPause(60), 15);
  assert.deepEqual([1, 2, 3, 50].map(retryPause), [1, 2, 4, 10]);
});

test("losses are told with what they are of", () => {
  assert.deepEqual(lost({ hits: 100, lost_ring_full: 3, lost_in_flight: 9, lost_abandoned: 1 }), { lost: 4, hits: 100 });
});

test("a q-value has no digits that mean nothing", () => {
  assert.equal(qText(0), "q < 0.000001");
  assert.equal(qText(0.0123), "q = 0.012");
});

test("files hold every stack", () => {
  const it = sheet(CHAINS), { tree, leaf } = callTree(it);
  const column = { info: { name: "inuse_space", title: "", unit: "bytes" }, estimate: WEIGHTS, low: WEIGHTS.map(() => NaN), high: WEIGHTS, samples: WEIGHTS };
  const doc = { sheet: it, tree, leaf, hashes: pathHashes(tree), columns: [column], lifetimes: null, sizes: null, changes: null, boxes: new Boxes(), confidence: 0.95 };
  assert.equal(folded(doc, WEIGHTS).split("\n")[1], "main;a;b;malloc 20");
  assert.equal(csv(doc).split("\n")[4], '"app",40,,40,"c < main"');
});

test("processes are counted by the way in which they are counted", () => {
  const process = (count: number, hook: string | null) => ({ count, hook }) as PageData["processes"][number];
  const inside = process(3, "inline"), idle = process(1, null), ended = process(0, null);
  assert.deepEqual(counted({ targets: 5, processes: [inside, idle, idle, ended] }), ["5 processes", "3 from inside, 2 not counted"]);
  assert.deepEqual(counted({ targets: 3, processes: [inside, ended] }), ["3 processes", "3 from inside"]);
  assert.deepEqual(counted({ targets: 1, processes: [ended] }), ["1 process", "not counted"]);
});

/** sRGB to linear light. */
const linear = (c: number) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const channels = (colour: number) => [0, 8, 16].map(bits => linear(((colour >> bits) & 255) / 255));
const luminance = (c: number[]) => 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2];
const contrast = (a: number[], b: number[]) => {
  const [dark, light] = [luminance(a), luminance(b)].sort((a, b) => a - b);
  return (light + 0.05) / (dark + 0.05);
};
/** The colours of a theme, by the names of their variables in the style sheet. */
function variables(selector: string): Record<string, number[]> {
  const block = readFileSync("src/style.css", "utf8").split(`${selector} {`)[1].split("}")[0];
  const all = block.matchAll(/--(\w+): #(\w\w)(\w\w)(\w\w)/g);
  return Object.fromEntries(Array.from(all, ([, name, ...parts]) => [name, parts.map(part => linear(parseInt(part, 16) / 255))]));
}
/** How people see who lack no cones, or one kind of them (Machado, Oliveira, Fernandes, 2009). */
const SIGHTS = [
  [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
  [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
  [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
  [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
];
/** The smallest distance between colours of two lists, in CIELAB, for everyone. */
function distance(some: number[], others: number[]): number {
  const lab = ([r, g, b]: number[]) => {
    const f = (t: number) => (t > 0.008856 ? Math.cbrt(t) : 7.787 * t + 16 / 116);
    const x = f((0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.9505), y = f(0.2126 * r + 0.7152 * g + 0.0722 * b), z = f((0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.089);
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)];
  };
  return Math.min(...SIGHTS.flatMap(sight => {
    const seen = (colour: number) => lab(sight.map(row => Math.min(1, Math.max(0, row.reduce((sum, part, i) => sum + part * channels(colour)[i], 0)))));
    return some.flatMap(a => others.map(b => Math.hypot(...seen(a).map((part, i) => part - seen(b)[i]))));
  }));
}
const STEPS = [0, 0.25, 0.5, 0.75, 1], GROWN = [0.01, ...STEPS.slice(1)].map(growthColour);
const ORIGINS = (["program", "library", "runtime", "startup"] as const).map(origin => STEPS.map(h => originColour(origin, h)));

test("functions have the colour of their origin", () => {
  const it = sheet([["_start", "main", "a", "lib", "lib_vm", "std", "malloc"]]);
  const origin = (name: string) => it.originOf(it.names.indexOf(name));
  assert.deepEqual(["_start", "main", "a", "lib", "lib_vm", "std"].map(origin), ["startup", "program", "program", "library", "runtime", "library"]);
});

test("colours of origins and of growth differ for everyone", () => {
  ORIGINS.forEach((one, i) => ORIGINS.slice(i + 1).forEach(other => assert.ok(distance(one, other) > 8)));
  assert.ok(distance(GROWN, [PLAIN, GREY]) > 8);
  assert.ok(distance(GROWN.slice(0, 1), GROWN.slice(-1)) > 8, "a small share looks different from all");
});

test("boxes and words are legible in the light and in the dark", () => {
  // The text in boxes is #14181c in either theme.
  const text = [0x14, 0x18, 0x1c].map(c => linear(c / 255)), boxes = [...ORIGINS.flat(), ...GROWN, PLAIN, GREY];
  for (const box of boxes) assert.ok(contrast(channels(box), text) > 4.5);
  const style = readFileSync("src/style.css", "utf8"), themes = { ":root": ".significant", ':root[data-theme="dark"]': ':root[data-theme="dark"] .significant' };
  for (const [theme, significant] of Object.entries(themes)) {
    const of = variables(theme), [, ...grown] = style.split(`${significant} { color: #`)[1].match(/^(..)(..)(..)/)!;
    const words = [of.text, of.dim, of.accent, of.warn, grown.map(part => linear(parseInt(part, 16) / 255))];
    for (const ground of [of.page, of.panel]) for (const word of words) assert.ok(contrast(word, ground) > 4.5, theme);
  }
  // In the dark, a box stands out from the page.
  for (const box of boxes) assert.ok(contrast(channels(box), variables(':root[data-theme="dark"]').page) > 3);
});
