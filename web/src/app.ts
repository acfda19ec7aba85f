// Puts the parts together: what is shown, and what happens when something is chosen.

import { details, qText } from "./details.ts";
import { columnOf, growthDoc, profileDoc, significantShare, type Doc } from "./doc.ts";
import { button, byId, element, pause } from "./dom.ts";
import { serverButtons, staticButtons } from "./export.ts";
import { FlameGraph } from "./flame.ts";
import { bytes, clock, count, figure, interval, pattern, percent, seconds, shown } from "./format.ts";
import { History, nearest } from "./history.ts";
import { refreshPause, retryPause, Server } from "./live.ts";
import type { Column, GrowthData, LiveData, PageData, StaticData } from "./model.ts";
import { fragment, parse, type State } from "./state.ts";
import { hooks, Programs, summary } from "./summary.ts";
import { bar, Table, type TableColumn } from "./table.ts";
import { Timeline } from "./timeline.ts";
import { below, functions, sandwich, sizes, FIRST_GROUP, type FunctionFigures } from "./tree.ts";

type Tab = State["tab"];

export class App {
  private state = parse(location.hash);
  private data: PageData | null = null;
  private doc: Doc | null = null;
  private growth: { data: GrowthData; doc: Doc } | null = null;
  private zoom = 0;
  private size: Float64Array = new Float64Array();
  /** What `size` is of. */
  private sized: Column | null = null;
  private served: { server: Server; history: History; timeline: Timeline; moments: number[] } | null = null;
  private paused = false;
  private readonly flame = new FlameGraph({ label: "Flame graph", icicle: true, onZoom: node => this.zoomTo(node) });
  private readonly callers = new FlameGraph({ label: "Callers", icicle: false, onZoom: () => {} });
  private readonly callees = new FlameGraph({ label: "Callees", icicle: true, onZoom: () => {} });
  private readonly programs = new Programs(byId("programs"), name => this.zoomToGroup(name));
  private readonly stacks = new Table<number>("Stacks", "-value", sort => this.set({ sort }), row => this.view().sheet.id[row] === this.state.stack);
  private readonly functions = new Table<FunctionFigures>("Functions", "-total", sort => this.sortFunctions(sort));
  private functionSort = "-total";

  constructor() {
    theme(() => {
      this.flame.redraw();
      this.served?.timeline.restyle();
      this.showTimeline();
    });
    byId<HTMLSelectElement>("value").addEventListener("change", event => this.choose((event.target as HTMLSelectElement).value));
    for (const tab of ["flame", "table", "functions"] as const) byId(`tab-${tab}`).addEventListener("click", () => this.set({ tab }));
    byId("controls").addEventListener("keydown", event => this.tabKey(event));
    byId("turn").addEventListener("click", () => this.set({ icicle: !this.state.icicle }));
    let typing = 0;
    byId<HTMLInputElement>("search").addEventListener("input", event => {
      clearTimeout(typing);
      typing = window.setTimeout(() => this.set({ search: (event.target as HTMLInputElement).value }), 120);
    });
    addEventListener("keydown", event => {
      const inField = event.target instanceof HTMLElement && event.target.closest("input, select, textarea");
      if (event.key === "/" && !inField && !event.ctrlKey && !event.metaKey) {
        event.preventDefault();
        byId("search").focus();
      }
    });
    addEventListener("hashchange", () => {
      this.state = parse(location.hash);
      void this.followMarks().then(() => this.showAll());
    });
  }

  /** The page over one profile. */
  async open(data: StaticData, text: string) {
    byId("report").textContent = data.report;
    byId("report-box").hidden = false;
    await this.take(data.profile);
    const current = () => ({ doc: this.view(), values: this.column().estimate });
    byId("export").replaceChildren(staticButtons(current, text));
    performance.mark("heapbpf-shown");
  }

