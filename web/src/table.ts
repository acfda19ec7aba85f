// A table that is sorted by its headings and shows more on request.

import { button, element, part, renew } from "./dom.ts";

export interface TableColumn<T> {
  key: string;
  title: string;
  /** Whether larger comes first. */
  number: boolean;
  value(row: T): number | string;
  cell(row: T): Node | string;
}

const STEP = 100;

export class Table<T> {
  readonly root = element("div", { class: "table-scroll" });
  private rows: T[] = [];
  private limit = STEP;
  private all: TableColumn<T>[] = [];

  constructor(
    private readonly caption: string, private sort: string, private readonly onSort: (sort: string) => void,
    private readonly isChosen: (row: T) => boolean = () => false,
  ) {}

  show(columns: TableColumn<T>[], rows: T[], sort: string) {
    this.all = columns;
    this.sort = sort;
    const key = sort.replace(/^-/, ""), column = columns.find(it => it.key === key) ?? columns[1];
    const sign = sort.startsWith("-") ? -1 : 1;
    const keyed = rows.map(row => ({ row, value: column.value(row) }));
    keyed.sort((a, b) => (a.value < b.value ? -sign : a.value > b.value ? sign : 0));
    this.rows = keyed.map(it => it.row);
    this.render();
  }

  private render() {
    const head = part("tr");
    for (const column of this.all) {
      const sorted = this.sort.replace(/^-/, "") === column.key;
      const down = this.sort.startsWith("-");
      const next = sorted ? (down ? column.key : `-${column.key}`) : column.number ? `-${column.key}` : column.key;
      const title = button(`${column.title}${sorted ? (down ? " ↓" : " ↑") : ""}`, () => this.onSort(next));
      const cell = part("th", { scope: "col", class: column.number ? "number" : "" }, title);
      cell.setAttribute("aria-sort", sorted ? (down ? "descending" : "ascending") : "none");
      head.append(cell);
    }
    const body = part("tbody");
    for (const row of this.rows.slice(0, this.limit)) {
      const line = part("tr", this.isChosen(row) ? { class: "chosen" } : {});
      for (const column of this.all) line.append(part("td", { class: column.number ? "number" : "text", "data-title": column.title }, column.cell(row)));
      body.append(line);
    }
    const table = part("table", {}, element("caption", { class: "sr" }, this.caption), part("thead", {}, head), body);
    const rest = this.rows.length - this.limit;
    const more = rest > 0
      ? button(`Show ${Math.min(STEP, rest)} more of ${rest.toLocaleString("en")}`, () => {
          this.limit += STEP;
          this.render();
        }, { class: "more" })
      : null;
    if (this.rows.length) renew(this.root, table, more ?? "");
    else this.root.replaceChildren(element("p", { class: "none" }, "Nothing matches."));
  }
}

/** A bar with its error bar, as shares of the widest. */
export function bar(estimate: number, low: number, high: number, most: number): HTMLElement {
  const at = (value: number) => `${Math.max(0, Math.min(100, (100 * value) / most))}%`;
  const fill = element("i");
  fill.style.width = at(estimate);
  const box = element("span", { class: "bar", "aria-hidden": "true" }, fill);
  if (most > 0 && Number.isFinite(low) && Number.isFinite(high)) {
    const whisker = element("b");
    whisker.style.left = at(low);
    whisker.style.width = `calc(${at(high)} - ${at(low)})`;
    box.append(whisker);
  }
  return box;
}
