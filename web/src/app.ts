// Puts the parts together: what is shown, and what happens when something is chosen.

import { boxTexts, details } from "./details.ts";
import { columnOf, growthDoc, profileDoc, significantShare, type Doc } from "./doc.ts";
import { banner, button, byId, element, painted, renew } from "./dom.ts";
import { serverButtons, staticButtons } from "./export.ts";
import { FlameGraph } from "./flame.ts";
import { afterFigure, clock, figure, pattern, percent, shown } from "./format.ts";
import { History } from "./history.ts";
import { refreshPause, retryPause, Server } from "./live.ts";
import type { Column, FrameView, GrowthData, HistoryData, LiveData, PageData, StaticData } from "./model.ts";
import { askRange, ends, growthText, isRange, RANGE_VALUES, showMarks, type Range, type RangeValue } from "./range.ts";
import { fragment, parse, type State } from "./state.ts";
import { hooks, memory, Programs, summary } from "./summary.ts";
import { Table } from "./table.ts";
import { functionColumns, stackColumns, stackRows } from "./tables.ts";
import { theme } from "./theme.ts";
import { Timeline } from "./timeline.ts";
import { FIRST_GROUP, functions, matched, pathHashes, sandwich, sizes, type FunctionFigures } from "./tree.ts";

type Tab = State["tab"];