  /** The page of a server: asks, shows, and asks again. */
  async serve() {
    const server = new Server(), history = new History();
    const timeline = new Timeline(byId("timeline"), byId("timeline-text"), (from, to) => this.mark(from, to));
    this.served = { server, history, timeline, moments: [] };
    byId("token-form").addEventListener("submit", event => {
      event.preventDefault();
      server.setToken(byId<HTMLInputElement>("token").value.trim());
      byId("token-form").hidden = true;
      wake();
    });
    let wake = () => {};
    const pauseButton = byId("pause");
    pauseButton.hidden = false;
    pauseButton.addEventListener("click", () => {
      this.paused = !this.paused;
      pauseButton.textContent = this.paused ? "Go on" : "Pause";
      wake();
    });
    document.addEventListener("visibilitychange", () => wake());
    for (let failures = 0; ; ) {
      const begun = performance.now();
      const waits = this.paused || document.hidden && this.data !== null;
      if (!waits) failures = await this.refresh(server, failures);
      const wait = failures ? retryPause(failures) : refreshPause((performance.now() - begun) / 1000);
      await new Promise<void>(resolve => {
        wake = resolve;
        if (!waits && byId("token-form").hidden) setTimeout(resolve, wait * 1000);
      });
    }
  }

  /** Asks once. Returns the number of failures in a row. */
  private async refresh(server: Server, failures: number): Promise<number> {
    const answer = await server.json<LiveData>("page/data");
    if ("data" in answer) {
      banner("");
      byId("connection").textContent = `live · as of ${clock(answer.data.profile.time_ms)}`;
      const { profile, moments, serving, formats } = answer.data;
      const first = this.data === null;
      this.served!.history.add(profile, moments);
      this.served!.moments = moments.map(moment => moment.time_ms);
      if (first) byId("export").replaceChildren(serverButtons(server, formats, banner));
      await this.take(profile, serving);
      if (first) await this.followMarks().then(() => this.showAll());
      return 0;
    }
    const kept = this.data ? ` This page shows what it had at ${clock(this.data.time_ms)} and comes back by itself.` : "";
    byId("connection").textContent = "no answer";
    if ("gone" in answer) banner(`heapbpf does not answer.${kept}`);
    else if (answer.status === 401) {
      byId("token-form").hidden = false;
      banner(answer.refused);
    } else banner(`heapbpf says: ${answer.refused}.${kept}`);
    return failures + 1;
  }

  private async take(data: PageData, serving: LiveData["serving"] = null) {
    const doc = await profileDoc(data);
    this.data = data;
    this.doc = doc;
    document.title = `heapbpf: ${shown(data.subject, 80)}`;
    byId("app").hidden = false;
    byId("subject").textContent = shown(data.subject, 300);
    byId("summary").replaceChildren(...summary(data, serving));
    this.programs.show(data, this.served?.history ?? null);
    byId("hooks").replaceChildren(hooks(data));
    this.values();
    await pause();
    this.showTimeline();
    this.showAll();
  }

  /** What is looked at: the profile, or growth. */
  private view(): Doc {
    return this.state.value === "growth" && this.growth ? this.growth.doc : this.doc!;
  }

  private column(): Column {
    const fallback = this.data!.values[this.data!.active].name;
    return columnOf(this.view(), this.state.value && this.state.value !== "growth" ? this.state.value : this.growth && this.state.value === "growth" ? "growth" : fallback);
  }

  private set(change: Partial<State>) {
    this.state = { ...this.state, ...change };
    const url = fragment(this.state);
    history.replaceState(null, "", url || location.pathname + location.search);
    this.showAll();
  }

  private choose(value: string) {
    if (value === "growth" && !this.growth) {
      const moments = this.served?.moments ?? [];
      if (moments.length > 1) this.mark(moments[0], moments[moments.length - 1]);
      return;
    }
    this.set({ value });
  }

  private values() {
    const select = byId<HTMLSelectElement>("value");
    const options = this.doc!.columns.map(({ info }) => element("option", { value: info.name }, info.title));
    if (this.served && this.doc!.columns.some(column => column.info.name === "inuse_space")) {
      options.push(element("option", { value: "growth" }, "growth between the marks"));
    }
    if (select.options.length !== options.length) select.replaceChildren(...options);
  }

  private showAll() {
    if (!this.doc) return;
    const { state } = this, view = this.view(), column = this.column();
    byId<HTMLSelectElement>("value").value = column.info.name;
    const search = byId<HTMLInputElement>("search");
    if (document.activeElement !== search) search.value = state.search;
    for (const tab of ["flame", "table", "functions"] as Tab[]) {
      const chosen = tab === state.tab, box = byId(`tab-${tab}`);
      box.setAttribute("aria-selected", String(chosen));
      box.tabIndex = chosen ? 0 : -1;
    }
    const turn = byId("turn");
    turn.hidden = state.tab !== "flame" || state.of !== "";
    turn.setAttribute("aria-pressed", String(!state.icicle));
    if (this.sized !== column) {
      this.size = sizes(view.tree, view.leaf, column.estimate);
      this.sized = column;
    }
    this.zoom = state.zoom ? Math.max(0, view.hashes.indexOf(state.zoom)) : 0;
    if (state.of) this.showSandwich();
    else if (state.tab === "flame") this.showFlame(column);
    else if (state.tab === "table") this.showStacks(column);
    else this.showFunctions(column);
    this.showPath(column);
    this.showDetails();
    this.showMarks();
  }

  private place(...children: HTMLElement[]) {
    const main = byId("main");
    if (main.children.length !== children.length || children.some((child, i) => main.children[i] !== child)) main.replaceChildren(...children);
  }

  private showFlame(column: Column) {
    this.place(this.flame.root);
    this.flame.search(pattern(this.state.search));
    this.flame.turn(this.state.icicle);
    const view = this.view(), significant = significantShare(view, this.size);
    this.flame.show({ tree: view.tree, size: this.size, unit: column.info.unit, ...(significant ? { significant } : {}) }, this.zoom);
  }

  private showPath(column: Column) {
    const { tree } = this.view(), { unit, title } = column.info, path = byId("path");
    const parts: (Node | string)[] = [element("b", {}, figure(this.size[this.zoom], unit)), ` ${title}`];
    if (this.zoom) {
      const label = tree.label[this.zoom];
      parts.push(` in ${shown(tree.name(label), 200)}, ${percent(this.size[this.zoom] / this.size[0])} of all`);
      parts.push(button("Show all", () => this.set({ zoom: 0 })));
      if (label >= 0) parts.push(button("Callers and callees", () => this.set({ of: tree.name(label) })));
    }
    if (this.state.of) parts.push(` · callers and callees of ${shown(this.state.of, 200)}`, button("Back", () => this.set({ of: "" })));
    const searched = pattern(this.state.search);
    if (searched) {
      const found = matched(this.view(), this.size, searched);
      parts.push(` · matches: ${figure(found, unit)}, ${percent(found / this.size[0])}`);
    }
    if (this.state.value === "growth" && this.growth) parts.push(` · ${growthText(this.growth.data)}`);
    path.replaceChildren(...parts);
  }