export class App {
  private state = parse(location.hash);
  private data: PageData | null = null;
  private doc: Doc | null = null;
  /** What is shown of the time between the marks. */
  private range: Range | null = null;
  /** What grew since another profile, if the file compares two. */
  private compared: GrowthData | null = null;
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
    byId<HTMLSelectElement>("span").addEventListener("change", event => this.set({ span: Number((event.target as HTMLSelectElement).value) }));
    byId("libraries").addEventListener("click", () => this.showFrames(this.state.frames === "program" ? "libraries" : "program"));
    byId("startup").addEventListener("click", () => this.showFrames(this.state.frames === "all" ? "libraries" : "all"));
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
      if (event.key === "?" && !inField) byId<HTMLDialogElement>("keys").showModal();
    });
    addEventListener("hashchange", () => {
      const { frames } = this.state;
      this.state = parse(location.hash);
      void (frames === this.state.frames ? this.followMarks() : this.rebuild()).then(() => this.showAll());
    });
  }

  /** The page over one profile. */
  async open(data: StaticData, text: string) {
    byId("report").textContent = data.report;
    byId("report-box").hidden = false;
    this.compared = data.growth ?? null;
    if (this.compared && !this.state.value) this.state.value = "growth";
    byId("connection").textContent = "";
    await this.take(data.profile);
    const current = () => ({ doc: this.view(), column: this.column() });
    byId("export").replaceChildren(staticButtons(current, text));
    performance.mark("heapbpf-shown");
  }

  /** Makes the comparison that the file has ready to be shown. */
  private async compare() {
    const data = this.compared;
    if (data) this.range = { value: "growth", from: data.from_ms, to: data.to_ms, doc: await growthDoc(data, this.state.frames), text: growthText(data) };
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
      this.served!.history.addLive(profile);
      this.served!.moments = moments;
      if (first) byId("export").replaceChildren(serverButtons(server, formats, banner));
      await this.take(profile, serving);
      await this.catchUp(profile);
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

  /** Gets what the server has remembered since the last time. If it does not answer, the next refresh says so. */
  private async catchUp(data: PageData) {
    const { server, history } = this.served!, from = history.missing(data.time_ms);
    if (from === null) return;
    const answer = await server.json<HistoryData>(`history?from=${from}`);
    if (!("data" in answer)) return;
    history.addPast(answer.data, from);
    this.programs.show(data, history);
    this.showTimeline();
  }

  private async take(data: PageData, serving: LiveData["serving"] = null) {
    document.title = `heapbpf: ${shown(data.subject, 80)}`;
    byId("app").hidden = false;
    byId("subject").textContent = shown(data.subject, 300);
    renew(byId("summary"), ...summary(data, serving, name => this.set({ search: name })));
    this.programs.show(data, this.served?.history ?? null);
    const lines = memory(data);
    byId("memory").hidden = lines.length === 0;
    byId("memory-lines").replaceChildren(...lines);
    renew(byId("hooks"), hooks(data));
    // What is above the graph is painted before stacks are read, which takes long if there are many.
    await painted();
    await this.compare();
    const doc = await profileDoc(data, this.state.frames);
    this.data = data;
    this.doc = doc;
    this.values();
    this.showTimeline();
    this.showAll();
  }

  private showFrames(frames: FrameView) {
    // Nodes of another tree have other places.
    this.state = { ...this.state, frames, zoom: 0 };
    void this.rebuild().then(() => this.set({}));
  }

  /** Makes anew what is shown, after other frames were chosen. */
  private async rebuild() {
    if (!this.data) return;
    this.doc = await profileDoc(this.data, this.state.frames);
    this.range = null;
    await this.compare();
    await this.followMarks();
  }

  /** The range that is looked at, if it is one. */
  private shownRange(): Range | null {
    return this.range?.value === this.state.value ? this.range : null;
  }

  /** What is looked at: the profile, or a range. */
  private view(): Doc {
    return this.shownRange()?.doc ?? this.doc!;
  }

  private column(): Column {
    const { value } = this.state, usual = this.data!.values[this.data!.active].name;
    return columnOf(this.view(), value && (!isRange(value) || this.shownRange()) ? value : usual);
  }

  private set(change: Partial<State>) {
    this.state = { ...this.state, ...change };
    const url = fragment(this.state);
    history.replaceState(null, "", url || location.pathname + location.search);
    this.showAll();
  }

  private choose(value: string) {
    if (!this.served || !isRange(value)) return this.set({ value });
    const { moments } = this.served, { from, to } = this.state;
    this.mark(from || (moments[0] ?? 0), to || (moments[moments.length - 1] ?? 0), value);
  }

  private values() {
    const select = byId<HTMLSelectElement>("value");
    const options = this.doc!.columns.map(({ info }) => element("option", { value: info.name }, info.title));
    if (this.served && this.doc!.columns.some(column => column.info.name === "inuse_space")) {
      options.push(...Object.entries(RANGE_VALUES).map(([value, title]) => element("option", { value }, title)));
    }
    if (this.compared) options.push(element("option", { value: "growth" }, "growth since the first profile"));
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
    byId("libraries").setAttribute("aria-pressed", String(state.frames !== "program"));
    byId("startup").setAttribute("aria-pressed", String(state.frames === "all"));
    byId("startup").hidden = state.frames === "program";
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
    this.showTimeline();
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
    const more = (node: number) => boxTexts(view, column, node);
    this.flame.show({ tree: view.tree, hashes: view.hashes, size: this.size, unit: column.info.unit, more, ...(significant ? { significant } : {}) }, this.zoom);
  }

  private showPath(column: Column) {
    const { tree } = this.view(), { unit, title } = column.info, path = byId("path");
    const parts: (Node | string)[] = [element("b", {}, figure(this.size[this.zoom], unit)), ` ${afterFigure(title)}`];
    if (this.zoom) {
      const label = tree.label[this.zoom];
      parts.push(` in ${shown(tree.name(label), 200)}, ${percent(this.size[this.zoom] / this.size[0])} of all`);
      parts.push(button("Show all", () => this.set({ zoom: 0 })));
      if (label >= 0) parts.push(button("Callers and callees", () => this.set({ of: tree.name(label) })));
    }
    if (this.state.of) parts.push(` · callers and callees of ${shown(this.state.of, 200)}`, button("Back", () => this.set({ of: "" })));
    const searched = pattern(this.state.search);
    if (searched) {
      const found = matched(this.view().tree, this.size, searched);
      parts.push(` · matches: ${figure(found, unit)}, ${percent(found / this.size[0])}`);
    }
    const range = this.shownRange();
    if (range) parts.push(` · ${range.text}`);
    path.replaceChildren(...parts);
  }

  private showStacks(column: Column) {
    const view = this.view(), { rows, most } = stackRows(view, column, this.zoom, pattern(this.state.search));
    const open = (stack: number) => {
      this.set({ stack: view.sheet.id[stack] });
      byId("details").querySelector("h2")?.focus();
    };
    this.stacks.show(stackColumns(view, column, most, open), rows, this.state.sort);
    this.place(this.stacks.root);
  }

  private showFunctions(column: Column) {
    const view = this.view(), searched = pattern(this.state.search);
    const rows = functions(view.tree, this.size).filter(row => row.total > 0 && (!searched || searched.test(view.tree.name(row.label))));
    this.functions.show(functionColumns(view, column, this.size[0], of => this.set({ of })), rows, this.functionSort);
    this.place(this.functions.root);
  }

  private sortFunctions(sort: string) {
    this.functionSort = sort;
    this.showFunctions(this.column());
  }

  private readonly sandwichBox = element("div", {});

  private showSandwich() {
    const view = this.view(), label = view.sheet.find(this.state.of), { unit } = this.column().info;
    if (label < 0) {
      this.place(element("p", { class: "none" }, "This profile has no such function."));
      return;
    }
    const both = sandwich(view.tree, this.size, label, view.sheet);
    if (!this.sandwichBox.firstChild) {
      this.sandwichBox.append(element("h3", {}, "Callers"), this.callers.root, element("h3", {}, "Callees"), this.callees.root);
    }
    this.place(this.sandwichBox);
    this.callers.show({ ...both.callers, hashes: pathHashes(both.callers.tree), unit }, 0);
    this.callees.show({ ...both.callees, hashes: pathHashes(both.callees.tree), unit }, 0);
  }

  private showDetails() {
    const box = byId("details"), { sheet } = this.view();
    const stack = this.state.stack ? sheet.id.indexOf(this.state.stack) : -1;
    box.hidden = stack < 0;
    if (stack < 0) return;
    const view = this.view(), { doc } = this, here = doc ? doc.sheet.id.indexOf(this.state.stack) : -1;
    const sizes = doc?.sizes && here >= 0 ? { smallest: doc.sizes.smallest[here], largest: doc.sizes.largest[here] } : undefined;
    renew(box, details({
      sheet, stack, columns: view.columns, confidence: view.confidence, sizes, lifetimes: here >= 0 ? doc?.lifetimes?.[here] : null, growth: view.changes?.[stack],
      onClose: () => this.set({ stack: 0 }),
      onFunction: label => this.set({ of: sheet.names[label] }),
    }));
  }

  private zoomTo(node: number) {
    const view = this.view(), ends: number[] = [];
    for (let stack = 0; stack < view.sheet.count && ends.length < 2; stack++) if (view.leaf[stack] === node) ends.push(stack);
    // A click on the end of a single stack shows that stack.
    const isEnd = view.tree.first[node] < 0 && ends.length > 0;
    this.set({ zoom: node ? view.hashes[node] : 0, ...(isEnd ? { stack: view.sheet.id[ends[0]] } : {}) });
  }

  private zoomToGroup(name: string) {
    if (!this.doc) return;
    const { tree, sheet, hashes } = this.doc;
    const label = FIRST_GROUP - sheet.groups.indexOf(name);
    let node = tree.first[0];
    while (node >= 0 && tree.label[node] !== label) node = tree.next[node];
    const value = isRange(this.state.value) ? "" : this.state.value;
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
    const { timeline, history, moments } = this.served, { from, to, span } = this.state;
    byId<HTMLSelectElement>("span").value = String(span);
    timeline.show(history.points(span * 60_000), [from, to]);
    showMarks(moments, from, to, (from, to, value) => this.mark(from, to, value));
  }

  /** Marks two moments, as near to these times as the server keeps some, and shows a value of the time between them. */
  private mark(from: number, to: number, value: RangeValue = isRange(this.state.value) ? this.state.value : "kept") {
    const marks = ends(this.served?.moments ?? [], from, to);
    if (!marks) return banner("There is one moment so far: wait for the next.");
    this.state = { ...this.state, from: marks[0], to: marks[1], value, zoom: 0 };
    void this.followMarks().then(() => this.set({}));
  }

  /** Gets what is to be shown of the time between the marks. */
  private async followMarks() {
    const { from, to, value } = this.state, { range } = this;
    if (!this.served || !isRange(value) || !from || !to) return;
    if (range?.value === value && range.from === from && range.to === to) return;
    const answer = await askRange(this.served.server, value, from, to, this.state.frames);
    if (!("failed" in answer)) {
      this.range = answer;
      return;
    }
    banner(answer.failed);
    this.range = null;
    this.state = { ...this.state, value: "" };
  }
}