  private showStacks(column: Column) {
    const view = this.view(), { sheet, changes, lifetimes } = view, { unit } = column.info;
    const inside = this.zoom ? below(view.tree, this.zoom) : null, searched = pattern(this.state.search);
    const hits = searched ? sheet.names.map(name => searched.test(name)) : null;
    const rows: number[] = [];
    let most = 0;
    for (let stack = 0; stack < sheet.count; stack++) {
      if (inside && !inside[view.leaf[stack]]) continue;
      if (hits && !sheet.framesOf(stack).some(frame => hits[sheet.frames.function[frame]])) continue;
      rows.push(stack);
      most = Math.max(most, column.high[stack] || 0, column.estimate[stack]);
    }
    const columns: TableColumn<number>[] = [
      { key: "stack", title: "Stack", number: false, value: stack => chainName(view, stack), cell: stack => this.stackCell(view, stack) },
      {
        key: "value", title: column.info.title, number: true, value: stack => column.estimate[stack],
        cell: stack => {
          const ends = interval(known(column.low[stack]), known(column.high[stack]), unit);
          const text = element("span", { title: ends ? `95 % interval: ${ends}` : "" }, figure(column.estimate[stack], unit));
          return element("span", {}, bar(column.estimate[stack], column.low[stack], column.high[stack], most), text, ends ? element("span", { class: "sr" }, ` (${ends})`) : null);
        },
      },
    ];
    if (changes) {
      columns.push({
        key: "q", title: "Significant", number: true, value: stack => 1 - (changes[stack].q ?? 1),
        cell: stack => element("span", changes[stack].significant ? { class: "significant" } : { class: "dim" }, changes[stack].significant ? `yes, ${qText(changes[stack].q ?? 1)}` : "no"),
      });
    } else {
      columns.push({ key: "samples", title: "Samples", number: true, value: stack => column.samples[stack], cell: stack => count(column.samples[stack]) });
      for (const other of view.columns.filter(it => it !== column && /_space$/.test(it.info.name))) {
        columns.push({ key: other.info.name, title: other.info.title, number: true, value: stack => other.estimate[stack], cell: stack => figure(other.estimate[stack], other.info.unit) });
      }
      if (lifetimes?.some(it => it)) {
        columns.push({ key: "median", title: "Median lifetime", number: true, value: stack => lifetimes[stack]?.median ?? Infinity, cell: stack => medianText(view, stack) });
      }
    }
    this.stacks.show(columns, rows, this.state.sort);
    this.place(this.stacks.root);
  }

  private stackCell(view: Doc, stack: number): HTMLElement {
    const { sheet } = view, chain = sheet.chain(stack);
    const name = chain.length ? sheet.short[chain[0]] : "[no stack]";
    const rest = chain.slice(1, 12).map(f => shown(sheet.short[f], 80)).join(" ← ");
    const open = button(shown(name, 200), () => {
      this.set({ stack: sheet.id[stack] });
      byId("details").querySelector("h2")?.focus();
    }, { class: "link" });
    return element("div", {}, open, element("small", { class: "dim" }, rest));
  }

  private showFunctions(column: Column) {
    const { tree } = this.view(), searched = pattern(this.state.search), { unit } = column.info;
    const rows = functions(tree, this.size).filter(row => row.total > 0 && (!searched || searched.test(tree.name(row.label))));
    const total = this.size[0];
    const columns: TableColumn<FunctionFigures>[] = [
      { key: "name", title: "Function", number: false, value: row => tree.name(row.label), cell: row => button(shown(tree.name(row.label), 300), () => this.set({ of: tree.name(row.label) }), { class: "link" }) },
      { key: "total", title: `${column.info.title}, with callees`, number: true, value: row => row.total, cell: row => element("span", {}, bar(row.total, NaN, NaN, total), figure(row.total, unit)) },
      { key: "share", title: "Share", number: true, value: row => row.total, cell: row => percent(row.total / total) },
      { key: "self", title: "Itself", number: true, value: row => row.self, cell: row => figure(row.self, unit) },
    ];
    this.functions.show(columns, rows, this.functionSort);
    this.place(this.functions.root);
  }

  private sortFunctions(sort: string) {
    this.functionSort = sort;
    this.showFunctions(this.column());
  }

  private readonly sandwichBox = element("div", {});

  private showSandwich() {
    const view = this.view(), label = view.sheet.names.indexOf(this.state.of), { unit } = this.column().info;
    if (label < 0) {
      this.place(element("p", { class: "none" }, "This profile has no such function."));
      return;
    }
    const both = sandwich(view.tree, this.size, label, view.sheet);
    if (!this.sandwichBox.firstChild) {
      this.sandwichBox.append(element("h3", {}, "Callers"), this.callers.root, element("h3", {}, "Callees"), this.callees.root);
    }
    this.place(this.sandwichBox);
    this.callers.show({ ...both.callers, unit }, 0);
    this.callees.show({ ...both.callees, unit }, 0);
  }

  private showDetails() {
    const box = byId("details"), { sheet } = this.view();
    const stack = this.state.stack ? sheet.id.indexOf(this.state.stack) : -1;
    box.hidden = stack < 0;
    if (stack < 0) return;
    const view = this.view(), { doc } = this, here = doc ? doc.sheet.id.indexOf(this.state.stack) : -1;
    const focused = box.contains(document.activeElement);
    const sizes = doc?.sizes && here >= 0 ? { smallest: doc.sizes.smallest[here], largest: doc.sizes.largest[here] } : undefined;
    box.replaceChildren(details({
      sheet, stack, columns: view.columns, sizes, lifetimes: here >= 0 ? doc?.lifetimes?.[here] : null, growth: view.changes?.[stack],
      onClose: () => this.set({ stack: 0 }),
      onFunction: label => this.set({ of: sheet.names[label] }),
    }));
    if (focused) box.querySelector("h2")?.focus();
  }

  private zoomTo(node: number) {
    const view = this.view(), ends: number[] = [];
    for (let stack = 0; stack < view.sheet.count && ends.length < 2; stack++) if (view.leaf[stack] === node) ends.push(stack);
    // A click on the end of a single stack shows that stack.
    const isEnd = view.tree.first[node] < 0 && ends.length > 0;
    this.set({ zoom: node ? view.hashes[node] : 0, ...(isEnd ? { stack: view.sheet.id[ends[0]] } : {}) });
  }

  private zoomToGroup(name: string) {
    const { tree, sheet, hashes } = this.doc!;
    const label = FIRST_GROUP - sheet.groups.indexOf(name);
    let node = tree.first[0];
    while (node >= 0 && tree.label[node] !== label) node = tree.next[node];
    const value = this.state.value === "growth" ? "" : this.state.value;
    this.set({ zoom: node > 0 ? hashes[node] : 0, of: "", value });
  }

  private tabKey(event: KeyboardEvent) {
    const tabs: Tab[] = ["flame", "table", "functions"], step = event.key === "ArrowRight" ? 1 : event.key === "ArrowLeft" ? -1 : 0;
    if (!step || !(event.target instanceof HTMLElement) || event.target.getAttribute("role") !== "tab") return;
    const tab = tabs[(tabs.indexOf(this.state.tab) + step + tabs.length) % tabs.length];
    this.set({ tab });
    byId(`tab-${tab}`).focus();
  }

  private showTimeline() {
    if (!this.served || !this.data) return;
    byId("live").hidden = false;
    this.served.timeline.show(this.served.history.points, [this.state.from, this.state.to]);
  }

  /** Marks two moments, as near to these times as the server keeps some. */
  private mark(from: number, to: number) {
    const { moments } = this.served!;
    const ends = [nearest(moments, Math.min(from, to)), nearest(moments, Math.max(from, to))];
    if (moments.length < 2) return banner("There is one moment so far: wait for the next.");
    if (ends[0] === ends[1]) {
      const at = moments.indexOf(ends[0]);
      if (at > 0) ends[0] = moments[at - 1];
      else ends[1] = moments[1];
    }
    this.state = { ...this.state, from: ends[0], to: ends[1], value: "growth", zoom: 0 };
    void this.followMarks().then(() => this.set({}));
  }

  /** Gets the growth between the marks, if it is to be shown. */
  private async followMarks() {
    const { from, to, value } = this.state;
    if (!this.served || value !== "growth" || !from || !to) return;
    if (this.growth?.data.from_ms === from && this.growth.data.to_ms === to) return;
    const answer = await this.served.server.json<GrowthData>(`page/growth?from=${from}&to=${to}`);
    if ("data" in answer) {
      this.growth = { data: answer.data, doc: await growthDoc(answer.data) };
      return;
    }
    banner("gone" in answer ? "heapbpf does not answer." : answer.refused);
    this.growth = null;
    this.state = { ...this.state, value: "" };
  }

  private showMarks() {
    if (!this.served) return;
    this.served.timeline.show(this.served.history.points, [this.state.from, this.state.to]);
    const { moments } = this.served, box = byId("marks");
    if (box.contains(document.activeElement) && document.activeElement instanceof HTMLInputElement) return;
    const range = (name: string, at: number, act: (time: number) => void) => {
      const index = Math.max(0, moments.indexOf(nearest(moments, at)));
      const input = element("input", { type: "range", min: "0", max: String(Math.max(0, moments.length - 1)), value: String(index), "aria-label": `Mark ${name}` });
      input.setAttribute("aria-valuetext", clock(moments[index]));
      input.addEventListener("change", () => act(moments[Number(input.value)]));
      return element("label", {}, `${name} ${at ? clock(at) : "–"} `, input);
    };
    const last = moments[moments.length - 1] ?? 0, first = moments[0] ?? 0;
    const { from, to } = this.state;
    const focused = box.contains(document.activeElement) ? (document.activeElement as HTMLElement).id : "";
    box.replaceChildren(
      range("A", from || first, time => this.mark(time, to || last)), range("B", to || last, time => this.mark(from || first, time)),
      button("Growth since A", () => this.mark(from || first, last), { id: "since" }),
      element("span", { class: "dim" }, "Drag over the timeline to see what grew in that time."));
    if (focused) byId(focused).focus();
  }
}

function known(n: number): number | null {
  return Number.isFinite(n) ? n : null;
}

function chainName(view: Doc, stack: number): string {
  const chain = view.sheet.chain(stack);
  return chain.length ? view.sheet.short[chain[0]] : "";
}

function medianText(view: Doc, stack: number): string {
  const it = view.lifetimes?.[stack];
  if (!it) return "";
  return it.median === null ? "not freed" : seconds(it.median);
}

/** The size of all matches. What a match is in is counted once. */
function matched(view: Doc, size: Float64Array, searched: RegExp): number {
  const { tree } = view, hit = new Map<number, boolean>(), inside = new Uint8Array(tree.count);
  let found = 0;
  for (let node = 0; node < tree.count; node++) {
    if (node && inside[tree.parent[node]]) {
      inside[node] = 1;
      continue;
    }
    const label = tree.label[node];
    let matches = hit.get(label);
    if (matches === undefined) hit.set(label, (matches = searched.test(tree.name(label))));
    if (!matches) continue;
    inside[node] = 1;
    found += size[node];
  }
  return found;
}

function growthText(data: GrowthData): string {
  const [change, low, high] = data.total.change, significant = data.rows.filter(row => row.significant).length;
  const band = low !== null && high !== null ? ` [${bytes(low)}, ${bytes(high)}]` : "";
  const stacks = significant ? `${count(significant)} ${significant === 1 ? "stack" : "stacks"} grew significantly (coloured)` : "no stack grew significantly";
  return `${clock(data.from_ms)} to ${clock(data.to_ms)}: ${bytes(change ?? 0)}${band} net; ${stacks}`;
}

function banner(text: string) {
  const box = byId("banner");
  box.hidden = text === "";
  if (box.textContent !== text) box.textContent = text;
}

/** Light or dark: as the system has it, or as it was chosen here. */
function theme(changed: () => void) {
  const system = matchMedia("(prefers-color-scheme: dark)"), box = byId("theme");
  let chosen: string | null = null;
  try {
    chosen = localStorage.getItem("heapbpf-theme");
  } catch {
    // A page from a file may have no storage.
  }
  const apply = () => {
    const dark = chosen ? chosen === "dark" : system.matches;
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    box.textContent = dark ? "Light" : "Dark";
  };
  apply();
  system.addEventListener("change", () => {
    apply();
    changed();
  });
  box.addEventListener("click", () => {
    chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("heapbpf-theme", chosen);
    } catch {
      // Then it is chosen for this view alone.
    }
    apply();
    changed();
  });
}
